// What only PTX can say: matrix products of a warp and copies that go on by themselves; and the
// block's dynamic shared memory.
#pragma once

#include "nxrt/numerics.cuh"

// d[16x8] += a[16x16] * b[16x8], a and b of 16-bit floats, two in a word. Lane (g, j) = (lane / 4,
// lane % 4) holds d[g][2j], d[g][2j+1], d[g+8][2j], d[g+8][2j+1]; words a[g][2j..], a[g+8][2j..],
// a[g][2j+8..], a[g+8][2j+8..]; and b[2j..][g], b[2j+8..][g].
__device__ __forceinline__ void mma_m16n8k16(BF16, float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3,
                                             u32 b0, u32 b1) {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_m16n8k16(F16, float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3,
                                             u32 b0, u32 b1) {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Two values rounded to nearest even, the first in the low half.
__device__ __forceinline__ u32 pack_bf16(float first, float second) {
    u32 word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    return word;
}

// a * b + c of two pairs, rounded once.
__device__ __forceinline__ u32 fma_bf16x2(u32 a, u32 b, u32 c) {
    u32 word;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(word) : "r"(a), "r"(b), "r"(c));
    return word;
}

// A barrier in shared memory for bulk copies: expect_bytes says how much will come, copy_bulk starts
// what comes, wait_for_bytes waits for all of it. Sizes and addresses are multiples of 16 bytes.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
__device__ __forceinline__ void init_arrivals(u64* barrier) {
    const u32 address = static_cast<u32>(__cvta_generic_to_shared(barrier));
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(address) : "memory");
}

// After init_arrivals, before a barrier of the threads that use them.
__device__ __forceinline__ void publish_arrivals() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Let bulk copies that are started after the next barrier come after what this thread has read and
// written before.
__device__ __forceinline__ void order_copies() { asm volatile("fence.proxy.async;" ::: "memory"); }

__device__ __forceinline__ void expect_bytes(u64* barrier, u32 nbytes) {
    const u32 address = static_cast<u32>(__cvta_generic_to_shared(barrier));
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(address), "r"(nbytes)
                 : "memory");
}

// True for one lane of a warp, which is together.
__device__ __forceinline__ bool elect_lane() {
    u32 is_it;
    asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(is_it));
    return is_it != 0;
}

__device__ __forceinline__ void copy_bulk(void* target, const void* source, u32 nbytes,
                                          u64* barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            static_cast<u32>(__cvta_generic_to_shared(target))),
        "l"(__cvta_generic_to_global(source)), "r"(nbytes),
        "r"(static_cast<u32>(__cvta_generic_to_shared(barrier)))
        : "memory");
}

// Wait for what was expected in a phase: 0 at first, and each time the other one.
__device__ __forceinline__ void wait_for_bytes(u64* barrier, u32 phase) {
    const u32 address = static_cast<u32>(__cvta_generic_to_shared(barrier));
    u32 is_there;
    do {
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
            : "=r"(is_there)
            : "r"(address), "r"(phase)
            : "memory");
    } while (is_there == 0);
}
#else  // What needs them is not run before 9.0, but compiles.
__device__ __forceinline__ void init_arrivals(u64*) { __trap(); }
__device__ __forceinline__ void publish_arrivals() {}
__device__ __forceinline__ void order_copies() {}
__device__ __forceinline__ void expect_bytes(u64*, u32) {}
__device__ __forceinline__ bool elect_lane() { return false; }
__device__ __forceinline__ void copy_bulk(void*, const void*, u32, u64*) {}
__device__ __forceinline__ void wait_for_bytes(u64*, u32) {}
#endif

// Copy 16 bytes to shared memory. They are there, for this thread, once `wait_for_copies` has waited
// for the group that the next `commit_copies` closes.
__device__ __forceinline__ void copy_chunk(uint4* target, const uint4* source) {
    const u32 address = static_cast<u32>(__cvta_generic_to_shared(target));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(source) : "memory");
}

// The same to target[index]: indices known beforehand cost no registers.
__device__ __forceinline__ void copy_chunk(uint4* target, u32 index, const uint4* source) {
    const u32 address = static_cast<u32>(__cvta_generic_to_shared(target)) + index * 16;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(source) : "memory");
}

// Bring the line of an address in global memory nearer; nothing waits for it.
__device__ __forceinline__ void prefetch(const void* source) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(source));
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until no more than NUM_OPEN of this thread's groups are under way.
template <u32 NUM_OPEN>
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(NUM_OPEN) : "memory");
}

__device__ __forceinline__ u8* dynamic_shared() {
    extern __shared__ uint4 dynamic_shared_memory[];
    return reinterpret_cast<u8*>(dynamic_shared_memory);
}

__device__ __forceinline__ u32 dynamic_shared_nbytes() {
    u32 nbytes;
    asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(nbytes));
    return nbytes;
}

// Add to a word that other blocks wait for; who sees it sees what this block wrote before, if a barrier
// is between.
__device__ __forceinline__ void arrive(u32* count, u32 num) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(count), "r"(num) : "memory");
}

// Look at such a word.
__device__ __forceinline__ u32 look_at(const u32* count) {
    u32 found;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(found) : "l"(count) : "memory");
    return found;
}

// One turn of a loop that waits for another block's write.
__device__ __forceinline__ void wait_a_little() {}
