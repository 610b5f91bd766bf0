// DsaIndexSelect for many rows that share their keys, on sm_90a: a list of candidates for each row,
// by bounds from the matrix products of warpgroups. prefill_settle.cu chooses among them.
//
// A block takes up to 8 or 4 rows that follow each other, which fill 256 columns with heads; each
// of its two warpgroups multiplies 64 keys at a time with all of them. A sample of every stride-th
// tile guesses first from which score on a row has a little more than top_k keys. Scores are never
// stored.
//
// query [B,S,H,D], key [B,T,D], weights [B,S,H] of type NXRT_DTYPE, D = NXRT_DEPTH; bias
// [B,1,S,T] and norms [B,T] f32; T < 2^31. For each row of a launch: lists [capacity], the
// candidates' positions and totals without bias in no order; and in records [B,S] its length, or
// NOT_COLLECTED.
//
// A list is right where it is whole and its threshold is the lowest, or where top_k lower bounds
// reach the threshold: a key that was dropped has an upper bound below it, so that top_k keys beat
// it. A row whose guess was wrong is looked at again: with a guess corrected by how far off it was,
// or, where that makes no difference, with what top_k entries of the list are known to reach.

#include "row_norms.cuh"
#include "row_record.cuh"
#include "sample.cuh"
#include "warpgroup_scan.cuh"

constexpr u32 MAX_ROWS = 8;
static_assert(MAX_ROWS <= WARPS, "a warp for each row's radius and guess");

// To find a threshold that a little more than `rank` of its keys reach.
struct Sample {
    u32 stride;  // in tiles; 0: there is none
    u32 rank;
};

// The first finds a threshold for the second, and that for all keys.
struct Sampling {
    Sample first;
    Sample second;
};

struct Rows {
    const Stored* query;
    const Stored* weights;
    const float* bias;
    uint2* lists;
    u32 count;
    u32 H;
    float scale;
    float weights_scale;
};

struct Scratch {
    u8* operand;
    float* weights;
    u32* bins;  // [WARPS][GUESS_BINS]
};

// The host adds up the same: prefill_layout.py.
template <u32 ROWS>
__device__ __forceinline__ Block lay_out_block(Scratch& scratch) {
    u8* next = first_tile(dynamic_shared());
    Block block;
    scratch.operand = take(next, COLUMNS * D * 2);
    scratch.weights = reinterpret_cast<float*>(take(next, COLUMNS * 4));
    scratch.bins = reinterpret_cast<u32*>(take(next, WARPS * GUESS_BINS * 4));
    block.rows = reinterpret_cast<RowState*>(take(next, MAX_ROWS * sizeof(RowState)));
    block.sample = reinterpret_cast<u32*>(take(next, ROWS * SAMPLE_CAPACITY * 4));
    block.weights = reinterpret_cast<const float4*>(scratch.weights);
    block.queries = shared_operand(scratch.operand);
    return block;
}

// Undo total_order_key.
__device__ __forceinline__ float value_of_key(u32 key) {
    return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}

// `threshold` is of an order key and ~position.
__device__ __forceinline__ void restart(RowState& row, u64 threshold, bool is_active) {
    const u32 key = static_cast<u32>(threshold >> 32);
    const bool is_any = key > total_order_key(lowest());
    const float value = is_any ? __fadd_rn(value_of_key(key), 0.0f) : lowest();
    row.limits.threshold = value;
    row.limits.above = value_of_key(total_order_key(value) + 1);
    row.limits.last = is_any ? ~static_cast<u32>(threshold) : 0xffffffffu;
    row.limits.counts = 0;
    row.limits.num_dropped = 0;
    row.has_bias = 0;
    row.is_active = is_active;
}

// ---- the rows

// The weights are half of w * weights_scale * scale, rounded once more than the contract's, which
// rounds scale * dot instead: the radius has that rounding.
template <u32 ROWS>
__device__ __forceinline__ void load_row(const Block& block, const Rows& rows, u32 r,
                                         const Scratch& scratch) {
    constexpr u32 COLUMNS_PER_ROW = COLUMNS / ROWS;
    const u32 lane_idx = threadIdx.x % WARP_SIZE;
    const bool is_row = r < rows.count;
    float* const own = reinterpret_cast<float*>(scratch.bins + r * GUESS_BINS);
    for (u32 h = lane_idx; h < COLUMNS_PER_ROW; h += WARP_SIZE) {
        const bool is_head = is_row && h < rows.H;
        const float weight = is_head ? Input::widen(rows.weights[r * rows.H + h]) : 0.0f;
        own[h] = __fmul_rn(weight, rows.weights_scale);
        const float scaled = __fmul_rn(own[h], rows.scale);
        scratch.weights[place_of_weight(r * COLUMNS_PER_ROW + h)] = 0.5f * scaled;
    }
    __syncwarp();
    Radius radius{};
    if (is_row) {
        const Stored* query = rows.query + static_cast<u64>(r) * rows.H * D;
        radius = radius_from(rows.H, rows.scale, norms_of_row(rows.H, rows.scale, query, own));
    }
    if (lane_idx != 0) return;
    RowState& row = block.rows[r];
    row.bias = rows.bias + static_cast<u64>(r) * block.T;
    row.list = rows.lists + static_cast<u64>(r) * block.capacity;
    row.radius = radius;
    row.limits.per_norm = radius.is_zero ? 0.0f : radius.per_norm;
    row.limits.floor = radius.is_zero ? 0.0f : radius.floor;
    row.limits.norm_limit = radius.norm_limit;
    row.num_sampled = 0;
    restart(row, 0, is_row);
}

