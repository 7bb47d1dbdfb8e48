// AdamW over a flat range. REAL is the working copy's type.
#include "lockstep.cuh"

struct Rates {
    f32 keep; // 1 - lr * weight decay
    f32 step; // lr / (1 - beta1^t)
    f32 beta1, beta2, complement1, complement2, eps;
    f32 correction2_sqrt;
    f32 clip;
};

__device__ __forceinline__ void update_one(f32& p, f32& m, f32& v, f32 grad, const Rates& r) {
    const f32 g = grad * r.clip;
    m = fmaf(r.beta1, m, r.complement1 * g);
    v = fmaf(r.beta2, v, r.complement2 * g * g);
    p = p * r.keep - r.step * (m / (sqrtf(v) / r.correction2_sqrt + r.eps));
}

// A thread takes N elements; the last one what is left.
template <int N>
__device__ __forceinline__ void update_part(
    f32* p, REAL* working, const f32* grad, f32* m, f32* v, u64 len, const f64* verdict, Rates r
) {
    if (verdict) {
        if (verdict[3] != 0.0) return;
        r.clip = (f32)verdict[2];
    }
    const u64 start = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * N;
    if (start + N <= len) {
        Chunk<f32, N> ps = load_chunk<N>(p + start), ms = load_chunk<N>(m + start), vs = load_chunk<N>(v + start);
        const Chunk<f32, N> grads = load_chunk<N>(grad + start);
        Chunk<REAL, N> rounded;
#pragma unroll
        for (int i = 0; i < N; i++) {
            update_one(ps.at[i], ms.at[i], vs.at[i], grads.at[i], r);
            rounded.at[i] = from_f32<REAL>(ps.at[i]);
        }
        store_chunk<N>(p + start, ps);
        store_chunk<N>(m + start, ms);
        store_chunk<N>(v + start, vs);
        if (working) store_chunk<N>(working + start, rounded);
    } else {
        for (u64 i = start; i < len; i++) {
            update_one(p[i], m[i], v[i], grad[i], r);
            if (working) working[i] = from_f32<REAL>(p[i]);
        }
    }
}

// p, m, v, grad [len]; working [len] or null. verdict[4] or null: {sum of squares, norm, clip, skip}.
extern "C" __global__ void update(
    f32* p, REAL* working, const f32* grad, f32* m, f32* v, u64 len, const f64* verdict,
    f32 keep, f32 step, f32 beta1, f32 beta2, f32 complement1, f32 complement2, f32 eps, f32 correction2_sqrt, f32 clip
) {
    const Rates r = {keep, step, beta1, beta2, complement1, complement2, eps, correction2_sqrt, clip};
    update_part<1>(p, working, grad, m, v, len, verdict, r);
}

extern "C" __global__ void update_packs(
    f32* p, REAL* working, const f32* grad, f32* m, f32* v, u64 len, const f64* verdict,
    f32 keep, f32 step, f32 beta1, f32 beta2, f32 complement1, f32 complement2, f32 eps, f32 correction2_sqrt, f32 clip
) {
    const Rates r = {keep, step, beta1, beta2, complement1, complement2, eps, correction2_sqrt, clip};
    update_part<Pack<f32>::N>(p, working, grad, m, v, len, verdict, r);
}
