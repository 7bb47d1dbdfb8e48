// Log-probabilities of targets, and the gradient of the logits in the logits' own bytes. A block processes one row at a
// time. REAL is the type of the gradient; logits are f32.
//
// A row that fits in a block's registers is read once: while the block processes it, its next row is copied to shared
// memory, each thread's chunks to a location that only that thread reads. For a wider row, one pass computes the
// maximum and the sum of exponentials together, and a second pass writes the gradient.
#include "lockstep.cuh"

// Below every logit except negative infinity, and finite, so that it can be subtracted.
#define LOWEST (-3.402823466e38f)

// The distance of a logit from the maximum, divided by the temperature. Products here are rounded explicitly instead of
// letting the compiler choose what to fuse, so that all kernels compute the same log-probabilities.
__device__ __forceinline__ f32 distance(f32 x, f32 largest, f32 inverse_temperature) {
    return __fmul_rn(x - largest, inverse_temperature);
}

// The maximum and the sum of exp(distance) over the logits so far.
struct RowStats {
    f32 largest, sum;
};

__device__ __forceinline__ RowStats merge(RowStats a, RowStats b, f32 inverse_temperature) {
    const f32 largest = fmaxf(a.largest, b.largest);
    const f32 other = __fmul_rn(b.sum, expf(distance(b.largest, largest, inverse_temperature)));
    return {largest, __fmaf_rn(a.sum, expf(distance(a.largest, largest, inverse_temperature)), other)};
}

__device__ __forceinline__ RowStats warp_merge(RowStats stats, f32 inverse_temperature) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        const f32 largest = __shfl_xor_sync(0xffffffffu, stats.largest, offset);
        const f32 sum = __shfl_xor_sync(0xffffffffu, stats.sum, offset);
        stats = merge(stats, {largest, sum}, inverse_temperature);
    }
    return stats;
}

// Returns the statistics of the whole row to every thread. All threads must pass a barrier before `scratch` is reused.
__device__ __forceinline__ RowStats block_stats(RowStats stats, RowStats* scratch, f32 inverse_temperature) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    stats = warp_merge(stats, inverse_temperature);
    if (lane == 0) scratch[warp] = stats;
    __syncthreads();
    return warp_merge(lane < warps ? scratch[lane] : RowStats{LOWEST, 0.0f}, inverse_temperature);
}

__device__ __forceinline__ f32 log_prob(f32 logit, RowStats stats, f32 inverse_temperature) {
    return distance(logit, stats.largest, inverse_temperature) - logf(stats.sum);
}

template <int N>
__device__ __forceinline__ RowStats row_stats(const f32* logits, u32 vocab, f32 inverse_temperature) {
    __shared__ RowStats scratch[MAX_THREADS / 32];
    RowStats stats = {LOWEST, 0.0f};
#pragma unroll 4
    for (u32 column = threadIdx.x * N; column < vocab; column += blockDim.x * N) {
        const Chunk<f32, N> x = load_chunk<N>(logits + column);
        f32 largest = stats.largest;
#pragma unroll
        for (int i = 0; i < N; i++) largest = fmaxf(largest, x.at[i]);
        if (largest > stats.largest) {
            stats = {largest, stats.sum * expf(distance(stats.largest, largest, inverse_temperature))};
        }
        // A NaN is never the maximum, but stays in the sum.
#pragma unroll
        for (int i = 0; i < N; i++) {
            stats.sum += expf(distance(x.at[i], stats.largest, inverse_temperature));
        }
    }
    return block_stats(stats, scratch, inverse_temperature);
}

template <int N>
__device__ __forceinline__ void log_prob_of_row(
    f32* logp, const f32* logits, u32 stride, const u32* targets, u32 vocab, f32 inverse_temperature
) {
    const u32 row = blockIdx.x, target = targets[row];
    if (target >= vocab) __trap();
    logits += (u64)row * stride;
    const RowStats stats = row_stats<N>(logits, vocab, inverse_temperature);
    if (threadIdx.x == 0) logp[row] = log_prob(logits[target], stats, inverse_temperature);
}

