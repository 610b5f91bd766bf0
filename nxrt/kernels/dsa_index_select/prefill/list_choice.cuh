// A row's choice from a list of positions and totals that a block holds in registers.
//
// One look at bins of equal width finds about where the row is cut; the bounds do the rest, and
// what they leave open is scored by exact_sums.cuh. Where very many scores are about equal, or too
// little is known of them, nothing is written, and settle.cuh has to choose.
#pragma once

#include "exact_sums.cuh"
#include "list_entries.cuh"

// In the shared memory of Candidates, which are not needed meanwhile.
struct ListChoice {
    u32* words;     // [num_words], a bit for each chosen position
    u32* before;    // [num_words], how many are in the words before; shares with `staged`
    u32* ordered;   // [top_k], what is chosen; shares with `staged`
    float* staged;  // [WARPS][EXACT_KEYS][D]
    Doubts* doubts;
    u32 num_words;
};

__device__ __forceinline__ bool can_choose(const Problem& problem, u32 n) {
    const u64 num_words = (static_cast<u64>(problem.T) + 31) / 32;
    return n <= ENTRIES * THREADS && problem.top_k < problem.capacity &&
           num_words <= problem.capacity && problem.capacity * 8 >= WARPS * EXACT_KEYS * D * 4 &&
           problem.capacity * 2 >= sizeof(Doubts);
}

// Lie where the host has made room: `position` and `lower` are neighbours, as multiples of 16.
__device__ __forceinline__ ListChoice lay_out_choice(const Shared& shared, const Problem& problem) {
    ListChoice choice;
    choice.words = shared.candidates.upper;
    choice.before = shared.candidates.lower;
    choice.ordered = shared.candidates.position;
    choice.staged = reinterpret_cast<float*>(shared.candidates.position);
    choice.doubts = reinterpret_cast<Doubts*>(shared.band);
    choice.num_words = (problem.T - 1) / 32 + 1;
    return choice;
}

// ---- where the row is cut

// At least top_k scores are not below `bottom`, and fewer than that not below a score above `most`.
struct ListCut {
    float bottom;
    float most;
};

// Values from the ceiling on are not in a bin. What is rounded in bin_of is less than a sixteenth
// of a bin, as there are few of them, and the edges are rounded outwards.
struct ListBins {
    float base;
    float width;
    float per_width;
    float ceiling;  // at the last bin's lower edge, so that rounding leads to no bin beyond it

    // Does not fall as the value rises; for values from the base to below the ceiling.
    __device__ __forceinline__ u32 bin_of(float value) const {
        // Where a unit is 1, rounding down leaves the bin in the lower bits, whatever the sign.
        const float sum = __fmaf_ru(-__fsub_rn(value, base), per_width, -0x1p23f);
        return __float_as_uint(sum) & (NUM_BINS - 1);
    }

    // Not above any value of this bin or a higher one.
    __device__ __forceinline__ float bottom_of(u32 bin) const {
        return -__fmaf_ru(0.0625f - static_cast<float>(bin), width, -base);
    }

    // Not below any value of this bin or a lower one.
    __device__ __forceinline__ float top_of(u32 bin) const {
        return __fmaf_ru(static_cast<float>(bin) + 1.0625f, width, base);
    }
};

// How far from the least value the bins reach, in units of the mean's distance from it: values thin
// out upwards about exponentially, and the more there are for each that is wanted the further.
__device__ __forceinline__ float reach_of(u32 n, u32 top_k) {
    const float ratio = static_cast<float>(n) / static_cast<float>(top_k);
    const int exponent = static_cast<int>(__float_as_uint(ratio) >> 23) - 127;
    return 1.5f + 0.7f * static_cast<float>(exponent);
}

// Guess bins. They have no width where of some entry nothing is known. One barrier.
__device__ __forceinline__ ListBins guess_bins(Doubts& doubts, Entries& entries, u32 n, u32 top_k,
                                               bool is_known) {
    float least = infinity();
    float sum = 0.0f;
    for_each_entry(n, [&](u32 e) {
        const float low = entries.low(e);
        least = fminf(least, low);
        sum += is_entry(n, e) ? low : 0.0f;
    });
    if (!is_known) sum = not_a_number();
#pragma unroll
    for (u32 offset = WARP_SIZE / 2; offset > 0; offset >>= 1) {
        least = fminf(least, __shfl_xor_sync(FULL_WARP, least, offset));
        sum += __shfl_xor_sync(FULL_WARP, sum, offset);
    }
    const u32 warp_idx = threadIdx.x / WARP_SIZE;
    if (threadIdx.x % WARP_SIZE == 0) doubts.least[warp_idx] = least;
    if (threadIdx.x % WARP_SIZE == 0) doubts.sums[warp_idx] = sum;
    __syncthreads();
    sum = 0.0f;
#pragma unroll
    for (u32 warp = 0; warp < WARPS; ++warp) {
        least = fminf(least, doubts.least[warp]);
        sum += doubts.sums[warp];
    }
    const float mean = sum / static_cast<float>(n);
    if (!(fabsf(mean) < LARGE)) return {};
    const float width =
        fmaxf((mean - least) * (reach_of(n, top_k) * (1.0f / NUM_BINS)), 0x1p-100f);
    return {least, width, 1.0f / width, __fmaf_rn(static_cast<float>(NUM_BINS - 1), width, least)};
}

