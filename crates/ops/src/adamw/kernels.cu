// AdamW.

struct AdamW {
    f32 decay_factor; // 1 - lr * weight decay
    f32 step; // lr / (1 - beta1^t)
    f32 beta1, beta2, one_minus_beta1, one_minus_beta2, eps;
    f32 bias_correction2_sqrt;

    // Every rounding is explicit, so that all formats of states give the same bits.
    __device__ __forceinline__ void operator()(f32& p, f32 (&state)[2], f32 g) const {
        f32 &m = state[0], &v = state[1];
        m = fmaf(beta1, m, __fmul_rn(one_minus_beta1, g));
        v = fmaf(beta2, v, __fmul_rn(__fmul_rn(one_minus_beta2, g), g));
        const f32 denominator = __fadd_rn(__fdiv_rn(__fsqrt_rn(v), bias_correction2_sqrt), eps);
        p = fmaf(p, decay_factor, -__fmul_rn(step, __fdiv_rn(m, denominator)));
    }
};

// Parameters, gradients and states are those of Range. decision[4] or null: {sum of squares, norm, clip, skip}.
extern "C" __global__ void update(
    Param* p, ParamRest* rest, const Grad* grad, State* m, f32* m_absmax, State* v, f32* v_absmax, u64 len, u32 first,
    u64 p_key, u64 m_key, u64 v_key, const f64* decision, f32 clip, f32 decay_factor, f32 step, f32 beta1, f32 beta2,
    f32 one_minus_beta1, f32 one_minus_beta2, f32 eps, f32 bias_correction2_sqrt
) {
    const AdamW formula = {
        decay_factor, step, beta1, beta2, one_minus_beta1, one_minus_beta2, eps, bias_correction2_sqrt
    };
    const Range<2> range = {
        p, rest, grad, {m, v}, {m_absmax, v_absmax}, len, first, {p_key, m_key, v_key}, {true, false}
    };
    update_range<1>(range, decision, clip, formula);
}

extern "C" __global__ void update_vec(
    Param* p, ParamRest* rest, const Grad* grad, State* m, f32* m_absmax, State* v, f32* v_absmax, u64 len, u32 first,
    u64 p_key, u64 m_key, u64 v_key, const f64* decision, f32 clip, f32 decay_factor, f32 step, f32 beta1, f32 beta2,
    f32 one_minus_beta1, f32 one_minus_beta2, f32 eps, f32 bias_correction2_sqrt
) {
    const AdamW formula = {
        decay_factor, step, beta1, beta2, one_minus_beta1, one_minus_beta2, eps, bias_correction2_sqrt
    };
    const Range<2> range = {
        p, rest, grad, {m, v}, {m_absmax, v_absmax}, len, first, {p_key, m_key, v_key}, {true, false}
    };
    update_range<Vec16<f32>::N>(range, decision, clip, formula);
}
