// Log-probabilities of targets, and the logits' gradient in their own bytes. A block takes a row: one pass finds
// the largest logit and the sum of exponentials together, a second one writes the gradient. REAL is the gradient's
// type; logits are f32.
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

// Every thread gets what the whole block has seen of the row.
template <int N> __device__ __forceinline__ Seen see_row(const f32* logits, u32 vocab) {
    __shared__ Seen room[32];
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
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    seen = warp_both(seen);
    if (lane == 0) room[warp] = seen;
    __syncthreads();
    return warp_both(lane < warps ? room[lane] : Seen{LOWEST, 0.0f});
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

// logp[T] = log softmax(logits[T, V])[targets[T]].
extern "C" __global__ void __launch_bounds__(1024) forward(
    f32* logp, const f32* logits, u32 stride, const u32* targets, u32 vocab
) {
    log_prob_of_row<1>(logp, logits, stride, targets, vocab);
}

extern "C" __global__ void __launch_bounds__(1024) forward_packs(
    f32* logp, const f32* logits, u32 stride, const u32* targets, u32 vocab
) {
    log_prob_of_row<4>(logp, logits, stride, targets, vocab);
}

// The same, and each row's logits become c * (onehot(target) - softmax).
extern "C" __global__ void __launch_bounds__(1024) forward_backward(
    f32* logp, f32* logits, u32 stride, const u32* targets, const f32* coefficients, u32 vocab
) {
    gradient_of_row<1>(logp, logits, stride, targets, coefficients, vocab);
}

extern "C" __global__ void __launch_bounds__(1024) forward_backward_packs(
    f32* logp, f32* logits, u32 stride, const u32* targets, const f32* coefficients, u32 vocab
) {
    gradient_of_row<4>(logp, logits, stride, targets, coefficients, vocab);
}
