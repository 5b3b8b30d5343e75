// linear.hpp: the operator Linear,  y = activation(norm(x) W^T + bias) + residual.
//
// The weights of 32 outputs form a panel, which is read once from start to end. A tile multiplies a panel by a few
// rows of x, with its sums in registers. For 8-bit weights a panel is
//
//                  output 0       output 1            output 31
//     inputs 0-3   | q q q q |    | q q q q |   ...   | q q q q |     128 bytes: two steps of dot()
//     inputs 4-7   | q q q q |    | q q q q |   ...   | q q q q |
//     ...
//
// for 4-bit weights the same with two inputs per byte (low half: inputs 8g .. 8g+3, high half: 8g+4 .. 8g+7), and for
// float32 one line of 32 floats per input. In a gated layer a panel has 16 gates followed by the 16 values that they
// scale, so that a tile has both. packing.py packs panels.
//
// Rows of x are normalised and quantized to int8 by the operator: with one scale per row ("int8"), or per block of
// inputs ("int8_block": 64, "int4_block": 32), in which case the weights also have a scale per output and block.
//
// The formats of blocks.hpp keep the numbers of a checkpoint; the outputs of one layer may have several of them.
//
// The bits of an output depend only on its row. Sums of integers are exact in any order; floats are added in the order
// of the inputs, in one chain per output, for any number of rows in a tile and on any thread.
#pragma once

#include "activation.hpp"
#include "amx.hpp"
#include "blocks.hpp"
#include "low_rank.hpp"
#include "norm.hpp"
#include "team.hpp"
#include "tensor.hpp"
#include "tiles.hpp"

namespace genserve {

constexpr int kInt8Block = 64;   // inputs of a block; inputs of 8-bit weights are padded to a multiple of it
constexpr int kInt4Block = 32;
constexpr int kPackedTiles = 2;  // tiles that read packed blocks; for more, unpacking them once pays
constexpr int kChunkRows = 96;   // most rows of a chunk, which stay in the L2 cache while a panel streams
static_assert(kMatrixRows == 0 || kMatrixRows == kChunkRows);
constexpr int64_t kMaxInt8Inputs = 1 << 17;  // 2^17 * 127 * 127 is below 2^31

enum class WeightFormat : int32_t {
  kInt8, kInt8Block, kInt4Block, kFloat32, kQ4, kQ5, kQ8, kQ4K, kQ5K, kQ6K, kQ4Z32, kQ4Z64, kQ4Z128
};

inline bool in_blocks(WeightFormat format) { return format >= WeightFormat::kQ4; }

// Consecutive outputs whose weights have another format than the first ones.
struct Segment {
  int64_t outputs;  // 0: none
  WeightFormat weight_format;
};
constexpr int kMoreSegments = 2;

struct LinearAttributes {
  int64_t in_features;
  int64_t out_features;  // of a gated layer: gates and values together
  WeightFormat weight_format;
  Norm norm;
  Activation activation;
  int32_t gated;
  float epsilon;
  float softcap;  // 0: none
  Segment more[kMoreSegments];  // with the formats of blocks.hpp only, and not gated
};

struct LinearInputs {
  Tensor x, weight, scales, bias, norm_weight, norm_bias, residual;
  Tensor order;  // the inputs in the order of the weight, with the formats of blocks.hpp
};

// Calls `work` with the format of blocks.hpp as a type.
template <class Work>
inline auto with_blocks(WeightFormat format, Work work) {
  switch (format) {
    case WeightFormat::kQ5: return work(BlocksFormat<HalfScales<5>>());
    case WeightFormat::kQ8: return work(BlocksFormat<EightBitScales>());
    case WeightFormat::kQ4K: return work(BlocksFormat<SuperScales<4>>());
    case WeightFormat::kQ5K: return work(BlocksFormat<SuperScales<5>>());
    case WeightFormat::kQ6K: return work(BlocksFormat<SixBitScales>());
    case WeightFormat::kQ4Z32: return work(BlocksFormat<ZeroScales<32>>());
    case WeightFormat::kQ4Z64: return work(BlocksFormat<ZeroScales<64>>());
    case WeightFormat::kQ4Z128: return work(BlocksFormat<ZeroScales<128>>());
    default: return work(BlocksFormat<HalfScales<4>>());
  }
}

// Inputs are padded to a multiple of it.
inline int64_t inputs_of_block(WeightFormat format) {
  switch (format) {
    case WeightFormat::kFloat32: return 1;
    case WeightFormat::kInt4Block: return kInt4Block;
    case WeightFormat::kInt8:
    case WeightFormat::kInt8Block: return kInt8Block;
    default: return with_blocks(format, [](auto blocks) { return (int64_t)decltype(blocks)::kInputs; });
  }
}

// Consecutive panels of one format.
struct Panels {
  WeightFormat format;
  int64_t first, outputs;   // the first output, and their number
  int64_t start;            // the first panel
  int64_t offset, bytes;    // of the first panel in the weight, and of each
};

// Sizes that follow from the attributes.
struct LinearSizes {
  int64_t outputs;       // columns of y
  int64_t panels;
  int64_t inputs;        // with padding
  int64_t blocks;        // scales of a row
  int64_t panel_bytes;   // of the largest
  int64_t weight_bytes;
  bool by_pairs;         // whether rows are rounded for weights of 8 bits; see round_inputs
  Panels parts[1 + kMoreSegments];
  int num_parts;

  explicit LinearSizes(const LinearAttributes& a) {
    outputs = a.gated ? a.out_features / 2 : a.out_features;
    int64_t first_outputs = outputs, multiple = inputs_of_block(a.weight_format);
    for (const Segment& each : a.more) {
      first_outputs -= each.outputs;
      if (each.outputs > 0 && inputs_of_block(each.weight_format) > multiple) multiple = inputs_of_block(each.weight_format);
    }
    inputs = (a.in_features + multiple - 1) / multiple * multiple;
    blocks = a.weight_format == WeightFormat::kInt8Block                                           ? inputs / kInt8Block
             : a.weight_format == WeightFormat::kInt4Block || in_blocks(a.weight_format) ? inputs / kBlock
                                                                                           : 1;
    panels = panel_bytes = weight_bytes = 0;
    by_pairs = false;
    num_parts = 0;
    add(a.weight_format, first_outputs, a.gated ? kPanel / 2 : kPanel);
    for (const Segment& each : a.more) {
      if (each.outputs > 0) add(each.weight_format, each.outputs, kPanel);
    }
  }

  const Panels& part_of(int64_t panel) const {
    int i = num_parts - 1;
    while (i > 0 && panel < parts[i].start) i--;
    return parts[i];
  }
  int64_t offset_of(int64_t panel) const {
    const Panels& part = part_of(panel);
    return part.offset + (panel - part.start) * part.bytes;
  }

