// Warpgroup products (wgmma, sm_90a) for attention: swizzled shared tiles, their descriptors, m64n64k16.
//
// A tile of `ROWS` rows of a head is HEAD_DIM / 64 panels of `(ROWS, 64)` bf16; a row of a panel is 128
// bytes, and its eight 16-byte pieces are permuted by `piece ^ (row mod 8)`, the 128-byte swizzle. Tiles
// begin at multiples of 1024 bytes. A descriptor names an operand in shared memory: read as it lies (`other`ᵀ
// in own · otherᵀ: the sum runs along the row) or transposed (weights · other: the sum runs over rows). In
// both, eight rows later is 1024 bytes later. Accumulators and left operands in registers are laid out as
// those of m16n8k16 in each of the four warps, 16 rows a warp.

#pragma once

#include "tensor_core.cuh"

constexpr int PANELS = HEAD_DIM / 64;

// The dynamic shared memory from its first multiple of 1024 bytes on.
__device__ __forceinline__ bf16* aligned_tiles(unsigned char* memory) {
    const unsigned misplaced = shared_address(memory) % 1024;
    return reinterpret_cast<bf16*>(memory + (misplaced == 0 ? 0 : 1024 - misplaced));
}

template <int ROWS>
__device__ __forceinline__ int swizzled(int row, int piece) {
    return piece / 8 * ROWS * 64 + row * 64 + ((piece % 8) ^ (row % 8)) * 8;
}

// Rows first .. first + ROWS of one head into a swizzled tile; rows from `limit` on become zeros.
template <int ROWS, int THREADS>
__device__ __forceinline__ void load_swizzled(bf16* tile, const bf16* source, long long leading, int first,
                                              int limit) {
    constexpr int PIECES = HEAD_DIM / 8;
#pragma unroll
    for (int i = threadIdx.x; i < ROWS * PIECES; i += THREADS) {
        const int row = i / PIECES;
        const int piece = i % PIECES;
        const bool inside = first + row < limit;
        const bf16* from = source + (inside ? first + row : 0) * leading + piece * 8;
        copy_async(tile + swizzled<ROWS>(row, piece), from, inside);
    }
}

// Left operand (16 × 16) of this warp: rows `row`.., dims 16 · step..
template <int ROWS>
__device__ __forceinline__ void load_left_swizzled(unsigned (&to)[4], const bf16* tile, int row, int step) {
    const int lane = threadIdx.x % WARP;
    load_matrices(to, tile + swizzled<ROWS>(row + lane % 16, step * 2 + lane / 16));
}

__device__ __forceinline__ unsigned long long descriptor(const bf16* start) {
    constexpr unsigned long long EIGHT_ROWS = 1024 / 16;
    constexpr unsigned long long SWIZZLE_128 = 1;
    return (shared_address(start) & 0x3ffff) >> 4 | 1ull << 16 | EIGHT_ROWS << 32 | SWIZZLE_128 << 62;
}

// Of 64 rows from `row` (a multiple of 8) on, dims 16 · step..: the sum runs along the row.
template <int ROWS>
__device__ __forceinline__ unsigned long long along_rows(const bf16* tile, int row, int step) {
    return descriptor(tile + step / 4 * ROWS * 64 + row * 64 + step % 4 * 16);
}

// Of 16 rows from `row` on, dims 64 · panel..: the sum runs over the rows.
template <int ROWS>
__device__ __forceinline__ unsigned long long over_rows(const bf16* tile, int row, int panel) {
    return descriptor(tile + panel * ROWS * 64 + row * 64);
}

// Makes copies and ordinary stores to shared memory visible to the products; each writer calls it before the
// barrier.
__device__ __forceinline__ void publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Before the first product of a sequence, and after registers that products read were written.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int LEFT>
__device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// Pins registers to their place among products: the compiler knows that a product writes its sums, but not
// that it does so only by the wait. Called on operands before begin_products and on sums after the wait.
template <int TILES>
__device__ __forceinline__ void settle(float (&values)[TILES][4]) {
#pragma unroll
    for (int i = 0; i < TILES; ++i)
        asm volatile("" : "+f"(values[i][0]), "+f"(values[i][1]), "+f"(values[i][2]), "+f"(values[i][3])::"memory");
}

template <int TILES>
__device__ __forceinline__ void settle(unsigned (&values)[TILES][4]) {
#pragma unroll
    for (int i = 0; i < TILES; ++i)
        asm volatile("" : "+r"(values[i][0]), "+r"(values[i][1]), "+r"(values[i][2]), "+r"(values[i][3])::"memory");
}

#define SUMS_64(d)                                                                                             \
    "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]),       \
        "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]),   \
        "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]),   \
        "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]),   \
        "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])

#define SUMS_64_NAMES                                                                                              \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "   \
    "%23, %24, %25, %26, %27, %28, %29, %30, %31}"

// sums (64 × 64) = left · right, or += when `add`; left in registers. OVER_ROWS says how right's descriptor
// was made.
template <int OVER_ROWS>
__device__ __forceinline__ void multiply_64(float (*sums)[4], const unsigned (&left)[4], unsigned long long right,
                                            int add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " SUMS_64_NAMES
        ", {%32, %33, %34, %35}, %36, add, 1, 1, %38;\n}\n"
        : SUMS_64(sums)
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right), "r"(add), "n"(OVER_ROWS));
}

// The same with left in shared memory, read along its rows.
template <int OVER_ROWS>
__device__ __forceinline__ void multiply_64(float (*sums)[4], unsigned long long left, unsigned long long right,
                                            int add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " SUMS_64_NAMES ", %32, %33, add, 1, 1, 0, %35;\n}\n"
        : SUMS_64(sums)
        : "l"(left), "l"(right), "r"(add), "n"(OVER_ROWS));
}
