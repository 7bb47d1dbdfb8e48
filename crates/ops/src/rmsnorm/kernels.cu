// RMS normalisation over groups of `dim` columns. An item is one group of one row.
//
// Rows of whole packs are worked on by teams of threads: a power of two of them, part of a warp or whole warps. There
// are as many blocks as the GPU runs at a time, and a team takes every so-manieth item. While it works on one, its
// next ones are being copied to shared memory, every thread's packs to places that no other thread reads: without a
// barrier, and with enough bytes on their way to keep memory busy.
#include "lockstep.cuh"

constexpr int N = Vec16<REAL>::N;
// A thread keeps up to KEPT packs of an item in registers between reading and writing. FORWARD_AHEAD and BACKWARD_AHEAD
// items of a team are on their way. A block has at most MOST_THREADS threads; so many blocks of those as FORWARD_BLOCKS
// and BACKWARD_BLOCKS say should have registers at a time.

// A pack in as few registers as it has words: elements are taken out where they are used.
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
using Held = PackedVec<REAL>;

__device__ __forceinline__ Held load_held(const void* from) {
    const uint4 words = *reinterpret_cast<const uint4*>(from);
    return {{words.x, words.y, words.z, words.w}};
}

// A matrix whose rows are `groups` items side by side.
struct Items {
    u32 groups, dim;

    __device__ __forceinline__ u64 offset(u32 item, u32 stride) const {
        if (groups == 1) return (u64)item * stride;
        return (u64)(item / groups) * stride + item % groups * dim;
    }
};

