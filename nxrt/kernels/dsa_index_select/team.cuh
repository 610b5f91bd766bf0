// The blocks of a row together: where they meet, and what they tell each other there.
//
// Meetings are numbered over all launches. What is told for one lies in its slot; everybody has read
// it before the next meeting, after which it is cleared. So a slot is clean when its turn comes
// again, whatever a launch was, and nothing has to be left in order at the end of one.
#pragma once

#include "collect.cuh"

constexpr u32 MAX_TEAM = 256;
constexpr u32 NUM_SLOTS = 4;
constexpr u32 ARRIVALS = 256;  // that make a meeting, whatever the number of blocks

struct Slot {
    u32 bins[NUM_BINS];
    u64 most;
    u32 must_be_exact;
    u32 num_wild;
    u32 num_doubts;
    u32 count;              // of candidates; up to here it is cleared
    u32 certain[MAX_TEAM];  // of each block
    u64 ranks[MAX_DOUBTS];
    u64 unused;  // so that bins are read in quads
};

constexpr u32 CLEARED_WORDS = NUM_BINS + 6;
static_assert(sizeof(Slot) == 4 * CLEARED_WORDS + 4 * MAX_TEAM + 8 * MAX_DOUBTS + 8, "no gaps");
static_assert(sizeof(Slot) % 16 == 0, "quads");

// What the blocks of a row share; zero before its first launch.
struct Control {
    u32 num_arrived;
    u32 unused[3];
    Slot slots[NUM_SLOTS];
};

struct Team {
    Control* control;
    u32 meeting;  // the number of the next

    __device__ __forceinline__ bool is_alone() const { return gridDim.x == 1; }
    __device__ __forceinline__ Slot& slot() const { return control->slots[meeting % NUM_SLOTS]; }
};

// The number of the next meeting: it cannot take place without this block.
__device__ __forceinline__ Team team_of(Control* control) {
    Team team{control, 0};
    if (!team.is_alone()) team.meeting = __ldcg(&control->num_arrived) / ARRIVALS;
    return team;
}

// Wait for all blocks of the row; return what they told. What each has written before is then seen.
__device__ __forceinline__ const Slot& meet(Team& team) {
    const Slot& told = team.slot();
    __syncthreads();
    if (threadIdx.x == 0) {
        u32* const num_arrived = &team.control->num_arrived;
        const u32 wanted = (team.meeting + 1) * ARRIVALS;
        arrive(num_arrived, blockIdx.x == 0 ? ARRIVALS + 1 - gridDim.x : 1u);
        while (static_cast<int>(look_at(num_arrived) - wanted) < 0) wait_a_little();
    }
    __syncthreads();
    u32* const stale = team.control->slots[(team.meeting + NUM_SLOTS - 1) % NUM_SLOTS].bins;
    for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < CLEARED_WORDS; i += gridDim.x * THREADS) {
        stale[i] = 0;
    }
    ++team.meeting;
    return told;
}

// Tell of bins from `first` on, a multiple of THREADS.
__device__ __forceinline__ void tell_bins(const Team& team, const u32* bins, u32 first) {
    for (u32 bin = first + threadIdx.x; bin < NUM_BINS; bin += THREADS) {
        if (bins[bin] != 0) atomicAdd(&team.slot().bins[bin], bins[bin]);
    }
}

__device__ __forceinline__ void read_bins(const Slot& told, u32* bins) {
#pragma unroll
    for (u32 i = 0; i < NUM_BINS / THREADS / 4; ++i) {
        const u32 quad = i * THREADS + threadIdx.x;
        reinterpret_cast<uint4*>(bins)[quad] = __ldcg(reinterpret_cast<const uint4*>(told.bins) + quad);
    }
    __syncthreads();
}
