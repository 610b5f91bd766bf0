// One block at the end: score what is in doubt, choose, write.
#pragma once

#include "collect.cuh"

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
