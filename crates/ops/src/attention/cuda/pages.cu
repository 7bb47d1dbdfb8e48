// Addresses in a layer's KV cache: a pool of pages [pages, G, 2, page_tokens, h], where page_tokens is a power of two,
// 1 << page_shift. `page_tables` [documents, table_len] has each document's pages in the order of its tokens. WIDTH is
// the head width h.
#include "lockstep.cuh"

// The keys or the values of one head of one document.
struct PagedRows {
    // The head's rows in page 0, and the distance from a page to the next.
    const REAL* pool;
    size_t page_elems;
    const u32* table;
    u32 num_pages, page_shift;

    // The host checks page ids. The minimum only keeps an access inside the cache if it did not.
    __device__ __forceinline__ const REAL* page_of(int row) const {
        return pool + (size_t)min(table[row >> page_shift], num_pages - 1) * page_elems;
    }

    // One row of the document.
    __device__ __forceinline__ const REAL* row(int row) const {
        return page_of(row) + (size_t)(row & ((1 << page_shift) - 1)) * WIDTH;
    }

    // For the rows of a tile, which are in one page: a pointer from which row r of the document is r * WIDTH elements
    // away. It may lie outside the cache, so it is computed as a number.
    __device__ __forceinline__ const REAL* tile(int first) const {
        const u64 skipped = sizeof(REAL) * WIDTH * (u64)(first >> page_shift << page_shift);
        return reinterpret_cast<const REAL*>(reinterpret_cast<u64>(page_of(first)) - skipped);
    }
};

// The keys and values of one head of one document.
struct HeadCache {
    PagedRows keys, values;

    __device__ __forceinline__ HeadCache(
        const REAL* cache, u32 num_pages, u32 page_shift, const u32* page_tables, u32 table_len, u32 doc, u32 num_kv,
        u32 kv_head
    ) {
        const size_t rows_elems = (size_t)WIDTH << page_shift;
        const REAL* first = cache + kv_head * 2 * rows_elems;
        const u32* table = page_tables + (size_t)doc * table_len;
        keys = {first, num_kv * 2 * rows_elems, table, num_pages, page_shift};
        values = {first + rows_elems, num_kv * 2 * rows_elems, table, num_pages, page_shift};
    }
};

// Rows that follow each other in memory, `stride` elements apart, behind the same interface.
struct ContiguousRows {
    const REAL* from;

    __device__ __forceinline__ const REAL* tile(int) const { return from; }
};
