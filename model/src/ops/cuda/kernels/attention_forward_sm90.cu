// Causal grouped-query attention, forward, on Hopper's warpgroup products. What it computes, its operands and
// their layouts are those of attention_forward.cu; HEAD_DIM is 64 or 128.
//
// A warpgroup owns 64 queries: running maximum and sum, and output stay in registers; queries lie in shared
// memory, keys and values pass through two buffers there, KEYS at a time, and the tensor cores read all three
// from there. (Queries held in registers were no faster, and ptxas 13.0 overwrote them within the loop at
// HEAD_DIM = KEYS = 64.)
//
// Compiled for sm_90a, HEAD_DIM, WARPS (a multiple of 4) and KEYS (a multiple of 64). Launch: grid
// (query_heads, sequences, ceil(tokens / (16 · WARPS))), 32 · WARPS threads, dynamic shared memory (16 ·
// WARPS + 4 · KEYS) · HEAD_DIM · 2 + 1024 bytes.

#include "warpgroup.cuh"

constexpr int THREADS = WARPS * WARP;
constexpr int QUERIES = WARPS * 16;
constexpr int KEY_TILES = KEYS / 8;

extern "C" __global__ void __launch_bounds__(THREADS)
attention_forward(const bf16* q, long long q_leading, const bf16* k, long long k_leading, const bf16* v,
                  long long v_leading, bf16* output, long long output_leading, float* log_sums, int sequences,
                  int tokens, int keys, int key_capacity, int group, int window, float scale) {
    extern __shared__ unsigned char memory[];
    bf16* q_tile = aligned_tiles(memory);
    bf16* k_tiles = q_tile + QUERIES * HEAD_DIM;
    bf16* v_tiles = k_tiles + 2 * KEYS * HEAD_DIM;

    const int head = blockIdx.x;
    const int sequence = blockIdx.y;
    const int first_query = (gridDim.z - 1 - blockIdx.z) * QUERIES;
    const int past = keys - tokens;
    q += (long long)sequence * tokens * q_leading + head * HEAD_DIM;
    k += (long long)sequence * key_capacity * k_leading + head / group * HEAD_DIM;
    v += (long long)sequence * key_capacity * v_leading + head / group * HEAD_DIM;
    output += (long long)sequence * tokens * output_leading + head * HEAD_DIM;
    log_sums += ((long long)head * sequences + sequence) * tokens;

    const int last_position = min(first_query + QUERIES, tokens) - 1 + past;
    const int first_tile = window > 0 ? max(0, first_query + past - window + 1) / KEYS : 0;
    const int end_tile = last_position / KEYS + 1;

    load_swizzled<QUERIES, THREADS>(q_tile, q, q_leading, first_query, tokens);
    load_swizzled<KEYS, THREADS>(k_tiles, k, k_leading, first_tile * KEYS, keys);
    load_swizzled<KEYS, THREADS>(v_tiles, v, v_leading, first_tile * KEYS, keys);
    commit_copies();

    const int lane = threadIdx.x % WARP;
    const int warp_row = threadIdx.x / WARP * 16;
    const float scale_log2 = scale * LOG2_E;
    float sums[DIM_TILES][4] = {};
    float maximum[2] = {-infinity(), -infinity()};
    float total[2] = {};

    for (int tile = first_tile; tile < end_tile; ++tile) {
        const int stage = (tile - first_tile) % 2;
        const bf16* k_tile = k_tiles + stage * KEYS * HEAD_DIM;
        const bf16* v_tile = v_tiles + stage * KEYS * HEAD_DIM;
        if (tile + 1 < end_tile) {
            const int next = (stage ^ 1) * KEYS * HEAD_DIM;
            load_swizzled<KEYS, THREADS>(k_tiles + next, k, k_leading, (tile + 1) * KEYS, keys);
            load_swizzled<KEYS, THREADS>(v_tiles + next, v, v_leading, (tile + 1) * KEYS, keys);
            commit_copies();
            wait_for_copies<1>();
        } else {
            wait_for_copies<0>();
        }
        publish();
        __syncthreads();

        float scores[KEY_TILES][4];
        begin_products();
#pragma unroll
        for (int step = 0; step < DIM_STEPS; ++step) {
#pragma unroll
            for (int n = 0; n < KEYS; n += 64)
                multiply_64<0>(scores + n / 8, along_rows<QUERIES>(q_tile, warp_row / 64 * 64, step),
                               along_rows<KEYS>(k_tile, n, step), step > 0);
        }
        commit_products();
        wait_for_products<0>();
        settle(scores);

        const int first_position = first_query + warp_row + past;
        const bool edge = (tile + 1) * KEYS > first_position + 1 ||
                          (window > 0 && tile * KEYS <= first_position + 15 - window);
        if (edge) {
#pragma unroll
            for (int n = 0; n < KEY_TILES; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int key = tile * KEYS + n * 8 + lane % 4 * 2 + i % 2;
                    const int row = first_position + lane / 4 + i / 2 * 8;
                    if (key > row || (window > 0 && key <= row - window)) scores[n][i] = -infinity();
                }
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float largest = maximum[half];
#pragma unroll
            for (int n = 0; n < KEY_TILES; ++n)
                largest = fmaxf(largest, fmaxf(scores[n][half * 2], scores[n][half * 2 + 1]));
            largest = row_maximum(largest);
            // A row that has seen no key yet keeps a maximum of -inf; its exponentials are then 0.
            const float base = largest == -infinity() ? 0.0f : largest * scale_log2;
            const float rescale = exp2_fast(maximum[half] * scale_log2 - base);
            maximum[half] = largest;
            float sum = 0.0f;
#pragma unroll
            for (int n = 0; n < KEY_TILES; ++n) {
#pragma unroll
                for (int i = half * 2; i < half * 2 + 2; ++i) {
                    scores[n][i] = exp2_fast(scores[n][i] * scale_log2 - base);
                    sum += scores[n][i];
                }
            }
            total[half] = total[half] * rescale + sum;
#pragma unroll
            for (int n = 0; n < DIM_TILES; ++n) {
                sums[n][half * 2] *= rescale;
                sums[n][half * 2 + 1] *= rescale;
            }
        }

        unsigned left[KEYS / 16][4];
#pragma unroll
        for (int step = 0; step < KEYS / 16; ++step) as_left(left[step], scores[step * 2], scores[step * 2 + 1]);
        settle(left);
        settle(sums);
        begin_products();
#pragma unroll
        for (int step = 0; step < KEYS / 16; ++step) {
#pragma unroll
            for (int panel = 0; panel < PANELS; ++panel)
                multiply_64<1>(sums + panel * 8, left[step], over_rows<KEYS>(v_tile, step * 16, panel), 1);
        }
        commit_products();
        wait_for_products<0>();
        settle(sums);
        __syncthreads();
    }

    const int row = first_query + warp_row;
    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float sum = row_sum(total[half]);
        inverse[half] = __fdividef(1.0f, sum);
        const int query = row + lane / 4 + half * 8;
        if (lane % 4 == 0 && query < tokens) log_sums[query] = maximum[half] * scale + LN_2 * __log2f(sum);
    }
    store_rows(output, output_leading, row, tokens, sums, inverse[0], inverse[1]);
}
