// RMS normalisation over groups of `dim` columns. An item is one group of one row; a team of threads, a power of
// two, works on it: part of a warp, a warp, or a whole block. A thread reads N elements at a time.
#include "lockstep.cuh"

// Chunks that a thread keeps in registers between reading and writing; what is beyond is read again.
constexpr int KEPT = 4;

// Rows whose weight gradients are summed together: GRAD_ROWS of mod.rs.
constexpr u32 GRAD_ROWS = 64;
constexpr u32 BACKWARD_THREADS = 256;

// The sum over the team's threads, in an order that depends on the team's size alone.
__device__ __forceinline__ f32 team_sum(f32 x, u32 team, f32* room) {
    if (team > 32) return block_sum(x, room);
    for (u32 offset = team / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
}

template <int N> __device__ __forceinline__ f32 squares_of(const Chunk<REAL, N>& x) {
    f32 sum = 0.0f;
#pragma unroll
    for (int i = 0; i < N; i++) sum += to_f32(x.at[i]) * to_f32(x.at[i]);
    return sum;
}

template <int N>
__device__ __forceinline__ void write_normed(REAL* y, const Chunk<REAL, N>& x, f32 scale, const REAL* w) {
    const Chunk<REAL, N> weight = load_chunk<N>(w);
    Chunk<REAL, N> out;
#pragma unroll
    for (int i = 0; i < N; i++) out.at[i] = from_f32<REAL>(to_f32(x.at[i]) * scale * to_f32(weight.at[i]));
    store_chunk<N>(y, out);
}

template <int N>
__device__ __forceinline__ void forward_item(
    REAL* y, u32 y_stride, f32* rstd, const REAL* x, u32 x_stride, const REAL* w,
    u32 items, u32 groups, u32 dim, u32 team, f32 eps
) {
    __shared__ f32 room[32];
    const u32 item = blockIdx.x * (blockDim.x / team) + threadIdx.x / team, lane = threadIdx.x % team;
    const u32 row = item / groups, start = item % groups * dim;
    // Threads past the last item work on nothing, and take part in the sums.
    const u32 chunks = item < items ? dim / N : 0;
    const REAL* from = x + (u64)row * x_stride + start;
    REAL* to = y + (u64)row * y_stride + start;

    Chunk<REAL, N> kept[KEPT];
    f32 squares = 0.0f;
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        const u32 c = lane + k * team;
        if (c < chunks) {
            kept[k] = load_chunk<N>(from + c * N);
            squares += squares_of<N>(kept[k]);
        }
    }
    for (u32 c = lane + KEPT * team; c < chunks; c += team) squares += squares_of<N>(load_chunk<N>(from + c * N));

    const f32 scale = 1.0f / sqrtf(team_sum(squares, team, room) / (f32)dim + eps);
    if (lane == 0 && item < items) rstd[item] = scale;
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        const u32 c = lane + k * team;
        if (c < chunks) write_normed<N>(to + c * N, kept[k], scale, w + c * N);
    }
    for (u32 c = lane + KEPT * team; c < chunks; c += team) {
        write_normed<N>(to + c * N, load_chunk<N>(from + c * N), scale, w + c * N);
    }
}

// y[T, groups * dim] = x * rstd * w, rstd[T, groups] = 1 / sqrt(mean(x^2) + eps), w[dim].
extern "C" __global__ void forward(
    REAL* y, u32 y_stride, f32* rstd, const REAL* x, u32 x_stride, const REAL* w,
    u32 items, u32 groups, u32 dim, u32 team, f32 eps
) {
    forward_item<1>(y, y_stride, rstd, x, x_stride, w, items, groups, dim, team, eps);
}

extern "C" __global__ void forward_packs(
    REAL* y, u32 y_stride, f32* rstd, const REAL* x, u32 x_stride, const REAL* w,
    u32 items, u32 groups, u32 dim, u32 team, f32 eps
) {
    forward_item<Pack<REAL>::N>(y, y_stride, rstd, x, x_stride, w, items, groups, dim, team, eps);
}

