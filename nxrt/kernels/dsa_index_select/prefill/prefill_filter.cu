// DsaIndexSelect for many rows that share their keys: a list of candidates for each row, by bounds
// from tensor cores. prefill_settle.cu chooses among them.
//
// A block takes rows_per_block rows that follow each other; a warp takes 32 keys at a time and
// multiplies them with all of the block's rows. One of sample_stride such groups is looked at first
// to guess from which score on a row has a little more than top_k keys. Scores are never stored.
//
// query [B,S,H,D], key [B,T,D], weights [B,S,H] of type NXRT_DTYPE, D = NXRT_DEPTH; bias [B,1,S,T]
// and norms [B,T] f32; T < 2^32. For each row of a launch: lists [3][capacity], the candidates'
// positions in no order, lower and upper bounds; and in records [B,S] its length, or NOT_COLLECTED.
//
// A list is right where its threshold is 0, or where top_k lower bounds reach the threshold: a key
// that was dropped has an upper bound below it, so that top_k keys beat it.

#include "prefill_products.cuh"
#include "row_record.cuh"
#include "sample.cuh"
#include "settle.cuh"

constexpr u32 ROOM = TILE;           // left in a list between two looks at the lists
constexpr u32 TILES_PER_LOOK = 4;    // where a threshold thins out the keys from the start
constexpr u32 REACHED = 1u << 16;

static_assert(MAX_ROWS * GUESS_BINS <= NUM_BINS, "a histogram for each row");

struct Block {
    SelectState* state;
    RowState* states;    // [MAX_ROWS]
    Rows rows;
    uint4* stage;        // a tile's keys, each lane's own
    const Stored* key;   // of the rows' batch
    const float* norms;  // of the rows' batch
    const float* bias;   // of the first row, and so are the lists
    u32* lists;
    u32 T;
    u32 num_rows;
    u32 capacity;
};

// One look at keys: groups of 32, `stride` groups apart.
struct Pass {
    u32 stride;
    u32 num_groups;
    u32 groups_per_look;  // at whether the lists have room
    u32 wanted;
};

struct Group {
    u32 index;
    u32 rows;  // a bit for each row that may choose one of its keys
};

// The host adds up the same: prefill_layout.py.
__device__ __forceinline__ Block lay_out_block(u32 H, u32 rows_per_block, float scale) {
    u8* next = dynamic_shared();
    Block block;
    Rows& rows = block.rows;
    rows.H = H;
    rows.H16 = (H + HEAD_TILE - 1) / HEAD_TILE * HEAD_TILE;
    rows.scale = scale;
    rows.fragments = reinterpret_cast<uint4*>(take(next, rows_per_block * rows.H16 * D * 2));
    rows.weights = reinterpret_cast<float*>(take(next, rows_per_block * rows.H16 * 4));
    block.state = reinterpret_cast<SelectState*>(take(next, sizeof(SelectState)));
    block.states = reinterpret_cast<RowState*>(take(next, MAX_ROWS * sizeof(RowState)));
    block.stage = reinterpret_cast<uint4*>(take(next, TILE * CHUNKS * 16));
    return block;
}

__device__ __forceinline__ Candidates list_of(const Block& block, u32 r) {
    u32* const words = block.lists + static_cast<u64>(r) * 3 * block.capacity;
    return {words, words + block.capacity, words + 2 * block.capacity};
}

__device__ __forceinline__ u32 length_of(u32 tally) { return tally % REACHED; }

__device__ __forceinline__ u32 active_rows(const Block& block) {
    u32 active = 0;
    for (u32 r = 0; r < block.num_rows; ++r) active |= block.states[r].is_active << r;
    return active;
}

// ---- a warp's keys

__device__ __forceinline__ float bias_of(const Block& block, u32 r, u32 begin) {
    const u64 position = static_cast<u64>(begin) + threadIdx.x % WARP_SIZE;
    const u64 row = static_cast<u64>(r) * block.T;
    return position < block.T ? __ldg(block.bias + row + position) : MASK_THRESHOLD;
}

