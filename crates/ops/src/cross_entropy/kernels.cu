// Log-probabilities of targets, and the logits' gradient in their own bytes. A block takes a row. REAL is the
// gradient's type; logits are f32.
//
// A row that a block's registers hold is read once: while the block works on it, its next row is being copied to shared
// memory, every thread's chunks to places that no other thread reads. Of a wider row, one pass finds the largest logit
// and the sum of exponentials together, a second one writes the gradient.
#include "lockstep.cuh"

// Below every logit but negative infinity, from which it may be subtracted.
#define LOWEST (-3.402823466e38f)

// Sum of exp(x - largest) over what was seen so far.
struct Seen {
    f32 largest, sum;
};

__device__ __forceinline__ Seen both(Seen a, Seen b) {
    const f32 largest = fmaxf(a.largest, b.largest);
    // Which product is rounded by itself is said, not left to the compiler: all kernels have the same sums.
    const f32 other = __fmul_rn(b.sum, expf(b.largest - largest));
    return {largest, __fmaf_rn(a.sum, expf(a.largest - largest), other)};
}

__device__ __forceinline__ Seen warp_both(Seen seen) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        const f32 largest = __shfl_xor_sync(0xffffffffu, seen.largest, offset);
        const f32 sum = __shfl_xor_sync(0xffffffffu, seen.sum, offset);
        seen = both(seen, {largest, sum});
    }
    return seen;
}

// Every thread gets what the whole block has seen of the row. `room` is not written again before all threads have met.
__device__ __forceinline__ Seen block_both(Seen seen, Seen* room) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    seen = warp_both(seen);
    if (lane == 0) room[warp] = seen;
    __syncthreads();
    return warp_both(lane < warps ? room[lane] : Seen{LOWEST, 0.0f});
}

template <int N> __device__ __forceinline__ Seen see_row(const f32* logits, u32 vocab) {
    __shared__ Seen room[MOST_THREADS / 32];
    Seen seen = {LOWEST, 0.0f};
#pragma unroll 4
    for (u32 column = threadIdx.x * N; column < vocab; column += blockDim.x * N) {
        const Chunk<f32, N> x = load_chunk<N>(logits + column);
        f32 largest = seen.largest;
#pragma unroll
        for (int i = 0; i < N; i++) largest = fmaxf(largest, x.at[i]);
        if (largest > seen.largest) seen = {largest, seen.sum * expf(seen.largest - largest)};
        // A NaN is no largest one, but stays in the sum.
#pragma unroll
        for (int i = 0; i < N; i++) seen.sum += expf(x.at[i] - seen.largest);
    }
    return block_both(seen, room);
}

template <int N>
__device__ __forceinline__ void log_prob_of_row(
    f32* logp, const f32* logits, u32 stride, const u32* targets, u32 vocab
) {
    const u32 row = blockIdx.x, target = targets[row];
    if (target >= vocab) __trap();
    logits += (u64)row * stride;
    const Seen seen = see_row<N>(logits, vocab);
    if (threadIdx.x == 0) logp[row] = logits[target] - seen.largest - logf(seen.sum);
}

// The gradient lies from the row's first byte on. A narrower one is written where logits were read before: all
// threads have read a stretch when it is written, and what is written never passes what is read.
template <int N>
__device__ __forceinline__ void gradient_of_row(
    f32* logp, f32* logits, u32 stride, const u32* targets, const f32* coefficients, u32 vocab
) {
    const u32 row = blockIdx.x, target = targets[row];
    if (target >= vocab) __trap();
    logits += (u64)row * stride;
    const Seen seen = see_row<N>(logits, vocab);
    const f32 c = coefficients[row], scale = -c / seen.sum;
    if (threadIdx.x == 0) logp[row] = logits[target] - seen.largest - logf(seen.sum);
    // The target's logit is read before anything is written.
    __syncthreads();
    REAL* gradient = reinterpret_cast<REAL*>(logits);
    for (u32 first = 0; first < vocab; first += blockDim.x * N) {
        const u32 column = first + threadIdx.x * N;
        Chunk<f32, N> x;
        if (column < vocab) x = load_chunk<N>(logits + column);
        if (sizeof(REAL) < sizeof(f32)) __syncthreads();
        if (column < vocab) {
            Chunk<REAL, N> out;
#pragma unroll
            for (int i = 0; i < N; i++) {
                const f32 pull = scale * expf(x.at[i] - seen.largest);
                out.at[i] = from_f32<REAL>(column + i == target ? c + pull : pull);
            }
            store_chunk<N>(gradient + column, out);
        }
    }
}

