// Rows that stand for several positions. source[N] is the row of each position; a row's positions are
// entries[offsets[m]..offsets[m + 1]], in ascending order.
#include "lockstep.cuh"

// y[n] = x[m] if n is the first position of row m, otherwise 0; items = N * cols / W.
template <int W>
__device__ __forceinline__ void expand_first_rows(
    REAL* y, u32 y_stride, const REAL* x, u32 x_stride, const u32* source, const u32* offsets, const u32* entries,
    u32 items, u32 cols
) {
    const u32 item = blockIdx.x * blockDim.x + threadIdx.x, chunks = cols / W;
    if (item >= items) return;
    const u32 n = item / chunks, column = item % chunks * W, row = source[n], start = offsets[row];
    Chunk<REAL, W> out = {};
    if (start < offsets[row + 1] && entries[start] == n) out = load_chunk<W>(x + (u64)row * x_stride + column);
    store_chunk<W>(y + (u64)n * y_stride + column, out);
}

// y[m] = the sum of x over the positions of row m, or x at the first one; items = M * cols / W.
template <int W>
__device__ __forceinline__ void combine_rows(
    REAL* y, u32 y_stride, const REAL* x, u32 x_stride, const u32* offsets, const u32* entries, u32 items, u32 cols,
    u32 only_first
) {
    const u32 item = blockIdx.x * blockDim.x + threadIdx.x, chunks = cols / W;
    if (item >= items) return;
    const u32 row = item / chunks, column = item % chunks * W, start = offsets[row], end = offsets[row + 1];
    Chunk<REAL, W> out = {};
    if (end - start == 1 || (only_first && start < end)) {
        out = load_chunk<W>(x + (u64)entries[start] * x_stride + column);
    } else if (start < end) {
        f32 sums[W] = {};
        for (u32 i = start; i < end; i++) {
            const Chunk<REAL, W> part = load_chunk<W>(x + (u64)entries[i] * x_stride + column);
#pragma unroll
            for (int j = 0; j < W; j++) sums[j] += to_f32(part.at[j]);
        }
#pragma unroll
        for (int j = 0; j < W; j++) out.at[j] = from_f32<REAL>(sums[j]);
    }
    store_chunk<W>(y + (u64)row * y_stride + column, out);
}

extern "C" __global__ void expand_first(
    REAL* y, u32 y_stride, const REAL* x, u32 x_stride, const u32* source, const u32* offsets, const u32* entries,
    u32 items, u32 cols
) {
    expand_first_rows<1>(y, y_stride, x, x_stride, source, offsets, entries, items, cols);
}

extern "C" __global__ void expand_first_vec(
    REAL* y, u32 y_stride, const REAL* x, u32 x_stride, const u32* source, const u32* offsets, const u32* entries,
    u32 items, u32 cols
) {
    expand_first_rows<Vec16<REAL>::N>(y, y_stride, x, x_stride, source, offsets, entries, items, cols);
}

extern "C" __global__ void combine(
    REAL* y, u32 y_stride, const REAL* x, u32 x_stride, const u32* offsets, const u32* entries, u32 items, u32 cols,
    u32 only_first
) {
    combine_rows<1>(y, y_stride, x, x_stride, offsets, entries, items, cols, only_first);
}

extern "C" __global__ void combine_vec(
    REAL* y, u32 y_stride, const REAL* x, u32 x_stride, const u32* offsets, const u32* entries, u32 items, u32 cols,
    u32 only_first
) {
    combine_rows<Vec16<REAL>::N>(y, y_stride, x, x_stride, offsets, entries, items, cols, only_first);
}