struct Operands {
    REAL* dx;        // [T, groups * dim]; may be dy
    u32 dx_stride;
    const REAL* dy;  // [T, groups * dim]
    u32 dy_stride;
    const REAL* x;   // [T, groups * dim]
    u32 x_stride;
    const f32* rstd; // [T, groups]
    const REAL* w;   // [dim]
    u32 groups, dim;
    bool add;
};

// The part of sum(dy * w * x) over an item that falls to one thread of its team.
template <int N> __device__ __forceinline__ f32 product_of(const Operands& of, u32 item, u32 lane, u32 team) {
    const u64 row = item / of.groups;
    const u32 start = item % of.groups * of.dim;
    const REAL *dy_row = of.dy + row * of.dy_stride + start, *x_row = of.x + row * of.x_stride + start;
    f32 sum = 0.0f;
#pragma unroll 4
    for (u32 c = lane * N; c < of.dim; c += team * N) {
        const Chunk<REAL, N> dy = load_chunk<N>(dy_row + c), x = load_chunk<N>(x_row + c);
        const Chunk<REAL, N> w = load_chunk<N>(of.w + c);
#pragma unroll
        for (int i = 0; i < N; i++) sum = fmaf(to_f32(dy.at[i]) * to_f32(w.at[i]), to_f32(x.at[i]), sum);
    }
    return sum;
}

// Columns `column` .. of dx, from mean(dy * w * n) with n = x * rstd; dy * n is added to `sums`. Only this thread
// reads and writes these elements of dy and dx.
template <int N>
__device__ __forceinline__ void write_gradient(
    const Operands& of, u32 item, u32 column, f32 scale, f32 mean, f32* sums
) {
    const u64 row = item / of.groups;
    const u32 at = item % of.groups * of.dim + column;
    const Chunk<REAL, N> dy = load_chunk<N>(of.dy + row * of.dy_stride + at);
    const Chunk<REAL, N> x = load_chunk<N>(of.x + row * of.x_stride + at);
    const Chunk<REAL, N> w = load_chunk<N>(of.w + column);
    REAL* to = of.dx + row * of.dx_stride + at;
    Chunk<REAL, N> dx = dy;
    if (of.add) dx = load_chunk<N>(to);
#pragma unroll
    for (int i = 0; i < N; i++) {
        const f32 grad = to_f32(dy.at[i]), normed = to_f32(x.at[i]) * scale;
        const f32 before = of.add ? to_f32(dx.at[i]) : 0.0f;
        sums[i] = fmaf(grad, normed, sums[i]);
        dx.at[i] = from_f32<REAL>(before + scale * fmaf(-normed, mean, grad * to_f32(w.at[i])));
    }
    store_chunk<N>(to, dx);
}

