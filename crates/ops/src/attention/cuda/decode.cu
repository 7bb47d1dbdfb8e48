// Decode: the KV cache, and attention of single tokens over it.
//
// HEADS is the number of query heads of a group that a block processes together.

constexpr int WARPS = THREADS / 32;
static_assert(DECODE_BYTES == sizeof(f32) * WARPS * HEADS * (WIDTH + 2), "must match the shared memory of the launch");
// Adjacent columns of a thread, threads that share a row, and passes they need to cover it.
constexpr int STEP = 8;
__device__ constexpr int next_power_of_two(int least) {
    int power = 1;
    while (power < least) power *= 2;
    return power;
}
constexpr int LANES =
    next_power_of_two((WIDTH + STEP - 1) / STEP) < 32 ? next_power_of_two((WIDTH + STEP - 1) / STEP) : 32;
constexpr int PASSES = (WIDTH + STEP * LANES - 1) / (STEP * LANES);
constexpr int THREAD_COLS = PASSES * STEP;
// Rows of keys that a warp reads at once, and how many of them a thread loads before it uses them.
constexpr int ROWS = 32 / LANES, KEYS_PER_STEP = HEADS * THREAD_COLS <= 32 ? 4 : 2;

__device__ __forceinline__ f32 infinity() { return __int_as_float(0x7f800000); }

// Loads this thread's columns of a row of h: those from STEP * lane on, in every pass. Columns past the end are zero.
__device__ __forceinline__ void load_columns(f32 (&to)[THREAD_COLS], const REAL* row, int lane) {
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++) {
        const int first = (pass * LANES + lane) * STEP;
        if constexpr (WIDTH % STEP == 0) {
            // A row of the cache is a multiple of 16 bytes.
            constexpr int N = Vec16<REAL>::N;
#pragma unroll
            for (int part = 0; part < STEP; part += N) {
                Vec16<REAL> vec;
                if (first < WIDTH) vec = load_vec(row + first + part);
#pragma unroll
                for (int i = 0; i < N; i++) to[pass * STEP + part + i] = first < WIDTH ? to_f32(vec.at[i]) : 0.0f;
            }
        } else {
#pragma unroll
            for (int i = 0; i < STEP; i++)
                to[pass * STEP + i] = first + i < WIDTH ? to_f32(row[first + i]) : 0.0f;
        }
    }
}

// Stores a row of k and of v [T, G h] in the page of its document that holds its position. One block per row.
extern "C" __global__ void __launch_bounds__(THREADS) decode_store_kv(
    REAL* cache, u32 num_pages, u32 page_shift, const REAL* k, u32 k_stride, const REAL* v, u32 v_stride,
    const u32* page_tables, u32 table_len, const u32* positions, const u32* bounds, u32 docs, u32 num_kv
) {
    const u32 row = blockIdx.x, position = positions[row], index = position >> page_shift;
    if (index >= table_len) return;
    const u32 page = page_tables[(size_t)doc_of_row(bounds, docs, row) * table_len + index];
    if (page >= num_pages) return;
    const size_t rows_elems = (size_t)WIDTH << page_shift;
    REAL* keys = cache + (size_t)page * num_kv * 2 * rows_elems + (size_t)(position & ((1u << page_shift) - 1)) * WIDTH;
    for (u32 at = threadIdx.x; at < num_kv * WIDTH; at += THREADS) {
        REAL* to = keys + at / WIDTH * 2 * rows_elems + at % WIDTH;
        to[0] = k[(size_t)row * k_stride + at];
        to[rows_elems] = v[(size_t)row * v_stride + at];
    }
}

extern __shared__ __align__(16) f32 smem[];

