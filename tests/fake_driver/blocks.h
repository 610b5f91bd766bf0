/* Host pages behind device and page-locked memory. */
#ifndef BLOCKS_H
#define BLOCKS_H

#include "fake.h"

struct block {
    u64 base;
    size_t nbytes;
    size_t mapped_nbytes;
    bool is_pinned;
    bool is_freed;
    long freed_as; /* when, in the order of frees */
    struct context *context;
};

const struct block *block_at(u64 address);
u64 new_block(size_t nbytes, bool is_pinned, struct context *context);
bool free_block(u64 base, bool is_pinned);
bool is_range_usable(u64 address, size_t nbytes);
size_t charged_nbytes(size_t nbytes);
void uncharge(CUdevice device, size_t nbytes);

#endif