// A block takes GRAD_ROWS rows, a few items at a time: first teams find the items' means, then each thread takes
// its own columns of all of them, whose weight gradients it sums in registers. Where a group is narrower than the
// block, `slices` of threads share the items; their sums are added in order.
template <int N> __device__ __forceinline__ void backward_rows(const Operands& of, f32* parts, u32 rows, u32 team) {
    __shared__ f32 means[BACKWARD_THREADS], scales[BACKWARD_THREADS], room[BACKWARD_THREADS * N];
    const u32 first = blockIdx.x * GRAD_ROWS, chunks = of.dim / N;
    const u32 first_item = first * of.groups, items = min(GRAD_ROWS, rows - first) * of.groups;
    const u32 at_once = BACKWARD_THREADS / team;
    u32 width = 1; // Threads side by side on one item: a power of two.
    while (width < chunks && width < BACKWARD_THREADS) width *= 2;
    const u32 slices = BACKWARD_THREADS / width, slice = threadIdx.x / width, column = threadIdx.x % width;
    f32* part = parts + (u64)blockIdx.x * of.dim;

    f32 sums[KEPT][N] = {};
    for (u32 c = column + KEPT * width; c < chunks; c += width) {
        for (int i = 0; i < N; i++) part[c * N + i] = 0.0f;
    }
    for (u32 done = 0; done < items; done += at_once) {
        const u32 mine = done + threadIdx.x / team, lane = threadIdx.x % team;
        const bool live = mine < items;
        const f32 scale = live ? of.rstd[first_item + mine] : 0.0f;
        f32 sum = live ? product_of<N>(of, first_item + mine, lane, team) : 0.0f;
        for (u32 offset = team / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
        if (lane == 0) {
            means[threadIdx.x / team] = sum * scale / (f32)of.dim;
            scales[threadIdx.x / team] = scale;
        }
        __syncthreads();
        const u32 count = min(at_once, items - done);
        for (u32 i = slice; i < count; i += slices) {
            const u32 item = first_item + done + i;
#pragma unroll
            for (int k = 0; k < KEPT; k++) {
                const u32 c = column + k * width;
                if (c < chunks) write_gradient<N>(of, item, c * N, scales[i], means[i], sums[k]);
            }
            for (u32 c = column + KEPT * width; c < chunks; c += width) {
                write_gradient<N>(of, item, c * N, scales[i], means[i], part + c * N);
            }
        }
        __syncthreads();
    }

    if (slices == 1) {
#pragma unroll
        for (int k = 0; k < KEPT; k++) {
            const u32 c = column + k * width;
#pragma unroll
            for (int i = 0; i < N; i++) {
                if (c < chunks) part[c * N + i] = sums[k][i];
            }
        }
        return;
    }
    // Several slices have at most one chunk a thread.
#pragma unroll
    for (int i = 0; i < N; i++) room[(slice * width + column) * N + i] = sums[0][i];
    __syncthreads();
    for (u32 c = threadIdx.x; c < of.dim; c += BACKWARD_THREADS) {
        f32 sum = 0.0f;
        for (u32 s = 0; s < slices; s++) sum += room[s * width * N + c];
        part[c] = sum;
    }
}

// A pack in as few registers as it has words: elements are taken out where they are used.
template <typename R> struct Held {
    u32 at[4];

    __device__ __forceinline__ f32 operator[](int i) const {
        if constexpr (sizeof(R) == 4) return __uint_as_float(at[i]);
        const u32 word = at[i / 2];
        return to_f32(R{(u16)(i % 2 ? word >> 16 : word)});
    }
};

template <typename R> __device__ __forceinline__ Held<R> load_held(const R* from) {
    const uint4 words = *reinterpret_cast<const uint4*>(from);
    return {{words.x, words.y, words.z, words.w}};
}

// As above for groups that fill warps: a team of whole warps keeps an item of x and dy in registers from the sum to the
// gradients, while the next item's are on their way. Each team takes every so-manieth item; no thread waits for another
// team until the weight gradients are added up, team after team.
__device__ __forceinline__ void backward_held(const Operands& of, f32* parts, u32 rows, u32 team) {
    constexpr int N = Pack<REAL>::N;
    __shared__ f32 warp_sums[2][BACKWARD_THREADS / 32], room[BACKWARD_THREADS * N];
    const u32 first = blockIdx.x * GRAD_ROWS, chunks = of.dim / N;
    const u32 first_item = first * of.groups, items = min(GRAD_ROWS, rows - first) * of.groups;
    const u32 teams = BACKWARD_THREADS / team, mine = threadIdx.x / team, column = threadIdx.x % team;
    const u32 warp = threadIdx.x / 32, team_warps = team / 32;

    f32 sums[KEPT][N] = {};
    Held<REAL> dy[KEPT], x[KEPT], next_dy[KEPT], next_x[KEPT];
    const auto load = [&](u32 i) {
        const u32 item = first_item + i, at = item % of.groups * of.dim;
        const u64 row = item / of.groups;
        const REAL *dy_row = of.dy + row * of.dy_stride + at, *x_row = of.x + row * of.x_stride + at;
#pragma unroll
        for (int k = 0; k < KEPT; k++) {
            const u32 c = column + k * team;
            if (c < chunks) {
                next_dy[k] = load_held(dy_row + c * N);
                next_x[k] = load_held(x_row + c * N);
            }
        }
    };
    if (mine < items) load(mine);
    u32 turn = 0;
    for (u32 i = mine; i < items; i += teams, turn ^= 1) {
#pragma unroll
        for (int k = 0; k < KEPT; k++) dy[k] = next_dy[k], x[k] = next_x[k];
        if (i + teams < items) load(i + teams);
        const u32 item = first_item + i;
        const f32 scale = of.rstd[item];
        REAL* to = of.dx + (u64)(item / of.groups) * of.dx_stride + item % of.groups * of.dim;
        Held<REAL> before[KEPT];
        f32 sum = 0.0f;
#pragma unroll
        for (int k = 0; k < KEPT; k++) {
            const u32 c = column + k * team;
            if (c >= chunks) continue;
            const Held<REAL> w = load_held(of.w + c * N);
            if (of.add) before[k] = load_held(to + c * N);
#pragma unroll
            for (int j = 0; j < N; j++) {
                const f32 grad = dy[k][j], normed = x[k][j] * scale;
                sum = fmaf(grad * w[j], normed, sum);
                sums[k][j] = fmaf(grad, normed, sums[k][j]);
            }
        }
        sum = warp_sum(sum);
        if (team_warps > 1) {
            // In turns, so that a warp may go on while another still reads.
            if (threadIdx.x % 32 == 0) warp_sums[turn][warp] = sum;
            asm volatile("bar.sync %0, %1;" ::"r"(1 + mine), "r"(team) : "memory");
            sum = 0.0f;
            for (u32 other = 0; other < team_warps; other++) sum += warp_sums[turn][mine * team_warps + other];
        }
        const f32 mean = sum / (f32)of.dim;
#pragma unroll
        for (int k = 0; k < KEPT; k++) {
            const u32 c = column + k * team;
            if (c >= chunks) continue;
            const Held<REAL> w = load_held(of.w + c * N);
            Chunk<REAL, N> out;
#pragma unroll
            for (int j = 0; j < N; j++) {
                const f32 start = of.add ? before[k][j] : 0.0f;
                const f32 weighted = dy[k][j] * w[j], normed = x[k][j] * scale;
                out.at[j] = from_f32<REAL>(start + scale * fmaf(-normed, mean, weighted));
            }
            store_chunk<N>(to + c * N, out);
        }
    }

    f32* part = parts + (u64)blockIdx.x * of.dim;
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        const u32 c = column + k * team;
        __syncthreads();
#pragma unroll
        for (int j = 0; j < N; j++) room[threadIdx.x * N + j] = sums[k][j];
        __syncthreads();
        if (mine != 0 || c >= chunks) continue;
        for (int j = 0; j < N; j++) {
            f32 sum = 0.0f;
            for (u32 other = 0; other < teams; other++) sum += room[(other * team + column) * N + j];
            part[c * N + j] = sum;
        }
    }
}