 private:
  void add(WeightFormat format, int64_t count, int64_t per_panel) {
    const int64_t first = num_parts == 0 ? 0 : parts[num_parts - 1].first + parts[num_parts - 1].outputs;
    const int64_t bytes = in_blocks(format)
                              ? with_blocks(format, [&](auto blocks) { return decltype(blocks)::panel_bytes(inputs); })
                          : format == WeightFormat::kInt4Block ? inputs * kPanel / 2
                          : format == WeightFormat::kFloat32   ? inputs * kPanel * (int64_t)sizeof(float)
                                                               : inputs * kPanel;
    by_pairs = by_pairs || format == WeightFormat::kQ8 || format == WeightFormat::kInt8 || format == WeightFormat::kInt8Block;
    parts[num_parts++] = {format, first, count, panels, weight_bytes, bytes};
    const int64_t more = (count + per_panel - 1) / per_panel;
    panels += more;
    weight_bytes += more * bytes;
    if (bytes > panel_bytes) panel_bytes = bytes;
  }
};

// The panels that a thread multiplies side by side: one, or kPanelsTogether by few rows, if all threads get some.
inline int64_t panels_together(WeightFormat format, int64_t rows, int64_t panels, int threads) {
  return rows <= kFewRows && in_blocks(format) && panels >= 2 * kPanelsTogether * threads ? kPanelsTogether : 1;
}

// Whether all required weights are given; in a graph, some may only come with the rows.
inline bool has_weights(const LinearAttributes& a, const LinearInputs& in) {
  const bool scales = a.weight_format != WeightFormat::kFloat32 && !in_blocks(a.weight_format);
  return in.weight.present() && (in.scales.present() || !scales) &&
         (in.norm_weight.present() || a.norm != Norm::kRms);
}

inline bool check_order(const LinearAttributes& a, const Tensor& order, Error& error) {
  if (!order.present()) return true;
  if (!in_blocks(a.weight_format)) return error.set("order is given, and weight_format is none of the formats in blocks");
  if (!check(order, "order", Type::kInt32, error, a.in_features)) return false;
  const uint32_t inputs = (uint32_t)a.in_features;
  uint32_t largest = 0;
  for (uint32_t i = 0; i < inputs; i++) {
    const uint32_t at = order.as<uint32_t>()[i];
    largest = at > largest ? at : largest;
  }
  return largest < inputs || error.set("order has an input that is not below %lld", (long long)a.in_features);
}

// Whether the weights match the attributes.
inline bool check_weights(const LinearAttributes& a, const LinearInputs& in, Error& error) {
  const Type f32 = Type::kFloat32;
  if (!is_size(a.in_features) || !is_size(a.out_features) || (a.gated && a.out_features % 2 != 0)) {
    return error.set("in_features %lld and out_features %lld make no layer", (long long)a.in_features,
                     (long long)a.out_features);
  }
  int64_t others = 0;
  for (const Segment& each : a.more) {
    if (each.outputs == 0) continue;
    others += each.outputs;
    const bool fits = in_blocks(a.weight_format) && in_blocks(each.weight_format) && !a.gated;
    if (!fits || each.outputs < 0 || each.outputs >= a.out_features || others >= a.out_features) {
      return error.set("the outputs of weight_format make no layer of %lld outputs", (long long)a.out_features);
    }
  }
  const LinearSizes sizes(a);
  bool good = true;
  switch (a.weight_format) {
    case WeightFormat::kInt8:
      if (sizes.inputs > kMaxInt8Inputs) {
        return error.set("in_features %lld: sums of \"int8\" hold %lld; use \"int8_block\"", (long long)a.in_features,
                         (long long)kMaxInt8Inputs);
      }
      good = check(in.weight, "weight", Type::kUint8, error, sizes.panels, sizes.inputs / 4, kPanel, 4) &&
             check(in.scales, "scales", f32, error, sizes.panels, kPanel);
      break;
    case WeightFormat::kInt8Block:
      good = check(in.weight, "weight", Type::kUint8, error, sizes.panels, sizes.inputs / 4, kPanel, 4) &&
             check(in.scales, "scales", f32, error, sizes.panels, sizes.blocks, kPanel);
      break;
    case WeightFormat::kInt4Block:
      good = check(in.weight, "weight", Type::kUint8, error, sizes.panels, sizes.inputs / 8, kPanel, 4) &&
             check(in.scales, "scales", f32, error, sizes.panels, sizes.blocks, kPanel);
      break;
    case WeightFormat::kFloat32:
      if (in.scales.present()) return error.set("weights of float32 have no scales");
      good = check(in.weight, "weight", f32, error, sizes.panels, sizes.inputs, kPanel);
      break;
    default:
      if (in.scales.present()) return error.set("weights in blocks have their scales with them");
      good = check(in.weight, "weight", Type::kUint8, error, sizes.weight_bytes);
      break;
  }
  good = good && check_optional(in.bias, "bias", f32, error, a.out_features);
  if (!good) return false;
  if (a.norm == Norm::kNone && (in.norm_weight.present() || in.norm_bias.present())) {
    return error.set("norm_weight or norm_bias is given and norm is \"\"");
  }
  if (a.norm == Norm::kRms && in.norm_bias.present()) return error.set("norm \"rms\" has no norm_bias");
  if (a.norm == Norm::kRms && !in.norm_weight.present()) return error.set("norm_weight is missing");
  return check_optional(in.norm_weight, "norm_weight", f32, error, a.in_features) &&
         check_optional(in.norm_bias, "norm_bias", f32, error, a.in_features) && check_order(a, in.order, error);
}

inline bool check_rows(const LinearAttributes& a, const LinearInputs& in, Error& error) {
  return check(in.x, "x", Type::kFloat32, error, kAny, a.in_features) &&
         check_optional(in.residual, "residual", Type::kFloat32, error, in.x.shape[0], LinearSizes(a).outputs);
}

// ----------------------------------------------------------------------------------- rows: norm and quantization

// The values of a row in another order.
template <Norm norm>
struct OrderedRow {
  const NormedRow<norm>& row;
  const int32_t* order;

