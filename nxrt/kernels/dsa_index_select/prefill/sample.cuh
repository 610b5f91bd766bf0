// Guess from a sample of a row's scores from which score on it has so many keys.
#pragma once

#include "candidates.cuh"

constexpr u32 GUESS_BITS = 8;
constexpr u32 GUESS_BINS = 1u << GUESS_BITS;

// Find the rank-th largest of n order keys, rounded down; 0 where there are fewer. For a warp, with
// bins of its own.
__device__ __forceinline__ u32 guess_from(const u32* keys, u32 n, u32 rank, u32* bins) {
    constexpr u32 BINS_PER_LANE = GUESS_BINS / WARP_SIZE;
    const u32 lane_idx = threadIdx.x % WARP_SIZE;
    const u32 highest = GUESS_BINS - 1 - lane_idx * BINS_PER_LANE;
    u32 prefix = 0;
    u32 known = 0;
    if (n < rank) return 0;
    for (u32 shift = 32 - GUESS_BITS; shift > 0; shift -= GUESS_BITS) {
        for (u32 i = 0; i < BINS_PER_LANE; ++i) bins[highest - i] = 0;
        __syncwarp();
#pragma unroll 4
        for (u32 i = lane_idx; i < n; i += WARP_SIZE) {
            const u32 key = keys[i];
            if ((key & known) == prefix) atomicAdd(&bins[(key >> shift) % GUESS_BINS], 1u);
        }
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
        prefix |= __shfl_sync(FULL_WARP, bin, lane) << shift;
        rank -= __shfl_sync(FULL_WARP, above, lane);
        known |= (GUESS_BINS - 1) << shift;
        __syncwarp();
    }
    return prefix;
}
