// Lion, with the same roundings as on the CPU.

struct Lion {
    f32 decay_factor; // 1 - lr * weight decay
    f32 lr, beta1, beta2, one_minus_beta1, one_minus_beta2;

    __device__ __forceinline__ void operator()(f32& p, f32 (&state)[1], f32 g) const {
        f32& m = state[0];
        const f32 direction = fmaf(g, one_minus_beta1, __fmul_rn(m, beta1));
        // NaN stays NaN.
        const f32 sign = direction == 0.0f || isnan(direction) ? direction : copysignf(1.0f, direction);
        p = fmaf(sign, -lr, __fmul_rn(p, decay_factor));
        m = fmaf(g, one_minus_beta2, __fmul_rn(m, beta2));
    }
};

// p, grad, m [len]; working [len] or null. decision[4] or null: {sum of squares, norm, clip, skip}.
extern "C" __global__ void update(
    f32* p, REAL* working, const f32* grad, f32* m, u64 len, const f64* decision, f32 clip,
    f32 decay_factor, f32 lr, f32 beta1, f32 beta2, f32 one_minus_beta1, f32 one_minus_beta2
) {
    const Lion formula = {decay_factor, lr, beta1, beta2, one_minus_beta1, one_minus_beta2};
    update_range<1>(Range<1>{p, working, grad, {m}, len}, decision, clip, formula);
}

extern "C" __global__ void update_vec(
    f32* p, REAL* working, const f32* grad, f32* m, u64 len, const f64* decision, f32 clip,
    f32 decay_factor, f32 lr, f32 beta1, f32 beta2, f32 one_minus_beta1, f32 one_minus_beta2
) {
    const Lion formula = {decay_factor, lr, beta1, beta2, one_minus_beta1, one_minus_beta2};
    update_range<Vec16<f32>::N>(Range<1>{p, working, grad, {m}, len}, decision, clip, formula);
}
