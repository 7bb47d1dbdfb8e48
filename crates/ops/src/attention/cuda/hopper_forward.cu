// Attention forward on sm_90 tensor cores. A block has ROWS queries of one head, 64 per group of four warps, and
// processes KEYS keys at a time while the next keys and values are copied. Two blocks share a multiprocessor, so the
// matmuls of some groups run during the softmax of others. The softmax is in base 2: `scale` becomes scale * log2(e).

constexpr int BLOCKS = 2;
// Exponentials are relative to a reference score that is at most this many powers of two below the row's maximum so
// far. So most steps need not change the reference and rescale the sums.
constexpr f32 RESCALE_THRESHOLD = 8.0f;
// The reference before a row has seen a key: less than any score, but finite, so that masked keys, which score minus
// infinity, contribute zero.
constexpr f32 NO_SCORE = -3e38f;
constexpr int KEY_ELEMS = KEYS * WIDTH;
static_assert(
    FORWARD_BYTES == sizeof(REAL) * (ROWS * WIDTH + 4 * KEY_ELEMS), "must match the shared memory of the launch"
);

// out [T, H h] and lse [T, H] from q [T, H h], k, v [T, G h]. A document's last rows, which see the most keys, come
// first in the grid.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) hopper_forward(
    REAL* out, u32 out_stride, f32* lse, const REAL* q, u32 q_stride, const REAL* k, const REAL* v,
    u32 kv_stride, const u32* bounds, u32 docs, u32 num_q, u32 group, f32 scale, int window
) {
    Tile tile;
    if (!find_tile_by_rank(bounds, docs, ROWS, blockIdx.x / num_q, docs_per_group(num_q), tile)) return;
    const u32 head = blockIdx.x % num_q, kv_head = head / group;
    const size_t base = tile.base;
    q += base * q_stride + head * WIDTH;
    const long long v_offset = v - k;
    k += base * kv_stride + kv_head * WIDTH;
    REAL *q_tile = smem, *k_tiles = q_tile + ROWS * WIDTH, *v_tiles = k_tiles + 2 * KEY_ELEMS;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, len = tile.len;
    const int group_row = warp_group() * 64, warp_row = threadIdx.x / 32 * 16;
    const int first_q = (tile.count - 1 - tile.index) * ROWS, end = min(first_q + ROWS, len);
    // The group's first and last query, and this thread's first.
    const int low_q = first_q + group_row, high_q = low_q + 63, own_q = first_q + warp_row + g;
    const f32 scale_log2 = scale * LOG2_E;
    window = min(window, len);

    f32 sums[WIDTH / 8][4], from[2] = {NO_SCORE, NO_SCORE}, sum[2] = {0.0f, 0.0f};
    clear(sums);
    int first_k = first_key(first_q, window) / KEYS * KEYS;
    copy_rows<ROWS>(q_tile, q, q_stride, first_q, len);
    copy_rows<KEYS, 2 * KEY_ELEMS>(k_tiles, k, kv_stride, first_k, len, v_offset);
    commit_copies();
    const u32 own = tile_at(q_tile + group_row * PANEL_COLS);
    for (int stage = 0; first_k < end; first_k += KEYS, stage ^= 1) {
        const int last_k = first_k + KEYS - 1;
        wait_copies<0>();
        fence_async_proxy();
        __syncthreads();
        if (first_k + KEYS < end) {
            const int next = (stage ^ 1) * KEY_ELEMS;
            copy_rows<KEYS, 2 * KEY_ELEMS>(k_tiles + next, k, kv_stride, first_k + KEYS, len, v_offset);
        }
        commit_copies();
        // Rows that see none of these keys keep their sums.
        if (first_k > high_q) continue;

        f32 s[KEYS / 8][4];
        wgmma_fence();
        scores<ROWS, KEYS>(s, own, tile_at(k_tiles + stage * KEY_ELEMS));
        wgmma_commit();
        wgmma_wait<0>();
        register_fence(s);
        if (last_k > low_q || first_k < first_key(high_q, window)) {
            const int past_last = own_q + 1 - first_k - 2 * t;
            mask_outside<KEYS>(s, past_last - window, past_last, -infinity());
        }
        f32 rescale[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            f32 max_score = s[0][2 * r];
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) max_score = fmaxf(max_score, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
            max_score = quad_max(max_score) * scale_log2;
            const bool rescales = max_score - from[r] > RESCALE_THRESHOLD;
            rescale[r] = rescales ? exp2_approx(from[r] - max_score) : 1.0f;
            if (rescales) from[r] = max_score;
            sum[r] *= rescale[r];
        }
        if (__any_sync(0xffffffffu, rescale[0] != 1.0f || rescale[1] != 1.0f)) {
#pragma unroll
            for (int n = 0; n < WIDTH / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) sums[n][i] *= rescale[i / 2];
        }
        u32 p[KEYS / 16][4];
#pragma unroll
        for (int j = 0; j < KEYS / 16; j++) {
#pragma unroll
            for (int n = 2 * j; n < 2 * j + 2; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    s[n][i] = exp2_approx(fmaf(s[n][i], scale_log2, -from[i / 2]));
                    sum[i / 2] += s[n][i];
                }
            round_to_a(p[j], s, j);
        }
        register_fence(sums);
        wgmma_fence();
        accumulate<KEYS>(sums, p, tile_at(v_tiles + stage * KEY_ELEMS, KEYS * ROW_BYTES));
        wgmma_commit();
        wgmma_wait<0>();
        register_fence(sums);
    }
    f32 by[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const f32 total = quad_sum(sum[r]);
        const int query = own_q + 8 * r;
        if (t == 0 && query < len) lse[(base + query) * num_q + head] = from[r] / LOG2_E + logf(total);
        by[r] = 1.0f / total;
    }
    __syncthreads();
    out += base * out_stride + head * WIDTH;
    store_rows(out, out_stride, first_q + warp_row, len, q_tile, warp_row, sums, by[0], by[1]);
}
