// Cross-entropy and forward KL over the vocabulary, loss and gradient to the logits in one launch.
//
//   cross_entropy:  loss = ln Σ_j e^(x_j) − x_target;   grad_j = scale · (softmax(x)_j − [j = target])
//   distillation:   loss = Σ_j p_j (ln p_j − ln q_j),  p = softmax(parent), q = softmax(student);
//                   grad_j = scale · (q_j − p_j)
//
// Logits are LOGIT (bf16 or float) `(rows, vocabulary)` of one chunk of tokens, made by a matmul; the
// gradient is bf16 of the same shape and may lie over the student's logits when they are bf16. A target below
// 0 leaves its row out: loss 0, gradient 0. loss is f32, a row each. Without a gradient pointer only the loss
// is computed.
//
// Each row is read once for a running maximum and sums (1805.02867), and once more, by then from L2, for the
// gradient. The KL needs one more running sum: with m and s the maxima, Σ e^(p−m) (p − q) = T gives
// loss = T / Z_p − (m + ln Z_p) + (s + ln Z_q).
//
// Compiled for LOGIT and VECTOR (8 where vocabulary, leading dimensions and pointers allow, else 1). Launch:
// one block of 512 threads a row.

#include "common.cuh"

constexpr int BLOCK = 512;
constexpr int WARPS = BLOCK / WARP;

// A softmax so far: maximum, Σ e^(x − maximum), and Σ e^(x − maximum) · y for some y.
struct Running {
    float maximum;
    float sum;
    float weighted;
};

__device__ __forceinline__ Running merge(Running a, Running b) {
    const float maximum = fmaxf(a.maximum, b.maximum);
    if (maximum == -infinity()) return a;
    const float scale_a = exp2_fast((a.maximum - maximum) * LOG2_E);
    const float scale_b = exp2_fast((b.maximum - maximum) * LOG2_E);
    return {maximum, a.sum * scale_a + b.sum * scale_b, a.weighted * scale_a + b.weighted * scale_b};
}

__device__ __forceinline__ Running warp_merge(Running x) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) {
        Running other;
        other.maximum = __shfl_xor_sync(ALL_LANES, x.maximum, offset);
        other.sum = __shfl_xor_sync(ALL_LANES, x.sum, offset);
        other.weighted = __shfl_xor_sync(ALL_LANES, x.weighted, offset);
        x = merge(x, other);
    }
    return x;
}

// The whole block's, in every thread.
__device__ __forceinline__ Running block_merge(Running x, Running* scratch) {
    x = warp_merge(x);
    if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = x;
    __syncthreads();
    const int lane = threadIdx.x % WARP;
    x = lane < WARPS ? scratch[lane] : Running{-infinity(), 0.0f, 0.0f};
    return warp_merge(x);
}

// Takes VECTOR more entries in.
__device__ __forceinline__ void take(Running& x, const float (&values)[VECTOR]) {
    float maximum = x.maximum;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) maximum = fmaxf(maximum, values[i]);
    // Subtracting before the factor log₂ e keeps the largest terms, which make the sum, exact to f32.
    float sum = x.sum * exp2_fast((x.maximum - maximum) * LOG2_E);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) sum += exp2_fast((values[i] - maximum) * LOG2_E);
    x.maximum = maximum;
    x.sum = sum;
}

