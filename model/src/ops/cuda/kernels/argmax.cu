// The column of each row's largest entry; of equal ones the first. An entry that is not a number is never it,
// unless the whole row is: then column 0.
//
// Logits are LOGIT (bf16 or float) `(rows, columns)` with a leading dimension, results i32, a row each.
// Compiled for LOGIT. Launch: one block of 256 threads a row.

#include "common.cuh"

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
argmax(const LOGIT* logits, long long leading, int* result, int columns) {
    constexpr int NONE = 0x7fffffff;
    __shared__ Best found[8];
    const LOGIT* row = logits + blockIdx.x * leading;
    Best best{-infinity(), NONE};
    for (int column = threadIdx.x; column < columns; column += 256)
        best = better(best, Best{to_float(row[column]), column});
    best = warp_best(best);
    if (threadIdx.x % WARP == 0) found[threadIdx.x / WARP] = best;
    __syncthreads();
    if (threadIdx.x != 0) return;
#pragma unroll
    for (int warp = 1; warp < 8; ++warp) best = better(best, found[warp]);
    result[blockIdx.x] = best.column == NONE ? 0 : best.column;
}
