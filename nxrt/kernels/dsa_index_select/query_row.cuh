// One query row in shared memory: for tensor cores, for the exact sums, and for the radius.
//
// docs/design/0004-certified-filter.md derives the radius; names are those used there.
#pragma once

#include "candidates.cuh"
#include "nxrt/ptx.cuh"

using Input = NXRT_DTYPE;
using Stored = Input::storage;

// What tensor cores take of a value.
template <class Type>
struct Part16 {
    using type = Type;
};
template <>
struct Part16<F32> {
    using type = BF16;
};
using Part = Part16<Input>::type;

template <class A, class B>
constexpr bool is_same = false;
template <class A>
constexpr bool is_same<A, A> = true;

// A float is the sum of two halves and of what is left over; three of their products are taken.
constexpr bool IS_SPLIT = sizeof(Stored) == 4;

constexpr u32 D = NXRT_DEPTH;
constexpr u32 CHUNK = 16 / sizeof(Stored);  // values in a 16-byte load
constexpr u32 CHUNKS = D / CHUNK;     // of a head, or of a key
constexpr u32 PITCH = CHUNKS + 1;  // of heads, so that one chunk of 8 heads is in different banks
constexpr u32 HEAD_TILE = 16;
constexpr u32 STEPS = D / 16;         // of the depth, by one matrix instruction each
constexpr u32 PARTS = IS_SPLIT ? 2 : 1;     // of a value
constexpr u32 PRODUCTS = IS_SPLIT ? 3 : 1;  // of parts
constexpr u32 EXACT_KEYS = 4;         // keys that a warp scores exactly at once
constexpr u32 MOST_EXACT_KEYS = 8;    // the same where many are waiting
constexpr float TINY = 0x1p-126f;     // the largest error of one flushed or subnormal result
constexpr float LARGE = 0x1p100f;     // no partial sum of a key that is filtered gets so large
// What a matrix instruction adds to a dot, in units of the sum of its absolute products.
constexpr float TENSOR_ERROR = 4 * PRODUCTS * D * UNIT;
constexpr float SPLIT_ERROR = IS_SPLIT ? 0x1.9p-17f : 0.0f;  // of a product, from what is left over
constexpr float SPLIT_TINY = IS_SPLIT ? 0x1p-129f : 0.0f;    // of a norm, where halves are subnormal
constexpr float INFLATE = 1.01f;      // for all that is of second order

static_assert(D % 64 == 0, "a chunk of every quarter of a warp");

struct Radius {
    float per_norm;      // of a score, times the key's norm
    float floor;         // of a score
    float dot_per_norm;  // of any head's dot, times the key's norm
    float dot_floor;
    float norm_limit;    // keys beyond it are not filtered
    float q;             // RowNorms' q and smallest
    float smallest;
    bool is_zero;        // every score is 0 but for the bias
};

struct QueryRow {
    uint4* chunks;     // [H][PITCH], of which CHUNKS are used
    uint4* fragments;  // [PARTS][H16 / HEAD_TILE][STEPS][WARP_SIZE], for the matrix instruction
    float* weights;  // [H16], w * weights_scale; zero from H on
    float* scaled_weights;  // [H16], the same times the scale
    float* staged;   // [WARPS][MOST_EXACT_KEYS][D], keys that are scored exactly
    float* terms;    // [WARPS][MOST_EXACT_KEYS][WARP_SIZE]
    u32 H;
    u32 H16;
    float scale;
    Radius radius;
};

__device__ __forceinline__ const uint4& chunk_of(const QueryRow& row, u32 h, u32 c) {
    return row.chunks[h * PITCH + c];
}

__device__ __forceinline__ u32 word_of(const uint4& chunk, u32 i) {
    return i == 0 ? chunk.x : i == 1 ? chunk.y : i == 2 ? chunk.z : chunk.w;
}

__device__ __forceinline__ float value_of(const uint4& chunk, u32 e) {
    if constexpr (IS_SPLIT) {
        return __uint_as_float(word_of(chunk, e));
    } else {
        return Input::widen(static_cast<Stored>(word_of(chunk, e / 2) >> 16 * (e % 2)));
    }
}

