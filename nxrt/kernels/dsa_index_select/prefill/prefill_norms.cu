// The norms of keys for DsaIndexSelect's filters, rounded up: norms [N] f32 of key [N,D] of type
// NXRT_DTYPE, D = NXRT_DEPTH. A warp takes 32 keys at a time.

#include "score_bounds.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    dsa_index_select_norms(const Stored* key, float* norms, u64 num_keys) {
    const u64 num_groups = (num_keys + WARP_SIZE - 1) / WARP_SIZE;
    const u64 stride = static_cast<u64>(gridDim.x) * WARPS;
    const u32 lane_idx = threadIdx.x % WARP_SIZE;
    for (u64 group = blockIdx.x * WARPS + threadIdx.x / WARP_SIZE; group < num_groups;
         group += stride) {
        KeyTile tile;
#pragma unroll
        for (u32 n = 0; n < KEY_TILES; ++n) {
            const u64 place = group * WARP_SIZE + 8 * n + lane_idx / 4;
            const u64 position = place < num_keys ? place : num_keys - 1;
            const uint4* source = reinterpret_cast<const uint4*>(key + position * D);
#pragma unroll
            for (u32 c = 0; c < QUADS; ++c) tile.chunks[n][c] = source[4 * c + lane_idx % 4];
        }
        const float norm = norm_of_key(tile);
        if (group * WARP_SIZE + lane_idx < num_keys) norms[group * WARP_SIZE + lane_idx] = norm;
    }
}
