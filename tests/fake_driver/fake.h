/* The test double of the CUDA driver: what its parts share.
 *
 * One lock guards everything. An exported driver function opens with CALL(...), which takes the
 * lock for the rest of that function, counts the call, and answers planted faults. Kernels run with
 * the lock released: a stand-in written in Python needs the interpreter, whose lock another thread
 * may hold while it waits here.
 */
#ifndef FAKE_H
#define FAKE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define API __attribute__((visibility("default")))
#define MAX_TAILS 32
#define MAX_PARAMS 64

typedef int CUresult;
typedef int CUdevice;
typedef uint64_t CUdeviceptr;
typedef uint64_t handle_t;
typedef uint32_t u32;
typedef uint64_t u64;

enum {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    NO_BINARY_FOR_GPU = 209,
    INVALID_HANDLE = 400,
    ILLEGAL_STATE = 401,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    CONTEXT_IS_DESTROYED = 709,
    NOT_PERMITTED = 800,
    COOPERATIVE_LAUNCH_TOO_LARGE = 720,
    NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
    CAPTURE_MERGE = 902,
    CAPTURE_UNMATCHED = 903,
    CAPTURE_UNJOINED = 904,
    CAPTURE_ISOLATION = 905,
    CAPTURE_IMPLICIT = 906,
    CAPTURED_EVENT = 907,
    CAPTURE_WRONG_THREAD = 908,
    EXEC_UPDATE_FAILURE = 910,
};

/* ---- control.c: calls, faults, violations */

enum {
    ANYTIME = 1,  /* works before cuInit */
    CONTEXT = 2,  /* needs a current context that is not lost */
    UNSAFE = 4,   /* refused on a thread that captures; the capture is lost */
    SURVIVES = 8, /* works in a lost context */
};

struct call {
    const char *name;
    int flags;
    long count;
    bool is_listed;
    struct call *next;
};

CUresult call_begin(struct call *call);
void call_end(const int *ignored);

