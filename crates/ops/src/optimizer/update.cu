// The loop over a flat range that all optimizers share. PARAMS, STATES and GRADS are the formats of parameters, states
// and gradients. REAL is the type of the working copy of f32 parameters.
#include "lockstep.cuh"

typedef short i16;

// ---- roundings, identical to `lockstep_core::rounding` --------------------------------------------------------

__device__ __forceinline__ u16 quiet_nan(u32 bits) { return (u16)(bits >> 16) | 0x40; }

// A weight, from its master parameter: bf16 with ties away from zero, others as `from_f32`.
template <typename R> __device__ __forceinline__ R weight_from_f32(f32 master) { return from_f32<R>(master); }
template <> __device__ __forceinline__ bf16 weight_from_f32<bf16>(f32 master) {
    const u32 bits = __float_as_uint(master);
    return bf16{isnan(master) ? quiet_nan(bits) : (u16)((bits + 0x8000u) >> 16)};
}

__device__ __forceinline__ i16 remainder_of(f32 master) {
    return isnan(master) ? (i16)0 : (i16)(u16)__float_as_uint(master);
}

__device__ __forceinline__ f32 join(bf16 weight, i16 remainder) {
    return __uint_as_float(((u32)weight.bits << 16) + (u32)(int)remainder);
}

// The random bits of the element at `index` in its tensor.
__device__ __forceinline__ u32 rounding_bits(u64 key, u32 index) {
    u32 hash = index + (u32)key;
    hash = (hash ^ (hash >> 16)) * 0x85EBCA6Bu;
    hash = (hash ^ (hash >> 13) ^ (u32)(key >> 32)) * 0xC2B2AE35u;
    return hash >> 16;
}

__device__ __forceinline__ bf16 stochastic(f32 x, u64 key, u32 index) {
    const u32 bits = __float_as_uint(x);
    return bf16{isnan(x) ? quiet_nan(bits) : (u16)((bits + rounding_bits(key, index)) >> 16)};
}

// ---- formats --------------------------------------------------------------------------------------------------

// Main: what `p` points to. Rest: what `rest` points to.
template <int FORMAT> struct ParamTypes;
template <> struct ParamTypes<PARAMS_MASTER> { typedef f32 Main; typedef REAL Rest; }; // parameters, working copy
template <> struct ParamTypes<PARAMS_SPLIT> { typedef bf16 Main; typedef i16 Rest; }; // weights, remainders
template <> struct ParamTypes<PARAMS_STOCHASTIC> { typedef bf16 Main; typedef bf16 Rest; }; // weights, nothing
typedef ParamTypes<PARAMS>::Main Param;
typedef ParamTypes<PARAMS>::Rest ParamRest;

template <int FORMAT> struct StateTypes;
template <> struct StateTypes<STATES_F32> { typedef f32 Type; };
template <> struct StateTypes<STATES_BF16> { typedef bf16 Type; };
template <> struct StateTypes<STATES_BLOCKWISE> { typedef u8 Type; };
typedef StateTypes<STATES>::Type State;

template <int FORMAT> struct GradTypes;
template <> struct GradTypes<GRADS_F32> { typedef f32 Type; };
template <> struct GradTypes<GRADS_BF16> { typedef bf16 Type; };
typedef GradTypes<GRADS>::Type Grad;

// ---- the loop -------------------------------------------------------------------------------------------------

// All [len], except for absmax: [len / 256], rounded up. `rest` may be null for a working copy. The range's first
// element has index `first` in its tensor; keys are of the parameters and of each state.
template <int S> struct Range {
    Param* p;
    ParamRest* rest;
    const Grad* grad;
    State* states[S > 0 ? S : 1];
    f32* absmax[S > 0 ? S : 1];
    u64 len;
    u32 first;
    u64 keys[S + 1];
    bool is_signed[S > 0 ? S : 1]; // which map the codes of a state are of
};

// Elements that a thread updates: a chunk, or its share of a block of codes that belongs to a warp.
constexpr bool BLOCKWISE = STATES == STATES_BLOCKWISE;
template <int N> constexpr int ELEMS = BLOCKWISE ? BLOCK_ELEMS / 32 : N;

// Loads E elements in chunks of N or, if they are not WHOLE, the first `count` of them; the others are zero.
template <int N, bool WHOLE, int E, typename T>
__device__ __forceinline__ void load_elems(T (&to)[E], const T* from, int count) {
    if constexpr (WHOLE) {
#pragma unroll
        for (int at = 0; at < E; at += N) {
            const Chunk<T, N> chunk = load_chunk<N>(from + at);
#pragma unroll
            for (int i = 0; i < N; i++) to[at + i] = chunk.at[i];
        }
    } else {
#pragma unroll
        for (int i = 0; i < E; i++) to[i] = i < count ? from[i] : T{};
    }
}

template <int N, bool WHOLE, int E, typename T>
__device__ __forceinline__ void store_elems(T* to, const T (&from)[E], int count) {
    if constexpr (WHOLE) {
#pragma unroll
        for (int at = 0; at < E; at += N) {
            Chunk<T, N> chunk;
#pragma unroll
            for (int i = 0; i < N; i++) chunk.at[i] = from[at + i];
            store_chunk<N>(to + at, chunk);
        }
    } else {
#pragma unroll
        for (int i = 0; i < E; i++)
            if (i < count) to[i] = from[i];
    }
}

