// Tensor cores of sm_90: products of 64 rows that the four warps of a group of 128 threads share, with operands in
// shared memory. They run by themselves: registers and tiles they use are left alone until they are waited for.
//
// Warp w of the group has rows 16 w to 16 w + 15 of C and of an A in registers, laid out as in mma.cu.
//
// A tile is panels of [rows, 64]: rows of 128 bytes, whose eight 16-byte parts are swizzled: part c of row r lies
// where part c ^ (r % 8) would. Panels begin at multiples of 1024 bytes, so the hardware's swizzle, which goes by
// address bits, is this one.

// The element type's name in instructions.
#define NAME_OF(type) #type
#define NAME(type) NAME_OF(type)
#define TYPE NAME(REAL)

// A tile at an address, as products are told of it: the lower word of a descriptor, in which a place 16 bytes on is
// one more. Where columns are not what is summed over, more than 64 of them go on in the next panel, `panel_bytes`
// away; elsewhere that is not looked at.
__device__ __forceinline__ u32 tile_at(const REAL* tile, u32 panel_bytes = 16) {
    return panel_bytes / 16 << 16 | shared_address(tile) / 16;
}
// The whole: swizzled over 128 bytes, and groups of eight rows are 1024 bytes apart.
__device__ __forceinline__ u64 descriptor(u32 tile) {
    const u64 swizzle_128 = 1, group_bytes = 1024;
    return swizzle_128 << 62 | group_bytes / 16 << 32 | tile;
}

// Before products that read registers, sums among them, which other instructions wrote.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until all but the last N groups of products are done.
template <int N> __device__ __forceinline__ void wait_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// Makes what this thread wrote to shared memory, or copied and waited for, visible to products.
__device__ __forceinline__ void show_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Keeps the compiler from moving uses of sums across: before they are begun and after they are waited for.
template <int N> __device__ __forceinline__ void hold(f32 (&c)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) asm volatile("" : "+f"(c[n][i])::"memory");
}

#define SUMS_8(c, n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define SUMS_16(c, n) SUMS_8(c, n), SUMS_8(c, n + 1)
#define SUMS_64(c, n) SUMS_16(c, n), SUMS_16(c, n + 2), SUMS_16(c, n + 4), SUMS_16(c, n + 6)

// c [64, N] = a · bᵀ, and what c was where `add`, over 16 columns of tiles a [64, h] and b [N, h].
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
