// Attention backward on sm_90 tensor cores for wide heads, without sums shared between blocks. One kernel has blocks of
// queries and sums dq over keys; another has blocks of keys and sums dk and dv over queries. Both recompute the
// probabilities from the scores and the log-sum-exps. The latter are in base 2 and, like delta, laid out by head: [H,
// T].
//
// A block owns ROWS rows, 64 per group of four warps, and processes COLS rows of the other kind at a time while the
// next ones are copied. With P and dP = dO·Vᵀ: dS = P ∘ (dP − delta), dq = scale · dS·K, dk = scale · dSᵀ·Q, dv =
// Pᵀ·dO. The rows of the scores are the block's own rows, so P and dS, or their transposes, are left operands in
// registers.

constexpr int TILE_ELEMS = ROWS * WIDTH, STEP_ELEMS = COLS * WIDTH;
static_assert(
    DQ_BYTES == sizeof(REAL) * (2 * TILE_ELEMS + 4 * STEP_ELEMS) && DKV_BYTES == DQ_BYTES + sizeof(f32) * 4 * COLS,
    "must match the shared memory of the launch"
);
// Blocks per multiprocessor that there should be registers for: while the groups of one block wait, another runs.
constexpr int BLOCKS = 2 / GROUPS;

// dq [T, H h].
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) hopper_dq(
    REAL* dq, u32 dq_stride, const REAL* dout, u32 dout_stride, const f32* lse, const f32* delta, const REAL* q,
    u32 q_stride, const REAL* k, const REAL* v, u32 kv_stride, const u32* bounds, u32 docs, u32 tokens,
    u32 num_q, u32 group, f32 scale, int window
) {
    Tile tile;
    if (!find_tile_by_rank(bounds, docs, ROWS, blockIdx.x / num_q, docs_per_group(num_q), tile)) return;
    const u32 head = blockIdx.x % num_q, kv_head = head / group;
    const size_t base = tile.base;
    q += base * q_stride + head * WIDTH;
    dout += base * dout_stride + head * WIDTH;
    const long long v_offset = v - k;
    k += base * kv_stride + kv_head * WIDTH;
    REAL *q_tile = smem, *dout_tile = q_tile + TILE_ELEMS, *stages = dout_tile + TILE_ELEMS;
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, len = tile.len;
    const int group_row = warp_group() * 64, warp_row = threadIdx.x / 32 * 16;
    const int first_q = (tile.count - 1 - tile.index) * ROWS, end = min(first_q + ROWS, len);
    // The group's first and last query, and this thread's first.
    const int low_q = first_q + group_row, high_q = low_q + 63, own_q = first_q + warp_row + g;
    const f32 scale_log2 = scale * LOG2_E;
    window = min(window, len);

    // Rows past the end have zero probabilities.
    f32 row_lse[2], row_delta[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int query = own_q + 8 * r;
        const size_t at = (size_t)head * tokens + base + query;
        row_lse[r] = query < len ? lse[at] : infinity();
        row_delta[r] = query < len ? delta[at] : 0.0f;
    }
    int first_k = first_key(first_q, window) / COLS * COLS;
    copy_rows<ROWS>(q_tile, q, q_stride, first_q, len);
    copy_rows<ROWS>(dout_tile, dout, dout_stride, first_q, len);
    copy_rows<COLS, STEP_ELEMS>(stages, k, kv_stride, first_k, len, v_offset);
    commit_copies();
    const u32 group_q = tile_at(q_tile + group_row * PANEL_COLS);
    const u32 group_dout = tile_at(dout_tile + group_row * PANEL_COLS);

    f32 sums[WIDTH / 8][4];
    clear(sums);
    for (int stage = 0; first_k < end; first_k += COLS, stage ^= 1) {
        const REAL *k_tile = stages + stage * 2 * STEP_ELEMS, *v_tile = k_tile + STEP_ELEMS;
        wait_copies<0>();
        fence_async_proxy();
        __syncthreads();
        if (first_k + COLS < end) {
            REAL* next = stages + (stage ^ 1) * 2 * STEP_ELEMS;
            copy_rows<COLS, STEP_ELEMS>(next, k, kv_stride, first_k + COLS, len, v_offset);
        }
        commit_copies();
        const int last_k = first_k + COLS - 1;
        if (first_k > high_q || last_k < first_key(low_q, window)) continue;

        f32 s[COLS / 8][4], dp[COLS / 8][4];
        wgmma_fence();
        scores<ROWS, COLS>(s, group_q, tile_at(k_tile));
        wgmma_commit();
        scores<ROWS, COLS>(dp, group_dout, tile_at(v_tile));
        wgmma_commit();
        wgmma_wait<1>();
        register_fence(s);
#pragma unroll
        for (int n = 0; n < COLS / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) s[n][i] = exp2_approx(fmaf(s[n][i], scale_log2, -row_lse[i / 2]));
        if (last_k > low_q || first_k < first_key(high_q, window)) {
            const int past_last = own_q + 1 - first_k - 2 * t;
            mask_outside<COLS>(s, past_last - window, past_last, 0.0f);
        }
        wgmma_wait<0>();
        register_fence(dp);
#pragma unroll
        for (int n = 0; n < COLS / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) s[n][i] *= dp[n][i] - row_delta[i / 2];
        u32 ds[COLS / 16][4];
        round_to_a<COLS>(ds, s);
        register_fence(sums);
        wgmma_fence();
        accumulate<COLS>(sums, ds, tile_at(k_tile, COLS * ROW_BYTES));
        wgmma_commit();
        wgmma_wait<0>();
        register_fence(sums);
    }
    __syncthreads();
    dq += base * dq_stride + head * WIDTH;
    store_rows(dq, dq_stride, first_q + warp_row, len, q_tile, warp_row, sums, scale, scale);
}