// ---- more channels than the log-probability: entropy and mean log-probability ----------------------------------

// Where a number per row is written, and where its coefficient is read. The last two may be null.
struct Outputs {
    f32 *log_prob, *entropy, *mean_log_prob;
};
struct Coefficients {
    const f32 *log_prob, *entropy, *mean_log_prob;
};

// Sums over a row of the distances d of its logits from the largest.
struct Moments {
    f32 weighted; // of d * exp(d)
    f32 distances; // of d

    __device__ __forceinline__ void add(f32 d) {
        const f32 e = expf(d);
        // Of a token that is ruled out, d is infinite.
        weighted = fmaf(e, e == 0.0f ? 0.0f : d, weighted);
        distances += d;
    }
};

// Every thread gets the sums over the block; `room` has a float for each warp.
__device__ __forceinline__ Moments block_moments(Moments sums, f32* room) {
    sums.weighted = block_sum(sums.weighted, room);
    sums.distances = block_sum(sums.distances, room);
    return sums;
}

// One thread writes a row's channels. The log-probability is that of the kernels without channels.
__device__ __forceinline__ void write_channels(
    const Outputs& out, u32 row, f32 logit, Seen seen, Moments sums, u32 vocab
) {
    const f32 log_sum = logf(seen.sum);
    out.log_prob[row] = logit - seen.largest - log_sum;
    if (out.entropy) out.entropy[row] = log_sum - sums.weighted / seen.sum;
    if (out.mean_log_prob) out.mean_log_prob[row] = sums.distances / (f32)vocab - log_sum;
}

// The slope along a logit is even - p * (pull + tilt * (log p + entropy)), and c more at the target. In it
// log p + entropy is d - mean.
struct Slopes {
    f32 largest, scale, mean, c, pull, tilt, even;

    __device__ __forceinline__ Slopes(const Coefficients& from, u32 row, Seen seen, Moments sums, u32 vocab) {
        const f32 c_mean = from.mean_log_prob ? from.mean_log_prob[row] : 0.0f;
        largest = seen.largest;
        scale = 1.0f / seen.sum;
        mean = sums.weighted / seen.sum;
        c = from.log_prob[row];
        pull = c + c_mean;
        tilt = from.entropy ? from.entropy[row] : 0.0f;
        even = c_mean / (f32)vocab;
    }

    __device__ __forceinline__ f32 along(f32 logit) const {
        const f32 d = logit - largest, e = expf(d);
        const f32 slope = fmaf(-(e * scale), fmaf(tilt, d - mean, pull), even);
        return e == 0.0f ? even : slope;
    }
};

