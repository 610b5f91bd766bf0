/* What there is to know about the devices: an H200, near enough. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fake.h"

#define MAX_ATTRIBUTE 161

struct attribute {
    int key, value;
};

static const struct attribute ATTRIBUTES[] = {
    {1, 1024},        /* threads per block */
    {2, 1024},        /* block x, y, z */
    {3, 1024},
    {4, 64},
    {5, 2147483647},  /* grid x, y, z */
    {6, 65535},
    {7, 65535},
    {8, 49152},       /* shared memory per block */
    {9, 65536},       /* constant memory */
    {10, 32},         /* warp size */
    {11, 2147483647}, /* pitch */
    {12, 65536},      /* registers per block */
    {13, 1980000},    /* clock, kHz */
    {14, 512},        /* texture alignment */
    {15, 1},          /* copies overlap with kernels */
    {16, 132},        /* multiprocessors */
    {19, 1},          /* maps host memory */
    {31, 1},          /* concurrent kernels */
    {32, 1},          /* ECC */
    {36, 3201000},    /* memory clock, kHz */
    {37, 6144},       /* memory bus, bits */
    {38, 62914560},   /* L2 */
    {39, 2048},       /* threads per multiprocessor */
    {40, 3},          /* copy engines */
    {41, 1},          /* unified addressing */
    {75, 9},          /* compute capability */
    {76, 0},
    {78, 1},          /* stream priorities */
    {81, 233472},     /* shared memory per multiprocessor */
    {82, 65536},      /* registers per multiprocessor */
    {83, 1},          /* managed memory */
    {95, 1},          /* cooperative launch */
    {97, 232448},     /* shared memory per block, on request */
    {106, 32},        /* blocks per multiprocessor */
    {111, 1024},      /* shared memory the system keeps */
    {115, 1},         /* memory pools */
};

static u64 device_nbytes = 8ull << 30;
int driver_version = 13000;

__attribute__((constructor)) static void read_environment(void)
{
    const char *version = getenv("NXRT_FAKE_DRIVER_VERSION");
    if (version != NULL) driver_version = atoi(version);
}

API CUresult cuDriverGetVersion(int *version)
{
    CALL(cuDriverGetVersion, ANYTIME);
    *version = driver_version;
    return OK;
}

API CUresult cuDeviceGetCount(int *count)
{
    CALL(cuDeviceGetCount, SURVIVES);
    *count = num_devices;
    return OK;
}

API CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    CALL(cuDeviceGet, SURVIVES);
    if (ordinal < 0 || ordinal >= num_devices) return INVALID_DEVICE;
    *device = ordinal;
    return OK;
}

API CUresult cuDeviceGetName(char *name, int length, CUdevice device)
{
    CALL(cuDeviceGetName, SURVIVES);
    if (device < 0 || device >= num_devices) return INVALID_DEVICE;
    snprintf(name, (size_t)length, "Fake H200");
    return OK;
}

API CUresult cuDeviceTotalMem_v2(size_t *nbytes, CUdevice device)
{
    CALL(cuDeviceTotalMem, SURVIVES);
    if (device < 0 || device >= num_devices) return INVALID_DEVICE;
    *nbytes = device_nbytes;
    return OK;
}

API CUresult cuDeviceGetUuid_v2(unsigned char uuid[16], CUdevice device)
{
    CALL(cuDeviceGetUuid, SURVIVES);
    if (device < 0 || device >= num_devices) return INVALID_DEVICE;
    memcpy(uuid, "nxrt fake device", 16);
    uuid[15] = (unsigned char)('0' + device);
    return OK;
}

API CUresult cuDeviceGetAttribute(int *value, int key, CUdevice device)
{
    CALL(cuDeviceGetAttribute, SURVIVES);
    if (device < 0 || device >= num_devices) return INVALID_DEVICE;
    if (key < 1 || key > MAX_ATTRIBUTE) return INVALID_VALUE;
    *value = 0;
    for (size_t i = 0; i < sizeof ATTRIBUTES / sizeof *ATTRIBUTES; ++i) {
        if (ATTRIBUTES[i].key == key) *value = ATTRIBUTES[i].value;
    }
    return OK;
}
