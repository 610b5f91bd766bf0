// One look of a block's two warpgroups at keys, 64 at a time: each row's list gets what reaches the
// row's threshold.
//
// A warpgroup multiplies its keys with half of the rows and then with the other half. It adds up
// one half while the other's products are under way, also those of its next keys, so that the
// tensor cores always have work of both warpgroups, which need not wait for each other. Keys are
// loaded a tile ahead. How thresholds are found is in warpgroup_filter.cu.
#pragma once

#include "settle.cuh"
#include "warpgroup_products.cuh"

constexpr u32 NUM_GROUPS = THREADS / WARPGROUP_SIZE;
constexpr u32 VOTE_BARRIER = 1;     // and one for each further warpgroup
constexpr u32 TILES_PER_SKIP = 16;  // of one warpgroup
constexpr u32 SAMPLE_CAPACITY = 3072;
constexpr u32 REACHED = 1u << 16;
constexpr u32 NO_PLACE = REACHED - 1;  // beyond every capacity

__device__ __forceinline__ float lowest() { return __int_as_float(0xff800000); }

struct alignas(16) Limits {
    float per_norm;   // as the radius has them; 0 where every score is 0
    float floor;
    float norm_limit;
    float threshold;  // what an upper bound must reach at a position up to `last`
    float above;      // the same at a later one: what is just above
    u32 last;
    u32 counts;       // entries, and in units of REACHED those whose lower bound is enough
    u32 num_dropped;  // what came when `counts` had more than there is room for
};

struct RowState {
    Limits limits;
    const float* bias;
    uint2* list;
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
    SharedOperand queries;
    const Stored* key;      // of the rows' batch
    const float* norms;     // of the rows' batch
    u32 T;
    u32 capacity;
    u32 zero;               // what only the host knows to be 0
};

struct Pass {
    u32 stride;     // in keys, from tile to tile
    u32 num_tiles;
    bool is_sample;
    u32 capacity;   // of a row's sample or list
};

template <u32 ROWS>
struct Biases {
    float values[HALVES][OWN_KEYS<ROWS>];
};

template <u32 ROWS>
struct Norms {
    float values[OWN_KEYS<ROWS>];
};

// What a lane has throughout a pass.
struct Lane {
    const float* biases[HALVES];  // of its rows, from its key in the first tile on
    u32 actives;                  // bit `half`: whether the row is active
    uint2* list;                  // of its first row
    const Stored* key;            // of its part of the first key
    const float* norms;
    u32 vote_barrier;
};

// A warpgroup's way through a pass: the tile it looks at next, and whether rows allow its keys.
template <u32 ROWS>
struct Cursor {
    u32 tile;
    Biases<ROWS> biases;
};

// The same for all lanes, so that the compiler knows it, too.
__device__ __forceinline__ u32 own_group() {
    return __shfl_sync(FULL_WARP, threadIdx.x / WARPGROUP_SIZE, 0);
}

__device__ __forceinline__ u32 length_of(const RowState& row) {
    return row.limits.counts % REACHED + row.limits.num_dropped;
}

template <u32 ROWS>
__device__ __forceinline__ Lane own_lane(const Block& block) {
    Lane lane;
    lane.actives = 0;
#pragma unroll
    for (u32 half = 0; half < HALVES; ++half) {
        const RowState& row = block.rows[own_row<ROWS>(half)];
        lane.biases[half] = pinned(row.bias + own_key<ROWS>());
        lane.actives |= row.is_active ? 1u << half : 0;
    }
    lane.list = pinned(block.rows[own_row<ROWS>(0)].list);
    lane.key = pinned(block.key + threadIdx.x % 4 * 8);
    lane.norms = pinned(block.norms);
    lane.vote_barrier = VOTE_BARRIER + own_group();
    return lane;
}

// ---- which tiles

