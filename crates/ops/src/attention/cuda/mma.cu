// Tensor cores (mma.sync), for tiles of half-precision rows in shared memory.
//
// A warp computes a matmul of 16 x 8 over 16. With g = lane / 4 and t = lane % 4, a thread holds
//   A [16, 16]: rows g and g + 8, columns 2t, 2t + 1, 2t + 8, 2t + 9, two in a word;
//   B [16, 8]:  rows 2t, 2t + 1, 2t + 8, 2t + 9 of column g;
//   C [16, 8]:  rows g (0, 1) and g + 8 (2, 3), columns 2t and 2t + 1.
// So two adjacent C fragments of 16 x 8, rounded, are an A fragment of 16 x 16: probabilities need no shared memory.
//
// WIDTH is the head width h, a multiple of 16.

constexpr int WARPS = THREADS / 32;
// Elements from one row of a tile to the next. With PAD extra elements (16 bytes) it is an odd multiple of 16 bytes, so
// the eight rows that are read together lie in different banks.
constexpr int STRIDE = WIDTH + PAD;

extern __shared__ __align__(16) REAL smem[];

// Loads four 8 x 8 matrices. Each thread passes the address of row lane % 8 of matrix lane / 8.
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
