// DsaIndexSelect for many rows that share their keys: each row's choice among the candidates that
// prefill_filter.cu has listed, or among all keys where it could not.
//
// A block takes a row at a time: it scores exactly what the bounds leave open, chooses, and writes
// in ascending order. query [B,S,H,D], key [B,T,D], weights [B,S,H] of type NXRT_DTYPE, D =
// NXRT_DEPTH; bias [B,1,S,T] f32; selected [B,1,S,K] i64; T < 2^32.

#include "settle.cuh"

// Load a row's list; its order does not matter.
__device__ __forceinline__ void load_list(const Candidates& all, const u32* list, u32 capacity,
                                          u32 n) {
    for (u32 i = threadIdx.x; i < n; i += THREADS) {
        all.position[i] = list[i];
        all.lower[i] = list[capacity + i];
        all.upper[i] = list[2 * static_cast<u64>(capacity) + i];
    }
    __syncthreads();
}

// Write in ascending order the positions from `begin` on whose bits are set; return how many there
// are now in `selected`, which has `num_written`.
__device__ __forceinline__ u32 write_bits(SelectState& state, const u32* words, u32 num_words,
                                          u64 begin, u32 num_written, i64* selected) {
    for (u32 first = 0; first < num_words; first += THREADS) {
        const u32 i = first + threadIdx.x;
        const u64 base = begin + static_cast<u64>(i) * 32;
        u32 word = i < num_words ? words[i] : 0;
        u32 total;
        u32 place = num_written + block_exclusive_sum(__popc(word), state.warp_sums, total);
        for (; word != 0; word &= word - 1) {
            selected[place++] = static_cast<i64>(base + __ffs(word) - 1);
        }
        num_written += total;
    }
    return num_written;
}

// Write n chosen positions in ascending order, and -1 after them. A bit for each position puts them
// in order, as many at a time as fit where the bounds were.
__device__ __forceinline__ void write_in_order(const Shared& shared, const Problem& problem, u32 n,
                                               i64* selected) {
    const u32* const position = shared.candidates.position;
    u32* const words = shared.candidates.lower;
    const u64 window = static_cast<u64>(problem.capacity) * 32;
    u32 num_written = 0;
    for (u64 begin = 0; begin < problem.T && num_written < n; begin += window) {
        const u64 left = problem.T - begin < window ? problem.T - begin : window;
        const u32 num_words = static_cast<u32>((left + 31) / 32);
        for (u32 i = threadIdx.x; i < num_words; i += THREADS) words[i] = 0;
        __syncthreads();
        for (u32 i = threadIdx.x; i < n; i += THREADS) {
            const u64 bit = position[i] - begin;  // huge for a position before it
            if (bit < left) atomicOr(&words[bit / 32], 1u << bit % 32);
        }
        __syncthreads();
        num_written = write_bits(*shared.state, words, num_words, begin, num_written, selected);
    }
    for (u32 i = n + threadIdx.x; i < problem.top_k; i += THREADS) selected[i] = -1;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    dsa_index_select_settle(const Stored* query, const Stored* key, const Stored* weights,
                            const float* bias, i64* selected, const u32* lists, const u32* counts,
                            u64 first_row, u64 num_rows, u64 S, u64 T, u64 H, u64 top_k,
                            u64 capacity, float scale, float weights_scale) {
    u8* next = dynamic_shared();
    const Shared shared = lay_out(next, static_cast<u32>(H), static_cast<u32>(capacity), scale);
    Problem problem;
    problem.T = problem.end = static_cast<u32>(T);
    problem.begin = 0;
    problem.top_k = static_cast<u32>(top_k);
    problem.capacity = static_cast<u32>(capacity);
    for (u64 index = blockIdx.x; index < num_rows; index += gridDim.x) {
        const u64 row = first_row + index;
        load_query(shared.row, query + row * H * D, weights + row * H, weights_scale);
        problem.key = key + row / S * T * D;
        problem.bias = bias + row * T;
        u32 n = counts[index];
        if (n != NOT_COLLECTED) {
            load_list(shared.candidates, lists + index * 3 * capacity, problem.capacity, n);
        } else {
            __syncthreads();
            n = collect_exactly(shared, problem);
        }
        if (n > problem.top_k) n = choose(shared, problem, n);
        write_in_order(shared, problem, n, selected + row * top_k);
        __syncthreads();
    }
}
