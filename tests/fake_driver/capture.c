/* Recording: what a capturing stream collects, and what breaks a capture. */

#include <stdlib.h>
#include <string.h>

#include "fake.h"

enum { GLOBAL, THREAD_LOCAL, RELAXED };
enum { STATUS_NONE, STATUS_ACTIVE, STATUS_INVALIDATED };

#define NON_BLOCKING 1u

static struct capture *captures;
static long num_begun;
static __thread char thread_mark;

const void *this_thread(void) { return &thread_mark; }

void invalidate(struct capture *capture) { capture->is_invalid = true; }

/* Invalidate what an unsafe call on this thread breaks; say whether there was anything. */
bool refuse_unsafe(void)
{
    bool is_refused = false;
    for (struct capture *capture = captures; capture != NULL; capture = capture->next) {
        const bool is_own = capture->owner == this_thread();
        if (capture->mode == RELAXED || (capture->mode == THREAD_LOCAL && !is_own)) continue;
        invalidate(capture);
        is_refused = true;
    }
    return is_refused;
}

bool invalidate_context_captures(const struct context *context)
{
    bool is_any = false;
    for (struct capture *capture = captures; capture != NULL; capture = capture->next) {
        if (capture->origin->context != context) continue;
        invalidate(capture);
        is_any = true;
    }
    return is_any;
}

/* The legacy stream waits for every blocking stream, which cannot be while one is recorded. */
bool is_legacy_blocked(const struct context *context)
{
    bool is_blocked = false;
    for (struct capture *capture = captures; capture != NULL; capture = capture->next) {
        const struct stream *origin = capture->origin;
        if (origin->context != context || (origin->flags & NON_BLOCKING)) continue;
        invalidate(capture);
        is_blocked = true;
    }
    return is_blocked;
}

CUresult refuse_work(struct stream *stream, CUresult code)
{
    if (stream->capture != NULL) invalidate(stream->capture);
    return code;
}

CUresult capture_op(struct stream *stream, struct op *op)
{
    stream->tails[0] = append_node(stream->capture->program, op, stream->tails, stream->num_tails);
    stream->num_tails = 1;
    return OK;
}

static bool merge_tails(struct stream *stream, const u32 *tails, u32 num_tails)
{
    for (u32 i = 0; i < num_tails; ++i) {
        u32 known = 0;
        while (known < stream->num_tails && stream->tails[known] != tails[i]) ++known;
        if (known == MAX_TAILS) return false;
        stream->tails[known] = tails[i];
        if (known == stream->num_tails) ++stream->num_tails;
    }
    return true;
}

/* Make a stream wait for an event that was recorded in a capture. */
CUresult join_capture(struct stream *stream, long serial, const u32 *tails, u32 num_tails)
{
    struct capture *capture = captures;
    while (capture != NULL && capture->serial != serial) capture = capture->next;
    if (capture == NULL) return refuse_work(stream, CAPTURED_EVENT);
    if (stream->capture != NULL && stream->capture != capture) {
        invalidate(capture);
        return refuse_work(stream, CAPTURE_MERGE);
    }
    stream->capture = capture;
    if (!merge_tails(stream, tails, num_tails)) {
        violation("more than %d branches meet in one stream", MAX_TAILS);
        return refuse_work(stream, NOT_SUPPORTED);
    }
    return OK;
}

static void leave_capture(struct stream *stream, void *capture)
{
    if (stream->capture == capture) {
        stream->capture = NULL;
        stream->num_tails = 0;
    }
}

void discard_capture(struct capture *capture)
{
    each_stream(leave_capture, capture);
    struct capture **place = &captures;
    while (*place != capture) place = &(*place)->next;
    *place = capture->next;
    drop_program(capture->program);
    free(capture);
}

void abandon_captures(const struct context *context)
{
    for (struct capture *capture = captures, *next; capture != NULL; capture = next) {
        next = capture->next;
        if (capture->origin->context == context) discard_capture(capture);
    }
}

