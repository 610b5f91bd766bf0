// What only PTX of sm_90a can say: matrix products of four warps; and barriers of some of a block's
// threads, and what has an effect or not without a branch.
//
// Elsewhere products compile, and trap where they are reached.
#pragma once

#include "nxrt/numerics.cuh"

constexpr u32 WARPGROUP_SIZE = 128;
constexpr u32 PRODUCT_ROWS = 64;      // of a warpgroup's product
constexpr u32 PRODUCT_COLUMNS = 128;
constexpr u32 PRODUCT_DEPTH = 16;
constexpr u32 PRODUCT_VALUES = PRODUCT_ROWS * PRODUCT_COLUMNS / WARPGROUP_SIZE;
constexpr u32 SWIZZLE_ROW = 128;      // bytes of a column in one tile of an operand
constexpr u32 SWIZZLE_NBYTES = 1024;  // what such a tile is aligned to

// The right operand of a product in shared memory: tiles of SWIZZLE_ROW bytes of each column, whose
// 16-byte chunk c is at c ^ column % 8.
struct SharedOperand {
    u64 descriptor;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// clang-format off
#define NXRT_VALUES \
    "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), \
    "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
    "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), \
    "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
    "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), \
    "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
    "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), \
    "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), \
    "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), \
    "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), \
    "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), \
    "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), \
    "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), \
    "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
    "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), \
    "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])

#define NXRT_VALUE_NAMES \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
// clang-format on

#define NXRT_PRODUCT(type)                                                                 \
    asm volatile(                                                                          \
        "{\n.reg .pred adds;\nsetp.ne.b32 adds, %69, 0;\n"                                \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {" NXRT_VALUE_NAMES \
        "}, {%64, %65, %66, %67}, %68, adds, 1, 1, 0;\n}\n"                           \
        : NXRT_VALUES                                                                      \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.descriptor),                   \
          "r"(static_cast<int>(adds)))

__device__ __forceinline__ SharedOperand shared_operand(const u8* tile) {
    constexpr u64 IS_SWIZZLED = 1ull << 62;
    constexpr u64 GROUP_STRIDE = static_cast<u64>(8 * SWIZZLE_ROW / 16) << 32;
    constexpr u64 UNUSED_STRIDE = 1ull << 16;
    const u64 address = static_cast<u64>(__cvta_generic_to_shared(tile)) & 0x3ffff;
    return {address >> 4 | UNUSED_STRIDE | GROUP_STRIDE | IS_SWIZZLED};
}

// Of later columns, a later depth, or another tile.
__device__ __forceinline__ SharedOperand advanced(SharedOperand operand, u32 nbytes) {
    return {operand.descriptor + nbytes / 16};
}

// Start d[64x128] = a[64x16] * b[16x128], plus d where `adds`. Warp w of the warpgroup has rows 16w
// to 16w + 15; lane (g, j) of it d[g][8n+2j], d[g][8n+2j+1], d[g+8][8n+2j], d[g+8][8n+2j+1] at 4n,
// and a as for mma_m16n8k16. Until `finish_products` both must be left alone.
__device__ __forceinline__ void start_product(BF16, float (&d)[PRODUCT_VALUES], const u32 (&a)[4],
                                              SharedOperand b, bool adds) {
    NXRT_PRODUCT("bf16");
}

__device__ __forceinline__ void start_product(F16, float (&d)[PRODUCT_VALUES], const u32 (&a)[4],
                                              SharedOperand b, bool adds) {
    NXRT_PRODUCT("f16");
}

// Between what wrote registers and the products that read them.
__device__ __forceinline__ void fence_products() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Between what wrote shared memory, with a barrier after it, and the products that read it.
__device__ __forceinline__ void fence_operands() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void commit_products() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Wait until no more than NUM_OPEN of the groups that `commit_products` closed are under way; d is
// of one that no longer is.
template <u32 NUM_OPEN>
__device__ __forceinline__ void finish_products(float (&d)[PRODUCT_VALUES]) {
    asm volatile("wgmma.wait_group.sync.aligned %64;"
                 : NXRT_VALUES
                 : "n"(NUM_OPEN)
                 : "memory");
}

#undef NXRT_PRODUCT
#undef NXRT_VALUES
#undef NXRT_VALUE_NAMES

#else