// Positions of tiles past the last are past the last key.
template <u32 ROWS>
__device__ __forceinline__ void load_biases(const Block& block, const Pass& pass,
                                            const Lane& lane, u32 tile, Biases<ROWS>& biases) {
    const u32 begin = tile * pass.stride;
    const u32 position = begin + own_key<ROWS>();
#pragma unroll
    for (u32 half = 0; half < HALVES; ++half) {
        const float* const source = lane.biases[half] + begin;
        const u32 end = (lane.actives >> half & 1) != 0 ? block.T : 0;
#pragma unroll
        for (u32 i = 0; i < OWN_KEYS<ROWS>; ++i) {
            float& value = biases.values[half][i];
            value = MASK_THRESHOLD;
            if (position + 8 * i < end) value = __ldcs(source + 8 * i);
        }
    }
}

template <u32 ROWS>
__device__ __forceinline__ Biases<ROWS> masked() {
    Biases<ROWS> biases;
#pragma unroll
    for (u32 half = 0; half < HALVES; ++half) {
#pragma unroll
        for (u32 i = 0; i < OWN_KEYS<ROWS>; ++i) biases.values[half][i] = MASK_THRESHOLD;
    }
    return biases;
}

__device__ __forceinline__ bool any_of_group(const Lane& lane, bool is_so) {
    return any_of_some(lane.vote_barrier, WARPGROUP_SIZE, is_so);
}

template <u32 ROWS>
__device__ __forceinline__ bool is_allowed(const Biases<ROWS>& biases) {
    bool is_any = false;
#pragma unroll
    for (u32 half = 0; half < HALVES; ++half) {
#pragma unroll
        for (u32 i = 0; i < OWN_KEYS<ROWS>; ++i) {
            is_any |= biases.values[half][i] > MASK_THRESHOLD;
        }
    }
    return is_any;
}

// Say whether some row allows a key of this warpgroup's next tiles; two lanes share a key.
template <u32 ROWS>
__device__ __forceinline__ bool is_any_allowed(const Block& block, const Pass& pass,
                                               const Lane& lane, u32 tile) {
    bool is_any = false;
    for (u32 i = 0; i < TILES_PER_SKIP; ++i, tile += NUM_GROUPS) {
        if (tile >= pass.num_tiles) break;
        const u32 begin = tile * pass.stride;
        const u32 offset = threadIdx.x % TILE_KEYS;
        if (offset >= block.T - begin) break;
#pragma unroll
        for (u32 half = 0; half < ROWS / 2; ++half) {
            const u32 r = half * 2 + threadIdx.x % WARPGROUP_SIZE / TILE_KEYS;
            const RowState& row = block.rows[r];
            if (row.is_active) is_any |= __ldg(row.bias + begin + offset) > MASK_THRESHOLD;
        }
    }
    return any_of_group(lane, is_any);
}

// Find the warpgroup's next tile that a row may choose from; the biases after it are on their way.
template <u32 ROWS>
__device__ __forceinline__ u32 next_tile(const Block& block, const Pass& pass,
                                         const Lane& lane, Cursor<ROWS>& cursor) {
    while (cursor.tile < pass.num_tiles && !any_of_group(lane, is_allowed<ROWS>(cursor.biases))) {
        cursor.tile += NUM_GROUPS;
        while (cursor.tile < pass.num_tiles &&
               !is_any_allowed<ROWS>(block, pass, lane, cursor.tile)) {
            cursor.tile += TILES_PER_SKIP * NUM_GROUPS;
        }
        load_biases(block, pass, lane, cursor.tile, cursor.biases);
    }
    const u32 found = cursor.tile;
    cursor.tile += NUM_GROUPS;
    load_biases(block, pass, lane, cursor.tile, cursor.biases);
    return found;
}

__device__ __forceinline__ void load_keys(const Block& block, const Pass& pass, const Lane& lane,
                                          u32 tile, KeyWords& words) {
    if (tile >= pass.num_tiles) return;
#pragma unroll
    for (u32 i = 0; i < LANE_KEYS; ++i) {
        const u32 position = tile * pass.stride + key_in_tile() + 8 * i;
        load_key(words.chunks[i], lane.key, min(position, block.T - 1));
    }
}

// ---- what is kept

// What a lane may keep of its keys for one row.
template <u32 ROWS>
struct Kept {
    float lower[OWN_KEYS<ROWS>];
    u32 counts[OWN_KEYS<ROWS>];  // what it adds to the row's
    bool is_kept[OWN_KEYS<ROWS>];
    bool has_room;
    bool has_bias;
};