// Stores the state of E elements of each thread of a warp. All threads of the warp call this together.
template <int N, bool WHOLE, int S, int E>
__device__ __forceinline__ void store_state(
    const Range<S>& range, int s, const DynamicMap* map, u64 start, int count, const f32 (&state)[E]
) {
    State stored[E];
    if constexpr (BLOCKWISE) {
        // Magnitudes have the order of their bits, which includes NaN.
        u32 largest = 0;
#pragma unroll
        for (int i = 0; i < E; i++) largest = max(largest, __float_as_uint(fabsf(state[i])));
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2)
            largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
        const f32 absmax = __uint_as_float(largest);
#pragma unroll
        for (int i = 0; i < E; i++)
            stored[i] = map->nearest(absmax == 0.0f ? 0.0f : __fdiv_rn(state[i], absmax));
        if (threadIdx.x % 32 == 0 && count > 0) range.absmax[s][start / BLOCK_ELEMS] = absmax;
    } else {
#pragma unroll
        for (int i = 0; i < E; i++) {
            if constexpr (STATES == STATES_BF16)
                stored[i] = stochastic(state[i], range.keys[s + 1], range.first + (u32)(start + i));
            else
                stored[i] = state[i];
        }
    }
    store_elems<N, WHOLE>(range.states[s] + start, stored, count);
}

template <int N, bool WHOLE, int S, int E>
__device__ __forceinline__ void store_params(const Range<S>& range, u64 start, int count, const f32 (&p)[E]) {
    Param stored[E];
    ParamRest rest[E];
#pragma unroll
    for (int i = 0; i < E; i++) {
        if constexpr (PARAMS == PARAMS_MASTER) {
            stored[i] = p[i];
            rest[i] = weight_from_f32<REAL>(p[i]);
        } else if constexpr (PARAMS == PARAMS_SPLIT) {
            stored[i] = weight_from_f32<bf16>(p[i]);
            rest[i] = remainder_of(p[i]);
        } else {
            stored[i] = stochastic(p[i], range.keys[0], range.first + (u32)(start + i));
        }
    }
    store_elems<N, WHOLE>(range.p + start, stored, count);
    if (PARAMS != PARAMS_STOCHASTIC && range.rest) store_elems<N, WHOLE>(range.rest + start, rest, count);
}

// Updates the first `count` elements from `start` on: all of a thread's elements if they are WHOLE. With blocks of
// codes, all threads of a warp call this together.
template <int N, bool WHOLE, int S, typename Formula>
__device__ __forceinline__ void update_elems(
    const Range<S>& range, const DynamicMap* maps, u64 start, int count, f32 clip, const Formula& formula
) {
    constexpr int E = ELEMS<N>, NUM_STATES = S > 0 ? S : 1;
    Param main[E];
    ParamRest rest[E];
    Grad grads[E];
    State stored[NUM_STATES][E];
    load_elems<N, WHOLE>(main, range.p + start, count);
    if constexpr (PARAMS == PARAMS_SPLIT) load_elems<N, WHOLE>(rest, range.rest + start, count);
    load_elems<N, WHOLE>(grads, range.grad + start, count);
#pragma unroll
    for (int s = 0; s < S; s++) load_elems<N, WHOLE>(stored[s], range.states[s] + start, count);

    f32 p[E], states[NUM_STATES][E];
#pragma unroll
    for (int s = 0; s < S; s++) {
        if constexpr (BLOCKWISE) {
            const f32 absmax = count > 0 ? range.absmax[s][start / BLOCK_ELEMS] : 0.0f;
#pragma unroll
            for (int i = 0; i < E; i++)
                states[s][i] = i < count ? __fmul_rn(maps[s].values[stored[s][i]], absmax) : 0.0f;
        } else {
#pragma unroll
            for (int i = 0; i < E; i++) states[s][i] = to_f32(stored[s][i]);
        }
    }
#pragma unroll
    for (int i = 0; i < E; i++) {
        if constexpr (PARAMS == PARAMS_SPLIT) p[i] = join(main[i], rest[i]);
        else p[i] = to_f32(main[i]);
        f32 state[NUM_STATES];
#pragma unroll
        for (int s = 0; s < S; s++) state[s] = states[s][i];
        formula(p[i], state, __fmul_rn(to_f32(grads[i]), clip));
#pragma unroll
        for (int s = 0; s < S; s++) states[s][i] = state[s];
    }
    store_params<N, WHOLE>(range, start, count, p);
#pragma unroll
    for (int s = 0; s < S; s++) store_state<N, WHOLE>(range, s, maps + s, start, count, states[s]);
}

// `formula(p, states, g)` updates one element, given its clipped gradient. decision[4] or null: {sum of squares, norm,
// clip, skip}; its clip factor replaces the launch argument. Loads and stores are chunks of N elements.
template <int N, int S, typename Formula>
__device__ __forceinline__ void update_range(const Range<S>& range, const f64* decision, f32 clip, Formula formula) {
    if (decision) {
        if (decision[3] != 0.0) return;
        clip = (f32)decision[2];
    }
    constexpr int E = ELEMS<N>;
    const DynamicMap* maps = nullptr;
    if constexpr (BLOCKWISE && S > 0) {
        __shared__ DynamicMap shared[S];
#pragma unroll
        for (int s = 0; s < S; s++) shared[s].fill(range.is_signed[s]);
        maps = shared;
    }
    const u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x, start = thread * E;
    // The end of what has to be updated together.
    const u64 end = BLOCKWISE ? (thread / 32 + 1) * BLOCK_ELEMS : start + E;
    if (end <= range.len) {
        update_elems<N, true>(range, maps, start, E, clip, formula);
    } else {
        const int count = start >= range.len ? 0 : range.len - start < E ? (int)(range.len - start) : E;
        update_elems<N, false>(range, maps, start, count, clip, formula);
    }
}