// The sum over the team's threads, in an order that depends on the team's size alone. Calls of a team take turns with
// the two halves of `room`, so that a warp may go on while another still reads.
__device__ __forceinline__ f32 team_sum(f32 x, u32 team, u32 turn, f32 (*room)[MOST_THREADS / 32]) {
    if (team < 32) {
        for (u32 offset = team / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
        return x;
    }
    x = warp_sum(x);
    if (team == 32) return x;
    const u32 mine = threadIdx.x / team, warps = team / 32;
    if (threadIdx.x % 32 == 0) room[turn][threadIdx.x / 32] = x;
    asm volatile("bar.sync %0, %1;" ::"r"(1 + mine), "r"(team) : "memory");
    x = 0.0f;
    for (u32 warp = 0; warp < warps; warp++) x += room[turn][mine * warps + warp];
    return x;
}

// y[T, groups * dim] = x * rstd * w, rstd[T, groups] = 1 / sqrt(mean(x^2) + eps), w[dim]. A block of `team` threads
// takes an item at a time.
extern "C" __global__ void forward(
    REAL* y, u32 y_stride, f32* rstd, const REAL* x, u32 x_stride, const REAL* w,
    u32 items, u32 groups, u32 dim, u32 team, f32 eps
) {
    __shared__ f32 room[32];
    const Items of = {groups, dim};
    for (u32 item = blockIdx.x; item < items; item += gridDim.x) {
        const REAL* from = x + of.offset(item, x_stride);
        REAL* to = y + of.offset(item, y_stride);
        f32 squares = 0.0f;
        for (u32 c = threadIdx.x; c < dim; c += team) squares += to_f32(from[c]) * to_f32(from[c]);
        const f32 scale = 1.0f / sqrtf(block_sum(squares, room) / (f32)dim + eps);
        if (threadIdx.x == 0) rstd[item] = scale;
        for (u32 c = threadIdx.x; c < dim; c += team) to[c] = from_f32<REAL>(to_f32(from[c]) * scale * to_f32(w[c]));
    }
}

// The same for rows of whole packs, at most KEPT * team of them.
extern "C" __global__ void __launch_bounds__(MOST_THREADS, FORWARD_BLOCKS) forward_vec(
    REAL* y, u32 y_stride, f32* rstd, const REAL* x, u32 x_stride, const REAL* w,
    u32 items, u32 groups, u32 dim, u32 team, f32 eps
) {
    extern __shared__ uint4 ahead[]; // [FORWARD_AHEAD, KEPT, threads]
    __shared__ f32 room[2][MOST_THREADS / 32];
    const Items of = {groups, dim};
    const u32 teams = blockDim.x / team, lane = threadIdx.x % team, chunks = dim / N, step = gridDim.x * teams;
    const auto place = [&](u32 stage, int k) { return ahead + (stage * KEPT + k) * blockDim.x + threadIdx.x; };
    const auto fetch = [&](u32 item, u32 stage) {
        const REAL* from = x + of.offset(item, x_stride);
#pragma unroll
        for (int k = 0; k < KEPT; k++) {
            const u32 c = lane + k * team;
            if (item < items && c < chunks) begin_copy(place(stage, k), from + c * N);
        }
        commit_copies();
    };

    u32 item = blockIdx.x * teams + threadIdx.x / team;
#pragma unroll
    for (u32 i = 0; i < FORWARD_AHEAD; i++) fetch(item + i * step, i);
    u32 stage = 0, turn = 0;
    // All threads go round as often: those past the last item work on nothing, and take part in sums.
    for (u32 first = blockIdx.x * teams; first < items; first += step, item += step, turn ^= 1) {
        const u32 count = item < items ? chunks : 0;
        wait_copies<FORWARD_AHEAD - 1>();
        Held held[KEPT];
        f32 squares = 0.0f;
#pragma unroll
        for (int k = 0; k < KEPT; k++) {
            if (lane + k * team >= count) continue;
            held[k] = load_held(place(stage, k));
#pragma unroll
            for (int i = 0; i < N; i++) squares += held[k][i] * held[k][i];
        }
        fetch(item + FORWARD_AHEAD * step, stage);
        stage = stage + 1 == FORWARD_AHEAD ? 0 : stage + 1;
        const f32 scale = 1.0f / sqrtf(team_sum(squares, team, turn, room) / (f32)dim + eps);
        if (lane == 0 && item < items) rstd[item] = scale;
        REAL* to = y + of.offset(item, y_stride);
#pragma unroll
        for (int k = 0; k < KEPT; k++) {
            const u32 c = lane + k * team;
            if (c >= count) continue;
            const Held weights = load_held(w + c * N);
            Vec16<REAL> out;
#pragma unroll
            for (int i = 0; i < N; i++) out.at[i] = from_f32<REAL>(held[k][i] * scale * weights[i]);
            store_vec(to + c * N, out);
        }
    }
}

// dx[T, groups * dim] = (add: dx +) the gradient of x, and parts[block, dim] = that of w over the block's items; dx may
// be dy, or dy becomes y `again`. A block of `team` threads takes an item at a time; a thread reads and writes the same
// columns of all.
extern "C" __global__ void backward(
    REAL* dx, u32 dx_stride, REAL* dy, u32 dy_stride, const REAL* x, u32 x_stride,
    const f32* rstd, const REAL* w, f32* parts, u32 items, u32 groups, u32 dim, u32 team, u32 add, u32 again
) {
    __shared__ f32 room[32];
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
        const f32 pull = scale * scale * scale * (block_sum(sum, room) / (f32)dim);
        for (u32 c = threadIdx.x; c < dim; c += team) {
            const f32 start = add ? to_f32(to[c]) : 0.0f;
            to[c] = from_f32<REAL>(fmaf(to_f32(dy_row[c]) * to_f32(w[c]), scale, fmaf(-to_f32(x_row[c]), pull, start)));
            if (again) dy_row[c] = from_f32<REAL>(to_f32(x_row[c]) * scale * to_f32(w[c]));
        }
    }
}

