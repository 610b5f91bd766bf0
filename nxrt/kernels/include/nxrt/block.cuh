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
    const u32 lane_idx = threadIdx.x % WARP_SIZE;
    const u32 warp_idx = threadIdx.x / WARP_SIZE;
    const u32 inclusive = warp_inclusive_sum(value, lane_idx);
    if (lane_idx == WARP_SIZE - 1) warp_sums[warp_idx] = inclusive;
    __syncthreads();
    u32 before = 0;
    total = 0;
#pragma unroll
    for (u32 warp = 0; warp < NUM_WARPS; ++warp) {
        const u32 sum = warp_sums[warp];
        if (warp < warp_idx) before += sum;
        total += sum;
    }
    __syncthreads();
    return before + inclusive - value;
}
