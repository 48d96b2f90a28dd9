/* A compiler that gives empty machine code. VERSION is 13000 for 13.0; RESULT is what compiling answers. */
#include <stddef.h>

int nvrtcVersion(int *major, int *minor) { *major = VERSION / 1000; *minor = VERSION % 1000 / 10; return 0; }
int nvrtcCreateProgram(void **program, const char *source, const char *name, int count, const char *const *headers,
                       const char *const *names) {
    *program = (void *)8;
    return 0;
}
int nvrtcCompileProgram(void *program, int count, const char *const *options) { return RESULT; }
int nvrtcGetProgramLogSize(void *program, size_t *size) { *size = 1; return 0; }
int nvrtcGetProgramLog(void *program, char *log) { *log = 0; return 0; }
int nvrtcGetCUBINSize(void *program, size_t *size) { *size = 1; return 0; }
int nvrtcGetCUBIN(void *program, char *cubin) { *cubin = 0; return 0; }
int nvrtcDestroyProgram(void **program) { *program = NULL; return 0; }