// The gradient starts at the row's first byte. If it is narrower than the logits it overwrites logits that were read
// before: all threads have read a stretch of the row when it is written, and writes never get ahead of reads.
template <int N>
__device__ __forceinline__ void gradient_of_row(
    f32* logp, f32* logits, u32 stride, const u32* targets, const f32* coefficients, u32 vocab, f32 inverse_temperature
) {
    const u32 row = blockIdx.x, target = targets[row];
    if (target >= vocab) __trap();
    logits += (u64)row * stride;
    const RowStats stats = row_stats<N>(logits, vocab, inverse_temperature);
    const f32 c = __fmul_rn(coefficients[row], inverse_temperature), scale = -c / stats.sum;
    if (threadIdx.x == 0) logp[row] = log_prob(logits[target], stats, inverse_temperature);
    // Read the target's logit before anything is overwritten.
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
                const f32 pull = scale * expf(distance(x.at[i], stats.largest, inverse_temperature));
                out.at[i] = from_f32<REAL>(column + i == target ? c + pull : pull);
            }
            store_chunk<N>(gradient + column, out);
        }
    }
}

// ---- channels besides the log-probability: entropy and mean log-probability ------------------------------------

// Output and coefficient pointers, one number per row each. The last two may be null.
struct Outputs {
    f32 *log_prob, *entropy, *mean_log_prob;
};
struct Coefficients {
    const f32 *log_prob, *entropy, *mean_log_prob;
};

// Sums over a row of its distances d.
struct Moments {
    f32 weighted; // of d * exp(d)
    f32 distances; // of d

    __device__ __forceinline__ void add(f32 d) {
        const f32 e = expf(d);
        // d is infinite for a masked token.
        weighted = fmaf(e, e == 0.0f ? 0.0f : d, weighted);
        distances += d;
    }
};

// Returns the sums over the block to every thread; `scratch` has one float per warp.
__device__ __forceinline__ Moments block_moments(Moments sums, f32* scratch) {
    sums.weighted = block_sum(sums.weighted, scratch);
    sums.distances = block_sum(sums.distances, scratch);
    return sums;
}

// One thread writes a row's channels. The log-probability has the same bits as without the other channels.
__device__ __forceinline__ void write_channels(
    const Outputs& out, u32 row, f32 logit, RowStats stats, Moments sums, u32 vocab, f32 inverse_temperature
) {
    const f32 log_sum = logf(stats.sum);
    out.log_prob[row] = log_prob(logit, stats, inverse_temperature);
    if (out.entropy) out.entropy[row] = log_sum - sums.weighted / stats.sum;
    if (out.mean_log_prob) out.mean_log_prob[row] = sums.distances / (f32)vocab - log_sum;
}

// The gradient of a logit is even - p * (pull + tilt * (log p + entropy)), plus c at the target. Here log p + entropy
// is d - mean.
struct GradientTerms {
    f32 largest, inverse_temperature, scale, mean, c, pull, tilt, even;

    __device__ __forceinline__ GradientTerms(
        const Coefficients& from, u32 row, RowStats stats, Moments sums, u32 vocab, f32 inverse
    ) : inverse_temperature(inverse) {
        const f32 c_mean = from.mean_log_prob ? __fmul_rn(from.mean_log_prob[row], inverse) : 0.0f;
        largest = stats.largest;
        scale = 1.0f / stats.sum;
        mean = sums.weighted / stats.sum;
        c = __fmul_rn(from.log_prob[row], inverse);
        pull = c + c_mean;
        tilt = from.entropy ? __fmul_rn(from.entropy[row], inverse) : 0.0f;
        even = c_mean / (f32)vocab;
    }

    __device__ __forceinline__ f32 gradient(f32 logit) const {
        const f32 d = distance(logit, largest, inverse_temperature), e = expf(d);
        const f32 grad = fmaf(-(e * scale), fmaf(tilt, d - mean, pull), even);
        return e == 0.0f ? even : grad;
    }
};

