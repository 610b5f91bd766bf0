// Bins of equal width for the values of one row, and the norm up to which its keys are filtered.
//
// Both are guessed from a few of the row's keys, the same by every block of the row. A bad guess
// costs time and nothing else.
#pragma once

#include "block_memory.cuh"

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

constexpr u32 BINS_BELOW = NUM_BINS / 4;  // the middle of the values; the best are above it
constexpr float BINS_PER_QUARTER = 172.0f;  // of the values between the outer: 128 a deviation

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

// One warp has the row's first keys, and one has others that are as far apart as can be.
__device__ __forceinline__ u32 sample_position(const Problem& problem, u32 i) {
    if (threadIdx.x < WARP_SIZE) return i < problem.T ? i : problem.T - 1;
    return static_cast<u32>(static_cast<u64>(problem.T) * i / KEYS);
}

// Put this lane's key of the sample where it is compared with the others.
__device__ __forceinline__ void add_to_sample(const Shared& shared, float total, float norm,
                                              float bias) {
    const u32 lane_idx = threadIdx.x % WARP_SIZE;
    if (lane_idx >= KEYS) return;
    const u32 own = threadIdx.x / WARP_SIZE * KEYS + lane_idx;
    const bool is_allowed = bias > MASK_THRESHOLD;
    const float value = is_allowed ? __fadd_rn(total, bias) : total;
    const bool is_finite = norm < LARGE && fabsf(value) < LARGE;
    shared.sample->values[own] = is_finite ? value : infinity();
    shared.sample->norms[own] = is_finite ? norm : infinity();
    shared.sample->is_allowed[own] = is_allowed && is_finite;
}

// Number the sample by size; the infinite are last, and say nothing but there.
__device__ __forceinline__ u32 rank_in(const float (&all)[SAMPLE_SIZE], u32 own) {
    constexpr u32 SHARES = THREADS / SAMPLE_SIZE;
    constexpr u32 SIZE = SAMPLE_SIZE / SHARES;
    const float mine = all[own];
    const u32 begin = threadIdx.x % SHARES * SIZE;
    u32 rank = 0;
#pragma unroll
    for (u32 i = begin; i < begin + SIZE; ++i) {
        rank += all[i] < mine || (all[i] == mine && i < own);
    }
#pragma unroll
    for (u32 offset = SHARES / 2; offset > 0; offset >>= 1) {
        rank += __shfl_xor_sync(FULL_WARP, rank, offset);
    }
    return rank;
}

// Find the sample's quartiles; of what is allowed of it, if anything is. Begins with a barrier behind
// add_to_sample, and ends with one.
__device__ __forceinline__ Quartiles quartiles_of(Sample& sample) {
    constexpr u32 SHARES = THREADS / SAMPLE_SIZE;
    const u32 own = threadIdx.x / SHARES;
    if (threadIdx.x == 0) sample.quartiles = {0.0f, 0.0f, 0.0f, -1.0f};
    const bool is_allowed = sample.is_allowed[own];
    if (__syncthreads_or(is_allowed) && !is_allowed && threadIdx.x % SHARES == 0) {
        sample.values[own] = sample.norms[own] = infinity();
    }
    __syncthreads();
    const u32 count = __syncthreads_count(sample.norms[own] < infinity()) / SHARES;
    const u32 value_rank = rank_in(sample.values, own);
    const u32 norm_rank = rank_in(sample.norms, own);
    if (count != 0 && threadIdx.x % SHARES == 0) {
        if (value_rank == count / 4) sample.quartiles.lower = sample.values[own];
        if (value_rank == count / 2) sample.quartiles.middle = sample.values[own];
        if (value_rank == count - 1 - count / 4) sample.quartiles.upper = sample.values[own];
        if (norm_rank == count - 1 - count / 4) sample.quartiles.norm = sample.norms[own];
    }
    __syncthreads();
    return sample.quartiles;
}

__device__ __forceinline__ ValueBins bins_of(const Quartiles& found) {
    float width = (found.upper - found.lower) / BINS_PER_QUARTER;
    width = fmaxf(fmaxf(width, fabsf(found.middle) * 0x1p-16f), 0x1p-100f);
    return {__fmaf_rn(-static_cast<float>(BINS_BELOW), width, found.middle), width, 1.0f / width};
}
