// SGD, with and without a momentum buffer. Rounded as on the CPU: multiply-adds are fused, except for the decay of the
// momentum.

struct Sgd {
    f32 lr, weight_decay;

    __device__ __forceinline__ void operator()(f32& p, f32 (&)[1], f32 g) const {
        p = fmaf(fmaf(p, weight_decay, g), -lr, p);
    }
};

struct SgdMomentum {
    f32 lr, weight_decay, momentum;
    bool nesterov;

    __device__ __forceinline__ void operator()(f32& p, f32 (&state)[1], f32 g) const {
        f32& b = state[0];
        g = fmaf(p, weight_decay, g);
        b = __fadd_rn(__fmul_rn(b, momentum), g);
        p = fmaf(nesterov ? fmaf(b, momentum, g) : b, -lr, p);
    }
};

// Parameters, gradients and states are those of Range. decision[4] or null: {sum of squares, norm, clip, skip}.
extern "C" __global__ void update(
    Param* p, ParamRest* rest, const Grad* grad, u64 len, u32 first, u64 p_key, const f64* decision, f32 clip, f32 lr,
    f32 weight_decay
) {
    const Range<0> range = {p, rest, grad, {nullptr}, {nullptr}, len, first, {p_key}, {true}};
    update_range<1>(range, decision, clip, Sgd{lr, weight_decay});
}

extern "C" __global__ void update_vec(
    Param* p, ParamRest* rest, const Grad* grad, u64 len, u32 first, u64 p_key, const f64* decision, f32 clip, f32 lr,
    f32 weight_decay
) {
    const Range<0> range = {p, rest, grad, {nullptr}, {nullptr}, len, first, {p_key}, {true}};
    update_range<Vec16<f32>::N>(range, decision, clip, Sgd{lr, weight_decay});
}

extern "C" __global__ void update_momentum(
    Param* p, ParamRest* rest, const Grad* grad, State* b, f32* b_absmax, u64 len, u32 first, u64 p_key, u64 b_key,
    const f64* decision, f32 clip, f32 lr, f32 weight_decay, f32 momentum, u32 nesterov
) {
    const SgdMomentum formula = {lr, weight_decay, momentum, nesterov != 0};
    const Range<1> range = {p, rest, grad, {b}, {b_absmax}, len, first, {p_key, b_key}, {true}};
    update_range<1>(range, decision, clip, formula);
}

extern "C" __global__ void update_momentum_vec(
    Param* p, ParamRest* rest, const Grad* grad, State* b, f32* b_absmax, u64 len, u32 first, u64 p_key, u64 b_key,
    const f64* decision, f32 clip, f32 lr, f32 weight_decay, f32 momentum, u32 nesterov
) {
    const SgdMomentum formula = {lr, weight_decay, momentum, nesterov != 0};
    const Range<1> range = {p, rest, grad, {b}, {b_absmax}, len, first, {p_key, b_key}, {true}};
    update_range<Vec16<f32>::N>(range, decision, clip, formula);
}
