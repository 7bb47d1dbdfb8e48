// SwiGLU over matrices [rows, cols]. A thread processes N elements of a row, where N divides the row.
#include "lockstep.cuh"

__device__ __forceinline__ f32 sigmoid(f32 x) { return 1.0f / (1.0f + expf(-x)); }

__device__ __forceinline__ REAL gated(REAL g, REAL u) {
    const f32 gate = to_f32(g);
    return from_f32<REAL>(gate * sigmoid(gate) * to_f32(u));
}

// Replaces gate and up by their gradients; with RECOMPUTE, also dy by the output of `gated`.
template <bool RECOMPUTE> __device__ __forceinline__ void to_gradients(REAL& g, REAL& u, REAL& dy) {
    const f32 gate = to_f32(g), up = to_f32(u), grad = to_f32(dy);
    const f32 s = sigmoid(gate), silu = gate * s;
    u = from_f32<REAL>(grad * silu);
    g = from_f32<REAL>(grad * up * (s + silu * (1.0f - s)));
    if (RECOMPUTE) dy = from_f32<REAL>(silu * up);
}

template <int N>
__device__ __forceinline__ void forward_part(
    REAL* y, u32 y_stride, const REAL* g, u32 g_stride, const REAL* u, u32 u_stride, u32 items, u32 cols
) {
    const u32 item = blockIdx.x * blockDim.x + threadIdx.x, chunks = cols / N;
    if (item >= items) return;
    const u64 row = item / chunks;
    const u32 column = item % chunks * N;
    const Chunk<REAL, N> gates = load_chunk<N>(g + row * g_stride + column);
    const Chunk<REAL, N> ups = load_chunk<N>(u + row * u_stride + column);
    Chunk<REAL, N> out;
#pragma unroll
    for (int i = 0; i < N; i++) out.at[i] = gated(gates.at[i], ups.at[i]);
    store_chunk<N>(y + row * y_stride + column, out);
}

template <int N, bool RECOMPUTE>
__device__ __forceinline__ void backward_part(
    REAL* g, u32 g_stride, REAL* u, u32 u_stride, REAL* dy, u32 dy_stride, u32 items, u32 cols
) {
    const u32 item = blockIdx.x * blockDim.x + threadIdx.x, chunks = cols / N;
    if (item >= items) return;
    const u64 row = item / chunks;
    const u32 column = item % chunks * N;
    g += row * g_stride + column;
    u += row * u_stride + column;
    dy += row * dy_stride + column;
    Chunk<REAL, N> gates = load_chunk<N>(g), ups = load_chunk<N>(u), grads = load_chunk<N>(dy);
#pragma unroll
    for (int i = 0; i < N; i++) to_gradients<RECOMPUTE>(gates.at[i], ups.at[i], grads.at[i]);
    store_chunk<N>(g, gates);
    store_chunk<N>(u, ups);
    if (RECOMPUTE) store_chunk<N>(dy, grads);
}

// y = silu(g) * u; `items` is the number of threads with work.
extern "C" __global__ void forward(
    REAL* y, u32 y_stride, const REAL* g, u32 g_stride, const REAL* u, u32 u_stride, u32 items, u32 cols
) {
    forward_part<1>(y, y_stride, g, g_stride, u, u_stride, items, cols);
}

extern "C" __global__ void forward_vec(
    REAL* y, u32 y_stride, const REAL* g, u32 g_stride, const REAL* u, u32 u_stride, u32 items, u32 cols
) {
    forward_part<Vec16<REAL>::N>(y, y_stride, g, g_stride, u, u_stride, items, cols);
}

// Replaces g and u by their gradients.
extern "C" __global__ void backward(
    REAL* g, u32 g_stride, REAL* u, u32 u_stride, REAL* dy, u32 dy_stride, u32 items, u32 cols
) {
    backward_part<1, false>(g, g_stride, u, u_stride, dy, dy_stride, items, cols);
}

extern "C" __global__ void backward_vec(
    REAL* g, u32 g_stride, REAL* u, u32 u_stride, REAL* dy, u32 dy_stride, u32 items, u32 cols
) {
    backward_part<Vec16<REAL>::N, false>(g, g_stride, u, u_stride, dy, dy_stride, items, cols);
}

// The same, and replaces dy by y.
extern "C" __global__ void backward_recompute(
    REAL* g, u32 g_stride, REAL* u, u32 u_stride, REAL* dy, u32 dy_stride, u32 items, u32 cols
) {
    backward_part<1, true>(g, g_stride, u, u_stride, dy, dy_stride, items, cols);
}

extern "C" __global__ void backward_recompute_vec(
    REAL* g, u32 g_stride, REAL* u, u32 u_stride, REAL* dy, u32 dy_stride, u32 items, u32 cols
) {
    backward_part<Vec16<REAL>::N, true>(g, g_stride, u, u_stride, dy, dy_stride, items, cols);
}
