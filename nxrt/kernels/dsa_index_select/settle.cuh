// At the end: score what is in doubt, choose, write in ascending order.
#pragma once

#include "cut.cuh"

// Set the bit of a key of this block.
__device__ __forceinline__ void mark(const Shared& shared, const Problem& problem, u32 position) {
    const u32 bit = position - problem.begin;
    atomicOr(&shared.chosen[bit / 32], 1u << bit % 32);
}

__device__ __forceinline__ u32 num_words_of(const Problem& problem) {
    return (problem.end - problem.begin + 31) / 32;
}

__device__ __forceinline__ float value_of_key(u64 pair) {
    const u32 key = static_cast<u32>(pair >> 32);
    return __uint_as_float(key >> 31 ? key ^ 0x80000000u : ~key);
}

// Values that are certainly below or above a cut, at the first look: they are further from it than twice
// the radius, which covers how the radius grows.
struct Margins {
    float out;
    float in;
};

__device__ __forceinline__ Margins margins_of(const Candidates& all, const Cut& cut) {
    const float low = value_of_key(cut.low);
    const float high = value_of_key(cut.high);
    if (cut.is_all || !(fabsf(low) < LARGE && fabsf(high) < LARGE)) return {-infinity(), infinity()};
    return {__fadd_rd(low, -2.0f * radius_at(low, all.radius)),
            __fadd_ru(high, 2.0f * radius_at(high, all.radius))};
}

// Sort out what the first look left open. Return whether it is certainly chosen.
__device__ __forceinline__ bool sort_out_one(const Shared& shared, const Cut& cut, u32 i) {
    const Candidates& all = shared.candidates;
    if (!cut.is_all && all.high(i) < cut.low) return false;
    if (cut.is_all || all.low(i) > cut.high) return true;
    const u32 place = atomicAdd(&shared.state->num_doubts, 1u);
    if (place < MAX_DOUBTS) shared.doubts[place] = all.position(i);
    return false;
}

// Mark what is certainly chosen, and list what is in doubt as far as there is place. Ends with a
// barrier.
__device__ __forceinline__ void sort_out(const Shared& shared, const Problem& problem,
                                         const Cut& cut) {
    constexpr u32 AT_ONCE = 4;
    SelectState& state = *shared.state;
    const Candidates& all = shared.candidates;
    const Margins margins = margins_of(all, cut);
    if (threadIdx.x == 0) state.num_certain = state.num_doubts = state.num_before = 0;
    for (u32 i = threadIdx.x; i < num_words_of(problem); i += THREADS) shared.chosen[i] = 0;
    __syncthreads();
    const u32 n = state.count;
    u32 num_certain = 0;
    for (u32 begin = threadIdx.x; begin < n; begin += AT_ONCE * THREADS) {
        float values[AT_ONCE];
        u32 places[AT_ONCE];
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; ++i) {
            const u32 index = begin + i * THREADS;
            values[i] = index < n ? all.values[index] : -infinity();
            places[i] = index < n ? all.places[index] : 0;
        }
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; ++i) {
            const u32 index = begin + i * THREADS;
            const bool is_sure = !(places[i] & IS_WIDE);
            bool is_certain = is_sure && values[i] > margins.in;
            if (index < n && !is_certain && !(is_sure && values[i] < margins.out)) {
                is_certain = sort_out_one(shared, cut, index);
            }
            if (is_certain) mark(shared, problem, places[i] & ~(IS_EXACT | IS_WIDE));
            num_certain += is_certain;
        }
    }
    num_certain = __reduce_add_sync(FULL_WARP, num_certain);
    if (threadIdx.x % WARP_SIZE == 0 && num_certain != 0) {
        atomicAdd(&state.num_certain, num_certain);
    }
    __syncthreads();
}

template <u32 COUNT>
__device__ __forceinline__ void score_doubts(const Shared& shared, const Problem& problem) {
    const u32 num_doubts = shared.state->num_doubts;
    const u32 lane_idx = threadIdx.x % WARP_SIZE;
    const u32 first = threadIdx.x / WARP_SIZE * COUNT;
    for (u32 begin = first; begin < num_doubts; begin += WARPS * COUNT) {
        const u32 count = num_doubts - begin < COUNT ? num_doubts - begin : COUNT;
        u32 position[COUNT];
#pragma unroll
        for (u32 i = 0; i < COUNT; ++i) position[i] = shared.doubts[begin + (i < count ? i : 0)];
        const float score =
            exact_scores<COUNT>(shared.row, problem.key, problem.bias, position, count);
        if (lane_idx < count) {
            shared.ranks[begin + lane_idx] =
                ranked(total_order_key(score), shared.doubts[begin + lane_idx]);
        }
    }
    __syncthreads();
}

// How many keys of the row are in doubt, and of the certain ones how many there are and how many are
// before the block's own.
struct Tally {
    u32 num_doubts;
    u32 num_certain;
    u32 num_before;
};

// Tell the other blocks of this one's doubts, which are scored, and gather theirs. Ends with a barrier.
__device__ __forceinline__ Tally exchange(const Shared& shared, Team& team) {
    SelectState& state = *shared.state;
    const u32 num_own = state.num_doubts;
    Slot& slot = team.slot();
    if (threadIdx.x == 0) slot.certain[blockIdx.x] = state.num_certain;
    const u32 place = state.doubts_place;
    if (num_own <= MAX_DOUBTS && place + num_own <= MAX_DOUBTS) {
        for (u32 i = threadIdx.x; i < num_own; i += THREADS) slot.ranks[place + i] = shared.ranks[i];
    }
    const Slot& told = meet(team);
    Tally tally;
    // All at once, before it is known how many there are.
    const u64 rank = __ldcg(&told.ranks[threadIdx.x]);
    const u32 certain = threadIdx.x < gridDim.x ? __ldcg(&told.certain[threadIdx.x]) : 0;
    tally.num_doubts = __ldcg(&told.num_doubts);
    shared.ranks[threadIdx.x] = rank;
    if (tally.num_doubts > THREADS) {
        shared.ranks[THREADS + threadIdx.x] = __ldcg(&told.ranks[THREADS + threadIdx.x]);
    }
    const u32 before = block_exclusive_sum(certain, state.warp_sums, tally.num_certain);
    if (threadIdx.x == blockIdx.x) state.doubts_place = before;
    __syncthreads();
    tally.num_before = state.doubts_place;
    return tally;
}

