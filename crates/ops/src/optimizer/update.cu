// The loop over a flat range that all optimizers share. REAL is the type of the working copy.
#include "lockstep.cuh"

// Parameters, gradients and S states, all [len]; working [len] or null.
template <int S> struct Range {
    f32* p;
    REAL* working;
    const f32* grad;
    f32* states[S > 0 ? S : 1];
    u64 len;
};

// A thread updates N elements, the last one what remains. `formula(p, states, g)` updates one element, given its
// clipped gradient. decision[4] or null: {sum of squares, norm, clip, skip}; its clip factor replaces the launch
// argument.
template <int N, int S, typename Formula>
__device__ __forceinline__ void update_range(const Range<S>& range, const f64* decision, f32 clip, Formula formula) {
    if (decision) {
        if (decision[3] != 0.0) return;
        clip = (f32)decision[2];
    }
    constexpr int STATES = S > 0 ? S : 1;
    const u64 start = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * N;
    if (start + N <= range.len) {
        Chunk<f32, N> ps = load_chunk<N>(range.p + start), states[STATES];
#pragma unroll
        for (int s = 0; s < S; s++) states[s] = load_chunk<N>(range.states[s] + start);
        const Chunk<f32, N> grads = load_chunk<N>(range.grad + start);
        Chunk<REAL, N> rounded;
#pragma unroll
        for (int i = 0; i < N; i++) {
            f32 state[STATES];
#pragma unroll
            for (int s = 0; s < S; s++) state[s] = states[s].at[i];
            formula(ps.at[i], state, grads.at[i] * clip);
#pragma unroll
            for (int s = 0; s < S; s++) states[s].at[i] = state[s];
            rounded.at[i] = from_f32<REAL>(ps.at[i]);
        }
        store_chunk<N>(range.p + start, ps);
#pragma unroll
        for (int s = 0; s < S; s++) store_chunk<N>(range.states[s] + start, states[s]);
        if (range.working) store_chunk<N>(range.working + start, rounded);
    } else {
        for (u64 i = start; i < range.len; i++) {
            f32 state[STATES];
#pragma unroll
            for (int s = 0; s < S; s++) state[s] = range.states[s][i];
            formula(range.p[i], state, range.grad[i] * clip);
#pragma unroll
            for (int s = 0; s < S; s++) range.states[s][i] = state[s];
            if (range.working) range.working[i] = from_f32<REAL>(range.p[i]);
        }
    }
}
