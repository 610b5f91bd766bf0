// A row's list of positions and totals in the registers of a block: bounds of the scores.
//
// Nothing here compares them; list_choice.cuh does.
#pragma once

#include "score_bounds.cuh"

constexpr u32 PAIRS = 10;            // of entries that a thread holds
constexpr u32 ENTRIES = 2 * PAIRS;

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }
__device__ __forceinline__ float not_a_number() { return __int_as_float(0x7fffffff); }

// A score is no further from its value than the radius, which is a thread's largest.
struct Entries {
    u32 position[ENTRIES];
    float value[ENTRIES];  // NaN where there is no entry
    float radius;

    __device__ __forceinline__ float low(u32 e) const { return __fadd_rd(value[e], -radius); }
    __device__ __forceinline__ float high(u32 e) const { return __fadd_ru(value[e], radius); }

    // Keep the compiler from holding bounds in registers from one use to the next.
    __device__ __forceinline__ void forget_bounds() {
        u32 bits = __float_as_uint(radius);
        asm volatile("" : "+r"(bits));
        radius = __uint_as_float(bits);
    }
};

// Keep the compiler from adding up an address anew at every use.
template <class Type>
__device__ __forceinline__ const Type* added_up(const Type* address) {
    asm volatile("" : "+l"(address));
    return address;
}

// Of a row's list, whose radius is not that of a row without scores.
struct List {
    const uint4* pairs;
    const float* norms;
    const float* bias;
    u32 length;
    u32 capacity;
    bool has_bias;
    Radius radius;
};

// Two pairs at a time, so that the second need not wait to know whether the list goes so far.
__device__ __forceinline__ bool is_end(u32 n, u32 j) { return j % 2 == 0 && j * 2 * THREADS >= n; }

// Use the entries of some of a thread's pairs that the list reaches, by numbers known beforehand;
// of the last some may be none.
template <u32 BEGIN, u32 END, class Use>
__device__ __forceinline__ void for_some_entries(u32 n, Use use) {
#pragma unroll
    for (u32 j = BEGIN; j < END; ++j) {
        if (is_end(n, j)) break;
        use(2 * j);
        use(2 * j + 1);
    }
}

template <class Use>
__device__ __forceinline__ void for_each_entry(u32 n, Use use) {
    for_some_entries<0, PAIRS>(n, use);
}

// Use what a table has at the entries' positions. Half of them are loaded at once, as many as there
// are registers for.
template <u32 BEGIN, u32 END, class Use>
__device__ __forceinline__ void look_up_some(const float* table, const u32 (&position)[ENTRIES],
                                             u32 n, Use use) {
    float found[ENTRIES] = {};  // not from turn to turn of the rows
    for_some_entries<BEGIN, END>(n, [&](u32 e) { found[e] = __ldg(table + position[e]); });
    for_some_entries<BEGIN, END>(n, [&](u32 e) { use(e, found[e]); });
}

template <class Use>
__device__ __forceinline__ void look_up(const float* table, const u32 (&position)[ENTRIES], u32 n,
                                        Use use) {
    look_up_some<0, PAIRS / 2>(table, position, n, use);
    look_up_some<PAIRS / 2, PAIRS>(table, position, n, use);
}

__device__ __forceinline__ bool is_entry(u32 n, u32 e) {
    const int left = static_cast<int>(n) - 2 * static_cast<int>(threadIdx.x);
    return static_cast<int>(e / 2 * 2 * THREADS + e % 2) < left;
}

// Load all of a thread's entries; none is used before all are on their way.
__device__ __forceinline__ void load_entries(Entries& entries, const List& list) {
    const uint4* const own = list.pairs + threadIdx.x;
    const int last = static_cast<int>(list.capacity / 2 - 1) - static_cast<int>(threadIdx.x);
    entries.radius = 0.0f;
#pragma unroll
    for (u32 j = 0; j < PAIRS; ++j) {
        if (is_end(list.length, j)) break;
        const int place = static_cast<int>(j * THREADS);
        const uint4 pair = __ldcs(own + (place < last ? place : last));
        entries.position[2 * j] = pair.x;
        entries.value[2 * j] = __uint_as_float(pair.y);
        entries.position[2 * j + 1] = pair.z;
        entries.value[2 * j + 1] = __uint_as_float(pair.w);
    }
}

// Replace what came from behind the list, once all is there.
__device__ __forceinline__ void end_entries(Entries& entries, u32 n) {
    for_each_entry(n, [&](u32 e) {
        if (is_entry(n, e)) return;
        entries.position[e] = 0;
        entries.value[e] = not_a_number();
    });
}

// Leave of what was loaded only which entries there are.
__device__ __forceinline__ void forget_values(Entries& entries, u32 n) {
    for_each_entry(n, [&](u32 e) {
        if (is_entry(n, e)) entries.value[e] = 0.0f;
    });
}

// Say whether a radius is known of all of a thread's entries, which it then has.
__device__ __forceinline__ bool take_radius(Entries& entries, const List& list) {
    const u32 n = list.length;
    // No norm is negative, so that bits are in order, with a NaN last.
    u32 bits = 0;
    look_up(list.norms, entries.position, n, [&](u32 e, float norm) {
        const u32 own = is_entry(n, e) ? __float_as_uint(norm) : 0;
        bits = own > bits ? own : bits;
    });
    const float largest = __uint_as_float(bits);
    entries.radius = __fmaf_ru(list.radius.per_norm, largest, list.radius.floor);
    return largest < list.radius.norm_limit;
}

// Add the biases as bounds_of does, to the bounds; say whether all scores are numbers.
__device__ __forceinline__ bool add_biases(Entries& entries, const List& list) {
    const u32 n = list.length;
    float largest = 0.0f;
    bool is_known = true;
    look_up(list.bias, entries.position, n, [&](u32 e, float bias) {
        const float low = __fadd_rn(entries.low(e), bias);
        const float high = __fadd_rn(entries.high(e), bias);
        const float value = __fadd_rn(entries.value[e], bias);
        is_known &= !is_entry(n, e) || (fabsf(low) < LARGE && fabsf(high) < LARGE);
        largest = fmaxf(largest, fmaxf(__fadd_ru(high, -value), __fadd_ru(value, -low)));
        entries.value[e] = value;
    });
    entries.radius = largest;
    return is_known;
}
