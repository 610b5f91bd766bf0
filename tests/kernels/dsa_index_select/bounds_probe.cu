// The bounds of a row's scores and what they were made of, for comparing with the truth. One block.

#include "block_memory.cuh"

// totals, widths: of the scores without bias. dots, dot_widths: of the largest dot of each key.
// keys: lower and upper order keys [T, 2] of the scores with bias.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    bounds_probe(const Stored* query, const Stored* key, const Stored* weights, const float* bias,
                 float* totals, float* widths, float* dots, float* dot_widths, u32* keys, u64 T,
                 u64 H, float scale, float weights_scale) {
    Shared shared = lay_out(static_cast<u32>(H), 16, scale);
    load_query(shared.row, query, weights, weights_scale);
    __syncthreads();
    const Radius radius = radius_of(shared.row);
    const u32 last = static_cast<u32>(T) - 1;
    for (u32 begin = threadIdx.x / WARP_SIZE * WARP_SIZE; begin < T; begin += TILE) {
        copy_keys(shared.stages, key, begin, last);
        commit_copies();
        wait_for_copies<0>();
        KeyTile tile;
        load_keys(tile, shared.stages);
        const float norm = norm_of_key(tile);
        const Approximation found = approximate(shared.row, tile);
        const u32 t = begin + threadIdx.x % WARP_SIZE;
        if (t > last) continue;
        const Bounds bounds = bounds_of(radius, found, norm, bias[t]);
        totals[t] = found.total;
        widths[t] = __fmaf_ru(radius.per_norm, norm, radius.floor);
        dots[t] = found.largest_dot;
        dot_widths[t] = __fmaf_ru(radius.dot_per_norm, norm, radius.dot_floor);
        keys[2 * t] = bounds.lower;
        keys[2 * t + 1] = bounds.upper;
    }
}
