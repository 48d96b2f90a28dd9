// Causal grouped-query attention, forward, without a score matrix (2205.14135, 2307.08691).
//
//   output = softmax(scale · q kᵀ) v;   log_sums = ln Σ e^(scale · q kᵀ)
//
// q and output are bf16 `(sequences · tokens, query_heads · HEAD_DIM)`; k and v are bf16 `(sequences ·
// key_capacity, query_heads / group · HEAD_DIM)`, of which each sequence's first `keys` rows count; query
// head h reads KV head h / group. log_sums is f32 `(query_heads, sequences · tokens)`. Query t stands at
// position t + keys − tokens and sees the keys up to there, at most `window` of them (0: all). Any token
// counts; leading dimensions and pointers must allow 16-byte accesses, which widths that are multiples of
// HEAD_DIM do.
//
// A warp owns 16 · ROW_TILES queries: q fragments, running maximum and sum, and output stay in registers; keys
// and values pass through two shared buffers, KEYS at a time. Products are m16n8k16, bf16 in, f32 accumulated.
//
// Compiled for HEAD_DIM (a multiple of 16, at most 128), WARPS, ROW_TILES, KEYS. Launch: grid (query_heads,
// sequences, ceil(tokens / (16 · ROW_TILES · WARPS))), 32 · WARPS threads, dynamic shared memory
// (16 · ROW_TILES · WARPS + 4 · KEYS) · (HEAD_DIM + 8) · 2 bytes. The longest rows start first.

#include "tensor_core.cuh"

constexpr int THREADS = WARPS * WARP;
constexpr int QUERIES = WARPS * ROW_TILES * 16;
constexpr int KEY_TILES = KEYS / 8;

extern "C" __global__ void __launch_bounds__(THREADS)
attention_forward(const bf16* q, long long q_leading, const bf16* k, long long k_leading, const bf16* v,
                  long long v_leading, bf16* output, long long output_leading, float* log_sums, int sequences,
                  int tokens, int keys, int key_capacity, int group, int window, float scale) {
    extern __shared__ __align__(16) unsigned char memory[];
    bf16* q_tile = reinterpret_cast<bf16*>(memory);
    bf16* k_tiles = q_tile + QUERIES * PITCH;
    bf16* v_tiles = k_tiles + 2 * KEYS * PITCH;

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

    load_tile<QUERIES, THREADS>(q_tile, q, q_leading, first_query, tokens);
    commit_copies();
    load_tile<KEYS, THREADS>(k_tiles, k, k_leading, first_tile * KEYS, keys);
    load_tile<KEYS, THREADS>(v_tiles, v, v_leading, first_tile * KEYS, keys);
    commit_copies();

    const int lane = threadIdx.x % WARP;
    const int warp_row = threadIdx.x / WARP * ROW_TILES * 16;
    const float scale_log2 = scale * LOG2_E;
    unsigned q_left[ROW_TILES][DIM_STEPS][4];
    float sums[ROW_TILES][DIM_TILES][4] = {};
    float maximum[ROW_TILES][2];
    float total[ROW_TILES][2] = {};
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) maximum[r][0] = maximum[r][1] = -infinity();

    wait_for_copies<1>();
    __syncthreads();
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
        for (int step = 0; step < DIM_STEPS; ++step) load_left(q_left[r][step], q_tile, warp_row + r * 16, step * 16);
    }

    for (int tile = first_tile; tile < end_tile; ++tile) {
        const int stage = (tile - first_tile) % 2;
        const bf16* k_tile = k_tiles + stage * KEYS * PITCH;
        const bf16* v_tile = v_tiles + stage * KEYS * PITCH;
        if (tile + 1 < end_tile) {
            const int next = (stage ^ 1) * KEYS * PITCH;
            load_tile<KEYS, THREADS>(k_tiles + next, k, k_leading, (tile + 1) * KEYS, keys);
            load_tile<KEYS, THREADS>(v_tiles + next, v, v_leading, (tile + 1) * KEYS, keys);
            commit_copies();
            wait_for_copies<1>();
        } else {
            wait_for_copies<0>();
        }
        __syncthreads();

        float scores[ROW_TILES][KEY_TILES][4] = {};
#pragma unroll
        for (int step = 0; step < DIM_STEPS; ++step) {
#pragma unroll
            for (int n = 0; n < KEY_TILES; n += 2) {
                unsigned right[4];
                load_right_of_transpose(right, k_tile, n * 8, step * 16);
#pragma unroll
                for (int r = 0; r < ROW_TILES; ++r) {
                    multiply(scores[r][n], q_left[r][step], right[0], right[1]);
                    multiply(scores[r][n + 1], q_left[r][step], right[2], right[3]);
                }
            }
        }

#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) {
            const int position = first_query + warp_row + r * 16 + lane / 4 + past;
            const bool edge = (tile + 1) * KEYS > first_query + warp_row + r * 16 + past + 1 ||
                              (window > 0 && tile * KEYS <= first_query + warp_row + r * 16 + 15 + past - window);
            if (edge) {
#pragma unroll
                for (int n = 0; n < KEY_TILES; ++n) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const int key = tile * KEYS + n * 8 + lane % 4 * 2 + i % 2;
                        const int row = position + i / 2 * 8;
                        if (key > row || (window > 0 && key <= row - window)) scores[r][n][i] = -infinity();
                    }
                }
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float largest = maximum[r][half];
#pragma unroll
                for (int n = 0; n < KEY_TILES; ++n)
                    largest = fmaxf(largest, fmaxf(scores[r][n][half * 2], scores[r][n][half * 2 + 1]));
                largest = row_maximum(largest);
                // A row that has seen no key yet keeps a maximum of -inf; its exponentials are then 0.
                const float base = largest == -infinity() ? 0.0f : largest * scale_log2;
                const float rescale = exp2_fast(maximum[r][half] * scale_log2 - base);
                maximum[r][half] = largest;
                float sum = 0.0f;
#pragma unroll
                for (int n = 0; n < KEY_TILES; ++n) {
#pragma unroll
                    for (int i = half * 2; i < half * 2 + 2; ++i) {
                        scores[r][n][i] = exp2_fast(scores[r][n][i] * scale_log2 - base);
                        sum += scores[r][n][i];
                    }
                }
                total[r][half] = total[r][half] * rescale + sum;
#pragma unroll
                for (int n = 0; n < DIM_TILES; ++n) {
                    sums[r][n][half * 2] *= rescale;
                    sums[r][n][half * 2 + 1] *= rescale;
                }
            }
        }

#pragma unroll
        for (int step = 0; step < KEYS / 16; ++step) {
            unsigned left[ROW_TILES][4];
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r) as_left(left[r], scores[r][step * 2], scores[r][step * 2 + 1]);
#pragma unroll
            for (int n = 0; n < DIM_TILES; n += 2) {
                unsigned right[4];
                load_right(right, v_tile, step * 16, n * 8);
#pragma unroll
                for (int r = 0; r < ROW_TILES; ++r) {
                    multiply(sums[r][n], left[r], right[0], right[1]);
                    multiply(sums[r][n + 1], left[r], right[2], right[3]);
                }
            }
        }
        __syncthreads();
    }

#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
        const int row = first_query + warp_row + r * 16;
        float inverse[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float sum = row_sum(total[r][half]);
            inverse[half] = __fdividef(1.0f, sum);
            const int query = row + lane / 4 + half * 8;
            if (lane % 4 == 0 && query < tokens) log_sums[query] = maximum[r][half] * scale + LN_2 * __log2f(sum);
        }
        store_rows(output, output_leading, row, tokens, sums[r], inverse[0], inverse[1]);
    }
}
