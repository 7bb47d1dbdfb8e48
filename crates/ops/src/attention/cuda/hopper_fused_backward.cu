// Attention on sm_90's tensor cores, backward of heads of 64 in one kernel: a block has ROWS keys and sums their dk and
// dv over the queries that see them, in registers, and adds what these keys give to dq to sums in memory that blocks
// share.
//
// Blocks take turns at these: those of a document's earlier keys come first, so the order of additions depends on the
// document alone and a run repeats bit for bit. The first block writes, the last one adds to what it reads and rounds.
// A block only waits for blocks that began before it: it takes its number when it begins. All go from the last queries
// to the first, each a little behind the one before.
//
// Two groups of four warps have 64 keys each. One takes powers while the products of the other run: they are half a
// step apart. dS of both goes through shared memory to be a factor of dq, of which each group computes half the
// columns, one step late. Of the warps of a third group two copy queries ahead; the others wait for turns, give dq to
// the sums, and tell of it.
//
// With P and dP = dO·Vᵀ: dS = P ∘ (dP − delta), dq = scale · dS·K, dk = scale · dSᵀ·Q, dv = Pᵀ·dO. Log-sum-exps are
// given in powers of two, and by heads like delta: [H, T].

static_assert(
    GROUPS == 2 && COLS == 64 && WIDTH == 64, "dq's columns are shared by two groups, and its rows are one product's"
);
constexpr int TILE_ELEMS = ROWS * WIDTH, STEP_ELEMS = COLS * WIDTH, DS_ELEMS = ROWS * COLS, HALF = WIDTH / 2;
// Shared memory has the queries of STAGES steps, dS of DS_STAGES, and dq of DQ_STAGES, which is there for its turn. A
// group that writes dS knows the other to be past the product that read the third before it.
static_assert(DS_STAGES == 4, "the third before the one that is written is left alone");
static_assert(ALL_THREADS == THREADS + GROUP_THREADS, "a group more than those that compute");
static_assert(
    BACKWARD_BYTES == sizeof(REAL) * (2 * TILE_ELEMS + DS_STAGES * DS_ELEMS + STAGES * 2 * STEP_ELEMS)
            + sizeof(f32) * (STAGES * 2 * COLS + DQ_STAGES * STEP_ELEMS) + 8 * (2 * STAGES + DS_STAGES + 2 * DQ_STAGES),
    "shared memory that the launch counts with"
);
constexpr int COPIERS = 64, GIVERS = 2;
// Registers of a thread, of which a block begins with as many for each: those that compute take over what the others
// leave.
constexpr int FEW_REGISTERS = 88, MANY_REGISTERS = 208;

// Named barriers. Number 0 is __syncthreads.
constexpr int KEYS_BARRIER = 1, APART_BARRIER = 2;

