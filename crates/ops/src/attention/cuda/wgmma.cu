// Tensor cores of sm_90 (wgmma): matmuls of 64 rows, computed by a group of four warps, with operands in shared memory.
// They run asynchronously: the registers and tiles that they use must not be touched until they have been waited for.
//
// Warp w of the group holds rows 16 w to 16 w + 15 of C, and of an A in registers, laid out as in mma.cu.
//
// A tile consists of panels of [rows, 64]: rows of 128 bytes, whose eight 16-byte vectors are swizzled: vector c of row
// r is stored in place of vector c ^ (r % 8). Panels start at multiples of 1024 bytes, so this is the hardware's own
// swizzle, which is defined on address bits.

// The element type's name in PTX instructions.
#define NAME_OF(type) #type
#define NAME(type) NAME_OF(type)
#define TYPE NAME(REAL)

// The lower word of a tile's descriptor; adding one advances it by 16 bytes. Where columns are not the summed
// dimension, columns beyond the first 64 are in the next panel, `panel_bytes` further on. Otherwise that field is
// ignored.
__device__ __forceinline__ u32 tile_at(const REAL* tile, u32 panel_bytes = 16) {
    return panel_bytes / 16 << 16 | shared_address(tile) / 16;
}
// The full descriptor: a 128-byte swizzle, and groups of eight rows 1024 bytes apart.
__device__ __forceinline__ u64 descriptor(u32 tile) {
    const u64 swizzle_128 = 1, group_bytes = 1024;
    return swizzle_128 << 62 | group_bytes / 16 << 32 | tile;
}

// Required before matmuls that read registers, accumulators included, that other instructions have written.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until all but the last N groups of matmuls are done.
template <int N> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// Makes shared memory that this thread wrote, or copied and waited for, visible to matmuls.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Keeps the compiler from moving accesses to accumulators across this point: before matmuls start, and after the wait.
template <int N> __device__ __forceinline__ void register_fence(f32 (&c)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) asm volatile("" : "+f"(c[n][i])::"memory");
}

#define SUMS_8(c, n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define SUMS_16(c, n) SUMS_8(c, n), SUMS_8(c, n + 1)
#define SUMS_64(c, n) SUMS_16(c, n), SUMS_16(c, n + 2), SUMS_16(c, n + 4), SUMS_16(c, n + 6)

// c [64, N] = a · bᵀ, plus the old c if `add`, over 16 columns of tiles a [64, h] and b [N, h].
__device__ __forceinline__ void multiply(f32 (&c)[8][4], u32 a, u32 b, int add) {
    asm volatile(
        "{ .reg .pred add; setp.ne.b32 add, %34, 0; "
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "%32, %33, add, 1, 1, 0, 0; }"
        : SUMS_64(c, 0)
        : "l"(descriptor(a)), "l"(descriptor(b)), "r"(add)
        : "memory");
}
__device__ __forceinline__ void multiply(f32 (&c)[16][4], u32 a, u32 b, int add) {
    asm volatile(
        "{ .reg .pred add; setp.ne.b32 add, %66, 0; "
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "%64, %65, add, 1, 1, 0, 0; }"
        : SUMS_64(c, 0), SUMS_64(c, 8)
        : "l"(descriptor(a)), "l"(descriptor(b)), "r"(add)
        : "memory");
}

// c [64, N] += a · b, over 16 rows of a tile b [16, N].
__device__ __forceinline__ void multiply(f32 (&c)[8][4], const u32 (&a)[4], u32 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
        : SUMS_64(c, 0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor(b))
        : "memory");
}
__device__ __forceinline__ void multiply(f32 (&c)[16][4], const u32 (&a)[4], u32 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "{%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
        : SUMS_64(c, 0), SUMS_64(c, 8)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor(b))
        : "memory");
}