  __attribute__((always_inline)) f32x16 get(int64_t i, int64_t count) const {
    float values[kLanes]{};
    for (int64_t lane = 0; lane < kLanes && lane < count; lane++) values[lane] = row.at(order[i + lane]);
    return load(values);
  }
};

// Quantizes inputs [from, to) of a row with one scale, and fills q up to `end` with zeros. The largest magnitude becomes
// 127: that of the values or, with `by_pairs`, also of the sums of neighbours 2i and 2i + 1, because dot() needs small
// pairs. A sum of weights + `offset` times these inputs starts at `start`.
template <class Row>
inline void round_inputs(const Row& row, int64_t from, int64_t to, int64_t end, bool by_pairs, int offset, int8_t* q,
                         float* scale, int32_t* start) {
  i32x16 largest{};  // the magnitudes of floats have the same order as integers, with NaN above infinity
  for (int64_t i = from; i < to; i += kLanes) {
    const f32x16 x = row.get(i, to - i);
    largest = max(largest, (i32x16)abs(x));
    if (by_pairs) largest = max(largest, (i32x16)abs(x + swap_neighbours(x)));
  }
  const float top = __builtin_bit_cast(float, maximum(largest));
  constexpr float kLeast = 1e-36f;  // 127 / top is finite
  if (!(top >= kLeast && top <= __FLT_MAX__)) {
    memset(q + from, 0, (size_t)(end - from));
    // Infinity or NaN in x, or a sum of two beyond the floats: every output of the row is NaN.
    *scale = top < kLeast ? 0.0f : __builtin_nanf("");
    *start = 0;
    return;
  }
  const f32x16 inverse = broadcast(127.0f / top);
  i32x16 sums{};
  for (int64_t i = from; i < to; i += kLanes) {
    const i32x16 v = round_to_int(row.get(i, to - i), inverse);
    sums += v;
    store(q + i, v);  // zeros beyond the row; `end` is a multiple of sixteen
  }
  const int64_t written = from + (to - from + kLanes - 1) / kLanes * kLanes;
  if (written < end) memset(q + written, 0, (size_t)(end - written));
  *scale = top / 127.0f;
  *start = -offset * sum(sums);
}

// The same for the formats of blocks.hpp: blocks of 32 inputs from input `from` on, at most sixteen. Values above 1e33
// count as infinite, since the correction of their scale would be.
template <class Row>
inline void round_blocks(const Row& row, int64_t from, int64_t to, int64_t blocks, bool by_pairs, BlockOfRow* result) {
  constexpr float kLeast = 1e-36f, kMost = 1e33f;
  i32x16 largest[kLanes] = {}, sums[2][kLanes] = {};
  for (int64_t b = 0; b < blocks; b++) {
    for (int64_t i = from + b * kBlock; i < smaller(from + (b + 1) * kBlock, to); i += kLanes) {
      const f32x16 x = row.get(i, to - i);
      largest[b] = max(largest[b], (i32x16)abs(x));
      if (by_pairs) largest[b] = max(largest[b], (i32x16)abs(x + swap_neighbours(x)));
    }
  }
  const f32x16 top = (f32x16)fold_vectors(largest, [](i32x16 a, i32x16 b) { return max(a, b); });
  const i32x16 small = top < kLeast, good = (top >= kLeast) & (top <= kMost);
  float inverses[kLanes];
  store(inverses, good ? 127.0f / top : f32x16{});
  for (int64_t b = 0; b < blocks; b++) {
    GENSERVE_UNROLL
    for (int half = 0; half < 2; half++) {
      const int64_t i = from + b * kBlock + half * kLanes;
      const bool some = i < to && inverses[b] > 0.0f;
      const i32x16 v = some ? round_to_int(row.get(i, to - i), broadcast(inverses[b])) : i32x16{};
      store(result[b].q + half * kLanes, v);
      // Inputs 0 and 1 of every four in the lower 16 bits, 2 and 3 above: sums of both in one.
      const u32x16 place = {0, 0, 16, 16, 0, 0, 16, 16, 0, 0, 16, 16, 0, 0, 16, 16};
      sums[half][b] = (i32x16)((u32x16)v << place);
    }
  }
  const auto add = [](i32x16 a, i32x16 b) { return (i32x16)((u32x16)a + (u32x16)b); };
  i32x16 low[2], high[2], both[2];
  for (int half = 0; half < 2; half++) {
    const i32x16 packed = fold_vectors(sums[half], add);
    low[half] = (i32x16)((u32x16)packed << 16) >> 16;
    high[half] = (packed - low[half]) >> 16;
    both[half] = low[half] + high[half];
  }
  const i32x16 all = both[0] + both[1];
  const f32x16 rounded = (f32x16)((i32x16)(top / 127.0f) & ~3);
  const f32x16 scale = small ? f32x16{} : good ? rounded : broadcast(__builtin_nanf(""));
  const auto start = [](i32x16 low, i32x16 high, int offset) {
    if (kPackedSums) return (low * -offset & 0xffff) | (i32x16)((u32x16)(high * -offset) << 16);
    return kExactBits - (low + high) * offset;
  };
  const i32x16 numbers[] = {
      (i32x16)scale,
      (i32x16)(scale * -kExact),
      (i32x16)(__builtin_convertvector(all, f32x16) * scale),
      start(low[0], high[0], 32),
      start(low[1], high[1], 32),
      kExactBits - all * kInt8Offset,
      start(low[0] + low[1], high[0] + high[1], 16),
      kExactBits + all * 16,
  };
  constexpr int kNumbers = sizeof numbers / sizeof *numbers;
  for (int64_t b = 0; b < blocks; b++) {
    int32_t of_block[kNumbers];
    for (int i = 0; i < kNumbers; i++) of_block[i] = numbers[i][b];
    memcpy(&result[b].scale, of_block, sizeof of_block);
  }
}

// Rows as a weight needs them: normalised, and quantized unless the weight is float32.
class PreparedRows {
 public:
  // The norm is that of the inputs, which may be filled later.
  PreparedRows(const LinearAttributes& attributes, const LinearInputs& inputs, const LinearSizes& sizes)
      : a_(attributes), in_(inputs), sizes_(sizes) {}

  // The memory of a number of rows.
  size_t bytes(int64_t rows) const {
    return Scratch::bytes_of<char>(bytes_of_row() * rows_in_memory(rows)) + Scratch::bytes_of<float>(scales_of(rows)) +
           Scratch::bytes_of<int32_t>(scales_of(rows));
  }
  void open(Scratch& scratch, int64_t rows) {
    values_ = scratch.take<char>(bytes_of_row() * rows_in_memory(rows));
    scales_ = scratch.take<float>(scales_of(rows));
    starts_ = scratch.take<int32_t>(scales_of(rows));
  }

  // Prepares x [in_features] as a row.
  void prepare(int64_t row, const float* x) {
    switch (a_.norm) {
      case Norm::kNone: return prepare<Norm::kNone>(row, x);
      case Norm::kRms: return prepare<Norm::kRms>(row, x);
      case Norm::kLayer: return prepare<Norm::kLayer>(row, x);
    }
  }

  // Copies a row that is prepared.
  void copy(int64_t from, int64_t to) {
    const auto copy_row = [&](auto* values, size_t count) {
      if (count > 0) memcpy(values + (size_t)to * count, values + (size_t)from * count, count * sizeof *values);
    };
    copy_row(values_, bytes_of_row());
    copy_row(scales_, scales_of(1));
    copy_row(starts_, scales_of(1));
  }

  InputRows from(int64_t row) const {
    return {q() + row * sizes_.inputs,     values() + row * sizes_.inputs, sizes_.inputs, scales_ + scales_of(row),
            starts_ + scales_of(row), sizes_.blocks};
  }
  // The same for the formats of blocks.hpp.
  const BlockOfRow* blocks_from(int64_t row) const { return blocks() + row * sizes_.blocks; }

