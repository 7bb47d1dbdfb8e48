// What backward needs for every row and head before it starts: delta = dout · out, summed over the head, and the
// log-sum-exp. Both are laid out by head, so that a tile's rows are contiguous. log_scale is 1, or log2(e) for kernels
// that compute in base 2.
#include "lockstep.cuh"

// delta, lse_by_head [H, T]; out, dout [T, H h]; lse [T, H]. `lanes` threads, a power of two up to 32, share a row of a
// head; a block has THREADS threads.
extern "C" __global__ void __launch_bounds__(THREADS) attention_delta(
    f32* delta, f32* lse_by_head, const REAL* out, u32 out_stride, const REAL* dout, u32 dout_stride, const f32* lse,
    u32 tokens, u32 num_q, u32 width, u32 lanes, u32 vectors, f32 log_scale
) {
    const u32 rows = THREADS / lanes, lane = threadIdx.x % lanes;
    const u64 index = (u64)blockIdx.x * rows + threadIdx.x / lanes;
    const bool valid = index < (u64)tokens * num_q;
    const u32 row = valid ? (u32)(index / num_q) : 0, head = valid ? (u32)(index % num_q) : 0;
    const REAL* a = out + (size_t)row * out_stride + (size_t)head * width;
    const REAL* b = dout + (size_t)row * dout_stride + (size_t)head * width;
    f32 sum = 0.0f;
    if (valid && vectors) {
        constexpr u32 step = Vec16<REAL>::N;
        for (u32 c = lane * step; c < width; c += lanes * step) {
            const Vec16<REAL> left = load_vec(a + c), right = load_vec(b + c);
#pragma unroll
            for (u32 i = 0; i < step; i++) sum = fmaf(to_f32(left.at[i]), to_f32(right.at[i]), sum);
        }
    } else if (valid) {
        for (u32 c = lane; c < width; c += lanes) sum = fmaf(to_f32(a[c]), to_f32(b[c]), sum);
    }
    for (u32 offset = lanes / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (valid && lane == 0) {
        delta[(size_t)head * tokens + row] = sum;
        lse_by_head[(size_t)head * tokens + row] = lse[index] * log_scale;
    }
}
