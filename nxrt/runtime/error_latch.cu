// The two entry points of a session's error latch: count steps, and take what kernels latched.
//
// words: [1 + 2 * num_slots] uint32: the step that is running, then for each slot the fault bits
// and the step in which the first of them was set. One thread a slot; every word is touched by one
// thread, so no order matters.

extern "C" __global__ void nxrt_latch_advance(unsigned *words) {
    words[0] += 1;
}

// Adds the slots to `taken`, where the first step stays, and clears them. In stream order: a fault
// is either taken here or still to come. What was taken and not fetched stays until it is.
extern "C" __global__ void nxrt_latch_take(unsigned *words, unsigned *taken, unsigned num_slots) {
    const unsigned slot = blockIdx.x * blockDim.x + threadIdx.x;
    if (slot < num_slots) {
        unsigned *bits = words + 1 + 2 * slot;
        if (bits[0] != 0) {
            if (taken[2 * slot] == 0) taken[2 * slot + 1] = bits[1];
            taken[2 * slot] |= bits[0];
            bits[0] = 0;
            bits[1] = 0;
        }
    }
}
