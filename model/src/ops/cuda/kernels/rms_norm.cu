// RMS norm of each group of `width` entries of a row, with an optional residual added first.
//
//   forward:  x = input + delta (when there is a delta; x is then written to `sum`)
//             r = 1 / sqrt(mean(x²) + epsilon);  output = x · r · weight
//   backward: grad_x (+)= r · weight · g − x · r³ / width · Σ(g · weight · x)     (g = grad_output)
//             grad_weight += Σ_rows g · x · r
//
// Activations are bf16 `(rows, groups * width)` with a leading dimension each; weight and its gradient are
// f32 `(width)`; reciprocal is f32 `(rows, groups)`. Sums are f32. A group is a whole row (groups = 1) or
// one head of it. With `add`, grad_x holds the residual path's gradient on entry and is added to in f32, rounded
// once; else it is written.
//
// Compiled for: VECTOR (8 where width, leading dimensions and pointers allow 16-byte accesses, else 1),
// THREADS (a group's threads: 32 to 1024, a power of two), ITEMS (vectors a thread; VECTOR·THREADS·ITEMS
// ≥ width). Launch: blocks of max(256, THREADS) threads, as many groups at a time; any number of blocks,
// which stride over the groups. Backward's weight part is written to `partial` `(blocks, width)`, which
// `rms_norm_weight_gradient` adds up in order, so that the result does not depend on timing.

#include "common.cuh"

constexpr int BLOCK = THREADS < 256 ? 256 : THREADS;
constexpr int SLOTS = BLOCK / THREADS;
constexpr int WARPS_A_GROUP = THREADS / WARP;
// Blocks of the backward that should fit a multiprocessor at once.
constexpr int RESIDENT = BLOCK > 256 ? 1 : ITEMS > 3 ? 2 : 3;

// Sum over the threads of one group; every thread of the block must call it.
__device__ __forceinline__ float group_sum(float x) {
    x = warp_sum(x);
    if constexpr (WARPS_A_GROUP > 1) {
        __shared__ float sums[BLOCK / WARP];
        const int warp = threadIdx.x / WARP;
        __syncthreads();
        if (threadIdx.x % WARP == 0) sums[warp] = x;
        __syncthreads();
        const int first = warp / WARPS_A_GROUP * WARPS_A_GROUP;
        x = 0.0f;
#pragma unroll
        for (int i = 0; i < WARPS_A_GROUP; ++i) x += sums[first + i];
    }
    return x;
}

