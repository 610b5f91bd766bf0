// DsaIndexSelect for a few rows of many keys: bounds from tensor cores, exact sums where they leave
// a doubt.
//
// blockIdx.y counts rows and blockIdx.x the blocks of a row, each with keys_per_block of its keys.
// Every block keeps the keys that may be among the row's best; the blocks of a row agree where to
// cut; each scores what the bounds leave open of its own, they tell each other, and each writes its
// own. The same bytes as dsa_index_select.cu, whatever the data: where bounds do not thin out the
// keys, exact scores do.
//
// query [B,S,H,D], key [B,T,D], weights [B,S,H] of type NXRT_DTYPE, D = NXRT_DEPTH; bias [B,1,S,T]
// f32; selected [B,1,S,K] i64. T < 2^30. With several blocks a row all blocks must be resident at
// once, and `control` has zeros before its first launch and is the kernel's from then on.

#include "settle.cuh"

// Start over with no candidates.
__device__ __forceinline__ void forget(const Shared& shared) {
    SelectState& state = *shared.state;
    clear(state.bins);
    if (threadIdx.x == 0) state.threshold = state.count = state.num_wild = 0;
    __syncthreads();
}

__device__ __forceinline__ void select_row(Shared& shared, const Problem& problem, Feed& feed,
                                           Ahead& ahead, Team& team, i64* selected,
                                           Outcome* outcome) {
    Cut cut{};
    Filter filter{};
    if (blockIdx.x == 0 && threadIdx.x == 0) outcome->is_exact = 0;
    bool must_be_exact = !collect(shared, problem, filter, feed, ahead);
    const bool is_cut = cut_by_bins(shared, problem, filter, team, must_be_exact, cut);
    if (is_cut && settle(shared, problem, team, cut, selected, outcome)) return;
    if (!must_be_exact) {
        cut_by_bounds(shared, problem, team, cut);
        if (settle(shared, problem, team, cut, selected, outcome)) return;
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) outcome->is_exact = 1;
    forget(shared);
    collect_exactly(shared, problem, filter);
    cut_by_bounds(shared, problem, team, cut);
    settle(shared, problem, team, cut, selected, outcome);
}

__device__ __forceinline__ void init(const Shared& shared) {
    if (threadIdx.x < NUM_ARRIVALS) {
        init_arrivals(shared.arrivals + threadIdx.x);
        publish_arrivals();
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    dsa_index_select_filter(const Stored* query, const Stored* key, const Stored* weights,
                            const float* bias, i64* selected, Control* control, Outcome* outcomes,
                            u64 num_rows, u64 S, u64 T, u64 H, u64 top_k, u64 keys_per_block,
                            u64 capacity, float scale, float weights_scale) {
    Shared shared = lay_out(static_cast<u32>(H), static_cast<u32>(capacity), scale);
    init(shared);
    const u32 warp_idx = __shfl_sync(FULL_WARP, threadIdx.x / WARP_SIZE, 0);
    Feed feed{0, 0};
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
        problem.warp_idx = warp_idx;
        const Stored* const own_weights = weights + index * H;
        Team team = team_of(control + index % gridDim.y);
        Ahead ahead = start(shared, problem, feed, query + index * H * D, own_weights);
        forget(shared);
        wait_for_copies<0>();
        finish_query(shared.row, own_weights, ahead.weight, weights_scale);
        select_row(shared, problem, feed, ahead, team, selected + index * top_k, outcomes + index);
        if (index + gridDim.y < num_rows) {
            order_copies();  // the next row's come where this one's scratch is
            __syncthreads();
        }
    }
}
