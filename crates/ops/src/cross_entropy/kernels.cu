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
    return {largest, a.sum * expf(a.largest - largest) + b.sum * expf(b.largest - largest)};
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

// A thread holds up to HELD chunks of four logits; there are registers for HELD_THREADS threads.
template <bool GRADIENT>
__device__ __forceinline__ void held_rows(
    f32* logp, f32* logits, u32 stride, const u32* targets, const f32* coefficients, u32 rows, u32 vocab
) {
    constexpr int N = Pack<f32>::N;
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
    f32 next_c = GRADIENT ? coefficients[blockIdx.x] : 0.0f;
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
            if (GRADIENT) next_c = coefficients[row + gridDim.x];
        }
        // Exponentials of the distance from this thread's largest logit. A NaN is no largest one, but stays in the sum.
        f32 sum = 0.0f;
#pragma unroll
        for (int k = 0; k < HELD; k++) {
            if (threadIdx.x + k * blockDim.x >= chunks) continue;
#pragma unroll
            for (int i = 0; i < N; i++) {
                x[k].at[i] = expf(x[k].at[i] - largest);
                sum += x[k].at[i];
            }
        }
        // All threads have read the row when they have met.
        const Seen seen = block_both({largest, sum}, room[turn]);
        if (has_target) logp[row] = logit - seen.largest - logf(seen.sum);
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

extern "C" __global__ void __launch_bounds__(MOST_THREADS) forward_packs(
    f32* logp, const f32* logits, u32 stride, const u32* targets, u32 rows, u32 vocab
) {
    log_prob_of_row<Pack<f32>::N>(logp, logits, stride, targets, vocab);
}

extern "C" __global__ void __launch_bounds__(HELD_THREADS) forward_held(
    f32* logp, f32* logits, u32 stride, const u32* targets, u32 rows, u32 vocab
) {
    held_rows<false>(logp, logits, stride, targets, nullptr, rows, vocab);
}

// The same, and each row's logits become c * (onehot(target) - softmax).
extern "C" __global__ void __launch_bounds__(MOST_THREADS) forward_backward(
    f32* logp, f32* logits, u32 stride, const u32* targets, const f32* coefficients, u32 rows, u32 vocab
) {
    gradient_of_row<1>(logp, logits, stride, targets, coefficients, vocab);
}

extern "C" __global__ void __launch_bounds__(MOST_THREADS) forward_backward_packs(
    f32* logp, f32* logits, u32 stride, const u32* targets, const f32* coefficients, u32 rows, u32 vocab
) {
    gradient_of_row<Pack<f32>::N>(logp, logits, stride, targets, coefficients, vocab);
}

extern "C" __global__ void __launch_bounds__(HELD_THREADS) forward_backward_held(
    f32* logp, f32* logits, u32 stride, const u32* targets, const f32* coefficients, u32 rows, u32 vocab
) {
    held_rows<true>(logp, logits, stride, targets, coefficients, rows, vocab);
}
