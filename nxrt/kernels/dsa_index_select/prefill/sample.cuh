// Guess from a sample of a row's scores from which score on it has so many keys.
#pragma once

#include "candidates.cuh"

constexpr u32 GUESS_BITS = 8;
constexpr u32 GUESS_BINS = 1u << GUESS_BITS;

__device__ __forceinline__ void clear_guess_bins(u32* bins) {
    for (u32 bin = threadIdx.x % WARP_SIZE; bin < GUESS_BINS; bin += WARP_SIZE) bins[bin] = 0;
    __syncwarp();
}

// Return the bin that holds the rank-th value from the top, and make `rank` the rank in it.
__device__ __forceinline__ u32 choose_bin(const u32* bins, u32& rank) {
    constexpr u32 BINS_PER_LANE = GUESS_BINS / WARP_SIZE;
    const u32 lane_idx = threadIdx.x % WARP_SIZE;
    const u32 highest = GUESS_BINS - 1 - lane_idx * BINS_PER_LANE;
    __syncwarp();
    u32 sum = 0;
    for (u32 i = 0; i < BINS_PER_LANE; ++i) sum += bins[highest - i];
    const u32 up_to = warp_inclusive_sum(sum, lane_idx);
    u32 above = up_to - sum;
    const bool is_mine = above < rank && rank <= up_to;
    const int lane = __ffs(__ballot_sync(FULL_WARP, is_mine)) - 1;
    u32 bin = highest;
    if (is_mine) {
        while (above + bins[bin] < rank) above += bins[bin--];
    }
    rank -= __shfl_sync(FULL_WARP, above, lane);
    return __shfl_sync(FULL_WARP, bin, lane);
}

// Find the rank-th largest of n order keys, rounded down; 0 where there are fewer. For a warp, with
// bins of its own.
__device__ __forceinline__ u32 guess_from(const u32* keys, u32 n, u32 rank, u32* bins) {
    u32 prefix = 0;
    u32 known = 0;
    if (n < rank) return 0;
    for (u32 shift = 32 - GUESS_BITS; shift > 0; shift -= GUESS_BITS) {
        clear_guess_bins(bins);
#pragma unroll 4
        for (u32 i = threadIdx.x % WARP_SIZE; i < n; i += WARP_SIZE) {
            const u32 key = keys[i];
            if ((key & known) == prefix) atomicAdd(&bins[(key >> shift) % GUESS_BINS], 1u);
        }
        prefix |= choose_bin(bins, rank) << shift;
        known |= (GUESS_BINS - 1) << shift;
        __syncwarp();
    }
    return prefix;
}

// Return what exactly k of n entries, positions and order keys, reach; likewise. Each lane reads
// only every WARP_SIZE-th.
__device__ __forceinline__ u64 best_of_entries(const uint2* entries, u32 n, u32 k, u32* bins) {
    u64 prefix = 0;
    u64 known = 0;
    u32 rank = k;
    for (int shift = 64 - GUESS_BITS; shift >= 0; shift -= GUESS_BITS) {
        clear_guess_bins(bins);
#pragma unroll 4
        for (u32 i = threadIdx.x % WARP_SIZE; i < n; i += WARP_SIZE) {
            const u64 value = ranked(entries[i].y, entries[i].x);
            if ((value & known) == prefix) atomicAdd(&bins[(value >> shift) % GUESS_BINS], 1u);
        }
        const u32 bin = choose_bin(bins, rank);
        prefix |= static_cast<u64>(bin) << shift;
        known |= static_cast<u64>(GUESS_BINS - 1) << shift;
        const bool is_found = bins[bin] == rank;
        __syncwarp();
        if (is_found) break;
    }
    return prefix;
}
