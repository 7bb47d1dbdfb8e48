// Rotary position embedding in place. A thread rotates N pairs (x[i], x[i + half]) of one head.
#include "lockstep.cuh"

template <int N>
__device__ __forceinline__ void rotate_pairs(
    REAL* x, u32 stride, const u32* positions, const f32* cos, const f32* sin, u32 table_rows,
    u32 items, u32 heads, u32 half, f32 sign
) {
    const u32 item = blockIdx.x * blockDim.x + threadIdx.x, per_head = half / N;
    if (item >= items) return;
    const u32 i = item % per_head * N, head = item / per_head % heads, row = item / per_head / heads;
    REAL* low = x + (u64)row * stride + head * 2 * half + i;
    REAL* high = low + half;
    const u32 position = positions[row];
    if (position >= table_rows) __trap();
    const u64 angle = (u64)position * half + i;
    const Chunk<f32, N> c = load_chunk<N>(cos + angle), s = load_chunk<N>(sin + angle);
    Chunk<REAL, N> a = load_chunk<N>(low), b = load_chunk<N>(high);
#pragma unroll
    for (int j = 0; j < N; j++) {
        const f32 low_x = to_f32(a.at[j]), high_x = to_f32(b.at[j]), sine = sign * s.at[j];
        a.at[j] = from_f32<REAL>(low_x * c.at[j] - high_x * sine);
        b.at[j] = from_f32<REAL>(high_x * c.at[j] + low_x * sine);
    }
    store_chunk<N>(low, a);
    store_chunk<N>(high, b);
}

// x[T, heads * 2 * half], positions[T], cos and sin [table_rows, half]; sign is -1 for the inverse rotation.
extern "C" __global__ void rotate(
    REAL* x, u32 stride, const u32* positions, const f32* cos, const f32* sin, u32 table_rows,
    u32 items, u32 heads, u32 half, f32 sign
) {
    rotate_pairs<1>(x, stride, positions, cos, sin, table_rows, items, heads, half, sign);
}

extern "C" __global__ void rotate_vec(
    REAL* x, u32 stride, const u32* positions, const f32* cos, const f32* sin, u32 table_rows,
    u32 items, u32 heads, u32 half, f32 sign
) {
    rotate_pairs<Vec16<REAL>::N>(x, stride, positions, cos, sin, table_rows, items, heads, half, sign);
}
