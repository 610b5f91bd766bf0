// DsaIndexSelect for many rows that share their keys: each row's choice among the candidates that
// prefill_filter.cu has listed, or among all keys where it could not.
//
// A block takes a row at a time: it scores exactly what the bounds leave open, chooses, and writes
// in ascending order. query [B,S,H,D], key [B,T,D], weights [B,S,H] of type NXRT_DTYPE, D =
// NXRT_DEPTH; bias [B,1,S,T] f32; selected [B,1,S,K] i64; T < 2^32.

#include "list_choice.cuh"
#include "row_record.cuh"
#include "score_bounds.cuh"

struct Query {
    const Stored* values;
    const Stored* weights;
    float weights_scale;
};

struct Sources {
    const u32* list;
    const float* norms;
    const float* bias;
};

// Load a list of bounds, [3][capacity]; its order does not matter.
__device__ __forceinline__ void load_bounds(const Candidates& all, const u32* list, u32 capacity,
                                            u32 n) {
#pragma unroll 4
    for (u32 i = threadIdx.x; i < n; i += THREADS) {
        all.position[i] = list[i];
        all.lower[i] = list[capacity + i];
        all.upper[i] = list[2 * static_cast<u64>(capacity) + i];
    }
}

// Load a list of positions and totals, [capacity][2], as bounds. Biases are far away, and of most
// rows 0 wherever a key is not masked.
__device__ __forceinline__ void load_totals(const Candidates& all, const Sources& sources,
                                            const RowRecord& record) {
    const uint2* const list = reinterpret_cast<const uint2*>(sources.list);
    const float highest = __int_as_float(0x7f800000);
#pragma unroll 8
    for (u32 i = threadIdx.x; i < record.length; i += THREADS) {
        const uint2 entry = __ldcs(list + i);
        const float norm = __ldg(sources.norms + entry.x);
        const float bias = record.has_bias ? __ldg(sources.bias + entry.x) : 0.0f;
        const Bounds bounds =
            bounds_of(record.radius, {__uint_as_float(entry.y), highest}, norm, bias);
        all.position[i] = entry.x;
        all.lower[i] = bounds.lower;
        all.upper[i] = bounds.upper;
    }
}

// Write in ascending order the positions from `begin` on whose bits are set; return how many there
// are now in `selected`, which has `num_written`.
__device__ __forceinline__ u32 write_bits(SelectState& state, const u32* words, u32 num_words,
                                          u64 begin, u32 num_written, i64* selected) {
    const u32 share = (num_words + THREADS - 1) / THREADS;
    const u32 first = threadIdx.x * share;
    const u32 end = first + share < num_words ? first + share : num_words;
    u32 count = 0;
    for (u32 i = first; i < end; ++i) count += __popc(words[i]);
    u32 total;
    u32 place = num_written + block_exclusive_sum(count, state.warp_sums, total);
    for (u32 i = first; i < end; ++i) {
        const u64 base = begin + static_cast<u64>(i) * 32;
        for (u32 word = words[i]; word != 0; word &= word - 1) {
            selected[place++] = static_cast<i64>(base + __ffs(word) - 1);
        }
    }
    return num_written + total;
}

// Write what is chosen of n candidates, `num_chosen` of them, in ascending order, and -1 after it.
// A bit for each position puts them in order, as many at a time as fit where upper bounds and band
// were.
__device__ __forceinline__ void write_in_order(const Shared& shared, const Problem& problem, u32 n,
                                               u32 num_chosen, i64* selected) {
    const Candidates& all = shared.candidates;
    u32* const words = all.upper;
    const u64 window = static_cast<u64>(problem.capacity + problem.capacity / 2) * 32;
    u32 num_written = 0;
    for (u64 begin = 0; begin < problem.T && num_written < num_chosen; begin += window) {
        const u64 left = problem.T - begin < window ? problem.T - begin : window;
        const u32 num_words = static_cast<u32>((left + 31) / 32);
        for (u32 i = threadIdx.x; i < num_words; i += THREADS) words[i] = 0;
        __syncthreads();
        for (u32 i = threadIdx.x; i < n; i += THREADS) {
            const u64 bit = all.position[i] - begin;  // huge for a position before it
            const bool is_chosen = n == num_chosen || all.lower[i] == CERTAIN;
            if (is_chosen && bit < left) atomicOr(&words[bit / 32], 1u << bit % 32);
        }
        __syncthreads();
        num_written = write_bits(*shared.state, words, num_words, begin, num_written, selected);
        __syncthreads();
    }
    for (u32 i = num_chosen + threadIdx.x; i < problem.top_k; i += THREADS) selected[i] = -1;
}

