// A block's query rows in shared memory, and their products with 32 keys in a warp's registers.
//
// Nothing here decides which keys are kept. What another matrix instruction would replace is
// load_fragments, approximate_total and largest_dot.
#pragma once

#include "row_norms.cuh"
#include "score_bounds.cuh"

constexpr u32 MAX_ROWS = 8;      // of a block
constexpr u32 STEPS = 2 * QUADS;  // of 16 depths

struct RowState {
    Radius radius;
    u64 threshold;  // what an upper bound must reach
    u32 tally;      // of the list: entries, and REACHED for each whose lower bound is enough
    u32 is_active;  // its keys are looked at
};

static_assert(MAX_ROWS <= WARPS, "a warp for each row's radius");

struct Rows {
    uint4* fragments;  // [rows][H16 / HEAD_TILE][STEPS][WARP_SIZE], zero from H on
    float* weights;    // [rows][H16], zero from H on
    u32 H;
    u32 H16;
    float scale;
};

// Lay a head tile out as the matrix instruction takes it: lane (g, j) has at 2c + i the i-th halves
// of chunks 4c + j of heads g and g + 8, in the order of its operands.
__device__ __forceinline__ uint4 fragment_of(const Rows& rows, const Stored* query, u32 h, u32 step,
                                             u32 j) {
    const u32 d = (step / 2 * 4 + j) * CHUNK + step % 2 * (CHUNK / 2);
    uint2 halves[2] = {{0, 0}, {0, 0}};
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
        if (h + 8 * i >= rows.H) continue;
        halves[i] = *reinterpret_cast<const uint2*>(query + (h + 8 * i) * D + d);
    }
    return {halves[0].x, halves[1].x, halves[0].y, halves[1].y};
}

__device__ __forceinline__ void load_fragments(const Rows& rows, u32 num_rows,
                                               const Stored* query) {
    const u32 row_size = rows.H16 / HEAD_TILE * STEPS * WARP_SIZE;
    for (u32 i = threadIdx.x; i < num_rows * row_size; i += THREADS) {
        const u32 lane_idx = i % WARP_SIZE;
        const u32 step = i / WARP_SIZE % STEPS;
        const u32 head_tile = i % row_size / (WARP_SIZE * STEPS);
        const Stored* row = query + static_cast<u64>(i / row_size) * rows.H * D;
        const u32 h = head_tile * HEAD_TILE + lane_idx / 4;
        rows.fragments[i] = fragment_of(rows, row, h, step, lane_idx % 4);
    }
}

// Load rows that follow each other, with weights w * weights_scale * scale. That product is rounded
// once more than the contract's, which rounds scale * dot instead: the radius has that rounding,
// and where a product could underflow or overflow it lets no key be filtered.
__device__ __forceinline__ void load_rows(const Rows& rows, RowState* states, u32 num_rows,
                                          const Stored* query, const Stored* weights,
                                          float weights_scale) {
    load_fragments(rows, num_rows, query);
    const u32 lane_idx = threadIdx.x % WARP_SIZE;
    const u32 r = threadIdx.x / WARP_SIZE;
    if (r < num_rows) {
        float* const own = rows.weights + r * rows.H16;
        const Stored* source = weights + static_cast<u64>(r) * rows.H;
        for (u32 h = lane_idx; h < rows.H16; h += WARP_SIZE) {
            own[h] = h < rows.H ? __fmul_rn(Input::widen(source[h]), weights_scale) : 0.0f;
        }
        __syncwarp();
        const RowNorms norms =
            norms_of_row(rows.H, rows.scale, query + static_cast<u64>(r) * rows.H * D, own);
        if (lane_idx == 0) states[r].radius = radius_from(rows.H, rows.scale, norms);
        __syncwarp();
        for (u32 h = lane_idx; h < rows.H; h += WARP_SIZE) own[h] = __fmul_rn(own[h], rows.scale);
    }
    __syncthreads();
}

// Multiply a head tile, number `head_tile` of all rows', with the keys.
__device__ __forceinline__ void multiply_heads(const Rows& rows, u32 head_tile, const KeyTile& tile,
                                               float (&dots)[KEY_TILES][4]) {
    const uint4* const fragments =
        rows.fragments + head_tile * STEPS * WARP_SIZE + threadIdx.x % WARP_SIZE;
#pragma unroll
    for (u32 c = 0; c < QUADS; ++c) {
        const uint4 first = fragments[2 * c * WARP_SIZE];
        const uint4 second = fragments[(2 * c + 1) * WARP_SIZE];
#pragma unroll
        for (u32 n = 0; n < KEY_TILES; ++n) {
            const uint4 k = tile.chunks[n][c];
            mma_m16n8k16(Input(), dots[n], first.x, first.y, first.z, first.w, k.x, k.y);
        }
#pragma unroll
        for (u32 n = 0; n < KEY_TILES; ++n) {
            const uint4 k = tile.chunks[n][c];
            mma_m16n8k16(Input(), dots[n], second.x, second.y, second.z, second.w, k.z, k.w);
        }
    }
}

// Lane i returns row r's score of key i, without bias, to within the row's radius.
__device__ __forceinline__ float approximate_total(const Rows& rows, u32 r, const KeyTile& tile) {
    const float* weights = rows.weights + r * rows.H16 + threadIdx.x % WARP_SIZE / 4;
    const u32 head_tiles = rows.H16 / HEAD_TILE;
    float totals[2 * KEY_TILES] = {};  // key 8n + 2j + i at 2n + i
#pragma unroll 1
    for (u32 i = 0; i < head_tiles; ++i, weights += HEAD_TILE) {
        float dots[KEY_TILES][4] = {};
        const float weight[2] = {weights[0], weights[8]};
        multiply_heads(rows, r * head_tiles + i, tile, dots);
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
#pragma unroll
            for (u32 key = 0; key < 2 * KEY_TILES; ++key) {
                const float dot = dots[key / 2][2 * half + key % 2];
                totals[key] = fmaf(fmaxf(dot, 0.0f), weight[half], totals[key]);
            }
        }
    }
    return of_own_key(reduce_over_heads(totals, [](float a, float b) { return a + b; }));
}

// Lane i returns the largest dot of row r's heads with key i. Needed only where a total is 0.
__device__ __forceinline__ float largest_dot(const Rows& rows, u32 r, const KeyTile& tile) {
    const float lowest = __int_as_float(0xff800000);
    const u32 head_tiles = rows.H16 / HEAD_TILE;
    float largest[2 * KEY_TILES];
#pragma unroll
    for (u32 key = 0; key < 2 * KEY_TILES; ++key) largest[key] = lowest;
#pragma unroll 1
    for (u32 i = 0; i < head_tiles; ++i) {
        float dots[KEY_TILES][4] = {};
        multiply_heads(rows, r * head_tiles + i, tile, dots);
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            const u32 h = i * HEAD_TILE + threadIdx.x % WARP_SIZE / 4 + 8 * half;
#pragma unroll
            for (u32 key = 0; key < 2 * KEY_TILES; ++key) {
                const float dot = dots[key / 2][2 * half + key % 2];
                largest[key] = fmaxf(largest[key], h < rows.H ? dot : lowest);
            }
        }
    }
    return of_own_key(reduce_over_heads(largest, [](float a, float b) { return fmaxf(a, b); }));
}
