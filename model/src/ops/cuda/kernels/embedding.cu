// The embedding's lookup and its backward.
//
//   forward:  output[row] = table[tokens[row]]
//   backward: grad_table[unique[u]] += Σ grad_output[rows[i]],  i in starts[u] .. starts[u + 1]
//
// table and activations are bf16 `(vocabulary, hidden)`, `(rows, hidden)`; grad_table is f32. The host sorts
// the batch's rows by token (stably) and sends unique tokens, where each one's rows start, and the rows: one
// block adds each token's rows in order, so the sum never depends on timing, and no atomics are needed.
//
// Compiled for VECTOR (8 where hidden, leading dimensions and pointers allow, else 1). Launch: forward one
// block of 128 threads a row; backward one block of 128 threads a token, as many as there could be (rows):
// `unique_count` is read from memory, so that a captured graph serves every batch.

#include "common.cuh"

extern "C" __global__ void __launch_bounds__(128)
embedding_forward(const bf16* table, long long table_leading, const int* tokens, bf16* output,
                  long long output_leading, int hidden) {
    const long long row = blockIdx.x;
    const bf16* from = table + (long long)tokens[row] * table_leading;
    bf16* to = output + row * output_leading;
    for (int at = threadIdx.x * VECTOR; at < hidden; at += blockDim.x * VECTOR) {
        float x[VECTOR];
        load(from + at, x);
        store(to + at, x);
    }
}

extern "C" __global__ void __launch_bounds__(128)
embedding_backward(const bf16* grad_output, long long grad_leading, const int* unique, const int* starts,
                   const int* rows, const int* unique_count, float* grad_table, long long table_leading,
                   int hidden) {
    const int index = blockIdx.x;
    if (index >= *unique_count) return;
    const int first = starts[index];
    const int end = starts[index + 1];
    float* to = grad_table + (long long)unique[index] * table_leading;
    for (int at = threadIdx.x * VECTOR; at < hidden; at += blockDim.x * VECTOR) {
        float sum[VECTOR];
        load(to + at, sum);
#pragma unroll 4
        for (int i = first; i < end; ++i) {
            float g[VECTOR];
            load(grad_output + (long long)rows[i] * grad_leading + at, g);
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) sum[j] += g[j];
        }
        store(to + at, sum);
    }
}
