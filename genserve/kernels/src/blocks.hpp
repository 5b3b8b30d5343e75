// blocks.hpp: the weight formats of checkpoints, whose numbers are kept as they are.
//
// A weight is code * scale + minimum. 32 inputs share a scale and a minimum; in the formats with a head (q4k, q5k, q6k) 256
// inputs share a scale of these. In q4z a weight is (code - zero) * scale, and 32, 64 or 128 inputs share a head that has
// both. A panel is one stream of bytes, in the order in which a tile reads them: for each block of 32 inputs the scales of the
// 32 outputs, and then their codes.
//
//          of a head                of 32 inputs                                codes of 32 inputs
//     q4                            scale fp16[32], minimum fp16[32]            512 bytes
//     q5                            the same                                    512 bytes, 128 bytes of fifth bits
//     q8                            scale fp16[32]                              1,024 bytes
//     q4k  scale, minimum fp16[32]  scale uint8[32], minimum uint8[32]          512 bytes
//     q5k  the same                 the same                                    512 bytes, 128 bytes of fifth bits
//     q6k  scale fp16[32]           scale int8[2][32], one per 16 inputs        512 bytes, 256 bytes of upper bits
//     q4z  scale, zero fp16[32]     none                                        512 bytes
//
// The codes of four inputs of all outputs follow each other, as in the other formats:
//
//     8 bits   [8][32][4]: code + 128 of input 4i + b, in byte b of step i
//     4 bits   [4][32][4]: inputs 8i + b in the low half, and 8i + 4 + b in the high half
//     5 bits   [32][4] more: bit i of byte b belongs to input 4i + b
//     6 bits   [2][32][4] more: for each 16 inputs, bits 2i and 2i + 1 of byte b belong to input 4i + b; the code is + 32
//
// Rows are quantized with one scale for each 32 inputs. For each block, an output adds
//
//     (sum of code * q, times the scale of the row's block) * scale      and      (sum of the inputs) * minimum
//
// in one chain of floats, in the order of the inputs. One or two tiles read a panel where it is. For more its codes are
// unpacked once to bytes, a few blocks at a time, which stay in the cache while all rows are multiplied.
#pragma once

#include "tiles.hpp"

namespace genserve {

constexpr int kBlock = 32;  // inputs of a block

typedef uint8_t u8x16 __attribute__((vector_size(16)));

GENSERVE_INLINE f32x16 load_uint8(const uint8_t* from) {
  u8x16 v;
  memcpy(&v, from, sizeof v);
  return __builtin_convertvector(__builtin_convertvector(v, i32x16), f32x16);
}
// Sixteen values of fp16 or int8 from a stream of bytes.
GENSERVE_INLINE f32x16 load_half(const uint8_t* from) { return load(reinterpret_cast<const _Float16*>(from)); }
GENSERVE_INLINE f32x16 load_int8(const uint8_t* from) { return load(reinterpret_cast<const int8_t*>(from)); }

template <bool first, class A, class B>
struct Either {
  typedef A Type;
};
template <class A, class B>
struct Either<false, A, B> {
  typedef B Type;
};

// A block of a row, one line of a cache. A sum of products starts at the bits of 1.5 * 2^23, where the last bit of a float
// is worth one, so that it is a float without a conversion: 1.5 * 2^23 + sum. Times the scale plus `correction` it is
// sum * scale, rounded once, because the last two bits of the scale are zero and the correction is exact.
struct BlockOfRow {
  int8_t q[kBlock];
  float scale;
  float correction;   // -1.5 * 2^23 * scale
  float sum;          // of q, times the scale
  int32_t starts[5];  // of sums of products; see Codes
};
static_assert(sizeof(BlockOfRow) == 64);

// The codes of a block: get() returns those of 16 outputs and of inputs 4i to 4i + 3. `w` is at the first group of outputs;
// the next group is 64 bytes further. Codes are stored with `kStored` added.
//
// AVX2 adds the products with less than 8 bits in 16 bits, of a whole block or with 6 bits of half of it. That would not
// be enough for codes of 5 and 6 bits. These are reduced by 16 and 32, by the first value of the sums, which may wrap.
template <int bits, int kStored>
struct Codes {
  static constexpr int kBytes = kBlock * kPanel * bits / 8, kOffset = kStored;
  typedef typename Either<bits == 8, u32x16, Int4Sums>::Type Sums;
  static constexpr bool kIn16Bits = kPackedSums && bits < 8;
  static constexpr int kSteps = bits == 6 ? kBlock / 8 : kBlock / 4;  // whose products are added in 16 bits
  static constexpr int kReduced = bits == 5 ? 16 : bits == 6 ? 32 : 0;
  static_assert(bits == 8 || kSteps * 2 * 127 * ((1 << bits) - 1 - kReduced + (bits > 4)) < 1 << 15);
  // The place in `starts` of the first values of the sums, and of those in 32 bits after sums in 16 bits; -1: they are
  // those without an offset.
  static constexpr int kStart = bits == 6 ? 0 : bits == 8 ? 2 : bits == 5 && kIn16Bits ? 3 : -1;
  static constexpr int kWideStart = bits == 5 && kIn16Bits ? 4 : -1;
  // Whether step i is the first to read 64 bytes more for each group of outputs.
  static constexpr bool starts_line(int i) {
    return bits == 8 || i % 2 == 0 || (bits == 5 && i == 7) || (bits == 6 && i % 4 == 3);
  }
  static constexpr int32_t kPlainStart = kIn16Bits ? 0 : kExactBits;

