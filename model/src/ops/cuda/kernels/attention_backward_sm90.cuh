// What both halves of attention's backward share on Hopper: products of a warpgroup's own 64 rows with a
// tile, and of weights in registers with a tile. All are asynchronous; callers begin, commit and wait.

#pragma once

#include "warpgroup.cuh"

constexpr int THREADS = WARPS * WARP;
constexpr int ROWS = WARPS * 16;

// A warpgroup's own rows: fragments held in registers, or the tile, read by the tensor cores at each use.
struct OwnRows {
    const bf16* tile;
    int row;
    unsigned held[KEEP ? DIM_STEPS : 1][4];

    __device__ __forceinline__ void fetch() {
        if constexpr (KEEP) {
#pragma unroll
            for (int step = 0; step < DIM_STEPS; ++step) load_left_swizzled<ROWS>(held[step], tile, row, step);
        }
    }
};

// products = own · otherᵀ
template <int STEPS>
__device__ __forceinline__ void scores_with(float (&products)[STEPS / 8][4], const OwnRows& own, const bf16* other) {
#pragma unroll
    for (int step = 0; step < DIM_STEPS; ++step) {
#pragma unroll
        for (int n = 0; n < STEPS; n += 64) {
            const unsigned long long right = along_rows<STEPS>(other, n, step);
            if constexpr (KEEP) {
                multiply_64<0>(products + n / 8, own.held[step], right, step > 0);
            } else {
                const unsigned long long left = along_rows<ROWS>(own.tile, own.row / 64 * 64, step);
                multiply_64<0>(products + n / 8, left, right, step > 0);
            }
        }
    }
}

// sums += weights · other
template <int STEPS>
__device__ __forceinline__ void add_weighted(float (&sums)[DIM_TILES][4], const unsigned (&weights)[STEPS / 16][4],
                                             const bf16* other) {
#pragma unroll
    for (int step = 0; step < STEPS / 16; ++step) {
#pragma unroll
        for (int panel = 0; panel < PANELS; ++panel)
            multiply_64<1>(sums + panel * 8, weights[step], over_rows<STEPS>(other, step * 16, panel), 1);
    }
}

template <int TILES>
__device__ __forceinline__ void as_lefts(unsigned (&to)[TILES / 2][4], const float (&from)[TILES][4]) {
#pragma unroll
    for (int step = 0; step < TILES / 2; ++step) as_left(to[step], from[step * 2], from[step * 2 + 1]);
}
