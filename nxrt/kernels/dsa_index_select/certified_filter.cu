// DsaIndexSelect for a few rows of many keys: bounds from tensor cores, exact sums where they leave
// a doubt.
//
// blockIdx.y counts rows and blockIdx.x the blocks of a row, each with keys_per_block of its keys.
// Every block keeps the keys that may be among the row's best; the blocks of a row agree on a
// threshold; the last of them scores what the bounds leave open, and writes. The same bytes as
// dsa_index_select.cu, whatever the data: where bounds do not thin out the keys, exact scores do.
//
// query [B,S,H,D], key [B,T,D], weights [B,S,H] of type NXRT_DTYPE, D = NXRT_DEPTH; bias [B,1,S,T]
// f32; selected [B,1,S,K] i64. T < 2^32. With several blocks a row all blocks must be resident at
// once. `control` is zero before and after a launch.

#include "score_bounds.cuh"

constexpr float MASK_THRESHOLD = -1e30f;
constexpr u32 TILE = THREADS;  // keys of a block at once, a lane each
constexpr u32 NUM_STAGES = 2;  // tiles under way to shared memory
constexpr u32 STAGE_CHUNKS = TILE * CHUNKS;
constexpr u32 MAX_GROUP = 256;
constexpr u32 NUM_HISTOGRAMS = 3;

struct Problem {
    const Stored* key;  // of the row's batch
    const float* bias;  // of the row
    u32 T;
    u32 begin;
    u32 end;
    u32 top_k;
    u32 capacity;
};

// What the blocks of a row share.
struct Control {
    u32 num_arrived;
    u32 num_finished;
    u32 must_be_exact;
    u32 num_listed;
    u32 counts[MAX_GROUP];
    u32 places[MAX_GROUP];
    u32 histograms[NUM_HISTOGRAMS][NUM_BINS];
};

struct Shared {
    SelectState* state;
    QueryRow row;
    Candidates candidates;
    u32* contenders;  // [capacity], in place of the stages
    u32* inexact;     // [capacity], likewise
    uint4* stages;  // [NUM_STAGES][STAGE_CHUNKS]
};

__device__ __forceinline__ u8* take(u8*& next, u32 nbytes) {
    u8* const taken = next;
    next += (nbytes + 15) / 16 * 16;
    return taken;
}

// The host adds up the same: FilterLayout in filter_layout.py.
__device__ __forceinline__ Shared lay_out(u32 H, u32 capacity, float scale) {
    u8* next = dynamic_shared();
    Shared shared;
    QueryRow& row = shared.row;
    row.H = H;
    row.H16 = (H + HEAD_TILE - 1) / HEAD_TILE * HEAD_TILE;
    row.scale = scale;
    row.chunks = reinterpret_cast<uint4*>(take(next, row.H16 * D * 2));
    row.staged = reinterpret_cast<uint4*>(take(next, WARPS * EXACT_KEYS * D * 2));
    row.weights = reinterpret_cast<float*>(take(next, row.H16 * 4));
    row.sums = reinterpret_cast<float*>(take(next, THREADS * CHUNK * 4));
    row.terms = reinterpret_cast<float*>(take(next, WARPS * EXACT_KEYS * WARP_SIZE * 4));
    shared.state = reinterpret_cast<SelectState*>(take(next, sizeof(SelectState)));
    shared.stages = reinterpret_cast<uint4*>(take(next, NUM_STAGES * STAGE_CHUNKS * 16));
    shared.candidates.position = reinterpret_cast<u32*>(take(next, capacity * 4));
    shared.candidates.lower = reinterpret_cast<u32*>(take(next, capacity * 4));
    shared.candidates.upper = reinterpret_cast<u32*>(take(next, capacity * 4));
    shared.contenders = reinterpret_cast<u32*>(shared.stages);  // which nobody needs by then
    shared.inexact = shared.contenders + capacity;
    if (next - dynamic_shared() > dynamic_shared_nbytes()) __trap();
    return shared;
}

