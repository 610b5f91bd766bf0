// The threads of a launch as fibers of one thread of the host.
//
// A fiber runs until it waits: for its warp, its block or, in a loop over memory, for another block. Whoever waits for a thread that has ended, or all for each other, ends the
// launch with a message that says so, as a hang on a device would not.
#pragma once

namespace emulated {

struct Index {
    unsigned x, y, z;
};

extern Index thread_idx, block_idx, block_dim, grid_dim;

using Body = void (*)(void **params);

// Run a kernel. `order` is how warps and lanes take turns: 0 ascending, 1 descending, else the seed
// of a shuffle; blocks begin in ascending order, or in descending order for 1. Returns NULL or what
// went wrong, which stays until this thread's next launch.
const char *launch(Body body, void **params, Index grid, Index block, unsigned shared_nbytes,
                   unsigned order);

int lane_idx();
unsigned char *dynamic_shared();
unsigned dynamic_shared_nbytes();
// 1 KiB that the lanes of a warp share between two of their barriers.
void *warp_scratch();

// Wait for the block; returns the sum of the values.
unsigned sync_block(unsigned value);

// A thread's copies: made when it waits for all but `num_open` of the groups it has closed.
void later(void *target, const void *source, unsigned long nbytes);
void close_group();
void finish_groups(unsigned num_open);

void sync_warp(unsigned mask);
// Lay a word open to the lanes of a mask and wait for theirs; valid until the next sync_warp.
const unsigned long long *offer(unsigned mask, unsigned long long word);
unsigned long long exchange(unsigned mask, unsigned long long word, int source_lane);

// Let others run: what this thread waits for is not there yet.
void spin();

[[noreturn]] void fail(const char *message);

}  // namespace emulated
