// Numbers as the operators' contracts mean them; the counterpart of kernels/numerics.py.
//
// No toolkit header is included, so that kernels compile where only NVRTC is installed.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

constexpr u32 CANONICAL_NAN = 0x7fc00000u;

struct F32 {
    using storage = float;
    static __device__ __forceinline__ float widen(float value) { return value; }
};

struct F16 {
    using storage = u16;
    static __device__ __forceinline__ float widen(u16 bits) {
        float value;
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
        return value;
    }
};

struct BF16 {
    using storage = u16;
    static __device__ __forceinline__ float widen(u16 bits) {
        return __uint_as_float(static_cast<u32>(bits) << 16);
    }
};

// Unsigned keys that compare as IEEE 754 totalOrder does on the values. No value that is not a
// negative NaN has key 0.
__device__ __forceinline__ u32 total_order_key(float value) {
    const u32 bits = __float_as_uint(value);
    return (bits >> 31) ? ~bits : (bits | 0x80000000u);
}

// Processors disagree about a NaN's sign and payload; an order over bits must not see that.
__device__ __forceinline__ float canonicalize_nan(float value) {
    return value == value ? value : __uint_as_float(CANONICAL_NAN);
}
