/* Modules and functions: which bytes load, and which names they have. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cubin.h"

#define FAKE_ARCH 90
#define DEFAULT_SHARED_NBYTES 49152
#define MAX_SHARED_NBYTES 232448

enum { MAX_THREADS, NUM_REGISTERS = 4, PTX_VERSION, BINARY_VERSION, MAX_DYNAMIC_SHARED = 8 };
enum { NUM_FUNCTION_ATTRIBUTES = 18 };

static CUresult check_image(const char *image, u64 *nbytes)
{
    if (image == NULL || memcmp(image, "\177ELF", 4) != 0) return INVALID_IMAGE;
    *nbytes = cubin_nbytes(image);
    if (*nbytes == 0) {
        violation("the image is damaged; a driver would crash or hang");
        return INVALID_IMAGE;
    }
    return cubin_arch(image) == FAKE_ARCH ? OK : NO_BINARY_FOR_GPU;
}

static CUresult load(handle_t *handle, const char *image)
{
    CUresult code;
    u64 nbytes;
    code = check_image(image, &nbytes);
    if (code != OK) return code;
    struct module *module = calloc(1, sizeof *module);
    module->context = current_context(&code);
    module->image = malloc(nbytes);
    memcpy(module->image, image, nbytes);
    module->nbytes = nbytes;
    module->handle = add_handle(MODULES, module);
    *handle = module->handle;
    return OK;
}

API CUresult cuModuleLoadData(handle_t *module, const char *image)
{
    CALL(cuModuleLoadData, CONTEXT);
    return load(module, image);
}

API CUresult cuModuleLoadDataEx(handle_t *module, const char *image, u32 num_options, void *options,
                                void *values)
{
    (void)num_options, (void)options, (void)values;
    CALL(cuModuleLoadDataEx, CONTEXT);
    return load(module, image);
}

static void unload(struct module *module)
{
    while (module->functions != NULL) {
        struct function *next = module->functions->next;
        drop_handle(module->functions->handle);
        free(module->functions);
        module->functions = next;
    }
    drop_handle(module->handle);
    free(module->image);
    free(module);
}

API CUresult cuModuleUnload(handle_t handle)
{
    CALL(cuModuleUnload, UNSAFE);
    struct module *module = object_of(handle, MODULES);
    if (module == NULL) return INVALID_HANDLE;
    if (module->context->lost != OK) return module->context->lost;
    drain_all(module->context);
    if (object_of(handle, MODULES) == NULL) return INVALID_HANDLE; /* unloaded while this waited */
    unload(module);
    return OK;
}

static void close_module(void *object, void *context)
{
    struct module *module = object;
    if (module->context == context) unload(module);
}

void close_modules(const struct context *context)
{
    each_object(MODULES, close_module, (void *)context);
}

static void take_params(struct function *function, const struct kernel *stand_in)
{
    const struct module *module = function->module;
    if (stand_in != NULL) {
        function->num_params = stand_in->num_params;
        memcpy(function->params, stand_in->params, sizeof function->params);
    }
    /* The code knows best; a stand-in may also be registered for a name that it does not have. */
    if (cubin_has_kernel(module->image, module->nbytes, function->name)) {
        function->num_params =
            cubin_params(module->image, module->nbytes, function->name, function->params);
    }
}

static struct function *get_function(struct module *module, const char *name)
{
    struct function *function = module->functions;
    while (function != NULL && strcmp(function->name, name) != 0) function = function->next;
    if (function != NULL) return function;
    const struct kernel *stand_in = find_kernel(name);
    if (strlen(name) >= sizeof function->name) return NULL;
    if (stand_in == NULL && !cubin_has_kernel(module->image, module->nbytes, name)) return NULL;
    function = calloc(1, sizeof *function);
    snprintf(function->name, sizeof function->name, "%s", name);
    function->module = module;
    function->max_shared_nbytes = DEFAULT_SHARED_NBYTES;
    take_params(function, stand_in);
    function->handle = add_handle(FUNCTIONS, function);
    function->next = module->functions;
    module->functions = function;
    return function;
}

API CUresult cuModuleGetFunction(handle_t *handle, handle_t module_handle, const char *name)
{
    CALL(cuModuleGetFunction, 0);
    struct module *module = object_of(module_handle, MODULES);
    if (module == NULL) return INVALID_HANDLE;
    const struct function *function = get_function(module, name);
    if (function == NULL) return NOT_FOUND;
    *handle = function->handle;
    return OK;
}

static int attribute_of(const struct function *function, int attribute)
{
    switch (attribute) {
    case MAX_THREADS:
        return 1024;
    case NUM_REGISTERS:
        return 32;
    case PTX_VERSION:
    case BINARY_VERSION:
        return FAKE_ARCH;
    case MAX_DYNAMIC_SHARED:
        return function->max_shared_nbytes;
    default:
        return 0;
    }
}

API CUresult cuFuncGetAttribute(int *value, int attribute, handle_t handle)
{
    CALL(cuFuncGetAttribute, 0);
    const struct function *function = object_of(handle, FUNCTIONS);
    if (function == NULL) return INVALID_HANDLE;
    if (attribute < 0 || attribute >= NUM_FUNCTION_ATTRIBUTES) return INVALID_VALUE;
    *value = attribute_of(function, attribute);
    return OK;
}

API CUresult cuFuncSetAttribute(handle_t handle, int attribute, int value)
{
    CALL(cuFuncSetAttribute, 0);
    struct function *function = object_of(handle, FUNCTIONS);
    if (function == NULL) return INVALID_HANDLE;
    if (attribute < MAX_DYNAMIC_SHARED || attribute >= NUM_FUNCTION_ATTRIBUTES) return INVALID_VALUE;
    if (attribute != MAX_DYNAMIC_SHARED) return OK;
    if (value < 0 || value > MAX_SHARED_NBYTES) return INVALID_VALUE;
    function->max_shared_nbytes = value;
    return OK;
}

API CUresult cuFuncGetParamInfo(handle_t handle, size_t index, size_t *offset, size_t *nbytes)
{
    CALL(cuFuncGetParamInfo, 0);
    const struct function *function = object_of(handle, FUNCTIONS);
    if (function == NULL) return INVALID_HANDLE;
    if (index >= function->num_params) return INVALID_VALUE;
    *offset = function->params[index].offset;
    if (nbytes != NULL) *nbytes = function->params[index].nbytes;
    return OK;
}