// ---- a block's own keys

// Append in order what each lane keeps; return the new number. One barrier.
__device__ __forceinline__ u32 append(const Shared& shared, u32 parity, u32 n, bool is_kept,
                                      u32 position, const Bounds& bounds) {
    const u32 lane_idx = threadIdx.x % WARP_SIZE;
    const u32 warp_idx = threadIdx.x / WARP_SIZE;
    u32* const masks = shared.state->masks[parity];
    const u32 mask = __ballot_sync(FULL_WARP, is_kept);
    if (lane_idx == 0) masks[warp_idx] = mask;
    __syncthreads();
    u32 place = n + __popc(mask & ((1u << lane_idx) - 1));
    u32 total = n;
    for (u32 warp = 0; warp < WARPS; ++warp) {
        const u32 count = __popc(masks[warp]);
        if (warp < warp_idx) place += count;
        total += count;
    }
    if (is_kept) {
        shared.candidates.position[place] = position;
        shared.candidates.lower[place] = bounds.lower;
        shared.candidates.upper[place] = bounds.upper;
    }
    return total;
}

constexpr u32 NOT_COLLECTED = 0xffffffffu;

// Make room for a tile where there is none; false where there are too many that may be chosen.
__device__ __forceinline__ bool make_room(const Shared& shared, const Problem& problem, u32& n,
                                          u64& threshold) {
    if (n + TILE <= problem.capacity) return true;
    __syncthreads();
    if (n <= problem.top_k) return false;
    n = prune(*shared.state, shared.candidates, n, problem.top_k, threshold);
    return n + TILE <= problem.capacity;
}

// Start to copy the block's tile, if there is such a one; its group is closed either way.
__device__ __forceinline__ void copy_tile(const Shared& shared, const Problem& problem, u64 begin,
                                          u32 stage) {
    if (begin < problem.end) {
        const u32 first = static_cast<u32>(begin) + threadIdx.x / WARP_SIZE * WARP_SIZE;
        copy_keys(shared.stages + stage * STAGE_CHUNKS, problem.key, first, problem.T - 1);
    }
    commit_copies();
}

__device__ __forceinline__ void start_copies(const Shared& shared, const Problem& problem) {
    for (u32 stage = 0; stage < NUM_STAGES; ++stage) {
        copy_tile(shared, problem, static_cast<u64>(problem.begin) + stage * TILE, stage);
    }
}

// Collect the block's candidates by their bounds; return how many, or NOT_COLLECTED where bounds do
// not thin out the keys enough. After start_copies.
__device__ __forceinline__ u32 collect(const Shared& shared, const Problem& problem) {
    u64 threshold = 0;
    u32 n = 0;
    bool has_room = true;
    u32 stage = 0;
    for (u64 begin = problem.begin; begin < problem.end && has_room; begin += TILE) {
        const u64 place = begin + threadIdx.x;
        const u32 position = static_cast<u32>(place);
        const float bias = place < problem.end ? problem.bias[place] : MASK_THRESHOLD;
        wait_for_copies<NUM_STAGES - 1>();
        KeyTile tile;
        load_keys(tile, shared.stages + stage * STAGE_CHUNKS);
        const float norm = norm_of_key(tile);
        const Approximation found = approximate(shared.row, tile);
        const Bounds bounds = bounds_of(shared.row.radius, found, norm, bias);
        copy_tile(shared, problem, begin + NUM_STAGES * TILE, stage);
        has_room = make_room(shared, problem, n, threshold);
        const bool is_kept = bias > MASK_THRESHOLD && ranked(bounds.upper, position) >= threshold;
        if (has_room) n = append(shared, begin / TILE % 2, n, is_kept, position, bounds);
        stage = stage + 1 == NUM_STAGES ? 0 : stage + 1;
    }
    wait_for_copies<0>();
    __syncthreads();
    return has_room ? n : NOT_COLLECTED;
}

