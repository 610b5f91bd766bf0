// The blocks of a row together: what they share, where they meet, what they hand over.
#pragma once

#include "collect.cuh"

constexpr u32 MAX_GROUP = 256;
constexpr u32 NUM_HISTOGRAMS = 3;

// What the blocks of a row share.
struct Control {
    u32 num_arrived;
    u32 num_finished;
    u32 must_be_exact;
    u32 num_listed;
    u32 counts[MAX_GROUP];
    u32 places[MAX_GROUP];
    u32 histograms[NUM_HISTOGRAMS][NUM_BINS];
};

__device__ __forceinline__ void wait_for_group(Control* control, u32& num_meetings) {
    __syncthreads();
    ++num_meetings;
    if (threadIdx.x == 0) {
        __threadfence();
        atomicAdd(&control->num_arrived, 1u);
        const u32 wanted = num_meetings * gridDim.x;
        while (*static_cast<volatile u32*>(&control->num_arrived) < wanted) wait_a_little();
        __threadfence();
    }
    __syncthreads();
}

// Find a threshold that at least top_k lower bounds of the row reach, and not many more; 0 where
// there are fewer. `num_meetings` goes on from what it was.
__device__ __forceinline__ u64 group_threshold(const Shared& shared, const Problem& problem,
                                               Control* control, u32 n, u32& num_meetings) {
    SelectState& state = *shared.state;
    u64 prefix = 0;
    u32 wanted = problem.top_k;
    for (u32 shift = FIRST_SHIFT;; shift = next_shift(shift)) {
        clear_bins(state);
        __syncthreads();
        for (u32 i = threadIdx.x; i < n; i += THREADS) {
            const u64 value = shared.candidates.low(i);
            if (begins_with(value, prefix, shift)) {
                atomicAdd(&state.bins[digit_of(value, shift)], 1u);
            }
        }
        __syncthreads();
        u32* const histogram = control->histograms[num_meetings % NUM_HISTOGRAMS];
        u32* const stale = control->histograms[(num_meetings + 2) % NUM_HISTOGRAMS];
        for (u32 bin = threadIdx.x; bin < NUM_BINS; bin += THREADS) {
            if (state.bins[bin] != 0) atomicAdd(&histogram[bin], state.bins[bin]);
        }
        wait_for_group(control, num_meetings);
        u32 mine = 0;
        for (u32 bin = threadIdx.x; bin < NUM_BINS; bin += THREADS) {
            state.bins[bin] = __ldcg(&histogram[bin]);
            mine += state.bins[bin];
            // Everybody has read this one, and nobody adds to it before the next meeting.
            if (bin % gridDim.x == blockIdx.x) stale[bin] = 0;
        }
        u32 total;
        block_exclusive_sum(mine, state.warp_sums, total);
        if (total < wanted) return 0;
        choose_digit(state, wanted);
        prefix |= static_cast<u64>(state.digit) << shift;
        wanted -= state.num_above;
        const u32 num_left = problem.top_k - wanted + state.bins[state.digit];
        __syncthreads();
        if (num_left <= problem.top_k + problem.capacity / 8 || shift == 0) return prefix;
    }
}

// A row's candidates: each block has a piece, in the order in which they came.
struct List {
    u32* words;  // [3][length]
    u32 length;

    __device__ __forceinline__ Candidates from(u32 place) const {
        return {words + place, words + length + place, words + 2 * length + place};
    }
};

// Publish the block's candidates, if the list has room; say whether this is the last block of its
// row to do so.
__device__ __forceinline__ bool hand_over(const Shared& shared, Control* control, const List& list,
                                          u32 n) {
    SelectState& state = *shared.state;
    if (threadIdx.x == 0) {
        state.count = atomicAdd(&control->num_listed, n);
        control->counts[blockIdx.x] = n;
        control->places[blockIdx.x] = state.count;
    }
    __syncthreads();
    const u32 place = state.count;
    if (place + n <= list.length) {
        const Candidates piece = list.from(place);
        for (u32 i = threadIdx.x; i < n; i += THREADS) {
            piece.position[i] = shared.candidates.position[i];
            piece.lower[i] = shared.candidates.lower[i];
            piece.upper[i] = shared.candidates.upper[i];
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        state.count = atomicAdd(&control->num_finished, 1u);
        __threadfence();
    }
    __syncthreads();
    return state.count == gridDim.x - 1;
}

// Gather what the row's blocks have handed over, in order; return how many, or NOT_COLLECTED.
__device__ __forceinline__ u32 gather(const Shared& shared, Control* control, const List& list) {
    if (__ldcg(&control->num_listed) > list.length) return NOT_COLLECTED;
    u32 n = 0;
    for (u32 block = 0; block < gridDim.x; ++block) {
        const u32 count = __ldcg(&control->counts[block]);
        const Candidates piece = list.from(__ldcg(&control->places[block]));
        for (u32 i = threadIdx.x; i < count; i += THREADS) {
            shared.candidates.position[n + i] = __ldcg(&piece.position[i]);
            shared.candidates.lower[n + i] = __ldcg(&piece.lower[i]);
            shared.candidates.upper[n + i] = __ldcg(&piece.upper[i]);
        }
        n += count;
    }
    __syncthreads();
    return n;
}

__device__ __forceinline__ void clear_histograms(Control* control, u32 part, u32 num_parts) {
    for (u32 i = threadIdx.x + part * THREADS; i < NUM_HISTOGRAMS * NUM_BINS;
         i += num_parts * THREADS) {
        control->histograms[i / NUM_BINS][i % NUM_BINS] = 0;
    }
}

__device__ __forceinline__ void leave_clean(Control* control) {
    __syncthreads();  // all of this last block have read it
    clear_histograms(control, 0, 1);
    if (threadIdx.x == 0) {
        control->num_arrived = 0;
        control->num_finished = 0;
        control->must_be_exact = 0;
        control->num_listed = 0;
    }
}
