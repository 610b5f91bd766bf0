// Cooperation of the threads of one block.
#pragma once

#include "nxrt/numerics.cuh"

constexpr u32 WARP_SIZE = 32;
constexpr u32 FULL_WARP = 0xffffffffu;

__device__ __forceinline__ u32 warp_inclusive_sum(u32 value, u32 lane_idx) {
#pragma unroll
    for (u32 offset = 1; offset < WARP_SIZE; offset <<= 1) {
        const u32 other = __shfl_up_sync(FULL_WARP, value, offset);
        if (lane_idx >= offset) value += other;
    }
    return value;
}

// Sum over all lower threads of a block of NUM_WARPS full warps; `total` gets the block's sum.
// `warp_sums` is scratch that the caller shares; all threads must call, and may call again at once.
template <u32 NUM_WARPS>
__device__ __forceinline__ u32 block_exclusive_sum(u32 value, u32 (&warp_sums)[NUM_WARPS],
                                                   u32& total) {
    static_assert(NUM_WARPS <= WARP_SIZE, "one warp adds up the warps");
    const u32 lane_idx = threadIdx.x % WARP_SIZE;
    const u32 warp_idx = threadIdx.x / WARP_SIZE;
    const u32 inclusive = warp_inclusive_sum(value, lane_idx);
    if (lane_idx == WARP_SIZE - 1) warp_sums[warp_idx] = inclusive;
    __syncthreads();
    if (warp_idx == 0) {
        const u32 sum = lane_idx < NUM_WARPS ? warp_sums[lane_idx] : 0;
        const u32 up_to = warp_inclusive_sum(sum, lane_idx);
        if (lane_idx < NUM_WARPS) warp_sums[lane_idx] = up_to;
    }
    __syncthreads();
    const u32 before = warp_idx == 0 ? 0 : warp_sums[warp_idx - 1];
    total = warp_sums[NUM_WARPS - 1];
    __syncthreads();
    return before + inclusive - value;
}