// out [T, H h]: one block per row, key-value head and HEADS query heads of its group. Its warps take keys in turn, each
// with a softmax of its own, and the softmaxes are merged at the end, in order.
extern "C" __global__ void __launch_bounds__(THREADS) decode_attention(
    REAL* out, u32 out_stride, const REAL* q, u32 q_stride, const REAL* cache, u32 num_pages, u32 page_shift,
    const u32* page_tables, u32 table_len, const u32* positions, const u32* bounds, u32 docs, u32 num_kv, u32 group,
    f32 scale, int window
) {
    const u32 parts = (group + HEADS - 1) / HEADS;
    const u32 part = blockIdx.x % parts, kv_head = blockIdx.x / parts % num_kv, row = blockIdx.x / parts / num_kv;
    const u32 position = positions[row];
    if (position >> page_shift >= table_len) return;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % LANES, sub = threadIdx.x % 32 / LANES;
    const u32 first_head = part * HEADS;
    const int heads = (int)min((u32)HEADS, group - first_head);
    const size_t head_at = (size_t)(kv_head * group + first_head) * WIDTH;
    const HeadCache of_head(
        cache, num_pages, page_shift, page_tables, table_len, doc_of_row(bounds, docs, row), num_kv, kv_head);

    f32 query[HEADS][THREAD_COLS], sums[HEADS][THREAD_COLS], largest[HEADS], sum[HEADS];
#pragma unroll
    for (int head = 0; head < HEADS; head++) {
        largest[head] = -infinity();
        sum[head] = 0.0f;
#pragma unroll
        for (int i = 0; i < THREAD_COLS; i++) {
            const int col = (i / STEP * LANES + lane) * STEP + i % STEP;
            const bool valid = head < heads && col < WIDTH;
            query[head][i] =
                valid ? to_f32(q[(size_t)row * q_stride + head_at + head * WIDTH + col]) * scale : 0.0f;
            sums[head][i] = 0.0f;
        }
    }
    const int end = (int)position + 1, first = max(0, end - window);
    // All lanes of a warp iterate together, as the shuffles require.
    for (int start = first + warp * ROWS * KEYS_PER_STEP; start < end; start += WARPS * ROWS * KEYS_PER_STEP) {
        // Issue all loads before the first use.
        f32 s[KEYS_PER_STEP][HEADS], columns[KEYS_PER_STEP][THREAD_COLS], value[KEYS_PER_STEP][THREAD_COLS];
#pragma unroll
        for (int n = 0; n < KEYS_PER_STEP; n++) {
            const int key = min(start + n * ROWS + sub, end - 1);
            load_columns(columns[n], of_head.keys.row(key), lane);
            load_columns(value[n], of_head.values.row(key), lane);
        }
#pragma unroll
        for (int n = 0; n < KEYS_PER_STEP; n++) {
#pragma unroll
            for (int head = 0; head < HEADS; head++) {
                f32 dot = 0.0f;
#pragma unroll
                for (int i = 0; i < THREAD_COLS; i++) dot = fmaf(query[head][i], columns[n][i], dot);
#pragma unroll
                for (int offset = LANES / 2; offset > 0; offset /= 2)
                    dot += __shfl_xor_sync(0xffffffffu, dot, offset);
                s[n][head] = start + n * ROWS + sub < end ? dot : -infinity();
            }
        }
#pragma unroll
        for (int head = 0; head < HEADS; head++) {
            f32 max_score = largest[head];
#pragma unroll
            for (int n = 0; n < KEYS_PER_STEP; n++) max_score = fmaxf(max_score, s[n][head]);
            const f32 base = max_score == -infinity() ? 0.0f : max_score, rescale = expf(largest[head] - base);
            largest[head] = max_score;
            sum[head] *= rescale;
#pragma unroll
            for (int i = 0; i < THREAD_COLS; i++) sums[head][i] *= rescale;
#pragma unroll
            for (int n = 0; n < KEYS_PER_STEP; n++) {
                const f32 one = expf(s[n][head] - base);
                sum[head] += one;
#pragma unroll
                for (int i = 0; i < THREAD_COLS; i++) sums[head][i] = fmaf(one, value[n][i], sums[head][i]);
            }
        }
    }

    // Merge the rows that a warp processed in parallel, then the warps.
#pragma unroll
    for (int head = 0; head < HEADS; head++) {
#pragma unroll
        for (int offset = LANES; offset < 32; offset *= 2) {
            const f32 other = __shfl_xor_sync(0xffffffffu, largest[head], offset);
            const f32 max_score = fmaxf(largest[head], other), base = max_score == -infinity() ? 0.0f : max_score;
            const f32 own = expf(largest[head] - base), others = expf(other - base);
            sum[head] = sum[head] * own + __shfl_xor_sync(0xffffffffu, sum[head], offset) * others;
#pragma unroll
            for (int i = 0; i < THREAD_COLS; i++) {
                const f32 beside = __shfl_xor_sync(0xffffffffu, sums[head][i], offset);
                sums[head][i] = sums[head][i] * own + beside * others;
            }
            largest[head] = max_score;
        }
    }
    // [WARPS, HEADS, h] sums, then [WARPS, HEADS] maxima and [WARPS, HEADS] sums of exponentials.
    f32 *all_sums = smem, *all_largest = smem + WARPS * HEADS * WIDTH, *all_sum = all_largest + WARPS * HEADS;
#pragma unroll
    for (int head = 0; head < HEADS; head++) {
        if (sub == 0) {
#pragma unroll
            for (int i = 0; i < THREAD_COLS; i++) {
                const int col = (i / STEP * LANES + lane) * STEP + i % STEP;
                if (col < WIDTH) all_sums[(warp * HEADS + head) * WIDTH + col] = sums[head][i];
            }
        }
        if (threadIdx.x % 32 == 0) {
            all_largest[warp * HEADS + head] = largest[head];
            all_sum[warp * HEADS + head] = sum[head];
        }
    }
    __syncthreads();
    for (int at = threadIdx.x; at < heads * WIDTH; at += THREADS) {
        const int head = at / WIDTH, col = at % WIDTH;
        f32 max_score = -infinity();
#pragma unroll
        for (int w = 0; w < WARPS; w++) max_score = fmaxf(max_score, all_largest[w * HEADS + head]);
        f32 total = 0.0f, value = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const f32 weight = expf(all_largest[w * HEADS + head] - max_score);
            total = fmaf(all_sum[w * HEADS + head], weight, total);
            value = fmaf(all_sums[(w * HEADS + head) * WIDTH + col], weight, value);
        }
        out[(size_t)row * out_stride + head_at + at] = from_f32<REAL>(value / total);
    }
}
