/* Copies and fills: what is checked when they are enqueued, and what they do when they run. */

#include <stdlib.h>
#include <string.h>

#include "blocks.h"

static bool is_pageable(u64 address) { return block_at(address) == NULL; }

static CUresult check(const struct op *op)
{
    const size_t nbytes = op->copy.nbytes;
    if (op->copy.to == 'D' && !is_range_usable(op->copy.target, nbytes)) return INVALID_VALUE;
    if (op->copy.from == 'D' && !is_range_usable(op->copy.source, nbytes)) return INVALID_VALUE;
    const u64 host = op->copy.to == 'H' ? op->copy.target : op->copy.source;
    const bool has_host = op->copy.to == 'H' || op->copy.from == 'H';
    if (has_host && host == 0) return INVALID_VALUE;
    if (has_host && !is_pageable(host) && !is_range_usable(host, nbytes)) return INVALID_VALUE;
    return OK;
}

/* The driver has read a pageable source when the call returns, unless it is being recorded. */
static void stage(struct op *op)
{
    op->copy.staged = malloc(op->copy.nbytes);
    memcpy(op->copy.staged, (const void *)op->copy.source, op->copy.nbytes);
}

static CUresult copy_on(struct stream *stream, struct op *op)
{
    if (op->copy.nbytes == 0) return OK;
    const CUresult code = check(op);
    if (code != OK) return refuse_work(stream, code);
    const bool is_recorded = stream->capture != NULL;
    if (!is_recorded && op->copy.from == 'H' && is_pageable(op->copy.source)) stage(op);
    const bool must_wait = !is_recorded && op->copy.to == 'H' && is_pageable(op->copy.target);
    const CUresult answer = submit(stream, op);
    if (answer == OK && must_wait) drain_stream(stream);
    return answer;
}

static CUresult copy(u64 target, char to, u64 source, char from, size_t nbytes, handle_t handle)
{
    CUresult code;
    struct stream *stream = work_stream(handle, &code);
    if (stream == NULL) return code;
    struct op op = {.kind = OP_COPY};
    op.copy.target = target;
    op.copy.source = source;
    op.copy.nbytes = nbytes;
    op.copy.to = to;
    op.copy.from = from;
    return copy_on(stream, &op);
}

static char place_of(u64 address)
{
    const struct block *block = block_at(address);
    return block != NULL && !block->is_pinned ? 'D' : 'H';
}

API CUresult cuMemcpyHtoDAsync_v2(u64 target, u64 source, size_t nbytes, handle_t stream)
{
    CALL(cuMemcpyHtoDAsync, 0);
    return copy(target, 'D', source, 'H', nbytes, stream);
}

API CUresult cuMemcpyDtoHAsync_v2(u64 target, u64 source, size_t nbytes, handle_t stream)
{
    CALL(cuMemcpyDtoHAsync, 0);
    return copy(target, 'H', source, 'D', nbytes, stream);
}

API CUresult cuMemcpyDtoDAsync_v2(u64 target, u64 source, size_t nbytes, handle_t stream)
{
    CALL(cuMemcpyDtoDAsync, 0);
    return copy(target, 'D', source, 'D', nbytes, stream);
}

API CUresult cuMemcpyAsync(u64 target, u64 source, size_t nbytes, handle_t stream)
{
    CALL(cuMemcpyAsync, 0);
    return copy(target, place_of(target), source, place_of(source), nbytes, stream);
}

/* Work on the legacy stream runs at the call, so these wait by themselves. */
API CUresult cuMemcpyHtoD_v2(u64 target, u64 source, size_t nbytes)
{
    CALL(cuMemcpyHtoD, CONTEXT);
    return copy(target, 'D', source, 'H', nbytes, 0);
}

API CUresult cuMemcpyDtoH_v2(u64 target, u64 source, size_t nbytes)
{
    CALL(cuMemcpyDtoH, CONTEXT);
    return copy(target, 'H', source, 'D', nbytes, 0);
}

API CUresult cuMemcpyDtoD_v2(u64 target, u64 source, size_t nbytes)
{
    CALL(cuMemcpyDtoD, CONTEXT);
    return copy(target, 'D', source, 'D', nbytes, 0);
}

static CUresult set(u64 target, size_t width, u32 value, size_t count, handle_t handle)
{
    CUresult code;
    struct stream *stream = work_stream(handle, &code);
    if (stream == NULL) return code;
    if (count == 0) return OK;
    const bool is_usable = target % width == 0 && is_range_usable(target, width * count);
    if (!is_usable) return refuse_work(stream, INVALID_VALUE);
    struct op op = {.kind = OP_SET};
    op.set.target = target;
    op.set.width = width;
    op.set.count = count;
    op.set.value = value;
    return submit(stream, &op);
}

API CUresult cuMemsetD8Async(u64 target, unsigned char value, size_t count, handle_t stream)
{
    CALL(cuMemsetD8Async, 0);
    return set(target, 1, value, count, stream);
}

API CUresult cuMemsetD16Async(u64 target, unsigned short value, size_t count, handle_t stream)
{
    CALL(cuMemsetD16Async, 0);
    return set(target, 2, value, count, stream);
}

API CUresult cuMemsetD32Async(u64 target, u32 value, size_t count, handle_t stream)
{
    CALL(cuMemsetD32Async, 0);
    return set(target, 4, value, count, stream);
}

API CUresult cuMemsetD8_v2(u64 target, unsigned char value, size_t count)
{
    CALL(cuMemsetD8, CONTEXT);
    return set(target, 1, value, count, 0);
}

API CUresult cuMemsetD32_v2(u64 target, u32 value, size_t count)
{
    CALL(cuMemsetD32, CONTEXT);
    return set(target, 4, value, count, 0);
}

CUresult run_copy(const struct op *op)
{
    if (check(op) != OK) return ILLEGAL_ADDRESS;
    const void *source = op->copy.staged ? op->copy.staged : (const void *)op->copy.source;
    memmove((void *)op->copy.target, source, op->copy.nbytes);
    return OK;
}

CUresult run_set(const struct op *op)
{
    const size_t nbytes = op->set.width * op->set.count;
    if (!is_range_usable(op->set.target, nbytes)) return ILLEGAL_ADDRESS;
    if (op->set.width == 1) {
        memset((void *)op->set.target, (int)op->set.value, op->set.count);
        return OK;
    }
    for (size_t i = 0; i < op->set.count; ++i) {
        memcpy((char *)op->set.target + i * op->set.width, &op->set.value, op->set.width);
    }
    return OK;
}
