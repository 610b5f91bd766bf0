// What nxrt/ptx.cuh says in PTX, for the host.
//
// A product's 16 terms are added in double precision and the sum is cut off towards zero, which is
// no better than what tensor cores do.
#pragma once

#include <deque>
#include <vector>

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

// Rounded twice, by next to nothing the first time.
inline u32 fma_bf16x2(u32 a, u32 b, u32 c) {
    u32 word = 0;
    for (u32 half = 0; half < 2; ++half) {
        const float x = emulated_half_of<BF16>(a, half), y = emulated_half_of<BF16>(b, half);
        word |= emulated_bf16(std::fma(x, y, emulated_half_of<BF16>(c, half))) << 16 * half;
    }
    return word;
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

// Likewise, by the first to wait for its phase.
struct EmulatedArrivals {
    struct Copy {
        void *target;
        const void *source;
        u32 nbytes;
    };
    std::vector<Copy> copies;
    u32 num_expected = 0, num_started = 0, num_phases = 0;
};
inline EmulatedArrivals &emulated_arrivals(u64 *barrier) {
    return *reinterpret_cast<EmulatedArrivals *>(*barrier);
}
inline void init_arrivals(u64 *barrier) {
    // Lives as long as the launch's memory, which nobody tells the end of.
    static std::deque<EmulatedArrivals> all;
    all.emplace_back();
    *barrier = reinterpret_cast<u64>(&all.back());
}
inline void publish_arrivals() {}
inline bool elect_lane() { return emulated::lane_idx() == 0; }
inline void order_copies() {}
inline void expect_bytes(u64 *barrier, u32 nbytes) {
    EmulatedArrivals &arrivals = emulated_arrivals(barrier);
    if (arrivals.num_expected != 0) emulated::fail("two phases of copies at once");
    arrivals.num_expected = nbytes;
}
inline void copy_bulk(void *target, const void *source, u32 nbytes, u64 *barrier) {
    const u64 addresses = reinterpret_cast<u64>(target) | reinterpret_cast<u64>(source) | nbytes;
    if (addresses % 16 != 0) emulated::fail("a copy that is not of whole 16 bytes");
    EmulatedArrivals &arrivals = emulated_arrivals(barrier);
    arrivals.copies.push_back({target, source, nbytes});
    arrivals.num_started += nbytes;
}
inline void wait_for_bytes(u64 *barrier, u32 phase) {
    EmulatedArrivals &arrivals = emulated_arrivals(barrier);
    while (arrivals.num_phases % 2 == phase) {
        if (arrivals.num_expected == 0 || arrivals.num_started < arrivals.num_expected) {
            emulated::spin();
            continue;
        }
        if (arrivals.num_started > arrivals.num_expected) emulated::fail("more bytes than expected");
        for (const auto &copy : arrivals.copies) {
            std::memcpy(copy.target, copy.source, copy.nbytes);
        }
        arrivals.copies.clear();
        arrivals.num_expected = arrivals.num_started = 0;
        ++arrivals.num_phases;
    }
}

inline u8 *dynamic_shared() { return emulated::dynamic_shared(); }
inline u32 dynamic_shared_nbytes() { return emulated::dynamic_shared_nbytes(); }
inline void arrive(u32 *count, u32 num) { *count += num; }
inline u32 look_at(const u32 *count) { return *count; }
inline void wait_a_little() { emulated::spin(); }