// dx = (add: dx +) the gradient of x; parts[blocks of GRAD_ROWS rows, dim] = those of w, row block by row block.
extern "C" __global__ void __launch_bounds__(BACKWARD_THREADS) backward(
    REAL* dx, u32 dx_stride, const REAL* dy, u32 dy_stride, const REAL* x, u32 x_stride,
    const f32* rstd, const REAL* w, f32* parts, u32 rows, u32 groups, u32 dim, u32 team, u32 add
) {
    const Operands of = {dx, dx_stride, dy, dy_stride, x, x_stride, rstd, w, groups, dim, add != 0};
    backward_rows<1>(of, parts, rows, team);
}

extern "C" __global__ void __launch_bounds__(BACKWARD_THREADS) backward_packs(
    REAL* dx, u32 dx_stride, const REAL* dy, u32 dy_stride, const REAL* x, u32 x_stride,
    const f32* rstd, const REAL* w, f32* parts, u32 rows, u32 groups, u32 dim, u32 team, u32 add
) {
    const Operands of = {dx, dx_stride, dy, dy_stride, x, x_stride, rstd, w, groups, dim, add != 0};
    backward_rows<Pack<REAL>::N>(of, parts, rows, team);
}

// For dim of at least 32 and at most KEPT * 256 packs; the team is as many warps as that takes, a power of two.
extern "C" __global__ void __launch_bounds__(BACKWARD_THREADS, 2) backward_held_packs(
    REAL* dx, u32 dx_stride, const REAL* dy, u32 dy_stride, const REAL* x, u32 x_stride,
    const f32* rstd, const REAL* w, f32* parts, u32 rows, u32 groups, u32 dim, u32 team, u32 add
) {
    const Operands of = {dx, dx_stride, dy, dy_stride, x, x_stride, rstd, w, groups, dim, add != 0};
    backward_held(of, parts, rows, team);
}
