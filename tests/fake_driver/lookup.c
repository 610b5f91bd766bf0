/* How callers find functions, and what an error is called. */

#include <stddef.h>

#include "symbols.h"

enum { SYMBOL_FOUND, SYMBOL_NOT_FOUND };

struct named_error {
    CUresult code;
    const char *name;
};

static const struct named_error ERRORS[] = {
    {0, "CUDA_SUCCESS"},
    {1, "CUDA_ERROR_INVALID_VALUE"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY"},
    {3, "CUDA_ERROR_NOT_INITIALIZED"},
    {4, "CUDA_ERROR_DEINITIALIZED"},
    {100, "CUDA_ERROR_NO_DEVICE"},
    {101, "CUDA_ERROR_INVALID_DEVICE"},
    {200, "CUDA_ERROR_INVALID_IMAGE"},
    {201, "CUDA_ERROR_INVALID_CONTEXT"},
    {209, "CUDA_ERROR_NO_BINARY_FOR_GPU"},
    {400, "CUDA_ERROR_INVALID_HANDLE"},
    {401, "CUDA_ERROR_ILLEGAL_STATE"},
    {500, "CUDA_ERROR_NOT_FOUND"},
    {600, "CUDA_ERROR_NOT_READY"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS"},
    {709, "CUDA_ERROR_CONTEXT_IS_DESTROYED"},
    {719, "CUDA_ERROR_LAUNCH_FAILED"},
    {800, "CUDA_ERROR_NOT_PERMITTED"},
    {801, "CUDA_ERROR_NOT_SUPPORTED"},
    {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
    {901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"},
    {902, "CUDA_ERROR_STREAM_CAPTURE_MERGE"},
    {903, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED"},
    {904, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED"},
    {905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION"},
    {906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"},
    {907, "CUDA_ERROR_CAPTURED_EVENT"},
    {908, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD"},
    {910, "CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE"},
    {999, "CUDA_ERROR_UNKNOWN"},
};

static CUresult name_error(CUresult code, const char **name)
{
    *name = NULL;
    for (size_t i = 0; i < sizeof ERRORS / sizeof *ERRORS; ++i) {
        if (ERRORS[i].code == code) *name = ERRORS[i].name;
    }
    return *name == NULL ? INVALID_VALUE : OK;
}


API CUresult cuGetErrorName(CUresult code, const char **name)
{
    CALL(cuGetErrorName, ANYTIME);
    return name_error(code, name);
}

API CUresult cuGetErrorString(CUresult code, const char **text)
{
    CALL(cuGetErrorString, ANYTIME);
    return name_error(code, text);
}

/* Not counted: the bindings look hundreds of functions up, and no user's call does. */
API CUresult cuGetProcAddress_v2(const char *name, symbol *function, int version, u64 flags,
                                 int *status)
{
    (void)flags;
    *function = find_symbol(name, version);
    if (status != NULL) *status = *function == NULL ? SYMBOL_NOT_FOUND : SYMBOL_FOUND;
    return *function == NULL && status == NULL ? NOT_FOUND : OK;
}

API CUresult cuGetProcAddress(const char *name, symbol *function, int version, u64 flags)
{
    return cuGetProcAddress_v2(name, function, version, flags, NULL);
}

/* NVRTC asks for it and does not survive its absence. */
API CUresult cuGetExportTable(const void **table, const void *id)
{
    (void)id;
    *table = NULL;
    return NOT_SUPPORTED;
}