// A block takes a row and passes over it twice, or three times for the gradient, which is written as in
// `gradient_of_row`.
template <int N, bool GRADIENT>
__device__ __forceinline__ void channels_of_row(
    const Outputs& out, f32* logits, u32 stride, const u32* targets, const Coefficients& coefficients, u32 vocab
) {
    __shared__ f32 room[MOST_THREADS / 32];
    const u32 row = blockIdx.x, target = targets[row];
    if (target >= vocab) __trap();
    logits += (u64)row * stride;
    const Seen seen = see_row<N>(logits, vocab);
    Moments sums = {0.0f, 0.0f};
#pragma unroll 4
    for (u32 column = threadIdx.x * N; column < vocab; column += blockDim.x * N) {
        const Chunk<f32, N> x = load_chunk<N>(logits + column);
#pragma unroll
        for (int i = 0; i < N; i++) sums.add(x.at[i] - seen.largest);
    }
    sums = block_moments(sums, room);
    if (threadIdx.x == 0) write_channels(out, row, logits[target], seen, sums, vocab);
    if constexpr (GRADIENT) {
        const Slopes slopes(coefficients, row, seen, sums, vocab);
        // The target's logit is read before anything is written.
        __syncthreads();
        REAL* gradient = reinterpret_cast<REAL*>(logits);
        for (u32 first = 0; first < vocab; first += blockDim.x * N) {
            const u32 column = first + threadIdx.x * N;
            Chunk<f32, N> x;
            if (column < vocab) x = load_chunk<N>(logits + column);
            if (sizeof(REAL) < sizeof(f32)) __syncthreads();
            if (column < vocab) {
                Chunk<REAL, N> to;
#pragma unroll
                for (int i = 0; i < N; i++) {
                    const f32 slope = slopes.along(x.at[i]);
                    to.at[i] = from_f32<REAL>(column + i == target ? slopes.c + slope : slope);
                }
                store_chunk<N>(gradient + column, to);
            }
        }
    }
}

// ---- rows that a block's registers hold ------------------------------------------------------------------------

// What `held_rows` does with a row that its threads hold, for channels. `room` is free between two rows.
template <bool GRADIENT>
__device__ __forceinline__ void held_channels(
    const Outputs& outputs, f32* logits, u32 stride, const Coefficients& coefficients, u32 row, u32 target, u32 vocab,
    const Chunk<f32, Vec16<f32>::N> (&x)[HELD], f32 logit, Seen seen, Seen* room
) {
    constexpr int N = Vec16<f32>::N;
    const u32 chunks = vocab / N;
    const bool has_target = target / N % blockDim.x == threadIdx.x;
    Moments sums = {0.0f, 0.0f};
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        if (threadIdx.x + k * blockDim.x >= chunks) continue;
#pragma unroll
        for (int i = 0; i < N; i++) sums.add(x[k].at[i] - seen.largest);
    }
    sums = block_moments(sums, reinterpret_cast<f32*>(room));
    if (has_target) write_channels(outputs, row, logit, seen, sums, vocab);
    // The next row's sums are written to the same room.
    __syncthreads();
    if constexpr (GRADIENT) {
        const Slopes slopes(coefficients, row, seen, sums, vocab);
        REAL* gradient = reinterpret_cast<REAL*>(logits + (u64)row * stride);
#pragma unroll
        for (int k = 0; k < HELD; k++) {
            const u32 chunk = threadIdx.x + k * blockDim.x;
            if (chunk >= chunks) continue;
            Chunk<REAL, N> to;
#pragma unroll
            for (int i = 0; i < N; i++) to.at[i] = from_f32<REAL>(slopes.along(x[k].at[i]));
            store_chunk<N>(gradient + chunk * N, to);
        }
        if (has_target) gradient[target] = from_f32<REAL>(slopes.c + slopes.along(logit));
    }
}