 private:
  bool is_float() const { return a_.weight_format == WeightFormat::kFloat32; }
  size_t bytes_of_row() const {
    if (in_blocks(a_.weight_format)) return (size_t)sizes_.blocks * sizeof(BlockOfRow);
    return (size_t)sizes_.inputs * (is_float() ? sizeof(float) : sizeof(int8_t));
  }
  // Matrices read the memory of sixteen rows, of which only the first may exist.
  static size_t rows_in_memory(int64_t rows) { return (size_t)(rows > 0 && kMatrixRows > 0 ? rows + kRowsOfMatrix - 1 : rows); }
  // Blocks of blocks.hpp have theirs within them.
  size_t scales_of(int64_t rows) const {
    return is_float() || in_blocks(a_.weight_format) ? 0 : (size_t)(rows * sizes_.blocks);
  }
  int8_t* q() const { return reinterpret_cast<int8_t*>(values_); }
  float* values() const { return reinterpret_cast<float*>(values_); }
  BlockOfRow* blocks() const { return reinterpret_cast<BlockOfRow*>(values_); }

  template <Norm norm>
  void prepare(int64_t row, const float* x) {
    const int64_t n = a_.in_features, padded = sizes_.inputs, blocks = sizes_.blocks, block = padded / blocks;
    const NormedRow<norm> normed(x, in_.norm_weight.as<float>(), in_.norm_bias.as<float>(), n, a_.epsilon);
    if (is_float()) {
      for (int64_t i = 0; i < n; i += kLanes) store_first(values() + row * n + i, normed.get(i, n - i), n - i);
      return;
    }
    if (in_blocks(a_.weight_format)) {
      if (!in_.order.present()) return prepare_blocks(normed, row);
      return prepare_blocks(OrderedRow<norm>{normed, in_.order.as<int32_t>()}, row);
    }
    const int offset = a_.weight_format == WeightFormat::kInt4Block ? kInt4Offset : kInt8Offset;
    for (int64_t b = 0, at = row * blocks; b < blocks; b++, at++) {
      round_inputs(normed, b * block, smaller(n, b * block + block), b * block + block, sizes_.by_pairs, offset,
                   q() + row * padded, scales_ + at, starts_ + at);
    }
  }

  template <class Row>
  void prepare_blocks(const Row& values, int64_t row) {
    const int64_t n = a_.in_features, count = sizes_.blocks;
    for (int64_t b = 0; b < count; b += kLanes) {
      round_blocks(values, b * kBlock, n, smaller(count - b, kLanes), sizes_.by_pairs, blocks() + row * count + b);
    }
  }

  const LinearAttributes& a_;
  const LinearInputs& in_;
  const LinearSizes& sizes_;
  char* values_ = nullptr;
  float* scales_ = nullptr;
  int32_t* starts_ = nullptr;
};

// ------------------------------------------------------------------------------------------- tiles

// A format computes the outputs of kRows rows with tile(), in registers for up to kVectorRows. With matrices, kRowsOfTile is
// larger, and multiply_matrix() computes any rows up to it.
struct Int8Format {
  static constexpr int kVectorRows = kInt8Rows, kRowsOfTile = kMatrixRows > 0 ? kMatrixRows : kVectorRows;

  template <int kRows>
  static void tile(const InputRows& x, int64_t row, const void* panel, const float* scales, Ahead ahead, Outputs* y) {
    constexpr int kGroups = groups_of(kRows);
    // With few sums, latencies would add up: as many as fit in half of the registers.
    constexpr int kChains = kRows > 2 ? 1 : kGroupsOfTile == 2 ? 4 : 2 / kRows;
    for (int first = 0; first < 2; first += kGroups) {
      u32x16 sums[kChains][kRows][kGroups];
      GENSERVE_UNROLL
      for (int r = 0; r < kRows; r++) {
        GENSERVE_UNROLL
        for (int g = 0; g < kGroups; g++) {
          sums[0][r][g] = (u32x16)broadcast(x.starts[row + r]);
          GENSERVE_UNROLL
          for (int c = 1; c < kChains; c++) sums[c][r][g] = u32x16{};
        }
      }
      const uint8_t* w = static_cast<const uint8_t*>(panel) + 64 * first;
      const uint8_t* const end = w + x.stride * kPanel;
      RowPointers<int8_t, kRows> rows(x.q + row * x.stride, x.stride);
      for (; w != end; w += 128 * kChains) {
        GENSERVE_UNROLL
        for (int c = 0; c < kChains; c++) {
          Int8Weights weights[kGroups];
          GENSERVE_UNROLL
          for (int g = 0; g < kGroups; g++) {
            weights[g] = int8_weights(load_bytes(w + 128 * c + 64 * g));
            ahead.prefetch();
          }
          GENSERVE_UNROLL
          for (int r = 0; r < kRows; r++) {
            const int32_t inputs = four_bytes(rows.at(r) + 4 * c);
            GENSERVE_UNROLL
            for (int g = 0; g < kGroups; g++) sums[c][r][g] = dot(sums[c][r][g], weights[g], inputs);
          }
        }
        rows.advance(4 * kChains);
      }
      GENSERVE_UNROLL
      for (int g = 0; g < kGroups; g++) {
        const f32x16 scale = load(scales + kLanes * (first + g));
        GENSERVE_UNROLL
        for (int r = 0; r < kRows; r++) {
          u32x16 total = sums[0][r][g];
          GENSERVE_UNROLL
          for (int c = 1; c < kChains; c++) total += sums[c][r][g];
          y[r][first + g] = __builtin_convertvector((i32x16)total, f32x16) * (scale * x.scales[row + r]);
        }
      }
    }
  }

  static void multiply_matrix(int rows, const InputRows& x, int64_t row, const void* panel, const float* scales, Ahead ahead,
                              Outputs* y) {
    const MatrixRegisters registers;
    MatrixSums sums;
    registers.multiply(rows, x.q + row * x.stride, x.stride, static_cast<const uint8_t*>(panel), x.stride, ahead, sums);
    GENSERVE_UNROLL
    for (int g = 0; g < 2; g++) {
      const f32x16 scale = load(scales + kLanes * g);
      const float* const x_scales = x.scales + row;
      const int32_t* const starts = x.starts + row;
      for (int r = 0; r < rows; r++) {
        const u32x16 total = sums.get(r, g) + (u32x16)broadcast(starts[r]);
        y[r][g] = __builtin_convertvector((i32x16)total, f32x16) * (scale * x_scales[r]);
      }
    }
  }
};

// Weights with a scale per block of inputs: integer sums within a block, float sums over blocks.
template <int kBits, class Sums>
struct BlockFormat {
  // Four bits would have to be unpacked for matrices, which costs what these save.
  static constexpr int kVectorRows = kBlockRows, kRowsOfTile = kBits == 8 && kMatrixRows > 0 ? kMatrixRows : kVectorRows;
  static constexpr int kInputs = kBits == 8 ? kInt8Block : kInt4Block;       // of a block
  static constexpr int kInputsOfStep = kBits == 8 ? 4 : 8;                   // in the 128 bytes of a step

