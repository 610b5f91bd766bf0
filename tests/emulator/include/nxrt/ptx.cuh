// What nxrt/ptx.cuh says in PTX, for the host.
//
// A product's 16 terms are added in double precision and the sum is cut off towards zero, which is
// no better than what tensor cores do.
#pragma once

#include "nxrt/numerics.cuh"

struct EmulatedFragments {
    u32 a[4], b[2];
};

inline float emulated_cut(double value) {
    const float near = static_cast<float>(value);
    const bool is_away = std::fabs(static_cast<double>(near)) > std::fabs(value);
    return is_away ? std::nextafter(near, 0.0f) : near;
}

template <class Type>
inline float emulated_half_of(u32 word, u32 half) {
    return Type::widen(static_cast<u16>(word >> 16 * half));
}

template <class Type>
inline void mma_m16n8k16(Type, float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    auto *lanes = static_cast<EmulatedFragments *>(emulated::warp_scratch());
    const u32 lane = emulated::lane_idx(), g = lane / 4, j = lane % 4;
    lanes[lane] = {{a0, a1, a2, a3}, {b0, b1}};
    __syncwarp();
    for (u32 i = 0; i < 4; ++i) {
        const u32 lower = i / 2, column = 2 * j + i % 2;
        double sum = d[i];
        for (u32 k = 0; k < 16; ++k) {
            const u32 other = k % 8 / 2, upper = k / 8;
            const u32 a = lanes[4 * g + other].a[lower + 2 * upper];
            const u32 b = lanes[4 * column + other].b[upper];
            sum += static_cast<double>(emulated_half_of<Type>(a, k % 2)) *
                   static_cast<double>(emulated_half_of<Type>(b, k % 2));
        }
        d[i] = emulated_cut(sum);
    }
    __syncwarp();
}

inline u32 emulated_bf16(float value) {
    const u32 bits = __float_as_uint(value);
    if (value != value) return bits >> 16 | 0x40;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline u32 pack_bf16(float first, float second) {
    return emulated_bf16(first) | emulated_bf16(second) << 16;
}

// A copy is made as late as it may be: by the wait for its group.
inline void copy_chunk(uint4 *target, const uint4 *source) {
    emulated::later(target, source, sizeof *target);
}
inline void copy_chunk(uint4 *target, u32 index, const uint4 *source) {
    copy_chunk(target + index, source);
}
inline void prefetch(const void *) {}
inline void commit_copies() { emulated::close_group(); }
template <u32 NUM_OPEN>
inline void wait_for_copies() { emulated::finish_groups(NUM_OPEN); }

inline u8 *dynamic_shared() { return emulated::dynamic_shared(); }
inline u32 dynamic_shared_nbytes() { return emulated::dynamic_shared_nbytes(); }
inline void arrive(u32 *count, u32 num) { *count += num; }
inline u32 look_at(const u32 *count) { return *count; }
inline void wait_a_little() { emulated::spin(); }
