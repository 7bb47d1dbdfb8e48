// Tensor cores and asynchronous copies, for tiles of half-precision rows in shared memory.
//
// A product of 16 x 8 over 16 is shared by a warp's threads. With g = lane / 4 and t = lane % 4, a thread holds
//   A [16, 16]: rows g and g + 8, columns 2t, 2t + 1, 2t + 8, 2t + 9, two in a word;
//   B [16, 8]:  rows 2t, 2t + 1, 2t + 8, 2t + 9 of column g;
//   C [16, 8]:  rows g (0, 1) and g + 8 (2, 3), columns 2t and 2t + 1.
// So two neighbouring C of 16 x 8, rounded, are an A of 16 x 16: probabilities need no shared memory.
//
// WIDTH is the head width h, a multiple of 16.

constexpr int WARPS = 4, THREADS = 32 * WARPS;
// Elements between rows of a tile. One more 16 bytes than the row has is an odd number of them, so the eight rows
// that are read together lie in different banks.
constexpr int STRIDE = WIDTH + 8;
constexpr f32 LOG2_E = 1.4426950408889634f;

extern __shared__ __align__(16) REAL room[];

__device__ __forceinline__ u32 shared_address(const REAL* at) { return (u32)__cvta_generic_to_shared(at); }

// Copies 16 bytes to shared memory without waiting, or sets them to zero.
__device__ __forceinline__ void copy_async(REAL* to, const REAL* from, bool there) {
    const int bytes = there ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until all but the last N groups of this thread's copies are done.
template <int N> __device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// Four 8 x 8 matrices; a thread gives the address of row lane % 8 of matrix lane / 8.
__device__ __forceinline__ void load_matrices(u32 (&to)[4], const REAL* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row))
                 : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(u32 (&to)[4], const REAL* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// c += a · b, in f32.
__device__ __forceinline__ void multiply(f32 (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, bf16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void multiply(f32 (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, f16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two numbers rounded into one word, the first in its low half.
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

// 2^x, with a relative error of 2^-22; 0 for minus infinity.
__device__ __forceinline__ f32 power_of_two(f32 x) {
    f32 y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