// Two words have four values of one step: of a chunk of eight the first or the last, of floats one
// part of all.
__device__ __forceinline__ uint2 step_words(const uint4& chunk, u32 step, u32 part) {
    if constexpr (IS_SPLIT) {
        const uint2 high{pack_bf16(value_of(chunk, 0), value_of(chunk, 1)),
                         pack_bf16(value_of(chunk, 2), value_of(chunk, 3))};
        if (part == 0) return high;
        float left[CHUNK];
#pragma unroll
        for (u32 e = 0; e < CHUNK; ++e) {
            const u32 word = e < 2 ? high.x : high.y;
            left[e] = value_of(chunk, e) - BF16::widen(static_cast<u16>(word >> 16 * (e % 2)));
        }
        return {pack_bf16(left[0], left[1]), pack_bf16(left[2], left[3])};
    } else {
        return step % 2 == 0 ? uint2{chunk.x, chunk.y} : uint2{chunk.z, chunk.w};
    }
}

// The chunk of a head or a key that lane (g, j) has at a step.
__device__ __forceinline__ u32 chunk_at(u32 step, u32 j) {
    return (IS_SPLIT ? step : step / 2) * 4 + j;
}

// Lane (g, j) has at a step what step_words gives of heads g and g + 8, in the order of the
// instruction's operands, so that they come to neighbouring registers.
__device__ __forceinline__ uint4 fragment_of(const QueryRow& row, u32 i) {
    const u32 lane_idx = i % WARP_SIZE;
    const u32 step = i / WARP_SIZE % STEPS;
    const u32 head_tile = i / (WARP_SIZE * STEPS);
    const u32 head_tiles = row.H16 / HEAD_TILE;
    const u32 part = head_tile / head_tiles;
    const u32 h = (head_tile - part * head_tiles) * HEAD_TILE + lane_idx / 4;
    const u32 c = chunk_at(step, lane_idx % 4);
    const uint2 first = step_words(chunk_of(row, h, c), step, part);
    uint2 second{0, 0};
    if (h + 8 < row.H) second = step_words(chunk_of(row, h + 8, c), step, part);
    return {first.x, second.x, first.y, second.y};
}

// Start to copy a query; each thread waits for its own copies.
__device__ __forceinline__ void start_query(const QueryRow& row, const Stored* query) {
    const uint4* source = reinterpret_cast<const uint4*>(query);
    for (u32 i = threadIdx.x; i < row.H * CHUNKS; i += THREADS) {
        copy_chunk(row.chunks + i / CHUNKS * PITCH + i % CHUNKS, source + i);
    }
}

// Lay out for the matrix instruction what start_query has copied; `weight` is that of head threadIdx.x,
// which was loaded before. Begins and ends with a barrier.
__device__ __forceinline__ void finish_query(const QueryRow& row, const Stored* weights,
                                             Stored weight, float weights_scale) {
    for (u32 h = threadIdx.x; h < row.H16; h += THREADS) {
        if (h >= THREADS && h < row.H) weight = weights[h];
        const float value = h < row.H ? Input::widen(weight) : 0.0f;
        const float scaled = __fmul_rn(value, weights_scale);
        row.weights[h] = scaled;
        row.scaled_weights[h] = __fmul_rn(scaled, row.scale);
    }
    __syncthreads();
    const u32 num_fragments = PARTS * row.H16 / HEAD_TILE * STEPS * WARP_SIZE;
#pragma unroll 2
    for (u32 i = threadIdx.x; i < num_fragments; i += THREADS) {
        row.fragments[i] = fragment_of(row, i);
    }
    __syncthreads();
}

__device__ __forceinline__ float add_up(float a, float b) { return __fadd_ru(a, b); }

// A NaN wins, which fmaxf would drop.
__device__ __forceinline__ float larger(float a, float b) { return a > b || a != a ? a : b; }

// What a row's radius is made of. Two warps find it, while one looks at the sample.
struct RowNorms {
    float v;             // || sum over h of |w_h| |q_h| ||, depth by depth
    float q;             // the largest || q_h ||
    float total_weight;  // sum over h of |w_h|
    float smallest;      // |q_hd| that is not 0
    u32 has_small;       // a weight whose products with the scale would lose precision
};

__device__ __forceinline__ float warp_sum_up(float value) {
#pragma unroll
    for (u32 offset = WARP_SIZE / 2; offset > 0; offset >>= 1) {
        value = add_up(value, __shfl_xor_sync(FULL_WARP, value, offset));
    }
    return value;
}