// Count what is in each of the bins, which are clear. Ends with a barrier.
__device__ __forceinline__ void fill_bins(SelectState& state, Entries& entries,
                                          const ListBins& bins, u32 n) {
    entries.forget_bounds();
    for_each_entry(n, [&](u32 e) {
        const float low = entries.low(e);
        if (low < bins.ceiling) atomicAdd(&state.bins[bins.bin_of(low)], 1u);
    });
    __syncthreads();
}

// Find the bin of the top_k-th best of n lower bounds, into state.digit; false where it is in none.
// Ends with a barrier.
__device__ __forceinline__ bool find_bin(SelectState& state, u32 n, u32 top_k) {
    constexpr u32 QUADS_PER_THREAD = NUM_BINS / THREADS / 4;
    const u32 first_quad = (THREADS - 1 - threadIdx.x) * QUADS_PER_THREAD;
    u32 counts[4 * QUADS_PER_THREAD];
    u32 sum = 0;
#pragma unroll
    for (u32 i = 0; i < QUADS_PER_THREAD; ++i) {
        const uint4 quad = reinterpret_cast<const uint4*>(state.bins)[first_quad + i];
        counts[4 * i] = quad.x;
        counts[4 * i + 1] = quad.y;
        counts[4 * i + 2] = quad.z;
        counts[4 * i + 3] = quad.w;
        sum += quad.x + quad.y + quad.z + quad.w;
    }
    u32 total;
    u32 above = block_exclusive_sum(sum, state.warp_sums, total);
    if (n - total >= top_k) return false;
    above += n - total;
    if (above < top_k && top_k <= above + sum) {
#pragma unroll
        for (u32 i = 4 * QUADS_PER_THREAD; i-- > 0;) {
            if (above < top_k && top_k <= above + counts[i]) state.digit = first_quad * 4 + i;
            above += counts[i];
        }
    }
    __syncthreads();
    return true;
}

// Cut a list of more than top_k entries; false where that does not help.
__device__ __forceinline__ bool cut_list(SelectState& state, Doubts& doubts, Entries& entries,
                                         u32 n, u32 top_k, bool is_known, ListCut& cut) {
    const ListBins bins = guess_bins(doubts, entries, n, top_k, is_known);
    if (bins.width == 0.0f) return false;
    fill_bins(state, entries, bins, n);
    if (!find_bin(state, n, top_k)) return false;
    const u32 digit = state.digit;
    const float top = bins.top_of(digit);
    float most = -infinity();
    entries.forget_bounds();
    for_each_entry(n, [&](u32 e) {
        if (entries.low(e) <= top) most = fmaxf(most, entries.high(e));
    });
    const u32 key = __reduce_max_sync(FULL_WARP, total_order_key(most));
    if (threadIdx.x % WARP_SIZE == 0) atomicMax(&doubts.most, key);
    __syncthreads();
    cut.bottom = bins.bottom_of(digit);
    const u32 found = doubts.most;
    cut.most = __uint_as_float(found >> 31 ? found & 0x7fffffffu : ~found);
    return true;
}

// ---- the choice

__device__ __forceinline__ void mark(const ListChoice& choice, u32 position) {
    atomicOr(&choice.words[position / 32], 1u << position % 32);
}

// Return a bit for each entry that is certainly chosen, and mark it; list the doubts. Ends with a
// barrier.
__device__ __forceinline__ u32 sort_out(const ListChoice& choice, Entries& entries, u32 n,
                                        const ListCut& cut) {
    Doubts& doubts = *choice.doubts;
    u32 chosen = 0;
    entries.forget_bounds();
    u32 possible = 0;
    for_each_entry(n, [&](u32 e) {
        const bool is_certain = entries.low(e) > cut.most;
        if (is_certain) mark(choice, entries.position[e]);
        chosen |= is_certain ? 1u << e : 0;
        possible |= entries.high(e) >= cut.bottom ? 1u << e : 0;
    });
    const u32 open = possible & ~chosen;
    if (open != 0) {
        u32 place = atomicAdd(&doubts.count, static_cast<u32>(__popc(open)));
        for_each_entry(n, [&](u32 e) {
            const bool is_open = open >> e & 1;
            if (is_open && place < MAX_DOUBTS) doubts.position[place] = entries.position[e];
            place += is_open;
        });
    }
    const u32 num_chosen = __reduce_add_sync(FULL_WARP, static_cast<u32>(__popc(chosen)));
    if (threadIdx.x % WARP_SIZE == 0 && num_chosen != 0) {
        atomicAdd(&doubts.num_certain, num_chosen);
    }
    __syncthreads();
    return chosen;
}

