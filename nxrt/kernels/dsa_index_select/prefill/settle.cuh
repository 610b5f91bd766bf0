// A row's candidates in one block's shared memory: by exact scores where bounds do not help, and at
// the end the row's choice.
//
// Nothing here computes a bound; score_bounds.cuh and prefill_products.cuh do.
#pragma once

#include "query_row.cuh"

constexpr float MASK_THRESHOLD = -1e30f;
constexpr u32 TILE = THREADS;  // keys of a block at once, a lane each

struct Problem {
    const Stored* key;  // of the row's batch
    const float* bias;  // of the row
    u32 T;
    u32 begin;
    u32 end;
    u32 top_k;
    u32 capacity;
};

struct Shared {
    SelectState* state;
    QueryRow row;
    Candidates candidates;
    u32* doubtful;  // [capacity]
};

__device__ __forceinline__ u8* take(u8*& next, u32 nbytes) {
    u8* const taken = next;
    next += (nbytes + 15) / 16 * 16;
    return taken;
}

// The host adds up the same.
__device__ __forceinline__ Shared lay_out(u8*& next, u32 H, u32 capacity, float scale) {
    Shared shared;
    QueryRow& row = shared.row;
    row.H = H;
    row.H16 = (H + HEAD_TILE - 1) / HEAD_TILE * HEAD_TILE;
    row.scale = scale;
    row.chunks = reinterpret_cast<uint4*>(take(next, row.H16 * D * 2));
    row.staged = reinterpret_cast<uint4*>(take(next, WARPS * EXACT_KEYS * D * 2));
    row.weights = reinterpret_cast<float*>(take(next, row.H16 * 4));
    row.sums = reinterpret_cast<float*>(take(next, (row.H16 > D ? row.H16 : D) * 4));
    row.terms = reinterpret_cast<float*>(take(next, WARPS * EXACT_KEYS * WARP_SIZE * 4));
    shared.state = reinterpret_cast<SelectState*>(take(next, sizeof(SelectState)));
    shared.candidates.position = reinterpret_cast<u32*>(take(next, capacity * 4));
    shared.candidates.lower = reinterpret_cast<u32*>(take(next, capacity * 4));
    shared.candidates.upper = reinterpret_cast<u32*>(take(next, capacity * 4));
    shared.doubtful = reinterpret_cast<u32*>(take(next, capacity * 4));
    return shared;
}

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

// Score exactly what the bounds leave open among n candidates, so that those which may be chosen
// have bounds that agree; return how many are left.
__device__ __forceinline__ u32 settle(const Shared& shared, const Problem& problem, u32 n) {
    SelectState& state = *shared.state;
    const Candidates& all = shared.candidates;
    u64 threshold;
    threshold = kth_largest(state, n, problem.top_k, [&](u32 i) { return all.low(i); });
    const u64 most = most_of_the_rest(state, all, n, threshold);
    n = compact(state, all, n, [&](u32 i) { return all.high(i) >= threshold; });
    if (threadIdx.x == 0) state.count = 0;
    __syncthreads();
    for (u32 i = threadIdx.x; i < n; i += THREADS) {
        if (all.low(i) > most) {
            all.lower[i] = all.upper[i] = CERTAIN;
        } else if (all.lower[i] != all.upper[i]) {
            shared.doubtful[atomicAdd(&state.count, 1u)] = i;
        }
    }
    __syncthreads();
    const u32 num_doubtful = state.count;
    const u32 lane_idx = threadIdx.x % WARP_SIZE;
    const u32 first = threadIdx.x / WARP_SIZE * EXACT_KEYS;
    for (u32 begin = first; begin < num_doubtful; begin += WARPS * EXACT_KEYS) {
        u32 position[EXACT_KEYS];
        const u32 left = num_doubtful - begin;
        const u32 count = left < EXACT_KEYS ? left : EXACT_KEYS;
#pragma unroll
        for (u32 i = 0; i < EXACT_KEYS; ++i) {
            position[i] = i < count ? all.position[shared.doubtful[begin + i]] : 0;
        }
        const float score = exact_scores(shared.row, problem.key, problem.bias, position, count);
        if (lane_idx < count) {
            const u32 i = shared.doubtful[begin + lane_idx];
            all.lower[i] = all.upper[i] = total_order_key(score);
        }
        __syncwarp();
    }
    __syncthreads();
    return n;
}

// Reduce n > top_k candidates to the chosen ones, in order as they were; return how many.
__device__ __forceinline__ u32 choose(const Shared& shared, const Problem& problem, u32 n) {
    n = settle(shared, problem, n);
    u64 threshold;
    return prune(*shared.state, shared.candidates, n, problem.top_k, threshold);
}
