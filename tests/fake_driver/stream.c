/* Streams: queues of work, and the threads that run it on the callers' behalf.
 *
 * Eager: work runs before the call that enqueued it returns. Lazy: it runs when a call waits for it,
 * on the waiting thread. A thread that runs work of one stream may wait for another stream; as every
 * wait is for work enqueued before the wait itself, no two threads can wait for each other.
 */
#define _POSIX_C_SOURCE 200809L

#include <stdlib.h>
#include <time.h>

#include "fake.h"

#define NON_BLOCKING 1u
#define LAST_SPECIAL_HANDLE 2 /* 0 and 1: the legacy stream; 2: the thread's, here the same */

static long last_sequence;
static struct stream *streams; /* those that live, and destroyed ones that have work left */

double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

struct work *keep_work(struct work *work)
{
    ++work->num_refs;
    return work;
}

void drop_work(struct work *work)
{
    if (work != NULL && --work->num_refs == 0) {
        op_destroy(&work->op);
        free(work);
    }
}

/* Streams are never freed: a thread that waits for one may come back after it was destroyed. */
static struct stream *new_stream(struct context *context, u32 flags, int priority)
{
    struct stream *stream = calloc(1, sizeof *stream);
    stream->context = context;
    stream->flags = flags;
    stream->priority = priority;
    stream->next = streams;
    streams = stream;
    return stream;
}

static bool is_idle(const struct stream *stream)
{
    return stream->first == NULL && stream->running == 0;
}

static void forget_finished(void)
{
    for (struct stream **place = &streams; *place != NULL;) {
        if ((*place)->is_destroyed && is_idle(*place)) *place = (*place)->next;
        else place = &(*place)->next;
    }
}

void each_stream(void (*visit)(struct stream *stream, void *argument), void *argument)
{
    /* A visit may wait, and the list change meanwhile; a stream taken off it still leads on. */
    for (struct stream *stream = streams; stream != NULL; stream = stream->next) {
        visit(stream, argument);
    }
}

bool is_legacy(const struct stream *stream) { return stream == stream->context->legacy; }

static struct stream *legacy_stream(CUresult *code)
{
    struct context *context = current_context(code);
    if (context != NULL && context->legacy == NULL) context->legacy = new_stream(context, 0, 0);
    return context == NULL ? NULL : context->legacy;
}

struct stream *stream_of(handle_t handle, CUresult *code)
{
    *code = OK;
    struct stream *stream = handle <= LAST_SPECIAL_HANDLE ? legacy_stream(code)
                                                          : object_of(handle, STREAMS);
    if (stream == NULL) {
        if (*code == OK) *code = INVALID_HANDLE;
        return NULL;
    }
    *code = stream->context->lost;
    return *code == OK ? stream : NULL;
}

struct stream *work_stream(handle_t handle, CUresult *code)
{
    struct stream *stream = stream_of(handle, code);
    if (stream == NULL) return NULL;
    if (is_legacy(stream) && is_legacy_blocked(stream->context)) *code = CAPTURE_IMPLICIT;
    if (stream->capture != NULL && stream->capture->is_invalid) *code = CAPTURE_INVALIDATED;
    return *code == OK ? stream : NULL;
}

static void run_first(struct stream *stream)
{
    struct work *work = stream->first;
    stream->first = work->next;
    if (stream->first == NULL) stream->last = NULL;
    stream->running = work->sequence;
    if (stream->context->lost == OK) {
        const CUresult code = op_run(&work->op);
        if (code != OK) lose_context(stream->context, code);
    }
    stream->running = 0;
    work->is_done = true;
    work->done_at = now();
    drop_work(work);
    announce_change();
}

void drain(struct stream *stream, long sequence)
{
    for (;;) {
        /* Later work may be running, and wait for what this thread has begun elsewhere. */
        while (stream->running != 0 && stream->running <= sequence) wait_for_change();
        if (stream->first == NULL || stream->first->sequence > sequence) return;
        run_first(stream);
    }
}

void drain_stream(struct stream *stream) { drain(stream, last_sequence); }

void wait_for(const struct work *point)
{
    if (!point->is_done) drain(point->stream, point->sequence);
}

struct selection {
    const struct context *context; /* NULL: every one */
    bool are_blocking_only;
    long sequence;
};

static void drain_selected(struct stream *stream, void *argument)
{
    const struct selection *selection = argument;
    if (selection->context != NULL && stream->context != selection->context) return;
    if (selection->are_blocking_only && (stream->flags & NON_BLOCKING)) return;
    drain(stream, selection->sequence);
}

void drain_all(const struct context *context)
{
    struct selection selection = {context, false, last_sequence};
    each_stream(drain_selected, &selection);
    forget_finished();
}