  template <int kRows>
  static void tile(const InputRows& x, int64_t row, const void* panel, const float* scales, Ahead ahead, Outputs* y) {
    constexpr int kGroups = groups_of(kRows);
    for (int first = 0; first < 2; first += kGroups) {
      f32x16 totals[kRows][kGroups];
      GENSERVE_UNROLL
      for (int r = 0; r < kRows; r++) {
        GENSERVE_UNROLL
        for (int g = 0; g < kGroups; g++) totals[r][g] = f32x16{};
      }
      const uint8_t* w = static_cast<const uint8_t*>(panel) + 64 * first;
      const float* scale = scales + kLanes * first;
      const float* x_scale = x.scales + row * x.blocks;
      const int32_t* start = x.starts + row * x.blocks;
      RowPointers<int8_t, kRows> rows(x.q + row * x.stride, x.stride);
      for (int64_t block = 0; block < x.blocks; block++, scale += kPanel, x_scale++, start++) {
        Sums sums[kRows][kGroups];
        GENSERVE_UNROLL
        for (int r = 0; r < kRows; r++) {
          GENSERVE_UNROLL
          for (int g = 0; g < kGroups; g++) start_sums(sums[r][g], (u32x16)broadcast(start[r * x.blocks]));
        }
        for (int step = 0; step < kInputs / kInputsOfStep; step++, w += 128) {
          GENSERVE_UNROLL
          for (int part = 0; part < kInputsOfStep / 4; part++) {
            GENSERVE_UNROLL
            for (int g = 0; g < kGroups; g++) {
              const u8x64 bytes = load_bytes(w + 64 * g);
              if (part == 0) ahead.prefetch();
              GENSERVE_UNROLL
              for (int r = 0; r < kRows; r++) {
                const int32_t inputs = four_bytes(rows.at(r) + 4 * part);
                if constexpr (kBits == 8) {
                  sums[r][g] = dot(sums[r][g], int8_weights(bytes), inputs);
                } else {
                  sums[r][g] = dot(sums[r][g], int4_weights(part == 0 ? bytes & 15 : bytes >> 4), inputs);
                }
              }
            }
          }
          rows.advance(kInputsOfStep);
        }
        GENSERVE_UNROLL
        for (int g = 0; g < kGroups; g++) {
          const f32x16 weight_scale = load(scale + kLanes * g);
          GENSERVE_UNROLL
          for (int r = 0; r < kRows; r++) {
            const u32x16 all = total(sums[r][g], (u32x16)broadcast(start[r * x.blocks]));
            const f32x16 integers = __builtin_convertvector((i32x16)all, f32x16);
            totals[r][g] = fma(integers, weight_scale * x_scale[r * x.blocks], totals[r][g]);
          }
        }
      }
      GENSERVE_UNROLL
      for (int r = 0; r < kRows; r++) {
        GENSERVE_UNROLL
        for (int g = 0; g < kGroups; g++) y[r][first + g] = totals[r][g];
      }
    }
  }

  static void multiply_matrix(int rows, const InputRows& x, int64_t row, const void* panel, const float* scales, Ahead ahead,
                              Outputs* y) {
    const MatrixRegisters registers;
    MatrixSums sums;
    const int8_t* q = x.q + row * x.stride;
    const uint8_t* w = static_cast<const uint8_t*>(panel);
    memset(y, 0, sizeof *y * (size_t)rows);
    for (int64_t block = 0; block < x.blocks; block++, q += kInputs, w += kInputs * kPanel, scales += kPanel) {
      registers.multiply(rows, q, x.stride, w, kInputs, ahead, sums);
      GENSERVE_UNROLL
      for (int g = 0; g < 2; g++) {
        const f32x16 weight_scale = load(scales + kLanes * g);
        const float* x_scale = x.scales + row * x.blocks + block;
        const int32_t* start = x.starts + row * x.blocks + block;
        for (int r = 0; r < rows; r++, x_scale += x.blocks, start += x.blocks) {
          const u32x16 all = sums.get(r, g) + (u32x16)broadcast(*start);
          y[r][g] = fma(__builtin_convertvector((i32x16)all, f32x16), weight_scale * *x_scale, y[r][g]);
        }
      }
    }
  }
};

typedef BlockFormat<8, u32x16> Int8BlockFormat;
typedef BlockFormat<4, Int4Sums> Int4BlockFormat;
static_assert(kInt4Block / 4 * 15 * 127 * 2 < 1 << 15);  // AVX2's Int4Sums have 16 bits

struct Float32Format {
  static constexpr int kVectorRows = kFloatRows, kRowsOfTile = kVectorRows;

