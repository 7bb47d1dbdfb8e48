// Sums over flat ranges, in fixed orders. Nothing here depends on REAL.
#include "lockstep.cuh"

// A leaf is the sum over LEAF elements, computed by LEAF_THREADS threads; a block of `fold_leaves` adds FOLD leaves.
// Blocks that add leaves or rows have SUM_THREADS threads.

// leaves[i] = sum of x^2 over block i of LEAF elements, in f64. Each of eight threads sums every eighth element in
// order, and their sums are added pairwise. This is the CPU's order, so the bits are the same.
template <typename R> __device__ __forceinline__ void sum_squares(f64* leaves, const R* x, u32 num_leaves) {
    const u32 thread = blockIdx.x * blockDim.x + threadIdx.x;
    const u32 leaf = thread / LEAF_THREADS, lane = thread % LEAF_THREADS;
    f64 sum = 0.0;
    if (leaf < num_leaves) {
        const R* from = x + (u64)leaf * LEAF + lane;
#pragma unroll 16
        for (u32 i = 0; i < LEAF; i += LEAF_THREADS) {
            const f64 value = to_f32(from[i]);
            sum = fma(value, value, sum);
        }
    }
#pragma unroll
    for (int offset = LEAF_THREADS / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (leaf < num_leaves && lane == 0) leaves[leaf] = sum;
}
extern "C" __global__ void squared_sum_leaves(f64* leaves, const f32* x, u32 num_leaves) {
    sum_squares(leaves, x, num_leaves);
}
extern "C" __global__ void squared_sum_leaves_bf16(f64* leaves, const bf16* x, u32 num_leaves) {
    sum_squares(leaves, x, num_leaves);
}

// Returns the sum over the block's threads; `scratch` has a number for each thread.
__device__ __forceinline__ f64 tree_sum(f64 x, f64* scratch) {
    scratch[threadIdx.x] = x;
    for (u32 step = blockDim.x / 2; step > 0; step /= 2) {
        __syncthreads();
        if (threadIdx.x < step) scratch[threadIdx.x] += scratch[threadIdx.x + step];
    }
    __syncthreads();
    return scratch[0];
}

// leaves[b * FOLD] = the sum of FOLD leaves, starting with that one.
extern "C" __global__ void fold_leaves(f64* leaves, u32 num_leaves) {
    __shared__ f64 scratch[SUM_THREADS];
    const u32 first = blockIdx.x * FOLD, count = min((u32)FOLD, num_leaves - first);
    f64 sum = 0.0;
    for (u32 i = threadIdx.x; i < count; i += blockDim.x) sum += leaves[(u64)first + i];
    sum = tree_sum(sum, scratch);
    if (threadIdx.x == 0) leaves[first] = sum;
}

// out[0] = leaves[0] + leaves[step] + ..., by one block.
extern "C" __global__ void sum_leaves(f64* out, const f64* leaves, u32 count, u32 step) {
    __shared__ f64 scratch[SUM_THREADS];
    f64 sum = 0.0;
    for (u32 i = threadIdx.x; i < count; i += blockDim.x) sum += leaves[(u64)i * step];
    sum = tree_sum(sum, scratch);
    if (threadIdx.x == 0) out[0] = sum;
}

// decision[4] = {sum of squares, norm, gradient factor, skip}, computed from the first element. One thread.
extern "C" __global__ void decide_step(f64* decision, f64 max_norm, f64 loss_scale) {
    const f64 norm = sqrt(decision[0]) / loss_scale;
    const f32 clip = (f32)fmin(max_norm / (norm + 1e-6), 1.0);
    decision[1] = norm;
    decision[2] = (f64)(f32)((f64)clip / loss_scale);
    decision[3] = isfinite(norm) ? 0.0 : 1.0;
}

// A thread adds N elements, the last one what remains.
template <int N> __device__ __forceinline__ void add_part(f32* sum, const f32* x, u64 len) {
    const u64 start = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * N;
    if (start + N <= len) {
        Chunk<f32, N> sums = load_chunk<N>(sum + start);
        const Chunk<f32, N> xs = load_chunk<N>(x + start);
#pragma unroll
        for (int i = 0; i < N; i++) sums.at[i] += xs.at[i];
        store_chunk<N>(sum + start, sums);
    } else {
        for (u64 i = start; i < len; i++) sum[i] += x[i];
    }
}

// sum[len] += x[len].
extern "C" __global__ void add(f32* sum, const f32* x, u64 len) { add_part<1>(sum, x, len); }
extern "C" __global__ void add_vec(f32* sum, const f32* x, u64 len) { add_part<Vec16<f32>::N>(sum, x, len); }

// A thread rounds N elements, the last one what remains.
template <int N> __device__ __forceinline__ void round_part(bf16* to, const f32* x, u64 len) {
    const u64 start = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * N;
    if (start + N <= len) {
        const Chunk<f32, N> wide = load_chunk<N>(x + start);
        Chunk<bf16, N> rounded;
#pragma unroll
        for (int i = 0; i < N; i++) rounded.at[i] = from_f32<bf16>(wide.at[i]);
        store_chunk<N>(to + start, rounded);
    } else {
        for (u64 i = start; i < len; i++) to[i] = from_f32<bf16>(x[i]);
    }
}

// to[len] = x[len], rounded to nearest, ties to even.
extern "C" __global__ void round_bf16(bf16* to, const f32* x, u64 len) { round_part<1>(to, x, len); }
extern "C" __global__ void round_bf16_vec(bf16* to, const f32* x, u64 len) { round_part<Vec16<f32>::N>(to, x, len); }

// sum[cols] += the rows of parts[rows, cols]. A block has 32 columns; each of its 32 warps adds every 32nd row, and the
// warps' sums are added pairwise.
extern "C" __global__ void __launch_bounds__(SUM_THREADS) add_rows(f32* sum, const f32* parts, u32 rows, u32 cols) {
    constexpr u32 SLICES = SUM_THREADS / 32;
    __shared__ f32 scratch[SLICES][32];
    const u32 lane = threadIdx.x % 32, slice = threadIdx.x / 32, column = blockIdx.x * 32 + lane;
    f32 mine = 0.0f;
    if (column < cols) {
#pragma unroll 4
        for (u32 row = slice; row < rows; row += SLICES) mine += parts[(u64)row * cols + column];
    }
    scratch[slice][lane] = mine;
    for (u32 step = SLICES / 2; step > 0; step /= 2) {
        __syncthreads();
        if (slice < step) scratch[slice][lane] += scratch[slice + step][lane];
    }
    __syncthreads();
    if (slice == 0 && column < cols) sum[column] += scratch[0][lane];
}
