// Double: y = 2 x over `count` float32 elements; a thread an element, in a grid-stride loop.
extern "C" __global__ void double_elements(const float* x, float* y, unsigned long long count) {
    const unsigned long long stride = static_cast<unsigned long long>(gridDim.x) * blockDim.x;
    for (unsigned long long i = blockIdx.x * static_cast<unsigned long long>(blockDim.x) + threadIdx.x;
         i < count; i += stride) {
        y[i] = 2.0f * x[i];
    }
}