// All that has weights in it. Each lane has some of the depths.
__device__ __forceinline__ void weigh_heads(const QueryRow& row, RowNorms& norms) {
    constexpr u32 WORDS = CHUNKS * 4 / WARP_SIZE;
    constexpr u32 VALUES = CHUNK / 4;  // of a word
    const u32 lane_idx = threadIdx.x % WARP_SIZE;
    const u32* words = reinterpret_cast<const u32*>(row.chunks) + lane_idx * WORDS;
    float sums[WORDS * VALUES] = {};
#pragma unroll 4
    for (u32 h = 0; h < row.H; ++h) {
        const float weight = fabsf(row.weights[h]);
#pragma unroll
        for (u32 i = 0; i < WORDS * VALUES; ++i) {
            const uint4 word{words[h * PITCH * 4 + i / VALUES], 0, 0, 0};
            sums[i] = __fmaf_ru(weight, fabsf(value_of(word, i % VALUES)), sums[i]);
        }
    }
    float square = 0.0f;
#pragma unroll
    for (u32 i = 0; i < WORDS * VALUES; ++i) square = __fmaf_ru(sums[i], sums[i], square);
    float total = 0.0f;
    bool has_small = false;
    for (u32 h = lane_idx; h < row.H; h += WARP_SIZE) {
        const float weight = fabsf(row.weights[h]);
        total = add_up(total, weight);
        has_small |= weight != 0.0f && fabsf(row.scaled_weights[h]) < 1.0f / LARGE;
    }
    norms.v = __fsqrt_ru(warp_sum_up(square));
    norms.total_weight = warp_sum_up(total);
    norms.has_small = __any_sync(FULL_WARP, has_small);
}

// Each lane has some of the heads.
__device__ __forceinline__ void measure_heads(const QueryRow& row, RowNorms& norms) {
    float largest = 0.0f;
    float smallest = LARGE;
    for (u32 h = threadIdx.x % WARP_SIZE; h < row.H; h += WARP_SIZE) {
        float squares[CHUNK] = {};
#pragma unroll 4
        for (u32 c = 0; c < CHUNKS; ++c) {
            const uint4 chunk = chunk_of(row, h, c);
#pragma unroll
            for (u32 e = 0; e < CHUNK; ++e) {
                const float value = value_of(chunk, e);
                squares[e] = __fmaf_ru(value, value, squares[e]);
                if (value != 0.0f) smallest = fminf(smallest, fabsf(value));
            }
        }
#pragma unroll
        for (u32 e = 1; e < CHUNK; ++e) squares[0] = add_up(squares[0], squares[e]);
        largest = larger(largest, squares[0]);
    }
#pragma unroll
    for (u32 offset = WARP_SIZE / 2; offset > 0; offset >>= 1) {
        largest = larger(largest, __shfl_xor_sync(FULL_WARP, largest, offset));
        smallest = fminf(smallest, __shfl_xor_sync(FULL_WARP, smallest, offset));
    }
    norms.q = __fsqrt_ru(largest);
    norms.smallest = smallest;
}

__device__ __forceinline__ Radius radius_from(const QueryRow& row, const RowNorms& norms) {
    const float scaled_weight = __fmul_ru(row.scale, norms.total_weight);
    const bool is_safe = norms.total_weight < LARGE && scaled_weight < LARGE && norms.v < LARGE &&
                         norms.q < LARGE;
    const float scaled_v = __fmul_ru(row.scale, norms.v);
    const float scaled_q = __fmul_ru(row.scale, norms.q);
    const float dot_units = (D * UNIT + TENSOR_ERROR + SPLIT_ERROR) * INFLATE;
    const float units = dot_units + (2 * row.H + 8) * UNIT * INFLATE;
    const float per_flush = (2 * D + 2) * scaled_weight + norms.total_weight + 2 * row.H + 2;
    const float widest = fmaxf(fmaxf(norms.q, scaled_q), fmaxf(scaled_v, 1.0f));
    Radius radius;
    radius.per_norm = __fmul_ru(scaled_v, units);
    radius.floor = per_flush * INFLATE * TINY;
    radius.dot_per_norm = __fmul_ru(norms.q, dot_units);
    radius.dot_floor = (2 * D + 2) * TINY;
    if constexpr (IS_SPLIT) {
        radius.per_norm += scaled_weight * SPLIT_TINY;
        radius.floor += scaled_weight * norms.q * SPLIT_TINY;
        radius.dot_per_norm += SPLIT_TINY;
        radius.dot_floor += norms.q * SPLIT_TINY;
    }
    // Weights and queries of different heads may be large each for itself.
    const bool is_finite = radius.floor < LARGE && radius.per_norm < LARGE;
    const bool is_usable = is_safe && is_finite && norms.has_small == 0;
    radius.norm_limit = is_usable ? LARGE / widest : -1.0f;
    radius.q = norms.q;
    radius.smallest = norms.smallest;
    radius.is_zero = norms.v == 0.0f;
    return radius;
}

