/* Matrix products that are accepted and not computed. VERSION is 130000 for 13.0.0. */
#include <stddef.h>

static int made(void **handle) { *handle = (void *)8; return 0; }
size_t cublasLtGetVersion(void) { return VERSION; }
int cublasLtCreate(void **handle) { return made(handle); }
int cublasLtDestroy(void *handle) { return 0; }
int cublasLtMatmulDescCreate(void **description, int compute, int scale) { return made(description); }
int cublasLtMatmulDescDestroy(void *description) { return 0; }
int cublasLtMatmulDescSetAttribute(void *description, int attribute, const void *value, size_t bytes) { return 0; }
int cublasLtMatrixLayoutCreate(void **layout, int type, unsigned long rows, unsigned long columns, long leading) {
    return made(layout);
}
int cublasLtMatrixLayoutDestroy(void *layout) { return 0; }
int cublasLtMatmulPreferenceCreate(void **preference) { return made(preference); }
int cublasLtMatmulPreferenceDestroy(void *preference) { return 0; }
int cublasLtMatmulPreferenceSetAttribute(void *preference, int attribute, const void *value, size_t bytes) { return 0; }
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *description, void *a, void *b, void *c, void *d,
                                   void *preference, int asked, void *found, int *count) {
    *count = asked;
    return 0;
}
int cublasLtMatmul(void *handle, void *description, const void *alpha, const void *a, void *a_layout, const void *b,
                   void *b_layout, const void *beta, const void *c, void *c_layout, void *d, void *d_layout,
                   const void *algorithm, void *workspace, size_t bytes, void *stream) {
    return 0;
}