__device__ __forceinline__ u32 rows_that_allow(const Block& block, u32 active, u32 begin) {
    float bias[MAX_ROWS];
#pragma unroll
    for (u32 r = 0; r < MAX_ROWS; ++r) {
        bias[r] = active >> r & 1 ? bias_of(block, r, begin) : MASK_THRESHOLD;
    }
    u32 rows = 0;
#pragma unroll
    for (u32 r = 0; r < MAX_ROWS; ++r) {
        if (__any_sync(FULL_WARP, bias[r] > MASK_THRESHOLD)) rows |= 1u << r;
    }
    return rows;
}

// Every warp looks at its next biases right after a look at the lists, with nothing else to do.
__device__ __forceinline__ void prefetch_bias(const Block& block, u64 begin) {
    const u32 r = threadIdx.x % WARP_SIZE / 2;
    const u64 position = begin + threadIdx.x % 2 * (WARP_SIZE - 1);
    if (r < block.num_rows && position < block.T) {
        prefetch(block.bias + static_cast<u64>(r) * block.T + position);
    }
}

// Find this warp's next group that a row may choose from.
__device__ __forceinline__ Group find_group(const Block& block, const Pass& pass, u32 active,
                                            u32 index) {
    for (; index < pass.num_groups; index += WARPS) {
        const u32 begin = index * pass.stride * WARP_SIZE;
        prefetch_bias(block, static_cast<u64>(begin) + WARPS * pass.stride * WARP_SIZE);
        const u32 rows = rows_that_allow(block, active, begin);
        if (rows != 0) return {index, rows};
    }
    return {index, 0};
}

__device__ __forceinline__ void start_group(const Block& block, const Pass& pass,
                                            const Group& group) {
    if (group.rows == 0) return;
    copy_keys(block.stage, block.key, group.index * pass.stride * WARP_SIZE, block.T - 1);
    commit_copies();
}

// Append to row r's list what the lanes keep, or, where it does not fit, only count it; return
// whether the list has little room left.
__device__ __forceinline__ bool append_to_list(const Block& block, u32 r, bool is_kept,
                                               bool is_reached, u32 position,
                                               const Bounds& bounds) {
    const u32 lane_idx = threadIdx.x % WARP_SIZE;
    const u32 mask = __ballot_sync(FULL_WARP, is_kept);
    if (mask == 0) return false;
    const u32 num_reached = __popc(__ballot_sync(FULL_WARP, is_reached));
    u32 tally = 0;
    if (lane_idx == 0) {
        tally = atomicAdd(&block.states[r].tally, __popc(mask) + num_reached * REACHED);
    }
    const u32 begin = length_of(__shfl_sync(FULL_WARP, tally, 0));
    const u32 place = begin + __popc(mask & ((1u << lane_idx) - 1));
    if (is_kept && place < block.capacity) {
        const Candidates list = list_of(block, r);
        list.position[place] = position;
        list.lower[place] = bounds.lower;
        list.upper[place] = bounds.upper;
    }
    return begin + __popc(mask) + ROOM > block.capacity;
}

__device__ __forceinline__ bool filter_row(const Block& block, u32 r, u32 begin, float norm,
                                           const KeyTile& tile) {
    const u32 position = begin + threadIdx.x % WARP_SIZE;
    const float bias = bias_of(block, r, begin);
    const float highest = __int_as_float(0x7f800000);
    const float total = approximate_total(block.rows, r, tile);
    const Radius& radius = block.states[r].radius;
    const u64 threshold = block.states[r].threshold;
    const bool is_allowed = bias > MASK_THRESHOLD;
    Bounds bounds = bounds_of(radius, {total, highest}, norm, bias);
    bool is_kept = is_allowed && ranked(bounds.upper, position) >= threshold;
    // Where no head counts the total is 0: then it is worth to know whether none can.
    if (__any_sync(FULL_WARP, is_kept && total == 0.0f) && !radius.is_zero) {
        const float dot = largest_dot(block.rows, r, tile);
        bounds = bounds_of(radius, {total, dot}, norm, bias);
        is_kept = is_allowed && ranked(bounds.upper, position) >= threshold;
    }
    const bool is_reached = is_kept && ranked(bounds.lower, position) >= threshold;
    return append_to_list(block, r, is_kept, is_reached, position, bounds);
}

