// Included by every kernel file: element types, conversions, reductions. No header of the CUDA toolkit is needed: the
// compiler gets this text and nothing else.
//
// REAL is the storage type of activations and working parameters: f32, bf16 or f16. The host defines the constants that
// it shares with kernels, such as VECTOR_BYTES. Arithmetic is in f32. Letters in shapes are those of lib.rs: T tokens,
// D model width, H query heads, G key-value heads, h head width, F feed-forward width, V vocabulary.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef float f32;
typedef double f64;

// ---- element types --------------------------------------------------------------------------------------------

struct bf16 { u16 bits; };
struct f16 { u16 bits; };

__device__ __forceinline__ f32 to_f32(f32 x) { return x; }
__device__ __forceinline__ f32 to_f32(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
__device__ __forceinline__ f32 to_f32(f16 x) {
    f32 y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

template <typename R> __device__ __forceinline__ R from_f32(f32 x);
template <> __device__ __forceinline__ f32 from_f32<f32>(f32 x) { return x; }
template <> __device__ __forceinline__ bf16 from_f32<bf16>(f32 x) {
    bf16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}
template <> __device__ __forceinline__ f16 from_f32<f16>(f32 x) {
    f16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}

// ---- vectors of 16 bytes --------------------------------------------------------------------------------------

// N elements that are loaded and stored together. The address must be a multiple of 16 bytes.
template <typename R> struct alignas(VECTOR_BYTES) Vec16 {
    static constexpr int N = VECTOR_BYTES / sizeof(R);
    R at[N];
};

template <typename R> __device__ __forceinline__ Vec16<R> load_vec(const R* from) {
    return *reinterpret_cast<const Vec16<R>*>(from);
}
template <typename R> __device__ __forceinline__ void store_vec(R* to, const Vec16<R>& vec) {
    *reinterpret_cast<Vec16<R>*>(to) = vec;
}

// N elements that are loaded and stored together: a whole Vec16, or fewer where the alignment does not allow more.
template <typename R, int N> struct alignas(sizeof(R) * N < 16 ? sizeof(R) * N : 16) Chunk {
    R at[N];
};

template <int N, typename R> __device__ __forceinline__ Chunk<R, N> load_chunk(const R* from) {
    return *reinterpret_cast<const Chunk<R, N>*>(from);
}
template <int N, typename R> __device__ __forceinline__ void store_chunk(R* to, const Chunk<R, N>& chunk) {
    *reinterpret_cast<Chunk<R, N>*>(to) = chunk;
}

// ---- asynchronous copies to shared memory ---------------------------------------------------------------------

__device__ __forceinline__ u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }

// Copies 16 bytes. Both addresses are multiples of 16.
__device__ __forceinline__ void copy_async_16(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
// Closes a group of this thread's copies, which may be empty.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until all but the last N groups of this thread's copies are done. Other threads see them after a barrier.
template <int N> __device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// ---- sums over threads, in an order that depends only on the number of threads --------------------------------

__device__ __forceinline__ f32 warp_sum(f32 x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
}

__device__ __forceinline__ f32 warp_max(f32 x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
    return x;
}

// Returns the sum to every thread of the block. `scratch` has one float per warp. A block is 1 to 32 whole warps.
__device__ __forceinline__ f32 block_sum(f32 x, f32* scratch) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    x = warp_sum(x);
    __syncthreads();
    if (lane == 0) scratch[warp] = x;
    __syncthreads();
    return warp_sum(lane < warps ? scratch[lane] : 0.0f);
}

__device__ __forceinline__ f32 block_max(f32 x, f32* scratch) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    x = warp_max(x);
    __syncthreads();
    if (lane == 0) scratch[warp] = x;
    __syncthreads();
    return warp_max(lane < warps ? scratch[lane] : __int_as_float(0xff800000));
}

// ---- packed documents -----------------------------------------------------------------------------------------

// The document of a row: the last one that starts at or before it. `bounds` has docs + 1 entries.
__device__ __forceinline__ u32 doc_of_row(const u32* bounds, u32 docs, u32 row) {
    u32 low = 0, high = docs;
    while (low + 1 < high) {
        const u32 middle = (low + high) / 2;
        if (bounds[middle] <= row) low = middle; else high = middle;
    }
    return low;
}

// ---- random numbers, identical to `lockstep_core::rng` --------------------------------------------------------

struct Words { u32 at[4]; };

// Philox 4x32 with ten rounds.
__device__ __forceinline__ Words philox(u32 c0, u32 c1, u32 c2, u32 c3, u32 key0, u32 key1) {
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const u32 low0 = 0xD2511F53u * c0, high0 = __umulhi(0xD2511F53u, c0);
        const u32 low1 = 0xCD9E8D57u * c2, high1 = __umulhi(0xCD9E8D57u, c2);
        c0 = high1 ^ c1 ^ key0;
        c1 = low1;
        c2 = high0 ^ c3 ^ key1;
        c3 = low0;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return Words{{c0, c1, c2, c3}};
}

// Block `index` of the stream (seed, Purpose::Dropout, a, b).
__device__ __forceinline__ Words dropout_words(u64 seed, u32 a, u32 b, u32 index) {
    const u32 purpose = DROPOUT_PURPOSE;
    return philox(index, a, b, purpose, (u32)seed ^ (purpose * 0x85EBCA6Bu), (u32)(seed >> 32));
}

// ---- dropout, with the masks of `dropout::DocMask` ------------------------------------------------------------

// The mask of one document at one site of one layer.
struct DocMask {
    u64 seed;
    // An element is dropped if its random word is below this.
    u32 threshold;
    // 1 / (1 - rate)
    f32 scale;
};

// `seed` and `step` are the run's, `sample` is the document's sample, `mask_index` = layer * 3 + site. The host
// computes `threshold` and `scale` from the dropout rate.
__device__ __forceinline__ DocMask doc_mask(u64 seed, u32 step, u32 sample, u32 mask_index, u32 threshold, f32 scale) {
    const Words words = dropout_words(seed, step, sample, mask_index);
    return DocMask{(u64)words.at[1] << 32 | words.at[0], threshold, scale};
}

struct Factors { f32 at[4]; };

// The factors of the elements in columns 4 * block .. 4 * block + 3 of a row. `position` is the row's position in its
// document. `head` is 0 outside attention; in attention, columns are keys counted from the document's start.
__device__ __forceinline__ Factors mask_factors(const DocMask& mask, u32 head, u32 position, u32 block) {
    const Words words = dropout_words(mask.seed, position, head, block);
    Factors factors;
#pragma unroll
    for (int i = 0; i < 4; i++) factors.at[i] = words.at[i] < mask.threshold ? 0.0f : mask.scale;
    return factors;
}
