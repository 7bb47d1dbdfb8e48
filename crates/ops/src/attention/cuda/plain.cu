// Attention without tensor cores: for f32, any head width, and dropout. A block of THREADS = 64 threads processes tiles
// of TILE queries and TILE keys, which are in shared memory as f32. Thread (y, x) of 8 x 8 has rows y + 8 i and columns
// x + 8 j of a tile of scores; of a tile of outputs it has rows y + 8 i and every eighth group of four columns. The
// eight threads of a row are adjacent in one warp, so a row's softmax needs no shared memory.
//
// WIDTH is the head width h, at most 512; TILE is 8, 16 or 32.

// Rows (and columns of scores) of a thread.
constexpr int N = TILE / 8;
// Groups of four columns: of a row, and of a thread.
constexpr int FOURS = (WIDTH + 3) / 4;
constexpr int OWN_FOURS = (FOURS + 7) / 8;
// The host chooses the distance between rows: an odd multiple of four, so that eight rows' groups lie in different
// banks.
static_assert(STRIDE >= 4 * FOURS && STRIDE % 8 == 4, "an odd multiple of four that holds a row");
constexpr int TILE_ELEMS = TILE * STRIDE;
constexpr int SCORE_STRIDE = TILE + 1;
constexpr int SCORE_ELEMS = TILE * SCORE_STRIDE;
static_assert(
    FORWARD_BYTES == 4 * (2 * TILE_ELEMS + SCORE_ELEMS) && DQ_BYTES == 4 * (4 * TILE_ELEMS + SCORE_ELEMS)
        && DKV_BYTES == 4 * (4 * TILE_ELEMS + 2 * SCORE_ELEMS),
    "must match the shared memory of the launch"
);

extern __shared__ __align__(16) f32 smem[];

// The parameters of dropout's masks; `samples` [documents] is null if there is no dropout.
struct Dropout {
    const u32* samples;
    u64 seed;
    u32 step, mask_index, threshold;
    f32 scale;
};

// The mask of one head of one document.
struct HeadMask {
    bool active;
    DocMask mask;
    u32 head;

    __device__ __forceinline__ f32 factor(int i, int j) const {
        if (!active) return 1.0f;
        const Factors four = mask_factors(mask, head, (u32)i, (u32)j / 4);
        const int at = j % 4;
        return at < 2 ? (at == 0 ? four.at[0] : four.at[1]) : (at == 2 ? four.at[2] : four.at[3]);
    }
};

__device__ __forceinline__ HeadMask head_mask(const Dropout& dropout, u32 doc, u32 head) {
    if (dropout.samples == nullptr) return HeadMask{false, DocMask{0, 0, 1.0f}, head};
    const DocMask mask = doc_mask(
        dropout.seed, dropout.step, dropout.samples[doc], dropout.mask_index, dropout.threshold, dropout.scale);
    return HeadMask{true, mask, head};
}

// Loads rows [first, first + TILE) of one head. Rows from `len` on are zero, and so are the columns that pad the last
// group of four.
__device__ __forceinline__ void load_tile(f32* to, const REAL* from, size_t stride, int first, int len) {
    for (int at = threadIdx.x; at < TILE * FOURS * 4; at += THREADS) {
        const int row = at / (FOURS * 4), col = at % (FOURS * 4);
        const bool valid = first + row < len && col < WIDTH;
        to[row * STRIDE + col] = valid ? to_f32(from[(size_t)(first + row) * stride + col]) : 0.0f;
    }
}

// s[i][j] = row y + 8 i of a · row x + 8 j of b.
__device__ __forceinline__ void dot_products(f32 (&s)[N][N], const f32* a, const f32* b, int y, int x) {
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
        for (int j = 0; j < N; j++) s[i][j] = 0.0f;
#pragma unroll 4
    for (int c = 0; c < FOURS; c++) {
        float4 left[N], right[N];
#pragma unroll
        for (int i = 0; i < N; i++) {
            left[i] = *reinterpret_cast<const float4*>(a + (y + 8 * i) * STRIDE + 4 * c);
            right[i] = *reinterpret_cast<const float4*>(b + (x + 8 * i) * STRIDE + 4 * c);
        }
#pragma unroll
        for (int i = 0; i < N; i++)
#pragma unroll
            for (int j = 0; j < N; j++) {
                f32 sum = fmaf(left[i].x, right[j].x, s[i][j]);
                sum = fmaf(left[i].y, right[j].y, sum);
                sum = fmaf(left[i].z, right[j].z, sum);
                s[i][j] = fmaf(left[i].w, right[j].w, sum);
            }
    }
}

