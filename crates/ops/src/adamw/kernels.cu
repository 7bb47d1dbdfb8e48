// AdamW.

struct AdamW {
    f32 decay_factor; // 1 - lr * weight decay
    f32 step; // lr / (1 - beta1^t)
    f32 beta1, beta2, one_minus_beta1, one_minus_beta2, eps;
    f32 bias_correction2_sqrt;

    __device__ __forceinline__ void operator()(f32& p, f32 (&state)[2], f32 g) const {
        f32 &m = state[0], &v = state[1];
        m = fmaf(beta1, m, one_minus_beta1 * g);
        v = fmaf(beta2, v, one_minus_beta2 * g * g);
        p = p * decay_factor - step * (m / (sqrtf(v) / bias_correction2_sqrt + eps));
    }
};

// p, m, v, grad [len]; working [len] or null. decision[4] or null: {sum of squares, norm, clip, skip}.
extern "C" __global__ void update(
    f32* p, REAL* working, const f32* grad, f32* m, f32* v, u64 len, const f64* decision, f32 clip,
    f32 decay_factor, f32 step, f32 beta1, f32 beta2, f32 one_minus_beta1, f32 one_minus_beta2, f32 eps,
    f32 bias_correction2_sqrt
) {
    const AdamW formula = {
        decay_factor, step, beta1, beta2, one_minus_beta1, one_minus_beta2, eps, bias_correction2_sqrt
    };
    update_range<1>(Range<2>{p, working, grad, {m, v}, len}, decision, clip, formula);
}

extern "C" __global__ void update_vec(
    f32* p, REAL* working, const f32* grad, f32* m, f32* v, u64 len, const f64* decision, f32 clip,
    f32 decay_factor, f32 step, f32 beta1, f32 beta2, f32 one_minus_beta1, f32 one_minus_beta2, f32 eps,
    f32 bias_correction2_sqrt
) {
    const AdamW formula = {
        decay_factor, step, beta1, beta2, one_minus_beta1, one_minus_beta2, eps, bias_correction2_sqrt
    };
    update_range<Vec16<f32>::N>(Range<2>{p, working, grad, {m, v}, len}, decision, clip, formula);
}