// A thread holds up to HELD chunks of four logits; there are registers for HELD_THREADS threads.
template <bool GRADIENT, bool CHANNELS>
__device__ __forceinline__ void held_rows(
    const Outputs& outputs, f32* logits, u32 stride, const u32* targets, const Coefficients& coefficients, u32 rows,
    u32 vocab
) {
    constexpr int N = Vec16<f32>::N;
    extern __shared__ uint4 ahead[]; // [vocab / N]
    __shared__ Seen room[2][HELD_THREADS / 32];
    static_assert(sizeof(room) == HELD_STATIC, "shared memory that the launch counts with");
    const u32 chunks = vocab / N;
    const auto fetch = [&](u32 row) {
        const f32* from = logits + (u64)row * stride;
#pragma unroll
        for (int k = 0; k < HELD; k++) {
            const u32 chunk = threadIdx.x + k * blockDim.x;
            if (row < rows && chunk < chunks) begin_copy(ahead + chunk, from + chunk * N);
        }
        commit_copies();
    };

    fetch(blockIdx.x);
    u32 next_target = targets[blockIdx.x];
    f32 next_c = GRADIENT ? coefficients.log_prob[blockIdx.x] : 0.0f;
    for (u32 row = blockIdx.x, turn = 0; row < rows; row += gridDim.x, turn ^= 1) {
        const u32 target = next_target;
        const f32 c = next_c;
        if (target >= vocab) __trap();
        wait_copies<0>();
        Chunk<f32, N> x[HELD];
        f32 largest = LOWEST;
#pragma unroll
        for (int k = 0; k < HELD; k++) {
            const u32 chunk = threadIdx.x + k * blockDim.x;
            if (chunk >= chunks) continue;
            x[k] = load_chunk<N>(reinterpret_cast<const f32*>(ahead + chunk));
#pragma unroll
            for (int i = 0; i < N; i++) largest = fmaxf(largest, x[k].at[i]);
        }
        const bool has_target = target / N % blockDim.x == threadIdx.x;
        const f32 logit = has_target ? reinterpret_cast<const f32*>(ahead)[target] : 0.0f;
        fetch(row + gridDim.x);
        if (row + gridDim.x < rows) {
            next_target = targets[row + gridDim.x];
            if (GRADIENT) next_c = coefficients.log_prob[row + gridDim.x];
        }
        // Exponentials of the distance from this thread's largest logit. A NaN is no largest one, but stays in the sum.
        f32 sum = 0.0f;
#pragma unroll
        for (int k = 0; k < HELD; k++) {
            if (threadIdx.x + k * blockDim.x >= chunks) continue;
#pragma unroll
            for (int i = 0; i < N; i++) {
                const f32 e = expf(x[k].at[i] - largest);
                if (!CHANNELS) x[k].at[i] = e;
                sum += e;
            }
        }
        // All threads have read the row when they have met.
        const Seen seen = block_both({largest, sum}, room[turn]);
        if constexpr (CHANNELS) {
            held_channels<GRADIENT>(
                outputs, logits, stride, coefficients, row, target, vocab, x, logit, seen, room[turn ^ 1]
            );
            continue;
        }
        if (has_target) outputs.log_prob[row] = logit - seen.largest - logf(seen.sum);
        if (!GRADIENT) continue;
        const f32 scale = -c / seen.sum, mine = scale * expf(largest - seen.largest);
        REAL* gradient = reinterpret_cast<REAL*>(logits + (u64)row * stride);
#pragma unroll
        for (int k = 0; k < HELD; k++) {
            const u32 chunk = threadIdx.x + k * blockDim.x;
            if (chunk >= chunks) continue;
            Chunk<REAL, N> out;
#pragma unroll
            for (int i = 0; i < N; i++) out.at[i] = from_f32<REAL>(mine * x[k].at[i]);
            store_chunk<N>(gradient + chunk * N, out);
        }
        if (has_target) gradient[target] = from_f32<REAL>(c + scale * expf(logit - seen.largest));
    }
}

// logp[T] = log softmax(logits[T, V])[targets[T]].
extern "C" __global__ void __launch_bounds__(MOST_THREADS) forward(
    f32* logp, const f32* logits, u32 stride, const u32* targets, u32 rows, u32 vocab
) {
    log_prob_of_row<1>(logp, logits, stride, targets, vocab);
}

extern "C" __global__ void __launch_bounds__(MOST_THREADS) forward_vec(
    f32* logp, const f32* logits, u32 stride, const u32* targets, u32 rows, u32 vocab
) {
    log_prob_of_row<Vec16<f32>::N>(logp, logits, stride, targets, vocab);
}

extern "C" __global__ void __launch_bounds__(HELD_THREADS) forward_held(
    f32* logp, f32* logits, u32 stride, const u32* targets, u32 rows, u32 vocab
) {
    held_rows<false, false>({logp, nullptr, nullptr}, logits, stride, targets, {}, rows, vocab);
}

