// RMS normalization over groups of `dim` columns. An item is one group of one row.
//
// Rows of whole vectors are processed by teams of threads: a power of two, part of a warp or several warps. There are
// as many blocks as the GPU runs at once, and the teams share the items evenly. While a team processes an item, its
// next items are copied to shared memory, each thread's vectors to a location that only that thread reads. This needs
// no barrier and keeps enough bytes in flight to saturate the memory.
#include "lockstep.cuh"

constexpr int N = Vec16<REAL>::N;
// A thread keeps up to THREAD_VECS vectors of an item in registers between reading and writing. FORWARD_PREFETCH and
// BACKWARD_PREFETCH are the items of a team in flight. A block has at most MAX_THREADS threads. FORWARD_BLOCKS and
// BACKWARD_BLOCKS are the blocks of that size that a multiprocessor should have registers for.

// A vector in as few registers as it has words: elements are extracted where they are used.
template <typename R> struct PackedVec {
    u32 at[4];

    __device__ __forceinline__ f32 operator[](int i) const {
        if constexpr (sizeof(R) == 4) {
            return __uint_as_float(at[i]);
        } else {
            const u32 word = at[i / 2];
            return to_f32(R{(u16)(i % 2 ? word >> 16 : word)});
        }
    }
};
using Packed = PackedVec<REAL>;

__device__ __forceinline__ Packed load_packed(const void* from) {
    const uint4 words = *reinterpret_cast<const uint4*>(from);
    return {{words.x, words.y, words.z, words.w}};
}

// A matrix whose rows consist of `groups` items each.
struct Items {
    u32 groups, dim;

    __device__ __forceinline__ u64 offset(u32 item, u32 stride) const {
        if (groups == 1) return (u64)item * stride;
        return (u64)(item / groups) * stride + item % groups * dim;
    }
};

