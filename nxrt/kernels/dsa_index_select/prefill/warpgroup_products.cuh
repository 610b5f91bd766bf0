// A block's query rows as the right operand of a warpgroup's products, and what those products with
// 64 keys say of each row's scores.
//
// Nothing here decides which keys are kept.
#pragma once

#include "nxrt/wgmma.cuh"
#include "score_bounds.cuh"

constexpr u32 TILE_KEYS = PRODUCT_ROWS;
constexpr u32 STEPS = D / PRODUCT_DEPTH;
constexpr u32 STEPS_PER_TILE = SWIZZLE_ROW / (2 * PRODUCT_DEPTH);
constexpr u32 HALVES = 2;  // of the rows, each of a product's columns
constexpr u32 COLUMNS = HALVES * PRODUCT_COLUMNS;
constexpr u32 OPERAND_TILE = COLUMNS * SWIZZLE_ROW;
constexpr u32 LANE_KEYS = 2;  // of a tile

// The part of a tile's keys that a lane loads: chunks 4c + j of keys g and g + 8 of its warp's 16.
struct KeyWords {
    uint4 chunks[LANE_KEYS][QUADS];
};

// The same as the left operand: the depth is in another order, which `load_queries` follows.
struct KeyFragments {
    u32 words[STEPS][4];
};

// Of the two keys of this lane the first; the second is 8 further on.
__device__ __forceinline__ u32 key_in_tile() {
    return threadIdx.x % WARPGROUP_SIZE / WARP_SIZE * 16 + threadIdx.x % WARP_SIZE / 4;
}

// `key` is where this lane's part of the first key is.
__device__ __forceinline__ void load_key(uint4 (&chunks)[QUADS], const Stored* key, u32 position) {
    const uint4* source = reinterpret_cast<const uint4*>(key + static_cast<u64>(position) * D);
#pragma unroll
    for (u32 c = 0; c < QUADS; ++c) chunks[c] = __ldg(source + 4 * c);
}

// The products that read what was in the fragments must be done; `zero` as `in_place_of` says.
__device__ __forceinline__ void arrange(KeyFragments& fragments, const KeyWords& words, u32 zero) {
#pragma unroll
    for (u32 c = 0; c < QUADS; ++c) {
        const uint4& k = words.chunks[0][c];
        const uint4& l = words.chunks[1][c];
        const u32 arranged[8] = {k.x, l.x, k.y, l.y, k.z, l.z, k.w, l.w};
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
            u32& word = fragments.words[2 * c + i / 4][i % 4];
            word = in_place_of(word, arranged[i], zero);
        }
    }
}

// Lay out the rows' heads, row r's from column r * COLUMNS_PER_ROW on, and zeros between. In each
// 32 depths word i of chunk j becomes word j of chunk i.
template <u32 COLUMNS_PER_ROW>
__device__ __forceinline__ void load_queries(u8* operand, const Stored* query, u32 num_rows,
                                             u32 H) {
    for (u32 i = threadIdx.x; i < COLUMNS * QUADS; i += THREADS) {
        const u32 column = i / QUADS;
        const u32 c = i % QUADS;
        const u32 r = column / COLUMNS_PER_ROW;
        const u32 h = column % COLUMNS_PER_ROW;
        uint4 in[4] = {};
        if (r < num_rows && h < H) {
            const Stored* head = query + (static_cast<u64>(r) * H + h) * D;
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                in[j] = __ldg(reinterpret_cast<const uint4*>(head) + 4 * c + j);
            }
        }
        const uint4 out[4] = {{in[0].x, in[1].x, in[2].x, in[3].x},
                              {in[0].y, in[1].y, in[2].y, in[3].y},
                              {in[0].z, in[1].z, in[2].z, in[3].z},
                              {in[0].w, in[1].w, in[2].w, in[3].w}};
        u8* const line = operand + c / 2 * OPERAND_TILE + column * SWIZZLE_ROW;
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
            const u32 chunk = (c % 2 * 4 + j) ^ column % 8;
            *reinterpret_cast<uint4*>(line + chunk * 16) = out[j];
        }
    }
}

// Where a column's weight is: a lane finds those of its columns in two tiles of 8 in one piece.
__device__ __forceinline__ u32 place_of_weight(u32 column) {
    const u32 half = column % 16 / 8;
    return (column / 16 * 4 + column % 8 / 2) * 4 + half * 2 + column % 2;
}

