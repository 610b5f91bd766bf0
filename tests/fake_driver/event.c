/* Events: points in streams that can be waited for and timed. */

#include <stdlib.h>
#include <string.h>

#include "fake.h"

enum { EXTERNAL = 1, DISABLE_TIMING = 2 };

API CUresult cuEventCreate(handle_t *handle, u32 flags)
{
    CALL(cuEventCreate, CONTEXT);
    CUresult code;
    struct event *event = calloc(1, sizeof *event);
    event->context = current_context(&code);
    event->flags = flags;
    event->handle = add_handle(EVENTS, event);
    *handle = event->handle;
    return OK;
}

static struct event *event_of(handle_t handle, CUresult *code)
{
    struct event *event = object_of(handle, EVENTS);
    *code = event == NULL ? INVALID_HANDLE : event->context->lost;
    return *code == OK ? event : NULL;
}

static void set_point(struct event *event, struct work *work)
{
    drop_work(event->point);
    event->point = work;
    event->capture_serial = 0;
}

/* Events are never freed: a thread that waits for a stream may come back to one. */
static void destroy(struct event *event)
{
    set_point(event, NULL);
    drop_handle(event->handle);
}

API CUresult cuEventDestroy_v2(handle_t handle)
{
    CALL(cuEventDestroy, 0);
    CUresult code;
    struct event *event = event_of(handle, &code);
    if (event == NULL) return code;
    destroy(event);
    return OK;
}

static void close_event(void *object, void *context)
{
    struct event *event = object;
    if (event->context == context) destroy(event);
}

void close_events(const struct context *context)
{
    each_object(EVENTS, close_event, (void *)context);
}

void set_event_point(handle_t handle, struct work *work)
{
    struct event *event = object_of(handle, EVENTS);
    if (event != NULL) set_point(event, keep_work(work));
}

static CUresult record_captured(struct event *event, struct stream *stream, bool is_external)
{
    if (is_external) {
        struct op op = {.kind = OP_EXTERNAL_RECORD, .event = event->handle};
        return submit(stream, &op);
    }
    set_point(event, NULL);
    event->capture_serial = stream->capture->serial;
    event->num_tails = stream->num_tails;
    memcpy(event->tails, stream->tails, sizeof event->tails);
    return OK;
}

static CUresult record(handle_t handle, handle_t stream_handle, u32 flags)
{
    CUresult code;
    struct event *event = event_of(handle, &code);
    if (event == NULL) return code;
    struct stream *stream = work_stream(stream_handle, &code);
    if (stream == NULL) return code;
    if (stream->context != event->context) return refuse_work(stream, INVALID_HANDLE);
    if (stream->capture != NULL) return record_captured(event, stream, flags & EXTERNAL);
    struct op op = {.kind = OP_EMPTY};
    set_point(event, enqueue(stream, &op));
    return OK;
}

API CUresult cuEventRecord(handle_t event, handle_t stream)
{
    CALL(cuEventRecord, 0);
    return record(event, stream, 0);
}

API CUresult cuEventRecordWithFlags(handle_t event, handle_t stream, u32 flags)
{
    CALL(cuEventRecordWithFlags, 0);
    return record(event, stream, flags);
}

static CUresult wait_captured(struct stream *stream, const struct event *event, bool is_external)
{
    if (is_external) {
        struct op op = {.kind = OP_EXTERNAL_WAIT, .event = event->handle};
        return submit(stream, &op);
    }
    return refuse_work(stream, CAPTURE_ISOLATION);
}

API CUresult cuStreamWaitEvent(handle_t stream_handle, handle_t handle, u32 flags)
{
    CALL(cuStreamWaitEvent, 0);
    CUresult code;
    struct event *event = event_of(handle, &code);
    if (event == NULL) return code;
    struct stream *stream = work_stream(stream_handle, &code);
    if (stream == NULL) return code;
    if (event->capture_serial != 0) {
        return join_capture(stream, event->capture_serial, event->tails, event->num_tails);
    }
    if (stream->capture != NULL) return wait_captured(stream, event, flags & EXTERNAL);
    if (event->point == NULL || event->point->is_done) return OK;
    struct op op = {.kind = OP_WAIT, .point = keep_work(event->point)};
    return submit(stream, &op);
}

API CUresult cuEventSynchronize(handle_t handle)
{
    CALL(cuEventSynchronize, UNSAFE);
    CUresult code;
    const struct event *event = event_of(handle, &code);
    if (event == NULL) return code;
    if (event->capture_serial != 0) return CAPTURED_EVENT;
    struct context *context = event->context;
    if (event->point != NULL) {
        /* The event may be recorded anew, or destroyed, while this thread waits. */
        struct work *point = keep_work(event->point);
        wait_for(point);
        drop_work(point);
    }
    return context->lost;
}

API CUresult cuEventQuery(handle_t handle)
{
    CALL(cuEventQuery, UNSAFE);
    CUresult code;
    const struct event *event = event_of(handle, &code);
    if (event == NULL) return code;
    if (event->capture_serial != 0) return CAPTURED_EVENT;
    return event->point == NULL || event->point->is_done ? OK : NOT_READY;
}

API CUresult cuEventElapsedTime_v2(float *milliseconds, handle_t start, handle_t end)
{
    CALL(cuEventElapsedTime, 0);
    CUresult code;
    const struct event *first = event_of(start, &code);
    if (first == NULL) return code;
    const struct event *second = event_of(end, &code);
    if (second == NULL) return code;
    if ((first->flags | second->flags) & DISABLE_TIMING) return INVALID_HANDLE;
    if (first->point == NULL || second->point == NULL) return INVALID_HANDLE;
    if (!first->point->is_done || !second->point->is_done) return NOT_READY;
    *milliseconds = (float)((second->point->done_at - first->point->done_at) * 1e3);
    return OK;
}

API CUresult cuEventElapsedTime(float *milliseconds, handle_t start, handle_t end)
{
    return cuEventElapsedTime_v2(milliseconds, start, end);
}
