// Bins of equal width for the values of one row, and the norm up to which its keys are filtered.
//
// Both are guessed from a few of the row's keys, the same by every block of the row. A bad guess
// costs time and nothing else.
#pragma once

#include "block_memory.cuh"

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

constexpr u32 BINS_BELOW = NUM_BINS / 4;  // the middle of the values; the best are above it
constexpr float BINS_PER_HALF = 344.0f;  // of the values, in the middle: 256 a deviation

struct ValueBins {
    float base;
    float width;
    float per_width;

    // Does not fall as the value rises, whatever is rounded; what is beyond is in the outer bins.
    __device__ __forceinline__ u32 bin_of(float value) const {
        const int bin = __float2int_rd(__fmul_rn(__fsub_rn(value, base), per_width));
        return static_cast<u32>(bin < 0 ? 0 : bin < static_cast<int>(NUM_BINS) ? bin : NUM_BINS - 1);
    }

    // Not above any value of this bin or a higher one. A sixteenth of a bin is more than what is
    // rounded here and in bin_of, as no bin is narrower than 2^-16 of the values in the middle.
    __device__ __forceinline__ float bottom_of(u32 bin) const {
        if (bin == 0) return -infinity();
        return __fmaf_rn(static_cast<float>(bin) - 0.0625f, width, base);
    }

    // Not below any value of this bin or a lower one.
    __device__ __forceinline__ float top_of(u32 bin) const {
        if (bin == NUM_BINS - 1) return infinity();
        return __fmaf_rn(static_cast<float>(bin) + 1.0625f, width, base);
    }
};

// Half of the sample are the row's first keys, and half are others as far apart as can be.
__device__ __forceinline__ u32 sample_position(u32 T, u32 i) {
    if (i < KEYS / 2) return i < T ? i : T - 1;
    return static_cast<u32>(static_cast<u64>(T) * (i - KEYS / 2) / (KEYS / 2));
}

// Start to copy the sample; each thread waits for its own copies.
__device__ __forceinline__ void start_sample(const Shared& shared, const Problem& problem) {
#pragma unroll
    for (u32 i = threadIdx.x; i < WARP_CHUNKS; i += THREADS) {
        const u64 position = sample_position(problem.T, i / CHUNKS);
        const uint4* source = reinterpret_cast<const uint4*>(problem.key + position * D);
        copy_chunk(shared.sample + i, source + i % CHUNKS);
    }
}

// Number the lanes by size.
__device__ __forceinline__ u32 rank_among(float mine) {
    const u32 lane_idx = threadIdx.x % WARP_SIZE;
    u32 rank = 0;
#pragma unroll 8
    for (u32 i = 0; i < KEYS; ++i) {
        const float other = __shfl_sync(FULL_WARP, mine, i);
        rank += other < mine || (other == mine && i < lane_idx);
    }
    return rank;
}

__device__ __forceinline__ float of_rank(float mine, u32 rank, u32 wanted) {
    const u32 mask = __ballot_sync(FULL_WARP, rank == wanted);
    return __shfl_sync(FULL_WARP, mine, __ffs(mask) - 1);
}

// Find the quartiles of a sample, whose key i lane i has; of what is allowed of it, if anything is.
__device__ __forceinline__ void find_quartiles(Quartiles& quartiles, float total, float norm,
                                               float bias) {
    const bool is_allowed = bias > MASK_THRESHOLD;
    float value = is_allowed ? __fadd_rn(total, bias) : total;
    bool is_used = threadIdx.x % WARP_SIZE < KEYS && norm < LARGE && fabsf(value) < LARGE;
    if (__any_sync(FULL_WARP, is_used && is_allowed)) is_used = is_used && is_allowed;
    const u32 count = __popc(__ballot_sync(FULL_WARP, is_used));
    value = is_used ? value : infinity();
    norm = is_used ? norm : infinity();
    const u32 value_rank = rank_among(value);
    const u32 norm_rank = rank_among(norm);
    const float middle = of_rank(norm, norm_rank, count / 2);
    const float upper = of_rank(norm, norm_rank, count - 1 - count / 4);
    quartiles.lower = of_rank(value, value_rank, count / 4);
    quartiles.middle = of_rank(value, value_rank, count / 2);
    quartiles.upper = of_rank(value, value_rank, count - 1 - count / 4);
    quartiles.norm_limit = fmaxf(upper + 4.0f * (upper - middle), 1.25f * upper);
    if (count == 0) quartiles = {0.0f, 0.0f, 0.0f, -1.0f};
}

__device__ __forceinline__ ValueBins bins_of(const Quartiles& found) {
    float width = (found.upper - found.lower) / BINS_PER_HALF;
    width = fmaxf(fmaxf(width, fabsf(found.middle) * 0x1p-16f), 0x1p-100f);
    return {__fmaf_rn(-static_cast<float>(BINS_BELOW), width, found.middle), width, 1.0f / width};
}