  static __attribute__((always_inline)) u8x64 get(const uint8_t* w, int i) {
    if constexpr (bits == 8) return load_bytes(w + 128 * i);
    const u8x64 both = load_bytes(w + 128 * (i / 2));
    const u8x64 low = i % 2 == 0 ? both & 15 : both >> 4;
    if constexpr (bits == 5) {
      const u8x64 more = load_bytes(w + 512);
      return low | ((i <= 4 ? more << (4 - i) : more >> (i - 4)) & 16);
    }
    if constexpr (bits == 6) {
      const u8x64 more = load_bytes(w + 512 + 128 * (i / 4));
      const int at = 2 * (i % 4);
      return low | ((at <= 4 ? more << (4 - at) : more >> (at - 4)) & 48);
    }
    return low;
  }

  static __attribute__((always_inline)) auto weights(u8x64 codes) {
    if constexpr (bits == 8) {
      return int8_weights(codes);
    } else {
      return int4_weights(codes);
    }
  }
};

// What the blocks of a head share, of 32 outputs.
struct Head {
  f32x16 scales[2], minimums[2];
};

// The scales of a block: a Format has
//     kBlocks      the blocks of a head
//     kHead        its bytes
//     kScales      the bytes of a block's scales
//     kSums        1, or 2 if each half of a block has a scale
//     kOffset      what the sums of products are too large by, times the sum of the inputs
//     head()       reads a head, once for its blocks
//     scale(), minimum()     of 16 outputs, the first or the second of the panel
template <int bits>
struct HalfScales {  // q4, q5
  typedef Codes<bits, 0> Code;
  static constexpr int kBlocks = 1, kHead = 0, kScales = 128, kSums = 1, kOffset = 0;
  static constexpr bool kMinimum = true;
  static __attribute__((always_inline)) Head head(const uint8_t*) { return {}; }
  static __attribute__((always_inline)) f32x16 scale(const Head&, const uint8_t* at, int, int group) { return load_half(at + 32 * group); }
  static __attribute__((always_inline)) f32x16 minimum(const Head&, const uint8_t* at, int group) { return load_half(at + 64 + 32 * group); }
};

template <int bits>
struct SuperScales {  // q4k, q5k; their products are exact
  typedef Codes<bits, 0> Code;
  static constexpr int kBlocks = 8, kHead = 128, kScales = 64, kSums = 1, kOffset = 0;
  static constexpr bool kMinimum = true;
  static __attribute__((always_inline)) Head head(const uint8_t* at) {
    return {{load_half(at), load_half(at + 32)}, {load_half(at + 64), load_half(at + 96)}};
  }
  static __attribute__((always_inline)) f32x16 scale(const Head& head, const uint8_t* at, int, int group) {
    return head.scales[group] * load_uint8(at + 16 * group);
  }
  static __attribute__((always_inline)) f32x16 minimum(const Head& head, const uint8_t* at, int group) {
    return head.minimums[group] * load_uint8(at + 32 + 16 * group);
  }
};

template <int inputs>
struct ZeroScales {  // q4z_32, q4z_64, q4z_128
  typedef Codes<4, 0> Code;
  static constexpr int kBlocks = inputs / kBlock, kHead = 128, kScales = 0, kSums = 1, kOffset = 0;
  static constexpr bool kMinimum = true;
  static __attribute__((always_inline)) Head head(const uint8_t* at) {
    const f32x16 scales[] = {load_half(at), load_half(at + 32)};
    return {{scales[0], scales[1]}, {-load_half(at + 64) * scales[0], -load_half(at + 96) * scales[1]}};
  }
  static __attribute__((always_inline)) f32x16 scale(const Head& head, const uint8_t*, int, int group) { return head.scales[group]; }
  static __attribute__((always_inline)) f32x16 minimum(const Head& head, const uint8_t*, int group) { return head.minimums[group]; }
};

struct SixBitScales {  // q6k
  typedef Codes<6, 32> Code;
  static constexpr int kBlocks = 8, kHead = 64, kScales = 64, kSums = 2, kOffset = 32;
  static constexpr bool kMinimum = false;
  static __attribute__((always_inline)) Head head(const uint8_t* at) { return {{load_half(at), load_half(at + 32)}, {}}; }
  static __attribute__((always_inline)) f32x16 scale(const Head& head, const uint8_t* at, int half, int group) {
    return head.scales[group] * load_int8(at + 32 * half + 16 * group);
  }
  static __attribute__((always_inline)) f32x16 minimum(const Head&, const uint8_t*, int) { return f32x16{}; }
};

struct EightBitScales {  // q8
  typedef Codes<8, 128> Code;
  static constexpr int kBlocks = 1, kHead = 0, kScales = 64, kSums = 1, kOffset = kInt8Offset;
  static constexpr bool kMinimum = false;
  static __attribute__((always_inline)) Head head(const uint8_t*) { return {}; }
  static __attribute__((always_inline)) f32x16 scale(const Head&, const uint8_t* at, int, int group) { return load_half(at + 32 * group); }
  static __attribute__((always_inline)) f32x16 minimum(const Head&, const uint8_t*, int) { return f32x16{}; }
};

// The weights of a panel in some blocks, unpacked for the tiles of many rows: a byte per code, and floats.
template <class Format>
struct alignas(64) UnpackedBlocks {
  static constexpr int kMost = 16;  // so that they stay in a cache of 32 KiB
  static_assert(kMost % Format::kBlocks == 0);
  uint8_t codes[kMost][kBlock / 4][4 * kPanel];
  float scales[kMost][Format::kSums][kPanel];
  float minimums[Format::kMinimum ? kMost : 1][kPanel];
};

// Reads the blocks of a panel one after the other, where they are.
template <class Format>
struct PackedReader {
  const uint8_t *at, *scales, *codes;
  Head head{};