// The elements of a tile of outputs that a thread sums.
struct Sums {
    float4 at[N][OWN_FOURS];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < N; i++)
#pragma unroll
            for (int g = 0; g < OWN_FOURS; g++) at[i][g] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }

    __device__ __forceinline__ void scale(int i, f32 by) {
#pragma unroll
        for (int g = 0; g < OWN_FOURS; g++) {
            at[i][g].x *= by;
            at[i][g].y *= by;
            at[i][g].z *= by;
            at[i][g].w *= by;
        }
    }

    // += p [TILE, TILE] · b [TILE, h].
    __device__ __forceinline__ void add(const f32* p, const f32* b, int y, int x) {
#pragma unroll 2
        for (int k = 0; k < TILE; k++) {
            f32 weight[N];
#pragma unroll
            for (int i = 0; i < N; i++) weight[i] = p[(y + 8 * i) * SCORE_STRIDE + k];
#pragma unroll
            for (int g = 0; g < OWN_FOURS; g++) {
                if (x + 8 * g >= FOURS) continue;
                const float4 value = *reinterpret_cast<const float4*>(b + k * STRIDE + 4 * (x + 8 * g));
#pragma unroll
                for (int i = 0; i < N; i++) {
                    at[i][g].x = fmaf(weight[i], value.x, at[i][g].x);
                    at[i][g].y = fmaf(weight[i], value.y, at[i][g].y);
                    at[i][g].z = fmaf(weight[i], value.z, at[i][g].z);
                    at[i][g].w = fmaf(weight[i], value.w, at[i][g].w);
                }
            }
        }
    }

    // Writes row i, times `by`, to `to` [h].
    __device__ __forceinline__ void write(REAL* to, int i, f32 by, int x) const {
#pragma unroll
        for (int g = 0; g < OWN_FOURS; g++) {
            const int col = 4 * (x + 8 * g);
            if (col < WIDTH) to[col] = from_f32<REAL>(at[i][g].x * by);
            if (col + 1 < WIDTH) to[col + 1] = from_f32<REAL>(at[i][g].y * by);
            if (col + 2 < WIDTH) to[col + 2] = from_f32<REAL>(at[i][g].z * by);
            if (col + 3 < WIDTH) to[col + 3] = from_f32<REAL>(at[i][g].w * by);
        }
    }
};

