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

// Parameters, gradients and states are those of Range. decision[4] or null: {sum of squares, norm, clip, skip}.
extern "C" __global__ void update(
    Param* p, ParamRest* rest, const Grad* grad, State* m, f32* m_absmax, u64 len, u32 first, u64 p_key, u64 m_key,
    const f64* decision, f32 clip, f32 decay_factor, f32 lr, f32 beta1, f32 beta2, f32 one_minus_beta1,
    f32 one_minus_beta2
) {
    const Lion formula = {decay_factor, lr, beta1, beta2, one_minus_beta1, one_minus_beta2};
    const Range<1> range = {p, rest, grad, {m}, {m_absmax}, len, first, {p_key, m_key}, {true}};
    update_range<1>(range, decision, clip, formula);
}

extern "C" __global__ void update_vec(
    Param* p, ParamRest* rest, const Grad* grad, State* m, f32* m_absmax, u64 len, u32 first, u64 p_key, u64 m_key,
    const f64* decision, f32 clip, f32 decay_factor, f32 lr, f32 beta1, f32 beta2, f32 one_minus_beta1,
    f32 one_minus_beta2
) {
    const Lion formula = {decay_factor, lr, beta1, beta2, one_minus_beta1, one_minus_beta2};
    const Range<1> range = {p, rest, grad, {m}, {m_absmax}, len, first, {p_key, m_key}, {true}};
    update_range<Vec16<f32>::N>(range, decision, clip, formula);
}
