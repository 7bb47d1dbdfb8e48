// AdamW.

struct AdamW {
    f32 keep; // 1 - lr * weight decay
    f32 step; // lr / (1 - beta1^t)
    f32 beta1, beta2, complement1, complement2, eps;
    f32 correction2_sqrt;

    __device__ __forceinline__ void operator()(f32& p, f32 (&state)[2], f32 g) const {
        f32 &m = state[0], &v = state[1];
        m = fmaf(beta1, m, complement1 * g);
        v = fmaf(beta2, v, complement2 * g * g);
        p = p * keep - step * (m / (sqrtf(v) / correction2_sqrt + eps));
    }
};

// p, m, v, grad [len]; working [len] or null. verdict[4] or null: {sum of squares, norm, clip, skip}.
extern "C" __global__ void update(
    f32* p, REAL* working, const f32* grad, f32* m, f32* v, u64 len, const f64* verdict, f32 clip,
    f32 keep, f32 step, f32 beta1, f32 beta2, f32 complement1, f32 complement2, f32 eps, f32 correction2_sqrt
) {
    const AdamW formula = {keep, step, beta1, beta2, complement1, complement2, eps, correction2_sqrt};
    update_range<1>(Range<2>{p, working, grad, {m, v}, len}, verdict, clip, formula);
}

extern "C" __global__ void update_packs(
    f32* p, REAL* working, const f32* grad, f32* m, f32* v, u64 len, const f64* verdict, f32 clip,
    f32 keep, f32 step, f32 beta1, f32 beta2, f32 complement1, f32 complement2, f32 eps, f32 correction2_sqrt
) {
    const AdamW formula = {keep, step, beta1, beta2, complement1, complement2, eps, correction2_sqrt};
    update_range<Pack<f32>::N>(Range<2>{p, working, grad, {m, v}, len}, verdict, clip, formula);
}
