// DsaIndexSelect: for each query row the positions of its top_k best-scored keys.
//
//   dot(h)  = sum over d, ascending, of q[row,h,d] * k[b,t,d]
//   score   = sum over h, ascending, of max(scale * dot(h), 0) * (w[row,h] * weights_scale), + bias
//
// query [B,S,H,D], key [B,T,D], weights [B,S,H] of type NXRT_DTYPE; bias [B,1,S,T] f32;
// selected [B,1,S,K] i64, ascending, padded with -1. A key counts where bias > -1e30.
//
// Numbers: everything in f32, each product and each sum rounded by itself (no fused operation), in
// the order written above; equal scores go to the lower position; NaN ranks above +inf.
// docs/operators/dsa_index_select.md is the contract, reference.py computes the same step by step.

#include "nxrt/block.cuh"

using Input = NXRT_DTYPE;
using Stored = Input::storage;

constexpr float MASK_THRESHOLD = -1e30f;

// ---- scores: a block takes BLOCK_T keys of one row; a warp KEYS_PER_WARP of them; a lane one head.

constexpr u32 SCORE_WARPS = 8;
constexpr u32 KEYS_PER_WARP = 4;
constexpr u32 BLOCK_T = SCORE_WARPS * KEYS_PER_WARP;
constexpr u32 BLOCK_H = WARP_SIZE;
constexpr u32 BLOCK_D = 64;
constexpr u32 SCORE_THREADS = SCORE_WARPS * WARP_SIZE;

struct ScoreTile {
    float query[BLOCK_D][BLOCK_H + 1];  // depth-major, padded: lanes read neighbouring heads
    float4 key[BLOCK_T][BLOCK_D / 4];
    float terms[BLOCK_T][BLOCK_H + 1];
};

// Fill the tile with zeros outside [H, D]: adding +0 changes no sum that began at +0.
__device__ __forceinline__ void load_query(ScoreTile& tile, const Stored* query, u64 H, u64 D,
                                           u64 h_begin, u64 d_begin) {
    for (u32 i = threadIdx.x; i < BLOCK_H * BLOCK_D; i += SCORE_THREADS) {
        const u64 h = h_begin + i / BLOCK_D;
        const u64 d = d_begin + i % BLOCK_D;
        const bool is_inside = h < H && d < D;
        tile.query[i % BLOCK_D][i / BLOCK_D] = is_inside ? Input::widen(query[h * D + d]) : 0.0f;
    }
}

__device__ __forceinline__ void load_key(ScoreTile& tile, const Stored* key, u64 T, u64 D,
                                         u64 t_begin, u64 d_begin) {
    float* const values = reinterpret_cast<float*>(tile.key);
    for (u32 i = threadIdx.x; i < BLOCK_T * BLOCK_D; i += SCORE_THREADS) {
        const u64 t = t_begin + i / BLOCK_D;
        const u64 d = d_begin + i % BLOCK_D;
        values[i] = t < T && d < D ? Input::widen(key[t * D + d]) : 0.0f;
    }
}

__device__ __forceinline__ float add_product(float sum, float a, float b) {
    return __fadd_rn(sum, __fmul_rn(a, b));
}

__device__ __forceinline__ void add_dots(const ScoreTile& tile, u64 depth,
                                         float (&dot)[KEYS_PER_WARP]) {
    const u32 lane_idx = threadIdx.x % WARP_SIZE;
    const u32 warp_idx = threadIdx.x / WARP_SIZE;
    const u32 num_quads = depth < BLOCK_D ? (static_cast<u32>(depth) + 3) / 4 : BLOCK_D / 4;
#pragma unroll 4
    for (u32 quad = 0; quad < num_quads; ++quad) {
        const float q0 = tile.query[4 * quad + 0][lane_idx];
        const float q1 = tile.query[4 * quad + 1][lane_idx];
        const float q2 = tile.query[4 * quad + 2][lane_idx];
        const float q3 = tile.query[4 * quad + 3][lane_idx];
#pragma unroll
        for (u32 i = 0; i < KEYS_PER_WARP; ++i) {
            const float4 k = tile.key[warp_idx * KEYS_PER_WARP + i][quad];
            dot[i] = add_product(dot[i], q0, k.x);
            dot[i] = add_product(dot[i], q1, k.y);
            dot[i] = add_product(dot[i], q2, k.z);
            dot[i] = add_product(dot[i], q3, k.w);
        }
    }
}

