// Kernels that are right, and kernels that are wrong in a way a device may hide.

using u32 = unsigned;

// target[i] = the sum of value[0..i] of a block of at most 1024 threads
extern "C" __global__ void block_sums(const u32 *values, u32 *target) {
    __shared__ u32 sums[1024];
    sums[threadIdx.x] = values[threadIdx.x];
    __syncthreads();
    for (u32 offset = 1; offset < blockDim.x; offset <<= 1) {
        const u32 other = threadIdx.x >= offset ? sums[threadIdx.x - offset] : 0;
        __syncthreads();
        sums[threadIdx.x] += other;
        __syncthreads();
    }
    target[threadIdx.x] = sums[threadIdx.x];
}

// What another warp wrote, without the barrier that a reader needs.
extern "C" __global__ void without_a_barrier(const u32 *values, u32 *target) {
    __shared__ u32 staged[1024];
    staged[threadIdx.x] = values[threadIdx.x];
    target[threadIdx.x] = staged[(threadIdx.x + 32) % blockDim.x];
}

// Every block waits until all have come.
extern "C" __global__ void meet(volatile u32 *arrived, u32 *target) {
    __shared__ u32 number;
    if (threadIdx.x == 0) {
        number = atomicAdd(const_cast<u32 *>(arrived), 1u);
        while (*arrived < gridDim.x) __nanosleep(20);
    }
    __syncthreads();
    if (threadIdx.x == 0) target[blockIdx.x] = number;
}

extern "C" __global__ void wait_for_nobody(volatile u32 *arrived) {
    while (*arrived == 0) __nanosleep(20);
}

extern "C" __global__ void two_barriers() {
    if (threadIdx.x % 2 == 0) {
        __syncthreads();
    } else {
        __syncwarp();
    }
}

extern "C" __global__ void shuffle_with_the_ended(u32 *target) {
    if (threadIdx.x == 5) return;
    target[threadIdx.x] = __shfl_xor_sync(0xffffffffu, threadIdx.x, 1);
}

extern "C" __global__ void shuffle_outside_the_mask(u32 *target) {
    if (threadIdx.x >= 16) return;
    target[threadIdx.x] = __shfl_sync(0xffffu, threadIdx.x, 20);
}

// words = ballot, all, any, sum and maximum over a warp; then what the lane below has, and above
extern "C" __global__ void warp_words(u32 *words, u32 *below, u32 *above) {
    const u32 all = 0xffffffffu;
    const u32 lane = threadIdx.x;
    const u32 ballot = __ballot_sync(all, lane % 3 == 0);
    const u32 is_all = __all_sync(all, lane < 32), is_any = __any_sync(all, lane == 40);
    const u32 sum = __reduce_add_sync(all, lane), most = __reduce_max_sync(all, lane ^ 5);
    if (lane == 7) {
        words[0] = ballot, words[1] = is_all, words[2] = is_any, words[3] = sum, words[4] = most;
    }
    below[lane] = __shfl_up_sync(all, lane, 1);
    above[lane] = __shfl_down_sync(all, lane, 4, 8);
}

extern "C" __global__ void trapped() {
    if (threadIdx.x == 3) __trap();
}

// found [5][blockDim.x]: a + b rounded up and down, a * b and a * b + c rounded up, the root of |c|
// rounded up
extern "C" __global__ void directed(const float *a, const float *b, const float *c, float *found) {
    const u32 i = threadIdx.x, n = blockDim.x;
    found[i] = __fadd_ru(a[i], b[i]);
    found[n + i] = __fadd_rd(a[i], b[i]);
    found[2 * n + i] = __fmul_ru(a[i], b[i]);
    found[3 * n + i] = __fmaf_ru(a[i], b[i], c[i]);
    found[4 * n + i] = __fsqrt_ru(fabsf(c[i]));
}

// What each call returns, and what it leaves in a word that was 12.
extern "C" __global__ void atomics(u32 *returned, u32 *left) {
    for (u32 i = 0; i < 6; ++i) left[i] = 12;
    returned[0] = atomicAdd(&left[0], 3u);
    returned[1] = atomicOr(&left[1], 3u);
    returned[2] = atomicMax(&left[2], 20u);
    returned[3] = atomicMin(&left[3], 20u);
    returned[4] = atomicExch(&left[4], 5u);
    returned[5] = atomicCAS(&left[5], 11u, 1u) + atomicCAS(&left[5], 12u, 7u);
}

extern "C" __global__ void bit_counts(u32 *counts) {
    const u32 values[3] = {0, 1, 0x80f0u};
    for (u32 i = 0; i < 3; ++i) {
        counts[3 * i] = __popc(values[i]);
        counts[3 * i + 1] = __clz(values[i]);
        counts[3 * i + 2] = __ffs(values[i]);
    }
}

// counted = how many threads of a block have an even index, whether any has 7, whether all are < 9
extern "C" __global__ void block_votes(u32 *counted) {
    const u32 even = __syncthreads_count(threadIdx.x % 2 == 0);
    const u32 any = __syncthreads_or(threadIdx.x == 7), all = __syncthreads_and(threadIdx.x < 9);
    if (threadIdx.x == 0) counted[0] = even, counted[1] = any, counted[2] = all;
}

// Every block keeps a word of its own in dynamic shared memory while all wait for each other.
extern "C" __global__ void keep_a_word(volatile u32 *arrived, u32 *target) {
    u32 *const own = reinterpret_cast<u32 *>(emulated::dynamic_shared());
    own[threadIdx.x] = 10 * blockIdx.x + threadIdx.x;
    __syncthreads();
    if (threadIdx.x == 0) {
        atomicAdd(const_cast<u32 *>(arrived), 1u);
        while (*arrived < gridDim.x) __nanosleep(20);
        target[blockIdx.x] = own[blockDim.x - 1];
    }
}