struct work *enqueue(struct stream *stream, struct op *op)
{
    if (is_legacy(stream)) {
        struct selection selection = {stream->context, true, last_sequence};
        each_stream(drain_selected, &selection);
    }
    struct work *work = calloc(1, sizeof *work);
    work->sequence = ++last_sequence;
    work->op = *op;
    work->stream = stream;
    work->num_refs = 2; /* the queue's and the caller's */
    if (stream->last == NULL) stream->first = work;
    else stream->last->next = work;
    stream->last = work;
    if (!is_lazy || is_legacy(stream)) drain(stream, work->sequence);
    return work;
}

CUresult submit(struct stream *stream, struct op *op)
{
    if (stream->capture != NULL) return capture_op(stream, op);
    drop_work(enqueue(stream, op));
    return OK;
}

static CUresult create(handle_t *handle, u32 flags, int priority)
{
    CUresult code;
    struct context *context = current_context(&code);
    if (flags > NON_BLOCKING) return INVALID_VALUE;
    struct stream *stream = new_stream(context, flags, priority);
    stream->handle = add_handle(STREAMS, stream);
    *handle = stream->handle;
    return OK;
}

API CUresult cuStreamCreate(handle_t *stream, u32 flags)
{
    CALL(cuStreamCreate, CONTEXT);
    return create(stream, flags, 0);
}

API CUresult cuStreamCreateWithPriority(handle_t *stream, u32 flags, int priority)
{
    CALL(cuStreamCreateWithPriority, CONTEXT);
    return create(stream, flags, priority);
}

API CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    CALL(cuCtxGetStreamPriorityRange, CONTEXT);
    if (least != NULL) *least = 0;
    if (greatest != NULL) *greatest = -5;
    return OK;
}

API CUresult cuStreamDestroy_v2(handle_t handle)
{
    CALL(cuStreamDestroy, 0);
    CUresult code;
    struct stream *stream = stream_of(handle, &code);
    if (stream == NULL) return code;
    if (is_legacy(stream)) return INVALID_HANDLE;
    if (stream->capture != NULL) {
        violation("the stream is being recorded");
        discard_capture(stream->capture);
    }
    /* Its work goes on, and nobody waits for it here. */
    drop_handle(handle);
    stream->is_destroyed = true;
    forget_finished();
    return OK;
}

static void close_stream(struct stream *stream, void *context)
{
    if (stream->context != context) return;
    drop_handle(stream->handle);
    stream->is_destroyed = true;
}

void close_streams(const struct context *context)
{
    each_stream(close_stream, (void *)context);
    forget_finished();
}

/* Waiting for a stream that is recorded is refused on every thread. */
static CUresult refuse_recorded(const struct stream *stream)
{
    if (stream->capture == NULL) return OK;
    const bool was_invalid = stream->capture->is_invalid;
    invalidate(stream->capture);
    return was_invalid ? CAPTURE_INVALIDATED : CAPTURE_UNSUPPORTED;
}

API CUresult cuStreamSynchronize(handle_t handle)
{
    CALL(cuStreamSynchronize, UNSAFE);
    CUresult code;
    struct stream *stream = stream_of(handle, &code);
    if (stream == NULL) return code;
    code = refuse_recorded(stream);
    if (code != OK) return code;
    drain_stream(stream);
    return stream->context->lost;
}

API CUresult cuStreamQuery(handle_t handle)
{
    CALL(cuStreamQuery, UNSAFE);
    CUresult code;
    struct stream *stream = stream_of(handle, &code);
    if (stream == NULL) return code;
    code = refuse_recorded(stream);
    if (code != OK) return code;
    return is_idle(stream) ? OK : NOT_READY;
}

API CUresult cuStreamGetCtx(handle_t handle, handle_t *context)
{
    CALL(cuStreamGetCtx, 0);
    CUresult code;
    const struct stream *stream = stream_of(handle, &code);
    if (stream == NULL) return code;
    *context = stream->context->handle;
    return OK;
}

API CUresult cuStreamGetCtx_v2(handle_t stream, handle_t *context, handle_t *green_context)
{
    if (green_context != NULL) *green_context = 0;
    return cuStreamGetCtx(stream, context);
}

/* A card refuses this one while the stream is recorded, unlike the other questions. */
API CUresult cuStreamGetDevice(handle_t handle, CUdevice *device)
{
    CALL(cuStreamGetDevice, 0);
    CUresult code;
    const struct stream *stream = stream_of(handle, &code);
    if (stream == NULL) return code;
    code = refuse_recorded(stream);
    if (code != OK) return code;
    *device = stream->context->device;
    return OK;
}

API CUresult cuStreamGetFlags(handle_t handle, u32 *flags)
{
    CALL(cuStreamGetFlags, 0);
    CUresult code;
    const struct stream *stream = stream_of(handle, &code);
    if (stream == NULL) return code;
    *flags = stream->flags;
    return OK;
}

API CUresult cuStreamGetPriority(handle_t handle, int *priority)
{
    CALL(cuStreamGetPriority, 0);
    CUresult code;
    const struct stream *stream = stream_of(handle, &code);
    if (stream == NULL) return code;
    *priority = stream->priority;
    return OK;
}
