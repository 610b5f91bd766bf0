// What nxrt/wgmma.cuh says in PTX, for the host. Each warp multiplies its own 16 rows, at once.
//
// A product's terms are added as in ptx.cuh. That nobody touches operands too early is not checked.
#pragma once

#include "nxrt/ptx.cuh"

constexpr u32 WARPGROUP_SIZE = 128;
constexpr u32 PRODUCT_ROWS = 64;
constexpr u32 PRODUCT_COLUMNS = 128;
constexpr u32 PRODUCT_DEPTH = 16;
constexpr u32 PRODUCT_VALUES = PRODUCT_ROWS * PRODUCT_COLUMNS / WARPGROUP_SIZE;
constexpr u32 SWIZZLE_ROW = 128;
constexpr u32 SWIZZLE_NBYTES = 1024;

struct SharedOperand {
    const u8 *begin;
};

inline SharedOperand shared_operand(const u8 *tile) { return {tile}; }
inline SharedOperand advanced(SharedOperand operand, u32 nbytes) {
    return {operand.begin + nbytes};
}

// A column's half of a product's depth; the swizzle is of addresses, as the device does it.
template <class Type>
inline void emulated_chunk(const SharedOperand &operand, u32 column, u32 half, double *values) {
    auto address = reinterpret_cast<uintptr_t>(operand.begin) + column * SWIZZLE_ROW + half * 16;
    address ^= (address >> 7 & 7) << 4;
    const auto *words = reinterpret_cast<const u32 *>(address);
    for (u32 k = 0; k < 8; ++k) values[k] = emulated_half_of<Type>(words[k / 2], k % 2);
}

template <class Type>
inline void start_product(Type, float (&d)[PRODUCT_VALUES], const u32 (&a)[4], SharedOperand b,
                          bool adds) {
    auto *lanes = static_cast<uint4 *>(emulated::warp_scratch());
    const u32 lane = emulated::lane_idx(), g = lane / 4, j = lane % 4;
    lanes[lane] = {a[0], a[1], a[2], a[3]};
    __syncwarp();
    double rows[2][PRODUCT_DEPTH];
    for (u32 k = 0; k < PRODUCT_DEPTH; ++k) {
        const uint4 &words = lanes[4 * g + k % 8 / 2];
        rows[0][k] = emulated_half_of<Type>(k < 8 ? words.x : words.z, k % 2);
        rows[1][k] = emulated_half_of<Type>(k < 8 ? words.y : words.w, k % 2);
    }
    __syncwarp();
    for (u32 i = 0; i < PRODUCT_VALUES / 2; ++i) {
        const u32 column = i / 2 * 8 + 2 * j + i % 2;
        double values[PRODUCT_DEPTH];
        emulated_chunk<Type>(b, column, 0, values);
        emulated_chunk<Type>(b, column, 1, values + 8);
        for (u32 lower = 0; lower < 2; ++lower) {
            float &own = d[i / 2 * 4 + 2 * lower + i % 2];
            double sum = adds ? own : 0.0;
            for (u32 k = 0; k < PRODUCT_DEPTH; ++k) sum += rows[lower][k] * values[k];
            own = emulated_cut(sum);
        }
    }
}

inline void fence_products() {}
inline void fence_operands() {}
inline void commit_products() {}
template <u32 NUM_OPEN>
inline void finish_products(float (&)[PRODUCT_VALUES]) {}
inline u32 in_place_of(u32 before, u32 word, u32 zero) { return word ^ (before & zero); }

inline u8 *first_tile(u8 *shared) {
    const auto address = reinterpret_cast<uintptr_t>(shared);
    return shared + (SWIZZLE_NBYTES - address % SWIZZLE_NBYTES) % SWIZZLE_NBYTES;
}

// Counts who came, from what fresh shared memory holds; `votes` is of this round and the next.
struct EmulatedBarrier {
    static constexpr u32 FRESH = 0x5a5a5a5a;
    u32 num_arrived;
    u32 votes[2];
};

__shared__ EmulatedBarrier emulated_barriers[16];

// Return the round that this thread came to.
inline u32 emulated_arrive(u32 number, u32 num_threads, bool is_so) {
    EmulatedBarrier &barrier = emulated_barriers[number];
    const u32 before = barrier.num_arrived++ - EmulatedBarrier::FRESH;
    const u32 round = before / num_threads;
    if (before % num_threads == 0) barrier.votes[round % 2] = 0;
    barrier.votes[round % 2] |= is_so;
    return round;
}

inline void arrive_at(u32 number, u32 num_threads) { emulated_arrive(number, num_threads, false); }
inline bool any_of_some(u32 number, u32 num_threads, bool is_so) {
    const u32 round = emulated_arrive(number, num_threads, is_so);
    const EmulatedBarrier &barrier = emulated_barriers[number];
    while ((barrier.num_arrived - EmulatedBarrier::FRESH) / num_threads <= round) emulated::spin();
    return barrier.votes[round % 2] != 0;
}
inline void sync_some(u32 number, u32 num_threads) { any_of_some(number, num_threads, false); }

inline u32 add_if(bool is_so, u32 *word, u32 value, u32 otherwise) {
    return is_so ? atomicAdd(word, value) : otherwise;
}
inline void store_if(bool is_so, uint2 *place, uint2 value) {
    if (is_so) *place = value;
}
template <class Type>
inline Type pinned(Type value) {
    return value;
}