// A step of the second kernel: COLS queries of one head.
struct Step {
    REAL *q, *dout;
    // The log-sum-exp and delta of each query.
    f32 *lse, *delta;

    __device__ __forceinline__ explicit Step(int stage) {
        q = smem + 2 * TILE_ELEMS + stage * 2 * STEP_ELEMS;
        dout = q + STEP_ELEMS;
        lse = reinterpret_cast<f32*>(smem + 2 * TILE_ELEMS + 4 * STEP_ELEMS) + stage * 2 * COLS;
        delta = lse + COLS;
    }
};

// dk, dv [T, G h]: sums over the group's query heads and the queries that see the block's keys.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) hopper_dkv(
    REAL* dk, u32 dk_stride, REAL* dv, u32 dv_stride, const REAL* dout, u32 dout_stride, const f32* lse,
    const f32* delta, const REAL* q, u32 q_stride, const REAL* k, const REAL* v, u32 kv_stride,
    const u32* bounds, u32 docs, u32 tokens, u32 num_q, u32 group, f32 scale, int window
) {
    static_assert(THREADS >= 2 * COLS, "a thread copies at most one lse or delta");
    Tile tile;
    const u32 num_kv = num_q / group;
    if (!find_tile_by_rank(bounds, docs, ROWS, blockIdx.x / num_kv, docs_per_group(num_kv), tile)) return;
    const u32 kv_head = blockIdx.x % num_kv;
    const size_t base = tile.base;
    // Start with the group's first head.
    q += base * q_stride + kv_head * group * WIDTH;
    dout += base * dout_stride + kv_head * group * WIDTH;
    // The value that this thread copies: a query's log-sum-exp or delta.
    const int number = threadIdx.x % (2 * COLS);
    const f32* numbers = (number < COLS ? lse : delta) + (size_t)kv_head * group * tokens + base + number % COLS;
    REAL *k_tile = smem, *v_tile = k_tile + TILE_ELEMS;
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, len = tile.len;
    const int group_row = warp_group() * 64, warp_row = threadIdx.x / 32 * 16;
    const int first_k = tile.index * ROWS, low_k = first_k + group_row, high_k = low_k + 63;
    const int own_k = first_k + warp_row + g;
    const int end = last_query(min(first_k + ROWS, len) - 1, window, len);
    const f32 scale_log2 = scale * LOG2_E;
    window = min(window, len);
    const auto copy_step = [&](int stage, int first_q) {
        const Step step(stage);
        copy_rows<COLS>(step.q, q, q_stride, first_q, len);
        copy_rows<COLS>(step.dout, dout, dout_stride, first_q, len);
        if (threadIdx.x < 2 * COLS)
            copy_async(step.lse + number, numbers + first_q, first_q + number % COLS < len);
    };

    int first_q = first_k;
    copy_rows<ROWS>(k_tile, k + base * kv_stride + kv_head * WIDTH, kv_stride, first_k, len);
    copy_rows<ROWS>(v_tile, v + base * kv_stride + kv_head * WIDTH, kv_stride, first_k, len);
    copy_step(0, first_q);
    commit_copies();
    const u32 group_k = tile_at(k_tile + group_row * PANEL_COLS);
    const u32 group_v = tile_at(v_tile + group_row * PANEL_COLS);

    f32 dk_sums[WIDTH / 8][4], dv_sums[WIDTH / 8][4];
    clear(dk_sums);
    clear(dv_sums);
    u32 head = 0;
    for (int stage = 0; head < group; stage ^= 1) {
        const Step step(stage);
        const int here = first_q, last_q = first_q + COLS - 1;
        wait_copies<0>();
        fence_async_proxy();
        __syncthreads();
        first_q = first_q + COLS < end ? first_q + COLS : first_k;
        if (first_q <= here) {
            q += WIDTH;
            dout += WIDTH;
            numbers += tokens;
            head++;
        }
        if (head < group) copy_step(stage ^ 1, first_q);
        commit_copies();
        if (last_q < low_k || here >= last_query(min(high_k, len - 1), window, len)) continue;

        // Transposed: keys by queries.
        f32 p[COLS / 8][4], ds[COLS / 8][4];
        wgmma_fence();
        scores<ROWS, COLS>(p, group_k, tile_at(step.q));
        wgmma_commit();
        scores<ROWS, COLS>(ds, group_v, tile_at(step.dout));
        wgmma_commit();
        wgmma_wait<1>();
        register_fence(p);
        // Queries past the end are zero, and so is their dO: whatever their P is, it contributes nothing.
#pragma unroll
        for (int n = 0; n < COLS / 8; n++) {
            const Chunk<f32, 2> lses = load_chunk<2>(step.lse + 8 * n + 2 * t);
#pragma unroll
            for (int i = 0; i < 4; i++) p[n][i] = exp2_approx(fmaf(p[n][i], scale_log2, -lses.at[i % 2]));
        }
        if (here < high_k || last_q - low_k >= window) {
            const int first = own_k - here - 2 * t;
            mask_outside<COLS>(p, first, first + window, 0.0f);
        }
        u32 rounded_p[COLS / 16][4], rounded_ds[COLS / 16][4];
        // The matmul of dv runs while dS is computed.
        round_to_a<COLS>(rounded_p, p);
        register_fence(dv_sums);
        wgmma_fence();
        accumulate<COLS>(dv_sums, rounded_p, tile_at(step.dout, COLS * ROW_BYTES));
        wgmma_commit();
        wgmma_wait<1>();
        register_fence(ds);
#pragma unroll
        for (int n = 0; n < COLS / 8; n++) {
            const Chunk<f32, 2> deltas = load_chunk<2>(step.delta + 8 * n + 2 * t);
#pragma unroll
            for (int i = 0; i < 4; i++) ds[n][i] = p[n][i] * (ds[n][i] - deltas.at[i % 2]);
        }
        round_to_a<COLS>(rounded_ds, ds);
        register_fence(dk_sums);
        wgmma_fence();
        accumulate<COLS>(dk_sums, rounded_ds, tile_at(step.q, COLS * ROW_BYTES));
        wgmma_commit();
        wgmma_wait<0>();
        register_fence(dv_sums);
        register_fence(dk_sums);
    }
    __syncthreads();
    dk += base * dk_stride + kv_head * WIDTH;
    dv += base * dv_stride + kv_head * WIDTH;
    store_rows(dk, dk_stride, first_k + warp_row, len, k_tile, warp_row, dk_sums, scale, scale);
    store_rows(dv, dv_stride, first_k + warp_row, len, v_tile, warp_row, dv_sums, 1.0f, 1.0f);
}
