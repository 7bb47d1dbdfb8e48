// Tiles of rows in shared memory for products of groups of four warps: as wgmma.cu says, panels of 64 columns.

constexpr int GROUPS = ROWS / GROUP_ROWS, THREADS = GROUP_THREADS * GROUPS;
// The group of warps that this thread is in, known to be the same for all of a warp.
__device__ __forceinline__ int warp_group() { return __shfl_sync(0xffffffffu, (int)threadIdx.x / GROUP_THREADS, 0); }

// 16 bytes of a row.
constexpr int VECS = WIDTH / 8;
constexpr int PANEL_VECS = 8, PANEL_COLS = 64, ROW_BYTES = 128;

// How many documents are gone over together, where blocks are of one of so many heads: as many as have their keys and
// values in the second-level cache.
__device__ __forceinline__ u32 docs_together(u32 heads) { return max(1u, min(32u, 4096 / (heads * WIDTH))); }

extern __shared__ __align__(1024) REAL room[];

// Where the 16-byte part `pack` of a row of a tile of NUM rows is.
template <int NUM> __device__ __forceinline__ int place(int row, int pack) {
    return (pack / PANEL_VECS * NUM + row) * PANEL_COLS + (pack % PANEL_VECS ^ row % 8) * 8;
}

// Rows [first, first + NUM) of one head, of which there are `len`; the rest is zero. With BESIDE, the same rows of
// another matrix of the same stride, `apart` elements from the first, to a tile BESIDE elements from the first.
template <int NUM, int BESIDE = 0, int BY = THREADS> __device__ __forceinline__ void copy_rows(
    REAL* to, const REAL* from, u32 stride, u32 first, u32 len, long long apart = 0, u32 thread = threadIdx.x
) {
    constexpr int STEP = BY / VECS;
    static_assert(NUM % STEP == 0 && STEP % 8 == 0, "every thread copies the same part of rows");
    const u32 pack = thread % VECS, row = first + thread / VECS;
    const u32 at = shared_address(to) + 2 * place<NUM>(thread / VECS, pack);
    from += (size_t)row * stride + pack * 8;
#pragma unroll
    for (u32 i = 0; i < NUM; i += STEP) {
        const bool there = row + i < len;
        copy_async(at + i * ROW_BYTES, from, there);
        if (BESIDE != 0) copy_async(at + i * ROW_BYTES + 2 * BESIDE, from + apart, there);
        from += (size_t)STEP * stride;
    }
}

// s [64, N] = own · tileᵀ over the head, of 64 rows of a tile of OWN rows, and a tile of N rows.
template <int OWN, int N> __device__ __forceinline__ void scores(f32 (&s)[N / 8][4], u32 own, u32 tile) {
#pragma unroll
    for (int c = 0; c < WIDTH / 16; c++) {
        const int panel = c / 4, within = c % 4 * 32;
        multiply(s, own + (panel * OWN * ROW_BYTES + within) / 16, tile + (panel * N * ROW_BYTES + within) / 16, c > 0);
    }
}

// Leaves, of columns [0, N) of a thread's row g (r = 0) and row g + 8 (r = 1), those in [from + 8 r, to + 8 r), counted
// from column 2t on, and sets the others to `hidden`.
template <int N> __device__ __forceinline__ void leave_between(f32 (&s)[N / 8][4], int from, int to, f32 hidden) {
#pragma unroll
    for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int col = 8 * n + i % 2 - i / 2 * 8;
            if (col < from || col >= to) s[n][i] = hidden;
        }
}

// sums [64, h] += p [64, K], rounded to a, · tile [K, h].
template <int K> __device__ __forceinline__ void add_product(
    f32 (&sums)[WIDTH / 8][4], const u32 (&a)[K / 16][4], u32 tile
) {
#pragma unroll
    for (int j = 0; j < K / 16; j++) multiply(sums, a[j], tile + j * 16 * ROW_BYTES / 16);
}

template <int K> __device__ __forceinline__ void round_to_a(u32 (&a)[K / 16][4], const f32 (&c)[K / 8][4]) {
#pragma unroll
    for (int j = 0; j < K / 16; j++) round_to_a(a[j], c, j);
}

// 16 rows of results [16, h], with a factor for rows g and one for rows g + 8, through rows [row, row + 16) of a tile
// of ROWS rows that this warp alone uses, to memory. Of rows [first, first + 16), those before `len` are stored.
__device__ __forceinline__ void store_rows(
    REAL* to, size_t stride, int first, int len, REAL* tile, int row, const f32 (&c)[WIDTH / 8][4], f32 by_low,
    f32 by_high
) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    __syncwarp();
#pragma unroll
    for (int n = 0; n < VECS; n++) {
        u32* low = reinterpret_cast<u32*>(tile + place<ROWS>(row + g, n) + 2 * t);
        u32* high = reinterpret_cast<u32*>(tile + place<ROWS>(row + g + 8, n) + 2 * t);
        *low = round_pair(c[n][0] * by_low, c[n][1] * by_low, REAL{});
        *high = round_pair(c[n][2] * by_high, c[n][3] * by_high, REAL{});
    }
    __syncwarp();
#pragma unroll
    for (int at = lane; at < 16 * VECS; at += 32) {
        const int r = at / VECS, pack = at % VECS;
        if (first + r < len)
            store_vec(to + (size_t)(first + r) * stride + pack * 8, load_vec(tile + place<ROWS>(row + r, pack)));
    }
}
