// Rotary positions (2104.09864) applied in place to the heads of q and k, half-split pairs as in Llama:
// entries i and i + head_dim/2 of a head turn by the angle of frequency i,
//
//   a' = a · cos − b · sin · direction;   b' = b · cos + a · sin · direction
//
// with direction +1 forward and −1 backward (the inverse rotation is the transpose). q and k are bf16
// `(rows, heads * head_dim)`; k may have no heads. Row s·tokens + t stands at position first + t.
// Tables are f32 `(positions, head_dim / 2)`.
//
// Compiled for VECTOR (8 where head_dim/2, leading dimensions and pointers allow, else 1). Launch: blocks of
// 256 threads, one thread for each VECTOR pairs of one head of one row.

#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256)
rope(bf16* q, long long q_leading, int q_heads, bf16* k, long long k_leading, int k_heads,
     const float* cosine, const float* sine, int head_dim, int rows, int tokens, int first_position,
     float direction) {
    const int half = head_dim / 2;
    const unsigned pieces = half / VECTOR;
    const unsigned heads = q_heads + k_heads;
    const long long index = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= (long long)rows * heads * pieces) return;
    const long long head_index = index / pieces;
    const int at = int(index % pieces) * VECTOR;
    const int head = int(head_index % heads);
    const long long row = head_index / heads;
    const int position = first_position + int(row % tokens);
    bf16* entry = head < q_heads ? q + row * q_leading + (long long)head * head_dim
                                 : k + row * k_leading + (long long)(head - q_heads) * head_dim;
    float a[VECTOR], b[VECTOR], c[VECTOR], s[VECTOR];
    load(entry + at, a);
    load(entry + half + at, b);
    load(cosine + (long long)position * half + at, c);
    load(sine + (long long)position * half + at, s);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
        const float turned = s[i] * direction;
        const float first = a[i] * c[i] - b[i] * turned;
        b[i] = b[i] * c[i] + a[i] * turned;
        a[i] = first;
    }
    store(entry + at, a);
    store(entry + half + at, b);
}