// A block processes a row in two passes, or three with the gradient, which is written as in `gradient_of_row`.
template <int N, bool GRADIENT>
__device__ __forceinline__ void channels_of_row(
    const Outputs& out, f32* logits, u32 stride, const u32* targets, const Coefficients& coefficients, u32 vocab,
    f32 inverse_temperature
) {
    __shared__ f32 scratch[MAX_THREADS / 32];
    const u32 row = blockIdx.x, target = targets[row];
    if (target >= vocab) __trap();
    logits += (u64)row * stride;
    const RowStats stats = row_stats<N>(logits, vocab, inverse_temperature);
    Moments sums = {0.0f, 0.0f};
#pragma unroll 4
    for (u32 column = threadIdx.x * N; column < vocab; column += blockDim.x * N) {
        const Chunk<f32, N> x = load_chunk<N>(logits + column);
#pragma unroll
        for (int i = 0; i < N; i++) sums.add(distance(x.at[i], stats.largest, inverse_temperature));
    }
    sums = block_moments(sums, scratch);
    if (threadIdx.x == 0) write_channels(out, row, logits[target], stats, sums, vocab, inverse_temperature);
    if constexpr (GRADIENT) {
        const GradientTerms terms(coefficients, row, stats, sums, vocab, inverse_temperature);
        // Read the target's logit before anything is overwritten.
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
                    const f32 grad = terms.gradient(x.at[i]);
                    to.at[i] = from_f32<REAL>(column + i == target ? terms.c + grad : grad);
                }
                store_chunk<N>(gradient + column, to);
            }
        }
    }
}

// ---- rows that fit in a block's registers ----------------------------------------------------------------------

// The part of `register_rows` for the additional channels. `scratch` may be reused between two rows.
template <bool GRADIENT>
__device__ __forceinline__ void register_channels(
    const Outputs& outputs, f32* logits, u32 stride, const Coefficients& coefficients, u32 row, u32 target, u32 vocab,
    const Chunk<f32, Vec16<f32>::N> (&x)[THREAD_VECS], f32 logit, RowStats stats, RowStats* scratch,
    f32 inverse_temperature
) {
    constexpr int N = Vec16<f32>::N;
    const u32 chunks = vocab / N;
    const bool has_target = target / N % blockDim.x == threadIdx.x;
    Moments sums = {0.0f, 0.0f};
#pragma unroll
    for (int k = 0; k < THREAD_VECS; k++) {
        if (threadIdx.x + k * blockDim.x >= chunks) continue;
#pragma unroll
        for (int i = 0; i < N; i++) sums.add(distance(x[k].at[i], stats.largest, inverse_temperature));
    }
    sums = block_moments(sums, reinterpret_cast<f32*>(scratch));
    if (has_target) write_channels(outputs, row, logit, stats, sums, vocab, inverse_temperature);
    // The next row's sums use the same scratch.
    __syncthreads();
    if constexpr (GRADIENT) {
        const GradientTerms terms(coefficients, row, stats, sums, vocab, inverse_temperature);
        REAL* gradient = reinterpret_cast<REAL*>(logits + (u64)row * stride);
#pragma unroll
        for (int k = 0; k < THREAD_VECS; k++) {
            const u32 chunk = threadIdx.x + k * blockDim.x;
            if (chunk >= chunks) continue;
            Chunk<REAL, N> to;
#pragma unroll
            for (int i = 0; i < N; i++) to.at[i] = from_f32<REAL>(terms.gradient(x[k].at[i]));
            store_chunk<N>(gradient + chunk * N, to);
        }
        if (has_target) gradient[target] = from_f32<REAL>(terms.c + terms.gradient(logit));
    }
}