// The same, and each row's logits become c * (onehot(target) - softmax).
extern "C" __global__ void __launch_bounds__(MOST_THREADS) forward_backward(
    f32* logp, f32* logits, u32 stride, const u32* targets, const f32* coefficients, u32 rows, u32 vocab
) {
    gradient_of_row<1>(logp, logits, stride, targets, coefficients, vocab);
}

extern "C" __global__ void __launch_bounds__(MOST_THREADS) forward_backward_vec(
    f32* logp, f32* logits, u32 stride, const u32* targets, const f32* coefficients, u32 rows, u32 vocab
) {
    gradient_of_row<Vec16<f32>::N>(logp, logits, stride, targets, coefficients, vocab);
}

extern "C" __global__ void __launch_bounds__(HELD_THREADS) forward_backward_held(
    f32* logp, f32* logits, u32 stride, const u32* targets, const f32* coefficients, u32 rows, u32 vocab
) {
    const Coefficients all = {coefficients, nullptr, nullptr};
    held_rows<true, false>({logp, nullptr, nullptr}, logits, stride, targets, all, rows, vocab);
}

// The same with more channels: entropy[T] = -sum p log p and mean_logp[T] = sum log p / V, each where it is not null.
extern "C" __global__ void __launch_bounds__(MOST_THREADS) forward_channels(
    f32* logp, f32* entropy, f32* mean_logp, f32* logits, u32 stride, const u32* targets, u32 rows, u32 vocab
) {
    channels_of_row<1, false>({logp, entropy, mean_logp}, logits, stride, targets, {}, vocab);
}

extern "C" __global__ void __launch_bounds__(MOST_THREADS) forward_channels_vec(
    f32* logp, f32* entropy, f32* mean_logp, f32* logits, u32 stride, const u32* targets, u32 rows, u32 vocab
) {
    channels_of_row<Vec16<f32>::N, false>({logp, entropy, mean_logp}, logits, stride, targets, {}, vocab);
}

extern "C" __global__ void __launch_bounds__(HELD_THREADS) forward_channels_held(
    f32* logp, f32* entropy, f32* mean_logp, f32* logits, u32 stride, const u32* targets, u32 rows, u32 vocab
) {
    held_rows<false, true>({logp, entropy, mean_logp}, logits, stride, targets, {}, rows, vocab);
}

// And each row's logits become their gradient for a coefficient of each channel, none where it is null.
extern "C" __global__ void __launch_bounds__(MOST_THREADS) forward_backward_channels(
    f32* logp, f32* entropy, f32* mean_logp, f32* logits, u32 stride, const u32* targets,
    const f32* c, const f32* c_entropy, const f32* c_mean_logp, u32 rows, u32 vocab
) {
    const Coefficients all = {c, c_entropy, c_mean_logp};
    channels_of_row<1, true>({logp, entropy, mean_logp}, logits, stride, targets, all, vocab);
}

extern "C" __global__ void __launch_bounds__(MOST_THREADS) forward_backward_channels_vec(
    f32* logp, f32* entropy, f32* mean_logp, f32* logits, u32 stride, const u32* targets,
    const f32* c, const f32* c_entropy, const f32* c_mean_logp, u32 rows, u32 vocab
) {
    const Coefficients all = {c, c_entropy, c_mean_logp};
    channels_of_row<Vec16<f32>::N, true>({logp, entropy, mean_logp}, logits, stride, targets, all, vocab);
}

extern "C" __global__ void __launch_bounds__(HELD_THREADS) forward_backward_channels_held(
    f32* logp, f32* entropy, f32* mean_logp, f32* logits, u32 stride, const u32* targets,
    const f32* c, const f32* c_entropy, const f32* c_mean_logp, u32 rows, u32 vocab
) {
    const Coefficients all = {c, c_entropy, c_mean_logp};
    held_rows<true, true>({logp, entropy, mean_logp}, logits, stride, targets, all, rows, vocab);
}