  explicit PackedReader(const uint8_t* panel = nullptr) : at(panel) {}
  __attribute__((always_inline)) void open(int64_t block) {
    if (Format::kHead > 0 && block % Format::kBlocks == 0) {
      head = Format::head(at);
      at += Format::kHead;
    }
    scales = at;
    codes = scales + Format::kScales;
    at = codes + Format::Code::kBytes;
  }
  __attribute__((always_inline)) u8x64 code(int i, int group) const { return Format::Code::get(codes + 64 * group, i); }
  __attribute__((always_inline)) f32x16 scale(int part, int group) const {
    return Format::scale(head, scales, part, group);
  }
  __attribute__((always_inline)) f32x16 minimum(int group) const { return Format::minimum(head, scales, group); }
};

template <class Format>
struct UnpackedReader {
  const UnpackedBlocks<Format>& from;
  int64_t block = 0;

  __attribute__((always_inline)) void open(int64_t number) { block = number; }
  __attribute__((always_inline)) u8x64 code(int i, int group) const {
    return load_bytes(from.codes[block][i] + 64 * group);
  }
  __attribute__((always_inline)) f32x16 scale(int part, int group) const {
    return load(from.scales[block][part] + kLanes * group);
  }
  __attribute__((always_inline)) f32x16 minimum(int group) const { return load(from.minimums[block] + kLanes * group); }
};

template <class Format>
struct BlocksFormat {
  typedef typename Format::Code Code;
  typedef UnpackedBlocks<Format> Unpacked;
  typedef PackedReader<Format> FromPacked;
  typedef UnpackedReader<Format> FromUnpacked;
  static constexpr int kTogether = Format::kBlocks;  // blocks that are unpacked together
  static constexpr int kInputs = kBlock * Format::kBlocks;  // of a head, or else of a block

  // The bytes of a panel; `inputs` is a multiple of kInputs.
  static constexpr int64_t panel_bytes(int64_t inputs) {
    return inputs / kBlock * (Format::kScales + Code::kBytes) + inputs / (kBlock * Format::kBlocks) * Format::kHead;
  }

