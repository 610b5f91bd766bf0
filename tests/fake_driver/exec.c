/* Executable graphs: made from a graph, launched, updated. */

#include <stdlib.h>
#include <string.h>

#include "graph.h"

enum { UPDATED, UPDATE_ERROR, TOPOLOGY_CHANGED, NODE_TYPE_CHANGED, FUNCTION_CHANGED };
enum { PARAMETERS_CHANGED = 5 };

struct exec {
    handle_t handle;
    struct context *context;
    struct program *program; /* what is launched keeps it; changes are made to a copy */
    struct work *last_launch;
};

struct update_result { /* CUgraphExecUpdateResultInfo */
    int result;
    handle_t error_node;
    handle_t error_from_node;
};
_Static_assert(sizeof(struct update_result) == 24, "as the driver's header lays it out");

struct instantiate_params { /* CUDA_GRAPH_INSTANTIATE_PARAMS */
    u64 flags;
    handle_t upload_stream;
    handle_t error_node;
    int result;
};
_Static_assert(sizeof(struct instantiate_params) == 32, "as the driver's header lays it out");

static CUresult instantiate(handle_t *handle, handle_t graph_handle)
{
    const struct graph *graph = object_of(graph_handle, GRAPHS);
    if (graph == NULL) return INVALID_HANDLE;
    CUresult code;
    struct exec *exec = calloc(1, sizeof *exec);
    exec->context = current_context(&code);
    exec->program = clone_program(graph->program);
    exec->handle = add_handle(EXECS, exec);
    *handle = exec->handle;
    return OK;
}

API CUresult cuGraphInstantiateWithFlags(handle_t *exec, handle_t graph, u64 flags)
{
    (void)flags;
    CALL(cuGraphInstantiate, CONTEXT | UNSAFE);
    return instantiate(exec, graph);
}

API CUresult cuGraphInstantiateWithParams(handle_t *exec, handle_t graph,
                                          struct instantiate_params *params)
{
    CALL(cuGraphInstantiateWithParams, CONTEXT | UNSAFE);
    params->error_node = 0;
    const CUresult code = instantiate(exec, graph);
    params->result = code != OK;
    return code;
}

static struct exec *exec_of(handle_t handle, CUresult *code)
{
    struct exec *exec = object_of(handle, EXECS);
    *code = exec == NULL ? INVALID_HANDLE : exec->context->lost;
    return *code == OK ? exec : NULL;
}

/* Executable graphs are never freed: a launching thread may come back to one after a wait. */
static void destroy(struct exec *exec)
{
    drop_work(exec->last_launch);
    exec->last_launch = NULL;
    drop_program(exec->program);
    drop_handle(exec->handle);
}

API CUresult cuGraphExecDestroy(handle_t handle)
{
    CALL(cuGraphExecDestroy, UNSAFE);
    CUresult code;
    struct exec *exec = exec_of(handle, &code);
    if (exec == NULL) return code;
    destroy(exec);
    return OK;
}

static void close_exec(void *object, void *context)
{
    struct exec *exec = object;
    if (exec->context == context) destroy(exec);
}

void close_execs(const struct context *context)
{
    each_object(EXECS, close_exec, (void *)context);
}

API CUresult cuGraphUpload(handle_t handle, handle_t stream_handle)
{
    CALL(cuGraphUpload, 0);
    CUresult code;
    if (exec_of(handle, &code) == NULL) return code;
    struct stream *stream = work_stream(stream_handle, &code);
    if (stream == NULL) return code;
    return stream->capture == NULL ? OK : refuse_work(stream, CAPTURE_UNSUPPORTED);
}

static void wait_on(struct stream *stream, struct work *point)
{
    if (point == NULL || point->is_done || point->stream == stream) return;
    struct op op = {.kind = OP_WAIT, .point = keep_work(point)};
    drop_work(enqueue(stream, &op));
}

static void wait_for_events(struct stream *stream, const struct program *program)
{
    for (u32 i = 0; i < program->num_nodes; ++i) {
        const struct op *op = &program->nodes[i].op;
        if (op->kind != OP_EXTERNAL_WAIT) continue;
        const struct event *event = object_of(op->event, EVENTS);
        if (event != NULL) wait_on(stream, event->point);
    }
}

static void record_events(struct work *launch, const struct program *program)
{
    for (u32 i = 0; i < program->num_nodes; ++i) {
        const struct op *op = &program->nodes[i].op;
        if (op->kind == OP_EXTERNAL_RECORD) set_event_point(op->event, launch);
    }
}