// Filter the warp's keys up to the next look at the lists; return whether one has little room left.
__device__ __forceinline__ bool filter_groups(const Block& block, const Pass& pass, u32 active,
                                              u32 end, Group& next) {
    bool is_full = false;
    while (next.index < end) {
        const Group group = next;
        const u32 begin = group.index * pass.stride * WARP_SIZE;
        const u64 position = static_cast<u64>(begin) + threadIdx.x % WARP_SIZE;
        const float norm = position < block.T ? block.norms[position] : 0.0f;
        next = find_group(block, pass, active, group.index + WARPS);
        KeyTile tile;
        wait_for_copies<0>();
        load_keys(tile, block.stage);
        __syncwarp();  // the stage has been read
        start_group(block, pass, next);
#pragma unroll 1
        for (u32 r = 0; r < block.num_rows; ++r) {
            if ((group.rows & active) >> r & 1) {
                is_full |= filter_row(block, r, begin, norm, tile);
            }
        }
    }
    return is_full;
}

// ---- the block's lists

// Prune the lists that have little room left; a row whose list stays so, or has lost what did not
// fit, is given up in this pass.
__device__ __forceinline__ void make_room_in_lists(const Block& block, u32 wanted) {
    for (u32 r = 0; r < block.num_rows; ++r) {
        RowState& row = block.states[r];
        const u32 tally = row.tally;
        u64 threshold = row.threshold;
        u32 n = length_of(tally);
        if (!row.is_active || n + ROOM <= block.capacity) continue;
        u32 num_reached = tally / REACHED;
        __syncthreads();
        if (n > wanted && n <= block.capacity) {
            u64 found;
            n = prune(*block.state, list_of(block, r), n, wanted, found);
            // A lower one proves nothing about what a guess has dropped already.
            if (found >= threshold) {
                threshold = found;
                num_reached = wanted;
            }
        }
        if (threadIdx.x == 0) {
            row.threshold = threshold;
            row.tally = n + num_reached * REACHED;
            row.is_active = n + ROOM <= block.capacity;
        }
    }
    __syncthreads();  // all have seen how long the lists are before anyone appends again
}

// Fill the lists of the active rows.
__device__ __forceinline__ void scan(const Block& block, const Pass& pass) {
    u32 active = active_rows(block);
    Group next = find_group(block, pass, active, threadIdx.x / WARP_SIZE);
    start_group(block, pass, next);
    for (u32 end = pass.groups_per_look;; end += pass.groups_per_look) {
        const bool is_last = end >= pass.num_groups;
        const u32 look = is_last ? pass.num_groups : end;
        const bool is_full = filter_groups(block, pass, active, look, next);
        if (__syncthreads_or(is_full) && !is_last) {
            make_room_in_lists(block, pass.wanted);
            active = active_rows(block);
        }
        if (is_last) break;
    }
    wait_for_copies<0>();
}

__device__ __forceinline__ void restart(RowState& row, u64 threshold, bool is_active) {
    row.threshold = threshold;
    row.tally = 0;
    row.is_active = is_active;
}

// Turn the sample's lists into thresholds.
__device__ __forceinline__ void guess_thresholds(const Block& block, u32 rank) {
    const u32 r = threadIdx.x / WARP_SIZE;
    if (r < block.num_rows) {
        RowState& row = block.states[r];
        const u32 length = length_of(row.tally);
        const u32 n = row.is_active && length <= block.capacity ? length : 0;
        u32* const bins = block.state->bins + r * GUESS_BINS;
        const u32 guess = guess_from(list_of(block, r).lower, n, rank, bins);
        __syncwarp();
        if (threadIdx.x % WARP_SIZE == 0) restart(row, static_cast<u64>(guess) << 32, true);
    }
    __syncthreads();
}

