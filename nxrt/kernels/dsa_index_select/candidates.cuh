// Keys that may be among a row's best: what is known of their scores, and which are the k best.
//
// A score is known as a lower and an upper bound, as order keys (numerics.cuh). Of two equal scores
// the lower position wins, so that what is compared is (order key, ~position): no two are equal.
#pragma once

#include "nxrt/block.cuh"

constexpr u32 WARPS = 8;
constexpr u32 THREADS = WARPS * WARP_SIZE;
constexpr u32 DIGIT_BITS = 11;
constexpr u32 NUM_BINS = 1u << DIGIT_BITS;
constexpr u32 FIRST_SHIFT = 64 - DIGIT_BITS;
constexpr u32 IS_EXACT = 1u << 31;         // of a place, whose lower bits are the position
constexpr u32 IS_WIDE = 1u << 30;          // likewise
constexpr float WIDE = 8.0f;               // times the radius of others
constexpr float UNIT = 0x1p-24f;           // the largest relative error of one rounding

__device__ __forceinline__ u64 ranked(u32 key, u32 position) {
    return static_cast<u64>(key) << 32 | static_cast<u32>(~position);
}

// How far a score may be from its approximation, both with the bias added and rounded: `radius`
// without it. An infinite approximation is that of an infinite bias, and no longer one.
__device__ __forceinline__ float radius_at(float value, float radius) {
    const float size = fabsf(value);
    return size <= 0x1.fffffep127f ? __fmaf_ru(size, 2.5f * UNIT, radius) : 0.0f;
}

// In shared memory, in no order. The value is the score where the place says so, NaN where nothing
// is known, and elsewhere an approximation; its radius is wider where the place says so.
struct Candidates {
    u32* places;
    float* values;
    float radius;

    __device__ __forceinline__ u32 position(u32 i) const {
        return places[i] & ~(IS_EXACT | IS_WIDE);
    }

    __device__ __forceinline__ float radius_of(u32 i) const {
        return radius_at(values[i], places[i] & IS_WIDE ? WIDE * radius : radius);
    }

    __device__ __forceinline__ u64 low(u32 i) const {
        const float value = values[i];
        if (places[i] & IS_EXACT) return ranked(total_order_key(value), position(i));
        if (value != value) return ranked(0, position(i));
        const float lowest = __fadd_rd(value, -radius_of(i));
        return ranked(total_order_key(lowest), position(i));
    }

    __device__ __forceinline__ u64 high(u32 i) const {
        const float value = values[i];
        if (places[i] & IS_EXACT) return ranked(total_order_key(value), position(i));
        if (value != value) return ranked(0xffffffffu, position(i));
        const float highest = __fadd_ru(value, radius_of(i));
        return ranked(total_order_key(highest), position(i));
    }
};

struct SelectState {
    u32 bins[NUM_BINS];    // of the values collected so far, as ValueBins has them
    u32 digits[NUM_BINS];  // scratch of a radix search
    u64 threshold;         // what a key must reach to be collected
    u64 most;
    u32 warp_sums[WARPS];
    u32 digit;
    u32 num_above;
    u32 count;             // of the candidates
    u32 num_kept;
    u32 num_wild;          // of which too little is known to be in a bin
    u32 num_certain;
    u32 num_doubts;
    u32 num_before;
    u32 doubts_place;
};

// Number the lanes that want a place, after those who came before; the others' result is unused.
__device__ __forceinline__ u32 take_place(u32* count, bool is_wanted) {
    const u32 lane_idx = threadIdx.x % WARP_SIZE;
    const u32 mask = __ballot_sync(FULL_WARP, is_wanted);
    if (mask == 0) return 0;
    const u32 leader = __ffs(mask) - 1;
    u32 first = 0;
    if (lane_idx == leader) first = atomicAdd(count, static_cast<u32>(__popc(mask)));
    return __shfl_sync(FULL_WARP, first, leader) + __popc(mask & ((1u << lane_idx) - 1));
}

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