extern "C" __global__ void __launch_bounds__(BLOCK)
cross_entropy(const LOGIT* logits, long long leading, const int* targets, float* loss, bf16* gradient,
              long long gradient_leading, int vocabulary, float scale) {
    __shared__ Running scratch[WARPS];
    const long long row = blockIdx.x;
    const int target = targets[row];
    const LOGIT* x = logits + row * leading;
    bf16* grad = gradient + row * gradient_leading;
    if (target < 0) {
        if (threadIdx.x == 0) loss[row] = 0.0f;
        if (gradient == nullptr) return;
        for (int at = threadIdx.x * VECTOR; at < vocabulary; at += BLOCK * VECTOR) {
            const float zeros[VECTOR] = {};
            store(grad + at, zeros);
        }
        return;
    }
    Running running{-infinity(), 0.0f, 0.0f};
#pragma unroll 4
    for (int at = threadIdx.x * VECTOR; at < vocabulary; at += BLOCK * VECTOR) {
        float values[VECTOR];
        load(x + at, values);
        take(running, values);
    }
    // Read before any thread writes: the gradient may lie over the logits, and block_merge synchronises.
    const float wanted = to_float(x[target]);
    running = block_merge(running, scratch);
    const float log_sum = running.maximum + logf(running.sum);
    if (threadIdx.x == 0) loss[row] = log_sum - wanted;
    if (gradient == nullptr) return;
    const float base = log_sum * LOG2_E;
#pragma unroll 2
    for (int at = threadIdx.x * VECTOR; at < vocabulary; at += BLOCK * VECTOR) {
        float values[VECTOR];
        load(x + at, values);
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            const float hit = at + i == target ? 1.0f : 0.0f;
            values[i] = scale * (exp2_fast(values[i] * LOG2_E - base) - hit);
        }
        store(grad + at, values);
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK)
distillation(const LOGIT* student, long long student_leading, const LOGIT* parent, long long parent_leading,
             float* loss, bf16* gradient, long long gradient_leading, int vocabulary, float scale) {
    __shared__ Running scratch_parent[WARPS];
    __shared__ Running scratch_student[WARPS];
    const long long row = blockIdx.x;
    const LOGIT* q = student + row * student_leading;
    const LOGIT* p = parent + row * parent_leading;
    Running of_parent{-infinity(), 0.0f, 0.0f};
    Running of_student{-infinity(), 0.0f, 0.0f};
#pragma unroll 2
    for (int at = threadIdx.x * VECTOR; at < vocabulary; at += BLOCK * VECTOR) {
        float theirs[VECTOR], ours[VECTOR];
        load(p + at, theirs);
        load(q + at, ours);
        take(of_student, ours);
        float maximum = of_parent.maximum;
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) maximum = fmaxf(maximum, theirs[i]);
        const float rescale = exp2_fast((of_parent.maximum - maximum) * LOG2_E);
        of_parent.sum *= rescale;
        of_parent.weighted *= rescale;
        of_parent.maximum = maximum;
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            const float mass = exp2_fast((theirs[i] - maximum) * LOG2_E);
            of_parent.sum += mass;
            of_parent.weighted += mass * (theirs[i] - ours[i]);
        }
    }
    of_parent = block_merge(of_parent, scratch_parent);
    of_student = block_merge(of_student, scratch_student);
    const float log_parent = of_parent.maximum + logf(of_parent.sum);
    const float log_student = of_student.maximum + logf(of_student.sum);
    // Differences first: a small divergence would drown in the rounding of two large logarithms.
    if (threadIdx.x == 0)
        loss[row] = of_parent.weighted / of_parent.sum - (of_parent.maximum - of_student.maximum) -
                    logf(of_parent.sum / of_student.sum);
    if (gradient == nullptr) return;
    bf16* grad = gradient + row * gradient_leading;
    const float base_parent = log_parent * LOG2_E;
    const float base_student = log_student * LOG2_E;
#pragma unroll 2
    for (int at = threadIdx.x * VECTOR; at < vocabulary; at += BLOCK * VECTOR) {
        float theirs[VECTOR], ours[VECTOR];
        load(p + at, theirs);
        load(q + at, ours);
#pragma unroll
        for (int i = 0; i < VECTOR; ++i)
            ours[i] = scale * (exp2_fast(ours[i] * LOG2_E - base_student) -
                               exp2_fast(theirs[i] * LOG2_E - base_parent));
        store(grad + at, ours);
    }
}
