// Attention of one new token a sequence over a cache of keys and values: attend in splits, combine.
//
//   attend:   rotates q, and k on its way into the cache (half-split pairs, as in rope.cu), copies v; sequence s has
//             position lengths[s] − 1 and cache row s · capacity + lengths[s] − 1. Then, for keys split · `split` .. of
//             each sequence: m = max, l = Σ e^(scale · q k − m), o = Σ e^(…) v
//   combine:  output = Σ_splits e^(m_i − m) o_i / Σ_splits e^(m_i − m) l_i
//
// q is bf16 `(sequences, query_heads · HEAD_DIM)`, caches bf16 `(sequences · capacity, kv_heads · HEAD_DIM)`;
// `lengths` counts the new token, and lies in device memory so that one captured graph serves every step.
// partial is f32 `(sequences, query_heads, splits, HEAD_DIM + 2)`: o, then m and l. At most `window` of the
// last keys are seen (0: all). Without `cosine` nothing is rotated.
//
// A key is read by HEAD_DIM / 8 lanes, 16 bytes each, once for HEADS query heads; work is split over keys, so
// that one long sequence fills the GPU. The new token's key comes from k, not from the cache, and the first block of its
// KV head writes it there. Compiled for HEAD_DIM (16 to 128, a power of two), HEADS (query heads a block: divides the
// group, at most 8). Launch: attend grid (query_heads / HEADS, sequences, splits), 128 threads; combine grid
// (query_heads, sequences), HEAD_DIM threads.

#include "common.cuh"

constexpr int HALF = HEAD_DIM / 2;
constexpr int LANES = HEAD_DIM / 8;     // that share a key
constexpr int SLOTS = WARP / LANES;     // keys a warp reads at once
constexpr int WARPS = 4;
constexpr int KEYS = 4;                 // of a slot, under way together
constexpr int RECORD = HEAD_DIM + 2;

// Entries `at` .. of a head, rotated to `position`.
__device__ __forceinline__ void load_rotated(const bf16* head, int at, int position, const float* cosine,
                                             const float* sine, float (&to)[8]) {
    load(head + at, to);
    if (cosine == nullptr) return;
    float other[8], c[8], s[8];
    load(head + (at + HALF) % HEAD_DIM, other);
    load(cosine + (long long)position * HALF + at % HALF, c);
    load(sine + (long long)position * HALF + at % HALF, s);
    const float sign = at < HALF ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) to[i] = to[i] * c[i] + sign * other[i] * s[i];
}

// What a slot has seen of each head: weights relative to the largest score.
struct Seen {
    float sums[HEADS][8];
    float maximum[HEADS];
    float total[HEADS];

