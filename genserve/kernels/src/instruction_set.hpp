// instruction_set.hpp: the differences between instruction sets: the product of four int8 values, and tile sizes.
//
// To add an instruction set: a branch here with the names below, and a line in build.py and in __init__.py.
//
//   dot(sums, w, x)   adds to each of 16 sums the product of four weights with four inputs:
//
//        w   64 bytes: 16 outputs x 4 inputs       | w00 w01 w02 w03 | w10 w11 w12 w13 | ... | w150 w151 w152 w153 |
//        x   4 bytes: the same four for all        | x0  x1  x2  x3  |
//        sums[i] += wi0 * x0 + wi1 * x1 + wi2 * x2 + wi3 * x3
//
//   Products with weights of 8 bits need only be exact for inputs as round_inputs() makes them: in each of the pairs
//   x0, x1 and x2, x3, the positive ones add up to at most 128, and the negative ones to at least -128.
//
//   Int8Weights        64 weights of 8 bits (stored as q + 128), loaded once and used for all rows of a tile
//   kInt8Offset        dot() uses q + offset, so its sums start at -offset times the sum of the inputs
//   Int4Weights        64 weights of up to 6 bits, one per byte, without a sign, as dot() uses them
//   Int4Sums           16 sums to which dot() adds the products of a block of 32 inputs with weights of 4 bits, of 16 inputs
//                      with weights of 5 bits, or of 8 inputs with weights of 6 bits
//   kGroupsOfTile      groups of 16 outputs that a tile of more than two rows computes together, of the two in a panel
//   kInt8Rows, kBlockRows, kFloatRows      most rows of a tile, whose sums fit in the registers
//   kMatrixRows        most rows of a tile with weights of 8 bits that is multiplied as matrices (amx.hpp); 0: none
#pragma once

#include "vector.hpp"

namespace genserve {

typedef uint8_t u8x64 __attribute__((vector_size(64)));

constexpr int kInt4Offset = 8;

GENSERVE_INLINE u8x64 load_bytes(const uint8_t* from) {
  u8x64 v;
  memcpy(&v, from, sizeof v);
  return v;
}

// The sums of a block: start_sums() begins them, and total() returns them in 32 bits. One of the two adds `start`. Int4Sums
// of another type than u32x16 need functions of their own.
GENSERVE_INLINE void start_sums(u32x16& sums, u32x16 start) { sums = start; }
GENSERVE_INLINE u32x16 total(u32x16 sums, u32x16) { return sums; }

constexpr float kExact = 12582912.0f;       // 1.5 * 2^23: the last bit of a float is worth one
constexpr int32_t kExactBits = 0x4b400000;  // its bits

// The same for the formats of blocks.hpp: sums in 16 bits begin with two of them, packed, and are added to `start` at the end.
GENSERVE_INLINE void first_sums(u32x16& sums, int32_t start) { sums = (u32x16)broadcast(start); }
GENSERVE_INLINE u32x16 in_32_bits(u32x16 sums, int32_t = 0) { return sums; }

#if defined(__AVX2__) && !defined(__AVXVNNI__) && !defined(__AVX512VNNI__)
constexpr bool kPackedSums = true;
#else
constexpr bool kPackedSums = false;
#endif

#if defined(__AVX512VNNI__)

#if defined(__AMX_INT8__)
constexpr const char* kInstructionSet = "amx";
constexpr int kMatrixRows = 96;
#else
constexpr const char* kInstructionSet = "avx512vnni";
#endif
constexpr int kGroupsOfTile = 2, kInt8Rows = 12, kBlockRows = 6, kFloatRows = 12;  // 32 registers of 16 lanes

constexpr int kInt8Offset = 128;  // vpdpbusd multiplies unsigned with signed bytes
typedef u8x64 Int8Weights, Int4Weights;
typedef u32x16 Int4Sums;
GENSERVE_INLINE u8x64 int8_weights(u8x64 bytes) { return bytes; }
GENSERVE_INLINE u8x64 int4_weights(u8x64 bytes) { return bytes; }
GENSERVE_INLINE u32x16 dot(u32x16 sums, u8x64 w, int32_t x) {
  return (u32x16)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)w, _mm512_set1_epi32(x));
}

