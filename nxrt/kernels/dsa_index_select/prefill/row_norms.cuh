// What a row's radius is made of, by one warp.
#pragma once

#include "query_row.cuh"

constexpr u32 LANE_WORDS = D / (2 * WARP_SIZE);

__device__ __forceinline__ float warp_sum_up(float value) {
#pragma unroll
    for (u32 offset = WARP_SIZE / 2; offset > 0; offset >>= 1) {
        value = __fadd_ru(value, __shfl_xor_sync(FULL_WARP, value, offset));
    }
    return value;
}

// A warp returns the norms that a row's radius is made of, as radius_of does by a block: every sum
// is rounded up, so that its order does not matter.
__device__ __forceinline__ RowNorms norms_of_row(u32 H, float scale, const Stored* query,
                                                 const float* weights) {
    const u32 lane_idx = threadIdx.x % WARP_SIZE;
    const u32* words = reinterpret_cast<const u32*>(query) + lane_idx * LANE_WORDS;
    float sums[2 * LANE_WORDS] = {};
    float largest = 0.0f;
    RowNorms norms{0.0f, 0.0f, 0.0f, true};
#pragma unroll 4
    for (u32 h = 0; h < H; ++h, words += D / 2) {
        const float weight = weights[h];
        norms.total_weight = __fadd_ru(norms.total_weight, fabsf(weight));
        norms.has_safe_weights &= is_safe_weight(weight, scale);
        float square = 0.0f;
#pragma unroll
        for (u32 i = 0; i < 2 * LANE_WORDS; ++i) {
            const float value = half_of(words[i / 2], i % 2);
            sums[i] = __fmaf_ru(fabsf(weight), fabsf(value), sums[i]);
            square = __fmaf_ru(value, value, square);
        }
        square = warp_sum_up(square);
        largest = largest < square ? square : largest;  // a NaN is in the other norm
    }
    float square = 0.0f;
    for (u32 i = 0; i < 2 * LANE_WORDS; ++i) square = __fmaf_ru(sums[i], sums[i], square);
    norms.v = __fsqrt_ru(warp_sum_up(square));
    norms.q = __fsqrt_ru(largest);
    return norms;
}
