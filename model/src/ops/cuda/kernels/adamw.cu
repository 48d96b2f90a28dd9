// AdamW (1711.05101) over every parameter in one launch, with clipping by the global gradient norm; nothing
// goes through the host.
//
//   norm = sqrt(Σ g²);  c = gradient_scale · min(1, clip / (gradient_scale · norm + 1e-6));  g = c · g
//   m = β₁ m + (1 − β₁) g;  v = β₂ v + (1 − β₂) g²
//   w = w · (1 − rate · decay) − rate · (m / (1 − β₁ᵗ)) / (sqrt(v / (1 − β₂ᵗ)) + ε)
//
// Values, gradients and moments are f32 and contiguous; a parameter that matmuls read also has a bf16 copy,
// written here. Gradients are left at zero. When the norm is not finite nothing is updated, gradients are
// zeroed, and norm[0] says so.
//
// What a step is judged by is measured first, by each rank for its own share: loss is the sum of its losses, by
// `add_losses`, a launch for each row of them; `add_squares` writes that sum and the one of `squares`' partial sums,
// PARTS f32 each, the largest first, so that other ranks can be sent them. `gradient_norm` adds up every rank's row,
// in their order: report[0] is the step's loss, report[1] its norm. A loss that is not finite counts as a norm that
// is not.
//
// Gradients and parameters are cut into chunks of CHUNK elements (a multiple of 1024): `chunks[i]` names the
// parameter and which chunk of it. Launch: `squares` and `adamw` one block of 256 threads a chunk, `add_losses` and
// `add_squares` one block of 1024, `gradient_norm` one of a warp. norm[0] is the gradient norm before clipping,
// norm[1] the factor c.

#include "common.cuh"

struct Parameter {
    float* value;
    float* gradient;
    float* first_moment;
    float* second_moment;
    bf16* copy;
    long long length;
    float decay;
    float unused;
};

struct Gradient {
    const float* start;
    long long length;
};

struct Chunk {
    int parameter;
    int index;
};

// Of one step, in device memory so that a captured graph can go on.
struct Step {
    float rate;
    float beta1;
    float beta2;
    float epsilon;
    float correction1;  // 1 − β₁ᵗ
    float correction2;  // 1 − β₂ᵗ
    float gradient_scale;
    float clip;
};

__device__ __forceinline__ bool aligned(const void* pointer, int bytes) {
    return reinterpret_cast<unsigned long long>(pointer) % bytes == 0;
}

__device__ __forceinline__ double block_sum(double x) {
    __shared__ double sums[WARP];
    x = warp_sum(x);
    if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = x;
    __syncthreads();
    x = threadIdx.x < blockDim.x / WARP ? sums[threadIdx.x] : 0.0;
    return threadIdx.x < WARP ? warp_sum(x) : 0.0;
}

