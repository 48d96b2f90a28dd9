// Attention of one new token a sequence over a cache of keys and values: append, attend in splits, combine.
//
//   append:   rotates q in place and k on its way into the cache (half-split pairs, as in rope.cu), copies v;
//             sequence s has position lengths[s] − 1 and cache row s · capacity + lengths[s] − 1
//   attend:   for keys split · SPLIT .. of each sequence: m = max, l = Σ e^(scale · q k − m), o = Σ e^(…) v
//   combine:  output = Σ_splits e^(m_i − m) o_i / Σ_splits e^(m_i − m) l_i
//
// q is bf16 `(sequences, query_heads · HEAD_DIM)`, caches bf16 `(sequences · capacity, kv_heads · HEAD_DIM)`;
// `lengths` counts the new token, and lies in device memory so that one captured graph serves every step.
// partial is f32 `(sequences, query_heads, splits, HEAD_DIM + 2)`: o, then m and l. At most `window` of the
// last keys are seen (0: all).
//
// A key is read by HEAD_DIM / 8 lanes, 16 bytes each, once for HEADS query heads; work is split over keys, so
// that one long sequence fills the GPU. Compiled for HEAD_DIM (16 to 128, a power of two), HEADS (query heads
// a block: divides the group, at most 8), SPLIT. Launch: append one block of 128 threads a sequence; attend
// grid (query_heads / HEADS, sequences, splits), 128 threads; combine grid (query_heads, sequences), HEAD_DIM
// threads.

#include "common.cuh"

constexpr int LANES = HEAD_DIM / 8;     // that share a key
constexpr int SLOTS = WARP / LANES;     // keys a warp reads at once
constexpr int WARPS = 4;
constexpr int RECORD = HEAD_DIM + 2;

extern "C" __global__ void __launch_bounds__(128)
decode_append(bf16* q, long long q_leading, int query_heads, const bf16* k, long long k_leading, const bf16* v,
              long long v_leading, int kv_heads, bf16* key_cache, bf16* value_cache, long long cache_leading,
              int capacity, const int* lengths, const float* cosine, const float* sine) {
    constexpr int HALF = HEAD_DIM / 2;
    const int sequence = blockIdx.x;
    const int position = lengths[sequence] - 1;
    const long long row = (long long)sequence * capacity + position;
    q += sequence * q_leading;
    k += sequence * k_leading;
    v += sequence * v_leading;
    for (int i = threadIdx.x; i < (query_heads + kv_heads) * HALF; i += 128) {
        const int head = i / HALF;
        const int at = i % HALF;
        const bool is_query = head < query_heads;
        const bf16* from = is_query ? q + head * HEAD_DIM : k + (head - query_heads) * HEAD_DIM;
        bf16* to = is_query ? q + head * HEAD_DIM : key_cache + row * cache_leading + (head - query_heads) * HEAD_DIM;
        const float a = to_float(from[at]);
        const float b = to_float(from[at + HALF]);
        const float c = cosine == nullptr ? 1.0f : cosine[(long long)position * HALF + at];
        const float s = cosine == nullptr ? 0.0f : sine[(long long)position * HALF + at];
        to[at] = to_bf16(a * c - b * s);
        to[at + HALF] = to_bf16(b * c + a * s);
    }
    for (int i = threadIdx.x; i < kv_heads * HEAD_DIM; i += 128) value_cache[row * cache_leading + i] = v[i];
}

extern "C" __global__ void __launch_bounds__(128)
decode_attend(const bf16* q, long long q_leading, const bf16* key_cache, const bf16* value_cache,
              long long cache_leading, int capacity, const int* lengths, float* partial, int query_heads, int group, int window, float scale) {
    __shared__ float merged[WARPS][HEADS][RECORD];
    const int sequence = blockIdx.y;
    const int first_head = blockIdx.x * HEADS;
    const int length = lengths[sequence];
    const int oldest = window > 0 ? max(0, length - window) : 0;
    const int first = max(oldest, int(blockIdx.z) * SPLIT);
    const int end = min(length, int(blockIdx.z + 1) * SPLIT);
    float* record = partial + (((long long)sequence * query_heads + first_head) * gridDim.z + blockIdx.z) * RECORD;
    const long long next_head = (long long)gridDim.z * RECORD;
    if (first >= end) {
        if (threadIdx.x < HEADS) {
            record[threadIdx.x * next_head + HEAD_DIM] = -infinity();
            record[threadIdx.x * next_head + HEAD_DIM + 1] = 0.0f;
        }
        return;
    }
    const int lane = threadIdx.x % WARP;
    const int warp = threadIdx.x / WARP;
    const int at = lane % LANES * 8;
    const float scale_log2 = scale * LOG2_E;
    key_cache += (long long)sequence * capacity * cache_leading + first_head / group * HEAD_DIM + at;
    value_cache += (long long)sequence * capacity * cache_leading + first_head / group * HEAD_DIM + at;
    float query[HEADS][8], sums[HEADS][8] = {}, maximum[HEADS], total[HEADS] = {};
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
        load(q + sequence * q_leading + (first_head + h) * HEAD_DIM + at, query[h]);
#pragma unroll
        for (int i = 0; i < 8; ++i) query[h][i] *= scale_log2;
        maximum[h] = -infinity();
    }
    // The bound is the warp's, because its lanes shuffle together.
