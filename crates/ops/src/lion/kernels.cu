// Lion. Rounded as on the CPU.

struct Lion {
    f32 keep; // 1 - lr * weight decay
    f32 lr, beta1, beta2, complement1, complement2;

    __device__ __forceinline__ void operator()(f32& p, f32 (&state)[1], f32 g) const {
        f32& m = state[0];
        const f32 direction = fmaf(g, complement1, __fmul_rn(m, beta1));
        // A NaN stays one.
        const f32 sign = direction == 0.0f || isnan(direction) ? direction : copysignf(1.0f, direction);
        p = fmaf(sign, -lr, __fmul_rn(p, keep));
        m = fmaf(g, complement2, __fmul_rn(m, beta2));
    }
};

// p, grad, m [len]; working [len] or null. verdict[4] or null: {sum of squares, norm, clip, skip}.
extern "C" __global__ void update(
    f32* p, REAL* working, const f32* grad, f32* m, u64 len, const f64* verdict, f32 clip,
    f32 keep, f32 lr, f32 beta1, f32 beta2, f32 complement1, f32 complement2
) {
    const Lion formula = {keep, lr, beta1, beta2, complement1, complement2};
    update_range<1>(Range<1>{p, working, grad, {m}, len}, verdict, clip, formula);
}

extern "C" __global__ void update_packs(
    f32* p, REAL* working, const f32* grad, f32* m, u64 len, const f64* verdict, f32 clip,
    f32 keep, f32 lr, f32 beta1, f32 beta2, f32 complement1, f32 complement2
) {
    const Lion formula = {keep, lr, beta1, beta2, complement1, complement2};
    update_range<Pack<f32>::N>(Range<1>{p, working, grad, {m}, len}, verdict, clip, formula);
}
