/* Graphs: the nodes that a capture recorded. */

#include <stdlib.h>
#include <string.h>

#include "graph.h"

struct program *new_program(struct context *context)
{
    struct program *program = calloc(1, sizeof *program);
    program->num_refs = 1;
    program->context = context;
    return program;
}

u32 append_node(struct program *program, struct op *op, const u32 *dependencies, u32 count)
{
    const u32 index = program->num_nodes++;
    program->nodes = realloc(program->nodes, program->num_nodes * sizeof *program->nodes);
    if (program->nodes == NULL) abort();
    struct node *node = &program->nodes[index];
    *node = (struct node){.op = *op, .num_dependencies = count};
    node->dependencies = malloc((count + 1) * sizeof *dependencies);
    memcpy(node->dependencies, dependencies, count * sizeof *dependencies);
    return index;
}

struct program *clone_program(const struct program *source)
{
    struct program *program = new_program(source->context);
    for (u32 i = 0; i < source->num_nodes; ++i) {
        const struct node *node = &source->nodes[i];
        struct op op;
        op_clone(&op, &node->op);
        append_node(program, &op, node->dependencies, node->num_dependencies);
        program->nodes[i].handle = node->handle;
    }
    return program;
}

void drop_program(struct program *program)
{
    if (--program->num_refs > 0) return;
    for (u32 i = 0; i < program->num_nodes; ++i) {
        op_destroy(&program->nodes[i].op);
        free(program->nodes[i].dependencies);
    }
    free(program->nodes);
    free(program);
}

/* The order of recording is one in which every node comes after those it depends on. */
CUresult run_program(struct program *program)
{
    CUresult code = OK;
    for (u32 i = 0; code == OK && i < program->num_nodes; ++i) {
        code = op_run(&program->nodes[i].op);
    }
    return code;
}

handle_t publish_graph(struct program *program)
{
    struct graph *graph = calloc(1, sizeof *graph);
    graph->program = program;
    for (u32 i = 0; i < program->num_nodes; ++i) {
        struct node_place *place = calloc(1, sizeof *place);
        *place = (struct node_place){graph, i};
        program->nodes[i].handle = add_handle(NODES, place);
    }
    graph->handle = add_handle(GRAPHS, graph);
    return graph->handle;
}

int node_type(const struct op *op)
{
    switch (op->kind) {
    case OP_KERNEL:
        return TYPE_KERNEL;
    case OP_COPY:
        return TYPE_COPY;
    case OP_SET:
        return TYPE_SET;
    case OP_GRAPH:
        return TYPE_GRAPH;
    case OP_EXTERNAL_WAIT:
        return TYPE_WAIT;
    case OP_EXTERNAL_RECORD:
        return TYPE_RECORD;
    default:
        return TYPE_EMPTY;
    }
}

struct node *node_of(handle_t handle)
{
    const struct node_place *place = object_of(handle, NODES);
    return place == NULL ? NULL : &place->graph->program->nodes[place->index];
}

API CUresult cuGraphCreate(handle_t *graph, u32 flags)
{
    CALL(cuGraphCreate, SURVIVES);
    if (flags != 0) return INVALID_VALUE;
    CUresult code;
    *graph = publish_graph(new_program(current_context(&code)));
    return OK;
}

API CUresult cuGraphDestroy(handle_t handle)
{
    CALL(cuGraphDestroy, SURVIVES);
    struct graph *graph = object_of(handle, GRAPHS);
    if (graph == NULL) return INVALID_HANDLE;
    for (u32 i = 0; i < graph->program->num_nodes; ++i) {
        const handle_t node = graph->program->nodes[i].handle;
        free(find_object(node, NODES));
        drop_handle(node);
    }
    drop_program(graph->program);
    drop_handle(handle);
    free(graph);
    return OK;
}

API CUresult cuGraphGetNodes(handle_t handle, handle_t *nodes, size_t *count)
{
    CALL(cuGraphGetNodes, SURVIVES);
    const struct graph *graph = object_of(handle, GRAPHS);
    if (graph == NULL) return INVALID_HANDLE;
    const size_t num_nodes = graph->program->num_nodes;
    if (nodes == NULL) {
        *count = num_nodes;
        return OK;
    }
    for (size_t i = 0; i < *count; ++i) {
        nodes[i] = i < num_nodes ? graph->program->nodes[i].handle : 0;
    }
    if (*count > num_nodes) *count = num_nodes;
    return OK;
}

API CUresult cuGraphNodeGetType(handle_t handle, int *type)
{
    CALL(cuGraphNodeGetType, SURVIVES);
    const struct node *node = node_of(handle);
    if (node == NULL) return INVALID_HANDLE;
    *type = node_type(&node->op);
    return OK;
}

API CUresult cuGraphKernelNodeGetParams_v2(handle_t handle, struct kernel_node_params *params)
{
    CALL(cuGraphKernelNodeGetParams, SURVIVES);
    const struct node *node = node_of(handle);
    if (node == NULL) return INVALID_HANDLE;
    if (node->op.kind != OP_KERNEL) return INVALID_VALUE;
    const struct launch *launch = &node->op.launch;
    *params = (struct kernel_node_params){
        .function = launch->function,
        .shared_nbytes = launch->shared_nbytes,
        .params = launch->params,
    };
    memcpy(params->grid, launch->grid, sizeof params->grid);
    memcpy(params->block, launch->block, sizeof params->block);
    return OK;
}

/* A capture makes no such node; it is how a caller nests one recorded graph in another. */
API CUresult cuGraphAddChildGraphNode(handle_t *node, handle_t graph_handle,
                                      const handle_t *dependencies, size_t count,
                                      handle_t child_handle)
{
    CALL(cuGraphAddChildGraphNode, SURVIVES);
    struct graph *graph = object_of(graph_handle, GRAPHS);
    const struct graph *child = object_of(child_handle, GRAPHS);
    if (graph == NULL || child == NULL) return INVALID_HANDLE;
    u32 indices[MAX_TAILS];
    if (count > MAX_TAILS) return NOT_SUPPORTED;
    for (size_t i = 0; i < count; ++i) {
        const struct node_place *place = object_of(dependencies[i], NODES);
        if (place == NULL || place->graph != graph) return INVALID_VALUE;
        indices[i] = place->index;
    }
    struct op op = {.kind = OP_GRAPH, .program = clone_program(child->program)};
    const u32 index = append_node(graph->program, &op, indices, (u32)count);
    struct node_place *place = calloc(1, sizeof *place);
    *place = (struct node_place){graph, index};
    *node = graph->program->nodes[index].handle = add_handle(NODES, place);
    return OK;
}
