// Tiles of rows in shared memory, and how parts of them come to the registers of a warp and back.

// 16 bytes of a row, and the threads that copy a row side by side: a power of two.
constexpr int VECS = WIDTH / 8;
constexpr int BESIDE = VECS & -VECS;

// Rows [first, first + NUM) of one head, of which there are `len`; the rest is zero.
template <int NUM> __device__ __forceinline__ void copy_rows(
    REAL* to, const REAL* from, u32 stride, int first, int len
) {
    constexpr int STEP = THREADS / BESIDE;
    const int col = threadIdx.x % BESIDE * 8;
    int row = threadIdx.x / BESIDE;
    to += row * STRIDE + col;
    from += (size_t)(first + row) * stride + col;
#pragma unroll
    for (int i = 0; i < (NUM + STEP - 1) / STEP; i++) {
        if (NUM % STEP != 0 && row >= NUM) break;
        const bool there = first + row < len;
#pragma unroll
        for (int pass = 0; pass < VECS / BESIDE; pass++)
            copy_async(to + i * STEP * STRIDE + pass * BESIDE * 8, from + pass * BESIDE * 8, there);
        from += (size_t)STEP * stride;
        row += STEP;
    }
}

// A [16, 16] at a row and column of a tile.
__device__ __forceinline__ void load_a(u32 (&a)[4], const REAL* tile, int row, int col) {
    const int lane = threadIdx.x % 32;
    load_matrices(a, tile + (row + lane % 16) * STRIDE + col + lane / 16 * 8);
}

// Two B of [16, 8] side by side: 16 columns, which are rows of the tile, as for products with its transpose.
__device__ __forceinline__ void load_b_of_rows(u32 (&b)[4], const REAL* tile, int row, int col) {
    const int lane = threadIdx.x % 32;
    load_matrices(b, tile + (row + lane % 8 + lane / 16 * 8) * STRIDE + col + lane / 8 % 2 * 8);
}

// Two B of [16, 8] side by side, as they lie in the tile.
__device__ __forceinline__ void load_b(u32 (&b)[4], const REAL* tile, int row, int col) {
    const int lane = threadIdx.x % 32;
    load_matrices_transposed(b, tile + (row + lane % 16) * STRIDE + col + lane / 16 * 8);
}

// 16 rows of results [16, h], with a factor for rows g and one for rows g + 8, through 16 rows of a tile that this
// warp alone uses, to memory. Rows [first, first + 16) of `len` are stored.
__device__ __forceinline__ void store_rows(
    REAL* to, size_t stride, int first, int len, REAL* tile, const f32 (&c)[WIDTH / 8][4], f32 by_low, f32 by_high
) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    __syncwarp();
#pragma unroll
    for (int n = 0; n < WIDTH / 8; n++) {
        u32* low = reinterpret_cast<u32*>(tile + g * STRIDE + 8 * n + 2 * t);
        u32* high = reinterpret_cast<u32*>(tile + (g + 8) * STRIDE + 8 * n + 2 * t);
        *low = round_pair(c[n][0] * by_low, c[n][1] * by_low, REAL{});
        *high = round_pair(c[n][2] * by_high, c[n][3] * by_high, REAL{});
    }
    __syncwarp();
#pragma unroll
    for (int at = lane; at < 16 * VECS; at += 32) {
        const int row = at / VECS, col = at % VECS * 8;
        if (first + row < len)
            store_vec(to + (size_t)(first + row) * stride + col, load_vec(tile + row * STRIDE + col));
    }
}