// Lane i scores key begin + i.
__device__ __forceinline__ u32 exact_key(const Shared& shared, const Problem& problem, u64 begin) {
    const u32 lane_idx = threadIdx.x % WARP_SIZE;
    u32 mine = 0;
    for (u32 i = 0; i < WARP_SIZE && begin + i < problem.end; i += EXACT_KEYS) {
        const u64 left = problem.end - begin - i;
        u32 position[EXACT_KEYS];
#pragma unroll
        for (u32 other = 0; other < EXACT_KEYS; ++other) {
            position[other] = static_cast<u32>(begin + i + other);
        }
        const u32 count = left < EXACT_KEYS ? static_cast<u32>(left) : EXACT_KEYS;
        const float score = exact_scores(shared.row, problem.key, problem.bias, position, count);
        const u32 key = __shfl_sync(FULL_WARP, total_order_key(score), lane_idx % EXACT_KEYS);
        if (lane_idx / EXACT_KEYS == i / EXACT_KEYS) mine = key;
    }
    return mine;
}

// The same by exact scores, of which never too many may be chosen. Slow, and rarely called.
__device__ __forceinline__ u32 collect_exactly(const Shared& shared, const Problem& problem) {
    u64 threshold = 0;
    u32 n = 0;
    for (u64 begin = problem.begin; begin < problem.end; begin += TILE) {
        const u64 place = begin + threadIdx.x;
        const u32 position = static_cast<u32>(place);
        const float bias = place < problem.end ? problem.bias[place] : MASK_THRESHOLD;
        const bool is_allowed = bias > MASK_THRESHOLD;
        u32 key = 0;
        if (__any_sync(FULL_WARP, is_allowed)) {
            key = exact_key(shared, problem, begin + threadIdx.x / WARP_SIZE * WARP_SIZE);
        }
        make_room(shared, problem, n, threshold);
        const bool is_kept = is_allowed && ranked(key, position) >= threshold;
        n = append(shared, begin / TILE % 2, n, is_kept, position, {key, key});
    }
    __syncthreads();
    return n;
}

// ---- the blocks of a row together

__device__ __forceinline__ void wait_for_group(Control* control, u32& num_meetings) {
    __syncthreads();
    ++num_meetings;
    if (threadIdx.x == 0) {
        __threadfence();
        atomicAdd(&control->num_arrived, 1u);
        const u32 wanted = num_meetings * gridDim.x;
        while (*static_cast<volatile u32*>(&control->num_arrived) < wanted) wait_a_little();
        __threadfence();
    }
    __syncthreads();
}

// Find a threshold that at least top_k lower bounds of the row reach, and not many more; 0 where
// there are fewer. `num_meetings` goes on from what it was.
__device__ __forceinline__ u64 group_threshold(const Shared& shared, const Problem& problem,
                                               Control* control, u32 n, u32& num_meetings) {
    SelectState& state = *shared.state;
    u64 prefix = 0;
    u32 wanted = problem.top_k;
    for (u32 shift = FIRST_SHIFT;; shift = next_shift(shift)) {
        clear_bins(state);
        __syncthreads();
        for (u32 i = threadIdx.x; i < n; i += THREADS) {
            const u64 value = shared.candidates.low(i);
            if (begins_with(value, prefix, shift)) {
                atomicAdd(&state.bins[digit_of(value, shift)], 1u);
            }
        }
        __syncthreads();
        u32* const histogram = control->histograms[num_meetings % NUM_HISTOGRAMS];
        u32* const stale = control->histograms[(num_meetings + 2) % NUM_HISTOGRAMS];
        for (u32 bin = threadIdx.x; bin < NUM_BINS; bin += THREADS) {
            if (state.bins[bin] != 0) atomicAdd(&histogram[bin], state.bins[bin]);
        }
        wait_for_group(control, num_meetings);
        u32 mine = 0;
        for (u32 bin = threadIdx.x; bin < NUM_BINS; bin += THREADS) {
            state.bins[bin] = __ldcg(&histogram[bin]);
            mine += state.bins[bin];
            // Everybody has read this one, and nobody adds to it before the next meeting.
            if (bin % gridDim.x == blockIdx.x) stale[bin] = 0;
        }
        u32 total;
        block_exclusive_sum(mine, state.warp_sums, total);
        if (total < wanted) return 0;
        choose_digit(state, wanted);
        prefix |= static_cast<u64>(state.digit) << shift;
        wanted -= state.num_above;
        const u32 num_left = problem.top_k - wanted + state.bins[state.digit];
        __syncthreads();
        if (num_left <= problem.top_k + problem.capacity / 8 || shift == 0) return prefix;
    }
}

