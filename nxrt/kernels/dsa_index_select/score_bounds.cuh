// Approximate scores of a warp's keys, by tensor cores.
#pragma once

#include "query_row.cuh"

constexpr u32 KEY_TILES = 4 / PARTS;   // of 8 keys, as the matrix instruction takes them
constexpr u32 KEYS = 8 * KEY_TILES;    // of a warp at once
constexpr u32 KEY_LOADS = CHUNKS / 4;  // of 16 bytes, of a lane for each of its keys
constexpr u32 WARP_CHUNKS = KEYS * CHUNKS;  // of a stage
constexpr bool IS_BF16 = is_same<Part, BF16>;
// What the sum of a key's squares may be short of: nine roundings of brain floats, and the second half
// of a float.
constexpr float NORM_INFLATE = 1.0f + (IS_BF16 ? 0x1p-5f : 0x1p-14f) + (IS_SPLIT ? 0x1p-6f : 0.0f);

// Lane (g, j) holds chunks 4c + j of keys 8n + g. Which depth meets which does not matter to a dot,
// as long as query and key agree, so that every lane loads 16 bytes in one piece.
struct KeyTile {
    uint2 words[PARTS][KEY_TILES][STEPS];
};

__device__ __forceinline__ void unpack(KeyTile& tile, u32 n, u32 c, const uint4& chunk) {
    constexpr u32 STEPS_PER_LOAD = STEPS / KEY_LOADS;
#pragma unroll
    for (u32 i = 0; i < STEPS_PER_LOAD; ++i) {
        const u32 step = c * STEPS_PER_LOAD + i;
#pragma unroll
        for (u32 part = 0; part < PARTS; ++part) {
            tile.words[part][n][step] = step_words(chunk, step, part);
        }
    }
}

// Load a warp's keys from its part of a stage, [KEYS][CHUNKS].
__device__ __forceinline__ void load_keys(KeyTile& tile, const uint4* stage) {
    const uint4* const own = stage + threadIdx.x % WARP_SIZE / 4 * CHUNKS + threadIdx.x % 4;
#pragma unroll
    for (u32 n = 0; n < KEY_TILES; ++n) {
#pragma unroll
        for (u32 c = 0; c < KEY_LOADS; ++c) unpack(tile, n, c, own[8 * n * CHUNKS + 4 * c]);
        if constexpr (IS_SPLIT) __syncwarp();  // not all at once, for want of registers
    }
}

// Add a word's squares to what a lane has of a key's. Halves of floats and of brain floats are added
// eight at a time as such, which loses less than one part in 40; others as floats.
struct Squares {
    float sum = 0.0f;
    u32 pair = 0;
};

__device__ __forceinline__ void add_squares(Squares& squares, u32 word) {
    if constexpr (IS_BF16) {
        squares.pair = fma_bf16x2(word, word, squares.pair);
    } else {
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            const float value = Part::widen(static_cast<u16>(word >> 16 * half));
            squares.sum = __fmaf_rn(value, value, squares.sum);
        }
    }
}

__device__ __forceinline__ void take_up(Squares& squares) {
    if constexpr (IS_BF16) {
        squares.sum += BF16::widen(static_cast<u16>(squares.pair)) +
                       BF16::widen(static_cast<u16>(squares.pair >> 16));
        squares.pair = 0;
    }
}

// Lane i returns the norm of key i, rounded up. Of a float the first half is taken, and the norm raised
// by what that can be short of it.
__device__ __forceinline__ float norm_of_key(const KeyTile& tile) {
    const u32 lane_idx = threadIdx.x % WARP_SIZE;
    float sums[4] = {};
#pragma unroll
    for (u32 n = 0; n < KEY_TILES; ++n) {
        Squares squares;
#pragma unroll
        for (u32 step = 0; step < STEPS; ++step) {
            add_squares(squares, tile.words[0][n][step].x);
            add_squares(squares, tile.words[0][n][step].y);
            if (step % 4 == 3) take_up(squares);
        }
        sums[n] = squares.sum;
    }
    // Lane (g, j) adds up what its quad has of key 8j + g.
#pragma unroll
    for (u32 half = 2; half > 0; half >>= 1) {
        const bool is_upper = (lane_idx & half) != 0;
#pragma unroll
        for (u32 i = 0; i < half; ++i) {
            const float sent = is_upper ? sums[i] : sums[i + half];
            const float kept = is_upper ? sums[i + half] : sums[i];
            sums[i] = kept + __shfl_xor_sync(FULL_WARP, sent, half);
        }
    }
    const float square = __shfl_sync(FULL_WARP, sums[0], lane_idx % 8 * 4 + lane_idx / 8);
    // Low by no more than its roundings, as all terms are positive, and by what was flushed.
    return __fsqrt_ru(__fmaf_ru(square, NORM_INFLATE, 0x1p-118f));
}

// Reduce the values of a lane's 2 * KEY_TILES keys over the 8 lanes with the same j. Lane i returns that
// of key i; lanes from KEYS on have no key.
template <class Combine>
__device__ __forceinline__ float reduce_over_heads(float (&values)[2 * KEY_TILES], Combine combine) {
    const u32 lane_idx = threadIdx.x % WARP_SIZE;
    if constexpr (KEY_TILES == 2) {
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            values[i] = combine(values[i], __shfl_xor_sync(FULL_WARP, values[i], 16));
        }
    }
