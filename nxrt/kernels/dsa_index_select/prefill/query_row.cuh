// One query row in shared memory: for tensor cores, for the exact sums, and for the radius.
//
// docs/design/0005-certified-filter.md derives the radius; names are those used there.
#pragma once

#include "candidates.cuh"
#include "nxrt/ptx.cuh"

using Input = NXRT_DTYPE;
using Stored = Input::storage;

constexpr u32 D = NXRT_DEPTH;
constexpr u32 CHUNK = 8;              // 16-bit values in a 16-byte load
constexpr u32 CHUNKS = D / CHUNK;     // of a head, or of a key
constexpr u32 HEAD_TILE = 16;
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
    float* weights;  // [H16], w * weights_scale; zero from H on
    float* sums;     // [max(D, H16)], scratch of the radius
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

__device__ __forceinline__ void load_query(const QueryRow& row, const Stored* query,
                                           const Stored* weights, float weights_scale) {
    const uint4* source = reinterpret_cast<const uint4*>(query);
    for (u32 i = threadIdx.x; i < row.H16 * CHUNKS; i += THREADS) {
        const u32 h = i / CHUNKS;
        chunk_of(row, h, i % CHUNKS) = h < row.H ? source[i] : uint4{0, 0, 0, 0};
    }
    for (u32 h = threadIdx.x; h < row.H16; h += THREADS) {
        row.weights[h] = h < row.H ? __fmul_rn(Input::widen(weights[h]), weights_scale) : 0.0f;
    }
}

__device__ __forceinline__ float value_at(const QueryRow& row, u32 h, u32 d) {
    const Stored* chunk = reinterpret_cast<const Stored*>(&chunk_of(row, h, d / CHUNK));
    return Input::widen(chunk[d % CHUNK]);
}

// The norm of n values in row.sums, rounded up, in every thread. NaN and infinity stay.
__device__ __forceinline__ float norm_of_sums(const QueryRow& row, u32 n) {
    float sum = 0.0f;
    for (u32 i = 0; i < n; ++i) sum = __fmaf_ru(row.sums[i], row.sums[i], sum);
    return __fsqrt_ru(sum);
}

__device__ __forceinline__ float largest_of_sums(const QueryRow& row, u32 n) {
    float largest = 0.0f;
    for (u32 i = 0; i < n; ++i) {
        // A NaN must win, which fmaxf would drop.
        if (!(row.sums[i] <= largest) && largest == largest) largest = row.sums[i];
    }
    return largest;
}

// What the radius is made of, each rounded up; NaN stays.
struct RowNorms {
    float v;  // sum over h of |w_h| * ||q_h||, or less
    float q;  // the largest ||q_h||
    float total_weight;
    bool has_safe_weights;
};

// Smaller products would lose more than one unit in the last place; larger ones could overflow
// before a small dot makes up for it.
__device__ __forceinline__ bool is_safe_weight(float weight, float scale) {
    const float product = __fmul_rn(fabsf(weight), scale);
    return weight == 0.0f || (product >= 1.0f / LARGE && product <= LARGE);
}

__device__ __forceinline__ Radius radius_from(u32 H, float scale, const RowNorms& norms) {
    const float v = norms.v;
    const float q = norms.q;
    const float total_weight = norms.total_weight;
    const bool is_safe =
        norms.has_safe_weights && total_weight < LARGE && v < LARGE && q < LARGE;
    const float scaled_v = __fmul_ru(scale, v);
    const float scaled_q = __fmul_ru(scale, q);
    const float dot_units = (D * UNIT + TENSOR_ERROR) * INFLATE;
    const float units = dot_units + (2 * H + 8) * UNIT * INFLATE;
    const float scaled_weight = __fmul_ru(scale, total_weight);
    const float per_flush = (2 * D + 2) * scaled_weight + total_weight + 2 * H + 2;
    const float widest = fmaxf(fmaxf(q, scaled_q), fmaxf(scaled_v, 1.0f));
    Radius radius;
    radius.per_norm = __fmul_ru(scaled_v, units);
    radius.floor = per_flush * INFLATE * TINY;
    radius.dot_per_norm = __fmul_ru(q, dot_units);
    radius.dot_floor = (2 * D + 2) * TINY;
    const bool is_finite = radius.floor < LARGE && radius.per_norm < LARGE;
    radius.norm_limit = is_safe && is_finite ? LARGE / widest : -1.0f;
    radius.is_zero = v == 0.0f;
    return radius;
}

// After load_query and a barrier; all threads call and get the same.
__device__ __forceinline__ Radius radius_of(const QueryRow& row) {
    for (u32 d = threadIdx.x; d < D; d += THREADS) {
        float sum = 0.0f;
        for (u32 h = 0; h < row.H; ++h) {
            sum = __fmaf_ru(fabsf(row.weights[h]), fabsf(value_at(row, h, d)), sum);
        }
        row.sums[d] = sum;
    }
    __syncthreads();
    RowNorms norms;
    norms.v = norm_of_sums(row, D);
    __syncthreads();
    for (u32 h = threadIdx.x; h < row.H16; h += THREADS) {
        float sum = 0.0f;
        for (u32 d = 0; d < D; ++d) {
            const float value = value_at(row, h, d);
            sum = __fmaf_ru(value, value, sum);
        }
        row.sums[h] = __fsqrt_ru(sum);
    }
    __syncthreads();
    norms.q = largest_of_sums(row, row.H16);
    __syncthreads();
    norms.total_weight = 0.0f;
    norms.has_safe_weights = true;
    for (u32 h = 0; h < row.H; ++h) {
        norms.total_weight = __fadd_ru(norms.total_weight, fabsf(row.weights[h]));
        norms.has_safe_weights &= is_safe_weight(row.weights[h], row.scale);
    }
    return radius_from(row.H, row.scale, norms);
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
    for (u32 i = 1; i < EXACT_KEYS; ++i) own = lane_idx == i ? position[i] : own;
    return canonicalize_nan(__fadd_rn(total, bias[own]));
}
