/* As much of libcuda.so.1 as opening a device and asking what is free needs; the environment says how it answers.
   FALSE_VERSION (13000), FALSE_DEVICES, FALSE_MAJOR (compute capability), FALSE_FREE_MIB, FALSE_NO_ROOM;
   with FALSE_TELLS it says on which devices there are contexts. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static long setting(const char *name) { const char *value = getenv(name); return value ? atol(value) : 0; }
int cuDriverGetVersion(int *version) { *version = setting("FALSE_VERSION"); return 0; }
int cuInit(unsigned flags) { return setting("FALSE_DEVICES") ? 0 : 100; }
int cuDeviceGetCount(int *count) { *count = setting("FALSE_DEVICES"); return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceGetName(char *name, int length, int device) { strncpy(name, "False GPU", length); return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 75 ? setting("FALSE_MAJOR") : attribute == 16 ? 132 : 0;
    return 0;
}
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = 80ull << 30; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = (void *)8;
    if (setting("FALSE_TELLS")) { printf("a context on %d\n", device); fflush(stdout); }
    return setting("FALSE_NO_ROOM") ? 2 : 0;
}
int cuDevicePrimaryCtxRelease_v2(int device) { return 0; }
int cuCtxSetCurrent(void *context) { return 0; }
int cuMemGetInfo_v2(size_t *free, size_t *total) {
    *free = (size_t)setting("FALSE_FREE_MIB") << 20;
    *total = 80ull << 30;
    return 0;
}
int cuStreamCreate(void **stream, unsigned flags) { return 999; }
/* Never called: opening ends before. */
#ifndef FALSE_IS_DAMAGED
#define UNUSED(name) int name(void) { return 999; }
UNUSED(cuCtxGetStreamPriorityRange) UNUSED(cuEventCreate) UNUSED(cuEventDestroy_v2)
UNUSED(cuEventElapsedTime_v2) UNUSED(cuEventQuery) UNUSED(cuEventRecord)
UNUSED(cuFuncSetAttribute) UNUSED(cuGraphDestroy) UNUSED(cuGraphExecDestroy)
UNUSED(cuGraphInstantiateWithFlags) UNUSED(cuGraphLaunch) UNUSED(cuLaunchKernel)
UNUSED(cuLaunchKernelEx) UNUSED(cuMemAlloc_v2) UNUSED(cuMemFreeHost)
UNUSED(cuMemFree_v2) UNUSED(cuMemHostAlloc) UNUSED(cuMemcpyDtoHAsync_v2)
UNUSED(cuMemcpyHtoDAsync_v2) UNUSED(cuModuleGetFunction) UNUSED(cuModuleLoadData)
UNUSED(cuModuleUnload) UNUSED(cuStreamBeginCapture_v2) UNUSED(cuStreamCreateWithPriority)
UNUSED(cuStreamDestroy_v2) UNUSED(cuStreamEndCapture) UNUSED(cuStreamIsCapturing)
UNUSED(cuStreamWaitEvent)
#endif
