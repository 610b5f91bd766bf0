/* The functions by name and version, as cuda.bindings asks for them. */

#include <stdlib.h>
#include <string.h>

#include "symbols.h"

#define SINCE_LONG_AGO 2000

struct entry {
    const char *name;
    int since; /* the CUDA version that brought this form of the function */
    symbol function; /* NULL: a form that is not modelled */
};

#define EACH_SIMPLE(X)                                                                            \
    X(cuInit) X(cuDriverGetVersion) X(cuDeviceGet) X(cuDeviceGetCount) X(cuDeviceGetName)         \
    X(cuDeviceGetAttribute) X(cuDevicePrimaryCtxRetain) X(cuDevicePrimaryCtxGetState)             \
    X(cuCtxSetCurrent) X(cuCtxGetCurrent) X(cuCtxGetStreamPriorityRange) X(cuModuleLoadData)      \
    X(cuModuleLoadDataEx) X(cuModuleUnload) X(cuModuleGetFunction) X(cuFuncGetAttribute)          \
    X(cuFuncSetAttribute) X(cuMemFreeHost) X(cuMemHostAlloc) X(cuMemcpyAsync) X(cuMemsetD8Async)  \
    X(cuMemsetD16Async) X(cuMemsetD32Async) X(cuMemAllocAsync) X(cuMemFreeAsync)                  \
    X(cuStreamCreate) X(cuStreamCreateWithPriority) X(cuStreamGetDevice) X(cuStreamGetFlags)      \
    X(cuStreamGetPriority) X(cuStreamWaitEvent) X(cuStreamEndCapture) X(cuStreamIsCapturing)      \
    X(cuStreamQuery) X(cuStreamSynchronize) X(cuEventCreate) X(cuEventRecord)                     \
    X(cuEventRecordWithFlags) X(cuEventQuery) X(cuEventSynchronize) X(cuLaunchKernel)             \
    X(cuLaunchKernelEx) X(cuLaunchCooperativeKernel) X(cuGraphCreate) X(cuGraphDestroy) X(cuGraphGetNodes)                     \
    X(cuGraphNodeGetType) X(cuGraphAddChildGraphNode) X(cuGraphInstantiateWithFlags)              \
    X(cuGraphInstantiateWithParams) X(cuGraphExecDestroy) X(cuGraphUpload) X(cuGraphLaunch)       \
    X(cuGetErrorName) X(cuGetErrorString) X(cuGetExportTable)

