// A linear layer for few rows, bound by reading the weights once, with what comes before and after it.
//
//   plain: output = n · weightᵀ (+ residual)
//   gated: output = silu(n · gateᵀ) · (n · weightᵀ)
//   n = x, or with NORM x · r · norm, r = 1 / sqrt(mean(x²) + epsilon), not rounded in between
//
// x is bf16 `(ROWS, in)`, weight and gate bf16 `(out, in)` with one leading dimension, norm f32 `(in)`, residual bf16
// and output OUTPUT `(ROWS, out)`; sums are f32. A warp owns one row of the weight (and of the gate); x and norm come
// from the caches. The first of the row's weights are asked for before the kernels queued earlier have ended.
// Compiled for ROWS (1 to 8), VECTOR (8 where `in`, leading dimensions and pointers allow, else 1), KIND (0 plain, 1
// NORM, 2 NORM and gated), OUTPUT (bf16 or float). Launch: blocks of 256 threads, eight rows of the weight each.

#include "common.cuh"

constexpr bool NORM = KIND > 0;
constexpr int LAYERS = KIND == 2 ? 2 : 1;
// Vectors of a row that are asked for early.
constexpr int AHEAD = KIND == 2 ? 4 : 8;

extern "C" __global__ void __launch_bounds__(256)
matvec(const bf16* x, long long x_leading, const float* norm, float epsilon, const bf16* weight, const bf16* gate,
       long long weight_leading, const bf16* residual, long long residual_leading, OUTPUT* output,
       long long output_leading, int in, int out) {
    const int lane = threadIdx.x % WARP;
    const int row = blockIdx.x * 8 + threadIdx.x / WARP;
    const long long at_row = min(row, out - 1) * weight_leading;
    const bf16* layers[2] = {weight + at_row, gate + at_row};
    Packed<VECTOR> ahead[AHEAD][LAYERS];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
        const int at = (i * WARP + lane) * VECTOR;
#pragma unroll
        for (int layer = 0; layer < LAYERS; ++layer)
            if (at < in) ahead[i][layer].read(layers[layer] + at);
    }
    wait_for_earlier();
    let_later_start();
    if (row >= out) return;
    float sums[LAYERS][ROWS] = {}, squares[ROWS] = {};
    auto add = [&](int at, const Packed<VECTOR> (&packed)[LAYERS]) {
        float w[LAYERS][VECTOR];
#pragma unroll
        for (int layer = 0; layer < LAYERS; ++layer) packed[layer].unpack(w[layer]);
        float scale[VECTOR];
        if constexpr (NORM) load(norm + at, scale);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            float a[VECTOR];
            load(x + r * x_leading + at, a);
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) {
                if constexpr (NORM) {
                    squares[r] += a[i] * a[i];
                    a[i] *= scale[i];
                }
#pragma unroll
                for (int layer = 0; layer < LAYERS; ++layer) sums[layer][r] += w[layer][i] * a[i];
            }
        }
    };
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
        const int at = (i * WARP + lane) * VECTOR;
        if (at < in) add(at, ahead[i]);
    }
#pragma unroll 4
    for (int at = (AHEAD * WARP + lane) * VECTOR; at < in; at += WARP * VECTOR) {
        Packed<VECTOR> packed[LAYERS];
#pragma unroll
        for (int layer = 0; layer < LAYERS; ++layer) packed[layer].read(layers[layer] + at);
        add(at, packed);
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const float factor = NORM ? rsqrtf(warp_sum(squares[r]) / float(in) + epsilon) : 1.0f;
        float sum = warp_sum(sums[0][r]) * factor;
        if constexpr (LAYERS == 2) {
            const float opening = warp_sum(sums[1][r]) * factor;
            sum *= opening / (1.0f + exp2_fast(-LOG2_E * opening));
        }
        if (lane != 0) continue;
        if (residual != nullptr) sum += to_float(residual[r * residual_leading + row]);
        store(output + r * output_leading + row, sum);
    }
}