API CUresult cuStreamBeginCapture_v2(handle_t handle, int mode)
{
    CALL(cuStreamBeginCapture, 0);
    CUresult code;
    struct stream *stream = stream_of(handle, &code);
    if (stream == NULL) return code;
    if (mode < GLOBAL || mode > RELAXED) return INVALID_VALUE;
    if (is_legacy(stream)) return CAPTURE_UNSUPPORTED;
    if (stream->capture != NULL) return ILLEGAL_STATE;
    struct capture *capture = calloc(1, sizeof *capture);
    capture->serial = ++num_begun;
    capture->mode = mode;
    capture->owner = this_thread();
    capture->origin = stream;
    capture->program = new_program(stream->context);
    capture->next = captures;
    captures = capture;
    stream->capture = capture;
    stream->num_tails = 0;
    return OK;
}

/* Whether every node comes before one that the origin's next node would wait for. */
static bool is_joined(const struct capture *capture)
{
    const struct program *program = capture->program;
    const struct stream *origin = capture->origin;
    bool *is_reached = calloc(program->num_nodes + 1, sizeof *is_reached);
    for (u32 i = 0; i < origin->num_tails; ++i) is_reached[origin->tails[i]] = true;
    bool is_whole = true;
    for (u32 i = program->num_nodes; i-- > 0;) {
        const struct node *node = &program->nodes[i];
        is_whole = is_whole && is_reached[i];
        for (u32 j = 0; j < node->num_dependencies; ++j) is_reached[node->dependencies[j]] = true;
    }
    free(is_reached);
    return is_whole;
}

static CUresult end_code(const struct capture *capture)
{
    if (capture->mode != RELAXED && capture->owner != this_thread()) return CAPTURE_WRONG_THREAD;
    if (capture->is_invalid) return CAPTURE_INVALIDATED;
    return is_joined(capture) ? OK : CAPTURE_UNJOINED;
}

API CUresult cuStreamEndCapture(handle_t handle, handle_t *graph)
{
    CALL(cuStreamEndCapture, 0);
    *graph = 0;
    CUresult code;
    struct stream *stream = stream_of(handle, &code);
    if (stream == NULL) return code;
    struct capture *capture = stream->capture;
    if (capture == NULL) return ILLEGAL_STATE;
    if (stream != capture->origin) {
        invalidate(capture);
        return CAPTURE_UNMATCHED;
    }
    code = end_code(capture);
    if (code == OK) {
        ++capture->program->num_refs;
        *graph = publish_graph(capture->program);
    }
    /* Whatever is answered, and whichever thread asked, the capture is over. */
    discard_capture(capture);
    return code;
}

static CUresult read_status(handle_t handle, int *status, u64 *serial)
{
    CUresult code;
    const struct stream *stream = stream_of(handle, &code);
    if (stream == NULL) return code;
    const struct capture *capture = stream->capture;
    if (is_legacy(stream) && is_legacy_blocked(stream->context)) return CAPTURE_IMPLICIT;
    *status = capture == NULL ? STATUS_NONE
              : capture->is_invalid ? STATUS_INVALIDATED
                                    : STATUS_ACTIVE;
    if (serial != NULL) *serial = capture == NULL ? 0 : (u64)capture->serial;
    return OK;
}

API CUresult cuStreamIsCapturing(handle_t stream, int *status)
{
    CALL(cuStreamIsCapturing, 0);
    return read_status(stream, status, NULL);
}

/* The graph being built is not shown: a stream's nodes get their handles when the capture ends. */
API CUresult cuStreamGetCaptureInfo_v3(handle_t stream, int *status, u64 *serial, handle_t *graph,
                                       void **dependencies, void **edges, size_t *count)
{
    CALL(cuStreamGetCaptureInfo, 0);
    if (graph != NULL) *graph = 0;
    if (dependencies != NULL) *dependencies = NULL;
    if (edges != NULL) *edges = NULL;
    if (count != NULL) *count = 0;
    return read_status(stream, status, serial);
}

API CUresult cuStreamGetCaptureInfo_v2(handle_t stream, int *status, u64 *serial, handle_t *graph,
                                       void **dependencies, size_t *count)
{
    return cuStreamGetCaptureInfo_v3(stream, status, serial, graph, dependencies, NULL, count);
}
