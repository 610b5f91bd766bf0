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

#include "group.cuh"
#include "settle.cuh"

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
