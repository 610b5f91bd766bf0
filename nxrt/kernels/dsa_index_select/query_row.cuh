// One query row in shared memory: for tensor cores, for the exact sums, and for the radius.
//
// docs/design/0004-certified-filter.md derives the radius; names are those used there.
#pragma once

#include "candidates.cuh"
#include "nxrt/ptx.cuh"

using Input = NXRT_DTYPE;
using Stored = Input::storage;

constexpr u32 D = NXRT_DEPTH;
constexpr u32 CHUNK = 8;              // 16-bit values in a 16-byte load
constexpr u32 CHUNKS = D / CHUNK;     // of a head, or of a key
constexpr u32 HEAD_TILE = 16;
constexpr u32 STEPS = D / 16;         // of the depth, by one matrix instruction each
constexpr u32 EXACT_KEYS = 4;         // keys that a warp scores exactly at once
constexpr float UNIT = 0x1p-24f;      // the largest relative error of one rounding
constexpr float TINY = 0x1p-126f;     // the largest error of one flushed or subnormal result
constexpr float LARGE = 0x1p100f;     // no partial sum of a key that is filtered gets so large
// What a matrix instruction adds to a dot, in units of the sum of its absolute products.
constexpr float TENSOR_ERROR = 4 * D * UNIT;
constexpr float INFLATE = 1.01f;      // for all that is of second order

static_assert(D % 64 == 0, "a chunk of every quarter of a warp");

struct Radius {
    float per_norm;      // of a score, times the key's norm
    float floor;         // of a score
    float dot_per_norm;  // of any head's dot, times the key's norm
    float dot_floor;
    float norm_limit;    // keys beyond it are not filtered
    bool is_zero;        // every score is 0 but for the bias
};

struct QueryRow {
    uint4* chunks;   // [H16][CHUNKS], chunk c of head h at c ^ twist(h); zero from H on
    uint4* fragments;  // [H16 / HEAD_TILE][STEPS][WARP_SIZE], as the matrix instruction takes them
    float* weights;  // [H16], w * weights_scale; zero from H on
    float* scaled_weights;  // [H16], the same times the scale
    float* sums;     // [THREADS][CHUNK], scratch of the radius
    uint4* staged;   // [WARPS][EXACT_KEYS][CHUNKS], keys that are scored exactly
    float* terms;    // [WARPS][EXACT_KEYS][WARP_SIZE]
    u32 H;
    u32 H16;
    float scale;
    Radius radius;
};

// Puts the chunks that a warp reads at once into different banks: one chunk of 8 heads, and 4 chunks
// of 2 heads.
__device__ __forceinline__ u32 twist(u32 h) { return (h & 1) << 2 | (h >> 1 & 3); }

__device__ __forceinline__ uint4& chunk_of(const QueryRow& row, u32 h, u32 c) {
    return row.chunks[h * CHUNKS + (c ^ twist(h))];
}

__device__ __forceinline__ float half_of(u32 word, u32 half) {
    return Input::widen(static_cast<Stored>(word >> 16 * half));
}

// Lane (g, j) has at step 2c + i the i-th halves of chunks 4c + j of heads g and g + 8, in the order of
// the instruction's operands, so that they come to neighbouring registers.
__device__ __forceinline__ uint4 fragment_of(const Stored* query, u32 H, u32 i) {
    const u32 lane_idx = i % WARP_SIZE;
    const u32 step = i / WARP_SIZE % STEPS;
    const u32 d = (step / 2 * 4 + lane_idx % 4) * CHUNK + step % 2 * (CHUNK / 2);
    const u32 h = i / (WARP_SIZE * STEPS) * HEAD_TILE + lane_idx / 4;
    uint2 halves[2] = {{0, 0}, {0, 0}};
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
        if (h + 8 * half >= H) continue;
        halves[half] = *reinterpret_cast<const uint2*>(query + (h + 8 * half) * D + d);
    }
    return {halves[0].x, halves[1].x, halves[0].y, halves[1].y};
}

