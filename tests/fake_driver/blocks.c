/* The blocks behind device and page-locked memory: host pages, with guards and a quarantine.
 *
 * A freed block stays mapped for a while, filled with a pattern: what still uses it is told so
 * instead of crashing, or of finding a younger block there.
 */
#define _GNU_SOURCE

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "blocks.h"

#define ALIGNMENT 512
#define PAGE 4096
#define GUARD 512
#define POISON_LIMIT (64u << 20) /* beyond it, pages are left untouched and cost nothing */
#define QUARANTINE_NBYTES (256u << 20)
#define QUARANTINE_COUNT 4096

enum { FRESH = 0xa5, FREED = 0xdd, GUARDED = 0xca };

static struct block *blocks; /* by address */
static size_t num_blocks, num_allotted;
static size_t quarantine_nbytes, quarantine_count;
static long num_frees;
static long num_live[2];
static u64 live_nbytes[2];

static size_t round_up(size_t nbytes, size_t step) { return (nbytes + step - 1) / step * step; }

size_t charged_nbytes(size_t nbytes) { return round_up(nbytes, ALIGNMENT); }

static void fill(u64 address, int pattern, size_t nbytes)
{
    memset((void *)address, pattern, nbytes < POISON_LIMIT ? nbytes : POISON_LIMIT);
}

static size_t index_of(u64 address) /* of the first block that begins after the address */
{
    size_t low = 0, high = num_blocks;
    while (low < high) {
        const size_t middle = (low + high) / 2;
        if (blocks[middle].base <= address) low = middle + 1;
        else high = middle;
    }
    return low;
}

static struct block *find(u64 address)
{
    const size_t index = index_of(address);
    if (index == 0) return NULL;
    struct block *block = &blocks[index - 1];
    return address - block->base < block->nbytes ? block : NULL;
}

const struct block *block_at(u64 address) { return find(address); }

static void insert(struct block block)
{
    if (num_blocks == num_allotted) {
        num_allotted = num_allotted == 0 ? 64 : 2 * num_allotted;
        blocks = realloc(blocks, num_allotted * sizeof *blocks);
        if (blocks == NULL) abort();
    }
    const size_t index = index_of(block.base);
    memmove(&blocks[index + 1], &blocks[index], (num_blocks - index) * sizeof *blocks);
    blocks[index] = block;
    ++num_blocks;
}

static void forget(struct block *block)
{
    const size_t index = (size_t)(block - blocks);
    munmap((void *)(block->base - PAGE - GUARD), block->mapped_nbytes);
    memmove(block, block + 1, (num_blocks - index - 1) * sizeof *blocks);
    --num_blocks;
}

static void shrink_quarantine(void)
{
    while (quarantine_nbytes > QUARANTINE_NBYTES || quarantine_count > QUARANTINE_COUNT) {
        struct block *oldest = NULL;
        for (size_t i = 0; i < num_blocks; ++i) {
            struct block *block = &blocks[i];
            if (!block->is_freed) continue;
            if (oldest == NULL || block->freed_as < oldest->freed_as) oldest = block;
        }
        quarantine_nbytes -= oldest->mapped_nbytes;
        --quarantine_count;
        forget(oldest);
    }
}

/* Return the address, 0 where the machine has no pages left.
 *
 * The address is aligned to 512 bytes and to no more, as the driver promises no more. */
u64 new_block(size_t nbytes, bool is_pinned, struct context *context)
{
    const size_t mapped_nbytes = round_up(PAGE + GUARD + nbytes + GUARD, PAGE);
    void *pages = mmap(NULL, mapped_nbytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pages == MAP_FAILED) return 0;
    const u64 base = (u64)pages + PAGE + GUARD;
    fill(base - GUARD, GUARDED, GUARD);
    fill(base, FRESH, nbytes);
    fill(base + nbytes, GUARDED, GUARD);
    insert((struct block){.base = base,
                          .nbytes = nbytes,
                          .mapped_nbytes = mapped_nbytes,
                          .is_pinned = is_pinned,
                          .context = context});
    ++num_live[is_pinned];
    live_nbytes[is_pinned] += nbytes;
    return base;
}

static bool is_guard_whole(u64 address)
{
    for (size_t i = 0; i < GUARD; ++i) {
        if (((const unsigned char *)address)[i] != GUARDED) return false;
    }
    return true;
}

static void check_guards(const struct block *block)
{
    if (!is_guard_whole(block->base - GUARD)) violation("memory before a block was written");
    if (!is_guard_whole(block->base + block->nbytes)) violation("memory after a block was written");
}

static void retire(struct block *block)
{
    check_guards(block);
    block->is_freed = true;
    block->context = NULL;
    block->freed_as = num_frees++;
    fill(block->base, FREED, block->nbytes);
    --num_live[block->is_pinned];
    live_nbytes[block->is_pinned] -= block->nbytes;
    quarantine_nbytes += block->mapped_nbytes;
    ++quarantine_count;
}

/* Return whether there was such a live block; a violation says what was wrong. */
bool free_block(u64 base, bool is_pinned)
{
    struct block *block = find(base);
    if (block == NULL || block->base != base || block->is_pinned != is_pinned) {
        violation("0x%llx is not the start of a block of this kind", (unsigned long long)base);
        return false;
    }
    if (block->is_freed) {
        violation("0x%llx was freed before", (unsigned long long)base);
        return false;
    }
    retire(block);
    shrink_quarantine();
    return true;
}

void close_memory(const struct context *context)
{
    for (size_t i = 0; i < num_blocks; ++i) {
        if (blocks[i].is_freed || blocks[i].context != context) continue;
        if (!blocks[i].is_pinned) uncharge(context->device, blocks[i].nbytes);
        retire(&blocks[i]);
    }
    shrink_quarantine();
}

/* Return whether a kernel or a copy may touch the range; a violation says why not. */
bool is_range_usable(u64 address, size_t nbytes)
{
    const struct block *block = find(address);
    if (block == NULL) {
        violation("0x%llx is in no block", (unsigned long long)address);
        return false;
    }
    if (block->is_freed) {
        violation("0x%llx was freed", (unsigned long long)address);
        return false;
    }
    if (nbytes > block->nbytes - (address - block->base)) {
        violation("%zu bytes at 0x%llx pass the end of their block", nbytes,
                  (unsigned long long)address);
        return false;
    }
    return true;
}

/* Check every live block's guards now; a violation names each that was written. */
API void fake_check_guards(void)
{
    take_lock();
    for (size_t i = 0; i < num_blocks; ++i) {
        if (!blocks[i].is_freed) check_guards(&blocks[i]);
    }
    drop_lock();
}

API int fake_is_range_usable(u64 address, size_t nbytes)
{
    take_lock();
    const bool is_usable = is_range_usable(address, nbytes);
    drop_lock();
    return is_usable;
}

API long fake_live_blocks(int is_pinned) { return num_live[is_pinned != 0]; }

API u64 fake_live_nbytes(int is_pinned) { return live_nbytes[is_pinned != 0]; }
