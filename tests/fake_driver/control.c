/* The lock, the count and trace of calls, planted faults, and the list of violations. */

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fake.h"

#define TRACE_LENGTH 65536
#define MAX_VIOLATIONS 256
#define VIOLATION_LENGTH 256

struct fault {
    char call[64]; /* empty: any call */
    long countdown;
    CUresult code;
    bool is_lasting;
    struct fault *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct call *calls;
static struct fault *faults;
static const char *trace[TRACE_LENGTH];
static long trace_length;
static char violations[MAX_VIOLATIONS][VIOLATION_LENGTH];
static long num_violations;
static pid_t initialized_pid;
static __thread const char *call_name = "";

long num_calls;
bool is_lazy;
__thread bool is_in_kernel;

void take_lock(void) { pthread_mutex_lock(&lock); }

void drop_lock(void) { pthread_mutex_unlock(&lock); }

void wait_for_change(void) { pthread_cond_wait(&changed, &lock); }

void announce_change(void) { pthread_cond_broadcast(&changed); }

/* A child forked while another thread held the lock would wait for ever. */
static void renew_lock(void)
{
    const pthread_mutex_t fresh = PTHREAD_MUTEX_INITIALIZER;
    lock = fresh;
}

__attribute__((constructor)) static void watch_forks(void)
{
    pthread_atfork(NULL, NULL, renew_lock);
}

const char *current_call(void) { return call_name; }

void violation(const char *format, ...)
{
    va_list arguments;
    if (num_violations < MAX_VIOLATIONS) {
        char *text = violations[num_violations];
        const int used = snprintf(text, VIOLATION_LENGTH, "%s: ", call_name);
        va_start(arguments, format);
        vsnprintf(text + used, VIOLATION_LENGTH - used, format, arguments);
        va_end(arguments);
    }
    ++num_violations;
}

static void list_call(struct call *call)
{
    if (!call->is_listed) {
        call->is_listed = true;
        call->next = calls;
        calls = call;
    }
    ++call->count;
    ++num_calls;
    trace[trace_length++ % TRACE_LENGTH] = call->name;
}

static CUresult planted_fault(const char *name)
{
    for (struct fault **place = &faults; *place != NULL;) {
        struct fault *fault = *place;
        const bool matches = fault->call[0] == '\0' || strcmp(fault->call, name) == 0;
        if (matches && --fault->countdown <= 0) {
            const CUresult code = fault->code;
            if (!fault->is_lasting) {
                *place = fault->next;
                free(fault);
            }
            return code;
        }
        place = &fault->next;
    }
    return OK;
}

static CUresult refuse(const struct call *call)
{
    if (is_in_kernel) {
        violation("called from inside a kernel");
        return NOT_PERMITTED;
    }
    if (!is_initialized && !(call->flags & ANYTIME)) return NOT_INITIALIZED;
    CUresult code = OK;
    const struct context *context = current_context(&code);
    if (call->flags & CONTEXT) {
        if (context == NULL) return code;
    }
    if (context != NULL && context->lost != OK && !(call->flags & (SURVIVES | ANYTIME))) {
        return context->lost;
    }
    if ((call->flags & UNSAFE) && refuse_unsafe()) return CAPTURE_UNSUPPORTED;
    return OK;
}

CUresult call_begin(struct call *call)
{
    const bool is_child = initialized_pid != 0 && getpid() != initialized_pid;
    /* The guard of CALL drops the lock whatever is answered. */
    take_lock();
    call_name = call->name;
    list_call(call);
    if (is_child) return NOT_INITIALIZED;
    const CUresult planted = planted_fault(call->name);
    return planted != OK ? planted : refuse(call);
}

void call_end(const int *ignored)
{
    (void)ignored;
    drop_lock();
}

API CUresult cuInit(u32 flags)
{
    CALL(cuInit, ANYTIME);
    if (flags != 0) return INVALID_VALUE;
    if (num_devices == 0) return NO_DEVICE;
    is_initialized = true;
    initialized_pid = getpid();
    return OK;
}

/* ---- the control functions; a prefix keeps them apart from the driver's */

API void fake_fail(const char *call, long nth, int code, int is_lasting)
{
    struct fault *fault = calloc(1, sizeof *fault);
    snprintf(fault->call, sizeof fault->call, "%s", call == NULL ? "" : call);
    fault->countdown = nth;
    fault->code = code;
    fault->is_lasting = is_lasting != 0;
    take_lock();
    fault->next = faults;
    faults = fault;
    drop_lock();
}

API void fake_clear_faults(void)
{
    take_lock();
    while (faults != NULL) {
        struct fault *next = faults->next;
        free(faults);
        faults = next;
    }
    drop_lock();
}

API long fake_num_faults(void)
{
    long count = 0;
    take_lock();
    for (const struct fault *fault = faults; fault != NULL; fault = fault->next) ++count;
    drop_lock();
    return count;
}

API void fake_clear_counts(void)
{
    take_lock();
    for (struct call *call = calls; call != NULL; call = call->next) call->count = 0;
    num_calls = 0;
    trace_length = 0;
    drop_lock();
}

API long fake_num_calls(const char *name)
{
    long count = name == NULL ? num_calls : 0;
    take_lock();
    for (const struct call *call = calls; name != NULL && call != NULL; call = call->next) {
        if (strcmp(call->name, name) == 0) count += call->count;
    }
    drop_lock();
    return count;
}

API long fake_trace_length(void) { return trace_length; }

/* Return the name of a call, NULL where it is older than what is kept. */
API const char *fake_trace_name(long index)
{
    const char *name = NULL;
    take_lock();
    if (index >= 0 && index < trace_length && index >= trace_length - TRACE_LENGTH) {
        name = trace[index % TRACE_LENGTH];
    }
    drop_lock();
    return name;
}

API long fake_num_violations(void) { return num_violations; }

API const char *fake_violation(long index)
{
    return index >= 0 && index < MAX_VIOLATIONS ? violations[index] : "";
}

API void fake_clear_violations(void)
{
    take_lock();
    num_violations = 0;
    drop_lock();
}

API void fake_set_lazy(int lazy)
{
    take_lock();
    is_lazy = lazy != 0;
    if (!is_lazy) drain_all(NULL);
    drop_lock();
}

API void fake_run_pending(void)
{
    take_lock();
    drain_all(NULL);
    drop_lock();
}

API long fake_live_handles(int kind)
{
    take_lock();
    const long count = kind >= 0 && kind < NUM_KINDS ? live_handles((enum kind)kind) : -1;
    drop_lock();
    return count;
}