  // Unpacks some blocks, and returns where the next ones are.
  static const uint8_t* unpack(const uint8_t* panel, int64_t blocks, Unpacked& to) {
    PackedReader<Format> reader(panel);
    for (int64_t block = 0; block < blocks; block++) {
      reader.open(block);
      GENSERVE_UNROLL
      for (int group = 0; group < 2; group++) {
        GENSERVE_UNROLL
        for (int i = 0; i < kBlock / 4; i++) {
          const u8x64 codes = reader.code(i, group);
          memcpy(to.codes[block][i] + 64 * group, &codes, sizeof codes);
        }
        GENSERVE_UNROLL
        for (int part = 0; part < Format::kSums; part++) {
          store(to.scales[block][part] + kLanes * group, reader.scale(part, group));
        }
        if (Format::kMinimum) store(to.minimums[block] + kLanes * group, reader.minimum(group));
      }
    }
    return reader.at;
  }

  // Prefetches as many lines as the scales of a block and its head have.
  static __attribute__((always_inline)) void prefetch_scales(int64_t block, Ahead& ahead) {
    const bool with_head = Format::kHead > 0 && block % Format::kBlocks == 0;
    for (int line = 0; line < (Format::kScales + (with_head ? Format::kHead : 0)) / 64; line++) ahead.prefetch();
  }

  // Adds the products of the next block of a panel and kRows rows to the totals of kGroups groups, from group `first` on.
  template <class Reader, int kRows, int kGroups>
  static __attribute__((always_inline)) void add_block(Reader& reader, int64_t block, int first,
                                                       const RowPointers<int8_t, kRows>& rows, Ahead& ahead,
                                                       f32x16 (&totals)[kRows][kGroups]) {
    constexpr int kSteps = kBlock / 4 / Format::kSums;  // whose products share a scale
    const auto number = [&](int r, size_t offset) __attribute__((always_inline)) { return four_bytes(rows.at(r) + offset); };
    const auto value = [&](int r, size_t offset) __attribute__((always_inline)) {
      return broadcast(__builtin_bit_cast(float, number(r, offset)));
    };
    constexpr size_t kStarts = offsetof(BlockOfRow, starts);
    reader.open(block);
    GENSERVE_UNROLL
    for (int part = 0; part < Format::kSums; part++) {
      typename Code::Sums sums[kRows][kGroups];
      GENSERVE_UNROLL
      for (int r = 0; r < kRows; r++) {
        const int32_t start = Code::kStart < 0 ? Code::kPlainStart : number(r, kStarts + 4 * (size_t)(Code::kStart + part));
        GENSERVE_UNROLL
        for (int g = 0; g < kGroups; g++) first_sums(sums[r][g], start);
      }
      GENSERVE_UNROLL
      for (int i = part * kSteps; i < (part + 1) * kSteps; i++) {
        GENSERVE_UNROLL
        for (int g = 0; g < kGroups; g++) {
          const auto codes = Code::weights(reader.code(i, first + g));
          if (Code::starts_line(i)) ahead.prefetch();
          GENSERVE_UNROLL
          for (int r = 0; r < kRows; r++) sums[r][g] = dot(sums[r][g], codes, number(r, 4 * (size_t)i));
        }
      }
      GENSERVE_UNROLL
      for (int g = 0; g < kGroups; g++) {
        const f32x16 scale = reader.scale(part, first + g);
        GENSERVE_UNROLL
        for (int r = 0; r < kRows; r++) {
          f32x16 scaled;
          if constexpr (Code::kIn16Bits && Code::kWideStart < 0) {
            scaled = __builtin_convertvector((i32x16)in_32_bits(sums[r][g]), f32x16) * value(r, offsetof(BlockOfRow, scale));
          } else {
            const int32_t start = Code::kWideStart < 0 ? 0 : number(r, kStarts + 4 * (size_t)Code::kWideStart);
            const f32x16 exact = (f32x16)in_32_bits(sums[r][g], start);
            scaled = fma(exact, value(r, offsetof(BlockOfRow, scale)), value(r, offsetof(BlockOfRow, correction)));
          }
          totals[r][g] = fma(scaled, scale, totals[r][g]);
        }
      }
    }
    if constexpr (Format::kMinimum) {
      GENSERVE_UNROLL
      for (int g = 0; g < kGroups; g++) {
        const f32x16 minimum = reader.minimum(first + g);
        GENSERVE_UNROLL
        for (int r = 0; r < kRows; r++) totals[r][g] = fma(value(r, offsetof(BlockOfRow, sum)), minimum, totals[r][g]);
      }
    }
  }

