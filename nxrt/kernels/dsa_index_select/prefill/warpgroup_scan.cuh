// One look of a block's two warpgroups at keys, 64 at a time: each row's list gets what reaches the
// row's threshold.
//
// The warpgroups take tiles in turn and need not wait for each other but for the tensor cores: one
// starts its products when the other's are nearly done, and adds up its own meanwhile. Keys, biases
// and norms are loaded a tile ahead. How thresholds are found is in warpgroup_filter.cu.
#pragma once

#include "settle.cuh"
#include "warpgroup_products.cuh"

#ifndef NXRT_TURNS
#define NXRT_TURNS 1
#endif

constexpr bool HAS_TURNS = NXRT_TURNS != 0;
constexpr u32 NUM_GROUPS = THREADS / WARPGROUP_SIZE;
constexpr u32 TURN_BARRIER = 1;    // and one for each further warpgroup
constexpr u32 VOTE_BARRIER = 3;    // likewise
constexpr u32 TILES_PER_SKIP = 16;  // of one warpgroup
constexpr u32 SAMPLE_CAPACITY = 3072;

static_assert(NUM_GROUPS == 2, "turns are handed to and fro");

__device__ __forceinline__ float lowest() { return __int_as_float(0xff800000); }

struct alignas(16) Limits {
    float per_norm;   // as the radius has them; 0 where every score is 0
    float floor;
    float norm_limit;
    float threshold;  // what an upper bound must reach at a position up to `last`
    float above;      // the same at a later one: what is just above
    u32 last;
};

struct RowState {
    Limits limits;
    const float* bias;
    uint2* list;
    u32 length;       // of the list, or what it would be had it room
    u32 num_reached;  // entries whose lower bound is enough
    u32 has_bias;     // an entry has a bias that is not 0
    u32 is_active;
    u32 num_sampled;
    u32 rank;         // in the sample, of the threshold
    Radius radius;
};

struct Block {
    RowState* rows;         // [ROWS]
    const float4* weights;  // as place_of_weight says
    u32* sample;            // [ROWS][SAMPLE_CAPACITY], lower bounds
    u32* is_done;           // [NUM_GROUPS]
    SharedOperand queries;
    const Stored* key;      // of the rows' batch
    const float* norms;     // of the rows' batch
    u32 T;
    u32 capacity;
    u32 zero;               // what only the host knows to be 0
};

// Every `stride`-th tile.
struct Pass {
    u32 stride;
    u32 num_tiles;
    bool is_sample;
};

// Of the rows, how many a lane decides about, for each of its two keys.
template <u32 ROWS>
constexpr u32 SHARE = ROWS / 4;

template <u32 ROWS>
struct Biases {
    float values[SHARE<ROWS>][LANE_KEYS];
};

struct Norms {
    float values[LANE_KEYS];
};

// A warpgroup's way through a pass: the tile it looks at next, and whether rows allow its keys.
template <u32 ROWS>
struct Cursor {
    u32 tile;
    Biases<ROWS> biases;
};

__device__ __forceinline__ u32 own_group() { return threadIdx.x / WARPGROUP_SIZE; }

__device__ __forceinline__ u32 begin_of(const Pass& pass, u32 tile) {
    return tile * pass.stride * TILE_KEYS;
}

template <u32 ROWS>
__device__ __forceinline__ u32 first_row() {
    return threadIdx.x % 4 * SHARE<ROWS>;
}

// ---- which tiles

template <u32 ROWS>
__device__ __forceinline__ void load_biases(const Block& block, const Pass& pass,
                                            Cursor<ROWS>& cursor) {
    const u32 begin = begin_of(pass, cursor.tile);
#pragma unroll
    for (u32 r = 0; r < SHARE<ROWS>; ++r) {
        const RowState& row = block.rows[first_row<ROWS>() + r];
        const bool is_looked_at = cursor.tile < pass.num_tiles && row.is_active;
#pragma unroll
        for (u32 i = 0; i < LANE_KEYS; ++i) {
            const u32 offset = key_in_tile() + 8 * i;
            float& value = cursor.biases.values[r][i];
            value = MASK_THRESHOLD;
            if (is_looked_at && offset < block.T - begin) value = __ldcs(row.bias + begin + offset);
        }
    }
}

__device__ __forceinline__ bool any_of_group(bool is_so) {
    return any_of_some(VOTE_BARRIER + own_group(), WARPGROUP_SIZE, is_so);
}

template <u32 ROWS>
__device__ __forceinline__ bool is_allowed(const Biases<ROWS>& biases) {
    bool is_any = false;
#pragma unroll
    for (u32 r = 0; r < SHARE<ROWS>; ++r) {
#pragma unroll
        for (u32 i = 0; i < LANE_KEYS; ++i) is_any |= biases.values[r][i] > MASK_THRESHOLD;
    }
    return is_any;
}

