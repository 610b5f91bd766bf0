// Where a row's best are cut off from the rest.
#pragma once

#include "team.cuh"

// At least top_k keys have a pair not below `low`, and no more than top_k one above `high`, but where
// a row has no more than top_k keys: then all of them are chosen.
struct Cut {
    u64 low;
    u64 high;
    bool is_all;
};

// Where few of the keys are chosen, the lower bins need not be told: a cut among them would not be
// found, and be looked for otherwise.
__device__ __forceinline__ u32 first_bin_to_tell(const Problem& problem) {
    static_assert(BINS_BELOW % THREADS == 0, "what tell_bins begins with");
    return problem.top_k < problem.T / 8 ? BINS_BELOW : 0;
}

// Cut by bins of the values; return whether it is known where. It is not where a block could not
// collect, nor where too little is known of too many. `must_be_exact` says that of the first.
__device__ __forceinline__ bool cut_by_bins(const Shared& shared, const Problem& problem,
                                            const Filter& filter, Team& team, bool& must_be_exact,
                                            Cut& cut) {
    SelectState& state = *shared.state;
    u32 num_wild = state.num_wild;
    u32 count = state.count;
    if (!team.is_alone()) {
        if (threadIdx.x == 0) {
            if (must_be_exact) atomicOr(&team.slot().must_be_exact, 1u);
            if (num_wild != 0) atomicAdd(&team.slot().num_wild, num_wild);
            atomicAdd(&team.slot().count, count);
        }
        tell_bins(team, state.bins, first_bin_to_tell(problem));
        const Slot& told = meet(team);
        must_be_exact = __ldcg(&told.must_be_exact) != 0;
        num_wild = __ldcg(&told.num_wild);
        count = __ldcg(&told.count);
        read_bins(told, state.bins);
    }
    if (must_be_exact) return false;
    cut.is_all = count <= problem.top_k;
    if (cut.is_all) return true;
    const u32 num_told = choose_bin(state, state.bins, problem.top_k);
    if (num_told < problem.top_k || num_wild >= problem.top_k) return false;
    const float radius = shared.candidates.radius;
    const float bottom = filter.bins.bottom_of(state.digit);
    const float lowest = __fadd_rd(bottom, -radius_at(bottom, radius));
    cut.low = ranked(total_order_key(lowest), 0xffffffffu);
    // Wild keys may all be above.
    if (num_wild != 0) choose_bin(state, state.bins, problem.top_k - num_wild);
    const float top = filter.bins.top_of(state.digit);
    const float highest = __fadd_ru(top, radius_at(top, radius));
    cut.high = ranked(total_order_key(highest), 0);
    const u32 num_open = state.bins[state.digit] + num_wild;
    __syncthreads();
    return num_open <= MAX_DOUBTS;
}

// Find the top_k-th largest lower bound of the row, or one that exactly top_k reach; false where there
// are no more than top_k.
__device__ __forceinline__ bool kth_of_row(const Shared& shared, const Problem& problem, Team& team,
                                           u64& prefix) {
    SelectState& state = *shared.state;
    u32 wanted = problem.top_k;
    prefix = 0;
    for (u32 shift = FIRST_SHIFT;; shift = next_shift(shift)) {
        clear(state.digits);
        __syncthreads();
        for (u32 i = threadIdx.x; i < state.count; i += THREADS) {
            const u64 low = shared.candidates.low(i);
            if (begins_with(low, prefix, shift)) atomicAdd(&state.digits[digit_of(low, shift)], 1u);
        }
        __syncthreads();
        if (!team.is_alone()) {
            tell_bins(team, state.digits, 0);
            read_bins(meet(team), state.digits);
        }
        const u32 total = choose_bin(state, state.digits, wanted);
        if (shift == FIRST_SHIFT && total <= wanted) return false;
        prefix |= static_cast<u64>(state.digit) << shift;
        wanted -= state.num_above;
        const bool is_found = state.digits[state.digit] == wanted || shift == 0;
        __syncthreads();
        if (is_found) return true;
    }
}

// Cut by the bounds themselves.
__device__ __forceinline__ void cut_by_bounds(const Shared& shared, const Problem& problem,
                                              Team& team, Cut& cut) {
    SelectState& state = *shared.state;
    cut.is_all = !kth_of_row(shared, problem, team, cut.low);
    if (cut.is_all) return;
    if (threadIdx.x == 0) state.most = 0;
    __syncthreads();
    u64 most = 0;
    for (u32 i = threadIdx.x; i < state.count; i += THREADS) {
        const u64 high = shared.candidates.high(i);
        if (shared.candidates.low(i) < cut.low && high > most) most = high;
    }
    if (most != 0) atomicMax(&state.most, most);
    __syncthreads();
    cut.high = state.most;
    if (team.is_alone()) return;
    if (threadIdx.x == 0) atomicMax(&team.slot().most, cut.high);
    cut.high = __ldcg(&meet(team).most);
}
