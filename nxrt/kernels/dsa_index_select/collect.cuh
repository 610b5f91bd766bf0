// A block's own keys: those that may be among the row's best.
#pragma once

#include "value_bins.cuh"

// What is the same for all keys of a row.
struct Filter {
    ValueBins bins;
    float norm_limit;  // keys up to it have the radius
    float wide_limit;  // keys up to it a wider one, and beyond it nothing is known
};

__device__ __forceinline__ bool has_room(const Shared& shared, const Problem& problem) {
    const u32 count = *static_cast<volatile u32*>(&shared.state->count);
    return count + TILE <= problem.capacity;
}

// Make room, where there is none, by what is known so far; false where too many may be chosen. All
// threads call. Ends with a barrier.
__device__ __forceinline__ bool make_room(const Shared& shared, const Problem& problem,
                                          const Filter& filter) {
    SelectState& state = *shared.state;
    const Candidates& all = shared.candidates;
    if (choose_bin(state, state.bins, problem.top_k) >= problem.top_k) {
        const float bottom = filter.bins.bottom_of(state.digit);
        const float lowest = __fadd_rd(bottom, -radius_at(bottom, all.radius));
        raise(state, ranked(total_order_key(lowest), 0xffffffffu));
        compact(state, all);
    }
    const bool is_full = !has_room(shared, problem) && state.count > problem.top_k;
    __syncthreads();  // all have seen the same
    if (is_full) {
        const auto low = [&](u32 i) { return all.low(i); };
        raise(state, kth_largest(state, state.count, problem.top_k, low));
        compact(state, all);
    }
    const bool has_some = has_room(shared, problem);
    __syncthreads();  // before anyone appends again
    return has_some;
}

// Let every warp work through its tiles, `work(tile)` being one that leaves the list no longer than
// a warp's keys longer; make room when it is needed. False where there is none to be made. Ends with a
// barrier.
template <class Work>
__device__ __forceinline__ bool for_tiles(const Shared& shared, const Problem& problem,
                                          const Filter& filter, u32 num_tiles, Work work) {
    u32 tile = 0;
    for (;;) {
        while (tile < num_tiles && has_room(shared, problem)) work(tile++);
        // Whoever has no room, or no tiles, waits here for the others to come to the same.
        if (__syncthreads_and(tile == num_tiles)) return true;
        if (!make_room(shared, problem, filter)) return false;
    }
}

// Warp 0 has the sample where its first keys would be.
__device__ __forceinline__ u32 num_tiles_of(const Problem& problem) {
    return (problem.end - problem.begin + KEYS + TILE - 1) / TILE;
}

// Where this warp's keys of a tile begin; those that has_key denies are none of the block's.
__device__ __forceinline__ u32 first_of(const Problem& problem, u32 tile) {
    return problem.begin + tile * TILE + problem.warp_idx * KEYS - KEYS;
}

__device__ __forceinline__ bool has_key(const Problem& problem, u32 position) {
    return position - problem.begin < problem.end - problem.begin;
}

__device__ __forceinline__ float bias_of(const Problem& problem, u32 tile) {
    const u32 lane_idx = threadIdx.x % WARP_SIZE;
    const u32 position = first_of(problem, tile) + lane_idx;
    return lane_idx < KEYS && has_key(problem, position) ? __ldg(problem.bias + position)
                                                         : MASK_THRESHOLD;
}

// A warp's copies of keys: a bit for each stage.
struct Feed {
    u32 is_under_way;
    u32 phases;  // of the next wait
};

// Start to copy this warp's keys of a tile. The lanes must have read what was there.
__device__ __forceinline__ void copy_tile(const Shared& shared, const Problem& problem, Feed& feed,
                                          u32 tile) {
    const u32 index = problem.warp_idx * NUM_STAGES + tile % NUM_STAGES;
    const u32 first = first_of(problem, tile);
    const u32 left = problem.end - first;
    const u32 nbytes = (left < KEYS ? left : KEYS) * CHUNKS * 16;
    feed.is_under_way |= 1u << tile % NUM_STAGES;
    if (!elect_lane()) return;
    expect_bytes(shared.arrivals + index, nbytes);
    copy_bulk(shared.stages + index * WARP_CHUNKS, problem.key + static_cast<u64>(first) * D, nbytes,
              shared.arrivals + index);
}