// A thread holds up to THREAD_VECS chunks of four logits; a multiprocessor has registers for REGISTER_THREADS threads.
template <bool GRADIENT, bool CHANNELS>
__device__ __forceinline__ void register_rows(
    const Outputs& outputs, f32* logits, u32 stride, const u32* targets, const Coefficients& coefficients, u32 rows,
    u32 vocab, f32 inverse_temperature
) {
    constexpr int N = Vec16<f32>::N;
    extern __shared__ uint4 prefetched[]; // [vocab / N]
    __shared__ RowStats scratch[2][REGISTER_THREADS / 32];
    static_assert(sizeof(scratch) == STATIC_SHARED_BYTES, "must match the static shared memory in the launch code");
    const u32 chunks = vocab / N;
    const auto fetch = [&](u32 row) {
        const f32* from = logits + (u64)row * stride;
#pragma unroll
        for (int k = 0; k < THREAD_VECS; k++) {
            const u32 chunk = threadIdx.x + k * blockDim.x;
            if (row < rows && chunk < chunks) copy_async_16(prefetched + chunk, from + chunk * N);
        }
        commit_copies();
    };

    fetch(blockIdx.x);
    u32 next_target = targets[blockIdx.x];
    f32 next_c = GRADIENT ? coefficients.log_prob[blockIdx.x] : 0.0f;
    for (u32 row = blockIdx.x, parity = 0; row < rows; row += gridDim.x, parity ^= 1) {
        const u32 target = next_target;
        const f32 c = __fmul_rn(next_c, inverse_temperature);
        if (target >= vocab) __trap();
        wait_copies<0>();
        Chunk<f32, N> x[THREAD_VECS];
        f32 largest = LOWEST;
#pragma unroll
        for (int k = 0; k < THREAD_VECS; k++) {
            const u32 chunk = threadIdx.x + k * blockDim.x;
            if (chunk >= chunks) continue;
            x[k] = load_chunk<N>(reinterpret_cast<const f32*>(prefetched + chunk));
#pragma unroll
            for (int i = 0; i < N; i++) largest = fmaxf(largest, x[k].at[i]);
        }
        const bool has_target = target / N % blockDim.x == threadIdx.x;
        const f32 logit = has_target ? reinterpret_cast<const f32*>(prefetched)[target] : 0.0f;
        fetch(row + gridDim.x);
        if (row + gridDim.x < rows) {
            next_target = targets[row + gridDim.x];
            if (GRADIENT) next_c = coefficients.log_prob[row + gridDim.x];
        }
        // Exponentials relative to this thread's maximum. A NaN is never the maximum, but stays in the sum.
        f32 sum = 0.0f;
#pragma unroll
        for (int k = 0; k < THREAD_VECS; k++) {
            if (threadIdx.x + k * blockDim.x >= chunks) continue;
#pragma unroll
            for (int i = 0; i < N; i++) {
                const f32 e = expf(distance(x[k].at[i], largest, inverse_temperature));
                if (!CHANNELS) x[k].at[i] = e;
                sum += e;
            }
        }
        // After the barrier inside, all threads have read the row.
        const RowStats stats = block_stats({largest, sum}, scratch[parity], inverse_temperature);
        if constexpr (CHANNELS) {
            register_channels<GRADIENT>(
                outputs, logits, stride, coefficients, row, target, vocab, x, logit, stats, scratch[parity ^ 1],
                inverse_temperature
            );
            continue;
        }
        if (has_target) outputs.log_prob[row] = log_prob(logit, stats, inverse_temperature);
        if (!GRADIENT) continue;
        const f32 scale = -c / stats.sum, mine = scale * expf(distance(largest, stats.largest, inverse_temperature));
        REAL* gradient = reinterpret_cast<REAL*>(logits + (u64)row * stride);
#pragma unroll
        for (int k = 0; k < THREAD_VECS; k++) {
            const u32 chunk = threadIdx.x + k * blockDim.x;
            if (chunk >= chunks) continue;
            Chunk<REAL, N> out;
#pragma unroll
            for (int i = 0; i < N; i++) out.at[i] = from_f32<REAL>(mine * x[k].at[i]);
            store_chunk<N>(gradient + chunk * N, out);
        }
        if (has_target) {
            const f32 d = distance(logit, stats.largest, inverse_temperature);
            gradient[target] = from_f32<REAL>(c + scale * expf(d));
        }
    }
}

// logp[T] = log softmax(logits[T, V] * inverse_temperature)[targets[T]].
extern "C" __global__ void __launch_bounds__(MAX_THREADS) forward(
    f32* logp, const f32* logits, u32 stride, const u32* targets, u32 rows, u32 vocab,
    f32 inverse_temperature
) {
    log_prob_of_row<1>(logp, logits, stride, targets, vocab, inverse_temperature);
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS) forward_vec(
    f32* logp, const f32* logits, u32 stride, const u32* targets, u32 rows, u32 vocab,
    f32 inverse_temperature
) {
    log_prob_of_row<Vec16<f32>::N>(logp, logits, stride, targets, vocab, inverse_temperature);
}

extern "C" __global__ void __launch_bounds__(REGISTER_THREADS) forward_registers(
    f32* logp, f32* logits, u32 stride, const u32* targets, u32 rows, u32 vocab,
    f32 inverse_temperature
) {
    register_rows<false, false>(
        {logp, nullptr, nullptr}, logits, stride, targets, {}, rows, vocab, inverse_temperature
    );
}

