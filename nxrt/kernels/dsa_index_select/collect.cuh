// A block's own keys: those that may be among the row's best.
#pragma once

#include "block_memory.cuh"

// Append in order what each lane keeps; return the new number. One barrier.
__device__ __forceinline__ u32 append(const Shared& shared, u32 parity, u32 n, bool is_kept,
                                      u32 position, const Bounds& bounds) {
    const u32 lane_idx = threadIdx.x % WARP_SIZE;
    const u32 warp_idx = threadIdx.x / WARP_SIZE;
    u32* const masks = shared.state->masks[parity];
    const u32 mask = __ballot_sync(FULL_WARP, is_kept);
    if (lane_idx == 0) masks[warp_idx] = mask;
    __syncthreads();
    u32 place = n + __popc(mask & ((1u << lane_idx) - 1));
    u32 total = n;
    for (u32 warp = 0; warp < WARPS; ++warp) {
        const u32 count = __popc(masks[warp]);
        if (warp < warp_idx) place += count;
        total += count;
    }
    if (is_kept) {
        shared.candidates.position[place] = position;
        shared.candidates.lower[place] = bounds.lower;
        shared.candidates.upper[place] = bounds.upper;
    }
    return total;
}

constexpr u32 NOT_COLLECTED = 0xffffffffu;

// Make room for a tile where there is none; false where there are too many that may be chosen.
__device__ __forceinline__ bool make_room(const Shared& shared, const Problem& problem, u32& n,
                                          u64& threshold) {
    if (n + TILE <= problem.capacity) return true;
    __syncthreads();
    if (n <= problem.top_k) return false;
    n = prune(*shared.state, shared.candidates, n, problem.top_k, threshold);
    return n + TILE <= problem.capacity;
}

// Start to copy the block's tile, if there is such a one; its group is closed either way.
__device__ __forceinline__ void copy_tile(const Shared& shared, const Problem& problem, u64 begin,
                                          u32 stage) {
    if (begin < problem.end) {
        const u32 first = static_cast<u32>(begin) + threadIdx.x / WARP_SIZE * WARP_SIZE;
        copy_keys(shared.stages + stage * STAGE_CHUNKS, problem.key, first, problem.T - 1);
    }
    commit_copies();
}

__device__ __forceinline__ void start_copies(const Shared& shared, const Problem& problem) {
    for (u32 stage = 0; stage < NUM_STAGES; ++stage) {
        copy_tile(shared, problem, static_cast<u64>(problem.begin) + stage * TILE, stage);
    }
}

// Collect the block's candidates by their bounds; return how many, or NOT_COLLECTED where bounds do
// not thin out the keys enough. After start_copies.
__device__ __forceinline__ u32 collect(const Shared& shared, const Problem& problem) {
    u64 threshold = 0;
    u32 n = 0;
    bool has_room = true;
    u32 stage = 0;
    for (u64 begin = problem.begin; begin < problem.end && has_room; begin += TILE) {
        const u64 place = begin + threadIdx.x;
        const u32 position = static_cast<u32>(place);
        const float bias = place < problem.end ? problem.bias[place] : MASK_THRESHOLD;
        wait_for_copies<NUM_STAGES - 1>();
        KeyTile tile;
        load_keys(tile, shared.stages + stage * STAGE_CHUNKS);
        const float norm = norm_of_key(tile);
        const Approximation found = approximate(shared.row, tile);
        const Bounds bounds = bounds_of(shared.row.radius, found, norm, bias);
        copy_tile(shared, problem, begin + NUM_STAGES * TILE, stage);
        has_room = make_room(shared, problem, n, threshold);
        const bool is_kept = bias > MASK_THRESHOLD && ranked(bounds.upper, position) >= threshold;
        if (has_room) n = append(shared, begin / TILE % 2, n, is_kept, position, bounds);
        stage = stage + 1 == NUM_STAGES ? 0 : stage + 1;
    }
    wait_for_copies<0>();
    __syncthreads();
    return has_room ? n : NOT_COLLECTED;
}

// Lane i scores key begin + i.
__device__ __forceinline__ u32 exact_key(const Shared& shared, const Problem& problem, u64 begin) {
    const u32 lane_idx = threadIdx.x % WARP_SIZE;
    u32 mine = 0;
    for (u32 i = 0; i < WARP_SIZE && begin + i < problem.end; i += EXACT_KEYS) {
        const u64 left = problem.end - begin - i;
        u32 position[EXACT_KEYS];
#pragma unroll
        for (u32 other = 0; other < EXACT_KEYS; ++other) {
            position[other] = static_cast<u32>(begin + i + other);
        }
        const u32 count = left < EXACT_KEYS ? static_cast<u32>(left) : EXACT_KEYS;
        const float score = exact_scores(shared.row, problem.key, problem.bias, position, count);
        const u32 key = __shfl_sync(FULL_WARP, total_order_key(score), lane_idx % EXACT_KEYS);
        if (lane_idx / EXACT_KEYS == i / EXACT_KEYS) mine = key;
    }
    return mine;
}

// The same by exact scores, of which never too many may be chosen. Slow, and rarely called.
__device__ __forceinline__ u32 collect_exactly(const Shared& shared, const Problem& problem) {
    u64 threshold = 0;
    u32 n = 0;
    for (u64 begin = problem.begin; begin < problem.end; begin += TILE) {
        const u64 place = begin + threadIdx.x;
        const u32 position = static_cast<u32>(place);
        const float bias = place < problem.end ? problem.bias[place] : MASK_THRESHOLD;
        const bool is_allowed = bias > MASK_THRESHOLD;
        u32 key = 0;
        if (__any_sync(FULL_WARP, is_allowed)) {
            key = exact_key(shared, problem, begin + threadIdx.x / WARP_SIZE * WARP_SIZE);
        }
        make_room(shared, problem, n, threshold);
        const bool is_kept = is_allowed && ranked(key, position) >= threshold;
        n = append(shared, begin / TILE % 2, n, is_kept, position, {key, key});
    }
    __syncthreads();
    return n;
}