// The sum over the team's threads, in an order that depends only on the team's size. Calls alternate between the two
// halves of `scratch`, so that a warp may continue while another still reads.
__device__ __forceinline__ f32 team_sum(f32 x, u32 team, u32 parity, f32 (*scratch)[MAX_THREADS / 32]) {
    if (team < 32) {
        for (u32 offset = team / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
        return x;
    }
    x = warp_sum(x);
    if (team == 32) return x;
    const u32 mine = threadIdx.x / team, warps = team / 32;
    if (threadIdx.x % 32 == 0) scratch[parity][threadIdx.x / 32] = x;
    asm volatile("bar.sync %0, %1;" ::"r"(1 + mine), "r"(team) : "memory");
    x = 0.0f;
    for (u32 warp = 0; warp < warps; warp++) x += scratch[parity][mine * warps + warp];
    return x;
}

// y[T, groups * dim] = x * rstd * w, rstd[T, groups] = 1 / sqrt(mean(x^2) + eps), w[dim]. A block of `team` threads
// processes one item at a time.
extern "C" __global__ void forward(
    REAL* y, u32 y_stride, f32* rstd, const REAL* x, u32 x_stride, const REAL* w,
    u32 items, u32 groups, u32 dim, u32 team, f32 eps
) {
    __shared__ f32 scratch[32];
    const Items of = {groups, dim};
    for (u32 item = blockIdx.x; item < items; item += gridDim.x) {
        const REAL* from = x + of.offset(item, x_stride);
        REAL* to = y + of.offset(item, y_stride);
        f32 squares = 0.0f;
        for (u32 c = threadIdx.x; c < dim; c += team) squares += to_f32(from[c]) * to_f32(from[c]);
        const f32 scale = 1.0f / sqrtf(block_sum(squares, scratch) / (f32)dim + eps);
        if (threadIdx.x == 0) rstd[item] = scale;
        for (u32 c = threadIdx.x; c < dim; c += team) to[c] = from_f32<REAL>(to_f32(from[c]) * scale * to_f32(w[c]));
    }
}

// The same for rows of whole vectors, at most THREAD_VECS * team of them.
extern "C" __global__ void __launch_bounds__(MAX_THREADS, FORWARD_BLOCKS) forward_vec(
    REAL* y, u32 y_stride, f32* rstd, const REAL* x, u32 x_stride, const REAL* w,
    u32 items, u32 groups, u32 dim, u32 team, f32 eps
) {
    extern __shared__ uint4 prefetched[]; // [FORWARD_PREFETCH, THREAD_VECS, threads]
    __shared__ f32 scratch[2][MAX_THREADS / 32];
    const Items of = {groups, dim};
    const u32 teams = blockDim.x / team, lane = threadIdx.x % team, chunks = dim / N, step = gridDim.x * teams;
    const auto slot = [&](u32 stage, int k) {
        return prefetched + (stage * THREAD_VECS + k) * blockDim.x + threadIdx.x;
    };
    const auto fetch = [&](u32 item, u32 stage) {
        const REAL* from = x + of.offset(item, x_stride);
#pragma unroll
        for (int k = 0; k < THREAD_VECS; k++) {
            const u32 c = lane + k * team;
            if (item < items && c < chunks) copy_async_16(slot(stage, k), from + c * N);
        }
        commit_copies();
    };

    u32 item = blockIdx.x * teams + threadIdx.x / team;
#pragma unroll
    for (u32 i = 0; i < FORWARD_PREFETCH; i++) fetch(item + i * step, i);
    u32 stage = 0, parity = 0;
    // All threads iterate equally often: those past the last item have no work but take part in the sums.
    for (u32 first = blockIdx.x * teams; first < items; first += step, item += step, parity ^= 1) {
        const u32 count = item < items ? chunks : 0;
        wait_copies<FORWARD_PREFETCH - 1>();
        Packed held[THREAD_VECS];
        f32 squares = 0.0f;
#pragma unroll
        for (int k = 0; k < THREAD_VECS; k++) {
            if (lane + k * team >= count) continue;
            held[k] = load_packed(slot(stage, k));
#pragma unroll
            for (int i = 0; i < N; i++) squares += held[k][i] * held[k][i];
        }
        fetch(item + FORWARD_PREFETCH * step, stage);
        stage = stage + 1 == FORWARD_PREFETCH ? 0 : stage + 1;
        const f32 scale = 1.0f / sqrtf(team_sum(squares, team, parity, scratch) / (f32)dim + eps);
        if (lane == 0 && item < items) rstd[item] = scale;
        REAL* to = y + of.offset(item, y_stride);
#pragma unroll
        for (int k = 0; k < THREAD_VECS; k++) {
            const u32 c = lane + k * team;
            if (c >= count) continue;
            const Packed weights = load_packed(w + c * N);
            Vec16<REAL> out;
#pragma unroll
            for (int i = 0; i < N; i++) out.at[i] = from_f32<REAL>(held[k][i] * scale * weights[i]);
            store_vec(to + c * N, out);
        }
    }
}

// dx[T, groups * dim] = the gradient of x, added to dx if `add`, and parts[block, dim] = the gradient of w over the
// block's items. dx may be dy, or dy is replaced by y (`recompute`). A block of `team` threads processes one item at a
// time; a thread reads and writes the same columns of all matrices.
extern "C" __global__ void backward(
    REAL* dx, u32 dx_stride, REAL* dy, u32 dy_stride, const REAL* x, u32 x_stride,
    const f32* rstd, const REAL* w, f32* parts, u32 items, u32 groups, u32 dim, u32 team, u32 add, u32 recompute
) {
    __shared__ f32 scratch[32];
    const Items of = {groups, dim};
    f32* part = parts + (u64)blockIdx.x * dim;
    for (u32 c = threadIdx.x; c < dim; c += team) part[c] = 0.0f;
    for (u32 item = blockIdx.x; item < items; item += gridDim.x) {
        const REAL* x_row = x + of.offset(item, x_stride);
        REAL *dy_row = dy + of.offset(item, dy_stride), *to = dx + of.offset(item, dx_stride);
        const f32 scale = rstd[item];
        f32 sum = 0.0f;
        for (u32 c = threadIdx.x; c < dim; c += team) {
            const f32 product = to_f32(dy_row[c]) * to_f32(x_row[c]);
            sum = fmaf(product, to_f32(w[c]), sum);
            part[c] = fmaf(product, scale, part[c]);
        }
        const f32 pull = scale * scale * scale * (block_sum(sum, scratch) / (f32)dim);
        for (u32 c = threadIdx.x; c < dim; c += team) {
            const f32 start = add ? to_f32(to[c]) : 0.0f;
            to[c] = from_f32<REAL>(fmaf(to_f32(dy_row[c]) * to_f32(w[c]), scale, fmaf(-to_f32(x_row[c]), pull, start)));
            if (recompute) dy_row[c] = from_f32<REAL>(to_f32(x_row[c]) * scale * to_f32(w[c]));
        }
    }
}

// The same for rows of whole vectors, at most THREAD_VECS * team of them.
extern "C" __global__ void __launch_bounds__(MAX_THREADS, BACKWARD_BLOCKS) backward_vec(
    REAL* dx, u32 dx_stride, REAL* dy, u32 dy_stride, const REAL* x, u32 x_stride,
    const f32* rstd, const REAL* w, f32* parts, u32 items, u32 groups, u32 dim, u32 team, u32 add, u32 recompute
) {
    extern __shared__ uint4 prefetched[]; // [dy, x, add: dx][BACKWARD_PREFETCH, THREAD_VECS, threads]
    __shared__ f32 scratch[2][MAX_THREADS / 32];
    const Items of = {groups, dim};
    const u32 teams = blockDim.x / team, mine = threadIdx.x / team, lane = threadIdx.x % team;
    const u32 chunks = dim / N, step = gridDim.x * teams;
    const auto slot = [&](u32 operand, u32 stage, int k) {
        return prefetched + ((operand * BACKWARD_PREFETCH + stage) * THREAD_VECS + k) * blockDim.x + threadIdx.x;
    };
    const auto fetch = [&](u32 item, u32 stage) {
        const REAL *dy_row = dy + of.offset(item, dy_stride), *x_row = x + of.offset(item, x_stride);
        const REAL* dx_row = dx + of.offset(item, dx_stride);
#pragma unroll
        for (int k = 0; k < THREAD_VECS; k++) {
            const u32 c = lane + k * team;
            if (item >= items || c >= chunks) continue;
            copy_async_16(slot(0, stage, k), dy_row + c * N);
            copy_async_16(slot(1, stage, k), x_row + c * N);
            if (add) copy_async_16(slot(2, stage, k), dx_row + c * N);
        }
        commit_copies();
    };

    f32 sums[THREAD_VECS][N] = {};
    u32 item = blockIdx.x * teams + mine;
    f32 next_scale = item < items ? rstd[item] : 0.0f;
#pragma unroll
    for (u32 i = 0; i < BACKWARD_PREFETCH; i++) fetch(item + i * step, i);
    u32 stage = 0, parity = 0;
    // All threads iterate equally often: those past the last item have no work but take part in the sums.
    for (u32 first = blockIdx.x * teams; first < items; first += step, item += step, parity ^= 1) {
        const u32 count = item < items ? chunks : 0;
        const f32 scale = next_scale;
        wait_copies<BACKWARD_PREFETCH - 1>();
        Packed grads[THREAD_VECS], held[THREAD_VECS], before[THREAD_VECS];
#pragma unroll
        for (int k = 0; k < THREAD_VECS; k++) {
            if (lane + k * team >= count) continue;
            grads[k] = load_packed(slot(0, stage, k));
            held[k] = load_packed(slot(1, stage, k));
            if (add) before[k] = load_packed(slot(2, stage, k)); else before[k] = {};
        }
        fetch(item + BACKWARD_PREFETCH * step, stage);
        stage = stage + 1 == BACKWARD_PREFETCH ? 0 : stage + 1;
        if (item + step < items) next_scale = rstd[item + step];
        f32 sum = 0.0f;
#pragma unroll
        for (int k = 0; k < THREAD_VECS; k++) {
            const u32 c = lane + k * team;
            if (c >= count) continue;
            const Packed weights = load_packed(w + c * N);
#pragma unroll
            for (int i = 0; i < N; i++) {
                const f32 product = grads[k][i] * held[k][i];
                sum = fmaf(product, weights[i], sum);
                sums[k][i] = fmaf(product, scale, sums[k][i]);
            }
        }
        const f32 pull = scale * scale * scale * (team_sum(sum, team, parity, scratch) / (f32)dim);
        REAL *to = dx + of.offset(item, dx_stride), *again_to = dy + of.offset(item, dy_stride);
#pragma unroll
        for (int k = 0; k < THREAD_VECS; k++) {
            const u32 c = lane + k * team;
            if (c >= count) continue;
            const Packed weights = load_packed(w + c * N);
            Vec16<REAL> out;
#pragma unroll
            for (int i = 0; i < N; i++) {
                const f32 rest = fmaf(-held[k][i], pull, before[k][i]);
                out.at[i] = from_f32<REAL>(fmaf(grads[k][i] * weights[i], scale, rest));
            }
            store_vec(to + c * N, out);
            if (!recompute) continue;
#pragma unroll
            for (int i = 0; i < N; i++) out.at[i] = from_f32<REAL>(held[k][i] * scale * weights[i]);
            store_vec(again_to + c * N, out);
        }
    }

    // All copies are done: reuse the shared memory for the teams' sums [teams, dim], which are then added in order.
    f32* team_sums = reinterpret_cast<f32*>(prefetched);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < THREAD_VECS; k++) {
        const u32 c = lane + k * team;
        if (c >= chunks) continue;
#pragma unroll
        for (int i = 0; i < N; i++) team_sums[mine * dim + c * N + i] = sums[k][i];
    }
    __syncthreads();
    for (u32 c = threadIdx.x; c < dim; c += blockDim.x) {
        f32 sum = 0.0f;
        for (u32 other = 0; other < teams; other++) sum += team_sums[other * dim + c];
        parts[(u64)blockIdx.x * dim + c] = sum;
    }
}
