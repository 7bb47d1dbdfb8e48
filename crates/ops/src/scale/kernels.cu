// Multiplies a matrix by a number, in place.
#include "lockstep.cuh"

template <int N>
__device__ __forceinline__ void scale_rows(REAL* x, u32 stride, u32 items, u32 dim, f32 factor) {
    const u32 item = blockIdx.x * blockDim.x + threadIdx.x, chunks = dim / N;
    if (item >= items) return;
    REAL* at = x + (u64)(item / chunks) * stride + item % chunks * N;
    Chunk<REAL, N> row = load_chunk<N>(at);
#pragma unroll
    for (int i = 0; i < N; i++) row.at[i] = from_f32<REAL>(to_f32(row.at[i]) * factor);
    store_chunk<N>(at, row);
}

// x[T, dim] *= factor.
extern "C" __global__ void in_place(REAL* x, u32 stride, u32 items, u32 dim, f32 factor) {
    scale_rows<1>(x, stride, items, dim, factor);
}

extern "C" __global__ void in_place_vec(REAL* x, u32 stride, u32 items, u32 dim, f32 factor) {
    scale_rows<Vec16<REAL>::N>(x, stride, items, dim, factor);
}