__device__ __forceinline__ void meet(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void arrive(int barrier, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Something that comes about again and again: each time when as many as it was made for have said so. Every lane says so
// for itself: one for its warp costs the same, and racecheck does not see that the others are ordered behind it.
struct Event {
    u32 at;

    __device__ __forceinline__ void make(u32 of) const {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(of) : "memory");
    }
    __device__ __forceinline__ void say() const {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
    }
    // For the time after so many others.
    __device__ __forceinline__ void wait(u32 times) const {
        u32 there = 0;
        while (there == 0)
            asm volatile(
                "{ .reg .pred there; mbarrier.try_wait.parity.shared::cta.b64 there, [%1], %2; "
                "selp.u32 %0, 1, 0, there; }"
                : "=r"(there)
                : "r"(at), "r"(times & 1)
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
// Numbers of shared memory to global memory, or added to what is there, without waiting. Both places and the number of
// bytes are multiples of 16.
__device__ __forceinline__ void begin_store(f32* to, u32 from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void begin_add(f32* to, u32 from, u32 bytes) {
    asm volatile("fence.proxy.async; cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
                 ::"l"(to), "r"(from), "r"(bytes)
                 : "memory");
}
// Until they are done, and seen by whoever is told of it.
__device__ __forceinline__ void wait_for_stores() {
    asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; fence.proxy.async;" ::: "memory");
}
__device__ __forceinline__ float4 load_four(const f32* from) {
    float4 x;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "l"(from)
                 : "memory");
    return x;
}

// Four 8 × 8 parts, laid out in registers as a in round_to_a, to rows in shared memory: each lane has one row's
// address.
__device__ __forceinline__ void store_parts(u32 to, const u32 (&a)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a[0]), "r"(a[1]),
                 "r"(a[2]), "r"(a[3])
                 : "memory");
}

// c [64, N] = aᵀ · b, and what c was where `add`, over 16 rows of tiles a [16, 64] and b [16, N].
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

// The block's shared memory.
struct Room {
    __device__ __forceinline__ static REAL* k() { return room; }
    __device__ __forceinline__ static REAL* v() { return k() + TILE_ELEMS; }
    // dS of a step, transposed: [ROWS, COLS].
    __device__ __forceinline__ static REAL* ds(u32 step) { return v() + TILE_ELEMS + step % DS_STAGES * DS_ELEMS; }
    // COLS queries of one head, their dO, and what is known of each.
    __device__ __forceinline__ static REAL* q(u32 stage) {
        return ds(0) + DS_STAGES * DS_ELEMS + stage * 2 * STEP_ELEMS;
    }
    __device__ __forceinline__ static REAL* dout(u32 stage) { return q(stage) + STEP_ELEMS; }
    __device__ __forceinline__ static f32* lse(u32 stage) {
        return reinterpret_cast<f32*>(q(STAGES)) + stage * 2 * COLS;
    }
    __device__ __forceinline__ static f32* delta(u32 stage) { return lse(stage) + COLS; }
    // A step's part of dq: [COLS, WIDTH], where `chunk_place` says.
    __device__ __forceinline__ static f32* dq(u32 step) { return lse(STAGES) + step % DQ_STAGES * STEP_ELEMS; }
    // A stage is full, or free again; dS of both groups is there; so is their part of dq, and its place is free again.
    __device__ __forceinline__ static Event event(u32 i) {
        return {shared_address(dq(0) + DQ_STAGES * STEP_ELEMS) + 8 * i};
    }
    __device__ __forceinline__ static Event full(u32 stage) { return event(stage); }
    __device__ __forceinline__ static Event free(u32 stage) { return event(STAGES + stage); }
    __device__ __forceinline__ static Event ds_there(u32 step) { return event(2 * STAGES + step % DS_STAGES); }
    __device__ __forceinline__ static Event dq_there(u32 step) {
        return event(2 * STAGES + DS_STAGES + step % DQ_STAGES);
    }
    __device__ __forceinline__ static Event dq_free(u32 step) {
        return event(2 * STAGES + DS_STAGES + DQ_STAGES + step % DQ_STAGES);
    }
};

// Parts of dq and its sums have rows of chunks of four numbers. Chunk 4 m + t of a row has columns 16 m + 2 t, the next
// one, and those 8 further on, as thread t of a row has them, and is swapped with one 4 on or back in odd rows: so
// threads of two rows write to all banks.
constexpr int CHUNKS = WIDTH / 4;
__device__ __forceinline__ int chunk_place(int row, int chunk) { return row * WIDTH + (chunk ^ (row & 1) << 2) * 4; }

// A walk over the steps of a block: all heads of its group, and of each the queries that see its keys, the last first.
struct Walk {
    int first, last; // The first and last step's queries of every head, in tiles of COLS.
    u32 heads;
    u32 head = 0;
    int tile;

    __device__ __forceinline__ Walk(int first, int last, u32 heads)
        : first(first), last(last), heads(heads), tile(last) {}
    __device__ __forceinline__ bool there() const { return head < heads; }
    __device__ __forceinline__ void go_on() {
        if (tile-- == first) {
            tile = last;
            head++;
        }
    }
};

// A place that goes round a ring, and how often it did.
struct Round {
    u32 at = 0, times = 0;

    __device__ __forceinline__ void go_on() {
        if (++at == STAGES) {
            at = 0;
            times++;
        }
    }
};

// Whose turn it is at the sums of a tile of queries: the blocks before this one that add to it, and whether any do
// after.
struct Turn {
    int before;
    bool last;

    __device__ __forceinline__ Turn(int tile, int block, int len, int window) {
        const int end = min((tile + 1) * COLS, len) - 1;
        before = block - first_key(tile * COLS, window) / ROWS;
        last = end / ROWS == block;
    }
};

// Rows of dq [COLS, WIDTH] from a block's part, which is the last, and the sums before it, if any. For one warp.
__device__ __forceinline__ void round_dq(
    REAL* dq, size_t dq_stride, const f32* part, const f32* sums, bool any, int rows, f32 scale, u32 lane
) {
    constexpr int AT_ONCE = 6;
    for (int first = lane; first < rows * CHUNKS; first += 32 * AT_ONCE) {
        float4 before[AT_ONCE] = {};
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int at = first + i * 32;
            if (any && at < rows * CHUNKS) before[i] = load_four(sums + 4 * at);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
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
    const f32* lse, const f32* delta, f32* dq_sums, u32* turns, const REAL* q, u32 q_stride, const REAL* k,
    const REAL* v, u32 kv_stride, const u32* bounds, u32 docs, u32 tokens, u32 num_q, u32 group, f32 scale, int window
) {
    __shared__ u32 number_of_block;
    if (threadIdx.x == 0) {
        number_of_block = atomicAdd(turns, 1u);
        for (u32 stage = 0; stage < STAGES; stage++) {
            Room::full(stage).make(COPIERS);
            Room::free(stage).make(THREADS);
        }
        for (u32 step = 0; step < DS_STAGES; step++) Room::ds_there(step).make(THREADS);
        for (u32 step = 0; step < DQ_STAGES; step++) {
            Room::dq_there(step).make(THREADS);
            Room::dq_free(step).make(32);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    turns++;
    __syncthreads();
    const u32 number = number_of_block, num_kv = num_q / group;
    Tile tile;
    if (!find_tile_by_rank(bounds, docs, ROWS, number / num_kv, docs_together(num_kv), tile)) return;
    const u32 kv_head = number % num_kv, first_head = kv_head * group;
    const size_t base = tile.base;
    const int len = tile.len, block = tile.index, first_k = block * ROWS;
    const int end = last_query(min(first_k + ROWS, len) - 1, window, len);
    window = min(window, len);
    Walk walk(first_k / COLS, (end - 1) / COLS, group);

    if (threadIdx.x >= THREADS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(FEW_REGISTERS));
        const u32 helper = threadIdx.x - THREADS;
        // Of the document's first tile of queries: [tiles, H]. Only documents of more than one block have turns, and
        // these have at most three tiles to 128 rows.
        turns += (size_t)(tile.base * 3ull / 128) * num_q + first_head;
        if (helper < COPIERS) {
            q += base * q_stride + first_head * WIDTH;
            dout += base * dout_stride + first_head * WIDTH;
            lse += (size_t)first_head * tokens + base;
            delta += (size_t)first_head * tokens + base;
            Round to, before;
            for (bool any = false; walk.there(); walk.go_on(), any = true) {
                const int first = walk.tile * COLS;
                if (to.times > 0) Room::free(to.at).wait(to.times - 1);
                const REAL *head_q = q + walk.head * WIDTH, *head_dout = dout + walk.head * WIDTH;
                copy_rows<COLS, 0, COPIERS>(Room::q(to.at), head_q, q_stride, first, len, 0, helper);
                copy_rows<COLS, 0, COPIERS>(Room::dout(to.at), head_dout, dout_stride, first, len, 0, helper);
                const u32 number = first + helper;
                copy_async(Room::lse(to.at) + helper, lse + (size_t)walk.head * tokens + number, number < len);
                copy_async(Room::delta(to.at) + helper, delta + (size_t)walk.head * tokens + number, number < len);
                commit_copies();
                to.go_on();
                if (any) {
                    wait_copies<1>();
                    show_to_products();
                    Room::full(before.at).say();
                    before.go_on();
                }
            }
            wait_copies<0>();
            show_to_products();
            Room::full(before.at).say();
        } else {
            // Every step has one of the two givers: while one waits for its turn, or until all is added, the other goes
            // on.
            const u32 giver = (helper - COPIERS) / 32, lane = helper % 32;
            dq += base * dq_stride + first_head * WIDTH;
            dq_sums += ((size_t)first_head * tokens + base) * WIDTH;
            for (u32 step = 0; walk.there(); walk.go_on(), step++) {
                if (step % GIVERS != giver) continue;
                const Turn turn(walk.tile, block, len, window);
                const int first = walk.tile * COLS, rows = min(COLS, len - first);
                u32* at = turns + (size_t)walk.tile * num_q + walk.head;
                f32* sums = dq_sums + ((size_t)walk.head * tokens + first) * WIDTH;
                Room::dq_there(step).wait(step / DQ_STAGES);
                if (turn.before > 0)
                    while (load_acquire(at) != (u32)turn.before) {}
                __syncwarp();
                if (turn.last) {
                    REAL* to = dq + (size_t)first * dq_stride + walk.head * WIDTH;
                    round_dq(to, dq_stride, Room::dq(step), sums, turn.before > 0, rows, scale, lane);
                } else if (lane == 0) {
                    const u32 from = shared_address(Room::dq(step)), bytes = 4 * rows * WIDTH;
                    if (turn.before > 0)
                        begin_add(sums, from, bytes);
                    else
                        begin_store(sums, from, bytes);
                    wait_for_stores();
                    store_release(at, turn.before + 1);
                }
                // Lanes that would wait for the next part meanwhile slow down the one that copies.
                __syncwarp();
                Room::dq_free(step).say();
            }
        }
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MANY_REGISTERS));
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, own_group = warp_group();
    const int group_row = own_group * 64, warp_row = threadIdx.x / 32 * 16;
    const int low_k = first_k + group_row, high_k = low_k + 63, own_k = first_k + warp_row + g;
    const f32 scale_log2 = scale * LOG2_E;
    copy_rows<ROWS>(Room::k(), k + base * kv_stride + kv_head * WIDTH, kv_stride, first_k, len);
    copy_rows<ROWS>(Room::v(), v + base * kv_stride + kv_head * WIDTH, kv_stride, first_k, len);
    commit_copies();
    const u32 group_k = tile_at(Room::k() + group_row * PANEL_COLS);
    const u32 group_v = tile_at(Room::v() + group_row * PANEL_COLS);
    // This group's columns of all keys, and where this lane's row of a part of dS is.
    const u32 k_columns = tile_at(Room::k() + own_group * HALF);
    const int ds_row = warp_row + lane % 16, ds_part = lane / 16;

    // P and dS, transposed: keys by queries. The same registers in every step: products of two steps are under way at
    // once, and nothing else may touch their sums then.
    f32 dk_sums[WIDTH / 8][4], dv_sums[WIDTH / 8][4], dq_part[HALF / 8][4], p[COLS / 8][4], ds[COLS / 8][4];
    clear(dk_sums);
    clear(dv_sums);
    clear(dq_part);
    clear(p);
    clear(ds);
    const auto begin_dq = [&](u32 step) {
        const u32 tile = tile_at(Room::ds(step));
        begin_products();
#pragma unroll
        for (int c = 0; c < ROWS / 16; c++)
            multiply_rows(dq_part, tile + c * 16 * ROW_BYTES / 16, k_columns + c * 16 * ROW_BYTES / 16, c > 0);
        commit_products();
    };
    const auto hand_over_dq = [&](u32 step) {
        if (step >= DQ_STAGES) Room::dq_free(step).wait(step / DQ_STAGES - 1);
        f32* to = Room::dq(step);
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int m = 0; m < HALF / 16; m++) {
                const f32 *low = dq_part[2 * m] + 2 * r, *high = dq_part[2 * m + 1] + 2 * r;
                const int chunk = own_group * (HALF / 4) + 4 * m + t;
                *reinterpret_cast<float4*>(to + chunk_place(warp_row % 64 + g + 8 * r, chunk)) =
                    float4{low[0], low[1], high[0], high[1]};
            }
        show_to_products();
        Room::dq_there(step).say();
    };

    Round from, used;
    u32 step = 0;
    wait_copies<0>();
    show_to_products();
    meet(KEYS_BARRIER, THREADS);
    if (own_group == 1) meet(APART_BARRIER, THREADS);
    do {
        const int here = walk.tile * COLS, last_q = here + COLS - 1;
        const u32 stage = from.at;
        Room::full(stage).wait(from.times);
        Chunk<f32, 2> numbers[COLS / 8];
#pragma unroll
        for (int n = 0; n < COLS / 8; n++) numbers[n] = load_chunk<2>(Room::lse(stage) + 8 * n + 2 * t);
        begin_products();
        scores<ROWS, COLS>(p, group_k, tile_at(Room::q(stage)));
        commit_products();
        scores<ROWS, COLS>(ds, group_v, tile_at(Room::dout(stage)));
        commit_products();
        // With the scores, dk and dv of the step before are done.
        wait_products<1>();
        hold(p);
        hold(dk_sums);
        hold(dv_sums);
        if (step > 0) {
            Room::free(used.at).say();
            used.go_on();
            Room::ds_there(step - 1).wait((step - 1) / DS_STAGES);
        }
        // dq of the step before; in the first of nothing, and to no use.
        begin_dq(step - 1);

        // Queries past the end are zero and so is their dO: what they are given for P adds nothing.
#pragma unroll
        for (int n = 0; n < COLS / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) p[n][i] = power_of_two(fmaf(p[n][i], scale_log2, -numbers[n].at[i % 2]));
        if (here < high_k || last_q - low_k >= window) {
            const int low = own_k - here - 2 * t;
            leave_between<COLS>(p, low, low + window, 0.0f);
        }
        u32 rounded_p[COLS / 16][4], rounded_ds[COLS / 16][4];
        round_to_a<COLS>(rounded_p, p);
#pragma unroll
        for (int n = 0; n < COLS / 8; n++) numbers[n] = load_chunk<2>(Room::delta(stage) + 8 * n + 2 * t);
        wait_products<1>();
        hold(ds);
#pragma unroll
        for (int n = 0; n < COLS / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) ds[n][i] = p[n][i] * (ds[n][i] - numbers[n].at[i % 2]);
        round_to_a<COLS>(rounded_ds, ds);
#pragma unroll
        for (int j = 0; j < COLS / 16; j++)
            store_parts(shared_address(Room::ds(step) + place<ROWS>(ds_row, 2 * j + ds_part)), rounded_ds[j]);
        hold(dv_sums);
        hold(dk_sums);
        begin_products();
        add_product<COLS>(dv_sums, rounded_p, tile_at(Room::dout(stage), COLS * ROW_BYTES));
        add_product<COLS>(dk_sums, rounded_ds, tile_at(Room::q(stage), COLS * ROW_BYTES));
        commit_products();
        show_to_products();
        Room::ds_there(step).say();
        if (step == 0 && own_group == 0) arrive(APART_BARRIER, THREADS);
        wait_products<1>();
        hold(dq_part);
        if (step > 0) hand_over_dq(step - 1);
        walk.go_on();
        from.go_on();
        step++;
    } while (walk.there());
    wait_products<0>();
    hold(dv_sums);
    hold(dk_sums);
    Room::ds_there(step - 1).wait((step - 1) / DS_STAGES);
    begin_dq(step - 1);
    wait_products<0>();
    hold(dq_part);
    hand_over_dq(step - 1);
    // Products of both groups read the keys.
    meet(KEYS_BARRIER, THREADS);
    dk += base * dk_stride + kv_head * WIDTH;
    dv += base * dv_stride + kv_head * WIDTH;
    store_rows(dk, dk_stride, first_k + warp_row, len, Room::k(), warp_row, dk_sums, scale, scale);
    store_rows(dv, dv_stride, first_k + warp_row, len, Room::v(), warp_row, dv_sums, 1.0f, 1.0f);
}