// Of equal scores the earlier wins. Bounds are compared as floats: no score is -0, and none that is
// filtered is a NaN.
template <u32 ROWS>
__device__ __forceinline__ Kept<ROWS> choose_keys(const RowState& row, u32 capacity, u32 position,
                                                  const float (&totals)[OWN_KEYS<ROWS>],
                                                  const float (&biases)[OWN_KEYS<ROWS>],
                                                  const Norms<ROWS>& norms) {
    const Limits limits = row.limits;
    Kept<ROWS> kept;
    kept.has_bias = false;
    kept.has_room = limits.counts % REACHED <= capacity;
#pragma unroll
    for (u32 i = 0; i < OWN_KEYS<ROWS>; ++i) {
        const float norm = norms.values[i];
        const float bias = biases[i];
        const bool is_early = position + 8 * i <= limits.last;
        const float threshold = is_early ? limits.threshold : limits.above;
        const float width = __fmaf_ru(limits.per_norm, norm, limits.floor);
        const bool is_filtered = norm < limits.norm_limit;
        const float upper = __fadd_rn(__fadd_ru(totals[i], width), bias);
        const float lower = __fadd_rn(__fadd_rd(totals[i], -width), bias);
        kept.lower[i] = is_filtered ? lower : lowest();
        kept.counts[i] = kept.lower[i] >= threshold ? 1 + REACHED : 1;
        kept.is_kept[i] = bias > MASK_THRESHOLD && (!is_filtered || upper >= threshold);
        kept.has_bias |= kept.is_kept[i] && bias != 0.0f;
    }
    return kept;
}

// What a warpgroup's last products are about.
template <u32 ROWS>
struct Current {
    u32 tile;
    Biases<ROWS> biases;
    Norms<ROWS> norms;
};

// Biases have been loaded before, to find the tile; to hold them would take registers.
template <u32 ROWS>
__device__ __forceinline__ void load_current(const Block& block, const Pass& pass, const Lane& lane,
                                             u32 tile, Current<ROWS>& current) {
    current.tile = tile;
    load_biases(block, pass, lane, tile, current.biases);
#pragma unroll
    for (u32 i = 0; i < OWN_KEYS<ROWS>; ++i) {
        const u32 position = tile * pass.stride + own_key<ROWS>() + 8 * i;
        current.norms.values[i] = __ldg(lane.norms + min(position, block.T - 1));
    }
}

template <u32 ROWS>
__device__ __forceinline__ void tell_biases(const Block& block, const Kept<ROWS> (&kept)[HALVES]) {
#pragma unroll
    for (u32 half = 0; half < HALVES; ++half) {
        if (kept[half].has_bias) block.rows[own_row<ROWS>(half)].has_bias = 1;
    }
}

// Take a place in the row's list or sample for each entry: NO_PLACE where there is none. What comes
// when there is no room is counted apart, so that `counts` stays small: until all have seen that,
// each warpgroup may add a tile or two.
template <u32 ROWS>
__device__ __forceinline__ void take_places(const Block& block, const Kept<ROWS> (&kept)[HALVES],
                                            u32 (&places)[HALVES][OWN_KEYS<ROWS>]) {
#pragma unroll
    for (u32 half = 0; half < HALVES; ++half) {
        u32* const counts = &block.rows[own_row<ROWS>(half)].limits.counts;
#pragma unroll
        for (u32 i = 0; i < OWN_KEYS<ROWS>; ++i) {
            const bool is_taken = kept[half].is_kept[i] && kept[half].has_room;
            places[half][i] = add_if(is_taken, counts, kept[half].counts[i], NO_PLACE);
        }
    }
    if (kept[0].has_room && kept[1].has_room) return;
#pragma unroll
    for (u32 half = 0; half < HALVES; ++half) {
        u32 num_dropped = 0;
#pragma unroll
        for (u32 i = 0; i < OWN_KEYS<ROWS>; ++i) num_dropped += kept[half].is_kept[i];
        if (kept[half].has_room) continue;
        atomicAdd(&block.rows[own_row<ROWS>(half)].limits.num_dropped, num_dropped);
    }
}