// Return the row's score of key t_begin + threadIdx.x, without bias, in the first BLOCK_T threads.
__device__ __forceinline__ float score_keys(ScoreTile& tile, const Stored* query, const Stored* key,
                                            const Stored* weights, u64 T, u64 H, u64 D, u64 t_begin,
                                            float scale, float weights_scale) {
    const u32 lane_idx = threadIdx.x % WARP_SIZE;
    const u32 warp_idx = threadIdx.x / WARP_SIZE;
    float total = 0.0f;
    for (u64 h_begin = 0; h_begin < H; h_begin += BLOCK_H) {
        float dot[KEYS_PER_WARP] = {};
        for (u64 d_begin = 0; d_begin < D; d_begin += BLOCK_D) {
            load_query(tile, query, H, D, h_begin, d_begin);
            load_key(tile, key, T, D, t_begin, d_begin);
            __syncthreads();
            add_dots(tile, D - d_begin, dot);
            __syncthreads();
        }
        if (h_begin + lane_idx < H) {
            const float weight = __fmul_rn(Input::widen(weights[h_begin + lane_idx]), weights_scale);
#pragma unroll
            for (u32 i = 0; i < KEYS_PER_WARP; ++i) {
                // fmaxf, because a NaN dot counts as 0.
                const float scored = fmaxf(__fmul_rn(scale, dot[i]), 0.0f);
                tile.terms[warp_idx * KEYS_PER_WARP + i][lane_idx] = __fmul_rn(scored, weight);
            }
        }
        __syncthreads();
        if (threadIdx.x < BLOCK_T) {
            const u32 num_heads = H - h_begin < BLOCK_H ? static_cast<u32>(H - h_begin) : BLOCK_H;
            for (u32 h = 0; h < num_heads; ++h) {
                total = __fadd_rn(total, tile.terms[threadIdx.x][h]);
            }
        }
        __syncthreads();
    }
    return total;
}

extern "C" __global__ void __launch_bounds__(SCORE_THREADS, 2)
    dsa_index_select_score(const Stored* query, const Stored* key, const Stored* weights,
                           const float* bias, float* scores, u8* allowed, u64 num_rows, u64 S,
                           u64 T, u64 H, u64 D, float scale, float weights_scale) {
    __shared__ ScoreTile tile;
    const u64 tiles_per_row = (T + BLOCK_T - 1) / BLOCK_T;
    const u64 num_tiles = num_rows * tiles_per_row;
    for (u64 index = blockIdx.x; index < num_tiles;) {
        const u64 row = index / tiles_per_row;
        const u64 t_begin = index % tiles_per_row * BLOCK_T;
        const u64 t = t_begin + threadIdx.x;
        const bool has_key = threadIdx.x < BLOCK_T && t < T;
        const float key_bias = has_key ? bias[row * T + t] : 0.0f;
        const bool is_allowed = has_key && key_bias > MASK_THRESHOLD;

        float score = __int_as_float(0xff800000);
        if (__syncthreads_or(is_allowed)) {
            const float total =
                score_keys(tile, query + row * H * D, key + row / S * T * D, weights + row * H, T,
                           H, D, t_begin, scale, weights_scale);
            if (is_allowed) score = canonicalize_nan(__fadd_rn(total, key_bias));
        }
        if (has_key) {
            scores[row * T + t] = score;
            allowed[row * T + t] = is_allowed;
        }
        if (num_tiles - index <= gridDim.x) break;  // index + gridDim.x could wrap
        index += gridDim.x;
    }
}

// ---- selection: a block takes a row; four 8-bit digits find the key of the last chosen score.

constexpr u32 SELECT_WARPS = 32;
constexpr u32 SELECT_THREADS = SELECT_WARPS * WARP_SIZE;
constexpr u32 NUM_BINS = 256;
constexpr u32 DIGIT_BITS = 8;
constexpr u32 FIRST_SHIFT = 32 - DIGIT_BITS;
constexpr u32 ITEMS_PER_THREAD = 4;
constexpr u32 BLOCK_EMIT = SELECT_THREADS * ITEMS_PER_THREAD;
constexpr u64 MAX_COUNTED = 1ull << 31;  // keys after which 32-bit bins are carried over

struct SelectState {
    u32 bins[NUM_BINS];
    u64 totals[NUM_BINS];
    u32 warp_sums[SELECT_WARPS];
    u32 prefix;      // the digits found so far of the last chosen key
    u64 num_wanted;  // how many keys that begin with `prefix` are to be chosen
};

// Count by digit the allowed keys that begin with `prefix`, into state.totals.
__device__ __forceinline__ void count_digits(SelectState& state, const float* scores,
                                             const u8* allowed, u64 T, u32 prefix, u32 shift) {
    const u32 known_bits = shift + DIGIT_BITS;
    for (u32 bin = threadIdx.x; bin < NUM_BINS; bin += SELECT_THREADS) state.totals[bin] = 0;
    for (u64 begin = 0; begin < T; begin += MAX_COUNTED) {
        const u64 end = T - begin < MAX_COUNTED ? T : begin + MAX_COUNTED;
        for (u32 bin = threadIdx.x; bin < NUM_BINS; bin += SELECT_THREADS) state.bins[bin] = 0;
        __syncthreads();
        for (u64 t = begin + threadIdx.x; t < end; t += SELECT_THREADS) {
            if (!allowed[t]) continue;
            const u32 key = total_order_key(scores[t]);
            const bool is_candidate = known_bits == 32 || (key ^ prefix) >> known_bits == 0;
            if (is_candidate) atomicAdd(&state.bins[(key >> shift) % NUM_BINS], 1u);
        }
        __syncthreads();
        for (u32 bin = threadIdx.x; bin < NUM_BINS; bin += SELECT_THREADS) {
            state.totals[bin] += state.bins[bin];
        }
    }
    __syncthreads();
}

