// The nonlinearities of the MLP, elementwise over bf16 `(rows, width)` with a leading dimension each.
//
//   swiglu:        output = silu(gate) · up,   silu(z) = z · σ(z)
//   its backward:  grad_up = g · silu(gate);   grad_gate = g · up · σ(gate) · (1 + gate · (1 − σ(gate)))
//   relu_squared:  output = max(x, 0)²;        grad_x = g · 2 max(x, 0)
//
// Arithmetic is f32, rounded once. Gradients may lie over gate, up or x: each thread reads its elements before
// it writes them. Compiled for VECTOR (8 where width, leading dimensions and pointers allow, else 1).
// Launch: blocks of 256 threads, one thread for each VECTOR elements of a row.

#include "common.cuh"

struct Place {
    long long row;
    int column;
};

// Where this thread works; false when there is nothing for it.
__device__ __forceinline__ bool find_place(int rows, int width, Place& place) {
    const unsigned pieces = width / VECTOR;
    const long long index = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= (long long)rows * pieces) return false;
    place.row = index / pieces;
    place.column = int(index % pieces) * VECTOR;
    return true;
}

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + exp2_fast(-x * LOG2_E)); }

extern "C" __global__ void __launch_bounds__(256)
swiglu_forward(const bf16* gate, const bf16* up, long long leading, bf16* output, long long output_leading,
               int rows, int width) {
    Place place;
    if (!find_place(rows, width, place)) return;
    const long long at = place.row * leading + place.column;
    float z[VECTOR], u[VECTOR];
    load(gate + at, z);
    load(up + at, u);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) u[i] *= z[i] * sigmoid(z[i]);
    store(output + place.row * output_leading + place.column, u);
}

extern "C" __global__ void __launch_bounds__(256)
swiglu_backward(const bf16* grad_output, long long grad_output_leading, const bf16* gate, const bf16* up,
                long long leading, bf16* grad_gate, bf16* grad_up, long long grad_leading, int rows, int width) {
    Place place;
    if (!find_place(rows, width, place)) return;
    const long long at = place.row * leading + place.column;
    float g[VECTOR], z[VECTOR], u[VECTOR];
    load(grad_output + place.row * grad_output_leading + place.column, g);
    load(gate + at, z);
    load(up + at, u);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
        const float s = sigmoid(z[i]);
        const float through_gate = g[i] * u[i] * s * (1.0f + z[i] * (1.0f - s));
        u[i] = g[i] * z[i] * s;
        z[i] = through_gate;
    }
    const long long to = place.row * grad_leading + place.column;
    store(grad_gate + to, z);
    store(grad_up + to, u);
}

extern "C" __global__ void __launch_bounds__(256)
relu_squared_forward(const bf16* x, long long leading, bf16* output, long long output_leading, int rows,
                     int width) {
    Place place;
    if (!find_place(rows, width, place)) return;
    float v[VECTOR];
    load(x + place.row * leading + place.column, v);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
        const float positive = fmaxf(v[i], 0.0f);
        v[i] = positive * positive;
    }
    store(output + place.row * output_leading + place.column, v);
}

extern "C" __global__ void __launch_bounds__(256)
relu_squared_backward(const bf16* grad_output, long long grad_output_leading, const bf16* x, long long leading,
                      bf16* grad_x, long long grad_leading, int rows, int width) {
    Place place;
    if (!find_place(rows, width, place)) return;
    float g[VECTOR], v[VECTOR];
    load(grad_output + place.row * grad_output_leading + place.column, g);
    load(x + place.row * leading + place.column, v);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) g[i] *= 2.0f * fmaxf(v[i], 0.0f);
    store(grad_x + place.row * grad_leading + place.column, g);
}
