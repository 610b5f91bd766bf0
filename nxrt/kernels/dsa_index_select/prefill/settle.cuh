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
    u16* band;  // [capacity], of what may be chosen and need not be: from both ends
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
    shared.band = reinterpret_cast<u16*>(take(next, capacity * 2));
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

struct Band {
    u32 num_open;     // at the front: their bounds differ
    u32 num_known;    // at the back
    u32 num_certain;  // outside of it, and chosen
};

__device__ __forceinline__ u32 band_at(const Shared& shared, const Problem& problem,
                                       const Band& band, u32 i) {
    const u32 place = i < band.num_open ? i : problem.capacity - 1 - (i - band.num_open);
    return shared.band[place];
}

// Part n > top_k candidates into what is chosen, what is not, and what is between. What is decided
// has CERTAIN or 0 for its lower bound.
__device__ __forceinline__ Band part(const Shared& shared, const Problem& problem, u32 n) {
    SelectState& state = *shared.state;
    const Candidates& all = shared.candidates;
    if (threadIdx.x == 0) state.tallies = {0, 0, 0};
    const u64 threshold =
        kth_largest(state, n, problem.top_k, [&](u32 i) { return all.low(i); });
    const u64 most = most_of_the_rest(state, all, n, threshold);
    u32 num_certain = 0;
    for (u32 i = threadIdx.x; i < n; i += THREADS) {
        if (all.high(i) < threshold) {
            all.lower[i] = 0;
        } else if (all.low(i) > most) {
            all.lower[i] = CERTAIN;
            ++num_certain;
        } else if (all.lower[i] != all.upper[i]) {
            shared.band[atomicAdd(&state.tallies.num_open, 1u)] = static_cast<u16>(i);
        } else {
            const u32 place = problem.capacity - 1 - atomicAdd(&state.tallies.num_known, 1u);
            shared.band[place] = static_cast<u16>(i);
        }
    }
    if (num_certain != 0) atomicAdd(&state.tallies.num_certain, num_certain);
    __syncthreads();
    return {state.tallies.num_open, state.tallies.num_known, state.tallies.num_certain};
}

// Score exactly the first of the band.
__device__ __forceinline__ void score_band(const Shared& shared, const Problem& problem,
                                           u32 num_open) {
    const Candidates& all = shared.candidates;
    const u32 lane_idx = threadIdx.x % WARP_SIZE;
    const u32 first = threadIdx.x / WARP_SIZE * EXACT_KEYS;
    for (u32 begin = first; begin < num_open; begin += WARPS * EXACT_KEYS) {
        u32 position[EXACT_KEYS];
        const u32 left = num_open - begin;
        const u32 count = left < EXACT_KEYS ? left : EXACT_KEYS;
#pragma unroll
        for (u32 i = 0; i < EXACT_KEYS; ++i) {
            position[i] = i < count ? all.position[shared.band[begin + i]] : 0;
        }
        const float score = exact_scores(shared.row, problem.key, problem.bias, position, count);
        if (lane_idx < count) all.lower[shared.band[begin + lane_idx]] = total_order_key(score);
        __syncwarp();
    }
    __syncthreads();
}

// Return what the band's `wanted` best reach. There are at least as many, and at least one.
__device__ __forceinline__ u64 threshold_of_band(const Shared& shared, const Problem& problem,
                                                 const Band& band, u32 wanted) {
    const Candidates& all = shared.candidates;
    const u32 n = band.num_open + band.num_known;
    const auto value = [&](u32 i) { return all.low(band_at(shared, problem, band, i)); };
    if (n > THREADS) return kth_largest(*shared.state, n, wanted, value);
    const u64 own = threadIdx.x < n ? value(threadIdx.x) : 0;
    u32 num_above = 0;
    for (u32 i = 0; i < n; ++i) num_above += value(i) > own;
    if (threadIdx.x < n && num_above + 1 == wanted) shared.state->most[0] = own;
    __syncthreads();
    return shared.state->most[0];
}

// Give the top_k best of n > top_k candidates CERTAIN for a lower bound; return how many were
// scored exactly.
__device__ __forceinline__ u32 choose(const Shared& shared, const Problem& problem, u32 n) {
    const Candidates& all = shared.candidates;
    const Band band = part(shared, problem, n);
    const u32 wanted = problem.top_k - band.num_certain;
    u64 threshold = ~0ull;
    if (wanted != 0) {
        score_band(shared, problem, band.num_open);
        threshold = threshold_of_band(shared, problem, band, wanted);
        __syncthreads();
    }
    for (u32 i = threadIdx.x; i < band.num_open + band.num_known; i += THREADS) {
        const u32 own = band_at(shared, problem, band, i);
        all.lower[own] = all.low(own) >= threshold ? CERTAIN : 0;
    }
    __syncthreads();
    return wanted != 0 ? band.num_open : 0;
}