#pragma unroll
    for (u32 half = KEY_TILES; half > 0; half >>= 1) {
        const bool is_upper = (lane_idx & 4 * half) != 0;
#pragma unroll
        for (u32 i = 0; i < half; ++i) {
            const float sent = is_upper ? values[i] : values[i + half];
            const float kept = is_upper ? values[i + half] : values[i];
            values[i] = combine(kept, __shfl_xor_sync(FULL_WARP, sent, 4 * half));
        }
    }
    // Lane (g, j) has key 8 * (g / 2) + 2j + g % 2.
    const u32 n = lane_idx / 8;
    const u32 r = lane_idx % 8;
    return __shfl_sync(FULL_WARP, values[0], (2 * n + r % 2) * 4 + r / 2);
}

// Add to `dots` one product of parts, of a head tile with all keys. Fragments begin at the lane's own.
__device__ __forceinline__ void multiply(const uint4* fragments,
                                         const uint2 (&words)[KEY_TILES][STEPS],
                                         float (&dots)[KEY_TILES][4]) {
#pragma unroll
    for (u32 step = 0; step < STEPS; ++step) {
        const uint4 q = fragments[step * WARP_SIZE];
#pragma unroll
        for (u32 n = 0; n < KEY_TILES; ++n) {
            const uint2 k = words[n][step];
            mma_m16n8k16(Part(), dots[n], q.x, q.y, q.z, q.w, k.x, k.y);
        }
    }
}

// Multiply head tile number `head_tile` with all keys: key 8n + 2j + i and head g at dots[n][i], head
// g + 8 at dots[n][2 + i].
__device__ __forceinline__ void multiply_heads(const QueryRow& row, const KeyTile& tile,
                                               u32 head_tile, float (&dots)[KEY_TILES][4]) {
    constexpr u32 SIZE = STEPS * WARP_SIZE;
    const uint4* const first = row.fragments + head_tile * SIZE + threadIdx.x % WARP_SIZE;
    multiply(first, tile.words[0], dots);
    if constexpr (IS_SPLIT) {
        multiply(first, tile.words[1], dots);
        multiply(first + row.H16 / HEAD_TILE * SIZE, tile.words[0], dots);
    }
}

// Lane i returns what is about the score of key i, without bias. H is a multiple of 8.
__device__ __forceinline__ float total_of(const QueryRow& row, const KeyTile& tile) {
    const u32 g = threadIdx.x % WARP_SIZE / 4;
    float totals[2 * KEY_TILES] = {};  // key 8n + 2j + i at 2n + i
#pragma unroll 2
    for (u32 h = g; h < row.H16; h += HEAD_TILE) {
        float dots[KEY_TILES][4] = {};
        const float weights[2] = {row.scaled_weights[h], row.scaled_weights[h + 8]};
        multiply_heads(row, tile, h / HEAD_TILE, dots);
#pragma unroll
        for (u32 i = 0; i < 4 * KEY_TILES; ++i) {
            const u32 key = i % (2 * KEY_TILES);
            const u32 half = i / (2 * KEY_TILES);
            const float dot = fmaxf(dots[key / 2][2 * half + key % 2], 0.0f);
            totals[key] = fmaf(dot, weights[half], totals[key]);
        }
    }
    return reduce_over_heads(totals, [](float a, float b) { return a + b; });
}

// Lane i returns whether every dot of key i, whose norm is given, is certainly negative, so that its
// score is 0 but for the bias. Seldom called: only where no head counts.
__device__ __forceinline__ bool is_certainly_zero(const QueryRow& row, const KeyTile& tile,
                                                  float norm) {
    const float lowest = __int_as_float(0xff800000);
    const u32 g = threadIdx.x % WARP_SIZE / 4;
    float largest[2 * KEY_TILES];
#pragma unroll
    for (u32 key = 0; key < 2 * KEY_TILES; ++key) largest[key] = lowest;
#pragma unroll 1
    for (u32 h = g; h < row.H16; h += HEAD_TILE) {
        float dots[KEY_TILES][4] = {};
        multiply_heads(row, tile, h / HEAD_TILE, dots);
#pragma unroll
        for (u32 i = 0; i < 4 * KEY_TILES; ++i) {
            const u32 key = i % (2 * KEY_TILES);
            const u32 half = i / (2 * KEY_TILES);
            // Heads that pad the tile have dots of 0, which say nothing.
            const bool is_head = h + 8 * half < row.H;
            const float dot = dots[key / 2][2 * half + key % 2];
            largest[key] = fmaxf(largest[key], is_head ? dot : lowest);
        }
    }
    const float dot = reduce_over_heads(largest, [](float a, float b) { return fmaxf(a, b); });
    const Radius& radius = row.radius;
    return radius.is_zero || dot < -__fmaf_ru(radius.dot_per_norm, norm, radius.dot_floor);
}

// What a score may be off, for keys up to a norm.
__device__ __forceinline__ float radius_of_total(const Radius& radius, float norm) {
    return __fmaf_ru(radius.per_norm, norm, radius.floor);
}