// Say whether some row allows a key of this warpgroup's next tiles; two lanes share a key.
template <u32 ROWS>
__device__ __forceinline__ bool is_any_allowed(const Block& block, const Pass& pass, u32 tile) {
    bool is_any = false;
    for (u32 i = 0; i < TILES_PER_SKIP; ++i, tile += NUM_GROUPS) {
        if (tile >= pass.num_tiles) break;
        const u32 begin = begin_of(pass, tile);
        const u32 offset = threadIdx.x % TILE_KEYS;
        if (offset >= block.T - begin) break;
#pragma unroll
        for (u32 half = 0; half < ROWS / 2; ++half) {
            const u32 r = half * 2 + threadIdx.x % WARPGROUP_SIZE / TILE_KEYS;
            const RowState& row = block.rows[r];
            if (row.is_active) is_any |= __ldg(row.bias + begin + offset) > MASK_THRESHOLD;
        }
    }
    return any_of_group(is_any);
}

// Find the warpgroup's next tile that a row may choose from; its biases go to `biases`, and those
// after it are on their way.
template <u32 ROWS>
__device__ __forceinline__ u32 next_tile(const Block& block, const Pass& pass,
                                         Cursor<ROWS>& cursor, Biases<ROWS>& biases) {
    while (cursor.tile < pass.num_tiles && !any_of_group(is_allowed<ROWS>(cursor.biases))) {
        cursor.tile += NUM_GROUPS;
        while (cursor.tile < pass.num_tiles && !is_any_allowed<ROWS>(block, pass, cursor.tile)) {
            cursor.tile += TILES_PER_SKIP * NUM_GROUPS;
        }
        load_biases(block, pass, cursor);
    }
    const u32 found = cursor.tile;
    biases = cursor.biases;
    cursor.tile += NUM_GROUPS;
    load_biases(block, pass, cursor);
    return found;
}

__device__ __forceinline__ void load_tile(const Block& block, const Pass& pass, u32 tile,
                                          KeyWords& words, Norms& norms) {
    if (tile >= pass.num_tiles) return;
    const u32 begin = begin_of(pass, tile);
    load_key_words(words, block.key, begin, block.T);
#pragma unroll
    for (u32 i = 0; i < LANE_KEYS; ++i) {
        const u32 offset = key_in_tile() + 8 * i;
        norms.values[i] = __ldg(block.norms + (offset < block.T - begin ? begin + offset : 0));
    }
}

// ---- turns

__device__ __forceinline__ void begin_turn() {
    if (HAS_TURNS) sync_some(TURN_BARRIER + own_group(), THREADS);
}

__device__ __forceinline__ void end_turn() {
    if (HAS_TURNS) arrive_at(TURN_BARRIER + (own_group() ^ 1), THREADS);
}

// Hand on the turns that this warpgroup does not need any more until the other needs none either.
__device__ __forceinline__ void pass_on_turns(const Block& block) {
    if (!HAS_TURNS) return;
    volatile u32* const is_done = block.is_done;
    for (bool is_last = false; !is_last;) {
        begin_turn();
        is_last = is_done[own_group() ^ 1] != 0;
        // Within a turn, so that all threads of the other warpgroup see the same in theirs.
        if (threadIdx.x % WARPGROUP_SIZE == 0) is_done[own_group()] = 1;
        __threadfence_block();
        end_turn();
    }
}

// ---- what is kept

// What a lane keeps of its keys for one row, and of what it keeps for a warp.
struct Kept {
    u32 position;  // of the first key
    float totals[LANE_KEYS];
    float lower[LANE_KEYS];
    bool is_kept[LANE_KEYS];
    u32 masks[LANE_KEYS];  // of the lanes that keep
    u32 num_reached;       // by this lane and the 7 others of the row
};

// Of equal scores the earlier wins. Bounds are compared as floats: no score is -0, and none that is
// filtered is a NaN.
__device__ __forceinline__ Kept choose_keys(RowState& row, u32 position, u32 lanes,
                                            const float (&totals)[LANE_KEYS],
                                            const float (&biases)[LANE_KEYS],
                                            const Norms& norms) {
    const Limits limits = row.limits;
    bool has_bias = false;
    Kept kept;
    kept.position = position;
    kept.num_reached = 0;
#pragma unroll
    for (u32 i = 0; i < LANE_KEYS; ++i) {
        const float norm = norms.values[i];
        const float bias = biases[i];
        const bool is_early = position + 8 * i <= limits.last;
        const float threshold = is_early ? limits.threshold : limits.above;
        const float width = __fmaf_ru(limits.per_norm, norm, limits.floor);
        const bool is_filtered = norm < limits.norm_limit;
        const float upper = __fadd_rn(__fadd_ru(totals[i], width), bias);
        const float lower = __fadd_rn(__fadd_rd(totals[i], -width), bias);
        kept.totals[i] = totals[i];
        kept.lower[i] = is_filtered ? lower : lowest();
        kept.is_kept[i] = bias > MASK_THRESHOLD && (!is_filtered || upper >= threshold);
        kept.masks[i] = __ballot_sync(FULL_WARP, kept.is_kept[i]);
        const bool is_reached = kept.is_kept[i] && kept.lower[i] >= threshold;
        kept.num_reached += __popc(__ballot_sync(FULL_WARP, is_reached) & lanes);
        has_bias |= kept.is_kept[i] && bias != 0.0f;
    }
    if (has_bias) row.has_bias = 1;
    return kept;
}

