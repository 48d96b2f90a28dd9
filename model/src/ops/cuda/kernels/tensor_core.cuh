// Tensor-core building blocks for attention: copies into shared memory, fragments, m16n8k16 products.
//
// Lane l of a warp has g = l / 4 and c = 2 · (l mod 4). An accumulator (16 × 8, f32) holds (g, c), (g, c+1),
// (g+8, c), (g+8, c+1). Shared tiles are `(rows, HEAD_DIM)` with PITCH elements from row to row: 16 bytes of
// padding put the eight rows of a fragment on different banks for every HEAD_DIM that is a multiple of 16.

#pragma once

#include "common.cuh"

constexpr int PITCH = HEAD_DIM + 8;
constexpr int DIM_STEPS = HEAD_DIM / 16;  // products of 16 along the head
constexpr int DIM_TILES = HEAD_DIM / 8;   // accumulators along the head

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
    return unsigned(__cvta_generic_to_shared(pointer));
}

// 16 bytes to shared memory without a register; zeros when there is nothing to read.
__device__ __forceinline__ void copy_async(bf16* to, const bf16* from, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
                 "r"(inside ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int LEFT>
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// Rows first .. first + ROWS of one head into a tile; rows from `limit` on become zeros.
template <int ROWS, int THREADS>
__device__ __forceinline__ void load_tile(bf16* tile, const bf16* source, long long leading, int first, int limit) {
    constexpr int PIECES = HEAD_DIM / 8;
#pragma unroll
    for (int i = threadIdx.x; i < ROWS * PIECES; i += THREADS) {
        const int row = i / PIECES;
        const int column = i % PIECES * 8;
        const bool inside = first + row < limit;
        copy_async(tile + row * PITCH + column, source + (inside ? first + row : 0) * leading + column, inside);
    }
}

__device__ __forceinline__ void load_matrices(unsigned (&to)[4], const bf16* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row))
                 : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(unsigned (&to)[4], const bf16* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// Left operand (16 × 16): rows `row`.., columns `column`.. of a tile.
__device__ __forceinline__ void load_left(unsigned (&to)[4], const bf16* tile, int row, int column) {
    const int lane = threadIdx.x % WARP;
    load_matrices(to, tile + (row + lane % 16) * PITCH + column + lane / 16 * 8);
}

// Right operand tileᵀ, (16 × 8) twice: to[0..2] for tile rows `row`.., to[2..4] for the 8 after; the sum runs
// over columns `column`..
__device__ __forceinline__ void load_right_of_transpose(unsigned (&to)[4], const bf16* tile, int row, int column) {
    const int lane = threadIdx.x % WARP;
    load_matrices(to, tile + (row + lane % 8 + lane / 16 * 8) * PITCH + column + lane / 8 % 2 * 8);
}

// Right operand tile, (16 × 8) twice: to[0..2] for columns `column`.., to[2..4] for the 8 after; the sum runs
// over tile rows `row`..
__device__ __forceinline__ void load_right(unsigned (&to)[4], const bf16* tile, int row, int column) {
    const int lane = threadIdx.x % WARP;
    load_matrices_transposed(to, tile + (row + lane % 16) * PITCH + column + lane / 16 * 8);
}

// sum += left · right
__device__ __forceinline__ void multiply(float (&sum)[4], const unsigned (&left)[4], unsigned right0,
                                         unsigned right1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right0), "r"(right1));
}

// Two neighbouring accumulators (16 × 8 each) as a left operand (16 × 16).
__device__ __forceinline__ void as_left(unsigned (&to)[4], const float (&first)[4], const float (&second)[4]) {
    to[0] = pack(first[0], first[1]);
    to[1] = pack(first[2], first[3]);
    to[2] = pack(second[0], second[1]);
    to[3] = pack(second[2], second[3]);
}

// Sum, or maximum, over the four lanes that share a row of an accumulator.
__device__ __forceinline__ float row_sum(float x) {
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    return x + __shfl_xor_sync(ALL_LANES, x, 2);
}

__device__ __forceinline__ float row_maximum(float x) {
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
    return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
}

// Writes 16 rows of accumulators, scaled row by row, to a bf16 matrix; rows from `limit` on are left out.
template <int TILES>
__device__ __forceinline__ void store_rows(bf16* to, long long leading, int row, int limit,
                                           const float (&sums)[TILES][4], float scale0, float scale1) {
    const int lane = threadIdx.x % WARP;
    const int first = row + lane / 4;
    bf16* from_column = to + lane % 4 * 2;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        if (first < limit)
            *reinterpret_cast<unsigned*>(from_column + first * leading + tile * 8) =
                pack(sums[tile][0] * scale0, sums[tile][1] * scale0);
        if (first + 8 < limit)
            *reinterpret_cast<unsigned*>(from_column + (first + 8) * leading + tile * 8) =
                pack(sums[tile][2] * scale1, sums[tile][3] * scale1);
    }
}
