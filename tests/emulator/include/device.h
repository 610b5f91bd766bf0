// CUDA C++ for a C++ compiler: what a kernel's source may name. Included before every kernel.
//
// Floating point is the host's IEEE 754 arithmetic, compiled without contraction, so that each
// operation rounds by itself, as the intrinsics promise. The threads of a block are fibers of one
// thread; they change places only inside the functions below (scheduler.h).
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "scheduler.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __restrict__
#define __launch_bounds__(...)
#define __align__(nbytes) alignas(nbytes)
// One section holds a block's shared memory; it is saved where another block takes its turn.
#define __shared__ static __attribute__((section("emulated_shared")))

using std::isfinite;
using std::isnan;

struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) ulonglong2 { unsigned long long x, y; };

inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

inline emulated::Index &threadIdx = emulated::thread_idx;
inline emulated::Index &blockIdx = emulated::block_idx;
inline emulated::Index &blockDim = emulated::block_dim;
inline emulated::Index &gridDim = emulated::grid_dim;

// ---- arithmetic

template <class To, class From>
inline To emulated_bits(From value) {
    static_assert(sizeof(To) == sizeof(From));
    To bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline unsigned __float_as_uint(float value) { return emulated_bits<unsigned>(value); }
inline int __float_as_int(float value) { return emulated_bits<int>(value); }
inline float __uint_as_float(unsigned bits) { return emulated_bits<float>(bits); }
inline float __int_as_float(int bits) { return emulated_bits<float>(bits); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float emulated_up(double value) {
    const float near = static_cast<float>(value);
    return near < value ? std::nextafter(near, INFINITY) : near;
}
// A double may round such a sum down; what it lost says so.
inline double emulated_sum_up(double a, double b) {
    const double sum = a + b;
    const double taken = sum - a;
    const bool is_low = (a - (sum - taken)) + (b - taken) > 0;
    return is_low ? std::nextafter(sum, double(INFINITY)) : sum;
}
inline float __fadd_ru(float a, float b) { return emulated_up(emulated_sum_up(a, b)); }
inline float __fadd_rd(float a, float b) { return -__fadd_ru(-a, -b); }
inline float __fmul_ru(float a, float b) { return emulated_up(double(a) * double(b)); }
inline float __fsqrt_ru(float a) {
    const float root = std::sqrt(a);
    return double(root) * double(root) < double(a) ? std::nextafter(root, INFINITY) : root;
}
inline float __fmaf_ru(float a, float b, float c) {
    return emulated_up(emulated_sum_up(double(a) * double(b), c));  // the product is exact
}

inline float emulated_half(unsigned short bits) {
    return static_cast<float>(emulated_bits<_Float16>(bits));
}

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __clz(unsigned bits) { return bits == 0 ? 32 : __builtin_clz(bits); }
inline int __ffs(unsigned bits) { return __builtin_ffs(static_cast<int>(bits)); }

template <class T>
inline T min(T a, T b) { return b < a ? b : a; }
template <class T>
inline T max(T a, T b) { return a < b ? b : a; }

// ---- memory: fibers are not preempted, so that a plain access is an atomic one

template <class T>
inline T emulated_exchange(T *target, T value) {
    const T before = *target;
    *target = value;
    return before;
}
template <class T, class Value>
inline T atomicAdd(T *target, Value value) { return emulated_exchange<T>(target, *target + static_cast<T>(value)); }
template <class T, class Value>
inline T atomicOr(T *target, Value value) { return emulated_exchange<T>(target, *target | static_cast<T>(value)); }
template <class T, class Value>
inline T atomicMax(T *target, Value value) { return emulated_exchange<T>(target, max<T>(*target, static_cast<T>(value))); }
template <class T, class Value>
inline T atomicMin(T *target, Value value) { return emulated_exchange<T>(target, min<T>(*target, static_cast<T>(value))); }
template <class T, class Value>
inline T atomicExch(T *target, Value value) { return emulated_exchange<T>(target, static_cast<T>(value)); }
template <class T>
inline T atomicCAS(T *target, T expected, T value) {
    const T before = *target;
    if (before == expected) *target = value;
    return before;
}
inline void __threadfence() {}
inline void __threadfence_block() {}
template <class T>
inline T __ldg(const T *source) { return *source; }
inline int __float2int_rd(float value) {
    if (value != value) return 0;
    const double whole = std::floor(static_cast<double>(value));
    return whole >= 2147483647.0 ? 2147483647 : whole <= -2147483648.0 ? -2147483647 - 1 : static_cast<int>(whole);
}
template <class T>
inline T __ldcg(const T *source) { return *source; }
template <class T>
inline T __ldcs(const T *source) { return *source; }
template <class T>
inline void __stcg(T *target, T value) { *target = value; }

// ---- the block and its warps

inline void __syncthreads() { emulated::sync_block(0); }
inline int __syncthreads_or(int value) { return emulated::sync_block(value != 0) != 0; }
inline int __syncthreads_count(int value) { return static_cast<int>(emulated::sync_block(value != 0)); }
inline int __syncthreads_and(int value) { return emulated::sync_block(value == 0) == 0; }
inline void __syncwarp(unsigned mask = 0xffffffffu) { emulated::sync_warp(mask); }
inline void __nanosleep(unsigned) { emulated::spin(); }
[[noreturn]] inline void __trap() { emulated::fail("the kernel trapped"); }

// Give every lane what `source_lane` offers; an absent source is the lane itself.
template <class T>
inline T emulated_shuffle(unsigned mask, T value, int source_lane) {
    unsigned long long word = 0;
    static_assert(sizeof value <= sizeof word);
    std::memcpy(&word, &value, sizeof value);
    word = emulated::exchange(mask, word, source_lane);
    std::memcpy(&value, &word, sizeof value);
    return value;
}
template <class T>
inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
    const int own = emulated::lane_idx();
    return emulated_shuffle(mask, value, own / width * width + lane % width);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    const int own = emulated::lane_idx();
    const int source = own - static_cast<int>(delta);
    return emulated_shuffle(mask, value, source < own / width * width ? own : source);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    const int own = emulated::lane_idx();
    const int source = own + static_cast<int>(delta);
    return emulated_shuffle(mask, value, source >= (own / width + 1) * width ? own : source);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int = 32) {
    return emulated_shuffle(mask, value, emulated::lane_idx() ^ lane_mask);
}

// Combine what the lanes of a mask offer, in the order of the lanes.
template <class T, class Combine>
inline T emulated_reduce(unsigned mask, T value, Combine combine) {
    unsigned long long word = 0;
    std::memcpy(&word, &value, sizeof value);
    const unsigned long long *words = emulated::offer(mask, word);
    T result{};
    bool is_first = true;
    for (int lane = 0; lane < 32; ++lane) {
        if (!(mask >> lane & 1)) continue;
        T other;
        std::memcpy(&other, &words[lane], sizeof other);
        result = is_first ? other : combine(result, other, lane);
        is_first = false;
    }
    emulated::sync_warp(mask);  // nobody may offer anew before all have read
    return result;
}
inline unsigned __ballot_sync(unsigned mask, int is_set) {
    const unsigned bit = is_set ? 1u << emulated::lane_idx() : 0u;
    return emulated_reduce(mask, bit, [](unsigned a, unsigned b, int) { return a | b; });
}
inline int __any_sync(unsigned mask, int is_set) { return __ballot_sync(mask, is_set) != 0; }
inline int __all_sync(unsigned mask, int is_set) { return __ballot_sync(mask, is_set) == mask; }
inline unsigned __activemask() { emulated::fail("__activemask says nothing reliable"); }
inline unsigned __reduce_add_sync(unsigned mask, unsigned value) {
    return emulated_reduce(mask, value, [](unsigned a, unsigned b, int) { return a + b; });
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
    return emulated_reduce(mask, value, [](unsigned a, unsigned b, int) { return max(a, b); });
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned value) {
    return emulated_reduce(mask, value, [](unsigned a, unsigned b, int) { return min(a, b); });
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned value) {
    return emulated_reduce(mask, value, [](unsigned a, unsigned b, int) { return a | b; });
}