#elif defined(__AVX2__)

struct Halves {  // a vector as two registers
  __m256i low, high;
};
template <class V>
GENSERVE_INLINE Halves halves(V v) {
  return __builtin_bit_cast(Halves, v);
}

#if defined(__AVXVNNI__)

constexpr const char* kInstructionSet = "avxvnni";
constexpr int kGroupsOfTile = 1, kInt8Rows = 6, kBlockRows = 4, kFloatRows = 6;  // 16 registers of 8 lanes

constexpr int kInt8Offset = 128;
typedef u8x64 Int8Weights, Int4Weights;
typedef u32x16 Int4Sums;
GENSERVE_INLINE u8x64 int8_weights(u8x64 bytes) { return bytes; }
GENSERVE_INLINE u8x64 int4_weights(u8x64 bytes) { return bytes; }
GENSERVE_INLINE u32x16 dot(u32x16 sums, u8x64 w, int32_t x) {
  const Halves a = halves(sums), b = halves(w);
  const __m256i four = _mm256_set1_epi32(x);
  return __builtin_bit_cast(
      u32x16, Halves{_mm256_dpbusd_avx_epi32(a.low, b.low, four), _mm256_dpbusd_avx_epi32(a.high, b.high, four)});
}

#else

constexpr const char* kInstructionSet = "avx2";
constexpr int kGroupsOfTile = 1, kInt8Rows = 5, kBlockRows = 5, kFloatRows = 6;

constexpr int kInt8Offset = 128;
typedef Halves Int8Weights, Int4Weights;
typedef Halves Int4Sums;  // in 16 bits, two per output: of inputs 0 and 1, and of inputs 2 and 3, of every four
GENSERVE_INLINE Halves int8_weights(u8x64 bytes) { return halves(bytes); }
GENSERVE_INLINE Halves int4_weights(u8x64 bytes) { return halves(bytes); }
// vpmaddubsw adds two products of unsigned with signed bytes in 16 bits: at most 255 * 128, or 15 * 127 * 2 with 4-bit
// weights. In a block of 4-bit weights an output has eight of these in each of two sums, and 16 bits hold these, too.
GENSERVE_INLINE Halves multiply_pairs(const Halves& w, int32_t x) {
  const __m256i four = _mm256_set1_epi32(x);
  return {_mm256_maddubs_epi16(w.low, four), _mm256_maddubs_epi16(w.high, four)};
}
GENSERVE_INLINE u32x16 add_pairs(u32x16 sums, const Halves& pairs) {
  const Halves a = halves(sums);
  const __m256i ones = _mm256_set1_epi16(1);
  return __builtin_bit_cast(u32x16, Halves{_mm256_add_epi32(a.low, _mm256_madd_epi16(pairs.low, ones)),
                                           _mm256_add_epi32(a.high, _mm256_madd_epi16(pairs.high, ones))});
}
GENSERVE_INLINE u32x16 dot(u32x16 sums, const Halves& w, int32_t x) { return add_pairs(sums, multiply_pairs(w, x)); }
GENSERVE_INLINE Int4Sums dot(const Int4Sums& sums, const Halves& w, int32_t x) {
  const Halves pairs = multiply_pairs(w, x);
  return {_mm256_add_epi16(sums.low, pairs.low), _mm256_add_epi16(sums.high, pairs.high)};
}
GENSERVE_INLINE void start_sums(Int4Sums& sums, u32x16) { sums = Int4Sums{}; }
GENSERVE_INLINE u32x16 total(const Int4Sums& sums, u32x16 start) { return add_pairs(start, sums); }
GENSERVE_INLINE void first_sums(Int4Sums& sums, int32_t pair) { sums = {_mm256_set1_epi32(pair), _mm256_set1_epi32(pair)}; }
GENSERVE_INLINE u32x16 in_32_bits(const Int4Sums& sums) {
  const __m256i ones = _mm256_set1_epi16(1);
  return __builtin_bit_cast(u32x16, Halves{_mm256_madd_epi16(sums.low, ones), _mm256_madd_epi16(sums.high, ones)});
}
GENSERVE_INLINE u32x16 in_32_bits(const Int4Sums& sums, int32_t start) { return add_pairs((u32x16)broadcast(start), sums); }