// Wait for this warp's keys of a tile, if they are under way, and return where they are.
__device__ __forceinline__ const uint4* wait_for_tile(const Shared& shared, const Problem& problem,
                                                      Feed& feed, u32 tile) {
    const u32 stage = tile % NUM_STAGES;
    const u32 index = problem.warp_idx * NUM_STAGES + stage;
    if (feed.is_under_way >> stage & 1) {
        wait_for_bytes(shared.arrivals + index, feed.phases >> stage & 1);
        feed.is_under_way ^= 1u << stage;
        feed.phases ^= 1u << stage;
    }
    return shared.stages + index * WARP_CHUNKS;
}

// What is loaded ahead of the keys: the biases of this warp's next tiles, as what no row may choose is
// not copied, and the sample's; and a head's weight.
struct Ahead {
    float bias[NUM_STAGES + 1];
    float sample_bias;  // of warp 0
    Stored weight;
};

// Start to load what comes first: what everything waits for is asked for before the bulk of the keys.
// One barrier.
__device__ __forceinline__ Ahead start(const Shared& shared, const Problem& problem, Feed& feed,
                                       const Stored* query, const Stored* weights) {
    Ahead ahead{};
    start_query(shared.row, query);
    start_sample(shared, problem);
    commit_copies();
    if (threadIdx.x < shared.row.H) ahead.weight = weights[threadIdx.x];
    if (problem.warp_idx == 0) {
        ahead.sample_bias = __ldg(problem.bias + sample_position(problem.T, threadIdx.x % KEYS));
    }
#pragma unroll
    for (u32 i = 0; i <= NUM_STAGES; ++i) ahead.bias[i] = bias_of(problem, i);
    __syncthreads();
    for (u32 tile = 0; tile < NUM_STAGES; ++tile) {
        if (has_key(problem, first_of(problem, tile))) copy_tile(shared, problem, feed, tile);
    }
    return ahead;
}

// Append what each lane keeps. What is wide or unknown is not in a bin.
__device__ __forceinline__ void append(const Shared& shared, const Filter& filter, bool is_kept,
                                       u32 place, float value) {
    SelectState& state = *shared.state;
    const u32 index = take_place(&state.count, is_kept);
    if (!is_kept) return;
    shared.candidates.places[index] = place;
    shared.candidates.values[index] = value;
    if (value == value && !(place & IS_WIDE)) {
        atomicAdd(&state.bins[filter.bins.bin_of(value)], 1u);
    } else {
        atomicAdd(&state.num_wild, 1u);
    }
}

// What is known of the row, once the warps have found it.
__device__ __forceinline__ Filter filter_of(Shared& shared) {
    QueryRow& row = shared.row;
    row.radius = radius_from(row, *shared.norms);
    const Quartiles quartiles = *shared.quartiles;
    const float limit = fminf(quartiles.norm_limit, row.radius.norm_limit / WIDE);
    const float radius = radius_of_total(row.radius, limit);
    const bool is_usable = limit >= 0.0f && WIDE * radius < LARGE;
    // Where no key is filtered the radius serves nothing, but must be a number.
    shared.candidates.radius = is_usable ? radius : 0.0f;
    return {bins_of(quartiles), is_usable ? limit : -1.0f, is_usable ? WIDE * limit : -1.0f};
}

// What is known of this warp's keys.
struct Scored {
    KeyTile tile;
    float total;
    float norm;
};

// Score keys that are in shared memory, and start to copy those of a later tile where they were.
__device__ __forceinline__ void score_tile(const Shared& shared, const Problem& problem, Feed& feed,
                                           bool is_used, bool has_later, u32 tile_idx,
                                           const uint4* stage, Scored& scored) {
    if (is_used) load_keys(scored.tile, stage);
    __syncwarp();  // the stage has been read
    if (has_later) copy_tile(shared, problem, feed, tile_idx + NUM_STAGES);
    if (!is_used) return;
    scored.norm = norm_of_key(scored.tile);
    scored.total = total_of(shared.row, scored.tile);
}

// Keep of this warp's keys those that may be chosen.
__device__ __forceinline__ void filter_keys(const Shared& shared, const Filter& filter, u32 first,
                                            const Scored& scored, float bias) {
    const float norm = scored.norm;
    const u32 position = first + threadIdx.x % WARP_SIZE;
    const u64 threshold = *static_cast<volatile u64*>(&shared.state->threshold);
    float value = __fadd_rn(scored.total, bias);
    // A sum that overflows says nothing, unless the bias is infinite itself.
    const bool is_known = norm <= filter.wide_limit && fabsf(value) <= fmaxf(fabsf(bias), 0x1p127f);
    const bool is_wide = norm > filter.norm_limit;
    value = is_known ? value : __uint_as_float(CANONICAL_NAN);
    const float radius = shared.candidates.radius;
    const float highest = __fadd_ru(value, radius_at(value, is_wide ? WIDE * radius : radius));
    const bool is_high = !is_known || ranked(total_order_key(highest), position) >= threshold;
    const bool is_kept = bias > MASK_THRESHOLD && is_high;
    u32 place = is_wide ? position | IS_WIDE : position;
    if (__any_sync(FULL_WARP, is_kept && scored.total == 0.0f)) {
        if (is_certainly_zero(shared.row, scored.tile, norm) && is_known) place = position | IS_EXACT;
    }
    append(shared, filter, is_kept, place, value);
}

