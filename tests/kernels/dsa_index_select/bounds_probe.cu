// What the certified filter knows of a row's keys, for comparing with the truth. One block.

#include "block_memory.cuh"

// totals, widths: of the scores without bias. is_zero: whether a score is known to be 0 but for the
// bias. keys: lower and upper order keys [T, 2] of the scores with bias.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    bounds_probe(const Stored* query, const Stored* key, const Stored* weights, const float* bias,
                 float* totals, float* widths, u32* is_zero, u32* keys, u64 T, u64 H, float scale,
                 float weights_scale) {
    Shared shared = lay_out(static_cast<u32>(H), 1024, scale);
    const u32 warp_idx = threadIdx.x / WARP_SIZE;
    const u32 lane_idx = threadIdx.x % WARP_SIZE;
    start_query(shared.row, query);
    commit_copies();
    wait_for_copies<0>();
    finish_query(shared.row, weights, weights[threadIdx.x < H ? threadIdx.x : 0], weights_scale);
    if (warp_idx == 1) weigh_heads(shared.row, *shared.norms);
    if (warp_idx == 2) measure_heads(shared.row, *shared.norms);
    __syncthreads();
    shared.row.radius = radius_from(shared.row, *shared.norms);
    uint4* const stage = shared.stages + warp_idx * WARP_CHUNKS;
    for (u32 begin = warp_idx * KEYS; begin < T; begin += TILE) {
        for (u32 i = lane_idx; i < WARP_CHUNKS; i += WARP_SIZE) {
            const u64 position = begin + i / CHUNKS < T ? begin + i / CHUNKS : T - 1;
            stage[i] = reinterpret_cast<const uint4*>(key + position * D)[i % CHUNKS];
        }
        __syncwarp();
        KeyTile tile;
        load_keys(tile, stage);
        __syncwarp();
        const float norm = norm_of_key(tile);
        const float total = total_of(shared.row, tile);
        const bool is_known_zero = is_certainly_zero(shared.row, tile, norm);
        const u32 t = begin + lane_idx;
        if (lane_idx >= KEYS || t >= T) continue;
        const float width = radius_of_total(shared.row.radius, norm);
        const float value = __fadd_rn(total, bias[t]);
        const float radius = radius_at(value, width);
        totals[t] = total;
        widths[t] = width;
        is_zero[t] = is_known_zero;
        keys[2 * t] = total_order_key(__fadd_rd(value, -radius));
        keys[2 * t + 1] = total_order_key(__fadd_ru(value, radius));
    }
}