__device__ __forceinline__ void load_query(const QueryRow& row, const Stored* query,
                                           const Stored* weights, float weights_scale) {
    const uint4* source = reinterpret_cast<const uint4*>(query);
    for (u32 i = threadIdx.x; i < row.H16 * CHUNKS; i += THREADS) {
        const u32 h = i / CHUNKS;
        chunk_of(row, h, i % CHUNKS) = h < row.H ? source[i] : uint4{0, 0, 0, 0};
    }
    for (u32 i = threadIdx.x; i < row.H16 / HEAD_TILE * STEPS * WARP_SIZE; i += THREADS) {
        row.fragments[i] = fragment_of(query, row.H, i);
    }
    for (u32 h = threadIdx.x; h < row.H16; h += THREADS) {
        const float weight = h < row.H ? __fmul_rn(Input::widen(weights[h]), weights_scale) : 0.0f;
        row.weights[h] = weight;
        row.scaled_weights[h] = __fmul_rn(weight, row.scale);
    }
}

// Combine a value of every thread; all threads call and get the result. Three barriers.
template <class Combine>
__device__ __forceinline__ float combine_block(float* scratch, float value, Combine combine) {
#pragma unroll
    for (u32 offset = WARP_SIZE / 2; offset > 0; offset >>= 1) {
        value = combine(value, __shfl_xor_sync(FULL_WARP, value, offset));
    }
    __syncthreads();
    if (threadIdx.x % WARP_SIZE == 0) scratch[threadIdx.x / WARP_SIZE] = value;
    __syncthreads();
    value = scratch[0];
#pragma unroll
    for (u32 warp = 1; warp < WARPS; ++warp) value = combine(value, scratch[warp]);
    __syncthreads();
    return value;
}

__device__ __forceinline__ float add_up(float a, float b) { return __fadd_ru(a, b); }

// A NaN wins, which fmaxf would drop.
__device__ __forceinline__ float larger(float a, float b) { return a <= b ? b : a; }

struct RowNorms {
    float v;             // || sum over h of |w_h| |q_h| ||, depth by depth
    float q;             // the largest || q_h ||
    float total_weight;  // sum over h of |w_h|
    bool has_small;      // a weight whose products with the scale would lose precision
};

// Thread (part, chunk) adds up 8 depths of every PARTS-th head.
__device__ __forceinline__ RowNorms norms_of(const QueryRow& row) {
    constexpr u32 PARTS = THREADS / CHUNKS;
    const u32 c = threadIdx.x % CHUNKS;
    float sums[CHUNK] = {};
    float q = 0.0f;
    for (u32 h = threadIdx.x / CHUNKS; h < row.H16; h += PARTS) {
        const uint4 chunk = chunk_of(row, h, c);
        const u32 words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
        const float weight = fabsf(row.weights[h]);
        float squares = 0.0f;
#pragma unroll
        for (u32 e = 0; e < CHUNK; ++e) {
            const float value = half_of(words[e / 2], e % 2);
            sums[e] = __fmaf_ru(weight, fabsf(value), sums[e]);
            squares = __fmaf_ru(value, value, squares);
        }
#pragma unroll
        for (u32 offset = CHUNKS / 2; offset > 0; offset >>= 1) {
            squares = add_up(squares, __shfl_xor_sync(FULL_WARP, squares, offset));
        }
        q = larger(q, squares);
    }
#pragma unroll
    for (u32 e = 0; e < CHUNK; ++e) row.sums[threadIdx.x * CHUNK + e] = sums[e];
    __syncthreads();
    float v = 0.0f;
    if (threadIdx.x < D) {
        for (u32 part = 0; part < PARTS; ++part) v = add_up(v, row.sums[part * D + threadIdx.x]);
    }
    __syncthreads();
    float total_weight = 0.0f;
    float small = 0.0f;
    for (u32 h = threadIdx.x; h < row.H; h += THREADS) {
        const float weight = fabsf(row.weights[h]);
        total_weight = add_up(total_weight, weight);
        if (weight != 0.0f && __fmul_rn(weight, row.scale) < 1.0f / LARGE) small = 1.0f;
    }
    RowNorms norms;
    norms.v = __fsqrt_ru(combine_block(row.sums, __fmul_ru(v, v), add_up));
    norms.q = __fsqrt_ru(combine_block(row.sums, q, larger));
    norms.total_weight = combine_block(row.sums, total_weight, add_up);
    norms.has_small = combine_block(row.sums, small, larger) != 0.0f;
    return norms;
}

