// What all attention kernels share: which tile of which document a block works on, and which keys a query sees.
//
// Tiles count from their document's start, so a row's result depends on its document alone.
#include "lockstep.cuh"

// A range of rows of one document.
struct Tile {
    u32 doc;
    // The document's first row in the batch, and how many it has.
    u32 base;
    int len;
    // Which tile of the document this is, and of how many.
    int index, count;
};

// The `index`-th tile of `rows` rows, counted over all documents. The host knows a bound of their number alone,
// so surplus blocks are told that there is nothing for them. Every warp searches for itself.
__device__ __forceinline__ bool find_tile(const u32* bounds, u32 docs, u32 rows, u32 index, Tile& tile) {
    const u32 lane = threadIdx.x % 32, all = 0xffffffffu;
    u32 before = 0;
    for (u32 first = 0; first < docs; first += 32) {
        const u32 doc = first + lane;
        const u32 base = doc < docs ? bounds[doc] : 0;
        const u32 len = doc < docs ? bounds[doc + 1] - base : 0;
        const u32 count = (len + rows - 1) / rows;
        u32 sum = count;
#pragma unroll
        for (u32 offset = 1; offset < 32; offset *= 2) {
            const u32 lower = __shfl_up_sync(all, sum, offset);
            if (lane >= offset) sum += lower;
        }
        const u32 beyond = __ballot_sync(all, index < before + sum);
        if (beyond != 0) {
            const int at = __ffs((int)beyond) - 1;
            tile.doc = first + at;
            tile.base = __shfl_sync(all, base, at);
            tile.len = (int)__shfl_sync(all, len, at);
            tile.count = (int)__shfl_sync(all, count, at);
            tile.index = (int)(index - before - __shfl_sync(all, sum - count, at));
            return true;
        }
        before += __shfl_sync(all, sum, 31);
    }
    return false;
}

// The same in another order: documents by `together` (up to 32), and of those the first tiles of each, then the second
// ones, and so on. Where later tiles have less to do, what is left to the end is short; and few enough documents are
// gone over at a time for the cache to hold them.
__device__ __forceinline__ bool find_tile_by_rank(
    const u32* bounds, u32 docs, u32 rows, u32 index, u32 together, Tile& tile
) {
    if (!find_tile(bounds, docs, rows, index, tile)) return false;
    const u32 lane = threadIdx.x % 32, all = 0xffffffffu;
    const u32 first = tile.doc / together * together, doc = first + lane;
    const bool one = lane < together && doc < docs;
    const u32 base = one ? bounds[doc] : 0;
    const u32 len = one ? bounds[doc + 1] - base : 0;
    const u32 count = (len + rows - 1) / rows;
    // Tiles of these documents before the one found, in the old order; so many are before it in the new one.
    u32 left = tile.index + __reduce_add_sync(all, doc < tile.doc ? count : 0);
    // The tiles of ranks below `rank` are as many or fewer.
    u32 rank = 0;
    for (u32 step = 1u << (31 - __clz((int)__reduce_max_sync(all, count))); step > 0; step /= 2)
        if (__reduce_add_sync(all, min(count, rank + step)) <= left) rank += step;
    left -= __reduce_add_sync(all, min(count, rank));
    const u32 with = __ballot_sync(all, count > rank), below = with & ((1u << lane) - 1);
    const u32 chosen = __ballot_sync(all, count > rank && (u32)__popc((int)below) == left);
    const int at = __ffs((int)chosen) - 1;
    tile.doc = first + at;
    tile.base = __shfl_sync(all, base, at);
    tile.len = (int)__shfl_sync(all, len, at);
    tile.count = (int)__shfl_sync(all, count, at);
    tile.index = (int)rank;
    return true;
}

// The first key that query i sees. No window is one that is never full.
__device__ __forceinline__ int first_key(int i, int window) { return max(0, i + 1 - window); }
__device__ __forceinline__ bool sees(int i, int j, int window) { return j <= i && i - j < window; }
// One past the last query that sees key j, in a document of `len`.
__device__ __forceinline__ int last_query(int j, int window, int len) { return window < len - j ? j + window : len; }

__device__ __forceinline__ f32 infinity() { return __int_as_float(0x7f800000); }