  template <int kRows>
  static void tile(const InputRows& x, int64_t row, const void* panel, const float*, Ahead ahead, Outputs* y) {
    constexpr int kGroups = groups_of(kRows);
    for (int first = 0; first < 2; first += kGroups) {
      f32x16 sums[kRows][kGroups];
      GENSERVE_UNROLL
      for (int r = 0; r < kRows; r++) {
        GENSERVE_UNROLL
        for (int g = 0; g < kGroups; g++) sums[r][g] = f32x16{};
      }
      const float* w = static_cast<const float*>(panel) + kLanes * first;
      const float* const end = w + x.stride * kPanel;
      RowPointers<float, kRows> rows(x.values + row * x.stride, x.stride);
      for (; w != end; w += kPanel) {
        f32x16 weights[kGroups];
        GENSERVE_UNROLL
        for (int g = 0; g < kGroups; g++) {
          weights[g] = load(w + kLanes * g);
          ahead.prefetch();
        }
        GENSERVE_UNROLL
        for (int r = 0; r < kRows; r++) {
          const float input = *rows.at(r);
          GENSERVE_UNROLL
          for (int g = 0; g < kGroups; g++) sums[r][g] = fma(input, weights[g], sums[r][g]);
        }
        rows.advance(1);
      }
      GENSERVE_UNROLL
      for (int r = 0; r < kRows; r++) {
        GENSERVE_UNROLL
        for (int g = 0; g < kGroups; g++) y[r][first + g] = sums[r][g];
      }
    }
  }
};

// A tile of `rows` (1 to Format::kRowsOfTile) rows.
template <class Format, int kRows = Format::kVectorRows>
inline void multiply(int rows, const InputRows& x, int64_t row, const void* panel, const float* scales, Ahead ahead,
                     Outputs* y) {
  if constexpr (kRows == Format::kVectorRows && kRows < Format::kRowsOfTile) {
    if (rows > kRows) return Format::multiply_matrix(rows, x, row, panel, scales, ahead, y);
  }
  if constexpr (kRows > 1) {
    if (rows < kRows) return multiply<Format, kRows - 1>(rows, x, row, panel, scales, ahead, y);
  }
  Format::template tile<kRows>(x, row, panel, scales, ahead, y);
}

// Calls `work` with a format that is none of blocks.hpp as a type.
template <class Work>
inline void with_format(WeightFormat format, Work work) {
  switch (format) {
    case WeightFormat::kInt8: return work(Int8Format());
    case WeightFormat::kInt8Block: return work(Int8BlockFormat());
    case WeightFormat::kInt4Block: return work(Int4BlockFormat());
    default: return work(Float32Format());
  }
}

// Multiplies a panel of `bytes` in a format of blocks.hpp by rows: y [rows]. share(next, tile, tiles, bytes) returns what a
// tile prefetches of the `bytes` at `next`; before(row, height) is called before the sums of rows are complete.
template <class Format, class Share, class Before>
inline void multiply_panel_of_blocks(const uint8_t* weights, int64_t panel_bytes, const BlockOfRow* x, int64_t blocks,
                                     int64_t rows, Share&& share, Before&& before, Outputs* y) {
  memset(y, 0, sizeof *y * (size_t)rows);
  const int64_t tiles = (rows + kBlockRows - 1) / kBlockRows;
  const auto height_of = [&](int64_t row, int64_t tile) { return (int)((rows - row + tiles - tile - 1) / (tiles - tile)); };
  if (tiles <= kPackedTiles) {
    const typename Format::FromPacked packed(weights);
    const bool alone = rows <= kFewRows;
    for (int64_t tile = 0, row = 0; tile < tiles; tile++) {
      const int height = height_of(row, tile);
      before(row, height);
      const Ahead ahead = share(weights + (alone ? 4096 : panel_bytes), tile, tiles, panel_bytes);
      Format::template multiply<kBlockRows>(height, packed, x + row * blocks, blocks, blocks, ahead, y + row);
      row += height;
    }
    return;
  }
  typename Format::Unpacked unpacked;
  constexpr int64_t kMost = Format::Unpacked::kMost, kTogether = Format::kTogether;
  const int64_t parts = (blocks + kMost - 1) / kMost;
  for (int64_t p = 0; p < parts; p++) {
    const int64_t first = blocks / kTogether * p / parts * kTogether;
    const int64_t count = blocks / kTogether * (p + 1) / parts * kTogether - first;
    const uint8_t* const next = Format::unpack(weights, count, unpacked);
    const typename Format::FromUnpacked from_unpacked{unpacked};
    for (int64_t tile = 0, row = 0; tile < tiles; tile++) {
      const int height = height_of(row, tile);
      if (p + 1 == parts) before(row, height);
      const Ahead ahead = share(next, tile, tiles, next - weights);
      Format::template multiply<kBlockRows>(height, from_unpacked, x + row * blocks + first, blocks, count, ahead, y + row);
      row += height;
    }
    weights = next;
  }
}

// Multiplies kPanelsTogether panels in a format of blocks.hpp by few rows: finish(panel, outputs) for each panel.
template <class Finish>
inline void multiply_panels_of_blocks(WeightFormat format, const uint8_t* panels, int64_t bytes, const BlockOfRow* x,
                                      int64_t blocks, int64_t rows, const uint8_t* next, Finish&& finish) {
  static_assert(kFewRows == 2);
  Outputs y[kPanelsTogether][kFewRows];
  with_blocks(format, [&](auto blocks_format) {
    typedef decltype(blocks_format) Format;
    if (rows == 1) return Format::template multiply_panels<1>(panels, bytes, x, blocks, next, y);
    Format::template multiply_panels<2>(panels, bytes, x, blocks, next, y);
  });
  for (int panel = 0; panel < kPanelsTogether; panel++) finish(panel, y[panel]);
}

// What a tile prefetches: its share of what is read next.
inline Ahead share_of(const uint8_t* next, int64_t tile, int64_t tiles, int64_t bytes) {
  const int64_t step = (64 + tiles - 1) / tiles;
  return {reinterpret_cast<const char*>(next) + tile * step * (bytes / 64), step};
}

// ------------------------------------------------------------------------------------------- the operator

class Linear {
 public:
  static constexpr int kPhases = 2;  // rows, panels

  // `inputs` and y [T, outputs] may be filled after the constructor, except for the number of rows.
  Linear(const LinearAttributes& attributes, const LinearInputs& inputs, float* y, const LinearAdapters& adapters = {})
      : a_(attributes),
        in_(inputs),
        sizes_(attributes),
        adapters_(adapters),
        y_(y),
        num_rows_(inputs.x.shape[0]),
        prepared_(attributes, inputs, sizes_),
        in_int8_(int8_block(attributes)),
        int8_sizes_(in_int8_),
        prepared_int8_(in_int8_, inputs, int8_sizes_) {}

  // Computes y from checked inputs.
  bool compute(const Threads& threads, Error& error) {
    if (!open(threads.count, error)) return false;
    // Few inputs are quantized before the other threads are woken, which is faster than synchronizing them.
    if (row_chunks_ > 0 && !adapters_.any() && num_rows_ * sizes_.inputs <= 4096) {
      prepare(0, num_rows_);
      row_chunks_ = 0;
    }
    Phase phases[kPhases]{};
    auto work = [&](size_t index) {
      Prefetch none;
      this->work(Team(phases), index, none);
    };
    threads.run(panel_chunks_, work);
    return true;
  }

  // The parts of compute(), for several operators in one call of the threads: open(), then on each thread work(), and
  // wait() unless it is the last one.
  bool open(int num_threads, Error& error) {
    num_threads_ = num_threads;
    as_they_are_ = a_.weight_format == WeightFormat::kFloat32 && a_.norm == Norm::kNone;
    const int64_t prepared = as_they_are_ ? 0 : num_rows_;
    const bool any = adapters_.any();
    rounds_again_ = any && (a_.weight_format == WeightFormat::kInt4Block || in_blocks(a_.weight_format));
    const int64_t rounded = rounds_again_ ? num_rows_ : 0;
    const size_t low = any ? (size_t)(num_rows_ * adapters_.most_ranks()) : 0;
    scratch_.open(prepared_.bytes(prepared) + prepared_int8_.bytes(rounded) + Scratch::bytes_of<float>(low));
    if (!scratch_) return error.set("out of memory for %lld rows", (long long)num_rows_);
    prepared_.open(scratch_, prepared);
    prepared_int8_.open(scratch_, rounded);
    low_ = scratch_.take<float>(low);
    row_chunks_ = as_they_are_ && !any ? 0 : (num_rows_ + kRowsOfChunk - 1) / kRowsOfChunk;
    row_groups_ = (num_rows_ + kChunkRows - 1) / kChunkRows;
    // A chunk has about 64 KiB of weights, to be worth its overhead, but each thread gets several.
    panels_of_chunk_ = smaller(65536 / sizes_.panel_bytes, sizes_.panels / (8 * num_threads));
    together_ = panels_together(a_.weight_format, num_rows_, sizes_.panels, num_threads);
    panels_of_chunk_ = panels_of_chunk_ < 1 ? together_ : (panels_of_chunk_ + together_ - 1) / together_ * together_;
    panel_chunks_ = (sizes_.panels + panels_of_chunk_ - 1) / panels_of_chunk_ * row_groups_;
    return true;
  }

