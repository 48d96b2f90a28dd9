// Causal grouped-query attention, backward, first half: grad_q and δ. Formulas in attention_backward.cuh.
//
// Launch: grid (query_heads, sequences, ceil(tokens / (16 · WARPS))), dynamic shared memory
// (32 · WARPS + 4 · STEP) · (HEAD_DIM + 8) · 2 bytes. The longest rows start first.

#include "attention_backward.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
attention_backward_query(const bf16* q, long long q_leading, const bf16* k, long long k_leading, const bf16* v,
                         long long v_leading, const bf16* output, long long output_leading,
                         const bf16* grad_output, long long grad_output_leading, const float* log_sums,
                         float* delta, bf16* grad_q, long long grad_q_leading, int sequences, int tokens, int group,
                         int window, float scale) {
    constexpr int TILES = STEP / 8;
    extern __shared__ __align__(16) unsigned char memory[];
    __shared__ float deltas[ROWS];
    bf16* q_tile = reinterpret_cast<bf16*>(memory);
    bf16* g_tile = q_tile + ROWS * PITCH;
    bf16* k_tiles = g_tile + ROWS * PITCH;
    bf16* v_tiles = k_tiles + 2 * STEP * PITCH;

    const int head = blockIdx.x;
    const int sequence = blockIdx.y;
    const int first_query = (gridDim.z - 1 - blockIdx.z) * ROWS;
    const long long first_row = (long long)sequence * tokens;
    q += first_row * q_leading + head * HEAD_DIM;
    k += first_row * k_leading + head / group * HEAD_DIM;
    v += first_row * v_leading + head / group * HEAD_DIM;
    output += first_row * output_leading + head * HEAD_DIM;
    grad_output += first_row * grad_output_leading + head * HEAD_DIM;
    grad_q += first_row * grad_q_leading + head * HEAD_DIM;
    log_sums += ((long long)head * sequences + sequence) * tokens;
    delta += ((long long)head * sequences + sequence) * tokens;

    const int first_tile = window > 0 ? max(0, first_query - window + 1) / STEP : 0;
    const int end_tile = (min(first_query + ROWS, tokens) - 1) / STEP + 1;
    load_tile<ROWS, THREADS>(q_tile, q, q_leading, first_query, tokens);
    load_tile<ROWS, THREADS>(g_tile, grad_output, grad_output_leading, first_query, tokens);
    commit_copies();
    load_tile<STEP, THREADS>(k_tiles, k, k_leading, first_tile * STEP, tokens);
    load_tile<STEP, THREADS>(v_tiles, v, v_leading, first_tile * STEP, tokens);
    commit_copies();

    // δ: two threads a row, half a head each.
    {
        const int row = threadIdx.x / 2;
        const int query = first_query + row;
        const int first = threadIdx.x % 2 * (HEAD_DIM / 2);
        float sum = 0.0f;
        if (query < tokens) {
#pragma unroll
            for (int at = 0; at < HEAD_DIM / 2; at += 8) {
                float o[8], g[8];
                load(output + query * output_leading + first + at, o);
                load(grad_output + query * grad_output_leading + first + at, g);
#pragma unroll
                for (int i = 0; i < 8; ++i) sum += o[i] * g[i];
            }
        }
        sum += __shfl_xor_sync(ALL_LANES, sum, 1);
        if (threadIdx.x % 2 == 0) {
            deltas[row] = sum;
            if (query < tokens) delta[query] = sum;
        }
    }

    const int lane = threadIdx.x % WARP;
    const int warp_row = threadIdx.x / WARP * 16;
    const float scale_log2 = scale * LOG2_E;
    float base[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int query = first_query + warp_row + lane / 4 + half * 8;
        base[half] = query < tokens ? log_sums[query] * LOG2_E : infinity();
    }
    OwnRows own_q{q_tile, warp_row, {}};
    OwnRows own_g{g_tile, warp_row, {}};
    float sums[DIM_TILES][4] = {};
    wait_for_copies<1>();
    __syncthreads();
    own_q.fetch();
    own_g.fetch();
    const float row_delta[2] = {deltas[warp_row + lane / 4], deltas[warp_row + lane / 4 + 8]};

    for (int tile = first_tile; tile < end_tile; ++tile) {
        const int stage = (tile - first_tile) % 2;
        const bf16* k_tile = k_tiles + stage * STEP * PITCH;
        const bf16* v_tile = v_tiles + stage * STEP * PITCH;
        if (tile + 1 < end_tile) {
            const int next = (stage ^ 1) * STEP * PITCH;
            load_tile<STEP, THREADS>(k_tiles + next, k, k_leading, (tile + 1) * STEP, tokens);
            load_tile<STEP, THREADS>(v_tiles + next, v, v_leading, (tile + 1) * STEP, tokens);
            commit_copies();
            wait_for_copies<1>();
        } else {
            wait_for_copies<0>();
        }
        __syncthreads();
        float scores[TILES][4] = {};
        float grads[TILES][4] = {};
        scores_with(scores, own_q, k_tile);
        scores_with(grads, own_g, v_tile);
        const int first_position = first_query + warp_row;
        const bool edge = (tile + 1) * STEP > first_position + 1 ||
                          (window > 0 && tile * STEP <= first_position + 15 - window);
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float p = exp2_fast(scores[n][i] * scale_log2 - base[i / 2]);
                if (edge) {
                    const int key = tile * STEP + n * 8 + lane % 4 * 2 + i % 2;
                    const int query = first_position + lane / 4 + i / 2 * 8;
                    if (key > query || (window > 0 && key <= query - window)) p = 0.0f;
                }
                scores[n][i] = p * (grads[n][i] - row_delta[i / 2]);
            }
        }
        add_weighted(sums, scores, k_tile);
        __syncthreads();
    }
    store_rows(grad_q, grad_q_leading, first_query + warp_row, tokens, sums, scale, scale);
}
