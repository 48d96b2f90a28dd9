// Sums over rows, column by column: a bias's gradient, and what calibration wants to know of activations.
//
//   column_sums:        partial[chunk] = Σ x over the chunk's rows; add_partials: target += Σ_chunks partial
//   column_magnitudes:  magnitudes[sequence] = Σ |x|, squares[sequence] = Σ x² over the sequence's tokens
//
// x is ELEMENT (bf16 or float) `(rows, columns)` with a leading dimension; results are f32 and contiguous.
// Each is summed in an order that depends on the shape alone. Launch: blocks of 256 threads; grid
// (ceil(columns / 32), chunks or sequences), for add_partials (ceil(columns / 32)).

#include "common.cuh"

// Of a block's eight warps, in order; valid in the first warp.
__device__ __forceinline__ float over_warps(float x, float (&sums)[8][WARP]) {
    const int lane = threadIdx.x % WARP;
    __syncthreads();
    sums[threadIdx.x / WARP][lane] = x;
    __syncthreads();
    x = sums[0][lane];
#pragma unroll
    for (int warp = 1; warp < 8; ++warp) x += sums[warp][lane];
    return x;
}

extern "C" __global__ void __launch_bounds__(256)
column_sums(const ELEMENT* x, long long leading, float* partial, int rows, int columns, int rows_a_chunk) {
    __shared__ float sums[8][WARP];
    const int column = blockIdx.x * WARP + threadIdx.x % WARP;
    const int first = blockIdx.y * rows_a_chunk;
    const int end = min(rows, first + rows_a_chunk);
    float sum = 0.0f;
    if (column < columns) {
#pragma unroll 4
        for (int row = first + threadIdx.x / WARP; row < end; row += 8) sum += to_float(x[row * leading + column]);
    }
    sum = over_warps(sum, sums);
    if (threadIdx.x < WARP && column < columns) partial[(long long)blockIdx.y * columns + column] = sum;
}

extern "C" __global__ void __launch_bounds__(256)
add_partials(const float* partial, float* target, int chunks, int columns) {
    __shared__ float sums[8][WARP];
    const int column = blockIdx.x * WARP + threadIdx.x % WARP;
    float sum = 0.0f;
    if (column < columns) {
        for (int chunk = threadIdx.x / WARP; chunk < chunks; chunk += 8)
            sum += partial[(long long)chunk * columns + column];
    }
    sum = over_warps(sum, sums);
    if (threadIdx.x < WARP && column < columns) target[column] += sum;
}

extern "C" __global__ void __launch_bounds__(256)
column_magnitudes(const ELEMENT* x, long long leading, float* magnitudes, float* squares, int tokens,
                  int columns) {
    __shared__ float sums[8][WARP];
    const int column = blockIdx.x * WARP + threadIdx.x % WARP;
    const ELEMENT* from = x + (long long)blockIdx.y * tokens * leading;
    float magnitude = 0.0f, square = 0.0f;
    if (column < columns) {
#pragma unroll 4
        for (int token = threadIdx.x / WARP; token < tokens; token += 8) {
            const float value = to_float(from[token * leading + column]);
            magnitude += fabsf(value);
            square += value * value;
        }
    }
    magnitude = over_warps(magnitude, sums);
    square = over_warps(square, sums);
    if (threadIdx.x >= WARP || column >= columns) return;
    magnitudes[(long long)blockIdx.y * columns + column] = magnitude;
    squares[(long long)blockIdx.y * columns + column] = square;
}
