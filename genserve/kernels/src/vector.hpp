// vector.hpp: vectors of sixteen lanes of float or int, and their functions.
//
// The code uses clang's vector types and serves every instruction set: a vector is one register of AVX-512, two of AVX2
// and four of NEON or SSE2. All compute equal bits, because each operation is one of IEEE 754 per lane (the build has
// -ffp-contract=off, so that only fma() is a fused multiply-add), and because sums over lanes follow one tree.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define GENSERVE_INLINE static inline __attribute__((always_inline))
#define GENSERVE_UNROLL _Pragma("clang loop unroll(full)")

namespace genserve {

constexpr int kLanes = 16;

GENSERVE_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));  // integers whose sums may wrap
typedef int8_t i8x16 __attribute__((vector_size(16)));
typedef _Float16 f16x16 __attribute__((vector_size(32)));

// ------------------------------------------------------------------------------------------- loads and stores

// The sixteen values at an address of any alignment, as floats.
GENSERVE_INLINE f32x16 load(const float* from) {
  f32x16 v;
  memcpy(&v, from, sizeof v);
  return v;
}
GENSERVE_INLINE f32x16 load(const _Float16* from) {
  f16x16 v;
  memcpy(&v, from, sizeof v);
  return __builtin_convertvector(v, f32x16);
}
GENSERVE_INLINE f32x16 load(const int8_t* from) {
  i8x16 v;
  memcpy(&v, from, sizeof v);
  return __builtin_convertvector(__builtin_convertvector(v, i32x16), f32x16);
}

// Stores floats unchanged, or rounded to the nearest fp16 (ties to even). For int8 see `round_to_int`.
GENSERVE_INLINE void store(float* to, f32x16 v) { memcpy(to, &v, sizeof v); }
GENSERVE_INLINE void store(_Float16* to, f32x16 v) {
  f16x16 half = __builtin_convertvector(v, f16x16);
  memcpy(to, &half, sizeof half);
}
GENSERVE_INLINE void store(int8_t* to, i32x16 v) {
  i8x16 bytes = __builtin_convertvector(v, i8x16);
  memcpy(to, &bytes, sizeof bytes);
}

// The first `count` (0 to 16) lanes only; lanes that are not loaded are zero.
template <class T>
GENSERVE_INLINE f32x16 load_first(const T* from, int64_t count) {
  if (count >= kLanes) return load(from);
  T lanes[kLanes] = {};
  memcpy(lanes, from, (size_t)count * sizeof(T));
  return load(lanes);
}
template <class T, class V>
GENSERVE_INLINE void store_first(T* to, V v, int64_t count) {
  if (count >= kLanes) return store(to, v);
  T lanes[kLanes];
  store(lanes, v);
  memcpy(to, lanes, (size_t)count * sizeof(T));
}