// Choose among candidates in shared memory, and write; `record` is the row's, and gets what was
// done.
__device__ __forceinline__ void settle_candidates(const Shared& shared, const Problem& problem,
                                                  const Sources& sources, const RowRecord& found,
                                                  RowRecord& record, i64* selected) {
    u32 n = found.length;
    const bool is_exact = n == NOT_COLLECTED;
    if (is_exact) {
        n = collect_exactly(shared, problem);
    } else if (found.has_totals) {
        load_totals(shared.candidates, sources, found);
    } else {
        load_bounds(shared.candidates, sources.list, problem.capacity, n);
    }
    __syncthreads();
    const u32 num_scored = n > problem.top_k ? choose(shared, problem, n) : 0;
    const u32 num_chosen = n > problem.top_k ? problem.top_k : n;
    write_in_order(shared, problem, n, num_chosen, selected);
    if (threadIdx.x == 0) {
        record.num_scored = num_scored;
        record.is_exact = is_exact;
    }
}

// A word of a row's record for each lane, so that a row's can be loaded while another is settled.
__device__ __forceinline__ u32 load_record(const RowRecord* records, u32 row, u32 end) {
    constexpr u32 NUM_WORDS = sizeof(RowRecord) / 4;
    const u32 lane_idx = threadIdx.x % WARP_SIZE;
    const u32* const words = reinterpret_cast<const u32*>(records + row);
    return row < end && lane_idx < NUM_WORDS ? words[lane_idx] : 0;
}

// What the filters have told.
__device__ __forceinline__ RowRecord record_of(u32 word) {
    constexpr u32 FIRST = (sizeof(RowRecord) - sizeof(Radius)) / 4;
    const auto value = [&](u32 i) {
        return __uint_as_float(__shfl_sync(FULL_WARP, word, FIRST + i));
    };
    RowRecord record{};
    record.length = __shfl_sync(FULL_WARP, word, 0);
    record.has_totals = __shfl_sync(FULL_WARP, word, 1);
    record.has_bias = __shfl_sync(FULL_WARP, word, 2);
    record.radius = {value(0), value(1), value(2), value(3), value(4), false};
    record.radius.is_zero = (__shfl_sync(FULL_WARP, word, FIRST + 5) & 0xff) != 0;
    return record;
}

// Settle a row from the registers; false where nothing is written, but the query is loaded.
__device__ __forceinline__ bool settle_list(const Shared& shared, const Problem& problem,
                                            const Sources& sources, const Query& query,
                                            const RowRecord& found, RowRecord& record,
                                            i64* selected) {
    const List list{added_up(reinterpret_cast<const uint4*>(sources.list)),
                    added_up(sources.norms),
                    added_up(sources.bias),
                    found.length,
                    problem.capacity,
                    found.has_bias != 0,
                    found.radius};
    Entries entries{};
    load_entries(entries, list);
    Doubts& doubts = *reinterpret_cast<Doubts*>(shared.band);
    load_checked_query(shared.row, doubts, query.values, query.weights, query.weights_scale);
    u32 num_scored;
    if (!choose_from_list(shared, problem, list, entries, num_scored, selected)) return false;
    if (threadIdx.x == 0) {
        record.num_scored = num_scored;
        record.is_exact = false;
    }
    return true;
}

// Settle a row; begins and ends without a barrier.
__device__ __forceinline__ void settle_row(const Shared& shared, const Problem& problem,
                                           const Sources& sources, const Query& query,
                                           const RowRecord& found, RowRecord& record,
                                           i64* selected) {
    const bool is_easy = found.has_totals && !found.radius.is_zero &&
                         can_choose(problem, found.length);
    if (is_easy) {
        if (settle_list(shared, problem, sources, query, found, record, selected)) return;
    } else {
        load_query(shared.row, query.values, query.weights, query.weights_scale);
    }
    __syncthreads();
    settle_candidates(shared, problem, sources, found, record, selected);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    dsa_index_select_settle(const Stored* query, const Stored* key, const Stored* weights,
                            const float* bias, i64* selected, const float* norms,
                            const u32* lists, RowRecord* records, u64 first_row, u64 num_rows,
                            u64 S, u64 T, u64 H, u64 top_k, u64 capacity, u64 list_words,
                            float scale, float weights_scale) {
    u8* next = dynamic_shared();
    const Shared shared = lay_out(next, static_cast<u32>(H), static_cast<u32>(capacity), scale);
    Problem problem;
    problem.T = problem.end = static_cast<u32>(T);
    problem.begin = 0;
    problem.top_k = static_cast<u32>(top_k);
    problem.capacity = static_cast<u32>(capacity);
    RowRecord* const own_records = records + first_row;
    const u32 end = static_cast<u32>(num_rows);
    u32 next_word = load_record(own_records, blockIdx.x, end);
    for (u32 index = blockIdx.x; index < end; index += gridDim.x) {
        const u64 row = first_row + index;
        const RowRecord found = record_of(next_word);
        next_word = load_record(own_records, index + gridDim.x, end);
        problem.key = key + row / S * T * D;
        problem.bias = bias + row * T;
        const Sources sources{lists + index * list_words, norms + row / S * T, problem.bias};
        const Query own{query + row * H * D, weights + row * H, weights_scale};
        settle_row(shared, problem, sources, own, found, own_records[index],
                   selected + row * top_k);
        __syncthreads();
    }
}
