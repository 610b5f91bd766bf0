// Keys that may be among a row's best: what is known of their scores, and which are the k best.
//
// A score is known as a lower and an upper bound, as order keys (numerics.cuh). Of two equal scores
// the lower position wins, so that what is compared is (order key, ~position): no two are equal.
#pragma once

#include "nxrt/block.cuh"

#ifndef NXRT_WARPS
#define NXRT_WARPS 8
#endif

constexpr u32 WARPS = NXRT_WARPS;
constexpr u32 THREADS = WARPS * WARP_SIZE;
constexpr u32 DIGIT_BITS = 11;
constexpr u32 NUM_BINS = 1u << DIGIT_BITS;
constexpr u32 FIRST_SHIFT = 64 - DIGIT_BITS;
constexpr u32 CERTAIN = 0xffffffffu;  // above every score's key

__device__ __forceinline__ u64 ranked(u32 key, u32 position) {
    return static_cast<u64>(key) << 32 | static_cast<u32>(~position);
}

// Of a score, as order keys.
struct Bounds {
    u32 lower;
    u32 upper;
};

// In shared memory, in ascending order of position.
struct Candidates {
    u32* position;
    u32* lower;
    u32* upper;

    __device__ __forceinline__ u64 low(u32 i) const { return ranked(lower[i], position[i]); }
    __device__ __forceinline__ u64 high(u32 i) const { return ranked(upper[i], position[i]); }
};

struct Tallies {
    u32 num_open;
    u32 num_known;
    u32 num_certain;
};

struct SelectState {
    u32 bins[NUM_BINS];
    u32 warp_sums[WARPS];
    u32 masks[2][WARPS];
    u32 digit;
    u32 num_above;
    Tallies tallies;
    u64 most[WARPS];
};

__device__ __forceinline__ u32 next_shift(u32 shift) {
    return shift > DIGIT_BITS ? shift - DIGIT_BITS : 0;
}

// Digits are DIGIT_BITS wide but for the last, which has what is left of 64 bits.
__device__ __forceinline__ u32 digit_of(u64 value, u32 shift) {
    const u32 width = shift == 0 ? 64 % DIGIT_BITS : DIGIT_BITS;
    return static_cast<u32>(value >> shift) & ((1u << width) - 1);
}

__device__ __forceinline__ bool begins_with(u64 value, u64 prefix, u32 shift) {
    if (shift == FIRST_SHIFT) return true;
    const u32 known = shift == 0 ? 64 % DIGIT_BITS : shift + DIGIT_BITS;
    return (value ^ prefix) >> known == 0;
}

__device__ __forceinline__ void clear_bins(SelectState& state) {
    for (u32 bin = threadIdx.x; bin < NUM_BINS; bin += THREADS) state.bins[bin] = 0;
}

// Find the bin that holds the wanted-th value from the top, into state.digit, and how many are in
// bins above it. There must be at least `wanted`. Ends with a barrier.
__device__ __forceinline__ void choose_digit(SelectState& state, u32 wanted) {
    constexpr u32 BINS_PER_THREAD = NUM_BINS / THREADS;
    const u32 highest = NUM_BINS - 1 - threadIdx.x * BINS_PER_THREAD;
    u32 sum = 0;
#pragma unroll
    for (u32 i = 0; i < BINS_PER_THREAD; ++i) sum += state.bins[highest - i];
    u32 total;
    u32 above = block_exclusive_sum(sum, state.warp_sums, total);
    if (above < wanted && wanted <= above + sum) {
        u32 bin = highest;
        while (above + state.bins[bin] < wanted) above += state.bins[bin--];
        state.digit = bin;
        state.num_above = above;
    }
    __syncthreads();
}

// Return the k-th largest value of n, or a lower one that exactly k values reach. All threads call,
// with 1 <= k <= n; values must differ.
template <class Value>
__device__ __forceinline__ u64 kth_largest(SelectState& state, u32 n, u32 k, Value value) {
    u64 prefix = 0;
    u32 wanted = k;
    for (u32 shift = FIRST_SHIFT;; shift = next_shift(shift)) {
        clear_bins(state);
        __syncthreads();
        for (u32 i = threadIdx.x; i < n; i += THREADS) {
            const u64 found = value(i);
            if (begins_with(found, prefix, shift)) {
                atomicAdd(&state.bins[digit_of(found, shift)], 1u);
            }
        }
        __syncthreads();
        choose_digit(state, wanted);
        prefix |= static_cast<u64>(state.digit) << shift;
        wanted -= state.num_above;
        const bool is_found = state.bins[state.digit] == wanted || shift == 0;
        __syncthreads();
        if (is_found) return prefix;
    }
}

// Keep, in order, the candidates that `keeps` says; return how many. All threads call.
template <class Keeps>
__device__ __forceinline__ u32 compact(SelectState& state, const Candidates& all, u32 n,
                                       Keeps keeps) {
    u32 kept = 0;
    for (u32 begin = 0; begin < n; begin += THREADS) {
        const u32 i = begin + threadIdx.x;
        const bool is_kept = i < n && keeps(i);
        const u32 position = is_kept ? all.position[i] : 0;
        const u32 lower = is_kept ? all.lower[i] : 0;
        const u32 upper = is_kept ? all.upper[i] : 0;
        u32 total;
        const u32 before = block_exclusive_sum(is_kept ? 1u : 0u, state.warp_sums, total);
        if (is_kept) {
            all.position[kept + before] = position;
            all.lower[kept + before] = lower;
            all.upper[kept + before] = upper;
        }
        kept += total;
    }
    __syncthreads();
    return kept;
}

// Drop whatever cannot be among the k best of n > k; return the new number. `threshold` gets what
// an upper bound must reach from now on.
__device__ __forceinline__ u32 prune(SelectState& state, const Candidates& all, u32 n, u32 k,
                                     u64& threshold) {
    threshold = kth_largest(state, n, k, [&](u32 i) { return all.low(i); });
    return compact(state, all, n, [&](u32 i) { return all.high(i) >= threshold; });
}

// Return the largest upper bound among those whose lower bound is below the threshold.
__device__ __forceinline__ u64 most_of_the_rest(SelectState& state, const Candidates& all, u32 n,
                                                u64 threshold) {
    u64 most = 0;
    for (u32 i = threadIdx.x; i < n; i += THREADS) {
        if (all.low(i) < threshold && all.high(i) > most) most = all.high(i);
    }
    for (u32 offset = WARP_SIZE / 2; offset > 0; offset >>= 1) {
        const u64 other = __shfl_xor_sync(FULL_WARP, most, offset);
        if (other > most) most = other;
    }
    if (threadIdx.x % WARP_SIZE == 0) state.most[threadIdx.x / WARP_SIZE] = most;
    __syncthreads();
    most = 0;
    for (u32 warp = 0; warp < WARPS; ++warp) most = state.most[warp] > most ? state.most[warp] : most;
    __syncthreads();
    return most;
}
