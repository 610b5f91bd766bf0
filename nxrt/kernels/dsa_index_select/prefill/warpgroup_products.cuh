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
constexpr u32 OPERAND_TILE = PRODUCT_COLUMNS * SWIZZLE_ROW;
constexpr u32 LATE_STEPS = 2;  // under way when the other warpgroup may start its own
constexpr u32 LANE_KEYS = 2;   // of a tile

static_assert(STEPS > LATE_STEPS, "something to wait for");

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

// Keys past the last are the last one again.
__device__ __forceinline__ void load_key_words(KeyWords& words, const Stored* key, u32 begin,
                                               u32 T) {
#pragma unroll
    for (u32 i = 0; i < LANE_KEYS; ++i) {
        const u32 offset = key_in_tile() + 8 * i;
        const u32 position = offset < T - begin ? begin + offset : T - 1;
        const uint4* source = reinterpret_cast<const uint4*>(key + static_cast<u64>(position) * D);
#pragma unroll
        for (u32 c = 0; c < QUADS; ++c) {
            words.chunks[i][c] = __ldg(source + 4 * c + threadIdx.x % 4);
        }
    }
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
    for (u32 i = threadIdx.x; i < PRODUCT_COLUMNS * QUADS; i += THREADS) {
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

// Start to multiply a warpgroup's keys with all rows, in two groups.
__device__ __forceinline__ void start_products(float (&dots)[PRODUCT_VALUES],
                                               const KeyFragments& keys, SharedOperand operand) {
    fence_products();
#pragma unroll
    for (u32 step = 0; step < STEPS; ++step) {
        const u32 offset = step / STEPS_PER_TILE * OPERAND_TILE +
                           step % STEPS_PER_TILE * 2 * PRODUCT_DEPTH;
        start_product(Input(), dots, keys.words[step], advanced(operand, offset), step != 0);
        if (step + LATE_STEPS + 1 == STEPS) commit_products();
    }
    commit_products();
}

// Sum over the 4 lanes that share keys: lane j gets row j * ROWS / 4 + i at i.
template <u32 ROWS>
__device__ __forceinline__ void reduce_totals(float (&totals)[ROWS][LANE_KEYS]) {
#pragma unroll
    for (u32 part = 2; part > 0; part /= 2) {
        const bool is_upper = (threadIdx.x & part) != 0;
        const u32 count = ROWS * part / 4;
#pragma unroll
        for (u32 r = 0; r < count; ++r) {
#pragma unroll
            for (u32 i = 0; i < LANE_KEYS; ++i) {
                const float sent = is_upper ? totals[r][i] : totals[r + count][i];
                const float kept = is_upper ? totals[r + count][i] : totals[r][i];
                totals[r][i] = kept + __shfl_xor_sync(FULL_WARP, sent, part);
            }
        }
    }
}

// The rows' scores of this lane's keys, without bias, to within each row's radius; then reduced.
template <u32 ROWS>
__device__ __forceinline__ void add_up_heads(const float4* weights,
                                             const float (&dots)[PRODUCT_VALUES],
                                             float (&totals)[ROWS][LANE_KEYS]) {
    constexpr u32 PAIRS_PER_ROW = PRODUCT_COLUMNS / 16 / ROWS;
#pragma unroll
    for (u32 r = 0; r < ROWS; ++r) {
        totals[r][0] = totals[r][1] = 0.0f;
#pragma unroll
        for (u32 pair = r * PAIRS_PER_ROW; pair < (r + 1) * PAIRS_PER_ROW; ++pair) {
            const float4 weight = weights[pair * 4 + threadIdx.x % 4];
#pragma unroll
            for (u32 i = 0; i < LANE_KEYS; ++i) {
                const u32 own = 8 * pair + 2 * i;
                float& total = totals[r][i];
                total = fmaf(fmaxf(dots[own], 0.0f), weight.x, total);
                total = fmaf(fmaxf(dots[own + 1], 0.0f), weight.y, total);
                total = fmaf(fmaxf(dots[own + 4], 0.0f), weight.z, total);
                total = fmaf(fmaxf(dots[own + 5], 0.0f), weight.w, total);
            }
        }
    }
    reduce_totals<ROWS>(totals);
}
