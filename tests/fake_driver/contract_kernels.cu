// The kernels of tests/contracts/test_driver_contract.py. The test double of the driver has built-in
// stand-ins of the same names, so that one suite runs on it and on a card.

extern "C" __global__ void fake_increment(unsigned *target) { *target += 1; }

extern "C" __global__ void fake_add(unsigned *target, unsigned value) { *target += value; }

// Adds the number of threads.
extern "C" __global__ void fake_count(unsigned *target) { atomicAdd(target, 1u); }

// Keeps the device busy.
extern "C" __global__ void fake_spin(unsigned long long num_cycles) {
    const long long start = clock64();
    while (static_cast<unsigned long long>(clock64() - start) < num_cycles) {
    }
}