#define CALL(function, how)                                      \
    static struct call this_call = {.name = #function, .flags = (how)}; \
    int locked __attribute__((cleanup(call_end))) = 1;           \
    const CUresult refusal = call_begin(&this_call);             \
    if (refusal != OK) return refusal

void violation(const char *format, ...) __attribute__((format(printf, 1, 2)));
const char *current_call(void);
void take_lock(void);
void drop_lock(void);
void wait_for_change(void);
void announce_change(void);
extern long num_calls;
extern bool is_lazy;
extern __thread bool is_in_kernel;

/* ---- handles.c: numbers that stand for objects and are never used twice */

enum kind { CONTEXTS, STREAMS, EVENTS, MODULES, GRAPHS, EXECS, FUNCTIONS, NODES, NUM_KINDS };

handle_t add_handle(enum kind kind, void *object);
void *object_of(handle_t handle, enum kind kind); /* NULL and a violation when there is none */
void *find_object(handle_t handle, enum kind kind); /* NULL when there is none */
void drop_handle(handle_t handle);
void each_object(enum kind kind, void (*visit)(void *object, void *argument), void *argument);
long live_handles(enum kind kind);

/* ---- context.c */

struct context {
    handle_t handle;
    CUdevice device;
    bool is_primary;
    CUresult lost; /* every later call answers this */
    struct stream *legacy; /* stands for the handles 0, 1 and 2; made when first used */
};

struct context *current_context(CUresult *code);
void lose_context(struct context *context, CUresult code);
extern int num_devices;
extern int driver_version;
extern bool is_initialized;

/* ---- operations: what a stream executes and what a graph node holds */

enum op_kind {
    OP_EMPTY,
    OP_KERNEL,
    OP_COPY,
    OP_SET,
    OP_GRAPH,
    OP_FREE,
    OP_WAIT,            /* of a queue: for a point of another stream */
    OP_EXTERNAL_WAIT,   /* of a node: for an event of outside the graph */
    OP_EXTERNAL_RECORD, /* of a node */
};

struct launch {
    handle_t function;
    u32 grid[3];
    u32 block[3];
    u32 shared_nbytes;
    u32 num_params;
    size_t params_nbytes;
    void **params; /* one block of that size: the addresses, then the values */
};

struct op {
    enum op_kind kind;
    union {
        struct launch launch;
        struct {
            u64 target, source;
            size_t nbytes;
            char from, to; /* 'D' device, 'H' host */
            void *staged;  /* owned copy of a pageable source */
        } copy;
        struct {
            u64 target;
            size_t width, count;
            u32 value;
        } set;
        handle_t event;
        struct work *point;
        struct program *program;
        u64 freed;
    };
};

void op_clone(struct op *target, const struct op *source);
void op_destroy(struct op *op);
CUresult op_run(const struct op *op);

/* ---- stream.c: queues and who runs them */

struct work {
    long sequence;
    struct op op;
    struct stream *stream;
    struct work *next;
    int num_refs;
    bool is_done;
    double done_at;
};

struct stream {
    handle_t handle; /* 0: a legacy stream */
    struct context *context;
    u32 flags;
    int priority;
    struct work *first, *last;
    long running; /* the sequence of the work that a thread executes, 0 for none */
    bool is_destroyed;
    struct stream *next;
    struct capture *capture;
    u32 tails[MAX_TAILS]; /* nodes the next captured one depends on */
    u32 num_tails;
};

struct stream *stream_of(handle_t handle, CUresult *code);      /* for any call */
struct stream *work_stream(handle_t handle, CUresult *code);    /* for enqueueing calls */
CUresult submit(struct stream *stream, struct op *op);          /* takes over what op owns */
struct work *enqueue(struct stream *stream, struct op *op);     /* the caller drops the work */
void each_stream(void (*visit)(struct stream *stream, void *argument), void *argument);
void drain(struct stream *stream, long sequence);
void drain_stream(struct stream *stream);
void wait_for(const struct work *point);
bool is_legacy(const struct stream *stream);
void drain_all(const struct context *context); /* NULL: of every context */
void close_streams(const struct context *context);
struct work *keep_work(struct work *work);
void drop_work(struct work *work);
double now(void);

/* ---- capture.c */

struct capture {
    long serial;
    int mode;
    const void *owner; /* identifies the thread */
    struct stream *origin;
    bool is_invalid;
    struct program *program;
    struct capture *next;
};

const void *this_thread(void);
bool refuse_unsafe(void);
bool invalidate_context_captures(const struct context *context);
bool is_legacy_blocked(const struct context *context);
void invalidate(struct capture *capture);
CUresult refuse_work(struct stream *stream, CUresult code);
CUresult capture_op(struct stream *stream, struct op *op);
CUresult join_capture(struct stream *stream, long serial, const u32 *tails, u32 num_tails);
void discard_capture(struct capture *capture);
void abandon_captures(const struct context *context);

/* ---- event.c */

struct event {
    handle_t handle;
    struct context *context;
    u32 flags;
    struct work *point;
    long capture_serial; /* 0: last recorded outside a capture */
    u32 tails[MAX_TAILS];
    u32 num_tails;
};

void set_event_point(handle_t event, struct work *work);
void close_events(const struct context *context);

/* ---- memory.c, copies.c, blocks.c */

CUresult run_copy(const struct op *op);
CUresult run_set(const struct op *op);
CUresult run_free(u64 address);
void close_memory(const struct context *context);

/* ---- module.c, launch.c and kernels.c */

typedef int (*stand_in)(void **params, const u32 *grid, const u32 *block,
                        u32 shared_nbytes);

struct param {
    u32 offset, nbytes;
};

struct kernel {
    char name[128];
    u32 num_params;
    struct param params[MAX_PARAMS];
    stand_in run;
    long num_runs;
    struct kernel *next;
};

struct module {
    handle_t handle;
    struct context *context;
    char *image;
    size_t nbytes;
    struct function *functions;
};

struct function {
    handle_t handle;
    struct module *module;
    char name[128];
    int max_shared_nbytes;
    u32 num_params; /* as the code has them, or else its stand-in */
    struct param params[MAX_PARAMS];
    struct function *next;
};

struct kernel *find_kernel(const char *name); /* NULL: it may be launched, and does nothing */
CUresult make_launch(struct launch *launch, handle_t function, const u32 *grid, const u32 *block,
                     u32 shared_nbytes, void **params);
CUresult run_launch(const struct launch *launch);
void count_run(const char *name);
void close_modules(const struct context *context);

/* ---- graph.c and exec.c */

struct node {
    handle_t handle; /* in the graph it was captured into; kept by executable copies */
    struct op op;
    u32 num_dependencies;
    u32 *dependencies;
};

struct program {
    int num_refs;
    struct context *context;
    u32 num_nodes;
    struct node *nodes;
};

struct graph {
    handle_t handle;
    struct program *program;
};

struct node_place {
    struct graph *graph;
    u32 index;
};

struct program *new_program(struct context *context);
u32 append_node(struct program *program, struct op *op, const u32 *dependencies, u32 count);
struct program *clone_program(const struct program *source);
void drop_program(struct program *program);
handle_t publish_graph(struct program *program);
int node_type(const struct op *op);
CUresult run_program(struct program *program);
void close_execs(const struct context *context);

#endif
