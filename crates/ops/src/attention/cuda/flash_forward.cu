// Attention forward on tensor cores. A block has ROWS queries of one head. A warp has ROWS / 4 of them and processes
// KEYS keys at a time. Values are copied while scores are computed, and the next keys while values are summed. The
// softmax is in base 2: `scale` becomes scale * log2(e).

// 16-row fragments of a warp.
constexpr int PARTS = ROWS / 16 / WARPS;
static_assert(FORWARD_BYTES == sizeof(REAL) * (ROWS + 2 * KEYS) * STRIDE, "must match the shared memory of the launch");
// Blocks per multiprocessor that there should be registers for.
constexpr int BLOCKS = WIDTH <= 48 ? 3 : WIDTH <= 128 ? 2 : 1;

// Attention of queries of one head over the keys they see. Queries and keys are counted from the document's start. The
// first of the `rows` rows of q, and of the output, is query `past`. `KeyRows` is how the rows of k and v are found.
template <typename KeyRows>
__device__ __forceinline__ void attend(
    REAL* out, u32 out_stride, f32* lse, u32 lse_stride, const REAL* q, u32 q_stride, const KeyRows& k,
    u32 k_stride, const KeyRows& v, u32 v_stride, int tile, int rows, int past, f32 scale, int window
) {
    REAL *q_tile = smem, *k_tile = q_tile + ROWS * STRIDE, *v_tile = k_tile + KEYS * STRIDE;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int warp_row = threadIdx.x / 32 * 16 * PARTS;
    const int first_row = tile * ROWS, first_q = past + first_row, keys = past + rows;
    const int end = min(first_q + ROWS, keys);
    // The warp's first and last query.
    const int low_q = first_q + warp_row, high_q = low_q + 16 * PARTS - 1;
    const f32 scale_log2 = scale * LOG2_E;

    f32 sums[PARTS][WIDTH / 8][4], largest[PARTS][2], sum[PARTS][2];
#pragma unroll
    for (int m = 0; m < PARTS; m++) {
        clear(sums[m]);
        largest[m][0] = largest[m][1] = -infinity();
        sum[m][0] = sum[m][1] = 0.0f;
    }
    int first_k = first_key(first_q, window) / KEYS * KEYS;
    copy_rows<ROWS>(q_tile, q, q_stride, first_row, rows);
    copy_rows<KEYS>(k_tile, k.tile(first_k), k_stride, first_k, keys);
    commit_copies();
    for (; first_k < end; first_k += KEYS) {
        const int last_k = first_k + KEYS - 1;
        // Rows that see none of these keys keep their sums.
        const bool seen = first_k <= high_q && last_k >= first_key(low_q, window);
        wait_copies<0>();
        __syncthreads();
        copy_rows<KEYS>(v_tile, v.tile(first_k), v_stride, first_k, keys);
        commit_copies();

        f32 s[PARTS][KEYS / 8][4];
        if (seen) {
#pragma unroll
            for (int m = 0; m < PARTS; m++) clear(s[m]);
#pragma unroll
            for (int c = 0; c < WIDTH; c += 16) {
                u32 a[PARTS][4];
#pragma unroll
                for (int m = 0; m < PARTS; m++) load_a(a[m], q_tile, warp_row + 16 * m, c);
#pragma unroll
                for (int n = 0; n < KEYS / 16; n++) {
                    u32 b[4];
                    load_b_of_rows(b, k_tile, 16 * n, c);
#pragma unroll
                    for (int m = 0; m < PARTS; m++) {
                        multiply(s[m][2 * n], a[m], b[0], b[1], REAL{});
                        multiply(s[m][2 * n + 1], a[m], b[2], b[3], REAL{});
                    }
                }
            }
        }
        wait_copies<0>();
        __syncthreads();
        if (first_k + KEYS < end)
            copy_rows<KEYS>(k_tile, k.tile(first_k + KEYS), k_stride, first_k + KEYS, keys);
        commit_copies();
        if (!seen) continue;

        if (last_k > low_q || first_k < first_key(high_q, window)) {
#pragma unroll
            for (int m = 0; m < PARTS; m++)
#pragma unroll
                for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const int query = low_q + 16 * m + g + i / 2 * 8, key = first_k + 8 * n + 2 * t + i % 2;
                        if (!sees(query, key, window)) s[m][n][i] = -infinity();
                    }
        }
#pragma unroll
        for (int m = 0; m < PARTS; m++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                f32 max_score = largest[m][r];
#pragma unroll
                for (int n = 0; n < KEYS / 8; n++)
                    max_score = fmaxf(max_score, fmaxf(s[m][n][2 * r], s[m][n][2 * r + 1]));
                max_score = quad_max(max_score);
                const f32 from = max_score == -infinity() ? 0.0f : max_score, base = from * scale_log2;
                // Exactly one if the largest score is unchanged.
                const f32 rescale = exp2_approx((largest[m][r] - from) * scale_log2);
                f32 total = 0.0f;
#pragma unroll
                for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                    for (int i = 2 * r; i < 2 * r + 2; i++) {
                        s[m][n][i] = exp2_approx(fmaf(s[m][n][i], scale_log2, -base));
                        total += s[m][n][i];
                    }
                sum[m][r] = fmaf(sum[m][r], rescale, total);
                largest[m][r] = max_score;
#pragma unroll
                for (int n = 0; n < WIDTH / 8; n++) {
                    sums[m][n][2 * r] *= rescale;
                    sums[m][n][2 * r + 1] *= rescale;
                }
            }
#pragma unroll
        for (int j = 0; j < KEYS / 16; j++) {
            u32 a[PARTS][4];
#pragma unroll
            for (int m = 0; m < PARTS; m++) round_to_a(a[m], s[m], j);
#pragma unroll
            for (int n = 0; n < WIDTH / 16; n++) {
                u32 b[4];
                load_b(b, v_tile, 16 * j, 16 * n);
#pragma unroll
                for (int m = 0; m < PARTS; m++) {
                    multiply(sums[m][2 * n], a[m], b[0], b[1], REAL{});
                    multiply(sums[m][2 * n + 1], a[m], b[2], b[3], REAL{});
                }
            }
        }
    }
