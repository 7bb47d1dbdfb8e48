// Attention backward on tensor cores, without sums shared between blocks. One kernel has blocks of queries and sums dq
// over keys; another has blocks of keys and sums dk and dv over queries. Both recompute the probabilities from the
// scores and the log-sum-exps. The latter are in base 2 and, like delta, laid out by head: [H, T].
//
// A block owns ROWS rows, 16 per warp, and processes COLS rows of the other kind at a time while the next ones are
// copied. With P and dP = dO·Vᵀ: dS = P ∘ (dP − delta), dq = scale · dS·K, dk = scale · dSᵀ·Q, dv = Pᵀ·dO.

static_assert(ROWS == 16 * WARPS, "16 rows per warp");
constexpr int TILE_ELEMS = ROWS * STRIDE, STAGE_ELEMS = COLS * STRIDE;
static_assert(
    BACKWARD_BYTES == sizeof(REAL) * (2 * TILE_ELEMS + 4 * STAGE_ELEMS), "must match the shared memory of the launch"
);
// Where there are enough registers, a warp keeps the fragments of its own rows in them.
constexpr bool IN_REGISTERS = WIDTH <= NARROW;
// Blocks per multiprocessor that there should be registers for.
constexpr int BLOCKS = WIDTH <= 64 ? 3 : WIDTH <= 128 ? 2 : 1;
constexpr int FRAGMENTS = IN_REGISTERS ? WIDTH / 16 : 1;

// A warp's 16 rows of a tile, as the left operand.
struct WarpRows {
    u32 fragments[FRAGMENTS][4];
    const REAL* tile;
    int row;

    __device__ __forceinline__ void load() {
        if constexpr (IN_REGISTERS) {
#pragma unroll
            for (int c = 0; c < FRAGMENTS; c++) load_a(fragments[c], tile, row, 16 * c);
        }
    }
    // The fragment of columns [16 c, 16 c + 16).
    __device__ __forceinline__ void part(u32 (&a)[4], int c) const {
        if constexpr (IN_REGISTERS) {
#pragma unroll
            for (int i = 0; i < 4; i++) a[i] = fragments[c][i];
        } else {
            load_a(a, tile, row, 16 * c);
        }
    }
};

// s [16, COLS] = own · tileᵀ.
__device__ __forceinline__ void scores(f32 (&s)[COLS / 8][4], const WarpRows& own, const REAL* tile) {
    clear(s);
#pragma unroll
    for (int c = 0; c < WIDTH / 16; c++) {
        u32 a[4];
        own.part(a, c);
#pragma unroll
        for (int n = 0; n < COLS / 16; n++) {
            u32 b[4];
            load_b_of_rows(b, tile, 16 * n, 16 * c);
            multiply(s[2 * n], a, b[0], b[1], REAL{});
            multiply(s[2 * n + 1], a, b[2], b[3], REAL{});
        }
    }
}

// sums [16, h] += p [16, COLS] · tile [COLS, h], with p rounded.
__device__ __forceinline__ void accumulate(f32 (&sums)[WIDTH / 8][4], const f32 (&p)[COLS / 8][4], const REAL* tile) {
#pragma unroll
    for (int j = 0; j < COLS / 16; j++) {
        u32 a[4];
        round_to_a(a, p, j);
#pragma unroll
        for (int n = 0; n < WIDTH / 16; n++) {
            u32 b[4];
            load_b(b, tile, 16 * j, 16 * n);
            multiply(sums[2 * n], a, b[0], b[1], REAL{});
            multiply(sums[2 * n + 1], a, b[2], b[3], REAL{});
        }
    }
}

