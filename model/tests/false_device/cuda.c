/* A driver whose one device is the host's memory: copies are done at once, kernels are only counted. What a test
 * wants of it is in the environment: kernels from the FALSE_HANG_FROMth on never end. A program that then queues more
 * than the queue holds ends with the exit code 77: a driver lets it wait for ever. Built with DOWNLOADS_ARE_ZEROS it
 * answers zeros, which every token, loss and norm may be, whatever a kernel that computes nothing has left there. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, NOT_READY = 600, QUEUE = 1024 };
static long launched;
/* The stream whose kernels are captured, and how many they are. Its own: another's kernels run. */
static void *capturing;
static long captured;

/* Kernels that have ended or will. */
static long ending(void) {
    const char *value = getenv("FALSE_HANG_FROM");
    return value ? atol(value) : launched;
}

int cuDriverGetVersion(int *version) { *version = 13000; return SUCCESS; }
int cuInit(unsigned flags) { return SUCCESS; }
int cuDeviceGetCount(int *count) { *count = 1; return SUCCESS; }
int cuDeviceGet(int *device, int index) { *device = index; return SUCCESS; }
int cuDeviceGetName(char *name, int length, int device) { strncpy(name, "False GPU", length); return SUCCESS; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 75 ? 8 : attribute == 16 ? 4 : 0;
    return SUCCESS;
}
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = 8ull << 30; return SUCCESS; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)8; return SUCCESS; }
int cuDevicePrimaryCtxRelease_v2(int device) { return SUCCESS; }
int cuCtxSetCurrent(void *context) { return SUCCESS; }
int cuMemGetInfo_v2(size_t *free, size_t *total) { *free = *total = 8ull << 30; return SUCCESS; }
int cuMemAlloc_v2(unsigned long long *address, size_t bytes) {
    void *memory = aligned_alloc(512, (bytes + 511) / 512 * 512);
    *address = (unsigned long long)memory;
    return memory ? SUCCESS : 2;
}
int cuMemFree_v2(unsigned long long address) { free((void *)address); return SUCCESS; }
int cuMemHostAlloc(void **memory, size_t bytes, unsigned flags) { *memory = malloc(bytes); return SUCCESS; }
int cuMemFreeHost(void *memory) { free(memory); return SUCCESS; }
int cuMemcpyHtoDAsync_v2(unsigned long long to, const void *from, size_t bytes, void *stream) {
    memcpy((void *)to, from, bytes);
    return SUCCESS;
}
int cuMemcpyDtoHAsync_v2(void *to, unsigned long long from, size_t bytes, void *stream) {
#ifdef DOWNLOADS_ARE_ZEROS
    memset(to, 0, bytes);
#else
    memcpy(to, (void *)from, bytes);
#endif
    return SUCCESS;
}
int cuMemsetD8Async(unsigned long long address, unsigned char value, size_t bytes, void *stream) {
    memset((void *)address, value, bytes);
    return SUCCESS;
}
int cuStreamCreate(void **stream, unsigned flags) { *stream = malloc(1); return SUCCESS; }
int cuStreamCreateWithPriority(void **stream, unsigned flags, int priority) { return cuStreamCreate(stream, flags); }
int cuCtxGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return SUCCESS; }
int cuStreamWaitEvent(void *stream, void *event, unsigned flags) { return SUCCESS; }
int cuStreamDestroy_v2(void *stream) { free(stream); return SUCCESS; }
int cuStreamIsCapturing(void *stream, int *status) { *status = stream == capturing; return SUCCESS; }
int cuStreamBeginCapture_v2(void *stream, int mode) {
    if (capturing) return 901; // CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, for want of a better one
    capturing = stream;
    captured = 0;
    return SUCCESS;
}
int cuStreamEndCapture(void *stream, long **graph) {
    capturing = NULL;
    *graph = malloc(sizeof **graph);
    **graph = captured;
    return SUCCESS;
}
int cuGraphInstantiateWithFlags(long **executable, long *graph, unsigned long long flags) {
    *executable = malloc(sizeof **executable);
    **executable = *graph;
    return SUCCESS;
}
int cuGraphLaunch(long *executable, void *stream) { launched += *executable; return SUCCESS; }
int cuGraphDestroy(long *graph) { free(graph); return SUCCESS; }
int cuGraphExecDestroy(long *executable) { free(executable); return SUCCESS; }
int cuEventCreate(long **event, unsigned flags) { *event = calloc(1, sizeof **event); return SUCCESS; }
int cuEventRecord(long *event, void *stream) { *event = launched; return SUCCESS; }
int cuEventQuery(long *event) { return *event <= ending() ? SUCCESS : NOT_READY; }
int cuEventElapsedTime_v2(float *milliseconds, long *begin, long *end) {
    *milliseconds = *end - *begin;
    return SUCCESS;
}
int cuEventDestroy_v2(long *event) { free(event); return SUCCESS; }
int cuModuleLoadData(void **module, const void *image) { *module = (void *)24; return SUCCESS; }
int cuModuleGetFunction(void **function, void *module, const char *name) { *function = (void *)32; return SUCCESS; }
int cuModuleUnload(void *module) { return SUCCESS; }
int cuFuncSetAttribute(void *function, int attribute, int value) { return SUCCESS; }
int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **parameters, void **extra) {
    if (stream == capturing) {
        ++captured;
        return SUCCESS;
    }
    if (++launched - ending() > QUEUE) _exit(77);
    return SUCCESS;
}
int cuLaunchKernelEx(void) { return 999; }