__device__ __forceinline__ SharedOperand shared_operand(const u8*) { return {0}; }
__device__ __forceinline__ SharedOperand advanced(SharedOperand operand, u32) { return operand; }
template <class Type>
__device__ __forceinline__ void start_product(Type, float (&d)[PRODUCT_VALUES], const u32 (&)[4],
                                              SharedOperand, bool) {
    d[0] = 0.0f;
    __trap();
}
__device__ __forceinline__ void fence_products() {}
__device__ __forceinline__ void fence_operands() {}
__device__ __forceinline__ void commit_products() {}
template <u32 NUM_OPEN>
__device__ __forceinline__ void finish_products(float (&)[PRODUCT_VALUES]) {}

#endif

// Return `word`, which takes the place of `before` in a left operand; `zero` is one that only the
// host knows to be 0. Else the compiler would move the word there as soon as it has been loaded, and
// wait for that, while products still read what is there.
__device__ __forceinline__ u32 in_place_of(u32 before, u32 word, u32 zero) {
    constexpr u32 WORD_XOR_BOTH = 0x78;
    u32 placed;
    asm volatile("lop3.b32 %0, %1, %2, %3, %4;"
                 : "=r"(placed)
                 : "r"(word), "r"(before), "r"(zero), "n"(WORD_XOR_BOTH));
    return placed;
}

// The first place in dynamic shared memory where an operand may lie.
__device__ __forceinline__ u8* first_tile(u8* shared) {
    const u32 address = static_cast<u32>(__cvta_generic_to_shared(shared));
    return shared + (SWIZZLE_NBYTES - address % SWIZZLE_NBYTES) % SWIZZLE_NBYTES;
}

// Barriers by number, from 1 to 15, each of so many threads in whole warps.

__device__ __forceinline__ void sync_some(u32 barrier, u32 num_threads) {
    asm volatile("barrier.cta.sync %0, %1;" ::"r"(barrier), "r"(num_threads) : "memory");
}

// Count as one that has come, and go on.
__device__ __forceinline__ void arrive_at(u32 barrier, u32 num_threads) {
    asm volatile("barrier.cta.arrive %0, %1;" ::"r"(barrier), "r"(num_threads) : "memory");
}

// Wait, and return whether any of them said so.
__device__ __forceinline__ bool any_of_some(u32 barrier, u32 num_threads, bool is_so) {
    u32 any;
    asm volatile(
        "{\n.reg .pred in, out;\nsetp.ne.b32 in, %1, 0;\n"
        "barrier.cta.red.or.pred out, %2, %3, in;\nselp.u32 %0, 1, 0, out;\n}\n"
        : "=r"(any)
        : "r"(static_cast<u32>(is_so)), "r"(barrier), "r"(num_threads)
        : "memory");
    return any != 0;
}

// Without a branch, where `is_so`: add to a word in shared memory and return what was there; else
// return `otherwise`.
__device__ __forceinline__ u32 add_if(bool is_so, u32* word, u32 value, u32 otherwise) {
    u32 before = otherwise;
    asm volatile(
        "{\n.reg .pred is_so;\nsetp.ne.b32 is_so, %1, 0;\n"
        "@is_so atom.shared.add.u32 %0, [%2], %3;\n}\n"
        : "+r"(before)
        : "r"(static_cast<u32>(is_so)), "r"(static_cast<u32>(__cvta_generic_to_shared(word))),
          "r"(value)
        : "memory");
    return before;
}

// Likewise store to global memory.
__device__ __forceinline__ void store_if(bool is_so, uint2* place, uint2 value) {
    asm volatile(
        "{\n.reg .pred is_so;\nsetp.ne.b32 is_so, %0, 0;\n"
        "@is_so st.global.v2.u32 [%1], {%2, %3};\n}\n" ::"r"(static_cast<u32>(is_so)),
        "l"(__cvta_generic_to_global(place)), "r"(value.x), "r"(value.y)
        : "memory");
}

// Return the same, which the compiler keeps from here on instead of what it is made of.

template <class Type>
__device__ __forceinline__ Type* pinned(Type* pointer) {
    asm volatile("" : "+l"(pointer));
    return pointer;
}

__device__ __forceinline__ float pinned(float value) {
    asm volatile("" : "+f"(value));
    return value;
}