// Stage a key, of which each lane has a chunk, as floats for add_products; return whether its products
// with the query are exact, so that adding one to a sum rounds as adding its rounded value does. All
// lanes call.
__device__ __forceinline__ bool stage_key(const Radius& radius, float* staged, const uint4& chunk) {
    const u32 lane_idx = threadIdx.x % WARP_SIZE;
    float largest = 0.0f;
    float smallest = LARGE;
    if (lane_idx < CHUNKS) {
#pragma unroll
        for (u32 e = 0; e < CHUNK; ++e) {
            const float value = value_of(chunk, e);
            const float size = fabsf(value);
            staged[lane_idx * CHUNK + e] = value;
            largest = larger(largest, size);
            if (size != 0.0f) smallest = fminf(smallest, size);
        }
    }
    if constexpr (IS_SPLIT) return false;
    const bool is_exact = radius.q * largest < LARGE && radius.smallest * smallest >= TINY;
    return __all_sync(FULL_WARP, is_exact);
}

// Add up the dots of one head and COUNT keys, in the contract's order; fused where products are exact.
template <u32 COUNT, bool IS_FUSED>
__device__ __forceinline__ void add_products(const QueryRow& row, const float* staged, u32 h,
                                             float (&dots)[COUNT]) {
#pragma unroll 2
    for (u32 c = 0; c < CHUNKS; ++c) {
        const uint4 q = chunk_of(row, h, c);
#pragma unroll
        for (u32 e = 0; e < CHUNK; e += 4) {
#pragma unroll
            for (u32 i = 0; i < COUNT; ++i) {
                const float4 k = *reinterpret_cast<const float4*>(staged + i * D + c * CHUNK + e);
                const float values[4] = {k.x, k.y, k.z, k.w};
#pragma unroll
                for (u32 f = 0; f < 4; ++f) {
                    const float a = value_of(q, e + f);
                    dots[i] = IS_FUSED ? __fmaf_rn(a, values[f], dots[i])
                                       : __fadd_rn(dots[i], __fmul_rn(a, values[f]));
                }
            }
        }
    }
}

// Score `count` <= COUNT keys by this warp as the contract says, with the bias; key i goes to lane i.
// All lanes call.
template <u32 COUNT>
__device__ __forceinline__ float exact_scores(const QueryRow& row, const Stored* key,
                                              const float* bias, const u32 (&position)[COUNT],
                                              u32 count) {
    const u32 lane_idx = threadIdx.x % WARP_SIZE;
    const u32 warp_idx = threadIdx.x / WARP_SIZE;
    float* const staged = row.staged + warp_idx * MOST_EXACT_KEYS * D;
    float* const terms = row.terms + warp_idx * MOST_EXACT_KEYS * WARP_SIZE;
    u32 own = position[0];
    bool is_fused = true;
    uint4 chunks[COUNT];
#pragma unroll
    for (u32 i = 0; i < COUNT; ++i) {
        const uint4* source = reinterpret_cast<const uint4*>(key + static_cast<u64>(position[i]) * D);
        chunks[i] = source[lane_idx % CHUNKS];
        own = lane_idx == i ? position[i] : own;  // in registers
    }
    const float own_bias = lane_idx < count ? bias[own] : 0.0f;
#pragma unroll
    for (u32 i = 0; i < COUNT; ++i) {
        is_fused &= stage_key(row.radius, staged + i * D, chunks[i]);
    }
    __syncwarp();
    float total = 0.0f;
    for (u32 h_begin = 0; h_begin < row.H; h_begin += WARP_SIZE) {
        const u32 h = h_begin + lane_idx;
        float dots[COUNT] = {};
        if (h < row.H && is_fused) {
            add_products<COUNT, true>(row, staged, h, dots);
        } else if (h < row.H) {
            add_products<COUNT, false>(row, staged, h, dots);
        }
        const float weight = h < row.H ? row.weights[h] : 0.0f;
#pragma unroll
        for (u32 i = 0; i < COUNT; ++i) {
            // fmaxf, because a NaN dot counts as 0.
            const float scored = fmaxf(__fmul_rn(row.scale, dots[i]), 0.0f);
            terms[i * WARP_SIZE + lane_idx] = __fmul_rn(scored, weight);
        }
        __syncwarp();
        if (lane_idx < COUNT) {
            const u32 num_heads = row.H - h_begin < WARP_SIZE ? row.H - h_begin : WARP_SIZE;
#pragma unroll 8
            for (u32 other = 0; other < num_heads; ++other) {
                total = __fadd_rn(total, terms[lane_idx * WARP_SIZE + other]);
            }
        }
        __syncwarp();
    }
    return lane_idx < count ? canonicalize_nan(__fadd_rn(total, own_bias)) : 0.0f;
}
