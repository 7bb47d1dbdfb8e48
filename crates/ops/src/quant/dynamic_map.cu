// Values of the dynamic map's codes, identical to `quant::dynamic_map`.
#include "lockstep.cuh"

constexpr int CODES = 256;

__device__ __forceinline__ f32 dynamic_boundary(u32 parts, u32 k) {
    const f32 step = __fdiv_rn(1.0f - 0.1f, (f32)parts);
    return k < (parts + 1) / 2 ? fmaf(step, (f32)k, 0.1f) : fmaf(-step, (f32)(parts - k), 1.0f);
}

__device__ __forceinline__ f32 dynamic_decade(u32 decade, u32 parts, u32 k) {
    const f32 power = decade == 0 ? 1e-6f : decade == 1 ? 1e-5f : decade == 2 ? 1e-4f : decade == 3 ? 1e-3f
                    : decade == 4 ? 1e-2f : decade == 5 ? 0.1f : 1.0f;
    return __fmul_rn(power, __fmul_rn(__fadd_rn(dynamic_boundary(parts, k), dynamic_boundary(parts, k + 1)), 0.5f));
}

__device__ __forceinline__ f32 signed_value(u32 code) {
    if (code == 127) return 0.0f;
    const u32 rank = code > 127 ? code - 127 : 127 - code;
    const u32 decade = 31 - __clz(rank);
    const f32 value = rank == 128 ? 1.0f : dynamic_decade(decade, 1u << decade, rank - (1u << decade));
    return code > 127 ? value : -value;
}

__device__ __forceinline__ f32 unsigned_value(u32 code) {
    const u32 rank = code + 1, log = 31 - __clz(rank);
    return code == 0 ? 0.0f : rank == 256 ? 1.0f : dynamic_decade(log - 1, 1u << log, rank - (1u << log));
}

// The values of all codes of a map, and the midpoint between each value and the next.
struct DynamicMap {
    f32 values[CODES], midpoints[CODES];

    // All threads of a block call this together.
    __device__ void fill(bool is_signed) {
        for (u32 code = threadIdx.x; code < CODES; code += blockDim.x)
            values[code] = is_signed ? signed_value(code) : unsigned_value(code);
        __syncthreads();
        for (u32 code = threadIdx.x; code + 1 < CODES; code += blockDim.x)
            midpoints[code] = __fmul_rn(__fadd_rn(values[code], values[code + 1]), 0.5f);
        __syncthreads();
    }

    __device__ __forceinline__ u8 nearest(f32 x) const {
        u32 code = 0;
#pragma unroll
        for (u32 step = CODES / 2; step > 0; step /= 2) code += x > midpoints[code + step - 1] ? step : 0;
        return (u8)code;
    }
};

