/* Devices, contexts, and the stack of current contexts that each thread has. */

#include <stdlib.h>
#include <string.h>

#include "fake.h"

#define MAX_DEVICES 16
#define MAX_DEPTH 256

struct primary {
    struct context *context;
    long num_users;
};

int num_devices = 1;
bool is_initialized;

static struct primary primaries[MAX_DEVICES];
static __thread handle_t stack[MAX_DEPTH];
static __thread int depth;

__attribute__((constructor)) static void read_environment(void)
{
    const char *count = getenv("NXRT_FAKE_DEVICES");
    if (count != NULL) num_devices = atoi(count);
    if (num_devices < 0 || num_devices > MAX_DEVICES) num_devices = 1;
}

static bool is_device(CUdevice device) { return device >= 0 && device < num_devices; }

static struct context *new_context(CUdevice device, bool is_primary)
{
    struct context *context = calloc(1, sizeof *context);
    context->device = device;
    context->is_primary = is_primary;
    context->handle = add_handle(CONTEXTS, context);
    return context;
}

/* What a context owns goes with it; the driver does the same. The order matters: work first. */
static void close_context(struct context *context)
{
    abandon_captures(context);
    drain_all(context);
    close_execs(context);
    close_events(context);
    close_modules(context);
    close_streams(context);
    close_memory(context);
    drop_handle(context->handle); /* never freed: a waiting thread may come back to it */
}

struct context *current_context(CUresult *code)
{
    *code = OK;
    if (depth == 0 || stack[depth - 1] == 0) {
        *code = INVALID_CONTEXT;
        return NULL;
    }
    struct context *context = find_object(stack[depth - 1], CONTEXTS);
    if (context == NULL) *code = CONTEXT_IS_DESTROYED;
    return context;
}

void lose_context(struct context *context, CUresult code)
{
    if (context->lost == OK) context->lost = code;
}

static CUresult push(handle_t handle)
{
    if (depth == MAX_DEPTH) {
        violation("%d contexts are on this thread's stack", depth);
        return INVALID_VALUE;
    }
    stack[depth++] = handle;
    return OK;
}

API CUresult cuDevicePrimaryCtxRetain(handle_t *context, CUdevice device)
{
    CALL(cuDevicePrimaryCtxRetain, SURVIVES);
    if (!is_device(device)) return INVALID_DEVICE;
    struct primary *primary = &primaries[device];
    if (primary->num_users++ == 0) primary->context = new_context(device, true);
    *context = primary->context->handle;
    return OK;
}

API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    CALL(cuDevicePrimaryCtxRelease, SURVIVES);
    if (!is_device(device)) return INVALID_DEVICE;
    struct primary *primary = &primaries[device];
    if (primary->num_users == 0) {
        violation("the primary context was released more often than retained");
        return INVALID_CONTEXT;
    }
    if (--primary->num_users == 0) {
        close_context(primary->context);
        primary->context = NULL;
    }
    return OK;
}

API CUresult cuDevicePrimaryCtxGetState(CUdevice device, u32 *flags, int *is_active)
{
    CALL(cuDevicePrimaryCtxGetState, SURVIVES);
    if (!is_device(device)) return INVALID_DEVICE;
    *flags = 0;
    *is_active = primaries[device].num_users > 0;
    return OK;
}

API CUresult cuCtxCreate_v2(handle_t *context, u32 flags, CUdevice device)
{
    (void)flags;
    CALL(cuCtxCreate, SURVIVES);
    if (!is_device(device)) return INVALID_DEVICE;
    *context = new_context(device, false)->handle;
    return push(*context);
}

API CUresult cuCtxCreate_v4(handle_t *context, void *params, u32 flags, CUdevice device)
{
    (void)params;
    return cuCtxCreate_v2(context, flags, device);
}

API CUresult cuCtxDestroy_v2(handle_t handle)
{
    CALL(cuCtxDestroy, SURVIVES);
    struct context *context = object_of(handle, CONTEXTS);
    if (context == NULL) return INVALID_CONTEXT;
    if (context->is_primary) {
        violation("a primary context is released, not destroyed");
        return INVALID_CONTEXT;
    }
    if (depth > 0 && stack[depth - 1] == handle) --depth;
    close_context(context);
    return OK;
}

API CUresult cuCtxPushCurrent_v2(handle_t handle)
{
    CALL(cuCtxPushCurrent, SURVIVES);
    if (object_of(handle, CONTEXTS) == NULL) return INVALID_CONTEXT;
    return push(handle);
}

API CUresult cuCtxPopCurrent_v2(handle_t *handle)
{
    CALL(cuCtxPopCurrent, SURVIVES);
    if (depth == 0) return INVALID_CONTEXT;
    --depth;
    if (handle != NULL) *handle = stack[depth];
    return OK;
}

API CUresult cuCtxSetCurrent(handle_t handle)
{
    CALL(cuCtxSetCurrent, SURVIVES);
    if (handle == 0) {
        if (depth > 0) --depth;
        return OK;
    }
    if (object_of(handle, CONTEXTS) == NULL) return INVALID_CONTEXT;
    if (depth == 0) return push(handle);
    stack[depth - 1] = handle;
    return OK;
}

API CUresult cuCtxGetCurrent(handle_t *handle)
{
    CALL(cuCtxGetCurrent, SURVIVES);
    *handle = depth == 0 ? 0 : stack[depth - 1];
    return OK;
}

API CUresult cuCtxGetDevice(CUdevice *device)
{
    CALL(cuCtxGetDevice, CONTEXT | SURVIVES);
    CUresult code;
    *device = current_context(&code)->device;
    return OK;
}

API CUresult cuCtxSynchronize(void)
{
    CALL(cuCtxSynchronize, CONTEXT);
    CUresult code;
    const struct context *context = current_context(&code);
    /* The one call that harms the captures of other threads. */
    if (invalidate_context_captures(context)) return CAPTURE_UNSUPPORTED;
    drain_all(context);
    return context->lost;
}

static void lose(void *object, void *code) { lose_context(object, *(const CUresult *)code); }

static void restore(void *object, void *ignored)
{
    (void)ignored;
    ((struct context *)object)->lost = OK;
}

/* Lose every context as a fault of a kernel does; 0 makes them usable again. */
API void fake_lose_contexts(int code)
{
    take_lock();
    each_object(CONTEXTS, code == OK ? restore : lose, &code);
    drop_lock();
}

/* How deep this thread's stack of contexts is; a caller that pushed and did not pop shows here. */
API int fake_stack_depth(void) { return depth; }
