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

// Mark what is certainly chosen and list what is in doubt, as far as there is place. Ends with a
// barrier.
__device__ __forceinline__ void sort_out(const Shared& shared, const Problem& problem,
                                         const Cut& cut) {
    SelectState& state = *shared.state;
    const Candidates& all = shared.candidates;
    if (threadIdx.x == 0) state.num_certain = state.num_doubts = state.num_before = 0;
    for (u32 i = threadIdx.x; i < num_words_of(problem); i += THREADS) shared.chosen[i] = 0;
    __syncthreads();
    const u32 n = state.count;
#pragma unroll 2
    for (u32 begin = 0; begin < n; begin += THREADS) {
        const u32 i = begin + threadIdx.x;
        const bool is_in = i < n && (cut.is_all || all.high(i) >= cut.low);
        if (!__any_sync(FULL_WARP, is_in)) continue;
        const bool is_certain = is_in && (cut.is_all || all.low(i) > cut.high);
        if (is_certain) mark(shared, problem, all.position(i));
        take_place(&state.num_certain, is_certain);
        const bool is_doubtful = is_in && !is_certain;
        const u32 place = take_place(&state.num_doubts, is_doubtful);
        if (is_doubtful && place < MAX_DOUBTS) shared.doubts[place] = all.position(i);
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

// Tell the other blocks of this one's doubts, which are scored, and gather theirs.
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
    tally.num_doubts = __ldcg(&told.num_doubts);
    const u32 other = threadIdx.x < gridDim.x ? __ldcg(&told.certain[threadIdx.x]) : 0;
    if (tally.num_doubts <= MAX_DOUBTS) {
        for (u32 i = threadIdx.x; i < tally.num_doubts; i += THREADS) {
            shared.ranks[i] = __ldcg(&told.ranks[i]);
        }
    }
    const u32 before = block_exclusive_sum(other, state.warp_sums, tally.num_certain);
    if (threadIdx.x == blockIdx.x) state.doubts_place = before;
    __syncthreads();
    tally.num_before = state.doubts_place;
    return tally;
}

// Choose the best `wanted` of the row's doubts: mark this block's, count those before them.
__device__ __forceinline__ void choose_doubts(const Shared& shared, const Problem& problem,
                                              u32 num_doubts, u32 wanted) {
    SelectState& state = *shared.state;
    const u64* const ranks = shared.ranks;
    u64 last = 0;
    const bool is_few = num_doubts <= THREADS;
    if (!is_few && wanted < num_doubts) {
        last = kth_largest(state, num_doubts, wanted, [&](u32 i) { return ranks[i]; });
    }
    for (u32 i = threadIdx.x; i < num_doubts; i += THREADS) {
        const u64 own = ranks[i];
        bool is_chosen = own >= last;
        if (is_few) {
            u32 num_better = 0;
#pragma unroll 4
            for (u32 other = 0; other < num_doubts; ++other) num_better += ranks[other] > own;
            is_chosen = num_better < wanted;
        }
        const u32 position = ~static_cast<u32>(own);
        if (!is_chosen || position >= problem.end) continue;
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
    } else if (num_own <= MAX_DOUBTS) {
        score_doubts<EXACT_KEYS>(shared, problem);
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
