// What every kernel shares: bf16 in a register, 16-byte vectors, reductions over a warp or a block.
//
// No toolkit header is included, so that NVRTC needs nothing but itself. Tensors are row-major with a
// leading dimension in elements; `long long` offsets, because tokens × vocabulary passes 2^31.

#pragma once

constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;

// A bf16 in memory: the upper half of a float's bits.
struct bf16 {
    unsigned short bits;
};

__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float(unsigned(x.bits) << 16); }
__device__ __forceinline__ float to_float(float x) { return x; }

// To the nearest, ties to even.
__device__ __forceinline__ bf16 to_bf16(float x) {
    bf16 result;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(x));
    return result;
}

__device__ __forceinline__ void store(bf16* to, float x) { *to = to_bf16(x); }
__device__ __forceinline__ void store(float* to, float x) { *to = x; }

// Two neighbours in one word, the first in the low half.
__device__ __forceinline__ unsigned pack(float first, float second) {
    unsigned result;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(second), "f"(first));
    return result;
}

__device__ __forceinline__ float low(unsigned pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(unsigned pair) { return __uint_as_float(pair & 0xffff0000u); }

// COUNT bf16 as they lie in memory, to be read early and unpacked late.
template <int COUNT>
struct Packed {
    bf16 at[COUNT];

    __device__ __forceinline__ void read(const bf16* from) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) at[i] = from[i];
    }

    __device__ __forceinline__ void unpack(float (&to)[COUNT]) const {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) to[i] = to_float(at[i]);
    }
};

template <>
struct Packed<8> {
    uint4 words;

    __device__ __forceinline__ void read(const bf16* from) { words = *reinterpret_cast<const uint4*>(from); }

    __device__ __forceinline__ void unpack(float (&to)[8]) const {
        to[0] = low(words.x), to[1] = high(words.x), to[2] = low(words.y), to[3] = high(words.y);
        to[4] = low(words.z), to[5] = high(words.z), to[6] = low(words.w), to[7] = high(words.w);
    }
};

// COUNT neighbours as floats: one access of 16 bytes (two for floats) when COUNT is 8, else one by one.
template <int COUNT>
__device__ __forceinline__ void load(const bf16* from, float (&to)[COUNT]) {
    Packed<COUNT> packed;
    packed.read(from);
    packed.unpack(to);
}

template <int COUNT>
__device__ __forceinline__ void load(const float* from, float (&to)[COUNT]) {
    if constexpr (COUNT == 8) {
        float4 a = reinterpret_cast<const float4*>(from)[0];
        float4 b = reinterpret_cast<const float4*>(from)[1];
        to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w;
        to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) to[i] = from[i];
    }
}

template <int COUNT>
__device__ __forceinline__ void store(bf16* to, const float (&from)[COUNT]) {
    if constexpr (COUNT == 8) {
        *reinterpret_cast<uint4*>(to) = make_uint4(pack(from[0], from[1]), pack(from[2], from[3]),
                                                   pack(from[4], from[5]), pack(from[6], from[7]));
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) to[i] = to_bf16(from[i]);
    }
}

template <int COUNT>
__device__ __forceinline__ void store(float* to, const float (&from)[COUNT]) {
    if constexpr (COUNT == 8) {
        reinterpret_cast<float4*>(to)[0] = make_float4(from[0], from[1], from[2], from[3]);
        reinterpret_cast<float4*>(to)[1] = make_float4(from[4], from[5], from[6], from[7]);
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) to[i] = from[i];
    }
}

// 2^x, relative error 2^-22; 2^-inf is 0.
__device__ __forceinline__ float exp2_fast(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;

template <typename T>
__device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(ALL_LANES, x, offset);
    return x;
}

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

// A kernel that the launcher starts before what is queued earlier has ended (`Module::launch_early`) reads until
// `wait_for_earlier` only what no kernel before it writes, or those two before it; all of its threads call it. From
// `let_later_start` on the next such kernel may begin. Before Hopper there is no such launch.
__device__ __forceinline__ void wait_for_earlier() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void let_later_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