// dq [T, H h].
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) flash_dq(
    REAL* dq, u32 dq_stride, const REAL* dout, u32 dout_stride, const f32* lse, const f32* delta, const REAL* q,
    u32 q_stride, const REAL* k, u32 k_stride, const REAL* v, u32 v_stride, const u32* bounds, u32 docs, u32 tokens,
    u32 num_q, u32 group, f32 scale, int window
) {
    Tile tile;
    if (!find_tile(bounds, docs, ROWS, blockIdx.x / num_q, tile)) return;
    const u32 head = blockIdx.x % num_q, kv_head = head / group;
    const size_t base = tile.base;
    q += base * q_stride + head * WIDTH;
    dout += base * dout_stride + head * WIDTH;
    k += base * k_stride + kv_head * WIDTH;
    v += base * v_stride + kv_head * WIDTH;
    REAL *q_tile = smem, *dout_tile = q_tile + TILE_ELEMS, *stages = dout_tile + TILE_ELEMS;
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, warp_row = threadIdx.x / 32 * 16, len = tile.len;
    const int first_q = (tile.count - 1 - tile.index) * ROWS, end = min(first_q + ROWS, len);
    const int low_q = first_q + warp_row, high_q = low_q + 15;
    const f32 scale_log2 = scale * LOG2_E;

    // Rows past the end have zero probabilities.
    f32 row_lse[2], row_delta[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int query = low_q + g + 8 * r;
        const size_t at = (size_t)head * tokens + base + query;
        row_lse[r] = query < len ? lse[at] : infinity();
        row_delta[r] = query < len ? delta[at] : 0.0f;
    }
    int first_k = first_key(first_q, window) / COLS * COLS;
    copy_rows<ROWS>(q_tile, q, q_stride, first_q, len);
    copy_rows<ROWS>(dout_tile, dout, dout_stride, first_q, len);
    copy_rows<COLS>(stages, k, k_stride, first_k, len);
    copy_rows<COLS>(stages + STAGE_ELEMS, v, v_stride, first_k, len);
    commit_copies();
    wait_copies<0>();
    __syncthreads();
    WarpRows own_q, own_dout;
    own_q.tile = q_tile;
    own_dout.tile = dout_tile;
    own_q.row = own_dout.row = warp_row;
    own_q.load();
    own_dout.load();

    f32 sums[WIDTH / 8][4];
    clear(sums);
    for (int stage = 0; first_k < end; first_k += COLS, stage ^= 1) {
        const REAL *k_tile = stages + stage * 2 * STAGE_ELEMS, *v_tile = k_tile + STAGE_ELEMS;
        if (first_k + COLS < end) {
            REAL* next = stages + (stage ^ 1) * 2 * STAGE_ELEMS;
            copy_rows<COLS>(next, k, k_stride, first_k + COLS, len);
            copy_rows<COLS>(next + STAGE_ELEMS, v, v_stride, first_k + COLS, len);
        }
        commit_copies();
        const int last_k = first_k + COLS - 1;
        if (first_k <= high_q && last_k >= first_key(low_q, window)) {
            f32 s[COLS / 8][4], dp[COLS / 8][4];
            scores(s, own_q, k_tile);
            scores(dp, own_dout, v_tile);
            const bool border = last_k > low_q || first_k < first_key(high_q, window);
#pragma unroll
            for (int n = 0; n < COLS / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int query = low_q + g + i / 2 * 8, key = first_k + 8 * n + 2 * t + i % 2;
                    f32 p = exp2_approx(fmaf(s[n][i], scale_log2, -row_lse[i / 2]));
                    if (border && !sees(query, key, window)) p = 0.0f;
                    s[n][i] = p * (dp[n][i] - row_delta[i / 2]);
                }
            accumulate(sums, s, k_tile);
        }
        wait_copies<0>();
        __syncthreads();
    }
    store_rows(
        dq + base * dq_stride + head * WIDTH, dq_stride, low_q, len, q_tile + warp_row * STRIDE, sums, scale, scale);
}

