// Token embedding. Backward adds the rows of equal tokens in a fixed order, without atomics: it sorts tokens by
// (token, position), so that each run of equal tokens has one owner.
#include "lockstep.cuh"

// Runs of LONG_RUN rows or more are summed by blocks of THREADS threads, shorter ones by a warp.
constexpr u32 WARPS = THREADS / 32;
static_assert(LONG_RUN == 32, "one lane checks each position of a block");

template <int N>
__device__ __forceinline__ void copy_rows(
    REAL* x, u32 x_stride, const REAL* table, u32 table_stride, const u32* tokens, u32 items, u32 cols, u32 table_rows
) {
    const u32 item = blockIdx.x * blockDim.x + threadIdx.x, chunks = cols / N;
    if (item >= items) return;
    const u32 row = item / chunks, column = item % chunks * N, token = tokens[row];
    if (token >= table_rows) __trap();
    store_chunk<N>(x + (u64)row * x_stride + column, load_chunk<N>(table + (u64)token * table_stride + column));
}

// x[T, cols] = table[tokens]; items = T * cols / N.
extern "C" __global__ void forward(
    REAL* x, u32 x_stride, const REAL* table, u32 table_stride, const u32* tokens, u32 items, u32 cols, u32 table_rows
) {
    copy_rows<1>(x, x_stride, table, table_stride, tokens, items, cols, table_rows);
}

extern "C" __global__ void forward_vec(
    REAL* x, u32 x_stride, const REAL* table, u32 table_stride, const u32* tokens, u32 items, u32 cols, u32 table_rows
) {
    copy_rows<Vec16<REAL>::N>(x, x_stride, table, table_stride, tokens, items, cols, table_rows);
}

// order[T] and sorted[T]: positions and tokens, sorted by (token, position). A thread counts the tokens before its own.
extern "C" __global__ void __launch_bounds__(THREADS) sort_tokens(
    u32* order, u32* sorted, const u32* tokens, u32 len, u32 table_rows
) {
    __shared__ u32 tile[THREADS];
    const u32 mine = blockIdx.x * THREADS + threadIdx.x;
    const u32 token = mine < len ? tokens[mine] : 0;
    if (token >= table_rows) __trap();
    u32 before = 0;
    for (u32 start = 0; start < len; start += THREADS) {
        __syncthreads();
        // Positions past the end sort after every token.
        tile[threadIdx.x] = start + threadIdx.x < len ? tokens[start + threadIdx.x] : 0xffffffffu;
        __syncthreads();
        const u32 of_tile = start / THREADS;
        if (of_tile < blockIdx.x) {
#pragma unroll 16
            for (u32 i = 0; i < THREADS; i++) before += tile[i] <= token;
        } else if (of_tile > blockIdx.x) {
#pragma unroll 16
            for (u32 i = 0; i < THREADS; i++) before += tile[i] < token;
        } else {
            for (u32 i = 0; i < THREADS; i++) before += tile[i] < token || (tile[i] == token && i < threadIdx.x);
        }
    }
    if (mine < len) {
        order[before] = mine;
        sorted[before] = token;
    }
}

// Adds rows order[from], order[from + step], … below `end` to `sums`, in columns from `column` on.
template <int N>
__device__ __forceinline__ void add_rows(
    f32* sums, const REAL* dx, u32 stride, const u32* order, u32 from, u32 end, u32 step, u32 column
) {
#pragma unroll 4
    for (u32 i = from; i < end; i += step) {
        const Chunk<REAL, N> row = load_chunk<N>(dx + (u64)order[i] * stride + column);
#pragma unroll
        for (int j = 0; j < N; j++) sums[j] += to_f32(row.at[j]);
    }
}