template <u32 ROWS>
__device__ __forceinline__ void load_rows(const Block& block, const Rows& rows,
                                          const Scratch& scratch) {
    const u32 r = threadIdx.x / WARP_SIZE;
    load_queries<COLUMNS / ROWS>(scratch.operand, rows.query, rows.count, rows.H);
    if (r < ROWS) load_row<ROWS>(block, rows, r, scratch);
    fence_operands();
    __syncthreads();
}

// ---- thresholds

template <u32 ROWS>
__device__ __forceinline__ void run_pass(const Block& block, u32 stride, bool is_sample) {
    const u32 num_tiles = (block.T - 1) / TILE_KEYS + 1;
    const u32 capacity = is_sample ? SAMPLE_CAPACITY : block.capacity;
    __syncthreads();
    scan<ROWS>(block, {stride * TILE_KEYS, (num_tiles - 1) / stride + 1, is_sample, capacity});
    __syncthreads();
}

// Return a row's threshold by its sample. For a warp.
__device__ __forceinline__ u64 guess_threshold(const Block& block, u32 r, u32 rank, u32* bins) {
    RowState& row = block.rows[r];
    const u32* const sample = block.sample + r * SAMPLE_CAPACITY;
    const u32 key = guess_from(sample, row.num_sampled, rank, bins);
    __syncwarp();  // all have used the last rank
    if (threadIdx.x % WARP_SIZE == 0) row.rank = rank < row.num_sampled ? rank : row.num_sampled;
    return static_cast<u64>(key) << 32;
}

// Return what top_k lower bounds of a full list reach, which then holds no totals any more: where
// very many scores are equal, only a position tells them apart. For a warp.
__device__ __forceinline__ u64 threshold_of_list(const Block& block, const RowState& row, u32 top_k,
                                                 u32* bins) {
    const Limits limits = row.limits;
#pragma unroll 4
    for (u32 i = threadIdx.x % WARP_SIZE; i < block.capacity; i += WARP_SIZE) {
        uint2& entry = row.list[i];
        const float norm = block.norms[entry.x];
        const float width = __fmaf_ru(limits.per_norm, norm, limits.floor);
        const float low = __fadd_rd(__uint_as_float(entry.y), -width);
        const u32 lower = total_order_key(__fadd_rn(low, row.bias[entry.x]));
        entry.y = norm < limits.norm_limit ? lower : 0;
    }
    return best_of_entries(row.list, block.capacity, top_k, bins);
}

// Turn a row's part of a sample into its threshold. For a warp.
__device__ __forceinline__ void end_sample(const Block& block, u32 r, u32 rank, u32* bins) {
    RowState& row = block.rows[r];
    const u32 length = length_of(row) < SAMPLE_CAPACITY ? length_of(row) : SAMPLE_CAPACITY;
    __syncwarp();
    if (threadIdx.x % WARP_SIZE == 0) row.num_sampled = length;
    __syncwarp();
    const u64 threshold = guess_threshold(block, r, rank, bins);
    __syncwarp();
    if (threadIdx.x % WARP_SIZE == 0) restart(row, threshold, true);
}

// Publish a row whose list is right, or guess again by how far off it is. For a warp.
__device__ __forceinline__ void close_row(const Block& block, u32 r, u32 top_k, bool is_last,
                                          u32* bins, RowRecord& record) {
    RowState& row = block.rows[r];
    const u32 num_kept = length_of(row);
    const u32 num_reached = row.limits.counts / REACHED;
    const bool is_whole = num_kept <= block.capacity;
    const bool is_enough = row.limits.threshold == lowest() || num_reached >= top_k;
    const bool is_right = is_whole && is_enough;
    if (is_right || is_last) {
        const u32 length = is_right ? num_kept : NOT_COLLECTED;
        if (threadIdx.x % WARP_SIZE == 0) {
            record = {length, true, row.has_bias, 0, false, row.radius};
            row.is_active = false;
        }
        return;
    }
    const u64 wanted = (top_k + block.capacity) / 2;
    const u32 found = is_whole ? num_reached : num_kept;
    const u32 rank = static_cast<u32>(row.rank * wanted / (found + 1)) + 1;
    u64 threshold = guess_threshold(block, r, rank, bins);
    const float value = value_of_key(static_cast<u32>(threshold >> 32));
    if (!is_whole && !(value > row.limits.threshold)) {
        threshold = threshold_of_list(block, row, top_k, bins);
    }
    __syncwarp();
    if (threadIdx.x % WARP_SIZE == 0) restart(row, threshold, true);
}