// Let the first warps find what is to be known of the row: the sample is scored.
__device__ __forceinline__ Filter look_at_row(Shared& shared, const Problem& problem,
                                              const Ahead& ahead, const Scored& scored) {
    if (problem.warp_idx == 0) {
        find_quartiles(*shared.quartiles, scored.total, scored.norm, ahead.sample_bias);
    }
    __syncthreads();
    return filter_of(shared);
}

// Collect the block's candidates by their bounds. False where these do not thin out the keys enough.
__device__ __forceinline__ bool collect(Shared& shared, const Problem& problem, Filter& filter,
                                        Feed& feed, Ahead& ahead) {
    if (problem.warp_idx == 1) weigh_heads(shared.row, *shared.norms);
    if (problem.warp_idx == 2) measure_heads(shared.row, *shared.norms);
    const u32 num_tiles = num_tiles_of(problem);
    const bool has_room = for_tiles(shared, problem, filter, num_tiles, [&](u32 tile_idx) {
        const bool is_sample = tile_idx == 0 && problem.warp_idx == 0;
        const bool is_used = __any_sync(FULL_WARP, ahead.bias[0] > MASK_THRESHOLD);
        const uint4* stage = wait_for_tile(shared, problem, feed, tile_idx);
        if (is_sample) stage = shared.sample;
        const float far = bias_of(problem, tile_idx + NUM_STAGES + 1);
        const bool has_later = __any_sync(FULL_WARP, ahead.bias[NUM_STAGES] > MASK_THRESHOLD);
        Scored scored;
        score_tile(shared, problem, feed, is_used || is_sample, has_later, tile_idx, stage, scored);
        if (tile_idx == 0) filter = look_at_row(shared, problem, ahead, scored);
        if (is_used) filter_keys(shared, filter, first_of(problem, tile_idx), scored, ahead.bias[0]);
#pragma unroll
        for (u32 i = 0; i < NUM_STAGES; ++i) ahead.bias[i] = ahead.bias[i + 1];
        ahead.bias[NUM_STAGES] = far;
    });
    for (u32 stage = 0; stage < NUM_STAGES; ++stage) wait_for_tile(shared, problem, feed, stage);
    __syncthreads();
    return has_room;
}

// Lane i scores key first + i.
__device__ __forceinline__ float exact_key(const Shared& shared, const Problem& problem, u32 first) {
    const u32 lane_idx = threadIdx.x % WARP_SIZE;
    float mine = 0.0f;
    for (u32 i = 0; i < KEYS && has_key(problem, first + i); i += EXACT_KEYS) {
        const u32 left = problem.end - first - i;
        const u32 count = left < EXACT_KEYS ? left : EXACT_KEYS;
        u32 position[EXACT_KEYS];
#pragma unroll
        for (u32 other = 0; other < EXACT_KEYS; ++other) {
            position[other] = first + i + (other < count ? other : 0);
        }
        const float score =
            exact_scores<EXACT_KEYS>(shared.row, problem.key, problem.bias, position, count);
        const float of_lane = __shfl_sync(FULL_WARP, score, lane_idx % EXACT_KEYS);
        if (lane_idx / EXACT_KEYS == i / EXACT_KEYS) mine = of_lane;
    }
    return mine;
}

// The same by exact scores, of which never too many may be chosen. Slow, and rarely called.
__device__ __forceinline__ void collect_exactly(const Shared& shared, const Problem& problem,
                                                const Filter& filter) {
    for_tiles(shared, problem, filter, num_tiles_of(problem), [&](u32 tile_idx) {
        const u32 first = first_of(problem, tile_idx);
        const u32 position = first + threadIdx.x % WARP_SIZE;
        const bool is_allowed = bias_of(problem, tile_idx) > MASK_THRESHOLD;
        if (!__any_sync(FULL_WARP, is_allowed)) return;
        const float score = exact_key(shared, problem, first);
        const u64 threshold = *static_cast<volatile u64*>(&shared.state->threshold);
        const bool is_kept =
            is_allowed && ranked(total_order_key(score), position) >= threshold;
        append(shared, filter, is_kept, position | IS_EXACT, score);
    });
}
