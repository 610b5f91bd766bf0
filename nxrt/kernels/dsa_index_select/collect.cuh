// A block's own keys: those that may be among the row's best.
#pragma once

#include "value_bins.cuh"

// What is the same for all keys of a row.
struct Filter {
    ValueBins bins;
    float norm_limit;  // keys beyond it are wild: nothing is known of them
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
    if (!has_room(shared, problem) && state.count > problem.top_k) {
        const auto low = [&](u32 i) { return all.low(i); };
        raise(state, kth_largest(state, state.count, problem.top_k, low));
        compact(state, all);
    }
    return has_room(shared, problem);
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

__device__ __forceinline__ u32 num_tiles_of(const Problem& problem) {
    return (problem.end - problem.begin + TILE - 1) / TILE;
}

// Where this warp's keys of a tile begin.
__device__ __forceinline__ u64 first_of(const Problem& problem, u32 tile) {
    return problem.begin + static_cast<u64>(tile) * TILE + threadIdx.x / WARP_SIZE * KEYS;
}

__device__ __forceinline__ float bias_of(const Problem& problem, u32 tile) {
    const u32 lane_idx = threadIdx.x % WARP_SIZE;
    const u64 position = first_of(problem, tile) + lane_idx;
    return lane_idx < KEYS && position < problem.end ? __ldg(problem.bias + position)
                                                     : MASK_THRESHOLD;
}

// Start to copy this warp's keys of a tile; its group is closed either way.
__device__ __forceinline__ void copy_tile(const Shared& shared, const Problem& problem, u32 tile,
                                          bool is_wanted) {
    if (is_wanted) {
        const u32 first = static_cast<u32>(first_of(problem, tile));
        const u32 last = problem.T - 1;
        copy_keys(shared.stages + tile % NUM_STAGES * STAGE_CHUNKS, WARPS, problem.key,
                  [&](u32 i) { return first + i < last ? first + i : last; });
    }
    commit_copies();
}

// The biases of this warp's keys, ahead of the keys: what no row may choose is not copied.
struct BiasAhead {
    float now;  // of the sample at first
    float next;
    float after_next;
    float last;
};

// Start to load what comes first: what everything waits for is asked for before the bulk of the keys.
__device__ __forceinline__ BiasAhead start(const Shared& shared, const Problem& problem,
                                           const Stored* query) {
    const u32 lane_idx = threadIdx.x % WARP_SIZE;
    start_query(shared.row, query);
    BiasAhead bias{MASK_THRESHOLD, bias_of(problem, 0), bias_of(problem, 1), bias_of(problem, 2)};
    if (threadIdx.x < SAMPLE_WARPS * WARP_SIZE) {
        copy_keys(shared.sample_keys, SAMPLE_WARPS, problem.key,
                  [&](u32 i) { return sample_position(problem, i); });
        if (lane_idx < KEYS) bias.now = __ldg(problem.bias + sample_position(problem, lane_idx));
    }
    commit_copies();
    for (u32 tile = 0; tile < NUM_STAGES; ++tile) {
        copy_tile(shared, problem, tile, first_of(problem, tile) < problem.end);
    }
    return bias;
}

// Append what each lane keeps. A value that is NaN is not in a bin.
__device__ __forceinline__ void append(const Shared& shared, const Filter& filter, bool is_kept,
                                       u32 place, float value) {
    SelectState& state = *shared.state;
    const u32 index = take_place(&state.count, is_kept);
    if (!is_kept) return;
    shared.candidates.places[index] = place;
    shared.candidates.values[index] = value;
    if (value == value) {
        atomicAdd(&state.bins[filter.bins.bin_of(value)], 1u);
    } else {
        atomicAdd(&state.num_wild, 1u);
    }
}

// Keep of this warp's keys those that may be chosen.
__device__ __forceinline__ void filter_keys(const Shared& shared, const Filter& filter, u32 first,
                                            const KeyTile& tile, float total, float norm,
                                            float bias) {
    const u32 position = first + threadIdx.x % WARP_SIZE;
    const u64 threshold = *static_cast<volatile u64*>(&shared.state->threshold);
    float value = __fadd_rn(total, bias);
    // A sum that overflows says nothing, unless the bias is infinite itself.
    const bool is_tame = norm <= filter.norm_limit && fabsf(value) <= fmaxf(fabsf(bias), 0x1p127f);
    value = is_tame ? value : __uint_as_float(CANONICAL_NAN);
    const float highest = __fadd_ru(value, radius_at(value, shared.candidates.radius));
    const bool is_high = !is_tame || ranked(total_order_key(highest), position) >= threshold;
    const bool is_kept = bias > MASK_THRESHOLD && is_high;
    u32 place = position;
    if (__any_sync(FULL_WARP, is_kept && total == 0.0f)) {
        if (is_certainly_zero(shared.row, tile, norm) && is_tame) place |= IS_EXACT;
    }
    append(shared, filter, is_kept, place, value);
}

// What the sample tells of the row, its norms having been added up by the warps that had none of it.
__device__ __forceinline__ Filter filter_from_sample(Shared& shared, float largest_square) {
    QueryRow& row = shared.row;
    row.radius = radius_from(row, norms_of<THREADS - SUM_THREADS>(row, largest_square));
    const Quartiles quartiles = quartiles_of(*shared.sample);
    const float limit = fminf(2.0f * quartiles.norm, row.radius.norm_limit);
    // Where no key is filtered the radius may be anything, and serves nothing.
    shared.candidates.radius = limit >= 0.0f ? radius_of_total(row.radius, limit) : 0.0f;
    return {bins_of(quartiles), limit};
}

// Collect the block's candidates by their bounds: look at the sample, then at the block's keys. False
// where bounds do not thin out the keys enough. After start, and finish_query.
__device__ __forceinline__ bool collect(Shared& shared, const Problem& problem, BiasAhead bias,
                                        Filter& filter) {
    const bool has_sample = threadIdx.x < SAMPLE_WARPS * WARP_SIZE;
    float largest_square = 0.0f;
    if (!has_sample) largest_square = add_heads<THREADS - SUM_THREADS>(shared.row);
    bool has_room = true;
#pragma unroll 1
    for (u32 pass = 0; pass < 2; ++pass) {
        const bool is_sample = pass == 0;
        const u32 num_tiles = is_sample ? has_sample : num_tiles_of(problem);
        has_room = for_tiles(shared, problem, filter, num_tiles, [&](u32 tile_idx) {
            const bool is_used = is_sample || __any_sync(FULL_WARP, bias.now > MASK_THRESHOLD);
            KeyTile tile;
            float norm = 0.0f;
            if (!is_sample) wait_for_copies<NUM_STAGES - 1>();
            if (is_used) {
                const uint4* stage = shared.stages + tile_idx % NUM_STAGES * STAGE_CHUNKS;
                if (is_sample) stage = shared.sample_keys;
                load_keys(tile, stage, is_sample ? SAMPLE_WARPS : WARPS);
                norm = norm_of_key(tile);  // needs all of the tile, so that its stage is free
            }
            const float far = is_sample ? 0.0f : bias_of(problem, tile_idx + NUM_STAGES + 1);
            if (!is_sample) {
                copy_tile(shared, problem, tile_idx + NUM_STAGES,
                          __any_sync(FULL_WARP, bias.after_next > MASK_THRESHOLD));
            }
            if (is_used) {
                const float total = total_of(shared.row, tile);
                if (is_sample) {
                    add_to_sample(shared, total, norm, bias.now);
                } else {
                    const u32 first = static_cast<u32>(first_of(problem, tile_idx));
                    filter_keys(shared, filter, first, tile, total, norm, bias.now);
                }
            }
            if (!is_sample) bias = {bias.next, bias.after_next, far, far};
        });
        if (is_sample) {
            filter = filter_from_sample(shared, largest_square);
            bias = {bias.next, bias.after_next, bias.last, 0.0f};
        }
    }
    wait_for_copies<0>();
    __syncthreads();
    return has_room;
}

// Lane i scores key first + i.
__device__ __forceinline__ float exact_key(const Shared& shared, const Problem& problem, u64 first) {
    const u32 lane_idx = threadIdx.x % WARP_SIZE;
    float mine = 0.0f;
    for (u32 i = 0; i < KEYS && first + i < problem.end; i += EXACT_KEYS) {
        const u64 left = problem.end - first - i;
        const u32 count = left < EXACT_KEYS ? static_cast<u32>(left) : EXACT_KEYS;
        u32 position[EXACT_KEYS];
#pragma unroll
        for (u32 other = 0; other < EXACT_KEYS; ++other) {
            position[other] = static_cast<u32>(first + i + (other < count ? other : 0));
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
        const u64 first = first_of(problem, tile_idx);
        const u32 position = static_cast<u32>(first) + threadIdx.x % WARP_SIZE;
        const bool is_allowed = bias_of(problem, tile_idx) > MASK_THRESHOLD;
        if (!__any_sync(FULL_WARP, is_allowed)) return;
        const float score = exact_key(shared, problem, first);
        const u64 threshold = *static_cast<volatile u64*>(&shared.state->threshold);
        const bool is_kept =
            is_allowed && ranked(total_order_key(score), position) >= threshold;
        append(shared, filter, is_kept, position | IS_EXACT, score);
    });
}