// The same, and each row's logits are replaced by c * inverse_temperature * (onehot(target) - softmax).
extern "C" __global__ void __launch_bounds__(MAX_THREADS) forward_backward(
    f32* logp, f32* logits, u32 stride, const u32* targets, const f32* coefficients, u32 rows, u32 vocab,
    f32 inverse_temperature
) {
    gradient_of_row<1>(logp, logits, stride, targets, coefficients, vocab, inverse_temperature);
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS) forward_backward_vec(
    f32* logp, f32* logits, u32 stride, const u32* targets, const f32* coefficients, u32 rows, u32 vocab,
    f32 inverse_temperature
) {
    gradient_of_row<Vec16<f32>::N>(logp, logits, stride, targets, coefficients, vocab, inverse_temperature);
}

extern "C" __global__ void __launch_bounds__(REGISTER_THREADS) forward_backward_registers(
    f32* logp, f32* logits, u32 stride, const u32* targets, const f32* coefficients, u32 rows, u32 vocab,
    f32 inverse_temperature
) {
    const Coefficients all = {coefficients, nullptr, nullptr};
    register_rows<true, false>(
        {logp, nullptr, nullptr}, logits, stride, targets, all, rows, vocab, inverse_temperature
    );
}

// The same with more channels: entropy[T] = -sum p log p and mean_logp[T] = sum log p / V; either may be null.
extern "C" __global__ void __launch_bounds__(MAX_THREADS) forward_channels(
    f32* logp, f32* entropy, f32* mean_logp, f32* logits, u32 stride, const u32* targets, u32 rows, u32 vocab,
    f32 inverse_temperature
) {
    channels_of_row<1, false>({logp, entropy, mean_logp}, logits, stride, targets, {}, vocab, inverse_temperature);
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS) forward_channels_vec(
    f32* logp, f32* entropy, f32* mean_logp, f32* logits, u32 stride, const u32* targets, u32 rows, u32 vocab,
    f32 inverse_temperature
) {
    channels_of_row<Vec16<f32>::N, false>(
        {logp, entropy, mean_logp}, logits, stride, targets, {}, vocab, inverse_temperature
    );
}

extern "C" __global__ void __launch_bounds__(REGISTER_THREADS) forward_channels_registers(
    f32* logp, f32* entropy, f32* mean_logp, f32* logits, u32 stride, const u32* targets, u32 rows, u32 vocab,
    f32 inverse_temperature
) {
    register_rows<false, true>(
        {logp, entropy, mean_logp}, logits, stride, targets, {}, rows, vocab, inverse_temperature
    );
}

// And each row's logits are replaced by their gradient, given a coefficient per channel; null means no coefficient.
extern "C" __global__ void __launch_bounds__(MAX_THREADS) forward_backward_channels(
    f32* logp, f32* entropy, f32* mean_logp, f32* logits, u32 stride, const u32* targets,
    const f32* c, const f32* c_entropy, const f32* c_mean_logp, u32 rows, u32 vocab,
    f32 inverse_temperature
) {
    const Coefficients all = {c, c_entropy, c_mean_logp};
    channels_of_row<1, true>({logp, entropy, mean_logp}, logits, stride, targets, all, vocab, inverse_temperature);
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS) forward_backward_channels_vec(
    f32* logp, f32* entropy, f32* mean_logp, f32* logits, u32 stride, const u32* targets,
    const f32* c, const f32* c_entropy, const f32* c_mean_logp, u32 rows, u32 vocab,
    f32 inverse_temperature
) {
    const Coefficients all = {c, c_entropy, c_mean_logp};
    channels_of_row<Vec16<f32>::N, true>(
        {logp, entropy, mean_logp}, logits, stride, targets, all, vocab, inverse_temperature
    );
}

extern "C" __global__ void __launch_bounds__(REGISTER_THREADS) forward_backward_channels_registers(
    f32* logp, f32* entropy, f32* mean_logp, f32* logits, u32 stride, const u32* targets,
    const f32* c, const f32* c_entropy, const f32* c_mean_logp, u32 rows, u32 vocab,
    f32 inverse_temperature
) {
    const Coefficients all = {c, c_entropy, c_mean_logp};
    register_rows<true, true>(
        {logp, entropy, mean_logp}, logits, stride, targets, all, rows, vocab, inverse_temperature
    );
}
