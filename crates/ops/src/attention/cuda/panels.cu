// Tiles of rows in shared memory for wgmma: panels of 64 columns, as described in wgmma.cu.

constexpr int GROUPS = ROWS / GROUP_ROWS, THREADS = GROUP_THREADS * GROUPS;
// The warp group of this thread. The shuffle tells the compiler that it is uniform across the warp.
__device__ __forceinline__ int warp_group() { return __shfl_sync(0xffffffffu, (int)threadIdx.x / GROUP_THREADS, 0); }

// 16-byte vectors of a row.
constexpr int VECS = WIDTH / 8;
constexpr int PANEL_VECS = 8, PANEL_COLS = 64, ROW_BYTES = 128;

// How many documents are processed together, if every block handles one of `heads` heads: as many as fit with their
// keys and values into the L2 cache.
__device__ __forceinline__ u32 docs_per_group(u32 heads) { return max(1u, min(32u, 4096 / (heads * WIDTH))); }

extern __shared__ __align__(1024) REAL smem[];

// The offset of vector `vec` of a row, in a tile of NUM rows.
template <int NUM> __device__ __forceinline__ int swizzled(int row, int vec) {
    return (vec / PANEL_VECS * NUM + row) * PANEL_COLS + (vec % PANEL_VECS ^ row % 8) * 8;
}

// Copies rows [first, first + NUM) of one head. Rows from `len` on are set to zero. If SECOND_TILE is not zero, the
// same rows of a second matrix with the same stride, `second_offset` elements after the first, are copied to a tile
// SECOND_TILE elements after the first.
template <int NUM, int SECOND_TILE = 0, int NUM_THREADS = THREADS> __device__ __forceinline__ void copy_rows(
    REAL* to, const REAL* from, u32 stride, u32 first, u32 len, long long second_offset = 0, u32 thread = threadIdx.x
) {
    constexpr int STEP = NUM_THREADS / VECS;
    static_assert(NUM % STEP == 0 && STEP % 8 == 0, "every thread copies the same vector of each row");
    const u32 vec = thread % VECS, row = first + thread / VECS;
    const u32 at = shared_address(to) + 2 * swizzled<NUM>(thread / VECS, vec);
    from += (size_t)row * stride + vec * 8;
#pragma unroll
    for (u32 i = 0; i < NUM; i += STEP) {
        const bool valid = row + i < len;
        copy_async(at + i * ROW_BYTES, from, valid);
        if (SECOND_TILE != 0) copy_async(at + i * ROW_BYTES + 2 * SECOND_TILE, from + second_offset, valid);
        from += (size_t)STEP * stride;
    }
}

// s [64, N] = own · tileᵀ, summed over the head width: 64 rows of a tile of OWN rows, against a tile of N rows.
template <int OWN, int N> __device__ __forceinline__ void scores(f32 (&s)[N / 8][4], u32 own, u32 tile) {
#pragma unroll
    for (int c = 0; c < WIDTH / 16; c++) {
        const int panel = c / 4, within = c % 4 * 32;
        multiply(s, own + (panel * OWN * ROW_BYTES + within) / 16, tile + (panel * N * ROW_BYTES + within) / 16, c > 0);
    }
}

// Sets scores outside a range of columns to `hidden`. The range is [from + 8 r, to + 8 r), counted from column 2t,
// where r is 0 for a thread's row g and 1 for its row g + 8.
template <int N> __device__ __forceinline__ void mask_outside(f32 (&s)[N / 8][4], int from, int to, f32 hidden) {
#pragma unroll
    for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int col = 8 * n + i % 2 - i / 2 * 8;
            if (col < from || col >= to) s[n][i] = hidden;
        }
}

// sums [64, h] += p [64, K] · tile [K, h], with p rounded in `a`.
template <int K> __device__ __forceinline__ void accumulate(
    f32 (&sums)[WIDTH / 8][4], const u32 (&a)[K / 16][4], u32 tile
) {
#pragma unroll
    for (int j = 0; j < K / 16; j++) multiply(sums, a[j], tile + j * 16 * ROW_BYTES / 16);
}

template <int K> __device__ __forceinline__ void round_to_a(u32 (&a)[K / 16][4], const f32 (&c)[K / 8][4]) {
#pragma unroll
    for (int j = 0; j < K / 16; j++) round_to_a(a[j], c, j);
}

// Stores 16 rows of results [16, h], scaled by one factor for rows g and one for rows g + 8. They go through rows [row,
// row + 16) of a tile of ROWS rows, which only this warp uses. Of rows [first, first + 16), those before `len` are
// stored.
__device__ __forceinline__ void store_rows(
    REAL* to, size_t stride, int first, int len, REAL* tile, int row, const f32 (&c)[WIDTH / 8][4], f32 scale_low,
    f32 scale_high
) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    __syncwarp();
#pragma unroll
    for (int n = 0; n < VECS; n++) {
        u32* low = reinterpret_cast<u32*>(tile + swizzled<ROWS>(row + g, n) + 2 * t);
        u32* high = reinterpret_cast<u32*>(tile + swizzled<ROWS>(row + g + 8, n) + 2 * t);
        *low = round_pair(c[n][0] * scale_low, c[n][1] * scale_low, REAL{});
        *high = round_pair(c[n][2] * scale_high, c[n][3] * scale_high, REAL{});
    }
    __syncwarp();
#pragma unroll
    for (int at = lane; at < 16 * VECS; at += 32) {
        const int r = at / VECS, vec = at % VECS;
        if (first + r < len)
            store_vec(to + (size_t)(first + r) * stride + vec * 8, load_vec(tile + swizzled<ROWS>(row + r, vec)));
    }
}
