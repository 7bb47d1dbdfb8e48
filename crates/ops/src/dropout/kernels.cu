// Dropout with the same masks as on the CPU. A block processes a row and looks up its document and mask once.
#include "lockstep.cuh"

// `samples` is null if there is no mask.
struct Mask {
    const u32* samples; // [documents]
    const u32* bounds;  // [documents + 1]
    u32 docs;
    u64 seed;
    u32 step, mask_index, threshold;
    f32 scale;
};

// Columns per thread: those of a vector or, where elements are read one by one, those of one block of the generator.
static_assert(PER_BLOCK == sizeof(Words) / sizeof(u32), "one word of the generator per element");
template <int N> constexpr int COLUMNS = N < PER_BLOCK ? PER_BLOCK : N;

// The factors of the thread's columns from `first` on.
template <int N> struct KeepFactors { f32 at[COLUMNS<N>]; };

template <int N>
__device__ __forceinline__ KeepFactors<N> keep_factors(bool masked, const DocMask& mask, u32 position, u32 first) {
    KeepFactors<N> keep;
#pragma unroll
    for (int b = 0; b < COLUMNS<N> / PER_BLOCK; b++) {
        Factors factors = {{1.0f, 1.0f, 1.0f, 1.0f}};
        if (masked) factors = mask_factors(mask, 0, position, first / PER_BLOCK + b);
#pragma unroll
        for (int i = 0; i < PER_BLOCK; i++) keep.at[PER_BLOCK * b + i] = factors.at[i];
    }
    return keep;
}

// to = mask * from, plus `residual` unless it is null. `from` or `residual` may be `to`.
template <int N>
__device__ __forceinline__ void drop_row(
    REAL* to, u32 to_stride, const REAL* from, u32 from_stride, const REAL* residual, u32 residual_stride,
    u32 cols, const Mask& mask
) {
    __shared__ DocMask of_doc;
    __shared__ u32 position;
    const u32 row = blockIdx.x;
    const bool masked = mask.samples != nullptr;
    if (masked && threadIdx.x == 0) {
        const u32 doc = doc_of_row(mask.bounds, mask.docs, row);
        of_doc = doc_mask(mask.seed, mask.step, mask.samples[doc], mask.mask_index, mask.threshold, mask.scale);
        position = row - mask.bounds[doc];
    }
    __syncthreads();
    const DocMask mine = masked ? of_doc : DocMask{0, 0, 1.0f};
    const u32 at = masked ? position : 0;
    to += (u64)row * to_stride;
    from += (u64)row * from_stride;
    if (residual) residual += (u64)row * residual_stride;
    for (u32 first = threadIdx.x * COLUMNS<N>; first < cols; first += blockDim.x * COLUMNS<N>) {
        const KeepFactors<N> keep = keep_factors<N>(masked, mine, at, first);
#pragma unroll
        for (int part = 0; part < COLUMNS<N>; part += N) {
            const u32 column = first + part;
            if (column >= cols) break;
            Chunk<REAL, N> x = load_chunk<N>(from + column), r = x;
            if (residual) r = load_chunk<N>(residual + column);
#pragma unroll
            for (int i = 0; i < N; i++) {
                const f32 value = to_f32(x.at[i]) * keep.at[part + i];
                x.at[i] = from_f32<REAL>(residual ? to_f32(r.at[i]) + value : value);
            }
            store_chunk<N>(to + column, x);
        }
    }
}

// [T, cols] each; `residual` may be null.
extern "C" __global__ void drop(
    REAL* to, u32 to_stride, const REAL* from, u32 from_stride, const REAL* residual, u32 residual_stride, u32 cols,
    const u32* samples, const u32* bounds, u32 docs, u64 seed, u32 step, u32 mask_index, u32 threshold, f32 scale
) {
    const Mask mask = {samples, bounds, docs, seed, step, mask_index, threshold, scale};
    drop_row<1>(to, to_stride, from, from_stride, residual, residual_stride, cols, mask);
}

extern "C" __global__ void drop_vec(
    REAL* to, u32 to_stride, const REAL* from, u32 from_stride, const REAL* residual, u32 residual_stride, u32 cols,
    const u32* samples, const u32* bounds, u32 docs, u64 seed, u32 step, u32 mask_index, u32 threshold, f32 scale
) {
    const Mask mask = {samples, bounds, docs, seed, step, mask_index, threshold, scale};
    drop_row<Vec16<REAL>::N>(to, to_stride, from, from_stride, residual, residual_stride, cols, mask);
}