__device__ __forceinline__ void store_entry(const Block& block, const Pass& pass, u32 r, u32 place,
                                            const Kept& kept, u32 i) {
    if (pass.is_sample) {
        u32* const sample = block.sample + r * SAMPLE_CAPACITY;
        if (place < SAMPLE_CAPACITY) sample[place] = total_order_key(kept.lower[i]);
    } else if (place < block.capacity) {
        block.rows[r].list[place] = {kept.position + 8 * i, __float_as_uint(kept.totals[i])};
    }
}

// Append to each row's list what the 8 lanes keep that decide about it, lane j the first of them.
template <u32 ROWS>
__device__ __forceinline__ void append(const Block& block, const Pass& pass,
                                       const Kept (&kept)[SHARE<ROWS>], u32 lanes) {
    const u32 lane_idx = threadIdx.x % WARP_SIZE;
    u32 begin[SHARE<ROWS>] = {};
#pragma unroll
    for (u32 r = 0; r < SHARE<ROWS>; ++r) {
        RowState& row = block.rows[first_row<ROWS>() + r];
        const u32 count = __popc(kept[r].masks[0] & lanes) + __popc(kept[r].masks[1] & lanes);
        if (lane_idx < 4 && count != 0) {
            begin[r] = atomicAdd(&row.length, count);
            atomicAdd(&row.num_reached, kept[r].num_reached);
        }
    }
    const u32 before = lanes & ((1u << lane_idx) - 1);
#pragma unroll
    for (u32 r = 0; r < SHARE<ROWS>; ++r) {
        u32 place = __shfl_sync(FULL_WARP, begin[r], lane_idx % 4);
#pragma unroll
        for (u32 i = 0; i < LANE_KEYS; ++i) {
            const u32 own = place + __popc(kept[r].masks[i] & before);
            if (kept[r].is_kept[i]) {
                store_entry(block, pass, first_row<ROWS>() + r, own, kept[r], i);
            }
            place += __popc(kept[r].masks[i] & lanes);
        }
    }
}

template <u32 ROWS>
__device__ __forceinline__ void keep(const Block& block, const Pass& pass, u32 tile,
                                     const float (&totals)[ROWS][LANE_KEYS],
                                     const Biases<ROWS>& biases, const Norms& norms) {
    const u32 position = begin_of(pass, tile) + key_in_tile();
    const u32 lanes = 0x11111111u << threadIdx.x % 4;
    Kept kept[SHARE<ROWS>];
    u32 any = 0;
#pragma unroll
    for (u32 r = 0; r < SHARE<ROWS>; ++r) {
        RowState& row = block.rows[first_row<ROWS>() + r];
        kept[r] = choose_keys(row, position, lanes, totals[r], biases.values[r], norms);
        any |= kept[r].masks[0] | kept[r].masks[1];
    }
    if (any != 0) append<ROWS>(block, pass, kept, lanes);
}

// ---- the loop

// Look at a pass's tiles; begins and ends without a barrier of the block.
template <u32 ROWS>
__device__ __forceinline__ void scan(const Block& block, const Pass& pass) {
    Cursor<ROWS> cursor;
    Biases<ROWS> next_biases;
    KeyWords next_keys = {};
    Norms next_norms = {};
    cursor.tile = own_group();
    load_biases(block, pass, cursor);
    u32 next = next_tile(block, pass, cursor, next_biases);
    load_tile(block, pass, next, next_keys, next_norms);
    KeyFragments keys = {};
    while (next < pass.num_tiles) {
        const u32 tile = next;
        const Biases<ROWS> biases = next_biases;
        const Norms norms = next_norms;
        float dots[PRODUCT_VALUES];
        arrange(keys, next_keys, block.zero);
        begin_turn();
        start_products(dots, keys, block.queries);
        wait_for_products<1>();
        end_turn();
        next = next_tile(block, pass, cursor, next_biases);
        load_tile(block, pass, next, next_keys, next_norms);
        finish_products(dots);
        float totals[ROWS][LANE_KEYS];
        add_up_heads<ROWS>(block.weights, dots, totals);
        keep(block, pass, tile, totals, biases, norms);
    }
    pass_on_turns(block);
}
