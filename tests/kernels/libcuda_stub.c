/* What Triton asks of NVIDIA's driver: every call succeeds and does nothing, and launches are counted. */
#include <stddef.h>
#include <string.h>

typedef unsigned long long Pointer;
long launches = 0;

#define OK(name, ...) int name(__VA_ARGS__) { return 0; }
#define GIVES(name, type, value, ...) int name(type *out, ##__VA_ARGS__) { *out = (type)(value); return 0; }

OK(cuInit, unsigned flags)
GIVES(cuDriverGetVersion, int, 13000)
GIVES(cuDeviceGet, int, 0, int ordinal)
GIVES(cuDeviceGetCount, int, 1)
GIVES(cuDeviceGetAttribute, int, 232448, int attribute, int device)
GIVES(cuDevicePrimaryCtxRetain, void *, 16, int device)
GIVES(cuCtxGetCurrent, void *, 16)
OK(cuCtxSetCurrent, void *context)
OK(cuCtxGetDevice, int *device)
OK(cuCtxSetLimit, int limit, size_t value)
GIVES(cuCtxGetLimit, size_t, 0, int limit)
GIVES(cuModuleLoadData, void *, 32, const void *image)
OK(cuModuleUnload, void *module)
GIVES(cuModuleGetFunction, void *, 48, void *module, const char *name)
OK(cuFuncSetAttribute, void *function, int attribute, int value)
OK(cuFuncSetCacheConfig, void *function, int config)
GIVES(cuOccupancyMaxActiveClusters, int, 1, void *function, const void *config)
OK(cuTensorMapEncodeTiled, void)
OK(cuTensorMapEncodeIm2col, void)

int cuFuncGetAttribute(int *value, int attribute, void *function) {
    *value = attribute == 4 ? 64 : attribute == 0 ? 1024 : 0; /* registers; threads of a program */
    return 0;
}

int cuGetErrorString(int error, const char **text) {
    *text = "stub";
    return 0;
}

int cuLaunchKernelEx(const void *config, void *function, void **arguments, void **extra) {
    launches++;
    return 0;
}

OK(cuLaunchKernel, void)

int cuPointerGetAttribute(void *data, int attribute, Pointer pointer) {
    *(Pointer *)data = pointer;
    return 0;
}

int cuPointerGetAttributes(unsigned count, int *attributes, void **data, Pointer pointer) {
    for (unsigned i = 0; i < count; i++) *(Pointer *)data[i] = pointer;
    return 0;
}

int cuStreamIsCapturing(void *stream, int *status) {
    *status = 0;
    return 0;
}
