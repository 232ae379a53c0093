/* GELU by hand: forward and backward, any length, float32, bfloat16 and float16. No headers but the host's math.

   Three forms (Hendrycks & Gimpel 2016), with u = sqrt(2/pi) (x + 0.044715 x^3):
     ERF          x Phi(x), Phi the normal distribution; as erfc, which keeps the negative tail
     TANH         x (1 + tanh u) / 2, written x sigmoid(2u), which keeps it too: one exponential, one division
     TANH_APPROX  the same with the one instruction tanh.approx.f32: relative error of tanh 2^-11, no tail
   Slopes: Phi(x) + x phi(x); with s = sigmoid(2u): s + x s (1 - s) 2u'; with t = tanh u: (1 + t + x (1 - t^2) u') / 2.

   Bytes moved, of n elements of B bytes: forward 2nB (x, y), backward 3nB (dy, x, dx). Every thread moves 16 bytes at
   once, and what is left over (or all, where a pointer is not a multiple of 16) one element at a time.

   Compiles with NVRTC, with `nvcc -arch=sm_90 -cubin`, and its arithmetic alone with `g++ -x c++`. */

#ifdef __CUDACC__
#define FUNCTION __device__ __forceinline__
FUNCTION float exponential(float x) { return __expf(x); }
FUNCTION float quotient(float a, float b) { return __fdividef(a, b); }
FUNCTION float tanh_approx(float u) {
    float t;
    asm("tanh.approx.f32 %0, %1;" : "=f"(t) : "f"(u));
    return t;
}
#else
#include <math.h>
#define FUNCTION static inline
FUNCTION float exponential(float x) { return expf(x); }
FUNCTION float quotient(float a, float b) { return a / b; }
FUNCTION float tanh_approx(float u) { return tanhf(u); }
#endif

enum Form { ERF, TANH, TANH_APPROX };

constexpr float SQRT_HALF = 0.70710678118654752f;
constexpr float INV_SQRT_2PI = 0.39894228040143268f;
constexpr float SQRT_2_OVER_PI = 0.79788456080286536f;
constexpr float CUBIC = 0.044715f;

FUNCTION float inner(float x) { return SQRT_2_OVER_PI * x * (1.0f + CUBIC * x * x); }
FUNCTION float inner_slope(float x) { return SQRT_2_OVER_PI * (1.0f + 3.0f * CUBIC * x * x); }

// Beyond 10 the slope is 0 or 1 to the last bit, and what leads to it would overflow; NaN stays.
FUNCTION float near(float x) { return x > 10.0f ? 10.0f : x < -10.0f ? -10.0f : x; }

template <Form FORM>
FUNCTION float gelu(float x) {
    if (FORM == ERF) return 0.5f * x * erfcf(-x * SQRT_HALF);
    if (FORM == TANH) return x * quotient(1.0f, 1.0f + exponential(-2.0f * inner(x)));
    return 0.5f * x * (1.0f + tanh_approx(inner(x)));
}

template <Form FORM>
FUNCTION float gelu_slope(float x) {
    if (FORM == ERF) return 0.5f * erfcf(-x * SQRT_HALF) + x * INV_SQRT_2PI * exponential(-0.5f * x * x);
    float v = near(x);
    if (FORM == TANH) {
        float fall = exponential(-2.0f * inner(v));
        float s = quotient(1.0f, 1.0f + fall);  // 1 - s is fall * s: subtracting would cancel
        return s + x * s * (fall * s) * 2.0f * inner_slope(v);
    }
    float t = tanh_approx(inner(v));
    return 0.5f * (1.0f + t + x * (1.0f - t * t) * inner_slope(v));
}

#ifdef __CUDACC__

struct bf16 { unsigned short bits; };
struct f16 { unsigned short bits; };

FUNCTION float widen(float x) { return x; }
FUNCTION float widen(bf16 x) { return __uint_as_float((unsigned)x.bits << 16); }
FUNCTION float widen(f16 x) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
    return wide;
}

FUNCTION void round_to(float &to, float x) { to = x; }
FUNCTION void round_to(bf16 &to, float x) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to.bits) : "f"(x)); }
FUNCTION void round_to(f16 &to, float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to.bits) : "f"(x)); }

template <typename T>
struct alignas(16) Pack {
    static constexpr int SIZE = 16 / sizeof(T);
    T at[SIZE];
};

FUNCTION bool aligned(const void *a, const void *b, const void *c) {
    return (((size_t)a | (size_t)b | (size_t)c) & 15) == 0;
}

template <Form FORM, typename T>
FUNCTION void forward(const T *x, T *y, long long n) {
    const long long first = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    const long long step = gridDim.x * (long long)blockDim.x;
    const long long packs = aligned(x, y, y) ? n / Pack<T>::SIZE : 0;
    for (long long p = first; p < packs; p += step) {
        Pack<T> in = ((const Pack<T> *)x)[p], out;
#pragma unroll
        for (int i = 0; i < Pack<T>::SIZE; i++) round_to(out.at[i], gelu<FORM>(widen(in.at[i])));
        ((Pack<T> *)y)[p] = out;
    }
    for (long long i = packs * Pack<T>::SIZE + first; i < n; i += step) round_to(y[i], gelu<FORM>(widen(x[i])));
}

template <Form FORM, typename T>
FUNCTION void backward(const T *dy, const T *x, T *dx, long long n) {
    const long long first = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    const long long step = gridDim.x * (long long)blockDim.x;
    const long long packs = aligned(dy, x, dx) ? n / Pack<T>::SIZE : 0;
    for (long long p = first; p < packs; p += step) {
        Pack<T> grad = ((const Pack<T> *)dy)[p], in = ((const Pack<T> *)x)[p], out;
#pragma unroll
        for (int i = 0; i < Pack<T>::SIZE; i++)
            round_to(out.at[i], widen(grad.at[i]) * gelu_slope<FORM>(widen(in.at[i])));
        ((Pack<T> *)dx)[p] = out;
    }
    for (long long i = packs * Pack<T>::SIZE + first; i < n; i += step)
        round_to(dx[i], widen(dy[i]) * gelu_slope<FORM>(widen(x[i])));
}

#define KERNELS(NAME, FORM, T)                                                                                   \
    extern "C" __global__ void NAME##_##T(const T *x, T *y, long long n) { forward<FORM, T>(x, y, n); }          \
    extern "C" __global__ void NAME##_##T##_backward(const T *dy, const T *x, T *dx, long long n) {              \
        backward<FORM, T>(dy, x, dx, n);                                                                         \
    }
#define FORMS(T)                 \
    KERNELS(gelu, ERF, T)        \
    KERNELS(gelu_tanh, TANH, T)  \
    KERNELS(gelu_tanh_approx, TANH_APPROX, T)

FORMS(float)
FORMS(bf16)
FORMS(f16)

#else

// For a test on a CPU: value and slope of one form over an array.
extern "C" void gelu_on_cpu(int form, const float *x, float *y, float *slope, long long n) {
    for (long long i = 0; i < n; i++) {
        y[i] = form == ERF ? gelu<ERF>(x[i]) : form == TANH ? gelu<TANH>(x[i]) : gelu<TANH_APPROX>(x[i]);
        slope[i] = form == ERF    ? gelu_slope<ERF>(x[i])
                   : form == TANH ? gelu_slope<TANH>(x[i])
                                  : gelu_slope<TANH_APPROX>(x[i]);
    }
}

#endif
