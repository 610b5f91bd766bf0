/* Operations: what streams execute and graph nodes hold. */

#include <stdlib.h>
#include <string.h>

#include "fake.h"

static void clone_params(struct launch *launch)
{
    if (launch->params == NULL) return;
    const char *old = (const char *)launch->params;
    char *new = malloc(launch->params_nbytes);
    memcpy(new, old, launch->params_nbytes);
    launch->params = (void **)new;
    for (u32 i = 0; i < launch->num_params; ++i) {
        launch->params[i] = new + ((const char *)launch->params[i] - old);
    }
}

void op_clone(struct op *target, const struct op *source)
{
    *target = *source;
    switch (source->kind) {
    case OP_KERNEL:
        clone_params(&target->launch);
        break;
    case OP_GRAPH:
        target->program = clone_program(source->program);
        break;
    case OP_WAIT:
        keep_work(target->point);
        break;
    default:
        break; /* plain numbers; staged copies are of queues, which are not cloned */
    }
}

void op_destroy(struct op *op)
{
    switch (op->kind) {
    case OP_KERNEL:
        free(op->launch.params);
        break;
    case OP_COPY:
        free(op->copy.staged);
        break;
    case OP_GRAPH:
        drop_program(op->program);
        break;
    case OP_WAIT:
        drop_work(op->point);
        break;
    default:
        break;
    }
    op->kind = OP_EMPTY;
}

CUresult op_run(const struct op *op)
{
    switch (op->kind) {
    case OP_KERNEL:
        return run_launch(&op->launch);
    case OP_COPY:
        return run_copy(op);
    case OP_SET:
        return run_set(op);
    case OP_GRAPH:
        return run_program(op->program);
    case OP_FREE:
        return run_free(op->freed);
    case OP_WAIT:
        wait_for(op->point);
        return OK;
    default:
        return OK;
    }
}
