// The bias of a linear layer, and its gradient: the sum of rows.
#include "lockstep.cuh"

// GRAD_ROWS rows are summed together, by blocks of GRAD_THREADS threads.
constexpr u32 WARPS = GRAD_THREADS / 32;

template <int N>
__device__ __forceinline__ void add_to_rows(REAL* y, u32 stride, const REAL* b, u32 items, u32 dim) {
    const u32 item = blockIdx.x * blockDim.x + threadIdx.x, chunks = dim / N;
    if (item >= items) return;
    const u32 column = item % chunks * N;
    REAL* at = y + (u64)(item / chunks) * stride + column;
    Chunk<REAL, N> row = load_chunk<N>(at);
    const Chunk<REAL, N> bias = load_chunk<N>(b + column);
#pragma unroll
    for (int i = 0; i < N; i++) row.at[i] = from_f32<REAL>(to_f32(row.at[i]) + to_f32(bias.at[i]));
    store_chunk<N>(at, row);
}

// A block sums GRAD_ROWS rows of 32 * N columns. Each warp sums every eighth row; the warps' sums are added in order.
template <int N>
__device__ __forceinline__ void sum_rows(f32* parts, const REAL* dy, u32 stride, u32 rows, u32 dim) {
    __shared__ f32 scratch[WARPS][32 * N];
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 first = blockIdx.y * GRAD_ROWS, left = blockIdx.x * 32 * N, column = left + lane * N;
    const u32 end = min(rows, first + GRAD_ROWS);
    f32 sums[N] = {};
    if (column < dim) {
#pragma unroll 4
        for (u32 row = first + warp; row < end; row += WARPS) {
            const Chunk<REAL, N> grad = load_chunk<N>(dy + (u64)row * stride + column);
#pragma unroll
            for (int i = 0; i < N; i++) sums[i] += to_f32(grad.at[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < N; i++) scratch[warp][lane * N + i] = sums[i];
    __syncthreads();
    for (u32 c = threadIdx.x; c < 32 * N && left + c < dim; c += WARPS * 32) {
        f32 sum = 0.0f;
        for (u32 w = 0; w < WARPS; w++) sum += scratch[w][c];
        parts[(u64)blockIdx.y * dim + left + c] = sum;
    }
}

// y[T, dim] += b[dim].
extern "C" __global__ void forward(REAL* y, u32 stride, const REAL* b, u32 items, u32 dim) {
    add_to_rows<1>(y, stride, b, items, dim);
}

extern "C" __global__ void forward_vec(REAL* y, u32 stride, const REAL* b, u32 items, u32 dim) {
    add_to_rows<Vec16<REAL>::N>(y, stride, b, items, dim);
}

// parts[blocks of GRAD_ROWS rows, dim] = the sums of dy[T, dim] over each block's rows.
extern "C" __global__ void backward(f32* parts, const REAL* dy, u32 stride, u32 rows, u32 dim) {
    sum_rows<1>(parts, dy, stride, rows, dim);
}

extern "C" __global__ void backward_vec(f32* parts, const REAL* dy, u32 stride, u32 rows, u32 dim) {
    sum_rows<Vec16<REAL>::N>(parts, dy, stride, rows, dim);
}