// dk and dv [T, G h], or one of them. Here rows of scores are keys and columns are queries. A block sums over the
// group's heads, and for each over the queries that see its keys.
template <bool DK, bool DV> __device__ __forceinline__ void sum_over_queries(
    REAL* dk, u32 dk_stride, REAL* dv, u32 dv_stride, const REAL* dout, u32 dout_stride, const f32* lse,
    const f32* delta, const REAL* q, u32 q_stride, const REAL* k, u32 k_stride, const REAL* v, u32 v_stride,
    const u32* bounds, u32 docs, u32 tokens, u32 num_q, u32 group, f32 scale, int window
) {
    Tile tile;
    const u32 num_kv = num_q / group;
    if (!find_tile(bounds, docs, ROWS, blockIdx.x / num_kv, tile)) return;
    const u32 kv_head = blockIdx.x % num_kv;
    const size_t base = tile.base;
    // Start with the group's first head.
    q += base * q_stride + kv_head * group * WIDTH;
    dout += base * dout_stride + kv_head * group * WIDTH;
    lse += (size_t)kv_head * group * tokens + base;
    delta += (size_t)kv_head * group * tokens + base;
    REAL *k_tile = smem, *v_tile = k_tile + TILE_ELEMS, *stages = v_tile + TILE_ELEMS;
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, warp_row = threadIdx.x / 32 * 16, len = tile.len;
    const int first_k = tile.index * ROWS, low_k = first_k + warp_row, high_k = low_k + 15;
    const f32 scale_log2 = scale * LOG2_E;
    const int end = last_query(min(first_k + ROWS, len) - 1, window, len);

    int first_q = first_k;
    copy_rows<ROWS>(k_tile, k + base * k_stride + kv_head * WIDTH, k_stride, first_k, len);
    if (DK) copy_rows<ROWS>(v_tile, v + base * v_stride + kv_head * WIDTH, v_stride, first_k, len);
    copy_rows<COLS>(stages, q, q_stride, first_q, len);
    copy_rows<COLS>(stages + STAGE_ELEMS, dout, dout_stride, first_q, len);
    commit_copies();
    wait_copies<0>();
    __syncthreads();
    WarpRows own_k, own_v;
    own_k.tile = k_tile;
    own_v.tile = v_tile;
    own_k.row = own_v.row = warp_row;
    own_k.load();
    if (DK) own_v.load();

    f32 dk_sums[DK ? WIDTH / 8 : 1][4], dv_sums[DV ? WIDTH / 8 : 1][4];
    clear(dk_sums);
    clear(dv_sums);
    u32 head = 0;
    for (int stage = 0; head < group; stage ^= 1) {
        const REAL *q_tile = stages + stage * 2 * STAGE_ELEMS, *dout_tile = q_tile + STAGE_ELEMS;
        const int next_q = first_q + COLS < end ? first_q + COLS : first_k;
        const bool ends = next_q <= first_q;
        const f32 *head_lse = lse, *head_delta = delta;
        if (ends) {
            q += WIDTH;
            dout += WIDTH;
            lse += tokens;
            delta += tokens;
            head++;
        }
        if (head < group) {
            REAL* next = stages + (stage ^ 1) * 2 * STAGE_ELEMS;
            copy_rows<COLS>(next, q, q_stride, next_q, len);
            copy_rows<COLS>(next + STAGE_ELEMS, dout, dout_stride, next_q, len);
        }
        commit_copies();
        const int last_q = first_q + COLS - 1;
        if (last_q >= low_k && first_q < last_query(min(high_k, len - 1), window, len)) {
            f32 column_lse[COLS / 8][2];
#pragma unroll
            for (int n = 0; n < COLS / 8; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int query = first_q + 8 * n + 2 * t + e;
                    column_lse[n][e] = query < len ? head_lse[query] : infinity();
                }
            f32 p[COLS / 8][4];
            scores(p, own_k, q_tile);
            const bool border = first_q < high_k || last_q - low_k >= window;
#pragma unroll
            for (int n = 0; n < COLS / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int query = first_q + 8 * n + 2 * t + i % 2, key = low_k + g + i / 2 * 8;
                    p[n][i] = exp2_approx(fmaf(p[n][i], scale_log2, -column_lse[n][i % 2]));
                    if (border && !sees(query, key, window)) p[n][i] = 0.0f;
                }
            if constexpr (DV) accumulate(dv_sums, p, dout_tile);
            if constexpr (DK) {
                f32 ds[COLS / 8][4];
                scores(ds, own_v, dout_tile);
#pragma unroll
                for (int n = 0; n < COLS / 8; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const int query = first_q + 8 * n + 2 * t + e;
                        const f32 column_delta = query < len ? head_delta[query] : 0.0f;
                        ds[n][e] = p[n][e] * (ds[n][e] - column_delta);
                        ds[n][e + 2] = p[n][e + 2] * (ds[n][e + 2] - column_delta);
                    }
                accumulate(dk_sums, ds, q_tile);
            }
        }
        first_q = next_q;
        wait_copies<0>();
        __syncthreads();
    }
    if constexpr (DK) {
        dk += base * dk_stride + kv_head * WIDTH;
        store_rows(dk, dk_stride, low_k, len, k_tile + warp_row * STRIDE, dk_sums, scale, scale);
    }
    if constexpr (DV) {
        dv += base * dv_stride + kv_head * WIDTH;
        store_rows(dv, dv_stride, low_k, len, v_tile + warp_row * STRIDE, dv_sums, 1.0f, 1.0f);
    }
}

#if WIDTH <= 128
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) flash_dkv(
    REAL* dk, u32 dk_stride, REAL* dv, u32 dv_stride, const REAL* dout, u32 dout_stride, const f32* lse,
    const f32* delta, const REAL* q, u32 q_stride, const REAL* k, u32 k_stride, const REAL* v, u32 v_stride,
    const u32* bounds, u32 docs, u32 tokens, u32 num_q, u32 group, f32 scale, int window
) {
    sum_over_queries<true, true>(
        dk, dk_stride, dv, dv_stride, dout, dout_stride, lse, delta, q, q_stride, k, k_stride, v, v_stride, bounds,
        docs, tokens, num_q, group, scale, window);
}
#else
// The registers hold the sums of only one of the two.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) flash_dk(
    REAL* dk, u32 dk_stride, REAL* dv, u32 dv_stride, const REAL* dout, u32 dout_stride, const f32* lse,
    const f32* delta, const REAL* q, u32 q_stride, const REAL* k, u32 k_stride, const REAL* v, u32 v_stride,
    const u32* bounds, u32 docs, u32 tokens, u32 num_q, u32 group, f32 scale, int window
) {
    sum_over_queries<true, false>(
        dk, dk_stride, dv, dv_stride, dout, dout_stride, lse, delta, q, q_stride, k, k_stride, v, v_stride, bounds,
        docs, tokens, num_q, group, scale, window);
}
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) flash_dv(
    REAL* dk, u32 dk_stride, REAL* dv, u32 dv_stride, const REAL* dout, u32 dout_stride, const f32* lse,
    const f32* delta, const REAL* q, u32 q_stride, const REAL* k, u32 k_stride, const REAL* v, u32 v_stride,
    const u32* bounds, u32 docs, u32 tokens, u32 num_q, u32 group, f32 scale, int window
) {
    sum_over_queries<false, true>(
        dk, dk_stride, dv, dv_stride, dout, dout_stride, lse, delta, q, q_stride, k, k_stride, v, v_stride, bounds,
        docs, tokens, num_q, group, scale, window);
}
#endif