enum class Stage { FIRST_SAMPLE, SECOND_SAMPLE, GUESS, SECOND_GUESS, LAST_GUESS };

__device__ __forceinline__ Stage after(Stage stage) {
    return static_cast<Stage>(static_cast<int>(stage) + 1);
}

template <u32 ROWS>
__device__ __forceinline__ void fill_lists(const Block& block, const Sampling& sampling, u32 top_k,
                                           u32* bins, RowRecord* records) {
    const u32 r = threadIdx.x / WARP_SIZE;
    bool is_open = true;
#pragma unroll 1
    for (Stage stage = Stage::FIRST_SAMPLE; is_open; stage = after(stage)) {
        const bool is_sample = stage == Stage::FIRST_SAMPLE || stage == Stage::SECOND_SAMPLE;
        const Sample sample = stage == Stage::FIRST_SAMPLE ? sampling.first : sampling.second;
        if (is_sample && sample.stride == 0) continue;
        run_pass<ROWS>(block, is_sample ? sample.stride : 1, is_sample);
        const bool is_own = r < ROWS && block.rows[r].is_active;
        __syncwarp();  // all lanes have seen it
        if (is_own && is_sample) {
            end_sample(block, r, sample.rank, bins + r * GUESS_BINS);
        } else if (is_own) {
            const bool is_last = stage == Stage::LAST_GUESS;
            close_row(block, r, top_k, is_last, bins + r * GUESS_BINS, records[r]);
        }
        __syncwarp();
        is_open = __syncthreads_or(is_own && block.rows[r].is_active);
    }
}

// ---- the kernels

struct Launch {
    u64 first_row;
    u64 num_rows;
    u64 rows_per_block;
    u64 S;
    u64 T;
    u32 top_k;
    Sampling sampling;
};

template <u32 ROWS>
__device__ __forceinline__ void filter_rows(Block block, const Scratch& scratch, Rows rows,
                                            const Launch& launch, RowRecord* records) {
    const Block all = block;
    const Rows all_rows = rows;
    // The last rows first: under a causal mask they have the most keys, and would end last.
    const u64 first = (gridDim.x - 1 - blockIdx.x) * launch.rows_per_block;
    const u64 left = launch.num_rows - first;
    u32 count = static_cast<u32>(left < launch.rows_per_block ? left : launch.rows_per_block);
    for (u32 done = 0; count > 0; done += rows.count, count -= rows.count) {
        const u64 begin = launch.first_row + first + done;
        const u64 batch = begin / launch.S;
        const u64 batch_left = (batch + 1) * launch.S - begin;
        rows.count = batch_left < count ? static_cast<u32>(batch_left) : count;
        rows.query = all_rows.query + begin * rows.H * D;
        rows.weights = all_rows.weights + begin * rows.H;
        rows.bias = all_rows.bias + begin * launch.T;
        rows.lists = all_rows.lists + (begin - launch.first_row) * block.capacity;
        block.key = all.key + batch * launch.T * D;
        block.norms = all.norms + batch * launch.T;
        load_rows<ROWS>(block, rows, scratch);
        fill_lists<ROWS>(block, launch.sampling, launch.top_k, scratch.bins, records + begin);
    }
}

#define NXRT_FILTER(ROWS)                                                                         \
    Scratch scratch;                                                                              \
    Block block = lay_out_block<ROWS>(scratch);                                                   \
    block.key = key;                                                                              \
    block.norms = norms;                                                                          \
    block.T = static_cast<u32>(T);                                                                \
    block.zero = static_cast<u32>(T >> 32);                                                       \
    block.capacity = static_cast<u32>(capacity);                                                  \
    const u32 num_heads = static_cast<u32>(H);                                                    \
    const Rows rows{query, weights, bias, lists, 0, num_heads, scale, weights_scale};             \
    const Sampling sampling{{static_cast<u32>(first_stride), static_cast<u32>(first_rank)},       \
                            {static_cast<u32>(stride), static_cast<u32>(rank)}};                  \
    const u32 most = static_cast<u32>(top_k);                                                     \
    filter_rows<ROWS>(block, scratch, rows,                                                       \
                      {first_row, num_rows, rows_per_block, S, T, most, sampling}, records)

#define NXRT_PARAMETERS                                                                           \
    const Stored *query, const Stored *key, const Stored *weights, const float *bias,             \
        const float *norms, uint2 *lists, RowRecord *records, u64 first_row, u64 num_rows,        \
        u64 rows_per_block, u64 S, u64 T, u64 H, u64 top_k, u64 capacity, u64 first_stride,       \
        u64 first_rank, u64 stride, u64 rank, float scale, float weights_scale

// For up to 32 heads.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    dsa_index_select_prefill_8(NXRT_PARAMETERS) {
    NXRT_FILTER(8);
}

// For up to 64 heads.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    dsa_index_select_prefill_4(NXRT_PARAMETERS) {
    NXRT_FILTER(4);
}