#endif

#elif defined(__ARM_FEATURE_DOTPROD)

constexpr const char* kInstructionSet = "neon";
constexpr int kGroupsOfTile = 1, kInt8Rows = 6, kBlockRows = 4, kFloatRows = 6;  // 32 registers of 4 lanes

constexpr int kInt8Offset = 0;  // sdot multiplies signed bytes
struct Quarters {
  int8x16_t bytes[4];
};
struct SumQuarters {
  int32x4_t sums[4];
};
typedef Quarters Int8Weights, Int4Weights;
typedef u32x16 Int4Sums;
GENSERVE_INLINE Quarters int8_weights(u8x64 bytes) { return __builtin_bit_cast(Quarters, bytes ^ 0x80); }
GENSERVE_INLINE Quarters int4_weights(u8x64 bytes) { return __builtin_bit_cast(Quarters, bytes); }
GENSERVE_INLINE u32x16 dot(u32x16 sums, const Quarters& w, int32_t x) {
  const int8x16_t four = vreinterpretq_s8_s32(vdupq_n_s32(x));
  SumQuarters a = __builtin_bit_cast(SumQuarters, sums);
  for (int i = 0; i < 4; i++) a.sums[i] = vdotq_s32(a.sums[i], w.bytes[i], four);
  return __builtin_bit_cast(u32x16, a);
}

#else

constexpr const char* kInstructionSet = "portable";
constexpr int kGroupsOfTile = 1, kInt8Rows = 2, kBlockRows = 2, kFloatRows = 2;

constexpr int kInt8Offset = 128;
typedef u8x64 Int8Weights, Int4Weights;
typedef u32x16 Int4Sums;
GENSERVE_INLINE u8x64 int8_weights(u8x64 bytes) { return bytes; }
GENSERVE_INLINE u8x64 int4_weights(u8x64 bytes) { return bytes; }
GENSERVE_INLINE u32x16 dot(u32x16 sums, u8x64 w, int32_t x) {
#if defined(__x86_64__)  // SSE2, which all support, multiplies 16 bits: first bytes 0 and 2, then 1 and 3
  const __m128i bytes = _mm_set1_epi16(0x00ff);
  const __m128i four = _mm_set1_epi32(x), odd = _mm_srai_epi16(four, 8);
  const __m128i even = _mm_srai_epi16(_mm_slli_epi16(four, 8), 8);
  for (int i = 0; i < 4; i++) {
    __m128i part, total;
    memcpy(&part, (const char*)&w + 16 * i, 16);
    memcpy(&total, (const char*)&sums + 16 * i, 16);
    total = _mm_add_epi32(total, _mm_madd_epi16(_mm_and_si128(part, bytes), even));
    total = _mm_add_epi32(total, _mm_madd_epi16(_mm_srli_epi16(part, 8), odd));
    memcpy((char*)&sums + 16 * i, &total, 16);
  }
#else
  for (int i = 0; i < 4; i++) sums += ((u32x16)w >> (8 * i) & 255u) * (uint32_t)(int8_t)((uint32_t)x >> (8 * i));
#endif
  return sums;
}

#endif

#if !defined(__AMX_INT8__)
constexpr int kMatrixRows = 0;
#endif

}  // namespace genserve
