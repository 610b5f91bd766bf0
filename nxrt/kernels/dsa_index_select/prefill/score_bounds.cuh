// Bounds of the scores of 32 keys, by the tensor cores of one warp.
#pragma once

#include "query_row.cuh"

constexpr u32 KEY_TILES = WARP_SIZE / 8;  // of 8 keys, as the matrix instruction takes them
constexpr u32 QUADS = D / 32;             // 16-byte loads of a lane for each of its keys

// Lane (g, j) holds chunks 4c + j of keys 8n + g. Which depth meets which does not matter to a dot,
// as long as query and key agree, so that every lane loads 16 bytes in one piece.
struct KeyTile {
    uint4 chunks[KEY_TILES][QUADS];
};

// Start to copy keys to a stage, [KEY_TILES][QUADS][THREADS]: each lane what it will read itself, so
// that nobody has to wait for another. Keys past the last are the last one again.
__device__ __forceinline__ void copy_keys(uint4* stage, const Stored* key, u32 begin, u32 last) {
    const u32 g = threadIdx.x % WARP_SIZE / 4;
    const u32 j = threadIdx.x % 4;
#pragma unroll
    for (u32 n = 0; n < KEY_TILES; ++n) {
        const u32 position = begin + 8 * n + g < last ? begin + 8 * n + g : last;
        const uint4* source = reinterpret_cast<const uint4*>(key + static_cast<u64>(position) * D);
#pragma unroll
        for (u32 c = 0; c < QUADS; ++c) {
            copy_chunk(stage + threadIdx.x, (n * QUADS + c) * THREADS, source + 4 * c + j);
        }
    }
}

__device__ __forceinline__ void load_keys(KeyTile& tile, const uint4* stage) {
#pragma unroll
    for (u32 n = 0; n < KEY_TILES; ++n) {
#pragma unroll
        for (u32 c = 0; c < QUADS; ++c) {
            tile.chunks[n][c] = stage[(n * QUADS + c) * THREADS + threadIdx.x];
        }
    }
}

__device__ __forceinline__ float add_squares(float sum, u32 word) {
    const float low = half_of(word, 0);
    const float high = half_of(word, 1);
    return fmaf(high, high, fmaf(low, low, sum));
}

// Lane i returns the norm of key i, rounded up.
__device__ __forceinline__ float norm_of_key(const KeyTile& tile) {
    const u32 lane_idx = threadIdx.x % WARP_SIZE;
    float sums[KEY_TILES];
#pragma unroll
    for (u32 n = 0; n < KEY_TILES; ++n) {
        sums[n] = 0.0f;
#pragma unroll
        for (u32 c = 0; c < QUADS; ++c) {
            const uint4 chunk = tile.chunks[n][c];
            sums[n] = add_squares(add_squares(sums[n], chunk.x), chunk.y);
            sums[n] = add_squares(add_squares(sums[n], chunk.z), chunk.w);
        }
        sums[n] += __shfl_xor_sync(FULL_WARP, sums[n], 1);
        sums[n] += __shfl_xor_sync(FULL_WARP, sums[n], 2);
    }
    float sum = 0.0f;
#pragma unroll
    for (u32 n = 0; n < KEY_TILES; ++n) {
        const float of_tile = __shfl_sync(FULL_WARP, sums[n], lane_idx % 8 * 4);
        if (lane_idx / 8 == n) sum = of_tile;
    }
    // The sum is low by less than its count of roundings, and by what underflowed.
    return __fsqrt_ru(__fmaf_ru(sum, 1.0f + 0x1p-14f, 0x1p-140f));
}

// Reduce 8 values a lane over the 8 lanes with the same j; lane (g, j) returns value g.
template <class Combine>
__device__ __forceinline__ float reduce_over_heads(float (&values)[8], Combine combine) {
    const u32 lane_idx = threadIdx.x % WARP_SIZE;
#pragma unroll
    for (u32 half = 4; half > 0; half >>= 1) {
        const bool is_upper = (lane_idx & 4 * half) != 0;
#pragma unroll
        for (u32 i = 0; i < half; ++i) {
            const float sent = is_upper ? values[i] : values[i + half];
            const float kept = is_upper ? values[i + half] : values[i];
            values[i] = combine(kept, __shfl_xor_sync(FULL_WARP, sent, 4 * half));
        }
    }
    return values[0];
}

