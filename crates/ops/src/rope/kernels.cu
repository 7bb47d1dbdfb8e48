// Rotary position embedding in place. A thread turns N pairs (x[i], x[i + half]) of one head.
#include "lockstep.cuh"

template <int N>
__device__ __forceinline__ void turn_pairs(
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
        const f32 from = to_f32(a.at[j]), across = to_f32(b.at[j]), turned = sign * s.at[j];
        a.at[j] = from_f32<REAL>(from * c.at[j] - across * turned);
        b.at[j] = from_f32<REAL>(across * c.at[j] + from * turned);
    }
    store_chunk<N>(low, a);
    store_chunk<N>(high, b);
}

// x[T, heads * 2 * half], positions[T], cos and sin [table_rows, half]; sign is -1 to turn back.
extern "C" __global__ void turn(
    REAL* x, u32 stride, const u32* positions, const f32* cos, const f32* sin, u32 table_rows,
    u32 items, u32 heads, u32 half, f32 sign
) {
    turn_pairs<1>(x, stride, positions, cos, sin, table_rows, items, heads, half, sign);
}

extern "C" __global__ void turn_vec(
    REAL* x, u32 stride, const u32* positions, const f32* cos, const f32* sin, u32 table_rows,
    u32 items, u32 heads, u32 half, f32 sign
) {
    turn_pairs<Vec16<REAL>::N>(x, stride, positions, cos, sin, table_rows, items, heads, half, sign);
}