// A row's candidates: each block has a piece, in the order in which they came.
struct List {
    u32* words;  // [3][length]
    u32 length;

    __device__ __forceinline__ Candidates from(u32 place) const {
        return {words + place, words + length + place, words + 2 * length + place};
    }
};

// Publish the block's candidates, if the list has room; say whether this is the last block of its
// row to do so.
__device__ __forceinline__ bool hand_over(const Shared& shared, Control* control, const List& list,
                                          u32 n) {
    SelectState& state = *shared.state;
    if (threadIdx.x == 0) {
        state.count = atomicAdd(&control->num_listed, n);
        control->counts[blockIdx.x] = n;
        control->places[blockIdx.x] = state.count;
    }
    __syncthreads();
    const u32 place = state.count;
    if (place + n <= list.length) {
        const Candidates piece = list.from(place);
        for (u32 i = threadIdx.x; i < n; i += THREADS) {
            piece.position[i] = shared.candidates.position[i];
            piece.lower[i] = shared.candidates.lower[i];
            piece.upper[i] = shared.candidates.upper[i];
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        state.count = atomicAdd(&control->num_finished, 1u);
        __threadfence();
    }
    __syncthreads();
    return state.count == gridDim.x - 1;
}

// Gather what the row's blocks have handed over, in order; return how many, or NOT_COLLECTED.
__device__ __forceinline__ u32 gather(const Shared& shared, Control* control, const List& list) {
    if (__ldcg(&control->num_listed) > list.length) return NOT_COLLECTED;
    u32 n = 0;
    for (u32 block = 0; block < gridDim.x; ++block) {
        const u32 count = __ldcg(&control->counts[block]);
        const Candidates piece = list.from(__ldcg(&control->places[block]));
        for (u32 i = threadIdx.x; i < count; i += THREADS) {
            shared.candidates.position[n + i] = __ldcg(&piece.position[i]);
            shared.candidates.lower[n + i] = __ldcg(&piece.lower[i]);
            shared.candidates.upper[n + i] = __ldcg(&piece.upper[i]);
        }
        n += count;
    }
    __syncthreads();
    return n;
}

__device__ __forceinline__ void clear_histograms(Control* control, u32 part, u32 num_parts) {
    for (u32 i = threadIdx.x + part * THREADS; i < NUM_HISTOGRAMS * NUM_BINS;
         i += num_parts * THREADS) {
        control->histograms[i / NUM_BINS][i % NUM_BINS] = 0;
    }
}

__device__ __forceinline__ void leave_clean(Control* control) {
    __syncthreads();  // all of this last block have read it
    clear_histograms(control, 0, 1);
    if (threadIdx.x == 0) {
        control->num_arrived = 0;
        control->num_finished = 0;
        control->must_be_exact = 0;
        control->num_listed = 0;
    }
}

// ---- one block at the end

constexpr u32 MAX_RANKED = THREADS;  // contenders that are compared each with each

// Sort candidates out: the upper bound becomes 1 where one is certainly chosen and 0 elsewhere;
// those in doubt are listed, and those of them that must be scored. Return how many are certain.
__device__ __forceinline__ u32 sort_out(const Shared& shared, u32 n, u64 threshold, u64 most) {
    SelectState& state = *shared.state;
    const Candidates& all = shared.candidates;
    if (threadIdx.x == 0) state.num_contenders = state.num_inexact = 0;
    __syncthreads();
    u32 num_certain = 0;
    for (u32 i = threadIdx.x; i < n; i += THREADS) {
        const bool is_certain = all.low(i) > most;
        if (!is_certain && all.high(i) >= threshold) {
            shared.contenders[atomicAdd(&state.num_contenders, 1u)] = i;
            if (all.lower[i] != all.upper[i]) {
                shared.inexact[atomicAdd(&state.num_inexact, 1u)] = i;
            }
        }
        all.upper[i] = is_certain;
        num_certain += is_certain;
    }
    u32 total;
    block_exclusive_sum(num_certain, state.warp_sums, total);
    return total;
}

// Score what the bounds left open. Ends with a barrier.
__device__ __forceinline__ void score_inexact(const Shared& shared, const Problem& problem) {
    const Candidates& all = shared.candidates;
    const u32 num_inexact = shared.state->num_inexact;
    const u32 lane_idx = threadIdx.x % WARP_SIZE;
    const u32 first = threadIdx.x / WARP_SIZE * EXACT_KEYS;
    for (u32 begin = first; begin < num_inexact; begin += WARPS * EXACT_KEYS) {
        u32 position[EXACT_KEYS] = {};
        const u32 left = num_inexact - begin;
        const u32 count = left < EXACT_KEYS ? left : EXACT_KEYS;
#pragma unroll
        for (u32 i = 0; i < EXACT_KEYS; ++i) {
            if (i < count) position[i] = all.position[shared.inexact[begin + i]];
        }
        const float score = exact_scores(shared.row, problem.key, problem.bias, position, count);
        if (lane_idx < count) all.lower[shared.inexact[begin + lane_idx]] = total_order_key(score);
        __syncwarp();
    }
    __syncthreads();
}

// Choose the best `wanted` contenders, whose lower bounds are their scores. Ends with a barrier.
__device__ __forceinline__ void choose_contenders(const Shared& shared, u32 wanted) {
    const Candidates& all = shared.candidates;
    const u32 count = shared.state->num_contenders;
    const auto rank_of = [&](u32 j) { return all.low(shared.contenders[j]); };
    if (count <= MAX_RANKED) {
        const u64 own = threadIdx.x < count ? rank_of(threadIdx.x) : 0;
        u32 num_better = 0;
        for (u32 j = 0; j < count; ++j) num_better += rank_of(j) > own;
        if (threadIdx.x < count) all.upper[shared.contenders[threadIdx.x]] = num_better < wanted;
    } else {
        const u64 last = kth_largest(*shared.state, count, wanted, rank_of);
        for (u32 j = threadIdx.x; j < count; j += THREADS) {
            all.upper[shared.contenders[j]] = rank_of(j) >= last;
        }
    }
    __syncthreads();
}

// Write the positions of those whose upper bound is not 0, in order; exactly top_k have one.
__device__ __forceinline__ void write_chosen(const Shared& shared, u32 n, i64* selected) {
    const Candidates& all = shared.candidates;
    const u32 per_thread = (n + THREADS - 1) / THREADS;
    const u32 begin = threadIdx.x * per_thread;
    const u32 end = begin + per_thread < n ? begin + per_thread : n;
    u32 count = 0;
    for (u32 i = begin; i < end; ++i) count += all.upper[i];
    u32 total;
    u32 place = block_exclusive_sum(count, shared.state->warp_sums, total);
    for (u32 i = begin; i < end; ++i) {
        if (all.upper[i] != 0) selected[place++] = static_cast<i64>(all.position[i]);
    }
}

__device__ __forceinline__ void write_selected(const Shared& shared, const Problem& problem, u32 n,
                                               i64* selected) {
    SelectState& state = *shared.state;
    const Candidates& all = shared.candidates;
    if (n <= problem.top_k) {
        for (u32 i = threadIdx.x; i < problem.top_k; i += THREADS) {
            selected[i] = i < n ? static_cast<i64>(all.position[i]) : -1;
        }
        return;
    }
    const u64 threshold =
        kth_largest(state, n, problem.top_k, [&](u32 i) { return all.low(i); });
    const u64 most = most_of_the_rest(state, all, n, threshold);
    const u32 num_certain = sort_out(shared, n, threshold, most);
    score_inexact(shared, problem);
    if (num_certain < problem.top_k) choose_contenders(shared, problem.top_k - num_certain);
    write_chosen(shared, n, selected);
}

// ---- the kernel

struct Group {
    Control* control;
    List list;
    u32 num_meetings;
};

// Bring a row's candidates together. Return how many there are now in the row's last block, 0 and
// `is_over` in the others, or NOT_COLLECTED: all blocks must collect again, exactly, or one alone.
__device__ __forceinline__ u32 merge(const Shared& shared, Problem& problem, Group& group, u32 n,
                                     bool& is_alone, bool& is_over) {
    Control* const control = group.control;
    const bool is_doubtful = n == NOT_COLLECTED;
    if (is_doubtful && threadIdx.x == 0) atomicOr(&control->must_be_exact, 1u);
    const u32 num_own = is_doubtful ? 0 : n;
    const u64 threshold = group_threshold(shared, problem, control, num_own, group.num_meetings);
    const bool must_be_exact = __ldcg(&control->must_be_exact) != 0;
    if (must_be_exact) {
        // All have seen it, and have read every histogram, once they meet again.
        wait_for_group(control, group.num_meetings);
        clear_histograms(control, blockIdx.x, gridDim.x);
        if (threadIdx.x == 0) control->must_be_exact = 0;
        wait_for_group(control, group.num_meetings);
        return NOT_COLLECTED;
    }
    n = compact(*shared.state, shared.candidates, n,
                [&](u32 i) { return shared.candidates.high(i) >= threshold; });
    is_over = !hand_over(shared, control, group.list, n);
    if (is_over) return 0;
    n = gather(shared, control, group.list);
    leave_clean(control);
    is_alone = true;
    problem.begin = 0;
    problem.end = problem.T;
    return n;
}

__device__ __forceinline__ void select_row(const Shared& shared, Problem& problem, Group& group,
                                           i64* selected) {
    bool is_alone = gridDim.x == 1;
    bool is_over = false;
    for (bool is_exact = false;; is_exact = true) {
        u32 n = is_exact ? collect_exactly(shared, problem) : collect(shared, problem);
        if (!is_alone) n = merge(shared, problem, group, n, is_alone, is_over);
        if (is_over) return;
        if (n != NOT_COLLECTED) return write_selected(shared, problem, n, selected);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    dsa_index_select_filter(const Stored* query, const Stored* key, const Stored* weights,
                            const float* bias, i64* selected, Control* control, u32* lists,
                            u64 num_rows, u64 S, u64 T, u64 H, u64 top_k, u64 keys_per_block,
                            u64 capacity, u64 list_length, float scale, float weights_scale) {
    Shared shared = lay_out(static_cast<u32>(H), static_cast<u32>(capacity), scale);
    for (u64 index = blockIdx.y; index < num_rows; index += gridDim.y) {
        Problem problem;
        problem.key = key + index / S * T * D;
        problem.bias = bias + index * T;
        problem.T = static_cast<u32>(T);
        const u64 begin = blockIdx.x * keys_per_block;
        problem.begin = static_cast<u32>(begin < T ? begin : T);
        problem.end = static_cast<u32>(begin + keys_per_block < T ? begin + keys_per_block : T);
        problem.top_k = static_cast<u32>(top_k);
        problem.capacity = static_cast<u32>(capacity);
        start_copies(shared, problem);  // they are under way while the radius is found
        load_query(shared.row, query + index * H * D, weights + index * H, weights_scale);
        __syncthreads();
        shared.row.radius = radius_of(shared.row);
        const u32 length = static_cast<u32>(list_length);
        Group group{control + index, {lists + index * 3 * length, length}, 0};
        select_row(shared, problem, group, selected + index * top_k);
        __syncthreads();
    }
}