  // Adds the products of some blocks and kRows rows to y. `x` is the first row, and a row has `blocks_of_row` blocks.
  template <int kRows, class Reader>
  static void tile(const Reader& weights, const BlockOfRow* x, int64_t blocks_of_row, int64_t blocks, Ahead ahead,
                   Outputs* y) {
    constexpr int kGroups = groups_of(kRows);
    for (int first = 0; first < 2; first += kGroups) {
      Reader reader = weights;
      f32x16 totals[kRows][kGroups];
      GENSERVE_UNROLL
      for (int r = 0; r < kRows; r++) {
        GENSERVE_UNROLL
        for (int g = 0; g < kGroups; g++) totals[r][g] = y[r][first + g];
      }
      RowPointers<int8_t, kRows> rows(x->q, blocks_of_row * (int64_t)sizeof(BlockOfRow));
      for (int64_t block = 0; block < blocks; block++) {
        if (first == 0) prefetch_scales(block, ahead);
        add_block(reader, block, first, rows, ahead, totals);
        rows.advance(sizeof(BlockOfRow));
      }
      GENSERVE_UNROLL
      for (int r = 0; r < kRows; r++) {
        GENSERVE_UNROLL
        for (int g = 0; g < kGroups; g++) y[r][first + g] = totals[r][g];
      }
    }
  }

  // Multiplies one or two rows by kPanelsTogether panels of `bytes` side by side, because a core reads several streams of
  // memory faster than one: y [panels][rows]. `next` is the first of the panels that are read afterwards.
  template <int kRows>
  static void multiply_panels(const uint8_t* panels, int64_t bytes, const BlockOfRow* x, int64_t blocks,
                              const uint8_t* next, Outputs (*y)[kFewRows]) {
    constexpr int64_t kAheadBlocks = 2, kAhead = Format::kHead + kAheadBlocks * (Format::kScales + Code::kBytes);
    PackedReader<Format> readers[kPanelsTogether];
    Ahead ahead[kPanelsTogether];
    f32x16 totals[kPanelsTogether][kRows][2] = {};
    GENSERVE_UNROLL
    for (int p = 0; p < kPanelsTogether; p++) {
      readers[p] = PackedReader<Format>(panels + p * bytes);
      ahead[p] = {reinterpret_cast<const char*>(panels) + p * bytes + kAhead, 64};
    }
    RowPointers<int8_t, kRows> rows(x->q, blocks * (int64_t)sizeof(BlockOfRow));
    for (int64_t block = 0; block < blocks; block++) {
      GENSERVE_UNROLL
      for (int p = 0; p < kPanelsTogether; p++) {
        if (block == blocks - kAheadBlocks) ahead[p].at = reinterpret_cast<const char*>(next) + p * bytes;
        prefetch_scales(block, ahead[p]);
        add_block(readers[p], block, 0, rows, ahead[p], totals[p]);
      }
      rows.advance(sizeof(BlockOfRow));
    }
    GENSERVE_UNROLL
    for (int p = 0; p < kPanelsTogether; p++) {
      for (int r = 0; r < kRows; r++) {
        for (int g = 0; g < 2; g++) y[p][r][g] = totals[p][r][g];
      }
    }
  }

  // A tile of `height` (1 to kRows) rows.
  template <int kRows, class Reader>
  static void multiply(int height, const Reader& weights, const BlockOfRow* x, int64_t blocks_of_row, int64_t blocks,
                       Ahead ahead, Outputs* y) {
    if constexpr (kRows > 1) {
      if (height < kRows) return multiply<kRows - 1>(height, weights, x, blocks_of_row, blocks, ahead, y);
    }
    tile<kRows>(weights, x, blocks_of_row, blocks, ahead, y);
  }

  // The weights of one output of a panel, as floats: the first `count` of its inputs.
  static void read(const void* panel, int output, int64_t count, float* to) {
    const int group = output / kLanes, lane = output % kLanes;
    const uint8_t *at = static_cast<const uint8_t*>(panel);
    Head head{};
    for (int64_t from = 0; from < count; from += kBlock) {
      if (Format::kHead > 0 && from % (kBlock * Format::kBlocks) == 0) {
        head = Format::head(at);
        at += Format::kHead;
      }
      const uint8_t* const w = at + Format::kScales + 64 * group;
      GENSERVE_UNROLL
      for (int i = 0; i < kBlock / 4; i++) {
        const float scale = Format::scale(head, at, i * Format::kSums / (kBlock / 4), group)[lane];
        const float minimum = Format::kMinimum ? Format::minimum(head, at, group)[lane] : 0.0f;
        uint8_t codes[64];
        const u8x64 all = Code::get(w, i);
        memcpy(codes, &all, sizeof codes);
        for (int b = 0; b < 4 && from + 4 * i + b < count; b++) {
          const int code = codes[4 * lane + b] - Code::kOffset;
          to[from + 4 * i + b] = (float)code * scale + minimum;
        }
      }
      at += Format::kScales + Code::kBytes;
    }
  }
};

}  // namespace genserve
