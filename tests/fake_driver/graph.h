/* Graphs as the driver's callers see them. */
#ifndef GRAPH_H
#define GRAPH_H

#include "fake.h"

enum { TYPE_KERNEL, TYPE_COPY, TYPE_SET, TYPE_GRAPH = 4, TYPE_EMPTY, TYPE_WAIT, TYPE_RECORD };

struct kernel_node_params { /* CUDA_KERNEL_NODE_PARAMS_v2 */
    handle_t function;
    u32 grid[3];
    u32 block[3];
    u32 shared_nbytes;
    void **params;
    void **extra;
    handle_t kernel;
    handle_t context;
};
_Static_assert(sizeof(struct kernel_node_params) == 72, "as the driver's header lays it out");

struct node *node_of(handle_t handle); /* NULL and a violation when there is none */

#endif