/* name, version, exported name */
#define EACH_VERSIONED(X)                                                                         \
    X(cuDeviceTotalMem, 3020, cuDeviceTotalMem_v2)                                                \
    X(cuDeviceGetUuid, 9020, cuDeviceGetUuid_v2)                                                  \
    X(cuDevicePrimaryCtxRelease, 7000, cuDevicePrimaryCtxRelease_v2)                              \
    X(cuCtxCreate, 3020, cuCtxCreate_v2)                                                          \
    X(cuCtxCreate, 12050, cuCtxCreate_v4)                                                         \
    X(cuCtxDestroy, 4000, cuCtxDestroy_v2)                                                        \
    X(cuCtxPushCurrent, 4000, cuCtxPushCurrent_v2)                                                \
    X(cuCtxPopCurrent, 4000, cuCtxPopCurrent_v2)                                                  \
    X(cuCtxGetDevice, 2000, cuCtxGetDevice)                                                       \
    X(cuCtxSynchronize, 2000, cuCtxSynchronize)                                                   \
    X(cuMemGetInfo, 3020, cuMemGetInfo_v2)                                                        \
    X(cuMemAlloc, 3020, cuMemAlloc_v2)                                                            \
    X(cuMemFree, 3020, cuMemFree_v2)                                                              \
    X(cuMemAllocHost, 3020, cuMemAllocHost_v2)                                                    \
    X(cuMemcpyHtoD, 3020, cuMemcpyHtoD_v2)                                                        \
    X(cuMemcpyDtoH, 3020, cuMemcpyDtoH_v2)                                                        \
    X(cuMemcpyDtoD, 3020, cuMemcpyDtoD_v2)                                                        \
    X(cuMemcpyHtoDAsync, 3020, cuMemcpyHtoDAsync_v2)                                              \
    X(cuMemcpyDtoHAsync, 3020, cuMemcpyDtoHAsync_v2)                                              \
    X(cuMemcpyDtoDAsync, 3020, cuMemcpyDtoDAsync_v2)                                              \
    X(cuMemsetD8, 3020, cuMemsetD8_v2)                                                            \
    X(cuMemsetD32, 3020, cuMemsetD32_v2)                                                          \
    X(cuStreamDestroy, 4000, cuStreamDestroy_v2)                                                  \
    X(cuStreamGetCtx, 9020, cuStreamGetCtx)                                                       \
    X(cuStreamGetCtx, 12050, cuStreamGetCtx_v2)                                                   \
    X(cuStreamBeginCapture, 10010, cuStreamBeginCapture_v2)                                       \
    X(cuStreamGetCaptureInfo, 11030, cuStreamGetCaptureInfo_v2)                                   \
    X(cuStreamGetCaptureInfo, 12030, cuStreamGetCaptureInfo_v3)                                   \
    X(cuEventDestroy, 4000, cuEventDestroy_v2)                                                    \
    X(cuFuncGetParamInfo, 12040, cuFuncGetParamInfo)                                              \
    X(cuEventElapsedTime, 2000, cuEventElapsedTime)                                               \
    X(cuEventElapsedTime, 12080, cuEventElapsedTime_v2)                                           \
    X(cuGraphKernelNodeGetParams, 12000, cuGraphKernelNodeGetParams_v2)                           \
    X(cuGraphExecUpdate, 12000, cuGraphExecUpdate_v2)                                             \
    X(cuGraphExecKernelNodeSetParams, 12000, cuGraphExecKernelNodeSetParams_v2)                   \
    X(cuGetProcAddress, 12000, cuGetProcAddress_v2)

#define DECLARE_SIMPLE(name) void name(void);
#define DECLARE_VERSIONED(name, since, exported) void exported(void);
#define ENTER_SIMPLE(name) {#name, SINCE_LONG_AGO, name},
#define ENTER_VERSIONED(name, since, exported) {#name, since, exported},

EACH_SIMPLE(DECLARE_SIMPLE)
EACH_VERSIONED(DECLARE_VERSIONED)

static const struct entry ENTRIES[] = {
    EACH_SIMPLE(ENTER_SIMPLE)
    EACH_VERSIONED(ENTER_VERSIONED)
    {"cuCtxCreate", 11040, NULL},
    {"cuCtxGetDevice", 13000, NULL},
    {"cuCtxSynchronize", 13000, NULL},
};

/* NXRT_FAKE_MISSING lists functions that this driver shall not have, with commas between. */
static bool is_missing(const char *name)
{
    const char *list = getenv("NXRT_FAKE_MISSING");
    const size_t length = strlen(name);
    while (list != NULL && *list != '\0') {
        if (strncmp(list, name, length) == 0 && (list[length] == ',' || list[length] == '\0')) {
            return true;
        }
        list = strchr(list, ',');
        if (list != NULL) ++list;
    }
    return false;
}

symbol find_symbol(const char *name, int version)
{
    const struct entry *best = NULL;
    for (size_t i = 0; i < sizeof ENTRIES / sizeof *ENTRIES; ++i) {
        const struct entry *entry = &ENTRIES[i];
        if (entry->since > version || entry->since > driver_version) continue;
        if (strcmp(entry->name, name) != 0) continue;
        if (best == NULL || entry->since > best->since) best = entry;
    }
    return best == NULL || is_missing(name) ? NULL : best->function;
}
