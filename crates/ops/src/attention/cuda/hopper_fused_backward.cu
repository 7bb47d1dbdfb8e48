// Attention on sm_90 tensor cores: backward of heads of width 64 in one kernel. A block owns ROWS keys. It sums their
// dk and dv over the queries that see them in registers, and adds their contribution to dq to sums in global memory
// that blocks share.
//
// The accumulation of dq is ordered: blocks with a document's earlier keys add first. So the order of additions depends
// only on the document, and runs are reproducible bit for bit. The first block of a tile stores its part, the last one
// adds its part to the sum and rounds. A block takes its number when it starts, and waits only for blocks with smaller
// numbers, so there is no deadlock. All blocks process queries from last to first, each slightly behind its
// predecessor.
//
// Two consumer groups of four warps own 64 keys each. They run half a step apart: one computes exponentials while the
// matmuls of the other run. dS of both goes through shared memory, where it is an operand of dq; each group computes
// half the columns of dq, one step late. In the third group two warps are producers that copy queries ahead of time.
// Its other two warps add finished parts of dq to the sums in order and publish their progress.
//
// With P and dP = dO·Vᵀ: dS = P ∘ (dP − delta), dq = scale · dS·K, dk = scale · dSᵀ·Q, dv = Pᵀ·dO. Log-sum-exps are in
// base 2 and, like delta, laid out by head: [H, T].

static_assert(
    GROUPS == 2 && COLS == 64 && WIDTH == 64, "two groups share the columns of dq, and one wgmma covers its rows"
);
constexpr int TILE_ELEMS = ROWS * WIDTH, STEP_ELEMS = COLS * WIDTH, DS_ELEMS = ROWS * COLS, HALF = WIDTH / 2;
// Shared memory holds the queries of STAGES steps, dS of DS_STAGES steps, and dq of DQ_STAGES steps until it can be
// added. When a group writes dS, the other group is known to be past the matmul that read the dS of three steps before.
static_assert(DS_STAGES == 4, "the dS written now must not be the one of three steps before");
static_assert(ALL_THREADS == THREADS + GROUP_THREADS, "one group more than the consumers");
static_assert(
    BACKWARD_BYTES == sizeof(REAL) * (2 * TILE_ELEMS + DS_STAGES * DS_ELEMS + STAGES * 2 * STEP_ELEMS)
            + sizeof(f32) * (STAGES * 2 * COLS + DQ_STAGES * STEP_ELEMS) + 8 * (2 * STAGES + DS_STAGES + 2 * DQ_STAGES),
    "must match the shared memory of the launch"
);
constexpr int PRODUCER_THREADS = 64, DQ_WARPS = 2;
// Registers per thread. All threads of a block start with the same number; the consumers take over those that the third
// group releases.
constexpr int PRODUCER_REGISTERS = 88, CONSUMER_REGISTERS = 208;

// Named barriers. Number 0 is __syncthreads.
constexpr int KEYS_BARRIER = 1, STAGGER_BARRIER = 2;

__device__ __forceinline__ void barrier_sync(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void barrier_arrive(int barrier, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// An mbarrier in shared memory: a phase completes when `count` threads have arrived. Every lane arrives by itself:
// one arrival per warp costs the same, but racecheck would not see that the other lanes are ordered before it.
struct MBarrier {
    u32 at;

    __device__ __forceinline__ void init(u32 count) const {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory");
    }
    __device__ __forceinline__ void arrive() const {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
    }
    // Waits for the completion of phase `phase`, counted from zero.
    __device__ __forceinline__ void wait(u32 phase) const {
        u32 done = 0;
        while (done == 0)
            asm volatile(
                "{ .reg .pred done; mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2; "
                "selp.u32 %0, 1, 0, done; }"
                : "=r"(done)
                : "r"(at), "r"(phase & 1)
                : "memory");
    }
};

__device__ __forceinline__ u32 load_acquire(const u32* at) {
    u32 x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
    return x;
}
__device__ __forceinline__ void store_release(u32* at, u32 x) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(x) : "memory");
}
// Copies shared memory to global memory, or adds it to what is there, asynchronously. Both addresses and the number of
// bytes are multiples of 16.
__device__ __forceinline__ void bulk_store(f32* to, u32 from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void bulk_add(f32* to, u32 from, u32 bytes) {
    asm volatile("fence.proxy.async; cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
                 ::"l"(to), "r"(from), "r"(bytes)
                 : "memory");
}
// Waits until the bulk stores are done and visible to other threads.
__device__ __forceinline__ void wait_bulk_stores() {
    asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; fence.proxy.async;" ::: "memory");
}
__device__ __forceinline__ float4 load_relaxed4(const f32* from) {
    float4 x;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "l"(from)
                 : "memory");
    return x;
}

