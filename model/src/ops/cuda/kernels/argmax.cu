// The column of each row's largest entry; of equal ones the first. An entry that is not a number is never it,
// unless the whole row is: then column 0.
//
// Logits are LOGIT (bf16 or float) `(rows, columns)` with a leading dimension, results i32, a row each. A part of a
// row is PART columns; `values` and `columns_at` are `(rows, parts)`, each part's best. With `lengths`, i32 a row each,
// those are counted up by one: a decoded token is one more in its sequence.
// Compiled for LOGIT. Launch: argmax_parts grid (parts, rows), 256 threads; argmax one warp a row.

#include "common.cuh"

constexpr int PART = 4096;
constexpr int NONE = 0x7fffffff;

struct Best {
    float value;
    int column;
};

__device__ __forceinline__ Best better(Best a, Best b) {
    if (b.value > a.value || (b.value == a.value && b.column < a.column)) return b;
    return a;
}

__device__ __forceinline__ Best warp_best(Best best) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) {
        Best other;
        other.value = __shfl_xor_sync(ALL_LANES, best.value, offset);
        other.column = __shfl_xor_sync(ALL_LANES, best.column, offset);
        best = better(best, other);
    }
    return best;
}

extern "C" __global__ void __launch_bounds__(256)
argmax_parts(const LOGIT* logits, long long leading, float* values, int* columns_at, int columns) {
    __shared__ Best found[8];
    wait_for_earlier();
    let_later_start();
    const LOGIT* row = logits + blockIdx.y * leading;
    const int first = blockIdx.x * PART;
    const int end = min(columns, first + PART);
    Best best{-infinity(), NONE};
#pragma unroll 8
    for (int column = first + threadIdx.x; column < end; column += 256)
        best = better(best, Best{to_float(row[column]), column});
    best = warp_best(best);
    if (threadIdx.x % WARP == 0) found[threadIdx.x / WARP] = best;
    __syncthreads();
    if (threadIdx.x != 0) return;
#pragma unroll
    for (int warp = 1; warp < 8; ++warp) best = better(best, found[warp]);
    values[blockIdx.y * gridDim.x + blockIdx.x] = best.value;
    columns_at[blockIdx.y * gridDim.x + blockIdx.x] = best.column;
}

extern "C" __global__ void __launch_bounds__(32)
argmax(const float* values, const int* columns_at, int parts, int* result, int* lengths) {
    wait_for_earlier();
    let_later_start();
    Best best{-infinity(), NONE};
    for (int part = threadIdx.x; part < parts; part += WARP)
        best = better(best, Best{values[blockIdx.x * parts + part], columns_at[blockIdx.x * parts + part]});
    best = warp_best(best);
    if (threadIdx.x != 0) return;
    result[blockIdx.x] = best.column == NONE ? 0 : best.column;
    if (lengths != nullptr) lengths[blockIdx.x] += 1;
}