// Walk the bins from the highest: one warp, a lane for NUM_BINS / WARP_SIZE neighbouring bins.
// Should the first digit show no more candidates than wanted, num_wanted becomes 0.
__device__ __forceinline__ void choose_digit(SelectState& state, u32 shift) {
    constexpr u32 BINS_PER_LANE = NUM_BINS / WARP_SIZE;
    const u32 lane_idx = threadIdx.x % WARP_SIZE;
    const u32 highest = NUM_BINS - 1 - lane_idx * BINS_PER_LANE;
    const u64 num_wanted = state.num_wanted;
    u64 sum = 0;
    for (u32 i = 0; i < BINS_PER_LANE; ++i) sum += state.totals[highest - i];
    u64 inclusive = sum;
    for (u32 offset = 1; offset < WARP_SIZE; offset <<= 1) {
        const u64 other = __shfl_up_sync(FULL_WARP, inclusive, offset);
        if (lane_idx >= offset) inclusive += other;
    }
    const u64 num_candidates = __shfl_sync(FULL_WARP, inclusive, WARP_SIZE - 1);
    __syncwarp();
    if (shift == FIRST_SHIFT && num_candidates <= num_wanted) {
        if (lane_idx == 0) state.num_wanted = 0;
        return;
    }
    u64 above = inclusive - sum;
    if (above >= num_wanted || num_wanted > inclusive) return;
    u32 bin = highest;
    while (above + state.totals[bin] < num_wanted) above += state.totals[bin--];
    state.prefix |= bin << shift;
    state.num_wanted = num_wanted - above;
}

// Find the key of the last chosen score and how many of that key are chosen. With no more allowed
// keys than `top_k` all are chosen: the key is 0, which none of them has, and all lie above it.
__device__ __forceinline__ void find_last_chosen(SelectState& state, const float* scores,
                                                 const u8* allowed, u64 T, u64 top_k) {
    if (threadIdx.x == 0) {
        state.prefix = 0;
        state.num_wanted = top_k;
    }
    for (u32 shift = FIRST_SHIFT;; shift -= DIGIT_BITS) {
        __syncthreads();
        count_digits(state, scores, allowed, T, state.prefix, shift);
        if (threadIdx.x < WARP_SIZE) choose_digit(state, shift);
        __syncthreads();
        if (shift == 0 || state.num_wanted == 0) return;
    }
}

// Write the chosen positions in ascending order, then -1. Sums pack two counts of at most
// BLOCK_EMIT: keys above the last chosen key in the low half, keys equal to it in the high half.
__device__ __forceinline__ void emit(SelectState& state, const float* scores, const u8* allowed,
                                     u64 T, u64 top_k, i64* selected) {
    const u32 last_key = state.prefix;
    const u64 num_equal_wanted = state.num_wanted;
    u64 num_above = 0;
    u64 num_equal = 0;
    for (u64 begin = 0; begin < T; begin += BLOCK_EMIT) {
        const u64 t_begin = begin + threadIdx.x * ITEMS_PER_THREAD;
        u32 items[ITEMS_PER_THREAD];
        u32 mine = 0;
#pragma unroll
        for (u32 i = 0; i < ITEMS_PER_THREAD; ++i) {
            const u64 t = t_begin + i;
            items[i] = 0;
            if (t < T && allowed[t]) {
                const u32 key = total_order_key(scores[t]);
                items[i] = key > last_key ? 1u : (key == last_key ? 1u << 16 : 0u);
            }
            mine += items[i];
        }
        u32 total;
        u32 before = block_exclusive_sum(mine, state.warp_sums, total);
#pragma unroll
        for (u32 i = 0; i < ITEMS_PER_THREAD; ++i) {
            const u64 above = num_above + (before & 0xffffu);
            const u64 equal = num_equal + (before >> 16);
            const u64 equal_taken = equal < num_equal_wanted ? equal : num_equal_wanted;
            if (items[i] == 1u || (items[i] != 0 && equal < num_equal_wanted)) {
                selected[above + equal_taken] = static_cast<i64>(t_begin + i);
            }
            before += items[i];
        }
        num_above += total & 0xffffu;
        num_equal += total >> 16;
    }
    const u64 num_chosen = num_above + (num_equal < num_equal_wanted ? num_equal : num_equal_wanted);
    for (u64 i = num_chosen + threadIdx.x; i < top_k; i += SELECT_THREADS) selected[i] = -1;
}

extern "C" __global__ void __launch_bounds__(SELECT_THREADS, 1)
    dsa_index_select_select(const float* scores, const u8* allowed, i64* selected, u64 num_rows,
                            u64 T, u64 top_k) {
    __shared__ SelectState state;
    for (u64 row = blockIdx.x; row < num_rows;) {
        find_last_chosen(state, scores + row * T, allowed + row * T, T, top_k);
        emit(state, scores + row * T, allowed + row * T, T, top_k, selected + row * top_k);
        __syncthreads();
        if (num_rows - row <= gridDim.x) break;  // row + gridDim.x could wrap
        row += gridDim.x;
    }
}