static void launch(struct exec *exec, struct stream *stream)
{
    struct program *program = exec->program;
    program->num_refs += 2; /* the work's, and this function's, which may have to wait */
    wait_on(stream, exec->last_launch); /* an executable graph never runs beside itself */
    wait_for_events(stream, program);
    struct op op = {.kind = OP_GRAPH, .program = program};
    struct work *work = enqueue(stream, &op);
    record_events(work, program);
    drop_work(exec->last_launch);
    exec->last_launch = work;
    drop_program(program);
}

API CUresult cuGraphLaunch(handle_t handle, handle_t stream_handle)
{
    CALL(cuGraphLaunch, 0);
    CUresult code;
    struct exec *exec = exec_of(handle, &code);
    if (exec == NULL) return code;
    struct stream *stream = work_stream(stream_handle, &code);
    if (stream == NULL) return code;
    /* A card refuses this, though the documentation speaks of a child graph. */
    if (stream->capture != NULL) return refuse_work(stream, CAPTURE_UNSUPPORTED);
    launch(exec, stream);
    return OK;
}

static int compare_op(const struct op *old, const struct op *new)
{
    if (node_type(old) != node_type(new)) return NODE_TYPE_CHANGED;
    if (old->kind == OP_GRAPH && old->program->num_nodes != new->program->num_nodes) {
        return TOPOLOGY_CHANGED;
    }
    const bool is_other_way =
        old->kind == OP_COPY && (old->copy.from != new->copy.from || old->copy.to != new->copy.to);
    return is_other_way ? PARAMETERS_CHANGED : UPDATED;
}

static int compare_node(const struct node *old, const struct node *new)
{
    const size_t nbytes = old->num_dependencies * sizeof *old->dependencies;
    const bool has_same_edges = old->num_dependencies == new->num_dependencies &&
                                memcmp(old->dependencies, new->dependencies, nbytes) == 0;
    return has_same_edges ? compare_op(&old->op, &new->op) : TOPOLOGY_CHANGED;
}

static void compare(const struct program *old, const struct program *new,
                    struct update_result *result)
{
    if (old->num_nodes != new->num_nodes) {
        result->result = TOPOLOGY_CHANGED;
        return;
    }
    for (u32 i = 0; result->result == UPDATED && i < old->num_nodes; ++i) {
        result->result = compare_node(&old->nodes[i], &new->nodes[i]);
        if (result->result != UPDATED) result->error_node = new->nodes[i].handle;
    }
}

/* What was launched before runs as it was. Nodes keep the handles of the graph they came from. */
static void replace_program(struct exec *exec, struct program *program)
{
    for (u32 i = 0; i < program->num_nodes; ++i) {
        program->nodes[i].handle = exec->program->nodes[i].handle;
    }
    drop_program(exec->program);
    exec->program = program;
}

API CUresult cuGraphExecUpdate_v2(handle_t handle, handle_t graph_handle,
                                  struct update_result *result)
{
    CALL(cuGraphExecUpdate, 0);
    CUresult code;
    *result = (struct update_result){.result = UPDATE_ERROR};
    struct exec *exec = exec_of(handle, &code);
    if (exec == NULL) return code;
    const struct graph *graph = object_of(graph_handle, GRAPHS);
    if (graph == NULL) return INVALID_HANDLE;
    result->result = UPDATED;
    compare(exec->program, graph->program, result);
    if (result->result != UPDATED) return EXEC_UPDATE_FAILURE;
    replace_program(exec, clone_program(graph->program));
    return OK;
}

API CUresult cuGraphExecKernelNodeSetParams_v2(handle_t handle, handle_t node_handle,
                                               const struct kernel_node_params *params)
{
    CALL(cuGraphExecKernelNodeSetParams, 0);
    CUresult code;
    struct exec *exec = exec_of(handle, &code);
    if (exec == NULL) return code;
    u32 index = 0;
    const struct program *program = exec->program;
    while (index < program->num_nodes && program->nodes[index].handle != node_handle) ++index;
    if (index == program->num_nodes) return INVALID_VALUE;
    if (program->nodes[index].op.kind != OP_KERNEL) return INVALID_VALUE;
    struct op op = {.kind = OP_KERNEL};
    code = make_launch(&op.launch, params->function, params->grid, params->block,
                       params->shared_nbytes, params->params);
    if (code != OK) return code;
    replace_program(exec, clone_program(program));
    op_destroy(&exec->program->nodes[index].op);
    exec->program->nodes[index].op = op;
    return OK;
}
