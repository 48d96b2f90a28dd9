// What both halves of attention's backward share. With p = e^(scale · q kᵀ − log_sums), δ = Σ_dim grad_output
// · output and ds = p · (grad_output vᵀ − δ):
//
//   grad_q = scale · ds k;   grad_k = scale · Σ_group dsᵀ q;   grad_v = Σ_group pᵀ grad_output
//
// Two launches, so that no sum depends on timing and none goes through memory (2205.14135, 2307.08691):
// attention_backward_query.cu walks the keys for one tile of queries and also writes δ; then
// attention_backward_key.cu walks the queries of the whole group for one tile of keys. The price is that
// scores are computed twice (7 products for 5). Layouts, window and alignment are those of
// attention_forward.cu with keys = key_capacity = tokens; delta is f32 `(query_heads, sequences · tokens)`.
//
// A warp owns 16 queries (or keys). Compiled for HEAD_DIM (a multiple of 16, at most 128), WARPS, STEP (keys,
// or queries, a step) and KEEP (1 when fragments of the block's own rows stay in registers). Launch: 32 ·
// WARPS threads.

#pragma once

#include "tensor_core.cuh"

constexpr int THREADS = WARPS * WARP;
constexpr int ROWS = WARPS * 16;

// Fragments of a warp's own rows: held, or read again from the tile at each use.
struct OwnRows {
    const bf16* tile;
    int row;
    unsigned held[KEEP ? DIM_STEPS : 1][4];

    __device__ __forceinline__ void fetch() {
        if constexpr (KEEP) {
#pragma unroll
            for (int step = 0; step < DIM_STEPS; ++step) load_left(held[step], tile, row, step * 16);
        }
    }

    __device__ __forceinline__ void left(unsigned (&to)[4], int step) const {
        if constexpr (KEEP) {
#pragma unroll
            for (int i = 0; i < 4; ++i) to[i] = held[step][i];
        } else {
            load_left(to, tile, row, step * 16);
        }
    }
};

// products = own · otherᵀ
template <int TILES>
__device__ __forceinline__ void scores_with(float (&products)[TILES][4], const OwnRows& own, const bf16* other) {
#pragma unroll
    for (int step = 0; step < DIM_STEPS; ++step) {
        unsigned left[4];
        own.left(left, step);
#pragma unroll
        for (int n = 0; n < TILES; n += 2) {
            unsigned right[4];
            load_right_of_transpose(right, other, n * 8, step * 16);
            multiply(products[n], left, right[0], right[1]);
            multiply(products[n + 1], left, right[2], right[3]);
        }
    }
}

// sums += weights · other, weights as they stand in accumulators
template <int TILES>
__device__ __forceinline__ void add_weighted(float (&sums)[DIM_TILES][4], const float (&weights)[TILES][4],
                                             const bf16* other) {
#pragma unroll
    for (int step = 0; step < TILES / 2; ++step) {
        unsigned left[4];
        as_left(left, weights[step * 2], weights[step * 2 + 1]);
#pragma unroll
        for (int n = 0; n < DIM_TILES; n += 2) {
            unsigned right[4];
            load_right(right, other, step * 16, n * 8);
            multiply(sums[n], left, right[0], right[1]);
            multiply(sums[n + 1], left, right[2], right[3]);
        }
    }
}
