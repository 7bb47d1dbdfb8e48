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

// p, grad, b [len]; working [len] or null. decision[4] or null: {sum of squares, norm, clip, skip}.
extern "C" __global__ void update(
    f32* p, REAL* working, const f32* grad, u64 len, const f64* decision, f32 clip, f32 lr, f32 weight_decay
) {
    update_range<1>(Range<0>{p, working, grad, {nullptr}, len}, decision, clip, Sgd{lr, weight_decay});
}

extern "C" __global__ void update_vec(
    f32* p, REAL* working, const f32* grad, u64 len, const f64* decision, f32 clip, f32 lr, f32 weight_decay
) {
    update_range<Vec16<f32>::N>(Range<0>{p, working, grad, {nullptr}, len}, decision, clip, Sgd{lr, weight_decay});
}

extern "C" __global__ void update_momentum(
    f32* p, REAL* working, const f32* grad, f32* b, u64 len, const f64* decision, f32 clip,
    f32 lr, f32 weight_decay, f32 momentum, u32 nesterov
) {
    const SgdMomentum formula = {lr, weight_decay, momentum, nesterov != 0};
    update_range<1>(Range<1>{p, working, grad, {b}, len}, decision, clip, formula);
}

extern "C" __global__ void update_momentum_vec(
    f32* p, REAL* working, const f32* grad, f32* b, u64 len, const f64* decision, f32 clip,
    f32 lr, f32 weight_decay, f32 momentum, u32 nesterov
) {
    const SgdMomentum formula = {lr, weight_decay, momentum, nesterov != 0};
    update_range<Vec16<f32>::N>(Range<1>{p, working, grad, {b}, len}, decision, clip, formula);
}
