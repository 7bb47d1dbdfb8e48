// Half-precision conversions and asynchronous copies, shared by all tensor-core kernels.

constexpr f32 LOG2_E = 1.4426950408889634f;

// Copies 16 bytes to shared memory asynchronously, or sets them to zero if `valid` is false.
__device__ __forceinline__ void copy_async(u32 to, const REAL* from, bool valid) {
    const int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_async(REAL* to, const REAL* from, bool valid) {
    copy_async(shared_address(to), from, valid);
}
// The same for one f32.
__device__ __forceinline__ void copy_async(f32* to, const f32* from, bool valid) {
    const int bytes = valid ? 4 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes)
                 : "memory");
}

// Rounds two numbers into one word, the first in the low half.
__device__ __forceinline__ u32 round_pair(f32 low, f32 high, bf16) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ __forceinline__ u32 round_pair(f32 low, f32 high, f16) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// 2^x with a relative error of 2^-22; 0 for minus infinity.
__device__ __forceinline__ f32 exp2_approx(f32 x) {
    f32 y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