template <u32 ROWS>
__device__ __forceinline__ void store_sample(const Block& block, const Kept<ROWS> (&kept)[HALVES],
                                             const u32 (&places)[HALVES][OWN_KEYS<ROWS>]) {
#pragma unroll
    for (u32 half = 0; half < HALVES; ++half) {
        u32* const sample = block.sample + own_row<ROWS>(half) * SAMPLE_CAPACITY;
#pragma unroll
        for (u32 i = 0; i < OWN_KEYS<ROWS>; ++i) {
            const u32 place = places[half][i] % REACHED;
            if (place < SAMPLE_CAPACITY) sample[place] = total_order_key(kept[half].lower[i]);
        }
    }
}

template <u32 ROWS>
__device__ __forceinline__ void store_entries(const Block& block, const Lane& lane, u32 position,
                                              const float (&totals)[HALVES][OWN_KEYS<ROWS>],
                                              const u32 (&places)[HALVES][OWN_KEYS<ROWS>]) {
#pragma unroll
    for (u32 half = 0; half < HALVES; ++half) {
        uint2* const list = lane.list + half * ROWS / HALVES * block.capacity;
#pragma unroll
        for (u32 i = 0; i < OWN_KEYS<ROWS>; ++i) {
            const u32 place = places[half][i] % REACHED;
            const uint2 entry = {position + 8 * i, __float_as_uint(totals[half][i])};
            store_if(place < block.capacity, list + place, entry);
        }
    }
}

template <u32 ROWS>
__device__ __forceinline__ void keep(const Block& block, const Pass& pass,
                                     const Current<ROWS>& current,
                                     const float (&totals)[HALVES][OWN_KEYS<ROWS>],
                                     const Lane& lane) {
    const u32 position = current.tile * pass.stride + own_key<ROWS>();
    Kept<ROWS> kept[HALVES];
#pragma unroll
    for (u32 half = 0; half < HALVES; ++half) {
        kept[half] = choose_keys<ROWS>(block.rows[own_row<ROWS>(half)], pass.capacity, position,
                                       totals[half], current.biases.values[half], current.norms);
    }
    if (kept[0].has_bias || kept[1].has_bias) tell_biases<ROWS>(block, kept);
    u32 places[HALVES][OWN_KEYS<ROWS>];
    take_places<ROWS>(block, kept, places);
    if (pass.is_sample) {
        store_sample<ROWS>(block, kept, places);
    } else {
        store_entries<ROWS>(block, lane, position, totals, places);
    }
}

// ---- the loop

// Look at a pass's tiles; begins and ends without a barrier of the block. Between rounds no
// products are under way: the compiler serializes those that it cannot follow. The first round adds
// up nothing, of keys that nobody keeps.
template <u32 ROWS>
__device__ __forceinline__ void scan(const Block& block, const Pass& pass) {
    const Lane lane = own_lane<ROWS>(block);
    Cursor<ROWS> cursor;
    cursor.tile = own_group();
    load_biases(block, pass, lane, cursor.tile, cursor.biases);
    u32 next = next_tile(block, pass, lane, cursor);
    KeyWords words = {};
    load_keys(block, pass, lane, next, words);
    Current<ROWS> current = {0, masked<ROWS>(), {}};
    KeyFragments keys = {};
    float dots[HALVES][PRODUCT_VALUES] = {};
    float totals[HALVES][OWN_KEYS<ROWS>] = {};
    while (next < pass.num_tiles) {
        arrange(keys, words, block.zero);
        start_products(dots[0], keys, block.queries, 0);
        finish_products<1>(dots[1]);  // they are, but the compiler has lost sight of it
        add_up_heads<ROWS>(block.weights, 1, dots[1], totals[1]);
        start_products(dots[1], keys, block.queries, 1);
        const u32 tile = next;
        next = next_tile(block, pass, lane, cursor);
        load_keys(block, pass, lane, next, words);
        keep<ROWS>(block, pass, current, totals, lane);
        load_current(block, pass, lane, tile, current);
        finish_products<1>(dots[0]);
        add_up_heads<ROWS>(block.weights, 0, dots[0], totals[0]);
        finish_products<0>(dots[1]);
    }
    add_up_heads<ROWS>(block.weights, 1, dots[1], totals[1]);
    keep<ROWS>(block, pass, current, totals, lane);
}