GENSERVE_INLINE f32x16 broadcast(float x) { return f32x16{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
GENSERVE_INLINE i32x16 broadcast(int32_t x) { return i32x16{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

// The first `count` lanes, and zero in the others.
GENSERVE_INLINE f32x16 keep_first(f32x16 v, int64_t count) {
  const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return lane < (int32_t)(count < kLanes ? count : kLanes) ? v : f32x16{};
}

// The rows of a tile, three per pointer: x86 addresses p, p + stride and p + 2 stride in one instruction, so that
// twelve rows take four registers.
template <class T, int kRows>
struct RowPointers {
  const T* thirds[(kRows + 2) / 3];
  int64_t stride;

  RowPointers(const T* first, int64_t stride) : stride(stride) {
    GENSERVE_UNROLL
    for (int i = 0; i < (kRows + 2) / 3; i++) thirds[i] = first + 3 * i * stride;
  }
  __attribute__((always_inline)) const T* at(int row) const { return thirds[row / 3] + row % 3 * stride; }
  __attribute__((always_inline)) void advance(int64_t by) {
    GENSERVE_UNROLL
    for (int i = 0; i < (kRows + 2) / 3; i++) thirds[i] += by;
  }
};

// ------------------------------------------------------------------------------------------- one lane at a time

#if !defined(__FMA__) && !defined(__aarch64__)
// fma() for processors without one: in double the product is exact, but the sum is not. If the sum is inexact, its last
// bit is made odd, so that rounding to float is correct ("round to odd", Boldo, Melquiond).
__attribute__((noinline)) inline f32x16 fma_by_double(const f32x16& a, const f32x16& b, const f32x16& c) {
  typedef double f64x16 __attribute__((vector_size(128)));
  typedef int64_t i64x16 __attribute__((vector_size(128)));
  const f64x16 product = __builtin_convertvector(a, f64x16) * __builtin_convertvector(b, f64x16);
  const f64x16 addend = __builtin_convertvector(c, f64x16);
  const f64x16 sum = product + addend;
  const f64x16 part = sum - product;
  const f64x16 lost = (product - (sum - part)) + (addend - part);
  const i64x16 inexact = (lost > 0) | (lost < 0);      // neither if the sum is not finite
  const i64x16 even = ((i64x16)sum & 1) == 0;
  const i64x16 away = ((lost > 0) == (sum > 0)) & 1;   // 1: away from zero, 0: towards it
  const i64x16 odd = (i64x16)sum + ((inexact & even) & (2 * away - 1));
  return __builtin_convertvector((f64x16)odd, f32x16);
}
#endif

// a * b + c, rounded once.
GENSERVE_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__FMA__) || defined(__aarch64__)
  return __builtin_elementwise_fma(a, b, c);
#else
  return fma_by_double(a, b, c);
#endif
}
GENSERVE_INLINE f32x16 fma(float a, f32x16 b, f32x16 c) { return fma(broadcast(a), b, c); }
GENSERVE_INLINE float fma(float a, float b, float c) { return fma(broadcast(a), broadcast(b), broadcast(c))[0]; }

// The maximum and minimum; NaN if the second is NaN.
GENSERVE_INLINE f32x16 max(f32x16 a, f32x16 b) { return a > b ? a : b; }
GENSERVE_INLINE f32x16 min(f32x16 a, f32x16 b) { return a < b ? a : b; }
GENSERVE_INLINE i32x16 max(i32x16 a, i32x16 b) { return a > b ? a : b; }

GENSERVE_INLINE f32x16 abs(f32x16 a) { return (f32x16)((i32x16)a & 0x7fffffff); }
GENSERVE_INLINE f32x16 copysign(f32x16 size, f32x16 sign) {
  return (f32x16)(((i32x16)size & 0x7fffffff) | ((u32x16)(i32x16)sign & 0x80000000u));
}

// The nearest integer (ties to even) to a * b, for |a * b| < 2^22. At 1.5 * 2^23 the last bit of a float is worth one,
// so that the mantissa of the sum holds the integer, without a conversion that depends on a rounding mode.
GENSERVE_INLINE i32x16 round_to_int(f32x16 a, f32x16 b) {
  constexpr float kRound = 12582912.0f;
  return (i32x16)fma(a, b, broadcast(kRound)) - 0x4b400000;
}

// ------------------------------------------------------------------------------------------- across the lanes

// One tree for all instruction sets: 16 lanes fold to 8, 4, 2, 1.
template <class V, class Fold>
GENSERVE_INLINE auto fold_lanes(V v, Fold fold) {
  v = fold(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15));
  v = fold(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7));
  v = fold(v, __builtin_shufflevector(v, v, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3));
  v = fold(v, __builtin_shufflevector(v, v, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1));
  return v[0];
}
// Folds the lanes of sixteen vectors: lane i of the result is that of vector i. In another order than fold_lanes().
template <class V, class Fold>
GENSERVE_INLINE V fold_vectors(const V* v, Fold fold) {
  V eight[8], four[4], two[2];
  GENSERVE_UNROLL
  for (int i = 0; i < 8; i++) {
    const V a = v[i], b = v[i + 8];
    eight[i] = fold(__builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
                    __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31));
  }
  GENSERVE_UNROLL
  for (int i = 0; i < 4; i++) {
    const V a = eight[i], b = eight[i + 4];
    four[i] = fold(__builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),
                   __builtin_shufflevector(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31));
  }
  GENSERVE_UNROLL
  for (int i = 0; i < 2; i++) {
    const V a = four[i], b = four[i + 2];
    two[i] = fold(__builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
                  __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31));
  }
  return fold(__builtin_shufflevector(two[0], two[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30),
              __builtin_shufflevector(two[0], two[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31));
}
GENSERVE_INLINE float sum(f32x16 v) {
  return fold_lanes(v, [](f32x16 a, f32x16 b) { return a + b; });
}
GENSERVE_INLINE int32_t sum(i32x16 v) {
  return (int32_t)fold_lanes((u32x16)v, [](u32x16 a, u32x16 b) { return a + b; });
}
GENSERVE_INLINE float maximum(f32x16 v) {
  return fold_lanes(v, [](f32x16 a, f32x16 b) { return max(a, b); });
}
// Lanes 2i and 2i + 1 exchanged.
GENSERVE_INLINE f32x16 swap_neighbours(f32x16 v) {
  return __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
}
// The lanes of a comparison as bits, the first lane lowest; and whether any is set.
GENSERVE_INLINE uint32_t bits(i32x16 mask) {
  typedef bool bool16 __attribute__((ext_vector_type(16)));
  return __builtin_bit_cast(uint16_t, __builtin_convertvector(mask, bool16));
}
GENSERVE_INLINE bool any(i32x16 mask) { return __builtin_reduce_or(mask) != 0; }
GENSERVE_INLINE int32_t maximum(i32x16 v) {
  return fold_lanes(v, [](i32x16 a, i32x16 b) { return max(a, b); });
}

// ------------------------------------------------------------------------------------------- functions

// e^x to 2 units in the last place (Cephes' polynomial): 0 below -87.3 and for -inf, 2.4e38 above 88.3, NaN for NaN.
GENSERVE_INLINE f32x16 exp(f32x16 x) {
  constexpr float kLowest = -87.33f, kHighest = 88.37f, kRound = 12582912.0f;
  const f32x16 v = min(broadcast(kHighest), max(broadcast(kLowest), x));
  const f32x16 shifted = fma(v, broadcast(1.44269504f), broadcast(kRound));   // holds n = round(v / ln 2)
  const f32x16 n = shifted - kRound;
  f32x16 r = fma(n, broadcast(-0.693359375f), v);                             // v = n ln 2 + r
  r = fma(n, broadcast(2.12194440e-4f), r);
  f32x16 p = broadcast(1.9875691500e-4f);
  p = fma(p, r, broadcast(1.3981999507e-3f));
  p = fma(p, r, broadcast(8.3334519073e-3f));
  p = fma(p, r, broadcast(4.1665795894e-2f));
  p = fma(p, r, broadcast(1.6666665459e-1f));
  p = fma(p, r, broadcast(5.0000001201e-1f));
  p = fma(p, r * r, r + 1.0f);
  const f32x16 power = (f32x16)(((u32x16)(i32x16)shifted + 127u) << 23);      // 2^n: n in the exponent's place
  return x < kLowest ? f32x16{} : p * power;
}
GENSERVE_INLINE float exp(float x) { return exp(broadcast(x))[0]; }

// log(x) to 2 units in the last place (Cephes' polynomial), for normal positive x.
GENSERVE_INLINE f32x16 log(f32x16 x) {
  const i32x16 shifted = (i32x16)x - 0x3f3504f3;                              // the mantissa m is in [sqrt(1/2), sqrt(2))
  const f32x16 n = __builtin_convertvector(shifted >> 23, f32x16);
  const f32x16 r = (f32x16)((shifted & 0x007fffff) + 0x3f3504f3) - 1.0f, z = r * r;
  f32x16 p = broadcast(7.0376836292e-2f);
  p = fma(p, r, broadcast(-1.1514610310e-1f));
  p = fma(p, r, broadcast(1.1676998740e-1f));
  p = fma(p, r, broadcast(-1.2420140846e-1f));
  p = fma(p, r, broadcast(1.4249322787e-1f));
  p = fma(p, r, broadcast(-1.6668057665e-1f));
  p = fma(p, r, broadcast(2.0000714765e-1f));
  p = fma(p, r, broadcast(-2.4999993993e-1f));
  p = fma(p, r, broadcast(3.3333331174e-1f));
  f32x16 y = fma(n, broadcast(-2.12194440e-4f), p * r * z);
  y = fma(z, broadcast(-0.5f), y);
  return fma(n, broadcast(0.693359375f), r + y);
}

// log(1 + e^x). The quotient restores the digits that 1 + e^x rounds away (W. Kahan).
GENSERVE_INLINE f32x16 softplus(f32x16 x) {
  const f32x16 power = exp(x), sum = power + 1.0f, added = sum - 1.0f;
  const f32x16 y = added == 0.0f ? power : log(sum) * (power / added);
  return x > 20.0f ? x : y;
}

// Cephes' polynomial near zero, where 1 - 2 / (e^2x + 1) would lose digits.
GENSERVE_INLINE f32x16 tanh(f32x16 x) {
  const f32x16 z = x * x;
  f32x16 p = broadcast(-5.70498872745e-3f);
  p = fma(p, z, broadcast(2.06390887954e-2f));
  p = fma(p, z, broadcast(-5.37397155531e-2f));
  p = fma(p, z, broadcast(1.33314422036e-1f));
  p = fma(p, z, broadcast(-3.33332819422e-1f));
  const f32x16 inner = fma(p * z, x, x);
  const f32x16 outer = copysign(1.0f - 2.0f / (exp(abs(x) * 2.0f) + 1.0f), x);
  return abs(x) > 0.625f ? outer : inner;
}

// N. Juffa's erff: two polynomials, to 1 unit in the last place.
GENSERVE_INLINE f32x16 erf(f32x16 x) {
  const f32x16 t = abs(x), s = x * x;
  f32x16 p = fma(broadcast(-1.72853470e-5f), t, broadcast(3.83197126e-4f));
  p = fma(p, s, fma(broadcast(-3.88396438e-3f), t, broadcast(2.42546219e-2f)));
  p = fma(p, t, broadcast(-1.06777877e-1f));
  p = fma(p, t, broadcast(-6.34846687e-1f));
  p = fma(p, t, broadcast(-1.28717512e-1f));
  p = fma(p, t, -t);
  const f32x16 outer = copysign(1.0f - exp(p), x);
  f32x16 q = broadcast(-5.96761703e-4f);
  q = fma(q, s, broadcast(4.99119423e-3f));
  q = fma(q, s, broadcast(-2.67681349e-2f));
  q = fma(q, s, broadcast(1.12819925e-1f));
  q = fma(q, s, broadcast(-3.76125336e-1f));
  q = fma(q, s, broadcast(1.28379166e-1f));
  const f32x16 inner = fma(q, x, x);
  return t > 0.927734375f ? outer : inner;
}

GENSERVE_INLINE f32x16 relu(f32x16 x) { return max(broadcast(0.0f), x); }
GENSERVE_INLINE f32x16 sigmoid(f32x16 x) { return 1.0f / (exp(-x) + 1.0f); }
GENSERVE_INLINE f32x16 silu(f32x16 x) { return x / (exp(-x) + 1.0f); }
GENSERVE_INLINE f32x16 gelu(f32x16 x) { return 0.5f * x * (1.0f + erf(x * 0.707106781f)); }
GENSERVE_INLINE f32x16 gelu_tanh(f32x16 x) {
  return 0.5f * x * (1.0f + tanh(0.797884561f * fma(0.044715f * x * x, x, x)));
}

}  // namespace genserve
