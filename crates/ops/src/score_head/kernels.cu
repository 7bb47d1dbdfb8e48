// The score head: a dot product per row, and its gradients.
#include "lockstep.cuh"

// GRAD_ROWS rows are summed together, by blocks of GRAD_THREADS threads.
constexpr u32 WARPS = GRAD_THREADS / 32;

// One warp per row; each lane takes every 32nd chunk.
template <int N>
__device__ __forceinline__ void score_row(f32* y, const REAL* x, u32 stride, const REAL* w, u32 rows, u32 dim) {
    const u32 row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    x += (u64)row * stride;
    f32 sum = 0.0f;
#pragma unroll 4
    for (u32 column = lane * N; column < dim; column += 32 * N) {
        const Chunk<REAL, N> values = load_chunk<N>(x + column), weights = load_chunk<N>(w + column);
#pragma unroll
        for (int i = 0; i < N; i++) sum = fmaf(to_f32(values.at[i]), to_f32(weights.at[i]), sum);
    }
    sum = warp_sum(sum);
    if (lane == 0) y[row] = sum;
}

// A block processes GRAD_ROWS rows of 32 * N columns. Each warp has every eighth row; the warps' sums are added in
// order. If `parts` is null, no sums are computed.
template <int N>
__device__ __forceinline__ void backward_tile(
    REAL* dx, u32 dx_stride, u32 add, f32* parts, const REAL* x, u32 x_stride, const f32* c, const REAL* w, u32 rows,
    u32 dim
) {
    __shared__ f32 scratch[WARPS][32 * N];
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 first = blockIdx.y * GRAD_ROWS, left = blockIdx.x * 32 * N, column = left + lane * N;
    const u32 end = min(rows, first + GRAD_ROWS);
    f32 sums[N] = {};
    if (column < dim) {
        const Chunk<REAL, N> weights = load_chunk<N>(w + column);
#pragma unroll 4
        for (u32 row = first + warp; row < end; row += WARPS) {
            const f32 scale = c[row];
            REAL* to = dx + (u64)row * dx_stride + column;
            Chunk<REAL, N> out = {};
            if (add) out = load_chunk<N>(to);
#pragma unroll
            for (int i = 0; i < N; i++) {
                out.at[i] = from_f32<REAL>(fmaf(scale, to_f32(weights.at[i]), to_f32(out.at[i])));
            }
            store_chunk<N>(to, out);
            if (!parts) continue;
            const Chunk<REAL, N> values = load_chunk<N>(x + (u64)row * x_stride + column);
#pragma unroll
            for (int i = 0; i < N; i++) sums[i] = fmaf(scale, to_f32(values.at[i]), sums[i]);
        }
    }
    if (!parts) return;
#pragma unroll
    for (int i = 0; i < N; i++) scratch[warp][lane * N + i] = sums[i];
    __syncthreads();
    for (u32 i = threadIdx.x; i < 32 * N && left + i < dim; i += WARPS * 32) {
        f32 sum = 0.0f;
        for (u32 other = 0; other < WARPS; other++) sum += scratch[other][i];
        parts[(u64)blockIdx.y * dim + left + i] = sum;
    }
}

// y[T] = x[T, D] . w[D].
extern "C" __global__ void score(f32* y, const REAL* x, u32 stride, const REAL* w, u32 rows, u32 dim) {
    score_row<1>(y, x, stride, w, rows, dim);
}

extern "C" __global__ void score_vec(f32* y, const REAL* x, u32 stride, const REAL* w, u32 rows, u32 dim) {
    score_row<Vec16<REAL>::N>(y, x, stride, w, rows, dim);
}

// dx[T, D] = c[T] * w[D], added to dx if `add`; parts[blocks of GRAD_ROWS rows, D] = the sums of c * x[T, D] over each
// block's rows; `parts` may be null.
extern "C" __global__ void score_backward(
    REAL* dx, u32 dx_stride, u32 add, f32* parts, const REAL* x, u32 x_stride, const f32* c, const REAL* w, u32 rows,
    u32 dim
) {
    backward_tile<1>(dx, dx_stride, add, parts, x, x_stride, c, w, rows, dim);
}

extern "C" __global__ void score_backward_vec(
    REAL* dx, u32 dx_stride, u32 add, f32* parts, const REAL* x, u32 x_stride, const f32* c, const REAL* w, u32 rows,
    u32 dim
) {
    backward_tile<Vec16<REAL>::N>(dx, dx_stride, add, parts, x, x_stride, c, w, rows, dim);
}