__device__ __forceinline__ void clear(u32* bins) {
    for (u32 bin = threadIdx.x; bin < NUM_BINS; bin += THREADS) bins[bin] = 0;
}

// Find the bin that holds the wanted-th value from the top, into state.digit, and how many are in
// bins above it. Return how many values there are; where they are too few, nothing is found. Begins
// and ends with a barrier.
__device__ __forceinline__ u32 choose_bin(SelectState& state, const u32* bins, u32 wanted) {
    constexpr u32 QUADS_PER_THREAD = NUM_BINS / THREADS / 4;
    const u32 first_quad = (THREADS - 1 - threadIdx.x) * QUADS_PER_THREAD;
    u32 counts[4 * QUADS_PER_THREAD];
    u32 sum = 0;
    __syncthreads();
#pragma unroll
    for (u32 i = 0; i < QUADS_PER_THREAD; ++i) {
        const uint4 quad = reinterpret_cast<const uint4*>(bins)[first_quad + i];
        counts[4 * i] = quad.x;
        counts[4 * i + 1] = quad.y;
        counts[4 * i + 2] = quad.z;
        counts[4 * i + 3] = quad.w;
        sum += quad.x + quad.y + quad.z + quad.w;
    }
    u32 total;
    u32 above = block_exclusive_sum(sum, state.warp_sums, total);
    const bool is_here = above < wanted && wanted <= above + sum;
#pragma unroll
    for (u32 i = 4 * QUADS_PER_THREAD; i-- > 0;) {
        if (is_here && above < wanted && wanted <= above + counts[i]) {
            state.digit = first_quad * 4 + i;
            state.num_above = above;
        }
        above += counts[i];
    }
    __syncthreads();
    return total;
}

// Return the k-th largest value of n, or a lower one that exactly k values reach. All threads call,
// with 1 <= k <= n; values must differ.
template <class Value>
__device__ __forceinline__ u64 kth_largest(SelectState& state, u32 n, u32 k, Value value) {
    u64 prefix = 0;
    u32 wanted = k;
    for (u32 shift = FIRST_SHIFT;; shift = next_shift(shift)) {
        clear(state.digits);
        __syncthreads();
        for (u32 i = threadIdx.x; i < n; i += THREADS) {
            const u64 found = value(i);
            if (begins_with(found, prefix, shift)) {
                atomicAdd(&state.digits[digit_of(found, shift)], 1u);
            }
        }
        choose_bin(state, state.digits, wanted);
        prefix |= static_cast<u64>(state.digit) << shift;
        wanted -= state.num_above;
        const bool is_found = state.digits[state.digit] == wanted || shift == 0;
        __syncthreads();
        if (is_found) return prefix;
    }
}

// Keep the candidates that reach state.threshold. All threads call. Ends with a barrier.
__device__ __forceinline__ void compact(SelectState& state, const Candidates& all) {
    constexpr u32 AT_ONCE = 4;
    const u32 n = state.count;
    if (threadIdx.x == 0) state.num_kept = 0;
    for (u32 begin = 0; begin < n; begin += AT_ONCE * THREADS) {
        u32 places[AT_ONCE];
        float values[AT_ONCE];
        bool is_kept[AT_ONCE];
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; ++i) {
            const u32 index = begin + i * THREADS + threadIdx.x;
            is_kept[i] = index < n && all.high(index) >= state.threshold;
            places[i] = index < n ? all.places[index] : 0;
            values[i] = index < n ? all.values[index] : 0.0f;
        }
        // What is written from here on comes no later than what has been read.
        __syncthreads();
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; ++i) {
            const u32 place = take_place(&state.num_kept, is_kept[i]);
            if (!is_kept[i]) continue;
            all.places[place] = places[i];
            all.values[place] = values[i];
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) state.count = state.num_kept;
    __syncthreads();
}

__device__ __forceinline__ void raise(SelectState& state, u64 threshold) {
    if (threadIdx.x == 0 && threshold > state.threshold) state.threshold = threshold;
    __syncthreads();
}
