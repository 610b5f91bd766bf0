// checksum += the sum of all 32-bit words of a buffer, modulo 2^32: what reading alone costs.
//
// values: [num_vectors] uint4; checksum: one word, zero before the launch.
// Every thread strides over the whole buffer, LOADS vectors of 16 bytes in flight at once; a block
// adds up in shared memory and the blocks add theirs to the word.
// The sum is what keeps the compiler from dropping the loads; being exact, it also proves them.

constexpr unsigned LOADS = 8;

extern "C" __global__ void __launch_bounds__(512, 2) read_bandwidth(
    const uint4 *values, unsigned *checksum, unsigned long long num_vectors) {
    __shared__ unsigned block_sum;
    if (threadIdx.x == 0) {
        block_sum = 0;
    }
    __syncthreads();

    const unsigned long long num_threads = static_cast<unsigned long long>(gridDim.x) * blockDim.x;
    unsigned long long index = static_cast<unsigned long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    unsigned sum = 0;

    // Whole strides: no load waits for a comparison.
    for (; index + (LOADS - 1) * num_threads < num_vectors; index += LOADS * num_threads) {
        uint4 loaded[LOADS];
#pragma unroll
        for (unsigned n = 0; n < LOADS; n++) {
            loaded[n] = values[index + n * num_threads];
        }
#pragma unroll
        for (unsigned n = 0; n < LOADS; n++) {
            sum += loaded[n].x + loaded[n].y + loaded[n].z + loaded[n].w;
        }
    }
    // What is left of the buffer.
    for (; index < num_vectors; index += num_threads) {
        const uint4 loaded = values[index];
        sum += loaded.x + loaded.y + loaded.z + loaded.w;
    }

    atomicAdd(&block_sum, sum);
    __syncthreads();
    if (threadIdx.x == 0) {
        atomicAdd(checksum, block_sum);
    }
}
