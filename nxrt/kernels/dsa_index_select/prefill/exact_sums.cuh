// Exact scores of a few keys of one row, several by a warp at once.
//
// Sums are the contract's, in its order and rounded at every step. Where products are exact, adding
// one to a sum rounds as adding its rounded value does, so that they are fused.
#pragma once

#include "settle.cuh"

constexpr u32 MAX_DOUBTS = THREADS;

template <class Type>
constexpr bool HAS_EXACT_PRODUCTS = false;
// Eleven digits and exponents from -24 to 15.
template <>
constexpr bool HAS_EXACT_PRODUCTS<F16> = true;

// Of one row: keys whose bounds do not tell whether they are chosen.
struct Doubts {
    u64 rank[MAX_DOUBTS];      // by exact score
    u32 position[MAX_DOUBTS];
    float least[WARPS];        // of what each warp's threads hold
    float sums[WARPS];
    u32 is_odd[WARPS];         // whether a warp has found an odd value of the query
    u32 count;                 // may be more than MAX_DOUBTS
    u32 num_certain;           // keys that are chosen without doubt
    u32 most;

    __device__ __forceinline__ void clear() { count = num_certain = most = 0; }
};

// Say whether some value of a chunk is neither 0 nor of a size from 2^-63 to below 2^63, so that
// its product with another may be rounded. Two halves of a word are looked at together: a sum's
// highest bit tells whether a half is as large as what is missing to 2^15.
__device__ __forceinline__ bool is_odd(const uint4& chunk) {
    if (HAS_EXACT_PRODUCTS<Input>) return false;
    const u32 words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
    u32 found = 0;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        const u32 size = words[i] & 0x7fff7fffu;
        const u32 is_large = size + 0x21002100u;   // 2^63 or more, infinity, NaN
        const u32 is_normal = size + 0x60006000u;  // 2^-63 or more
        const u32 is_any = size + 0x7fff7fffu;     // not 0
        found |= is_large | (is_any & ~is_normal);
    }
    return (found & 0x80008000u) != 0;
}

// load_query, which also finds out about its values. Begins and ends without a barrier.
__device__ __forceinline__ void load_checked_query(const QueryRow& row, Doubts& doubts,
                                                   const Stored* query, const Stored* weights,
                                                   float weights_scale) {
    const uint4* source = reinterpret_cast<const uint4*>(query);
    const u32 num_chunks = row.H * CHUNKS;
    bool is_any = false;
    for (u32 i = threadIdx.x; i < num_chunks; i += 2 * THREADS) {
        const u32 other = i + THREADS;
        uint4 chunks[2] = {__ldg(source + i)};
        if (other < num_chunks) chunks[1] = __ldg(source + other);
        chunk_of(row, i / CHUNKS, i % CHUNKS) = chunks[0];
        if (other < num_chunks) chunk_of(row, other / CHUNKS, other % CHUNKS) = chunks[1];
        is_any |= is_odd(chunks[0]) | is_odd(chunks[1]);
    }
    for (u32 h = threadIdx.x; h < row.H; h += THREADS) {
        row.weights[h] = __fmul_rn(Input::widen(__ldg(weights + h)), weights_scale);
    }
    is_any = __any_sync(FULL_WARP, is_any);
    if (threadIdx.x % WARP_SIZE == 0) doubts.is_odd[threadIdx.x / WARP_SIZE] = is_any;
}

// Stage COUNT keys of this warp as floats, the last again where there are fewer; say whether all
// their products are exact with a query of which nothing is odd.
template <u32 COUNT>
__device__ __forceinline__ bool stage_keys(float* staged, const Stored* key, const u32* position,
                                           u32 count) {
    constexpr u32 NUM_LOADS = (COUNT * CHUNKS + WARP_SIZE - 1) / WARP_SIZE;
    const u32 lane_idx = threadIdx.x % WARP_SIZE;
    uint4 chunks[NUM_LOADS];
#pragma unroll
    for (u32 i = 0; i < NUM_LOADS; ++i) {
        const u32 own = (i * WARP_SIZE + lane_idx) / CHUNKS;
        const u64 place = position[own < count ? own : count - 1];
        chunks[i] = __ldg(reinterpret_cast<const uint4*>(key + place * D) + lane_idx % CHUNKS);
    }
    bool is_any = false;
#pragma unroll
    for (u32 i = 0; i < NUM_LOADS; ++i) {
        const u32 words[4] = {chunks[i].x, chunks[i].y, chunks[i].z, chunks[i].w};
        float values[CHUNK];
#pragma unroll
        for (u32 e = 0; e < CHUNK; ++e) values[e] = half_of(words[e / 2], e % 2);
        is_any |= is_odd(chunks[i]);
        const u32 own = i * WARP_SIZE + lane_idx;
        if (own >= COUNT * CHUNKS) continue;
        float4* const target = reinterpret_cast<float4*>(staged + own * CHUNK);
        target[0] = {values[0], values[1], values[2], values[3]};
        target[1] = {values[4], values[5], values[6], values[7]};
    }
    return !__any_sync(FULL_WARP, is_any);
}