// Reductions over the eight threads of a row.
__device__ __forceinline__ f32 row_max(f32 x) {
#pragma unroll
    for (int offset = 4; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
    return x;
}
__device__ __forceinline__ f32 row_sum(f32 x) {
#pragma unroll
    for (int offset = 4; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
}

// Attention of queries [first_q, first_q + TILE) of one head over the keys they see. Queries and keys are counted from
// the document's start. The first of the `rows` rows of q, and of the output, is query `past`. `KeyRows` is how rows of
// k and v are found.
template <typename KeyRows>
__device__ __forceinline__ void attend(
    REAL* out, size_t out_stride, f32* lse, u32 lse_stride, const REAL* q, size_t q_stride, const KeyRows& k,
    size_t k_stride, const KeyRows& v, size_t v_stride, int tile, int rows, int past, f32 scale, int window,
    const HeadMask& mask
) {
    f32 *q_tile = smem, *kv_tile = smem + TILE_ELEMS, *p = smem + 2 * TILE_ELEMS;
    const int y = threadIdx.x / 8, x = threadIdx.x % 8;
    const int first_row = tile * TILE, first_q = past + first_row, keys = past + rows;
    const int end = min(first_q + TILE, keys);
    load_tile(q_tile, q, q_stride, first_row, rows);

    f32 largest[N], sum[N];
    Sums sums;
    sums.clear();
#pragma unroll
    for (int i = 0; i < N; i++) {
        largest[i] = -infinity();
        sum[i] = 0.0f;
    }
    for (int first_k = first_key(first_q, window) / TILE * TILE; first_k < end; first_k += TILE) {
        __syncthreads();
        load_tile(kv_tile, k.tile(first_k), k_stride, first_k, keys);
        __syncthreads();
        f32 s[N][N];
        dot_products(s, q_tile, kv_tile, y, x);
#pragma unroll
        for (int i = 0; i < N; i++) {
            const int query = first_q + y + 8 * i;
            f32 max_score = largest[i];
#pragma unroll
            for (int j = 0; j < N; j++) {
                s[i][j] = sees(query, first_k + x + 8 * j, window) ? s[i][j] * scale : -infinity();
                max_score = fmaxf(max_score, s[i][j]);
            }
            max_score = row_max(max_score);
            // A row that has not seen a key yet keeps its zeros.
            const f32 base = max_score == -infinity() ? 0.0f : max_score;
            const f32 rescale = expf(largest[i] - base);
            f32 total = 0.0f;
#pragma unroll
            for (int j = 0; j < N; j++) {
                const f32 one = expf(s[i][j] - base);
                total += one;
                const int key = first_k + x + 8 * j;
                p[(y + 8 * i) * SCORE_STRIDE + x + 8 * j] = one * mask.factor(query, key);
            }
            sum[i] = sum[i] * rescale + row_sum(total);
            largest[i] = max_score;
            sums.scale(i, rescale);
        }
        __syncthreads();
        load_tile(kv_tile, v.tile(first_k), v_stride, first_k, keys);
        __syncthreads();
        sums.add(p, kv_tile, y, x);
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        const int row = first_row + y + 8 * i;
        if (row >= rows) continue;
        if (lse != nullptr && x == 0) lse[(size_t)row * lse_stride] = largest[i] + logf(sum[i]);
        sums.write(out + (size_t)row * out_stride, i, 1.0f / sum[i], x);
    }
}

// out [T, H h] and lse [T, H] from q [T, H h], k, v [T, G h].
extern "C" __global__ void __launch_bounds__(THREADS) plain_forward(
    REAL* out, u32 out_stride, f32* lse, const REAL* q, u32 q_stride, const REAL* k, u32 k_stride, const REAL* v,
    u32 v_stride, const u32* bounds, u32 docs, u32 num_q, u32 group, f32 scale, int window, const u32* samples,
    u64 seed, u32 step, u32 mask_index, u32 threshold, f32 kept
) {
    Tile tile;
    if (!find_tile(bounds, docs, TILE, blockIdx.x / num_q, tile)) return;
    const u32 head = blockIdx.x % num_q, kv_head = head / group;
    const size_t base = tile.base;
    const HeadMask mask = head_mask(Dropout{samples, seed, step, mask_index, threshold, kept}, tile.doc, head);
    attend(
        out + base * out_stride + head * WIDTH, out_stride, lse + base * num_q + head, num_q,
        q + base * q_stride + head * WIDTH, q_stride, ContiguousRows{k + base * k_stride + kv_head * WIDTH}, k_stride,
        ContiguousRows{v + base * v_stride + kv_head * WIDTH}, v_stride, tile.count - 1 - tile.index, tile.len, 0,
        scale, window, mask);
}

// The same for new tokens of documents whose keys and values, including the new ones, are in the pages of a KV cache.
// A page holds whole tiles of keys. `positions` [T].
extern "C" __global__ void __launch_bounds__(THREADS) plain_decode(
    REAL* out, u32 out_stride, const REAL* q, u32 q_stride, const REAL* cache, u32 num_pages, u32 page_shift,
    const u32* page_tables, u32 table_len, const u32* positions, const u32* bounds, u32 docs, u32 num_q, u32 group,
    f32 scale, int window
) {
    Tile tile;
    if (!find_tile(bounds, docs, TILE, blockIdx.x / num_q, tile)) return;
    const u32 head = blockIdx.x % num_q, past = positions[tile.base];
    if (past + tile.len > table_len << page_shift) return;
    const size_t base = tile.base;
    const HeadCache of_head(
        cache, num_pages, page_shift, page_tables, table_len, tile.doc, num_q / group, head / group);
    attend(
        out + base * out_stride + head * WIDTH, out_stride, nullptr, 0, q + base * q_stride + head * WIDTH, q_stride,
        of_head.keys, WIDTH, of_head.values, WIDTH, tile.count - 1 - tile.index, tile.len, (int)past, scale, window,
        HeadMask{false, DocMask{0, 0, 1.0f}, head});
}

// dq [T, H h] from the saved tensors of forward and the gradient of its output. lse and delta are laid out by head:
// [H, T].
extern "C" __global__ void __launch_bounds__(THREADS) plain_dq(
    REAL* dq, u32 dq_stride, const REAL* dout, u32 dout_stride, const f32* lse, const f32* delta, const REAL* q,
    u32 q_stride, const REAL* k, u32 k_stride, const REAL* v, u32 v_stride, const u32* bounds, u32 docs, u32 tokens,
    u32 num_q, u32 group, f32 scale, int window, const u32* samples, u64 seed, u32 step, u32 mask_index, u32 threshold,
    f32 kept
) {
    Tile tile;
    if (!find_tile(bounds, docs, TILE, blockIdx.x / num_q, tile)) return;
    const u32 head = blockIdx.x % num_q, kv_head = head / group;
    const size_t base = tile.base;
    const HeadMask mask = head_mask(Dropout{samples, seed, step, mask_index, threshold, kept}, tile.doc, head);
    f32 *q_tile = smem, *dout_tile = q_tile + TILE_ELEMS, *k_tile = dout_tile + TILE_ELEMS;
    f32 *v_tile = k_tile + TILE_ELEMS, *ds = v_tile + TILE_ELEMS;
    const int y = threadIdx.x / 8, x = threadIdx.x % 8, len = tile.len;
    const int first_q = (tile.count - 1 - tile.index) * TILE, end = min(first_q + TILE, len);
    load_tile(q_tile, q + base * q_stride + head * WIDTH, q_stride, first_q, len);
    load_tile(dout_tile, dout + base * dout_stride + head * WIDTH, dout_stride, first_q, len);

    f32 row_lse[N], row_delta[N];
    Sums sums;
    sums.clear();
#pragma unroll
    for (int i = 0; i < N; i++) {
        const int query = min(first_q + y + 8 * i, len - 1);
        row_lse[i] = lse[(size_t)head * tokens + base + query];
        row_delta[i] = delta[(size_t)head * tokens + base + query];
    }
    for (int first_k = first_key(first_q, window) / TILE * TILE; first_k < end; first_k += TILE) {
        __syncthreads();
        load_tile(k_tile, k + base * k_stride + kv_head * WIDTH, k_stride, first_k, len);
        load_tile(v_tile, v + base * v_stride + kv_head * WIDTH, v_stride, first_k, len);
        __syncthreads();
        f32 s[N][N], dp[N][N];
        dot_products(s, q_tile, k_tile, y, x);
        dot_products(dp, dout_tile, v_tile, y, x);
#pragma unroll
        for (int i = 0; i < N; i++)
#pragma unroll
            for (int j = 0; j < N; j++) {
                const int query = first_q + y + 8 * i, key = first_k + x + 8 * j;
                f32 grad = 0.0f;
                if (query < len && sees(query, key, window)) {
                    const f32 one = expf(s[i][j] * scale - row_lse[i]);
                    grad = one * (dp[i][j] * mask.factor(query, key) - row_delta[i]) * scale;
                }
                ds[(y + 8 * i) * SCORE_STRIDE + x + 8 * j] = grad;
            }
        __syncwarp();
        sums.add(ds, k_tile, y, x);
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        const int query = first_q + y + 8 * i;
        if (query < len) sums.write(dq + (base + query) * dq_stride + head * WIDTH, i, 1.0f, x);
    }
}

// dk and dv [T, G h]: a block sums one tile of keys over the group's heads, and for each over the queries that see it.
// Here rows of scores are keys and columns are queries.
extern "C" __global__ void __launch_bounds__(THREADS) plain_dkv(
    REAL* dk, u32 dk_stride, REAL* dv, u32 dv_stride, const REAL* dout, u32 dout_stride, const f32* lse,
    const f32* delta, const REAL* q, u32 q_stride, const REAL* k, u32 k_stride, const REAL* v, u32 v_stride,
    const u32* bounds, u32 docs, u32 tokens, u32 num_q, u32 group, f32 scale, int window, const u32* samples,
    u64 seed, u32 step, u32 mask_index, u32 threshold, f32 kept
) {
    Tile tile;
    const u32 num_kv = num_q / group;
    if (!find_tile(bounds, docs, TILE, blockIdx.x / num_kv, tile)) return;
    const u32 kv_head = blockIdx.x % num_kv;
    const size_t base = tile.base;
    f32 *k_tile = smem, *v_tile = k_tile + TILE_ELEMS, *q_tile = v_tile + TILE_ELEMS;
    f32 *dout_tile = q_tile + TILE_ELEMS, *p = dout_tile + TILE_ELEMS, *ds = p + SCORE_ELEMS;
    const int y = threadIdx.x / 8, x = threadIdx.x % 8, len = tile.len;
    const int first_k = tile.index * TILE;
    const int end = last_query(min(first_k + TILE, len) - 1, window, len);
    load_tile(k_tile, k + base * k_stride + kv_head * WIDTH, k_stride, first_k, len);
    load_tile(v_tile, v + base * v_stride + kv_head * WIDTH, v_stride, first_k, len);

    Sums dk_sums, dv_sums;
    dk_sums.clear();
    dv_sums.clear();
    for (u32 head = kv_head * group; head < (kv_head + 1) * group; head++) {
        const HeadMask mask = head_mask(Dropout{samples, seed, step, mask_index, threshold, kept}, tile.doc, head);
        for (int first_q = first_k; first_q < end; first_q += TILE) {
            __syncthreads();
            load_tile(q_tile, q + base * q_stride + head * WIDTH, q_stride, first_q, len);
            load_tile(dout_tile, dout + base * dout_stride + head * WIDTH, dout_stride, first_q, len);
            __syncthreads();
            f32 s[N][N], dp[N][N];
            dot_products(s, k_tile, q_tile, y, x);
            dot_products(dp, v_tile, dout_tile, y, x);
#pragma unroll
            for (int j = 0; j < N; j++) {
                const int query = first_q + x + 8 * j;
                const size_t at = (size_t)head * tokens + base + min(query, len - 1);
                const f32 column_lse = lse[at], column_delta = delta[at];
#pragma unroll
                for (int i = 0; i < N; i++) {
                    const int key = first_k + y + 8 * i;
                    f32 dropped_p = 0.0f, grad = 0.0f;
                    if (query < len && sees(query, key, window)) {
                        const f32 one = expf(s[i][j] * scale - column_lse), factor = mask.factor(query, key);
                        dropped_p = one * factor;
                        grad = one * (dp[i][j] * factor - column_delta) * scale;
                    }
                    p[(y + 8 * i) * SCORE_STRIDE + x + 8 * j] = dropped_p;
                    ds[(y + 8 * i) * SCORE_STRIDE + x + 8 * j] = grad;
                }
            }
            __syncwarp();
            dv_sums.add(p, dout_tile, y, x);
            dk_sums.add(ds, q_tile, y, x);
        }
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        const int key = first_k + y + 8 * i;
        if (key >= len) continue;
        dk_sums.write(dk + (base + key) * dk_stride + kv_head * WIDTH, i, 1.0f, x);
        dv_sums.write(dv + (base + key) * dv_stride + kv_head * WIDTH, i, 1.0f, x);
    }
}