#pragma unroll 2
    for (int base = first + warp * SLOTS; base < end; base += WARPS * SLOTS) {
        const int key = base + lane / LANES;
        const bool inside = key < end;
        float k[8] = {}, v[8] = {};
        if (inside) {
            load(key_cache + key * cache_leading, k);
            load(value_cache + key * cache_leading, v);
        }
#pragma unroll
        for (int h = 0; h < HEADS; ++h) {
            float score = 0.0f;
#pragma unroll
            for (int i = 0; i < 8; ++i) score += query[h][i] * k[i];
#pragma unroll
            for (int offset = LANES / 2; offset > 0; offset /= 2) score += __shfl_xor_sync(ALL_LANES, score, offset);
            if (!inside) continue;
            const float largest = fmaxf(maximum[h], score);
            const float rescale = exp2_fast(maximum[h] - largest);
            const float weight = exp2_fast(score - largest);
            maximum[h] = largest;
            total[h] = total[h] * rescale + weight;
#pragma unroll
            for (int i = 0; i < 8; ++i) sums[h][i] = sums[h][i] * rescale + weight * v[i];
        }
    }
    // Over the warp's slots, then over the warps.
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
        float largest = maximum[h];
#pragma unroll
        for (int offset = LANES; offset < WARP; offset *= 2)
            largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, offset));
        const float rescale = largest == -infinity() ? 0.0f : exp2_fast(maximum[h] - largest);
        total[h] *= rescale;
#pragma unroll
        for (int i = 0; i < 8; ++i) sums[h][i] *= rescale;
#pragma unroll
        for (int offset = LANES; offset < WARP; offset *= 2) {
            total[h] += __shfl_xor_sync(ALL_LANES, total[h], offset);
#pragma unroll
            for (int i = 0; i < 8; ++i) sums[h][i] += __shfl_xor_sync(ALL_LANES, sums[h][i], offset);
        }
        if (lane < LANES) {
#pragma unroll
            for (int i = 0; i < 8; ++i) merged[warp][h][at + i] = sums[h][i];
        }
        if (lane == 0) {
            merged[warp][h][HEAD_DIM] = largest;
            merged[warp][h][HEAD_DIM + 1] = total[h];
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < HEADS * RECORD; i += 128) {
        const int h = i / RECORD;
        const int entry = i % RECORD;
        float largest = -infinity();
#pragma unroll
        for (int w = 0; w < WARPS; ++w) largest = fmaxf(largest, merged[w][h][HEAD_DIM]);
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) sum += exp2_fast(merged[w][h][HEAD_DIM] - largest) * merged[w][h][entry];
        record[h * next_head + entry] = entry == HEAD_DIM ? largest : sum;
    }
}

extern "C" __global__ void __launch_bounds__(HEAD_DIM)
decode_combine(const float* partial, bf16* output, long long output_leading, int splits) {
    const int head = blockIdx.x;
    const int sequence = blockIdx.y;
    const float* records = partial + ((long long)sequence * gridDim.x + head) * splits * RECORD;
    float largest = -infinity();
    for (int i = 0; i < splits; ++i) largest = fmaxf(largest, records[i * RECORD + HEAD_DIM]);
    float sum = 0.0f, total = 0.0f;
    for (int i = 0; i < splits; ++i) {
        const float* record = records + i * RECORD;
        if (record[HEAD_DIM] == -infinity()) continue;
        const float weight = exp2_fast(record[HEAD_DIM] - largest);
        sum += weight * record[threadIdx.x];
        total += weight * record[HEAD_DIM + 1];
    }
    output[sequence * output_leading + head * HEAD_DIM + threadIdx.x] = to_bf16(sum / total);
}