#pragma unroll
    for (int m = 0; m < PARTS; m++) {
        f32 by[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const f32 total = quad_sum(sum[m][r]);
            const int row = first_row + warp_row + 16 * m + g + 8 * r;
            if (lse != nullptr && t == 0 && row < rows)
                lse[(size_t)row * lse_stride] = largest[m][r] * scale + logf(total);
            by[r] = 1.0f / total;
        }
        const int part = warp_row + 16 * m;
        store_rows(out, out_stride, first_row + part, rows, q_tile + part * STRIDE, sums[m], by[0], by[1]);
    }
}

// out [T, H h] and lse [T, H] from q [T, H h], k, v [T, G h]. A document's last rows, which see the most keys, come
// first in the grid.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) flash_forward(
    REAL* out, u32 out_stride, f32* lse, const REAL* q, u32 q_stride, const REAL* k, u32 k_stride, const REAL* v,
    u32 v_stride, const u32* bounds, u32 docs, u32 num_q, u32 group, f32 scale, int window
) {
    Tile tile;
    if (!find_tile(bounds, docs, ROWS, blockIdx.x / num_q, tile)) return;
    const u32 head = blockIdx.x % num_q, kv_head = head / group;
    const size_t base = tile.base;
    attend(
        out + base * out_stride + head * WIDTH, out_stride, lse + base * num_q + head, num_q,
        q + base * q_stride + head * WIDTH, q_stride, ContiguousRows{k + base * k_stride + kv_head * WIDTH}, k_stride,
        ContiguousRows{v + base * v_stride + kv_head * WIDTH}, v_stride, tile.count - 1 - tile.index, tile.len, 0,
        scale, window);
}

// The same for new tokens of documents whose keys and values, including the new ones, are in the pages of a KV cache.
// A page holds whole tiles of keys. `positions` [T].
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) flash_decode(
    REAL* out, u32 out_stride, const REAL* q, u32 q_stride, const REAL* cache, u32 num_pages, u32 page_shift,
    const u32* page_tables, u32 table_len, const u32* positions, const u32* bounds, u32 docs, u32 num_q, u32 group,
    f32 scale, int window
) {
    Tile tile;
    if (!find_tile(bounds, docs, ROWS, blockIdx.x / num_q, tile)) return;
    const u32 head = blockIdx.x % num_q, past = positions[tile.base];
    if (past + tile.len > table_len << page_shift) return;
    const size_t base = tile.base;
    const HeadCache of_head(
        cache, num_pages, page_shift, page_tables, table_len, tile.doc, num_q / group, head / group);
    attend(
        out + base * out_stride + head * WIDTH, out_stride, nullptr, 0, q + base * q_stride + head * WIDTH, q_stride,
        of_head.keys, WIDTH, of_head.values, WIDTH, tile.count - 1 - tile.index, tile.len, (int)past, scale, window);
}
