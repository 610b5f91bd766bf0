// What a block works on, and its shared memory.
#pragma once

#include "score_bounds.cuh"

constexpr float MASK_THRESHOLD = -1e30f;
constexpr u32 TILE = THREADS;  // keys of a block at once, a lane each
constexpr u32 NUM_STAGES = 2;  // tiles under way to shared memory
constexpr u32 STAGE_CHUNKS = TILE * CHUNKS;

struct Problem {
    const Stored* key;  // of the row's batch
    const float* bias;  // of the row
    u32 T;
    u32 begin;
    u32 end;
    u32 top_k;
    u32 capacity;
};

struct Shared {
    SelectState* state;
    QueryRow row;
    Candidates candidates;
    u32* contenders;  // [capacity], in place of the stages
    u32* inexact;     // [capacity], likewise
    uint4* stages;  // [NUM_STAGES][STAGE_CHUNKS]
};

__device__ __forceinline__ u8* take(u8*& next, u32 nbytes) {
    u8* const taken = next;
    next += (nbytes + 15) / 16 * 16;
    return taken;
}

// The host adds up the same: FilterLayout in filter_layout.py.
__device__ __forceinline__ Shared lay_out(u32 H, u32 capacity, float scale) {
    u8* next = dynamic_shared();
    Shared shared;
    QueryRow& row = shared.row;
    row.H = H;
    row.H16 = (H + HEAD_TILE - 1) / HEAD_TILE * HEAD_TILE;
    row.scale = scale;
    row.chunks = reinterpret_cast<uint4*>(take(next, row.H16 * D * 2));
    row.fragments = reinterpret_cast<uint4*>(take(next, row.H16 * D * 2));
    row.staged = reinterpret_cast<uint4*>(take(next, WARPS * EXACT_KEYS * D * 2));
    row.weights = reinterpret_cast<float*>(take(next, row.H16 * 4));
    row.scaled_weights = reinterpret_cast<float*>(take(next, row.H16 * 4));
    row.sums = reinterpret_cast<float*>(take(next, THREADS * CHUNK * 4));
    row.terms = reinterpret_cast<float*>(take(next, WARPS * EXACT_KEYS * WARP_SIZE * 4));
    shared.state = reinterpret_cast<SelectState*>(take(next, sizeof(SelectState)));
    shared.stages = reinterpret_cast<uint4*>(take(next, NUM_STAGES * STAGE_CHUNKS * 16));
    shared.candidates.position = reinterpret_cast<u32*>(take(next, capacity * 4));
    shared.candidates.lower = reinterpret_cast<u32*>(take(next, capacity * 4));
    shared.candidates.upper = reinterpret_cast<u32*>(take(next, capacity * 4));
    shared.contenders = reinterpret_cast<u32*>(shared.stages);  // which nobody needs by then
    shared.inexact = shared.contenders + capacity;
    if (next - dynamic_shared() > dynamic_shared_nbytes()) __trap();
    return shared;
}
