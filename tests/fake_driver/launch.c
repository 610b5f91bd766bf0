/* Launches: what is checked at the call, what is copied then, and how a kernel runs. */

#include <stdlib.h>
#include <string.h>

#include "fake.h"

#define MAX_BLOCK_THREADS 1024
#define NUM_MULTIPROCESSORS 132
#define MULTIPROCESSOR_THREADS 2048
#define MULTIPROCESSOR_SHARED_NBYTES 233472
#define SYSTEM_SHARED_NBYTES 1024 /* of each block */

static __thread const struct module *running_module;

struct launch_config { /* CUlaunchConfig */
    u32 grid[3];
    u32 block[3];
    u32 shared_nbytes;
    handle_t stream;
    void *attributes;
    u32 num_attributes;
};
_Static_assert(sizeof(struct launch_config) == 56, "as the driver's header lays it out");

static bool is_shape(const u32 *grid, const u32 *block)
{
    static const u32 max_grid[3] = {2147483647, 65535, 65535};
    static const u32 max_block[3] = {1024, 1024, 64};
    for (int i = 0; i < 3; ++i) {
        if (grid[i] == 0 || grid[i] > max_grid[i]) return false;
        if (block[i] == 0 || block[i] > max_block[i]) return false;
    }
    return (u64)block[0] * block[1] * block[2] <= MAX_BLOCK_THREADS;
}

static size_t slot(u32 nbytes) { return (nbytes + 7) / 8 * 8; }

/* The driver has read the values when the call returns; the caller may change them at once. */
static CUresult copy_params(struct launch *launch, const struct function *function, void **params)
{
    if (function->num_params == 0) return OK;
    if (params == NULL) {
        violation("%s takes %u parameters, none were given", function->name, function->num_params);
        return INVALID_VALUE;
    }
    launch->num_params = function->num_params;
    launch->params_nbytes = launch->num_params * sizeof(void *);
    for (u32 i = 0; i < launch->num_params; ++i) {
        launch->params_nbytes += slot(function->params[i].nbytes);
    }
    launch->params = calloc(1, launch->params_nbytes);
    char *value = (char *)(launch->params + launch->num_params);
    for (u32 i = 0; i < launch->num_params; ++i) {
        launch->params[i] = value;
        memcpy(value, params[i], function->params[i].nbytes);
        value += slot(function->params[i].nbytes);
    }
    return OK;
}

CUresult make_launch(struct launch *launch, handle_t function_handle, const u32 *grid,
                     const u32 *block, u32 shared_nbytes, void **params)
{
    const struct function *function = object_of(function_handle, FUNCTIONS);
    if (function == NULL) return INVALID_HANDLE;
    if (!is_shape(grid, block)) return INVALID_VALUE;
    if (shared_nbytes > (u32)function->max_shared_nbytes) return INVALID_VALUE;
    *launch = (struct launch){.function = function_handle, .shared_nbytes = shared_nbytes};
    memcpy(launch->grid, grid, sizeof launch->grid);
    memcpy(launch->block, block, sizeof launch->block);
    return copy_params(launch, function, params);
}

static CUresult launch_on(handle_t stream_handle, handle_t function, const u32 *grid,
                          const u32 *block, u32 shared_nbytes, void **params, void **extra)
{
    CUresult code;
    struct stream *stream = work_stream(stream_handle, &code);
    if (stream == NULL) return code;
    if (extra != NULL) {
        violation("parameters in a buffer are not modelled");
        return refuse_work(stream, NOT_SUPPORTED);
    }
    struct op op = {.kind = OP_KERNEL};
    code = make_launch(&op.launch, function, grid, block, shared_nbytes, params);
    return code == OK ? submit(stream, &op) : refuse_work(stream, code);
}

API CUresult cuLaunchKernel(handle_t function, u32 grid_x, u32 grid_y, u32 grid_z, u32 block_x,
                            u32 block_y, u32 block_z, u32 shared_nbytes, handle_t stream,
                            void **params, void **extra)
{
    CALL(cuLaunchKernel, 0);
    const u32 grid[3] = {grid_x, grid_y, grid_z};
    const u32 block[3] = {block_x, block_y, block_z};
    return launch_on(stream, function, grid, block, shared_nbytes, params, extra);
}

/* Attributes such as a cluster's size change how a kernel runs, which no stand-in sees. */
API CUresult cuLaunchKernelEx(const struct launch_config *config, handle_t function, void **params,
                              void **extra)
{
    CALL(cuLaunchKernelEx, 0);
    if (config == NULL) return INVALID_VALUE;
    return launch_on(config->stream, function, config->grid, config->block, config->shared_nbytes,
                     params, extra);
}

/* All blocks must be resident at once: as many a multiprocessor as their shared memory allows. */
static bool is_resident(const u32 *grid, const u32 *block, u32 shared_nbytes)
{
    const u32 by_threads = MULTIPROCESSOR_THREADS / (block[0] * block[1] * block[2]);
    const u32 by_shared = MULTIPROCESSOR_SHARED_NBYTES / (shared_nbytes + SYSTEM_SHARED_NBYTES);
    const u32 num_each = by_threads < by_shared ? by_threads : by_shared;
    return (u64)grid[0] * grid[1] * grid[2] <= (u64)NUM_MULTIPROCESSORS * num_each;
}

API CUresult cuLaunchCooperativeKernel(handle_t function, u32 grid_x, u32 grid_y, u32 grid_z,
                                       u32 block_x, u32 block_y, u32 block_z, u32 shared_nbytes,
                                       handle_t stream, void **params)
{
    CALL(cuLaunchCooperativeKernel, 0);
    const u32 grid[3] = {grid_x, grid_y, grid_z};
    const u32 block[3] = {block_x, block_y, block_z};
    if (is_shape(grid, block) && !is_resident(grid, block, shared_nbytes)) {
        CUresult code;
        struct stream *own = work_stream(stream, &code);
        return own == NULL ? code : refuse_work(own, COOPERATIVE_LAUNCH_TOO_LARGE);
    }
    return launch_on(stream, function, grid, block, shared_nbytes, params, NULL);
}

static bool takes_same(const struct kernel *kernel, const struct function *function)
{
    if (kernel->num_params != function->num_params) return false;
    for (u32 i = 0; i < kernel->num_params; ++i) {
        if (kernel->params[i].nbytes != function->params[i].nbytes) return false;
    }
    return true;
}

CUresult run_launch(const struct launch *launch)
{
    const struct function *function = object_of(launch->function, FUNCTIONS);
    if (function == NULL) return ILLEGAL_ADDRESS; /* its module is unloaded */
    count_run(function->name);
    const struct kernel *kernel = find_kernel(function->name);
    if (kernel == NULL) return OK;
    if (!takes_same(kernel, function)) {
        violation("the stand-in of %s takes other parameters than the code", function->name);
        return NOT_SUPPORTED;
    }
    const stand_in run = kernel->run;
    running_module = function->module; /* unloading waits for this stream */
    is_in_kernel = true;
    drop_lock();
    const CUresult code = run(launch->params, launch->grid, launch->block, launch->shared_nbytes);
    take_lock();
    is_in_kernel = false;
    return code;
}

/* Inside a stand-in: the image its kernel is from, and its length. */
API size_t fake_running_image(const char **image)
{
    if (!is_in_kernel) return 0;
    *image = running_module->image;
    return running_module->nbytes;
}