// Stores four 8 × 8 matrices, laid out in registers like `a` of round_to_a, to rows in shared memory. Each lane passes
// the address of one row.
__device__ __forceinline__ void store_parts(u32 to, const u32 (&a)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a[0]), "r"(a[1]),
                 "r"(a[2]), "r"(a[3])
                 : "memory");
}

// c [64, N] = aᵀ · b, plus the old c if `add`, over 16 rows of tiles a [16, 64] and b [16, N].
__device__ __forceinline__ void multiply_rows(f32 (&c)[4][4], u32 a, u32 b, int add) {
    asm volatile(
        "{ .reg .pred add; setp.ne.b32 add, %18, 0; "
        "wgmma.mma_async.sync.aligned.m64n32k16.f32." TYPE "." TYPE " "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "%16, %17, add, 1, 1, 1, 1; }"
        : SUMS_16(c, 0), SUMS_16(c, 2)
        : "l"(descriptor(a)), "l"(descriptor(b)), "r"(add)
        : "memory");
}
__device__ __forceinline__ void multiply_rows(f32 (&c)[8][4], u32 a, u32 b, int add) {
    asm volatile(
        "{ .reg .pred add; setp.ne.b32 add, %34, 0; "
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "%32, %33, add, 1, 1, 1, 1; }"
        : SUMS_64(c, 0)
        : "l"(descriptor(a)), "l"(descriptor(b)), "r"(add)
        : "memory");
}

// The layout of the block's shared memory.
struct Smem {
    __device__ __forceinline__ static REAL* k() { return smem; }
    __device__ __forceinline__ static REAL* v() { return k() + TILE_ELEMS; }
    // dS of a step, transposed: [ROWS, COLS].
    __device__ __forceinline__ static REAL* ds(u32 step) { return v() + TILE_ELEMS + step % DS_STAGES * DS_ELEMS; }
    // COLS queries of one head, their dO, log-sum-exps and deltas.
    __device__ __forceinline__ static REAL* q(u32 stage) {
        return ds(0) + DS_STAGES * DS_ELEMS + stage * 2 * STEP_ELEMS;
    }
    __device__ __forceinline__ static REAL* dout(u32 stage) { return q(stage) + STEP_ELEMS; }
    __device__ __forceinline__ static f32* lse(u32 stage) {
        return reinterpret_cast<f32*>(q(STAGES)) + stage * 2 * COLS;
    }
    __device__ __forceinline__ static f32* delta(u32 stage) { return lse(stage) + COLS; }
    // A step's part of dq: [COLS, WIDTH], laid out by `chunk_offset`.
    __device__ __forceinline__ static f32* dq(u32 step) { return lse(STAGES) + step % DQ_STAGES * STEP_ELEMS; }
    // Barriers: a stage is full or empty, dS of both groups is stored, their part of dq is stored or its buffer is
    // empty.
    __device__ __forceinline__ static MBarrier mbarrier(u32 i) {
        return {shared_address(dq(0) + DQ_STAGES * STEP_ELEMS) + 8 * i};
    }
    __device__ __forceinline__ static MBarrier full(u32 stage) { return mbarrier(stage); }
    __device__ __forceinline__ static MBarrier empty(u32 stage) { return mbarrier(STAGES + stage); }
    __device__ __forceinline__ static MBarrier ds_full(u32 step) { return mbarrier(2 * STAGES + step % DS_STAGES); }
    __device__ __forceinline__ static MBarrier dq_full(u32 step) {
        return mbarrier(2 * STAGES + DS_STAGES + step % DQ_STAGES);
    }
    __device__ __forceinline__ static MBarrier dq_empty(u32 step) {
        return mbarrier(2 * STAGES + DS_STAGES + DQ_STAGES + step % DQ_STAGES);
    }
};

