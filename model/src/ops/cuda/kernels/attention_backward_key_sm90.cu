// Causal grouped-query attention, backward, second half (grad_k and grad_v), on Hopper's warpgroup products.
// Formulas in attention_backward.cuh; operands as in attention_backward_key.cu, as is what it owes to
// transposed scores; HEAD_DIM is 64 or 128.
//
// Products overlap with arithmetic: p is computed while grad_output vᵀ is under way, ds while pᵀ grad_output is.
//
// Compiled for sm_90a, HEAD_DIM, WARPS (a multiple of 4), STEP (64: queries a step) and KEEP. Launch: grid
// (query_heads / group, sequences, ceil(tokens / (16 · WARPS))), 32 · WARPS threads, dynamic shared memory
// (32 · WARPS + 4 · STEP) · HEAD_DIM · 2 + 16 · STEP + 1024 bytes.

#include "attention_backward_sm90.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
attention_backward_key(const bf16* q, long long q_leading, const bf16* k, long long k_leading, const bf16* v,
                       long long v_leading, const bf16* grad_output, long long grad_output_leading,
                       const float* log_sums, const float* delta, bf16* grad_k, long long grad_k_leading,
                       bf16* grad_v, long long grad_v_leading, int sequences, int tokens, int group, int window,
                       float scale) {
    constexpr int TILES = STEP / 8;
    extern __shared__ unsigned char memory[];
    bf16* k_tile = aligned_tiles(memory);
    bf16* v_tile = k_tile + ROWS * HEAD_DIM;
    bf16* q_tiles = v_tile + ROWS * HEAD_DIM;
    bf16* g_tiles = q_tiles + 2 * STEP * HEAD_DIM;
    // Of each stage: log sums (in base 2), then δ.
    float* statistics = reinterpret_cast<float*>(g_tiles + 2 * STEP * HEAD_DIM);

    const int kv_head = blockIdx.x;
    const int sequence = blockIdx.y;
    const int first_key = blockIdx.z * ROWS;
    const long long first_row = (long long)sequence * tokens;
    const long long rows = (long long)sequences * tokens;
    const int first_head = kv_head * group;
    q += first_row * q_leading + first_head * HEAD_DIM;
    grad_output += first_row * grad_output_leading + first_head * HEAD_DIM;
    log_sums += first_head * rows + first_row;
    delta += first_head * rows + first_row;
    k += first_row * k_leading + kv_head * HEAD_DIM;
    v += first_row * v_leading + kv_head * HEAD_DIM;
    grad_k += first_row * grad_k_leading + kv_head * HEAD_DIM;
    grad_v += first_row * grad_v_leading + kv_head * HEAD_DIM;

    // The queries that see any of these keys, for each head of the group in turn.
    const int first_tile = first_key / STEP;
    const int last_query = window > 0 ? min(tokens, first_key + ROWS + window - 1) - 1 : tokens - 1;
    const int tiles = last_query / STEP + 1 - first_tile;
    const int steps = tiles * group;

    auto load_step = [&](int step, int stage) {
        const int head = step / tiles;
        const int first = (first_tile + step % tiles) * STEP;
        load_swizzled<STEP, THREADS>(q_tiles + stage * STEP * HEAD_DIM, q + head * HEAD_DIM, q_leading,
                                         first, tokens);
        load_swizzled<STEP, THREADS>(g_tiles + stage * STEP * HEAD_DIM, grad_output + head * HEAD_DIM,
                                         grad_output_leading, first, tokens);
        for (int i = threadIdx.x; i < STEP; i += THREADS) {
            // Queries that do not exist get probability 0.
            const bool inside = first + i < tokens;
            float* to = statistics + stage * 2 * STEP + i;
            to[0] = inside ? log_sums[head * rows + first + i] * LOG2_E : infinity();
            to[STEP] = inside ? delta[head * rows + first + i] : 0.0f;
        }
    };

    load_swizzled<ROWS, THREADS>(k_tile, k, k_leading, first_key, tokens);
    load_swizzled<ROWS, THREADS>(v_tile, v, v_leading, first_key, tokens);
    commit_copies();
    load_step(0, 0);
    commit_copies();

    const int lane = threadIdx.x % WARP;
    const int warp_row = threadIdx.x / WARP * 16;
    const float scale_log2 = scale * LOG2_E;
    OwnRows own_k{k_tile, warp_row, {}};
    OwnRows own_v{v_tile, warp_row, {}};
    float k_sums[DIM_TILES][4] = {};
    float v_sums[DIM_TILES][4] = {};
    wait_for_copies<1>();
    publish();
    __syncthreads();
    own_k.fetch();
    own_v.fetch();

    for (int step = 0; step < steps; ++step) {
        const int stage = step % 2;
        const bf16* q_tile = q_tiles + stage * STEP * HEAD_DIM;
        const bf16* g_tile = g_tiles + stage * STEP * HEAD_DIM;
        const float* bases = statistics + stage * 2 * STEP;
        const float* deltas = bases + STEP;
        if (step + 1 < steps) {
            load_step(step + 1, stage ^ 1);
            commit_copies();
            wait_for_copies<1>();
        } else {
            wait_for_copies<0>();
        }
        publish();
        __syncthreads();
        float scores[TILES][4];
        float grads[TILES][4];
        begin_products();
        scores_with<STEP>(scores, own_k, q_tile);
        commit_products();
        scores_with<STEP>(grads, own_v, g_tile);
        commit_products();
        wait_for_products<1>();
        settle(scores);
        const int first_query = (first_tile + step % tiles) * STEP;
        const int first_position = first_key + warp_row;
        const bool edge = first_query < first_position + 15 ||
                          (window > 0 && first_query + STEP - 1 >= first_position + window);
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
            const float2 base = *reinterpret_cast<const float2*>(bases + n * 8 + lane % 4 * 2);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float p = exp2_fast(scores[n][i] * scale_log2 - (i % 2 == 0 ? base.x : base.y));
                if (edge) {
                    const int query = first_query + n * 8 + lane % 4 * 2 + i % 2;
                    const int key = first_position + lane / 4 + i / 2 * 8;
                    if (key > query || (window > 0 && key <= query - window)) p = 0.0f;
                }
                scores[n][i] = p;
            }
        }
        unsigned left[TILES / 2][4];
        as_lefts(left, scores);
        settle(left);
        settle(v_sums);
        begin_products();
        add_weighted<STEP>(v_sums, left, g_tile);
        commit_products();
        wait_for_products<1>();
        settle(grads);
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
            const float2 row_delta = *reinterpret_cast<const float2*>(deltas + n * 8 + lane % 4 * 2);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                scores[n][i] *= grads[n][i] - (i % 2 == 0 ? row_delta.x : row_delta.y);
        }
        unsigned score_left[TILES / 2][4];
        as_lefts(score_left, scores);
        settle(score_left);
        settle(k_sums);
        begin_products();
        add_weighted<STEP>(k_sums, score_left, q_tile);
        commit_products();
        wait_for_products<0>();
        settle(v_sums);
        settle(k_sums);
        __syncthreads();
    }
    store_rows(grad_k, grad_k_leading, first_key + warp_row, tokens, k_sums, scale, scale);
    store_rows(grad_v, grad_v_leading, first_key + warp_row, tokens, v_sums, 1.0f, 1.0f);
}
