/* Allocation: device memory within a limit, page-locked memory without one. */

#include "blocks.h"

#define MAX_DEVICES 16
#define DEFAULT_LIMIT (8ull << 30)

static u64 limit_nbytes = DEFAULT_LIMIT;
static u64 charged[MAX_DEVICES];

void uncharge(CUdevice device, size_t nbytes) { charged[device] -= charged_nbytes(nbytes); }

static CUresult allocate(u64 *address, size_t nbytes, struct context *context)
{
    if (nbytes == 0) return INVALID_VALUE;
    u64 *used = &charged[context->device];
    if (nbytes > limit_nbytes || *used + charged_nbytes(nbytes) > limit_nbytes) {
        return OUT_OF_MEMORY;
    }
    *address = new_block(nbytes, false, context);
    if (*address == 0) return OUT_OF_MEMORY;
    *used += charged_nbytes(nbytes);
    return OK;
}

API CUresult cuMemAlloc_v2(u64 *address, size_t nbytes)
{
    CALL(cuMemAlloc, CONTEXT | UNSAFE);
    CUresult code;
    struct context *context = current_context(&code);
    return allocate(address, nbytes, context);
}

static CUresult free_device(u64 address)
{
    const struct block *block = block_at(address);
    const CUdevice device = block == NULL || block->is_freed ? 0 : block->context->device;
    const size_t nbytes = block == NULL ? 0 : block->nbytes;
    if (!free_block(address, false)) return INVALID_VALUE;
    uncharge(device, nbytes);
    return OK;
}

static CUresult lost_owner(u64 address)
{
    const struct block *block = block_at(address);
    return block == NULL || block->is_freed ? OK : block->context->lost;
}

API CUresult cuMemFree_v2(u64 address)
{
    CALL(cuMemFree, UNSAFE);
    if (address == 0) return OK;
    if (lost_owner(address) != OK) return lost_owner(address);
    drain_all(NULL);
    return free_device(address);
}

static CUresult allocate_pinned(u64 *address, size_t nbytes)
{
    CUresult code;
    struct context *context = current_context(&code);
    if (nbytes == 0) return INVALID_VALUE;
    *address = new_block(nbytes, true, context);
    return *address == 0 ? OUT_OF_MEMORY : OK;
}

API CUresult cuMemAllocHost_v2(u64 *address, size_t nbytes)
{
    CALL(cuMemAllocHost, CONTEXT | UNSAFE);
    return allocate_pinned(address, nbytes);
}

API CUresult cuMemHostAlloc(u64 *address, size_t nbytes, u32 flags)
{
    (void)flags;
    CALL(cuMemHostAlloc, CONTEXT | UNSAFE);
    return allocate_pinned(address, nbytes);
}

API CUresult cuMemFreeHost(u64 address)
{
    CALL(cuMemFreeHost, UNSAFE);
    if (lost_owner(address) != OK) return lost_owner(address);
    drain_all(NULL);
    return free_block(address, true) ? OK : INVALID_VALUE;
}

/* A stream-ordered allocation inside a capture would become a node; that is not modelled. */
static CUresult capture_answer(struct stream *stream)
{
    if (stream->capture != NULL) {
        violation("graphs that allocate are not modelled");
        return NOT_SUPPORTED;
    }
    return refuse_unsafe() ? CAPTURE_UNSUPPORTED : OK;
}

API CUresult cuMemAllocAsync(u64 *address, size_t nbytes, handle_t handle)
{
    CALL(cuMemAllocAsync, 0);
    CUresult code;
    struct stream *stream = work_stream(handle, &code);
    if (stream == NULL) return code;
    code = capture_answer(stream);
    return code != OK ? code : allocate(address, nbytes, stream->context);
}

API CUresult cuMemFreeAsync(u64 address, handle_t handle)
{
    CALL(cuMemFreeAsync, 0);
    CUresult code;
    struct stream *stream = work_stream(handle, &code);
    if (stream == NULL) return code;
    code = capture_answer(stream);
    if (code != OK) return code;
    if (!is_range_usable(address, 1)) return INVALID_VALUE;
    struct op op = {.kind = OP_FREE, .freed = address};
    return submit(stream, &op);
}

CUresult run_free(u64 address) { return free_device(address) == OK ? OK : ILLEGAL_ADDRESS; }

API CUresult cuMemGetInfo_v2(size_t *num_free, size_t *total)
{
    CALL(cuMemGetInfo, CONTEXT);
    CUresult code;
    const u64 used = charged[current_context(&code)->device];
    *total = limit_nbytes;
    *num_free = used < limit_nbytes ? limit_nbytes - used : 0;
    return OK;
}

/* Bound the device memory of each device; 0 puts the default back. */
API void fake_set_memory_limit(u64 nbytes)
{
    take_lock();
    limit_nbytes = nbytes == 0 ? DEFAULT_LIMIT : nbytes;
    drop_lock();
}
