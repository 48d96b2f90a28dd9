// A linear layer for few rows, bound by reading the weights once: output = x · weightᵀ (+ residual).
//
// x is bf16 `(ROWS, in)`, weight bf16 `(out, in)`, output and residual bf16 `(ROWS, out)`, each with a
// leading dimension; sums are f32. A warp owns one row of the weight; x comes from the caches. Compiled for
// ROWS (1 to 8) and VECTOR (8 where `in`, leading dimensions and pointers allow, else 1). Launch: blocks of
// 256 threads, eight rows of the weight each.

#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256)
matvec(const bf16* x, long long x_leading, const bf16* weight, long long weight_leading, const bf16* residual,
       long long residual_leading, bf16* output, long long output_leading, int in, int out) {
    const int lane = threadIdx.x % WARP;
    const int row = blockIdx.x * 8 + threadIdx.x / WARP;
    if (row >= out) return;
    const bf16* w = weight + row * weight_leading;
    float sums[ROWS] = {};
#pragma unroll 4
    for (int at = lane * VECTOR; at < in; at += WARP * VECTOR) {
        float a[VECTOR];
        load(w + at, a);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            float b[VECTOR];
            load(x + r * x_leading + at, b);
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) sums[r] += a[i] * b[i];
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        float sum = warp_sum(sums[r]);
        if (lane != 0) continue;
        if (residual != nullptr) sum += to_float(residual[r * residual_leading + row]);
        output[r * output_leading + row] = to_bf16(sum);
    }
}
