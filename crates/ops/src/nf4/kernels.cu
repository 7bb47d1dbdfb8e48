// NF4: 4-bit codes to weights.

__device__ __forceinline__ f32 code_value(int code) {
    switch (code) {
        case 0: return __uint_as_float(VALUE_0);
        case 1: return __uint_as_float(VALUE_1);
        case 2: return __uint_as_float(VALUE_2);
        case 3: return __uint_as_float(VALUE_3);
        case 4: return __uint_as_float(VALUE_4);
        case 5: return __uint_as_float(VALUE_5);
        case 6: return __uint_as_float(VALUE_6);
        case 7: return 0.0f;
        case 8: return __uint_as_float(VALUE_8);
        case 9: return __uint_as_float(VALUE_9);
        case 10: return __uint_as_float(VALUE_10);
        case 11: return __uint_as_float(VALUE_11);
        case 12: return __uint_as_float(VALUE_12);
        case 13: return __uint_as_float(VALUE_13);
        case 14: return __uint_as_float(VALUE_14);
        default: return __uint_as_float(VALUE_15);
    }
}

// The scale of a block: from `scales`, or by double quantisation if that is null.
__device__ __forceinline__ f32 block_scale(
    const f32* scales, const u8* scale_codes, const f32* absmax, f32 offset, u64 block
) {
    if (scales) return scales[block];
    return __fadd_rn(__fmul_rn(signed_value(scale_codes[block]), absmax[block / SCALES_PER_BLOCK]), offset);
}

// A thread writes PER_THREAD elements, which belong to one block. VECTOR: addresses are multiples of 16 bytes.
template <bool VECTOR>
__device__ __forceinline__ void dequantise_range(
    REAL* out, const u8* codes, const f32* scales, const u8* scale_codes, const f32* absmax, f32 offset,
    u64 first_block, u64 len
) {
    static_assert(NF4_BLOCK % PER_THREAD == 0 && PER_THREAD == 8, "four bytes of codes in one block");
    // Lookups in shared memory: threads of a warp have different codes.
    __shared__ f32 values[16];
    if (threadIdx.x < 16) values[threadIdx.x] = code_value(threadIdx.x);
    __syncthreads();
    const u64 start = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * PER_THREAD;
    if (start >= len) return;
    const f32 scale = block_scale(scales, scale_codes, absmax, offset, first_block + start / NF4_BLOCK);
    const u8* from = codes + start / 2;
    if (VECTOR && start + PER_THREAD <= len) {
        const u32 packed = *reinterpret_cast<const u32*>(from);
        constexpr int N = Vec16<REAL>::N < PER_THREAD ? Vec16<REAL>::N : PER_THREAD;
#pragma unroll
        for (int at = 0; at < PER_THREAD; at += N) {
            Chunk<REAL, N> chunk;
#pragma unroll
            for (int i = 0; i < N; i++) {
                // Bytes are in order, and the first code of a byte is in its high half.
                const int shift = (at + i) / 2 * 8 + ((at + i) % 2 == 0 ? 4 : 0);
                chunk.at[i] = from_f32<REAL>(__fmul_rn(values[packed >> shift & 15], scale));
            }
            store_chunk<N>(out + start + at, chunk);
        }
    } else {
        for (int i = 0; i < PER_THREAD && start + i < len; i++) {
            const int code = i % 2 == 0 ? from[i / 2] >> 4 : from[i / 2] & 15;
            out[start + i] = from_f32<REAL>(__fmul_rn(values[code], scale));
        }
    }
}

// out [len], from block `first_block` of the tensor on; codes [len / 2], of the same elements. Of the whole tensor with
// B blocks: scales [B] or null; otherwise scale_codes [B], absmax [B / 256].
extern "C" __global__ void dequantise(
    REAL* out, const u8* codes, const f32* scales, const u8* scale_codes, const f32* absmax, f32 offset,
    u64 first_block, u64 len
) {
    dequantise_range<false>(out, codes, scales, scale_codes, absmax, offset, first_block, len);
}

extern "C" __global__ void dequantise_vec(
    REAL* out, const u8* codes, const f32* scales, const u8* scale_codes, const f32* absmax, f32 offset,
    u64 first_block, u64 len
) {
    dequantise_range<true>(out, codes, scales, scale_codes, absmax, offset, first_block, len);
}