// One warp per sorted position. The warp at the start of a short run adds the run to the token's row.
template <int N>
__device__ __forceinline__ void add_short_runs(
    f32* dtable, u32 table_stride, const REAL* dx, u32 stride, const u32* order, const u32* sorted, u32 len, u32 cols
) {
    const u32 at = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (at >= len) return;
    const u32 token = sorted[at];
    if (at > 0 && sorted[at - 1] == token) return;
    const u32 same = __ballot_sync(0xffffffffu, at + lane < len && sorted[at + lane] == token);
    if (same == 0xffffffffu) return;
    const u32 run = __ffs(~same) - 1;
    for (u32 column = lane * N; column < cols; column += 32 * N) {
        f32* to = dtable + (u64)token * table_stride + column;
        f32 sums[N] = {};
        add_rows<N>(sums, dx, stride, order, at, at + run, 1, column);
        Chunk<f32, N> row = load_chunk<N>(to);
#pragma unroll
        for (int j = 0; j < N; j++) row.at[j] += sums[j];
        store_chunk<N>(to, row);
    }
}

// One block per LONG_RUN sorted positions, among which at most one long run starts, and per 32 * N columns. Its warps
// take the run's rows in turn; their sums are added in order.
template <int N>
__device__ __forceinline__ void add_long_runs(
    f32* dtable, u32 table_stride, const REAL* dx, u32 stride, const u32* order, const u32* sorted, u32 len, u32 cols
) {
    __shared__ f32 scratch[WARPS][32 * N];
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, at = blockIdx.x * LONG_RUN + lane;
    // Every warp determines this by itself.
    const bool is_long = at + LONG_RUN - 1 < len && sorted[at] == sorted[at + LONG_RUN - 1];
    const u32 starts = __ballot_sync(0xffffffffu, is_long && (at == 0 || sorted[at - 1] != sorted[at]));
    if (starts == 0) return;
    const u32 start = blockIdx.x * LONG_RUN + __ffs(starts) - 1, token = sorted[start];
    u32 end = start + LONG_RUN, past = len; // The first position of a later token.
    while (end < past) {
        const u32 middle = end + (past - end) / 2;
        if (sorted[middle] == token) end = middle + 1; else past = middle;
    }
    const u32 left = blockIdx.y * 32 * N, column = left + lane * N;
    f32 sums[N] = {};
    if (column < cols) add_rows<N>(sums, dx, stride, order, start + warp, end, WARPS, column);
#pragma unroll
    for (int j = 0; j < N; j++) scratch[warp][lane * N + j] = sums[j];
    __syncthreads();
    for (u32 c = threadIdx.x; c < 32 * N && left + c < cols; c += WARPS * 32) {
        f32 sum = 0.0f;
        for (u32 w = 0; w < WARPS; w++) sum += scratch[w][c];
        dtable[(u64)token * table_stride + left + c] += sum;
    }
}

// dtable[tokens] += dx[T, cols], the table in f32; order and sorted from `sort_tokens`.
extern "C" __global__ void short_runs(
    f32* dtable, u32 table_stride, const REAL* dx, u32 stride, const u32* order, const u32* sorted, u32 len, u32 cols
) {
    add_short_runs<1>(dtable, table_stride, dx, stride, order, sorted, len, cols);
}

extern "C" __global__ void short_runs_vec(
    f32* dtable, u32 table_stride, const REAL* dx, u32 stride, const u32* order, const u32* sorted, u32 len, u32 cols
) {
    add_short_runs<Vec16<REAL>::N>(dtable, table_stride, dx, stride, order, sorted, len, cols);
}

extern "C" __global__ void long_runs(
    f32* dtable, u32 table_stride, const REAL* dx, u32 stride, const u32* order, const u32* sorted, u32 len, u32 cols
) {
    add_long_runs<1>(dtable, table_stride, dx, stride, order, sorted, len, cols);
}

extern "C" __global__ void long_runs_vec(
    f32* dtable, u32 table_stride, const REAL* dx, u32 stride, const u32* order, const u32* sorted, u32 len, u32 cols
) {
    add_long_runs<Vec16<REAL>::N>(dtable, table_stride, dx, stride, order, sorted, len, cols);
}
