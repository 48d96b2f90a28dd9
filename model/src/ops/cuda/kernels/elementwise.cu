// Sums and casts over `(rows, columns)` with a leading dimension each: gradient accumulation in place and
// copies between element types.
//
//   accumulate: target += source       cast: target = source
//
// Arithmetic is f32, rounded once. Compiled for TARGET and SOURCE (bf16 or float) and VECTOR (8 where
// columns, leading dimensions and pointers allow, else 1). Launch: blocks of 256 threads, one thread for
// each VECTOR elements of a row.

#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256)
accumulate(TARGET* target, long long target_leading, const SOURCE* source, long long source_leading,
           int rows, int columns) {
    const unsigned pieces = columns / VECTOR;
    const long long index = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= (long long)rows * pieces) return;
    const long long row = index / pieces;
    const int column = int(index % pieces) * VECTOR;
    float sum[VECTOR], change[VECTOR];
    load(target + row * target_leading + column, sum);
    load(source + row * source_leading + column, change);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) sum[i] += change[i];
    store(target + row * target_leading + column, sum);
}

extern "C" __global__ void __launch_bounds__(256)
cast(TARGET* target, long long target_leading, const SOURCE* source, long long source_leading, int rows,
     int columns) {
    const unsigned pieces = columns / VECTOR;
    const long long index = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= (long long)rows * pieces) return;
    const long long row = index / pieces;
    const int column = int(index % pieces) * VECTOR;
    float x[VECTOR];
    load(source + row * source_leading + column, x);
    store(target + row * target_leading + column, x);
}