// The same for rows of whole packs, at most KEPT * team of them.
extern "C" __global__ void __launch_bounds__(MOST_THREADS, BACKWARD_BLOCKS) backward_vec(
    REAL* dx, u32 dx_stride, REAL* dy, u32 dy_stride, const REAL* x, u32 x_stride,
    const f32* rstd, const REAL* w, f32* parts, u32 items, u32 groups, u32 dim, u32 team, u32 add, u32 again
) {
    extern __shared__ uint4 ahead[]; // [dy, x, add: dx][BACKWARD_AHEAD, KEPT, threads]
    __shared__ f32 room[2][MOST_THREADS / 32];
    const Items of = {groups, dim};
    const u32 teams = blockDim.x / team, mine = threadIdx.x / team, lane = threadIdx.x % team;
    const u32 chunks = dim / N, step = gridDim.x * teams;
    const auto place = [&](u32 operand, u32 stage, int k) {
        return ahead + ((operand * BACKWARD_AHEAD + stage) * KEPT + k) * blockDim.x + threadIdx.x;
    };
    const auto fetch = [&](u32 item, u32 stage) {
        const REAL *dy_row = dy + of.offset(item, dy_stride), *x_row = x + of.offset(item, x_stride);
        const REAL* dx_row = dx + of.offset(item, dx_stride);
#pragma unroll
        for (int k = 0; k < KEPT; k++) {
            const u32 c = lane + k * team;
            if (item >= items || c >= chunks) continue;
            begin_copy(place(0, stage, k), dy_row + c * N);
            begin_copy(place(1, stage, k), x_row + c * N);
            if (add) begin_copy(place(2, stage, k), dx_row + c * N);
        }
        commit_copies();
    };

    f32 sums[KEPT][N] = {};
    u32 item = blockIdx.x * teams + mine;
    f32 next_scale = item < items ? rstd[item] : 0.0f;
#pragma unroll
    for (u32 i = 0; i < BACKWARD_AHEAD; i++) fetch(item + i * step, i);
    u32 stage = 0, turn = 0;
    // All threads go round as often: those past the last item work on nothing, and take part in sums.
    for (u32 first = blockIdx.x * teams; first < items; first += step, item += step, turn ^= 1) {
        const u32 count = item < items ? chunks : 0;
        const f32 scale = next_scale;
        wait_copies<BACKWARD_AHEAD - 1>();
        Held grads[KEPT], held[KEPT], before[KEPT];
#pragma unroll
        for (int k = 0; k < KEPT; k++) {
            if (lane + k * team >= count) continue;
            grads[k] = load_held(place(0, stage, k));
            held[k] = load_held(place(1, stage, k));
            if (add) before[k] = load_held(place(2, stage, k)); else before[k] = {};
        }
        fetch(item + BACKWARD_AHEAD * step, stage);
        stage = stage + 1 == BACKWARD_AHEAD ? 0 : stage + 1;
        if (item + step < items) next_scale = rstd[item + step];
        f32 sum = 0.0f;
#pragma unroll
        for (int k = 0; k < KEPT; k++) {
            const u32 c = lane + k * team;
            if (c >= count) continue;
            const Held weights = load_held(w + c * N);
#pragma unroll
            for (int i = 0; i < N; i++) {
                const f32 product = grads[k][i] * held[k][i];
                sum = fmaf(product, weights[i], sum);
                sums[k][i] = fmaf(product, scale, sums[k][i]);
            }
        }
        const f32 pull = scale * scale * scale * (team_sum(sum, team, turn, room) / (f32)dim);
        REAL *to = dx + of.offset(item, dx_stride), *again_to = dy + of.offset(item, dy_stride);
#pragma unroll
        for (int k = 0; k < KEPT; k++) {
            const u32 c = lane + k * team;
            if (c >= count) continue;
            const Held weights = load_held(w + c * N);
            Vec16<REAL> out;
#pragma unroll
            for (int i = 0; i < N; i++) {
                const f32 rest = fmaf(-held[k][i], pull, before[k][i]);
                out.at[i] = from_f32<REAL>(fmaf(grads[k][i] * weights[i], scale, rest));
            }
            store_vec(to + c * N, out);
            if (!again) continue;
#pragma unroll
            for (int i = 0; i < N; i++) out.at[i] = from_f32<REAL>(held[k][i] * scale * weights[i]);
            store_vec(again_to + c * N, out);
        }
    }

    // Nothing is on its way any more: the same room takes the teams' sums, [teams, dim], which are added in order.
    f32* team_sums = reinterpret_cast<f32*>(ahead);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
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