    // COUNT keys more; all lanes of the warp call it together.
    template <int COUNT>
    __device__ __forceinline__ void add(const float (&query)[HEADS][8], const Packed<8> (&keys)[COUNT],
                                        const Packed<8> (&values)[COUNT], const bool (&inside)[COUNT]) {
        float scores[COUNT][HEADS];
#pragma unroll
        for (int u = 0; u < COUNT; ++u) {
            float k[8];
            keys[u].unpack(k);
#pragma unroll
            for (int h = 0; h < HEADS; ++h) {
                float score = 0.0f;
#pragma unroll
                for (int i = 0; i < 8; ++i) score += query[h][i] * k[i];
#pragma unroll
                for (int offset = LANES / 2; offset > 0; offset /= 2)
                    score += __shfl_xor_sync(ALL_LANES, score, offset);
                scores[u][h] = inside[u] ? score : -infinity();
            }
        }
#pragma unroll
        for (int h = 0; h < HEADS; ++h) {
            float largest = maximum[h];
#pragma unroll
            for (int u = 0; u < COUNT; ++u) largest = fmaxf(largest, scores[u][h]);
            // While there is no key yet, every weight must come out as 0.
            const float reference = largest == -infinity() ? 0.0f : largest;
            const float rescale = exp2_fast(maximum[h] - reference);
            maximum[h] = largest;
            total[h] *= rescale;
#pragma unroll
            for (int i = 0; i < 8; ++i) sums[h][i] *= rescale;
#pragma unroll
            for (int u = 0; u < COUNT; ++u) {
                scores[u][h] = exp2_fast(scores[u][h] - reference);
                total[h] += scores[u][h];
            }
        }
#pragma unroll
        for (int u = 0; u < COUNT; ++u) {
            float v[8];
            values[u].unpack(v);
#pragma unroll
            for (int h = 0; h < HEADS; ++h) {
#pragma unroll
                for (int i = 0; i < 8; ++i) sums[h][i] += scores[u][h] * v[i];
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(128)
decode_attend(const bf16* q, long long q_leading, const bf16* k, long long k_leading, const bf16* v,
              long long v_leading, bf16* key_cache, bf16* value_cache, long long cache_leading, int capacity,
              const int* lengths, const float* cosine, const float* sine, float* partial, int query_heads, int group,
              int window, int split, float scale) {
    __shared__ float merged[WARPS][HEADS][RECORD];
    const int sequence = blockIdx.y;
    const int first_head = blockIdx.x * HEADS;
    const int kv_column = first_head / group * HEAD_DIM;
    const int length = lengths[sequence];
    const int last = length - 1;
    const int oldest = window > 0 ? max(0, length - window) : 0;
    const int first = max(oldest, int(blockIdx.z) * split);
    const int end = min(length, int(blockIdx.z + 1) * split);
    const int lane = threadIdx.x % WARP;
    const int warp = threadIdx.x / WARP;
    const int at = lane % LANES * 8;
    key_cache += (long long)sequence * capacity * cache_leading + kv_column + at;
    value_cache += (long long)sequence * capacity * cache_leading + kv_column + at;
    const int cached_end = min(end, last);
    Packed<8> keys[KEYS] = {}, values[KEYS] = {};
    bool inside[KEYS];
    auto read = [&](int base) {
#pragma unroll
        for (int u = 0; u < KEYS; ++u) {
            const int key = base + u * SLOTS + lane / LANES;
            inside[u] = key < cached_end;
            if (!inside[u]) continue;
            keys[u].read(key_cache + key * cache_leading);
            values[u].read(value_cache + key * cache_leading);
        }
    };
    // The bound is the warp's, because its lanes shuffle together.
    int base = first + warp * SLOTS * KEYS;
    if (base < cached_end) read(base);
    // Only the new token's q, k and v are of the kernel before.
    wait_for_earlier();
    let_later_start();
    float* record = partial + (((long long)sequence * query_heads + first_head) * gridDim.z + blockIdx.z) * RECORD;
    const long long next_head = (long long)gridDim.z * RECORD;
    if (first >= end) {
        if (threadIdx.x < HEADS) {
            record[threadIdx.x * next_head + HEAD_DIM] = -infinity();
            record[threadIdx.x * next_head + HEAD_DIM + 1] = 0.0f;
        }
        return;
    }
    const float scale_log2 = scale * LOG2_E;
    float query[HEADS][8];
    Seen seen = {};
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
        load_rotated(q + sequence * q_leading + (first_head + h) * HEAD_DIM, at, last, cosine, sine, query[h]);
#pragma unroll
        for (int i = 0; i < 8; ++i) query[h][i] *= scale_log2;
        seen.maximum[h] = -infinity();
    }
    while (base < cached_end) {
        seen.add(query, keys, values, inside);
        base += WARPS * SLOTS * KEYS;
        if (base < cached_end) read(base);
    }
    if (warp == 0 && first <= last && last < end) {
        float own[8];
        load_rotated(k + sequence * k_leading + kv_column, at, last, cosine, sine, own);
        Packed<8> key[1], value[1];
        key[0].words = make_uint4(pack(own[0], own[1]), pack(own[2], own[3]), pack(own[4], own[5]), pack(own[6], own[7]));
        value[0].read(v + sequence * v_leading + kv_column + at);
        const bool alone[1] = {lane < LANES};
        seen.add(query, key, value, alone);
        if (lane < LANES && first_head % group == 0) {
            *reinterpret_cast<uint4*>(key_cache + last * cache_leading) = key[0].words;
            *reinterpret_cast<uint4*>(value_cache + last * cache_leading) = value[0].words;
        }
    }
    // Over the warp's slots, then over the warps.
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
        float largest = seen.maximum[h];
#pragma unroll
        for (int offset = LANES; offset < WARP; offset *= 2)
            largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, offset));
        const float rescale = largest == -infinity() ? 0.0f : exp2_fast(seen.maximum[h] - largest);
        float total = seen.total[h] * rescale;
#pragma unroll
        for (int offset = LANES; offset < WARP; offset *= 2) total += __shfl_xor_sync(ALL_LANES, total, offset);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            float sum = seen.sums[h][i] * rescale;
#pragma unroll
            for (int offset = LANES; offset < WARP; offset *= 2) sum += __shfl_xor_sync(ALL_LANES, sum, offset);
            if (lane < LANES) merged[warp][h][at + i] = sum;
        }
        if (lane == 0) {
            merged[warp][h][HEAD_DIM] = largest;
            merged[warp][h][HEAD_DIM + 1] = total;
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
    wait_for_earlier();
    let_later_start();
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