// Parts of dq, and its sums, have rows of chunks of four numbers. Chunk 4 m + t of a row has columns 16 m + 2 t and the
// next one, and the two columns 8 further on, as thread t of a row holds them. In odd rows a chunk is swapped with the
// one 4 places away, so that the threads of two rows write to different banks.
constexpr int CHUNKS = WIDTH / 4;
__device__ __forceinline__ int chunk_offset(int row, int chunk) { return row * WIDTH + (chunk ^ (row & 1) << 2) * 4; }

// Iterates over the steps of a block: all heads of its group, and for each head the tiles of queries that see its keys,
// last tile first.
struct StepIterator {
    int first, last; // The first and last tile of COLS queries of every head.
    u32 heads;
    u32 head = 0;
    int tile;

    __device__ __forceinline__ StepIterator(int first, int last, u32 heads)
        : first(first), last(last), heads(heads), tile(last) {}
    __device__ __forceinline__ bool more() const { return head < heads; }
    __device__ __forceinline__ void advance() {
        if (tile-- == first) {
            tile = last;
            head++;
        }
    }
};

// An index into the ring of stages, and how often it has wrapped around.
struct RingIndex {
    u32 at = 0, times = 0;

    __device__ __forceinline__ void advance() {
        if (++at == STAGES) {
            at = 0;
            times++;
        }
    }
};

// The position of a block in the ordered accumulation of a tile of dq: how many blocks add before it, and whether it is
// the last.
struct DqOrder {
    int before;
    bool last;

    __device__ __forceinline__ DqOrder(int tile, int block, int len, int window) {
        const int end = min((tile + 1) * COLS, len) - 1;
        before = block - first_key(tile * COLS, window) / ROWS;
        last = end / ROWS == block;
    }
};

// Rounds rows of dq [COLS, WIDTH]: the last block's part, plus the sum of the parts before it, if any. For one warp.
__device__ __forceinline__ void round_dq(
    REAL* dq, size_t dq_stride, const f32* part, const f32* sums, bool any, int rows, f32 scale, u32 lane
) {
    constexpr int UNROLL = 6;
    for (int first = lane; first < rows * CHUNKS; first += 32 * UNROLL) {
        float4 before[UNROLL] = {};
#pragma unroll
        for (int i = 0; i < UNROLL; i++) {
            const int at = first + i * 32;
            if (any && at < rows * CHUNKS) before[i] = load_relaxed4(sums + 4 * at);
        }
#pragma unroll
        for (int i = 0; i < UNROLL; i++) {
            const int at = first + i * 32;
            if (at >= rows * CHUNKS) break;
            const int row = at / CHUNKS, chunk = at % CHUNKS ^ (row & 1) << 2;
            const float4 x = before[i], y = *reinterpret_cast<const float4*>(part + 4 * at);
            u32* pairs = reinterpret_cast<u32*>(dq + (size_t)row * dq_stride + chunk / 4 * 16 + chunk % 4 * 2);
            pairs[0] = round_pair((x.x + y.x) * scale, (x.y + y.y) * scale, REAL{});
            pairs[4] = round_pair((x.z + y.z) * scale, (x.w + y.w) * scale, REAL{});
        }
    }
}