// Say whether this thread's doubt is among the best `wanted`, which are scored if need be.
__device__ __forceinline__ bool choose_doubt(const ListChoice& choice, const Shared& shared,
                                             const Problem& problem, u32 wanted) {
    const Doubts& doubts = *choice.doubts;
    const u32 num_doubts = doubts.count;
    if (wanted == 0 || wanted == num_doubts) return wanted != 0 && threadIdx.x < num_doubts;
    score_doubts(shared.row, choice.staged, problem, *choice.doubts);
    if (threadIdx.x >= num_doubts) return false;
    const u64 own = doubts.rank[threadIdx.x];
    u32 num_better = 0;
#pragma unroll 4
    for (u32 i = 0; i < num_doubts; ++i) num_better += doubts.rank[i] > own;
    return num_better < wanted;
}

// Return where a position is among those that are marked.
__device__ __forceinline__ u32 place_of(const ListChoice& choice, u32 position) {
    const u32 lower = choice.words[position / 32] & ((1u << position % 32) - 1);
    return choice.before[position / 32] + static_cast<u32>(__popc(lower));
}

// Count what is marked before each word. Begins and ends with a barrier.
__device__ __forceinline__ void count_marks(const ListChoice& choice, SelectState& state) {
    const u32 share = (choice.num_words + THREADS - 1) / THREADS;
    const u32 first = threadIdx.x * share;
    const u32 end = first + share < choice.num_words ? first + share : choice.num_words;
    __syncthreads();
    u32 count = 0;
    for (u32 i = first; i < end; ++i) count += __popc(choice.words[i]);
    u32 total;
    u32 before = block_exclusive_sum(count, state.warp_sums, total);
    for (u32 i = first; i < end; ++i) {
        choice.before[i] = before;
        before += __popc(choice.words[i]);
    }
    __syncthreads();
}

// Write entries that have a bit, and what is in order already, and -1 behind. Ends without a
// barrier.
__device__ __forceinline__ void write_entries(const ListChoice& choice, const Entries& entries,
                                              u32 chosen, u32 n, u32 top_k, i64* selected) {
    const u32 num_chosen = n < top_k ? n : top_k;
    for_each_entry(n, [&](u32 e) {
        // Looked up for all, so that several entries are under way.
        const u32 position = entries.position[e];
        const u32 place = place_of(choice, position);
        if (chosen >> e & 1) choice.ordered[place] = position;
    });
    __syncthreads();
#pragma unroll 4
    for (u32 i = threadIdx.x; i < top_k; i += THREADS) {
        selected[i] = i < num_chosen ? static_cast<i64>(choice.ordered[i]) : -1;
    }
}

// Choose from a list and write in ascending order, and -1 after it; false where nothing is written.
// All threads call, after a barrier, with their entries on the way.
__device__ __forceinline__ bool choose_from_list(const Shared& shared, const Problem& problem,
                                                 const List& list, Entries& entries,
                                                 u32& num_scored, i64* selected) {
    const ListChoice choice = lay_out_choice(shared, problem);
    SelectState& state = *shared.state;
    Doubts& doubts = *choice.doubts;
    const u32 n = list.length;
    const u32 top_k = problem.top_k;
    if (threadIdx.x == 0) doubts.clear();
    for (u32 i = threadIdx.x; i < choice.num_words; i += THREADS) choice.words[i] = 0;
    clear_bins(state);
    end_entries(entries, n);
    ListCut cut{-infinity(), -infinity()};
    if (n > top_k) {
        bool is_known = take_radius(entries, list);
        if (list.has_bias) is_known &= add_biases(entries, list);
        if (!cut_list(state, doubts, entries, n, top_k, is_known, cut)) return false;
    } else {
        forget_values(entries, n);
        __syncthreads();
    }
    const u32 chosen = sort_out(choice, entries, n, cut);
    const u32 num_doubts = doubts.count;
    if (num_doubts > MAX_DOUBTS) return false;
    const u32 num_chosen = n < top_k ? n : top_k;
    const u32 wanted = num_chosen - doubts.num_certain;
    const bool is_chosen = choose_doubt(choice, shared, problem, wanted);
    num_scored = wanted == 0 || wanted == num_doubts ? 0 : num_doubts;
    const u32 own = is_chosen ? doubts.position[threadIdx.x] : 0;
    if (is_chosen) mark(choice, own);
    count_marks(choice, state);
    if (is_chosen) choice.ordered[place_of(choice, own)] = own;
    write_entries(choice, entries, chosen, n, top_k, selected);
    return true;
}