// After load_query and a barrier; all threads call and get the same.
__device__ __forceinline__ Radius radius_of(const QueryRow& row) {
    const RowNorms norms = norms_of(row);
    const float scaled_weight = __fmul_ru(row.scale, norms.total_weight);
    const bool is_safe = norms.total_weight < LARGE && scaled_weight < LARGE && norms.v < LARGE &&
                         norms.q < LARGE;
    const float scaled_v = __fmul_ru(row.scale, norms.v);
    const float scaled_q = __fmul_ru(row.scale, norms.q);
    const float dot_units = (D * UNIT + TENSOR_ERROR) * INFLATE;
    const float units = dot_units + (2 * row.H + 8) * UNIT * INFLATE;
    const float per_flush = (2 * D + 2) * row.scale * norms.total_weight + norms.total_weight +
                            2 * row.H + 2;
    const float widest = fmaxf(fmaxf(norms.q, scaled_q), fmaxf(scaled_v, 1.0f));
    Radius radius;
    radius.per_norm = __fmul_ru(scaled_v, units);
    radius.floor = per_flush * INFLATE * TINY;
    radius.dot_per_norm = __fmul_ru(norms.q, dot_units);
    radius.dot_floor = (2 * D + 2) * TINY;
    radius.norm_limit = is_safe && !norms.has_small ? LARGE / widest : -1.0f;
    radius.is_zero = norms.v == 0.0f;
    return radius;
}

// Score keys of this warp as the contract says, with the bias; key i goes to lane i. All lanes call.
__device__ __forceinline__ float exact_scores(const QueryRow& row, const Stored* key,
                                              const float* bias, const u32 (&position)[EXACT_KEYS],
                                              u32 count) {
    const u32 lane_idx = threadIdx.x % WARP_SIZE;
    const u32 warp_idx = threadIdx.x / WARP_SIZE;
    uint4* const staged = row.staged + warp_idx * EXACT_KEYS * CHUNKS;
    float* const terms = row.terms + warp_idx * EXACT_KEYS * WARP_SIZE;
#pragma unroll
    for (u32 i = 0; i < EXACT_KEYS; ++i) {
        const uint4* source = reinterpret_cast<const uint4*>(key + static_cast<u64>(position[i]) * D);
        if (i < count && lane_idx < CHUNKS) staged[i * CHUNKS + lane_idx] = source[lane_idx];
    }
    __syncwarp();
    float total = 0.0f;
    for (u32 h_begin = 0; h_begin < row.H; h_begin += WARP_SIZE) {
        const u32 h = h_begin + lane_idx;
        float dot[EXACT_KEYS] = {};
        for (u32 c = 0; c < CHUNKS && h < row.H; ++c) {
            const uint4 q = chunk_of(row, h, c);
            const u32 q_words[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
            for (u32 i = 0; i < EXACT_KEYS; ++i) {
                const uint4 k = staged[i * CHUNKS + c];
                const u32 k_words[4] = {k.x, k.y, k.z, k.w};
#pragma unroll
                for (u32 e = 0; e < CHUNK; ++e) {
                    const float a = half_of(q_words[e / 2], e % 2);
                    const float b = half_of(k_words[e / 2], e % 2);
                    dot[i] = __fadd_rn(dot[i], __fmul_rn(a, b));
                }
            }
        }
        const float weight = h < row.H ? row.weights[h] : 0.0f;
#pragma unroll
        for (u32 i = 0; i < EXACT_KEYS; ++i) {
            // fmaxf, because a NaN dot counts as 0.
            const float scored = fmaxf(__fmul_rn(row.scale, dot[i]), 0.0f);
            terms[i * WARP_SIZE + lane_idx] = __fmul_rn(scored, weight);
        }
        __syncwarp();
        if (lane_idx < EXACT_KEYS) {
            const u32 num_heads = row.H - h_begin < WARP_SIZE ? row.H - h_begin : WARP_SIZE;
            for (u32 other = 0; other < num_heads; ++other) {
                total = __fadd_rn(total, terms[lane_idx * WARP_SIZE + other]);
            }
        }
        __syncwarp();
    }
    if (lane_idx >= count) return 0.0f;
    u32 own = position[0];
#pragma unroll
    for (u32 i = 1; i < EXACT_KEYS; ++i) own = lane_idx == i ? position[i] : own;  // in registers
    return canonicalize_nan(__fadd_rn(total, bias[own]));
}