extern "C" __global__ void __launch_bounds__(ALL_THREADS, 1) hopper_fused_backward(
    REAL* dq, u32 dq_stride, REAL* dk, u32 dk_stride, REAL* dv, u32 dv_stride, const REAL* dout, u32 dout_stride,
    const f32* lse, const f32* delta, f32* dq_sums, u32* dq_counts, const REAL* q, u32 q_stride, const REAL* k,
    const REAL* v, u32 kv_stride, const u32* bounds, u32 docs, u32 tokens, u32 num_q, u32 group, f32 scale, int window
) {
    __shared__ u32 shared_block_number;
    if (threadIdx.x == 0) {
        shared_block_number = atomicAdd(dq_counts, 1u);
        for (u32 stage = 0; stage < STAGES; stage++) {
            Smem::full(stage).init(PRODUCER_THREADS);
            Smem::empty(stage).init(THREADS);
        }
        for (u32 step = 0; step < DS_STAGES; step++) Smem::ds_full(step).init(THREADS);
        for (u32 step = 0; step < DQ_STAGES; step++) {
            Smem::dq_full(step).init(THREADS);
            Smem::dq_empty(step).init(32);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    dq_counts++;
    __syncthreads();
    const u32 number = shared_block_number, num_kv = num_q / group;
    Tile tile;
    if (!find_tile_by_rank(bounds, docs, ROWS, number / num_kv, docs_per_group(num_kv), tile)) return;
    const u32 kv_head = number % num_kv, first_head = kv_head * group;
    const size_t base = tile.base;
    const int len = tile.len, block = tile.index, first_k = block * ROWS;
    const int end = last_query(min(first_k + ROWS, len) - 1, window, len);
    window = min(window, len);
    StepIterator steps(first_k / COLS, (end - 1) / COLS, group);

    if (threadIdx.x >= THREADS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        const u32 thread = threadIdx.x - THREADS;
        // The counts of the document's first tile of queries: [tiles, H]. Only documents of more than one block have
        // counts, and these have at most three tiles per 128 rows.
        dq_counts += (size_t)(tile.base * 3ull / 128) * num_q + first_head;
        if (thread < PRODUCER_THREADS) {
            q += base * q_stride + first_head * WIDTH;
            dout += base * dout_stride + first_head * WIDTH;
            lse += (size_t)first_head * tokens + base;
            delta += (size_t)first_head * tokens + base;
            RingIndex to, before;
            for (bool any = false; steps.more(); steps.advance(), any = true) {
                const int first = steps.tile * COLS;
                if (to.times > 0) Smem::empty(to.at).wait(to.times - 1);
                const REAL *head_q = q + steps.head * WIDTH, *head_dout = dout + steps.head * WIDTH;
                copy_rows<COLS, 0, PRODUCER_THREADS>(Smem::q(to.at), head_q, q_stride, first, len, 0, thread);
                copy_rows<COLS, 0, PRODUCER_THREADS>(Smem::dout(to.at), head_dout, dout_stride, first, len, 0, thread);
                const u32 query = first + thread;
                copy_async(Smem::lse(to.at) + thread, lse + (size_t)steps.head * tokens + query, query < len);
                copy_async(Smem::delta(to.at) + thread, delta + (size_t)steps.head * tokens + query, query < len);
                commit_copies();
                to.advance();
                if (any) {
                    wait_copies<1>();
                    fence_async_proxy();
                    Smem::full(before.at).arrive();
                    before.advance();
                }
            }
            wait_copies<0>();
            fence_async_proxy();
            Smem::full(before.at).arrive();
        } else {
            // The two warps take steps alternately: while one waits for earlier blocks, or for its stores, the other
            // continues.
            const u32 dq_warp = (thread - PRODUCER_THREADS) / 32, lane = thread % 32;
            dq += base * dq_stride + first_head * WIDTH;
            dq_sums += ((size_t)first_head * tokens + base) * WIDTH;
            for (u32 step = 0; steps.more(); steps.advance(), step++) {
                if (step % DQ_WARPS != dq_warp) continue;
                const DqOrder order(steps.tile, block, len, window);
                const int first = steps.tile * COLS, rows = min(COLS, len - first);
                u32* at = dq_counts + (size_t)steps.tile * num_q + steps.head;
                f32* sums = dq_sums + ((size_t)steps.head * tokens + first) * WIDTH;
                Smem::dq_full(step).wait(step / DQ_STAGES);
                if (order.before > 0)
                    while (load_acquire(at) != (u32)order.before) {}
                __syncwarp();
                if (order.last) {
                    REAL* to = dq + (size_t)first * dq_stride + steps.head * WIDTH;
                    round_dq(to, dq_stride, Smem::dq(step), sums, order.before > 0, rows, scale, lane);
                } else if (lane == 0) {
                    const u32 from = shared_address(Smem::dq(step)), bytes = 4 * rows * WIDTH;
                    if (order.before > 0)
                        bulk_add(sums, from, bytes);
                    else
                        bulk_store(sums, from, bytes);
                    wait_bulk_stores();
                    store_release(at, order.before + 1);
                }
                // Reconverge: lanes that already wait for the next part would slow down the lane that copies.
                __syncwarp();
                Smem::dq_empty(step).arrive();
            }
        }
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, own_group = warp_group();
    const int group_row = own_group * 64, warp_row = threadIdx.x / 32 * 16;
    const int low_k = first_k + group_row, high_k = low_k + 63, own_k = first_k + warp_row + g;
    const f32 scale_log2 = scale * LOG2_E;
    copy_rows<ROWS>(Smem::k(), k + base * kv_stride + kv_head * WIDTH, kv_stride, first_k, len);
    copy_rows<ROWS>(Smem::v(), v + base * kv_stride + kv_head * WIDTH, kv_stride, first_k, len);
    commit_copies();
    const u32 group_k = tile_at(Smem::k() + group_row * PANEL_COLS);
    const u32 group_v = tile_at(Smem::v() + group_row * PANEL_COLS);
    // This group's columns of all keys, and the row of a dS matrix that this lane stores.
    const u32 k_columns = tile_at(Smem::k() + own_group * HALF);
    const int ds_row = warp_row + lane % 16, ds_part = lane / 16;

    // P and dS, transposed: keys by queries. They use the same registers in every step: matmuls of two steps are in
    // flight at once, and nothing else may touch their accumulators meanwhile.
    f32 dk_sums[WIDTH / 8][4], dv_sums[WIDTH / 8][4], dq_part[HALF / 8][4], p[COLS / 8][4], ds[COLS / 8][4];
    clear(dk_sums);
    clear(dv_sums);
    clear(dq_part);
    clear(p);
    clear(ds);
    const auto begin_dq = [&](u32 step) {
        const u32 tile = tile_at(Smem::ds(step));
        wgmma_fence();
#pragma unroll
        for (int c = 0; c < ROWS / 16; c++)
            multiply_rows(dq_part, tile + c * 16 * ROW_BYTES / 16, k_columns + c * 16 * ROW_BYTES / 16, c > 0);
        wgmma_commit();
    };
    const auto publish_dq = [&](u32 step) {
        if (step >= DQ_STAGES) Smem::dq_empty(step).wait(step / DQ_STAGES - 1);
        f32* to = Smem::dq(step);
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int m = 0; m < HALF / 16; m++) {
                const f32 *low = dq_part[2 * m] + 2 * r, *high = dq_part[2 * m + 1] + 2 * r;
                const int chunk = own_group * (HALF / 4) + 4 * m + t;
                *reinterpret_cast<float4*>(to + chunk_offset(warp_row % 64 + g + 8 * r, chunk)) =
                    float4{low[0], low[1], high[0], high[1]};
            }
        fence_async_proxy();
        Smem::dq_full(step).arrive();
    };

    RingIndex from, used;
    u32 step = 0;
    wait_copies<0>();
    fence_async_proxy();
    barrier_sync(KEYS_BARRIER, THREADS);
    if (own_group == 1) barrier_sync(STAGGER_BARRIER, THREADS);
    do {
        const int here = steps.tile * COLS, last_q = here + COLS - 1;
        const u32 stage = from.at;
        Smem::full(stage).wait(from.times);
        Chunk<f32, 2> numbers[COLS / 8];
#pragma unroll
        for (int n = 0; n < COLS / 8; n++) numbers[n] = load_chunk<2>(Smem::lse(stage) + 8 * n + 2 * t);
        wgmma_fence();
        scores<ROWS, COLS>(p, group_k, tile_at(Smem::q(stage)));
        wgmma_commit();
        scores<ROWS, COLS>(ds, group_v, tile_at(Smem::dout(stage)));
        wgmma_commit();
        // When the scores are done, so are dk and dv of the previous step.
        wgmma_wait<1>();
        register_fence(p);
        register_fence(dk_sums);
        register_fence(dv_sums);
        if (step > 0) {
            Smem::empty(used.at).arrive();
            used.advance();
            Smem::ds_full(step - 1).wait((step - 1) / DS_STAGES);
        }
        // dq of the previous step. In the first step the result is discarded.
        begin_dq(step - 1);

        // Queries past the end are zero, and so is their dO: whatever their P is, it contributes nothing.
#pragma unroll
        for (int n = 0; n < COLS / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) p[n][i] = exp2_approx(fmaf(p[n][i], scale_log2, -numbers[n].at[i % 2]));
        if (here < high_k || last_q - low_k >= window) {
            const int low = own_k - here - 2 * t;
            mask_outside<COLS>(p, low, low + window, 0.0f);
        }
        u32 rounded_p[COLS / 16][4], rounded_ds[COLS / 16][4];
        round_to_a<COLS>(rounded_p, p);
#pragma unroll
        for (int n = 0; n < COLS / 8; n++) numbers[n] = load_chunk<2>(Smem::delta(stage) + 8 * n + 2 * t);
        wgmma_wait<1>();
        register_fence(ds);
#pragma unroll
        for (int n = 0; n < COLS / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) ds[n][i] = p[n][i] * (ds[n][i] - numbers[n].at[i % 2]);
        round_to_a<COLS>(rounded_ds, ds);
#pragma unroll
        for (int j = 0; j < COLS / 16; j++)
            store_parts(shared_address(Smem::ds(step) + swizzled<ROWS>(ds_row, 2 * j + ds_part)), rounded_ds[j]);
        register_fence(dv_sums);
        register_fence(dk_sums);
        wgmma_fence();
        accumulate<COLS>(dv_sums, rounded_p, tile_at(Smem::dout(stage), COLS * ROW_BYTES));
        accumulate<COLS>(dk_sums, rounded_ds, tile_at(Smem::q(stage), COLS * ROW_BYTES));
        wgmma_commit();
        fence_async_proxy();
        Smem::ds_full(step).arrive();
        if (step == 0 && own_group == 0) barrier_arrive(STAGGER_BARRIER, THREADS);
        wgmma_wait<1>();
        register_fence(dq_part);
        if (step > 0) publish_dq(step - 1);
        steps.advance();
        from.advance();
        step++;
    } while (steps.more());
    wgmma_wait<0>();
    register_fence(dv_sums);
    register_fence(dk_sums);
    Smem::ds_full(step - 1).wait((step - 1) / DS_STAGES);
    begin_dq(step - 1);
    wgmma_wait<0>();
    register_fence(dq_part);
    publish_dq(step - 1);
    // The matmuls of both groups read the keys, so wait for both before overwriting them.
    barrier_sync(KEYS_BARRIER, THREADS);
    dk += base * dk_stride + kv_head * WIDTH;
    dv += base * dv_stride + kv_head * WIDTH;
    store_rows(dk, dk_stride, first_k + warp_row, len, Smem::k(), warp_row, dk_sums, scale, scale);
    store_rows(dv, dv_stride, first_k + warp_row, len, Smem::v(), warp_row, dv_sums, 1.0f, 1.0f);
}