// Lane i returns what was reduced for key i: lane (g, j) has key 8 * (g / 2) + 2j + g % 2.
__device__ __forceinline__ float of_own_key(float reduced) {
    const u32 lane_idx = threadIdx.x % WARP_SIZE;
    const u32 r = lane_idx % 8;
    return __shfl_sync(FULL_WARP, reduced, (lane_idx / 8 * 2 + r % 2) * 4 + r / 2);
}

struct Approximation {
    float total;  // of the heads, without bias
    float largest_dot;
};

__device__ __forceinline__ void multiply(const QueryRow& row, const KeyTile& tile, u32 h_begin,
                                         float (&dots)[KEY_TILES][4]) {
    const u32 g = threadIdx.x % WARP_SIZE / 4;
    const u32 j = threadIdx.x % 4;
#pragma unroll
    for (u32 c = 0; c < QUADS; ++c) {
        const uint4 upper = chunk_of(row, h_begin + g, 4 * c + j);
        const uint4 lower = chunk_of(row, h_begin + g + 8, 4 * c + j);
#pragma unroll
        for (u32 n = 0; n < KEY_TILES; ++n) {
            const uint4 k = tile.chunks[n][c];
            mma_m16n8k16(Input(), dots[n], upper.x, lower.x, upper.y, lower.y, k.x, k.y);
            mma_m16n8k16(Input(), dots[n], upper.z, lower.z, upper.w, lower.w, k.z, k.w);
        }
    }
}

// Lane i returns what is known of key i.
__device__ __forceinline__ Approximation approximate(const QueryRow& row, const KeyTile& tile) {
    const u32 g = threadIdx.x % WARP_SIZE / 4;
    const float lowest = __int_as_float(0xff800000);
    float totals[2 * KEY_TILES] = {};  // key 8n + 2j + i at 2n + i
    float largest[2 * KEY_TILES];
#pragma unroll
    for (u32 i = 0; i < 2 * KEY_TILES; ++i) largest[i] = lowest;
    for (u32 h_begin = 0; h_begin < row.H16; h_begin += HEAD_TILE) {
        float dots[KEY_TILES][4] = {};
        multiply(row, tile, h_begin, dots);
        const float weight[2] = {row.weights[h_begin + g], row.weights[h_begin + g + 8]};
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            const bool is_head = h_begin + g + 8 * half < row.H;
#pragma unroll
            for (u32 i = 0; i < 2 * KEY_TILES; ++i) {
                const float dot = dots[i / 2][2 * half + i % 2];
                const float scored = fmaxf(row.scale * dot, 0.0f);
                totals[i] = fmaf(scored, weight[half], totals[i]);
                largest[i] = fmaxf(largest[i], is_head ? dot : lowest);
            }
        }
    }
    const float total = reduce_over_heads(totals, [](float a, float b) { return a + b; });
    const float dot = reduce_over_heads(largest, [](float a, float b) { return fmaxf(a, b); });
    return {of_own_key(total), of_own_key(dot)};
}

__device__ __forceinline__ Bounds bounds_of(const Radius& radius, const Approximation& found,
                                            float norm, float bias) {
    if (!(norm < radius.norm_limit)) return {0, CERTAIN};
    float low = 0.0f;
    float high = 0.0f;
    const float dot_radius = __fmaf_ru(radius.dot_per_norm, norm, radius.dot_floor);
    const bool is_zero = radius.is_zero || found.largest_dot < -dot_radius;
    if (!is_zero) {
        const float width = __fmaf_ru(radius.per_norm, norm, radius.floor);
        low = __fadd_rd(found.total, -width);
        high = __fadd_ru(found.total, width);
    }
    // Rounding keeps order: the score is between the rounded sums.
    return {total_order_key(__fadd_rn(low, bias)), total_order_key(__fadd_rn(high, bias))};
}
