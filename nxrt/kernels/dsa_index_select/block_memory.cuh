// What a block works on, and its shared memory.
#pragma once

#include "score_bounds.cuh"

constexpr float MASK_THRESHOLD = -1e30f;
constexpr u32 TILE = WARPS * KEYS;  // keys of a block at once, a lane each
constexpr u32 NUM_STAGES = 2;       // tiles under way to shared memory
constexpr u32 MAX_DOUBTS = 512;     // keys of a row that are scored because bounds leave them open

struct Problem {
    const Stored* key;  // of the row's batch
    const float* bias;  // of the row
    u32 T;
    u32 begin;
    u32 end;
    u32 top_k;
    u32 capacity;
    u32 warp_idx;  // the same register for all lanes, as the compiler can see
};

struct Quartiles {
    float lower;
    float middle;
    float upper;
    float norm_limit;  // that hardly a key exceeds, to judge by these
};

constexpr u32 NUM_ARRIVALS = WARPS * NUM_STAGES;

struct Shared {
    SelectState* state;
    u64* arrivals;  // [WARPS][NUM_STAGES], barriers of the keys' copies
    RowNorms* norms;
    Quartiles* quartiles;  // of the sample
    QueryRow row;
    Candidates candidates;
    uint4* sample;  // [KEYS][CHUNKS], where candidates come later
    uint4* stages;  // [WARPS][NUM_STAGES][WARP_CHUNKS]
    // In place of the stages, once nothing is under way to them:
    u32* doubts;  // [MAX_DOUBTS], positions
    u64* ranks;   // [MAX_DOUBTS], of the row's doubts
    u32* chosen;  // a bit for each key of the block
};

__device__ __forceinline__ u8* take(u8*& next, u32 nbytes) {
    u8* const taken = next;
    next += (nbytes + 15) / 16 * 16;
    return taken;
}

__device__ __forceinline__ void lay_out_over_stages(Shared& shared) {
    u8* next = reinterpret_cast<u8*>(shared.stages);
    shared.row.staged = reinterpret_cast<float*>(take(next, WARPS * MOST_EXACT_KEYS * D * 4));
    shared.row.terms = reinterpret_cast<float*>(take(next, WARPS * MOST_EXACT_KEYS * WARP_SIZE * 4));
    shared.ranks = reinterpret_cast<u64*>(take(next, MAX_DOUBTS * 8));
    shared.doubts = reinterpret_cast<u32*>(take(next, MAX_DOUBTS * 4));
    shared.chosen = reinterpret_cast<u32*>(next);
}

// The host adds up the same: FilterLayout in filter_layout.py.
__device__ __forceinline__ Shared lay_out(u32 H, u32 capacity, float scale) {
    u8* next = dynamic_shared();
    Shared shared;
    QueryRow& row = shared.row;
    row.H = H;
    row.H16 = (H + HEAD_TILE - 1) / HEAD_TILE * HEAD_TILE;
    row.scale = scale;
    row.chunks = reinterpret_cast<uint4*>(take(next, row.H * PITCH * 16));
    row.fragments = reinterpret_cast<uint4*>(take(next, PARTS * row.H16 * D * 2));
    row.weights = reinterpret_cast<float*>(take(next, row.H16 * 4));
    row.scaled_weights = reinterpret_cast<float*>(take(next, row.H16 * 4));
    shared.arrivals = reinterpret_cast<u64*>(take(next, NUM_ARRIVALS * 8));
    shared.norms = reinterpret_cast<RowNorms*>(take(next, sizeof(RowNorms)));
    shared.quartiles = reinterpret_cast<Quartiles*>(take(next, sizeof(Quartiles)));
    shared.state = reinterpret_cast<SelectState*>(take(next, sizeof(SelectState)));
    shared.stages = reinterpret_cast<uint4*>(take(next, NUM_STAGES * WARPS * WARP_CHUNKS * 16));
    shared.candidates.places = reinterpret_cast<u32*>(take(next, capacity * 4));
    shared.candidates.values = reinterpret_cast<float*>(take(next, capacity * 4));
    shared.sample = reinterpret_cast<uint4*>(shared.candidates.places);
    lay_out_over_stages(shared);
    if (next - dynamic_shared() > dynamic_shared_nbytes()) __trap();
    return shared;
}