// Find the wanted-th best of a few doubts: each warp compares all with some of them. Begins and ends
// with a barrier.
__device__ __forceinline__ u64 wanted_of_few(const Shared& shared, u32 num_doubts, u32 wanted) {
    SelectState& state = *shared.state;
    u32* const num_better = state.digits;
    const u32 lane_idx = threadIdx.x % WARP_SIZE;
    num_better[threadIdx.x] = 0;
    __syncthreads();
    for (u32 first = 0; first < num_doubts; first += WARP_SIZE) {
        const u64 own = shared.ranks[first + lane_idx];
        u32 better = 0;
#pragma unroll 4
        for (u32 i = threadIdx.x / WARP_SIZE; i < num_doubts; i += WARPS) {
            better += shared.ranks[i] > own;
        }
        atomicAdd(&num_better[first + lane_idx], better);
    }
    __syncthreads();
    const u32 own = threadIdx.x;
    if (own < num_doubts && num_better[own] + 1 == wanted) state.most = shared.ranks[own];
    __syncthreads();
    return state.most;
}

// Choose the best `wanted` of the row's doubts: mark this block's, count those before them.
__device__ __forceinline__ void choose_doubts(const Shared& shared, const Problem& problem,
                                              u32 num_doubts, u32 wanted) {
    SelectState& state = *shared.state;
    const u64* const ranks = shared.ranks;
    u64 last = 0;
    if (wanted == 0) {
        __syncthreads();
        return;
    }
    if (wanted < num_doubts && num_doubts <= THREADS) {
        last = wanted_of_few(shared, num_doubts, wanted);
    } else if (wanted < num_doubts) {
        last = kth_largest(state, num_doubts, wanted, [&](u32 i) { return ranks[i]; });
    }
    for (u32 i = threadIdx.x; i < num_doubts; i += THREADS) {
        const u32 position = ~static_cast<u32>(ranks[i]);
        if (ranks[i] < last || position >= problem.end) continue;
        if (position >= problem.begin) {
            mark(shared, problem, position);
        } else {
            atomicAdd(&state.num_before, 1u);
        }
    }
    __syncthreads();
}

// Write the marked positions in order from `place` on.
__device__ __forceinline__ void write_chosen(const Shared& shared, const Problem& problem, u32 place,
                                             i64* selected) {
    const u32 num_words = num_words_of(problem);
    const u32 per_thread = (num_words + THREADS - 1) / THREADS;
    const u32 begin = threadIdx.x * per_thread;
    const u32 end = begin + per_thread < num_words ? begin + per_thread : num_words;
    u32 count = 0;
    for (u32 i = begin; i < end; ++i) count += __popc(shared.chosen[i]);
    u32 total;
    place += block_exclusive_sum(count, shared.state->warp_sums, total);
    for (u32 i = begin; i < end; ++i) {
        const u64 first = problem.begin + static_cast<u64>(i) * 32;
        for (u32 word = shared.chosen[i]; word != 0; word &= word - 1) {
            selected[place++] = static_cast<i64>(first + __ffs(word) - 1);
        }
    }
}

// How a row was decided, for inspection.
struct Outcome {
    u32 num_scored;  // keys in doubt
    u32 is_exact;    // whether all had to be scored
};

// Write what the cut leaves to this block; false where it leaves too many in doubt, and nothing is
// written by any block.
__device__ __forceinline__ bool settle(const Shared& shared, const Problem& problem, Team& team,
                                       const Cut& cut, i64* selected, Outcome* outcome) {
    SelectState& state = *shared.state;
    sort_out(shared, problem, cut);
    const u32 num_own = state.num_doubts;
    // The last warp has the least to score.
    if (!team.is_alone() && threadIdx.x == THREADS - 1 && num_own != 0) {
        state.doubts_place = atomicAdd(&team.slot().num_doubts, num_own);
    }
    if (num_own <= WARPS) {
        score_doubts<1>(shared, problem);
    } else if (num_own <= WARPS * EXACT_KEYS) {
        score_doubts<EXACT_KEYS>(shared, problem);
    } else if (num_own <= MAX_DOUBTS) {
        score_doubts<MOST_EXACT_KEYS>(shared, problem);
    }
    Tally tally{num_own, state.num_certain, 0};
    if (!team.is_alone()) tally = exchange(shared, team);
    if (tally.num_doubts > MAX_DOUBTS) return false;
    if (blockIdx.x == 0 && threadIdx.x == 0) outcome->num_scored = tally.num_doubts;
    const u32 wanted = problem.top_k - tally.num_certain;
    if (!cut.is_all) choose_doubts(shared, problem, tally.num_doubts, wanted);
    write_chosen(shared, problem, tally.num_before + state.num_before, selected);
    if (cut.is_all && blockIdx.x == 0) {
        for (u32 i = tally.num_certain + threadIdx.x; i < problem.top_k; i += THREADS) {
            selected[i] = -1;
        }
    }
    return true;
}