// Add up the dots of one head and COUNT keys.
template <u32 COUNT, bool IS_FUSED>
__device__ __forceinline__ void add_products(const QueryRow& row, const float* staged, u32 h,
                                             float (&dots)[COUNT]) {
#pragma unroll 1
    for (u32 c = 0; c < CHUNKS; ++c) {
        const uint4 q = chunk_of(row, h, c);
        const u32 words[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
        for (u32 e = 0; e < CHUNK; e += 4) {
#pragma unroll
            for (u32 i = 0; i < COUNT; ++i) {
                const float4 k = *reinterpret_cast<const float4*>(staged + i * D + c * CHUNK + e);
                const float values[4] = {k.x, k.y, k.z, k.w};
#pragma unroll
                for (u32 f = 0; f < 4; ++f) {
                    const float a = half_of(words[(e + f) / 2], f % 2);
                    dots[i] = IS_FUSED ? __fmaf_rn(a, values[f], dots[i])
                                       : __fadd_rn(dots[i], __fmul_rn(a, values[f]));
                }
            }
        }
    }
}

// Add to each total, of key i at lane i, the terms of 32 heads. A head that is not there has 0,
// which changes no sum: none is -0.
template <u32 COUNT>
__device__ __forceinline__ void add_terms(const float* terms, float& total) {
    const u32 lane_idx = threadIdx.x % WARP_SIZE;
    __syncwarp();
    if (lane_idx < COUNT) {
#pragma unroll
        for (u32 i = 0; i < WARP_SIZE; i += 4) {
            const float4 four = *reinterpret_cast<const float4*>(terms + lane_idx * WARP_SIZE + i);
            total = __fadd_rn(__fadd_rn(total, four.x), four.y);
            total = __fadd_rn(__fadd_rn(total, four.z), four.w);
        }
    }
    __syncwarp();
}

// Score `count` <= COUNT keys by this warp, without bias; key i goes to lane i. All lanes call.
template <u32 COUNT>
__device__ __forceinline__ float exact_totals(const QueryRow& row, float* staged, const Stored* key,
                                              const u32* position, u32 count, bool is_odd_query) {
    const u32 lane_idx = threadIdx.x % WARP_SIZE;
    float* const terms = row.terms + threadIdx.x / WARP_SIZE * EXACT_KEYS * WARP_SIZE;
    const bool is_fused = stage_keys<COUNT>(staged, key, position, count) && !is_odd_query;
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
        add_terms<COUNT>(terms, total);
    }
    return total;
}

template <u32 COUNT>
__device__ __forceinline__ void score_groups(const QueryRow& row, float* staged,
                                             const Problem& problem, Doubts& doubts) {
    const u32 lane_idx = threadIdx.x % WARP_SIZE;
    const u32 warp_idx = threadIdx.x / WARP_SIZE;
    float* const own_staged = staged + warp_idx * EXACT_KEYS * D;
    const u32 num_doubts = doubts.count;
    u32 is_odd_query = 0;
#pragma unroll
    for (u32 warp = 0; warp < WARPS; ++warp) is_odd_query |= doubts.is_odd[warp];
    for (u32 begin = warp_idx * COUNT; begin < num_doubts; begin += WARPS * COUNT) {
        const u32 count = num_doubts - begin < COUNT ? num_doubts - begin : COUNT;
        const u32* const positions = doubts.position + begin;
        const u32 own = positions[lane_idx < count ? lane_idx : 0];
        const float bias = __ldg(problem.bias + own);
        const float total = exact_totals<COUNT>(row, own_staged, problem.key, positions, count,
                                                is_odd_query != 0);
        const float score = canonicalize_nan(__fadd_rn(total, bias));
        if (lane_idx < count) doubts.rank[begin + lane_idx] = ranked(total_order_key(score), own);
    }
}

// Rank doubts, of which there are no more than MAX_DOUBTS. Ends with a barrier.
__device__ __forceinline__ void score_doubts(const QueryRow& row, float* staged,
                                             const Problem& problem, Doubts& doubts) {
    if (doubts.count <= WARPS) {
        score_groups<1>(row, staged, problem, doubts);
    } else {
        score_groups<EXACT_KEYS>(row, staged, problem, doubts);
    }
    __syncthreads();
}