extern "C" __global__ void __launch_bounds__(BLOCK)
rms_norm_forward(const bf16* input, long long input_leading, const bf16* delta, long long delta_leading,
                 bf16* sum, long long sum_leading, const float* weight, bf16* output,
                 long long output_leading, float* reciprocal, int rows, int groups, int width,
                 float epsilon) {
    const int lane = threadIdx.x % THREADS;
    const long long total = (long long)rows * groups;
    // The loop's bounds are those of the block, because group_sum synchronises it.
    for (long long first = (long long)blockIdx.x * SLOTS; first < total; first += (long long)gridDim.x * SLOTS) {
        const long long index = first + threadIdx.x / THREADS;
        const bool inside = index < total;
        const long long row = index / groups;
        const int column = int(index % groups) * width;
        float x[ITEMS][VECTOR] = {};
        float squares = 0.0f;
#pragma unroll
        for (int item = 0; item < ITEMS; ++item) {
            const int at = (item * THREADS + lane) * VECTOR;
            if (!inside || at >= width) continue;
            load(input + row * input_leading + column + at, x[item]);
            if (delta != nullptr) {
                float change[VECTOR];
                load(delta + row * delta_leading + column + at, change);
#pragma unroll
                for (int i = 0; i < VECTOR; ++i) x[item][i] += change[i];
                store(sum + row * sum_leading + column + at, x[item]);
                // What later readers of `sum` see is the rounded value; norm that one.
#pragma unroll
                for (int i = 0; i < VECTOR; ++i) x[item][i] = to_float(to_bf16(x[item][i]));
            }
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) squares += x[item][i] * x[item][i];
        }
        const float r = rsqrtf(group_sum(squares) / float(width) + epsilon);
        if (inside && lane == 0) reciprocal[index] = r;
#pragma unroll
        for (int item = 0; item < ITEMS; ++item) {
            const int at = (item * THREADS + lane) * VECTOR;
            if (!inside || at >= width) continue;
            float scale[VECTOR];
            load(weight + at, scale);
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) x[item][i] *= r * scale[i];
            store(output + row * output_leading + column + at, x[item]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK, RESIDENT)
rms_norm_backward(const bf16* grad_output, long long grad_output_leading, const bf16* input,
                  long long input_leading, const float* weight, const float* reciprocal, bf16* grad_x,
                  long long grad_x_leading, float* partial, int rows, int groups, int width, int add) {
    const int lane = threadIdx.x % THREADS;
    const int slot = threadIdx.x / THREADS;
    const long long total = (long long)rows * groups;
    float grad_weight[ITEMS][VECTOR] = {};
    for (long long first = (long long)blockIdx.x * SLOTS; first < total; first += (long long)gridDim.x * SLOTS) {
        const long long index = first + slot;
        const bool inside = index < total;
        const long long row = index / groups;
        const int column = int(index % groups) * width;
        const float r = inside ? reciprocal[index] : 0.0f;
        // All reads are under way before the first sum; bf16 until needed, to leave registers for more warps.
        Packed<VECTOR> x_packed[ITEMS], g_packed[ITEMS], before_packed[ITEMS];
#pragma unroll
        for (int item = 0; item < ITEMS; ++item) {
            const int at = (item * THREADS + lane) * VECTOR;
            if (!inside || at >= width) continue;
            x_packed[item].read(input + row * input_leading + column + at);
            g_packed[item].read(grad_output + row * grad_output_leading + column + at);
            if (add) before_packed[item].read(grad_x + row * grad_x_leading + column + at);
        }
        float dot = 0.0f;
#pragma unroll
        for (int item = 0; item < ITEMS; ++item) {
            const int at = (item * THREADS + lane) * VECTOR;
            if (!inside || at >= width) continue;
            float x[VECTOR], g[VECTOR], scale[VECTOR];
            x_packed[item].unpack(x);
            g_packed[item].unpack(g);
            load(weight + at, scale);
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) {
                const float product = g[i] * x[i] * r;
                grad_weight[item][i] += product;
                dot += product * scale[i];
            }
        }
        const float mean = group_sum(dot) / float(width);
#pragma unroll
        for (int item = 0; item < ITEMS; ++item) {
            const int at = (item * THREADS + lane) * VECTOR;
            if (!inside || at >= width) continue;
            float x[VECTOR], g[VECTOR], scale[VECTOR], before[VECTOR] = {};
            x_packed[item].unpack(x);
            g_packed[item].unpack(g);
            if (add) before_packed[item].unpack(before);
            load(weight + at, scale);
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) before[i] += r * (g[i] * scale[i] - x[i] * r * mean);
            store(grad_x + row * grad_x_leading + column + at, before);
        }
    }
    if (partial == nullptr) return;
    float* to = partial + (long long)blockIdx.x * width;
    if constexpr (SLOTS == 1) {
#pragma unroll
        for (int item = 0; item < ITEMS; ++item) {
            const int at = (item * THREADS + lane) * VECTOR;
            if (at < width) store(to + at, grad_weight[item]);
        }
    } else {
        // The block's groups, slot by slot in order.
        constexpr int PADDED = THREADS * ITEMS * VECTOR;
        __shared__ __align__(16) float slots[SLOTS * PADDED];
#pragma unroll
        for (int item = 0; item < ITEMS; ++item)
            store(slots + slot * PADDED + (item * THREADS + lane) * VECTOR, grad_weight[item]);
        __syncthreads();
        for (int at = threadIdx.x; at < width; at += BLOCK) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < SLOTS; ++i) sum += slots[i * PADDED + at];
            to[at] = sum;
        }
    }
}

// grad_weight += Σ_blocks partial. Launch: a block of 256 threads for each 32 columns.
extern "C" __global__ void __launch_bounds__(256)
rms_norm_weight_gradient(const float* partial, int blocks, int width, float* grad_weight) {
    __shared__ float sums[8][WARP];
    const int lane = threadIdx.x % WARP;
    const int warp = threadIdx.x / WARP;
    const int column = blockIdx.x * WARP + lane;
    float sum = 0.0f;
    if (column < width) {
#pragma unroll 8
        for (int block = warp; block < blocks; block += 8) sum += partial[(long long)block * width + column];
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp != 0 || column >= width) return;
#pragma unroll
    for (int i = 1; i < 8; ++i) sum += sums[i][lane];
    grad_weight[column] += sum;
}