// Start to multiply a warpgroup's keys with half of the rows.
__device__ __forceinline__ void start_products(float (&dots)[PRODUCT_VALUES],
                                               const KeyFragments& keys, SharedOperand queries,
                                               u32 half) {
    const SharedOperand operand = advanced(queries, half * PRODUCT_COLUMNS * SWIZZLE_ROW);
    fence_products();
#pragma unroll
    for (u32 step = 0; step < STEPS; ++step) {
        const u32 offset = step / STEPS_PER_TILE * OPERAND_TILE +
                           step % STEPS_PER_TILE * 2 * PRODUCT_DEPTH;
        start_product(Input(), dots, keys.words[step], advanced(operand, offset), step != 0);
    }
    commit_products();
}

// Of each half of ROWS rows a lane decides about one, for so many of its keys.
template <u32 ROWS>
constexpr u32 OWN_KEYS = ROWS * LANE_KEYS / HALVES / 4;

template <u32 ROWS>
__device__ __forceinline__ u32 own_row(u32 half) {
    return half * ROWS / HALVES + threadIdx.x % 4 * OWN_KEYS<ROWS> / LANE_KEYS;
}

// The first of them; another is 8 further on.
template <u32 ROWS>
__device__ __forceinline__ u32 own_key() {
    return key_in_tile() + threadIdx.x % 4 * OWN_KEYS<ROWS> % LANE_KEYS * 8;
}

// Sum over the 4 lanes that share keys: lane j gets values j * NUM / 4 + i at i.
template <u32 NUM>
__device__ __forceinline__ void reduce_totals(float (&values)[NUM]) {
#pragma unroll
    for (u32 part = 2; part > 0; part /= 2) {
        const bool is_upper = (threadIdx.x & part) != 0;
        const u32 count = NUM * part / 4;
#pragma unroll
        for (u32 i = 0; i < count; ++i) {
            const float sent = is_upper ? values[i] : values[i + count];
            const float kept = is_upper ? values[i + count] : values[i];
            values[i] = kept + __shfl_xor_sync(FULL_WARP, sent, part);
        }
    }
}

// Twice what is positive of a dot, exactly; unlike a maximum, at the rate of sums.
__device__ __forceinline__ float twice_relu(float dot) { return __fadd_rn(dot, fabsf(dot)); }

// The scores, without bias and to within the radius, that this lane decides about in half of ROWS
// rows. The weights are half of what they are.
template <u32 ROWS>
__device__ __forceinline__ void add_up_heads(const float4* weights, u32 half,
                                             const float (&dots)[PRODUCT_VALUES],
                                             float (&own)[OWN_KEYS<ROWS>]) {
    constexpr u32 HALF_ROWS = ROWS / HALVES;
    constexpr u32 PAIRS = PRODUCT_COLUMNS / 16 / HALF_ROWS;  // of column tiles, of a row
    const float4* const of_lane = weights + half * PRODUCT_COLUMNS / 4 + threadIdx.x % 4;
    float totals[HALF_ROWS * LANE_KEYS] = {};
#pragma unroll
    for (u32 pair = 0; pair < PAIRS; ++pair) {
#pragma unroll
        for (u32 r = 0; r < HALF_ROWS; ++r) {
            const float4 weight = of_lane[(r * PAIRS + pair) * 4];
#pragma unroll
            for (u32 i = 0; i < LANE_KEYS; ++i) {
                const u32 first = 8 * (r * PAIRS + pair) + 2 * i;
                float& total = totals[r * LANE_KEYS + i];
                total = fmaf(twice_relu(dots[first]), weight.x, total);
                total = fmaf(twice_relu(dots[first + 1]), weight.y, total);
                total = fmaf(twice_relu(dots[first + 4]), weight.z, total);
                total = fmaf(twice_relu(dots[first + 5]), weight.w, total);
            }
        }
    }
    // Here, not where the sums are used: the next products take the place of the dots.
#pragma unroll
    for (u32 i = 0; i < HALF_ROWS * LANE_KEYS; ++i) totals[i] = pinned(totals[i]);
    reduce_totals(totals);
#pragma unroll
    for (u32 i = 0; i < OWN_KEYS<ROWS>; ++i) own[i] = totals[i];
}