  // Both phases. `weights` are prefetched while the thread waits for the rows of others.
  void work(Team team, size_t index, Prefetch& weights) {
    if (row_chunks_ > 0) {
      team.take(0, row_chunks_, [&](int64_t chunk) {
        prepare(kRowsOfChunk * chunk, smaller(kRowsOfChunk * (chunk + 1), num_rows_));
      });
      team.wait(0, row_chunks_, weights);
    }
    team.take_ranges(1, panel_chunks_, index, num_threads_, [&](int64_t chunk) {
      const int64_t group = chunk % row_groups_, first = chunk / row_groups_ * panels_of_chunk_;
      const int64_t from = num_rows_ * group / row_groups_, to = num_rows_ * (group + 1) / row_groups_;
      const int64_t end = smaller(first + panels_of_chunk_, sizes_.panels);
      for (int64_t p = first; p < end;) {
        if (together_ > 1 && p + together_ <= end && multiply_panels(p)) {
          p += together_;
        } else {
          multiply_panel(p++, from, to);
        }
      }
    });
  }

  // Waits until y is complete.
  void wait(Team team, Prefetch& next) { team.wait(1, panel_chunks_, next); }

  // The weights that a thread multiplies first, for earlier waits: at most what its L2 cache has room for.
  Prefetch first_weights(size_t index) const {
    constexpr int64_t kMost = 192 << 10;
    const int64_t first = Team::first_chunk(panel_chunks_, index, num_threads_) / row_groups_ * panels_of_chunk_;
    const int64_t offset = sizes_.offset_of(first);
    return {in_.weight.as<char>() + offset, smaller(sizes_.weight_bytes - offset, kMost)};
  }

 private:
  static constexpr int64_t kRowsOfChunk = 4;

  // The rows that adapters in int8 multiply where the weights of the layer are not of 8 bits.
  static LinearAttributes int8_block(const LinearAttributes& attributes) {
    LinearAttributes own = attributes;
    own.weight_format = WeightFormat::kInt8Block;
    for (Segment& each : own.more) each = {};
    return own;
  }

  // Normalises and quantizes rows [from, to) of x, in the order of their adapters, and computes A x.
  void prepare(int64_t from, int64_t to) {
    const bool any = adapters_.any();
    for (int64_t place = from; place < to; place++) {
      const int64_t row = any ? adapters_.row(place) : place;
      const float* const x = in_.x.as<float>() + row * a_.in_features;
      if (!as_they_are_) prepared_.prepare(row, x);
      if (rounds_again_ && place >= adapters_.num_plain()) prepared_int8_.prepare(row, x);
    }
    if (!any) return;
    for (int64_t place = from < adapters_.num_plain() ? adapters_.num_plain() : from; place < to;) {
      int64_t rows[kLowRankRows];
      int count = 0;
      const int32_t adapter = adapters_.adapter_of(adapters_.row(place));
      for (; place < to && count < kLowRankRows && adapters_.adapter_of(adapters_.row(place)) == adapter; place++) {
        rows[count++] = adapters_.row(place);
      }
      project_down<kLowRankRows>(count, adapters_.of_row(rows[0]), rows);
    }
  }

  template <int kRows>
  void project_down(int count, const LowRank& adapter, const int64_t* rows) {
    if constexpr (kRows > 1) {
      if (count < kRows) return project_down<kRows - 1>(count, adapter, rows);
    }
    if (adapter.is_float()) {
      const float* const values = as_they_are_ ? in_.x.as<float>() : prepared_.from(0).values;
      const float* x[kRows];
      float* low[kRows];
      for (int r = 0; r < kRows; r++) x[r] = values + rows[r] * a_.in_features, low[r] = low_of(rows[r]);
      return genserve::project_down<kRows>(adapter, a_.in_features, x, low);
    }
    LowBlock* low[kRows];
    for (int r = 0; r < kRows; r++) low[r] = reinterpret_cast<LowBlock*>(low_of(rows[r]));
    genserve::project_down<kRows>(adapter, (rounds_again_ ? prepared_int8_ : prepared_).from(0), rows, low);
  }

  float* low_of(int64_t row) const { return low_ + row * adapters_.most_ranks(); }

  void multiply_panel(int64_t panel, int64_t from, int64_t to) {
    if (adapters_.any()) adapters_.prefetch(panel);
    const Panels& part = sizes_.part_of(panel);
    if (!in_blocks(part.format)) {
      return with_format(part.format, [&](auto format) { multiply_panel<decltype(format)>(part, panel, from, to); });
    }
    with_blocks(part.format, [&](auto format) { multiply_blocks<decltype(format)>(part, panel, from, to); });
  }

  // The outputs of a panel: from the first one up to `end`.
  struct Place {
    int64_t panel, first, end;
  };

  Place place_of(const Panels& part, int64_t panel) const {
    return {panel, part.first + (panel - part.start) * (a_.gated ? kLanes : kPanel), part.first + part.outputs};
  }

  // Multiplies a panel by rows [from, to), in tiles of about equal heights.
  template <class Format>
  void multiply_panel(const Panels& part, int64_t panel, int64_t from, int64_t to) {
    InputRows rows = prepared_.from(from);
    if (as_they_are_) rows.values = in_.x.as<float>() + from * sizes_.inputs;
    const char* weights = in_.weight.as<char>() + part.offset + (panel - part.start) * part.bytes;
    const float* scales = in_.scales.present() ? in_.scales.as<float>() + panel * sizes_.blocks * kPanel : nullptr;
    const Place place = place_of(part, panel);
    Outputs y[Format::kRowsOfTile];
    int64_t tiles = (to - from + Format::kRowsOfTile - 1) / Format::kRowsOfTile;
    const int64_t step = (64 + tiles - 1) / tiles;
    const char* next = weights + part.bytes;
    for (int64_t row = 0; tiles > 0; tiles--, next += step * (part.bytes / 64)) {
      Ahead ahead{next, step};
      if (num_rows_ <= kFewRows) ahead = {weights + 4096, 64};
      if (from > 0) ahead = {weights, 0};  // the first group of rows has prefetched it
      const int height = (int)((to - from - row + tiles - 1) / tiles);
      prefetch_rows(place, from + row, height);
      multiply<Format>(height, rows, row, weights, scales, ahead, y);
      finish(place, from + row, height, y);
      row += height;
    }
  }

  // The same with a format of blocks.hpp.
  template <class Format>
  void multiply_blocks(const Panels& part, int64_t panel, int64_t from, int64_t to) {
    const uint8_t* weights = in_.weight.as<uint8_t>() + part.offset + (panel - part.start) * part.bytes;
    const Place place = place_of(part, panel);
    Outputs y[kChunkRows];
    const auto share = [&](const uint8_t* next, int64_t tile, int64_t tiles, int64_t bytes) {
      if (from > 0) return Ahead{reinterpret_cast<const char*>(next), 0};  // the first group of rows has done it for all
      return share_of(next, tile, tiles, bytes);
    };
    const auto before = [&](int64_t row, int height) { prefetch_rows(place, from + row, height); };
    multiply_panel_of_blocks<Format>(weights, part.bytes, prepared_.blocks_from(from), sizes_.blocks, to - from, share,
                                     before, y);
    finish(place, from, (int)(to - from), y);
  }

