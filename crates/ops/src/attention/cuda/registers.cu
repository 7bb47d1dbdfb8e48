// Matrices in the registers of a warp, laid out as described in mma.cu. A wide C is an array of 16 x 8 fragments.

template <int N> __device__ __forceinline__ void clear(f32 (&c)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) c[n][i] = 0.0f;
}

// Rounds columns [16 k, 16 k + 16) of a wide C and returns them as an A fragment.
template <int N> __device__ __forceinline__ void round_to_a(u32 (&a)[4], const f32 (&c)[N][4], int k) {
    a[0] = round_pair(c[2 * k][0], c[2 * k][1], REAL{});
    a[1] = round_pair(c[2 * k][2], c[2 * k][3], REAL{});
    a[2] = round_pair(c[2 * k + 1][0], c[2 * k + 1][1], REAL{});
    a[3] = round_pair(c[2 * k + 1][2], c[2 * k + 1][3], REAL{});
}

// Reductions over the four threads that share a row.
__device__ __forceinline__ f32 quad_max(f32 x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ f32 quad_sum(f32 x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
