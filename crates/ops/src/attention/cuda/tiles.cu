// Shared by all attention kernels: which tile of which document a block processes, and which keys a query sees.
//
// Tiles are counted from their document's start, so a row's result depends only on its document.
#include "lockstep.cuh"

// A range of rows of one document.
struct Tile {
    u32 doc;
    // The document's first row in the batch, and its number of rows.
    u32 base;
    int len;
    // The index of this tile in the document, and the document's number of tiles.
    int index, count;
};

// Finds the `index`-th tile of `rows` rows, counted over all documents. The host only knows an upper bound on the
// number of tiles, so for surplus blocks this returns false. Every warp searches by itself.
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

// As find_tile, in another order: documents in groups of `group_size` (at most 32), and within a group first the first
// tiles of all its documents, then their second tiles, and so on. Where later tiles have less work, the last blocks to
// run are short ones. And a group is small enough for the cache to hold its documents.
__device__ __forceinline__ bool find_tile_by_rank(
    const u32* bounds, u32 docs, u32 rows, u32 index, u32 group_size, Tile& tile
) {
    if (!find_tile(bounds, docs, rows, index, tile)) return false;
    const u32 lane = threadIdx.x % 32, all = 0xffffffffu;
    const u32 first = tile.doc / group_size * group_size, doc = first + lane;
    const bool one = lane < group_size && doc < docs;
    const u32 base = one ? bounds[doc] : 0;
    const u32 len = one ? bounds[doc + 1] - base : 0;
    const u32 count = (len + rows - 1) / rows;
    // The number of tiles of this group before the one found, in the old order. As many precede it in the new order.
    u32 left = tile.index + __reduce_add_sync(all, doc < tile.doc ? count : 0);
    // Binary search for the largest rank such that at most `left` tiles of the group have smaller ranks.
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

// The first key that query i sees. Without a sliding window, `window` exceeds every length.
__device__ __forceinline__ int first_key(int i, int window) { return max(0, i + 1 - window); }
__device__ __forceinline__ bool sees(int i, int j, int window) { return j <= i && i - j < window; }
// One past the last query that sees key j, in a document of `len`.
__device__ __forceinline__ int last_query(int j, int window, int len) { return window < len - j ? j + window : len; }

__device__ __forceinline__ f32 infinity() { return __int_as_float(0x7f800000); }