  // Multiplies kPanelsTogether panels from `first` on by few rows, if they have one format.
  bool multiply_panels(int64_t first) {
    const Panels& part = sizes_.part_of(first);
    if (&sizes_.part_of(first + kPanelsTogether - 1) != &part) return false;
    const int rows = (int)num_rows_;
    for (int i = 0; i < kPanelsTogether; i++) {
      if (adapters_.any()) adapters_.prefetch(first + i);
      prefetch_rows(place_of(part, first + i), 0, rows);
    }
    const uint8_t* const panels = in_.weight.as<uint8_t>() + part.offset + (first - part.start) * part.bytes;
    multiply_panels_of_blocks(part.format, panels, part.bytes, prepared_.blocks_from(0), sizes_.blocks, rows,
                              panels + kPanelsTogether * part.bytes,
                              [&](int i, Outputs* y) { finish(place_of(part, first + i), 0, rows, y); });
    return true;
  }

  // Prefetches what finish() writes of y and reads of the residual, which may be another page of memory for each row.
  void prefetch_rows(Place outputs, int64_t row, int height) const {
    const int64_t width = a_.gated ? kLanes : kPanel;
    for (int r = 0; r < height; r++) {
      const int64_t place = (row + r) * sizes_.outputs + outputs.first;
      for (int64_t i = 0; i < width; i += kLanes) {
        __builtin_prefetch(y_ + place + i, 1);
        if (in_.residual.present()) __builtin_prefetch(in_.residual.as<float>() + place + i);
      }
    }
  }

  // Adds B (A x) to the rows of a tile that have an adapter.
  void project_up(Place outputs, int64_t row, int height, Outputs* y) const {
    for (int r = 0; r < height; r++) {
      if (adapters_.adapter_of(row + r) < 0) continue;
      const LowRank& adapter = adapters_.of_row(row + r);
      if (adapter.rank == 0) continue;
      const float* const low = low_of(row + r);
      const LowRankGroup* const changed = adapter.groups + 2 * outputs.panel;
      for (int group = 0; group < 2; group++) {
        y[r][group] += adapter.is_float()
                           ? genserve::project_up(adapter, changed[group], low)
                           : genserve::project_up(adapter, changed[group], reinterpret_cast<const LowBlock*>(low));
      }
    }
  }

  // Applies bias, activation, gate, soft cap and residual to a tile, and stores it in y.
  void finish(Place outputs, int64_t row, int height, Outputs* y) {
    if (adapters_.any()) project_up(outputs, row, height, y);
    const int64_t width = a_.gated ? kLanes : kPanel;
    for (int64_t group = 0; group < width / kLanes; group++) {
      const int64_t at = outputs.first + group * kLanes;
      const int64_t count = outputs.end - at;
      if (count <= 0) return;
      const float* bias = in_.bias.as<float>();
      const f32x16 bias_here = bias == nullptr ? f32x16{} : load_first(bias + at, count);
      const f32x16 bias_up = bias == nullptr || !a_.gated ? f32x16{} : load_first(bias + sizes_.outputs + at, count);
      for (int r = 0; r < height; r++) {
        f32x16 v = y[r][group];
        if (bias != nullptr) v += bias_here;
        v = activate(a_.activation, v);
        if (a_.gated) v *= bias == nullptr ? y[r][1] : y[r][1] + bias_up;
        if (a_.softcap != 0.0f) v = a_.softcap * tanh(v / a_.softcap);
        const int64_t place = (row + r) * sizes_.outputs + at;
        if (in_.residual.present()) v += load_first(in_.residual.as<float>() + place, count);
        store_first(y_ + place, v, count);
      }
    }
  }

  const LinearAttributes& a_;
  const LinearInputs& in_;
  const LinearSizes sizes_;
  const LinearAdapters adapters_;
  float* y_;
  int64_t num_rows_;
  int num_threads_ = 1;
  bool as_they_are_ = false;  // rows of x are read without preparation
  int64_t row_chunks_ = 0;
  int64_t row_groups_ = 0;    // of up to kChunkRows rows
  int64_t panels_of_chunk_ = 0;
  int64_t together_ = 1;      // panels that are multiplied side by side
  int64_t panel_chunks_ = 0;
  bool rounds_again_ = false;  // rows for adapters in int8
  float* low_ = nullptr;       // A x: [rows, most ranks], or LowBlocks of as many bytes
  Scratch scratch_;
  PreparedRows prepared_;
  const LinearAttributes in_int8_;
  const LinearSizes int8_sizes_;
  PreparedRows prepared_int8_;
};

// ------------------------------------------------------------------------------------------- stacked weights

// Several weights of equal sizes as that of one Linear: the panels of one after those of the other.
inline LinearAttributes stacked(const LinearAttributes& each, int64_t count) {
  LinearAttributes all = each;
  all.out_features = LinearSizes(each).panels * kPanel * count;
  return all;
}

// Multiplies a panel of stacked weights by `count` rows, at most kChunkRows: finish(row, height, outputs) for each tile.
// `values` replaces rows of floats that need no preparation.
template <class Finish>
inline void multiply_rows(const LinearAttributes& a, const LinearSizes& sizes, const Tensor& weight, const Tensor& scales,
                          const PreparedRows& prepared, int64_t first, int64_t count, int64_t panel, Finish&& finish,
                          const float* values = nullptr) {
  const char* const weights = weight.as<char>() + panel * sizes.panel_bytes;
  if (in_blocks(a.weight_format)) {
    return with_blocks(a.weight_format, [&](auto format) {
      Outputs y[kChunkRows];
      multiply_panel_of_blocks<decltype(format)>(reinterpret_cast<const uint8_t*>(weights), sizes.panel_bytes,
                                                 prepared.blocks_from(first), sizes.blocks, count, share_of,
                                                 [](int64_t, int) {}, y);
      finish(int64_t{0}, (int)count, y);
    });
  }
  const float* const panel_scales = scales.present() ? scales.as<float>() + panel * sizes.blocks * kPanel : nullptr;
  InputRows rows = prepared.from(first);
  if (values != nullptr) rows.values = values + first * sizes.inputs;
  with_format(a.weight_format, [&](auto format) {
    typedef decltype(format) Format;
    Outputs y[Format::kRowsOfTile];
    int64_t tiles = (count + Format::kRowsOfTile - 1) / Format::kRowsOfTile;
    for (int64_t row = 0; tiles > 0; tiles--) {
      const int height = (int)((count - row + tiles - 1) / tiles);
      const Ahead ahead{weights + (count <= kFewRows ? 4096 : 0), count <= kFewRows ? 64 : 0};
      multiply<Format>(height, rows, row, weights, panel_scales, ahead, y);
      finish(row, height, y);
      row += height;
    }
  });
}

}  // namespace genserve