extern "C" __global__ void __launch_bounds__(256)
squares(const Gradient* gradients, const Chunk* chunks, double* partial) {
    const Chunk chunk = chunks[blockIdx.x];
    const Gradient whole = gradients[chunk.parameter];
    const long long first = (long long)chunk.index * CHUNK;
    const int length = int(min((long long)CHUNK, whole.length - first));
    const float* gradient = whole.start + first;
    float sum = 0.0f;
    int at = threadIdx.x * 4;
    if (aligned(gradient, 16)) {
#pragma unroll 4
        for (; at + 4 <= length; at += 256 * 4) {
            const float4 g = *reinterpret_cast<const float4*>(gradient + at);
            sum += g.x * g.x + g.y * g.y + g.z * g.z + g.w * g.w;
        }
    }
    for (; at < length; at += 256 * 4) {
        for (int i = at; i < min(at + 4, length); ++i) sum += gradient[i] * gradient[i];
    }
    const double total = block_sum(double(sum));
    if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

extern "C" __global__ void __launch_bounds__(1024)
add_losses(const float* losses, int count, double* loss) {
    double sum = 0.0;
    for (int i = threadIdx.x; i < count; i += 1024) sum += double(losses[i]);
    sum = block_sum(sum);
    if (threadIdx.x == 0) loss[0] += sum;
}

__device__ __forceinline__ void split(double sum, float* parts) {
    for (int i = 0; i < PARTS; ++i) {
        parts[i] = float(sum);
        sum -= double(parts[i]);
    }
}

extern "C" __global__ void __launch_bounds__(1024)
add_squares(const double* partial, int count, const double* loss, float* measured) {
    double sum = 0.0;
    for (int i = threadIdx.x; i < count; i += 1024) sum += partial[i];
    sum = block_sum(sum);
    if (threadIdx.x != 0) return;
    split(loss[0], measured);
    split(sum, measured + PARTS);
}

__device__ __forceinline__ double joined(const float* parts) {
    double sum = 0.0;
    for (int i = PARTS - 1; i >= 0; --i) sum += double(parts[i]);
    return sum;
}

extern "C" __global__ void __launch_bounds__(32)
gradient_norm(const float* measured, int ranks, const Step* step, float* norm, double* report) {
    if (threadIdx.x != 0) return;
    double loss = 0.0, squares = 0.0;
    for (int rank = 0; rank < ranks; ++rank) {
        loss += joined(measured + rank * 2 * PARTS);
        squares += joined(measured + rank * 2 * PARTS + PARTS);
    }
    const float length = float(sqrt(squares));
    const float scaled = length * step->gradient_scale;
    report[0] = loss;
    report[1] = double(scaled);
    norm[0] = isfinite(loss) ? scaled : float(loss);
    norm[1] = step->gradient_scale * fminf(1.0f, step->clip / (scaled + 1e-6f));
}

struct Rates {
    float rate, beta1, beta2, epsilon, size1, root2, scale, keep;
};

__device__ __forceinline__ void update(float& w, float g, float& m, float& v, const Rates& r) {
    g *= r.scale;
    m = r.beta1 * m + (1.0f - r.beta1) * g;
    v = r.beta2 * v + (1.0f - r.beta2) * g * g;
    w = w * r.keep - r.size1 * m / (sqrtf(v) * r.root2 + r.epsilon);
}

extern "C" __global__ void __launch_bounds__(256)
adamw(const Parameter* parameters, const Chunk* chunks, const Step* step, const float* norm) {
    const Chunk chunk = chunks[blockIdx.x];
    const Parameter parameter = parameters[chunk.parameter];
    const long long first = (long long)chunk.index * CHUNK;
    const int length = int(min((long long)CHUNK, parameter.length - first));
    float* w = parameter.value + first;
    float* g = parameter.gradient + first;
    float* m = parameter.first_moment + first;
    float* v = parameter.second_moment + first;
    bf16* copy = parameter.copy == nullptr ? nullptr : parameter.copy + first;
    const bool sound = isfinite(norm[0]);
    const Rates rates{step->rate,
                      step->beta1,
                      step->beta2,
                      step->epsilon,
                      step->rate / step->correction1,
                      rsqrtf(step->correction2),
                      norm[1],
                      1.0f - step->rate * parameter.decay};
    int at = threadIdx.x * 4;
    const bool wide = aligned(w, 16) && aligned(g, 16) && aligned(m, 16) && aligned(v, 16) && aligned(copy, 8);
    if (wide && sound) {
#pragma unroll 2
        for (; at + 4 <= length; at += 256 * 4) {
            float4 w4 = *reinterpret_cast<float4*>(w + at);
            float4 m4 = *reinterpret_cast<float4*>(m + at);
            float4 v4 = *reinterpret_cast<float4*>(v + at);
            const float4 g4 = *reinterpret_cast<float4*>(g + at);
            update(w4.x, g4.x, m4.x, v4.x, rates);
            update(w4.y, g4.y, m4.y, v4.y, rates);
            update(w4.z, g4.z, m4.z, v4.z, rates);
            update(w4.w, g4.w, m4.w, v4.w, rates);
            *reinterpret_cast<float4*>(w + at) = w4;
            *reinterpret_cast<float4*>(m + at) = m4;
            *reinterpret_cast<float4*>(v + at) = v4;
            *reinterpret_cast<float4*>(g + at) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (copy != nullptr)
                *reinterpret_cast<uint2*>(copy + at) = make_uint2(pack(w4.x, w4.y), pack(w4.z, w4.w));
        }
    }
    for (; at < length; at += 256 * 4) {
        for (int i = at; i < min(at + 4, length); ++i) {
            if (sound) {
                float value = w[i], first_moment = m[i], second_moment = v[i];
                update(value, g[i], first_moment, second_moment, rates);
                w[i] = value;
                m[i] = first_moment;
                v[i] = second_moment;
                if (copy != nullptr) copy[i] = to_bf16(value);
            }
            g[i] = 0.0f;
        }
    }
}
