// Tiles of rows in shared memory, and loads and stores of fragments of them.

// 16-byte vectors of a row, and the threads that copy a row together: a power of two.
constexpr int VECS = WIDTH / 8;
constexpr int THREADS_PER_ROW = VECS & -VECS;

// Copies rows [first, first + NUM) of one head. Rows from `len` on are set to zero.
template <int NUM> __device__ __forceinline__ void copy_rows(
    REAL* to, const REAL* from, u32 stride, int first, int len
) {
    constexpr int STEP = THREADS / THREADS_PER_ROW;
    const int col = threadIdx.x % THREADS_PER_ROW * 8;
    int row = threadIdx.x / THREADS_PER_ROW;
    to += row * STRIDE + col;
    from += (size_t)(first + row) * stride + col;
#pragma unroll
    for (int i = 0; i < (NUM + STEP - 1) / STEP; i++) {
        if (NUM % STEP != 0 && row >= NUM) break;
        const bool valid = first + row < len;
#pragma unroll
        for (int pass = 0; pass < VECS / THREADS_PER_ROW; pass++)
            copy_async(to + i * STEP * STRIDE + pass * THREADS_PER_ROW * 8, from + pass * THREADS_PER_ROW * 8, valid);
        from += (size_t)STEP * stride;
        row += STEP;
    }
}

// Loads an A fragment [16, 16] at a row and column of a tile.
__device__ __forceinline__ void load_a(u32 (&a)[4], const REAL* tile, int row, int col) {
    const int lane = threadIdx.x % 32;
    load_matrices(a, tile + (row + lane % 16) * STRIDE + col + lane / 16 * 8);
}

// Loads two adjacent B fragments [16, 8] from the transposed tile: their 16 columns are rows of the tile.
__device__ __forceinline__ void load_b_of_rows(u32 (&b)[4], const REAL* tile, int row, int col) {
    const int lane = threadIdx.x % 32;
    load_matrices(b, tile + (row + lane % 8 + lane / 16 * 8) * STRIDE + col + lane / 8 % 2 * 8);
}

// Loads two adjacent B fragments [16, 8] as they are in the tile.
__device__ __forceinline__ void load_b(u32 (&b)[4], const REAL* tile, int row, int col) {
    const int lane = threadIdx.x % 32;
    load_matrices_transposed(b, tile + (row + lane % 16) * STRIDE + col + lane / 16 * 8);
}

// Stores 16 rows of results [16, h], scaled by one factor for rows g and one for rows g + 8. They go through 16 rows of
// a tile that only this warp uses. Of rows [first, first + 16), those before `len` are stored.
__device__ __forceinline__ void store_rows(
    REAL* to, size_t stride, int first, int len, REAL* tile, const f32 (&c)[WIDTH / 8][4], f32 scale_low, f32 scale_high
) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    __syncwarp();
#pragma unroll
    for (int n = 0; n < WIDTH / 8; n++) {
        u32* low = reinterpret_cast<u32*>(tile + g * STRIDE + 8 * n + 2 * t);
        u32* high = reinterpret_cast<u32*>(tile + (g + 8) * STRIDE + 8 * n + 2 * t);
        *low = round_pair(c[n][0] * scale_low, c[n][1] * scale_low, REAL{});
        *high = round_pair(c[n][2] * scale_high, c[n][3] * scale_high, REAL{});
    }
    __syncwarp();
#pragma unroll
    for (int at = lane; at < 16 * VECS; at += 32) {
        const int row = at / VECS, col = at % VECS * 8;
        if (first + row < len)
            store_vec(to + (size_t)(first + row) * stride + col, load_vec(tile + row * STRIDE + col));
    }
}
