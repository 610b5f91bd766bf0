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
};

// Of each row a few keys are looked at first, by the first warps, while the others are at the radius.
constexpr u32 SAMPLE_WARPS = 2;
constexpr u32 SAMPLE_SIZE = SAMPLE_WARPS * KEYS;
constexpr u32 SUM_THREADS = THREADS - SAMPLE_WARPS * WARP_SIZE;

struct Quartiles {
    float lower;
    float middle;
    float upper;
    float norm;  // that three quarters of the keys do not exceed
};

struct Sample {
    float values[SAMPLE_SIZE];  // infinite where not to be counted
    float norms[SAMPLE_SIZE];   // likewise
    Quartiles quartiles;
    u32 is_allowed[SAMPLE_SIZE];
};

static_assert(SUM_THREADS * CHUNK * 4 + WARPS * 16 + sizeof(Sample) <= NUM_BINS * 4, "in digits");

struct Shared {
    SelectState* state;
    QueryRow row;
    Candidates candidates;
    uint4* sample_keys;  // [STAGE_CHUNKS / WARPS * SAMPLE_WARPS], where candidates come later
    Sample* sample;      // in scratch of the radix search
    uint4* stages;   // [NUM_STAGES][STAGE_CHUNKS]
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
    shared.row.staged = reinterpret_cast<uint4*>(take(next, WARPS * EXACT_KEYS * CHUNKS * 16));
    shared.row.terms = reinterpret_cast<float*>(take(next, WARPS * EXACT_KEYS * WARP_SIZE * 4));
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
    row.chunks = reinterpret_cast<uint4*>(take(next, row.H16 * CHUNKS * 16));
    row.fragments = reinterpret_cast<uint4*>(take(next, PARTS * row.H16 * D * 2));
    row.weights = reinterpret_cast<float*>(take(next, row.H16 * 4));
    row.scaled_weights = reinterpret_cast<float*>(take(next, row.H16 * 4));
    shared.state = reinterpret_cast<SelectState*>(take(next, sizeof(SelectState)));
    shared.stages = reinterpret_cast<uint4*>(take(next, NUM_STAGES * STAGE_CHUNKS * 16));
    shared.candidates.places = reinterpret_cast<u32*>(take(next, capacity * 4));
    shared.candidates.values = reinterpret_cast<float*>(take(next, capacity * 4));
    shared.sample_keys = reinterpret_cast<uint4*>(shared.candidates.places);
    u8* scratch = reinterpret_cast<u8*>(shared.state->digits);
    row.sums = reinterpret_cast<float*>(take(scratch, SUM_THREADS * CHUNK * 4));
    row.warp_sums = reinterpret_cast<float4*>(take(scratch, WARPS * 16));
    shared.sample = reinterpret_cast<Sample*>(take(scratch, sizeof(Sample)));
    lay_out_over_stages(shared);
    if (next - dynamic_shared() > dynamic_shared_nbytes()) __trap();
    return shared;
}
