// Toy kernels for tests of graphs and streams: exact, tiny, one thread an element.
//
// All work on `count` float32 elements. Sums are taken in order of the index, so that whole numbers
// come out exact. What each does to its arguments is said above it.

#include "nxrt/error_latch.cuh"

typedef unsigned long long u64;

__device__ __forceinline__ u64 element() {
    return blockIdx.x * static_cast<u64>(blockDim.x) + threadIdx.x;
}

// y = factor * x
extern "C" __global__ void toy_scale(const float *x, float *y, float factor, u64 count) {
    const u64 i = element();
    if (i < count) y[i] = factor * x[i];
}

// total += x
extern "C" __global__ void toy_append(const float *x, float *total, u64 count) {
    const u64 i = element();
    if (i < count) total[i] += x[i];
}

// y[i] = staged[0] + ... + staged[i]
extern "C" __global__ void toy_sum(const float *staged, float *y, u64 count) {
    const u64 i = element();
    if (i >= count) return;
    float sum = 0.0f;
    for (u64 j = 0; j <= i; ++j) sum += staged[j];
    y[i] = sum;
}

// y[i] = x[index[i]]; a negative index reports bit 1, one from num_x on bit 2, and -1 is written.
extern "C" __global__ void toy_gather(const float *x, const long long *index, float *y, u64 num_x,
                                      u64 count, unsigned *slot, const unsigned *step) {
    const u64 i = element();
    if (i >= count) return;
    const long long at = index[i];
    const bool is_past = at >= static_cast<long long>(num_x);
    if (at < 0 || is_past) latch_fault(slot, step, is_past ? 2u : 1u);
    y[i] = at < 0 || is_past ? -1.0f : x[at];
}

// Keeps its stream busy; one thread.
extern "C" __global__ void toy_spin(u64 num_cycles) {
    const long long start = clock64();
    while (static_cast<u64>(clock64() - start) < num_cycles) {
    }
}