// Publish what is right; return the rows to be looked at again, without a guess.
__device__ __forceinline__ u32 close_rows(const Block& block, u32 open, bool is_guess, u32 top_k,
                                          RowRecord* records) {
    u32 again = 0;
    for (u32 r = 0; r < block.num_rows; ++r) {
        const RowState& row = block.states[r];
        const bool is_whole = row.is_active && length_of(row.tally) <= block.capacity;
        const bool is_enough = row.threshold == 0 || row.tally / REACHED >= top_k;
        const bool is_right = is_whole && is_enough;
        if (!(open >> r & 1)) continue;
        if (!is_right && is_guess) {
            again |= 1u << r;
        } else if (threadIdx.x == 0) {
            const u32 length = is_right ? length_of(row.tally) : NOT_COLLECTED;
            records[r] = {length, false, true, 0, false, row.radius};
        }
    }
    __syncthreads();
    const u32 r = threadIdx.x;
    if (r < block.num_rows) restart(block.states[r], 0, again >> r & 1);
    __syncthreads();
    return again;
}

struct Sampling {
    u32 stride;  // 0: no sample
    u32 rank;    // in the sample, of what the row's top_k-th score is guessed to be above
};

// Fill the lists of the block's rows, which are loaded.
__device__ __forceinline__ void fill_lists(const Block& block, const Sampling& sampling, u32 top_k,
                                           RowRecord* records) {
    const u32 num_groups = (block.T - 1) / WARP_SIZE + 1;
    if (threadIdx.x < block.num_rows) restart(block.states[threadIdx.x], 0, true);
    __syncthreads();
    u32 open = (1u << block.num_rows) - 1;
    bool is_guess = false;
#pragma unroll 1
    for (bool is_sample = sampling.stride != 0; open != 0; is_sample = false) {
        const u32 stride = is_sample ? sampling.stride : 1;
        const u32 wanted = is_sample ? sampling.rank : top_k;
        const u32 tiles = is_guess ? TILES_PER_LOOK : 1;
        scan(block, {stride, (num_groups - 1) / stride + 1, tiles * WARPS, wanted});
        if (is_sample) {
            guess_thresholds(block, wanted);
        } else {
            open = close_rows(block, open, is_guess, top_k, records);
        }
        is_guess = is_sample;
    }
}

// ---- the kernels

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    dsa_index_select_prefill(const Stored* query, const Stored* key, const Stored* weights,
                             const float* bias, const float* norms, u32* lists,
                             RowRecord* records, u64 first_row, u64 num_rows,
                             u64 rows_per_block, u64 S, u64 T, u64 H, u64 top_k, u64 capacity,
                             u64 sample_stride, u64 sample_rank, float scale,
                             float weights_scale) {
    Block block = lay_out_block(static_cast<u32>(H), static_cast<u32>(rows_per_block), scale);
    block.T = static_cast<u32>(T);
    block.capacity = static_cast<u32>(capacity);
    const Sampling sampling{static_cast<u32>(sample_stride), static_cast<u32>(sample_rank)};
    const u64 last = first_row + num_rows;
    // The last rows first: under a causal mask they have the most keys, and would end last.
    u64 begin = first_row + (gridDim.x - 1 - blockIdx.x) * rows_per_block;
    const u64 end = begin + rows_per_block < last ? begin + rows_per_block : last;
    while (begin < end) {
        const u64 batch = begin / S;
        const u64 part_end = (batch + 1) * S < end ? (batch + 1) * S : end;
        block.num_rows = static_cast<u32>(part_end - begin);
        block.key = key + batch * T * D;
        block.norms = norms + batch * T;
        block.bias = bias + begin * T;
        block.lists = lists + (begin - first_row) * 3 * capacity;
        load_rows(block.rows, block.states, block.num_rows, query + begin * H * D,
                  weights + begin * H, weights_scale);
        fill_lists(block, sampling, static_cast<u32>(top_k), records + begin);
        __syncthreads();
        begin = part_end;
    }
}
