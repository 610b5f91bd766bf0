// Report bad data from a kernel: an index out of range, a cursor that cannot be.
//
// A kernel gets the address of its slot and of the step word as arguments. It reports and goes on
// with something harmless; the host raises when it consumes the result.

#pragma once

// Sets bits of a slot [2] (bits, step); the step of the first report stays. Any thread may call.
__device__ __forceinline__ void latch_fault(unsigned *slot, const unsigned *step, unsigned bits) {
    if (atomicOr(slot, bits) == 0) {
        atomicExch(slot + 1, *step);
    }
}
