// The gated unit over flat ranges. A thread takes N elements; the last one what is left.
#include "lockstep.cuh"

__device__ __forceinline__ f32 sigmoid(f32 x) { return 1.0f / (1.0f + expf(-x)); }

__device__ __forceinline__ REAL gated(REAL g, REAL u) {
    const f32 gate = to_f32(g);
    return from_f32<REAL>(gate * sigmoid(gate) * to_f32(u));
}

// Replaces a gate and what it lets through by their gradients.
__device__ __forceinline__ void to_gradients(REAL& g, REAL& u, REAL dy) {
    const f32 gate = to_f32(g), up = to_f32(u), grad = to_f32(dy);
    const f32 s = sigmoid(gate), silu = gate * s;
    u = from_f32<REAL>(grad * silu);
    g = from_f32<REAL>(grad * up * (s + silu * (1.0f - s)));
}

template <int N> __device__ __forceinline__ void forward_part(REAL* y, const REAL* g, const REAL* u, u64 len) {
    const u64 start = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * N;
    if (start + N <= len) {
        const Chunk<REAL, N> gates = load_chunk<N>(g + start), ups = load_chunk<N>(u + start);
        Chunk<REAL, N> out;
#pragma unroll
        for (int i = 0; i < N; i++) out.at[i] = gated(gates.at[i], ups.at[i]);
        store_chunk<N>(y + start, out);
    } else {
        for (u64 i = start; i < len; i++) y[i] = gated(g[i], u[i]);
    }
}

template <int N> __device__ __forceinline__ void backward_part(REAL* g, REAL* u, const REAL* dy, u64 len) {
    const u64 start = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * N;
    if (start + N <= len) {
        Chunk<REAL, N> gates = load_chunk<N>(g + start), ups = load_chunk<N>(u + start);
        const Chunk<REAL, N> grads = load_chunk<N>(dy + start);
#pragma unroll
        for (int i = 0; i < N; i++) to_gradients(gates.at[i], ups.at[i], grads.at[i]);
        store_chunk<N>(g + start, gates);
        store_chunk<N>(u + start, ups);
    } else {
        for (u64 i = start; i < len; i++) to_gradients(g[i], u[i], dy[i]);
    }
}

// y[len] = silu(g) * u.
extern "C" __global__ void forward(REAL* y, const REAL* g, const REAL* u, u64 len) {
    forward_part<1>(y, g, u, len);
}

extern "C" __global__ void forward_packs(REAL* y, const REAL* g, const REAL* u, u64 len) {
    forward_part<Pack<REAL>::N>(y, g, u, len);
}

// g[len] and u[len] become their gradients, from dy[len].
extern "C" __global__ void backward(REAL* g, REAL* u, const REAL* dy, u64 len) { backward_part<1>(g, u, dy, len); }

extern "C" __global__ void backward_packs(REAL* g, REAL* u, const REAL* dy, u64 len) {
    backward_part<Pack<REAL>::N>(g, u, dy, len);
}
