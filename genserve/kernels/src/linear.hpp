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
// The bits of an output depend only on its row. Sums of integers are exact in any order; floats are added in the order
// of the inputs, in one chain per output, for any number of rows in a tile and on any thread.
#pragma once

#include <math.h>

#include "instruction_set.hpp"
#include "team.hpp"
#include "tensor.hpp"

namespace genserve {

constexpr int kPanel = 32;       // outputs of a panel
constexpr int kInt8Block = 64;   // inputs of a block; inputs of 8-bit weights are padded to a multiple of it
constexpr int kInt4Block = 32;
constexpr int kChunkRows = 96;   // most rows of a chunk, which stay in the L2 cache while a panel streams
constexpr int64_t kMaxInt8Inputs = 1 << 17;  // 2^17 * 127 * 127 is below 2^31

enum class WeightFormat : int32_t { kInt8, kInt8Block, kInt4Block, kFloat32 };
enum class Norm : int32_t { kNone, kRms, kLayer };
enum class Activation : int32_t { kNone, kSilu, kGelu, kGeluTanh, kRelu };

struct LinearAttributes {
  int64_t in_features;
  int64_t out_features;  // of a gated layer: gates and values together
  WeightFormat weight_format;
  Norm norm;
  Activation activation;
  int32_t gated;
  float epsilon;
  float softcap;  // 0: none
};

struct LinearInputs {
  Tensor x, weight, scales, bias, norm_weight, norm_bias, residual;
};

// Sizes that follow from the attributes.
struct LinearSizes {
  int64_t outputs;       // columns of y
  int64_t panels;
  int64_t inputs;        // with padding
  int64_t blocks;        // scales of a row
  int64_t panel_bytes;

  explicit LinearSizes(const LinearAttributes& a) {
    outputs = a.gated ? a.out_features / 2 : a.out_features;
    const int64_t per_panel = a.gated ? kPanel / 2 : kPanel;
    panels = (outputs + per_panel - 1) / per_panel;
    const int64_t multiple = a.weight_format == WeightFormat::kFloat32     ? 1
                             : a.weight_format == WeightFormat::kInt4Block ? kInt4Block
                                                                           : kInt8Block;
    inputs = (a.in_features + multiple - 1) / multiple * multiple;
    blocks = a.weight_format == WeightFormat::kInt8Block   ? inputs / kInt8Block
             : a.weight_format == WeightFormat::kInt4Block ? inputs / kInt4Block
                                                           : 1;
    panel_bytes = inputs * kPanel;
    if (a.weight_format == WeightFormat::kInt4Block) panel_bytes /= 2;
    if (a.weight_format == WeightFormat::kFloat32) panel_bytes *= sizeof(float);
  }
};

// Whether all required weights are given; in a graph, some may only come with the rows.
inline bool has_weights(const LinearAttributes& a, const LinearInputs& in) {
  return in.weight.present() && (in.scales.present() || a.weight_format == WeightFormat::kFloat32) &&
         (in.norm_weight.present() || a.norm != Norm::kRms);
}

// Whether the weights match the attributes.
inline bool check_weights(const LinearAttributes& a, const LinearInputs& in, Error& error) {
  const Type f32 = Type::kFloat32;
  if (!is_size(a.in_features) || !is_size(a.out_features) || (a.gated && a.out_features % 2 != 0)) {
    return error.set("in_features %lld and out_features %lld make no layer", (long long)a.in_features,
                     (long long)a.out_features);
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
  }
  good = good && check_optional(in.bias, "bias", f32, error, a.out_features);
  if (!good) return false;
  if (a.norm == Norm::kNone && (in.norm_weight.present() || in.norm_bias.present())) {
    return error.set("norm_weight or norm_bias is given and norm is \"\"");
  }
  if (a.norm == Norm::kRms && in.norm_bias.present()) return error.set("norm \"rms\" has no norm_bias");
  if (a.norm == Norm::kRms && !in.norm_weight.present()) return error.set("norm_weight is missing");
  return check_optional(in.norm_weight, "norm_weight", f32, error, a.in_features) &&
         check_optional(in.norm_bias, "norm_bias", f32, error, a.in_features);
}

inline bool check_rows(const LinearAttributes& a, const LinearInputs& in, Error& error) {
  return check(in.x, "x", Type::kFloat32, error, kAny, a.in_features) &&
         check_optional(in.residual, "residual", Type::kFloat32, error, in.x.shape[0], LinearSizes(a).outputs);
}

// ----------------------------------------------------------------------------------- rows: norm and quantization

// The values of a row after its norm, computed at each access, which is cheaper than storing them.
template <Norm norm>
struct NormedRow {
  const float* x;
  const float* weight;
  const float* bias;
  float mean = 0.0f, inverse = 1.0f;

  NormedRow(const float* x, const float* weight, const float* bias, int64_t n, float epsilon)
      : x(x), weight(weight), bias(bias) {
    if constexpr (norm == Norm::kNone) return;
    if constexpr (norm == Norm::kLayer) {
      f32x16 total{};
      for (int64_t i = 0; i < n; i += kLanes) total += load_first(x + i, n - i);
      mean = sum(total) / (float)n;
    }
    f32x16 squares{};
    for (int64_t i = 0; i < n; i += kLanes) {
      const f32x16 v = centred(i, n - i);
      squares = fma(v, v, squares);
    }
    inverse = 1.0f / sqrtf(sum(squares) / (float)n + epsilon);
  }

  // Sixteen values from position i; zeros beyond `count`, where the row ends.
  __attribute__((always_inline)) f32x16 get(int64_t i, int64_t count) const {
    if constexpr (norm == Norm::kNone) return load_first(x + i, count);
    const f32x16 scaled = centred(i, count) * inverse;
    const f32x16 weighted = weight == nullptr ? scaled : scaled * load_first(weight + i, count);
    return bias == nullptr ? weighted : weighted + load_first(bias + i, count);
  }

  __attribute__((always_inline)) f32x16 centred(int64_t i, int64_t count) const {
    const f32x16 v = load_first(x + i, count);
    if constexpr (norm != Norm::kLayer) return v;
    return count < kLanes ? keep_first(v - mean, count) : v - mean;
  }
};

// The rows for a tile: int8 with scales and sums, or floats.
struct InputRows {
  const int8_t* q;        // [rows, stride]
  const float* values;    // [rows, stride], where weights are float32
  int64_t stride;
  const float* scales;    // [rows, blocks]
  const int32_t* starts;  // [rows, blocks]: the initial value of the sum of a block
  int64_t blocks;
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

// ------------------------------------------------------------------------------------------- tiles

typedef f32x16 Outputs[2];  // 32 outputs of a row

GENSERVE_INLINE int32_t four_bytes(const int8_t* from) {
  int32_t v;
  memcpy(&v, from, sizeof v);
  return v;
}

// The weights that a tile prefetches. One or two rows alone are bound by memory, and prefetch a little ahead of themselves.
// Of more rows, each tile prefetches its share of the next panel into the L2 cache; a first tile that prefetched all of it
// would wait for memory.
struct Ahead {
  const char* at;
  int64_t step;  // for each 64 bytes of the tile's own weights

  template <int kRows>
  __attribute__((always_inline)) void prefetch() {
    __builtin_prefetch(at, 0, kRows <= 2 ? 3 : 2);
    at += step;
  }
};

// The groups of 16 outputs that a tile computes together. With one or two rows these are all, so that weights are read in
// the order of memory.
constexpr int groups_of(int rows) { return rows <= 2 ? 2 : kGroupsOfTile; }

struct Int8Format {
  static constexpr int kRowsOfTile = kInt8Rows;

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
            ahead.prefetch<kRows>();
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
};

// Weights with a scale per block of inputs: integer sums within a block, float sums over blocks.
template <int kBits, class Sums>
struct BlockFormat {
  static constexpr int kRowsOfTile = kBlockRows;
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
          for (int g = 0; g < kGroups; g++) start_sums(sums[r][g], start[r * x.blocks]);
        }
        for (int step = 0; step < kInputs / kInputsOfStep; step++, w += 128) {
          GENSERVE_UNROLL
          for (int part = 0; part < kInputsOfStep / 4; part++) {
            GENSERVE_UNROLL
            for (int g = 0; g < kGroups; g++) {
              const u8x64 bytes = load_bytes(w + 64 * g);
              if (part == 0) ahead.prefetch<kRows>();
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
            const f32x16 integers = __builtin_convertvector((i32x16)total(sums[r][g], start[r * x.blocks]), f32x16);
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
};

typedef BlockFormat<8, u32x16> Int8BlockFormat;
typedef BlockFormat<4, Int4Sums> Int4BlockFormat;
static_assert(kInt4Block / 4 * 15 * 127 * 2 < 1 << 15);  // AVX2's Int4Sums have 16 bits

struct Float32Format {
  static constexpr int kRowsOfTile = kFloatRows;

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
          ahead.prefetch<kRows>();
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

// A tile of `rows` (1 to kRows) rows.
template <class Format, int kRows = Format::kRowsOfTile>
inline void multiply(int rows, const InputRows& x, int64_t row, const void* panel, const float* scales, Ahead ahead,
                     Outputs* y) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return multiply<Format, kRows - 1>(rows, x, row, panel, scales, ahead, y);
  }
  Format::template tile<kRows>(x, row, panel, scales, ahead, y);
}

// ------------------------------------------------------------------------------------------- the operator

GENSERVE_INLINE f32x16 activate(Activation activation, f32x16 v) {
  switch (activation) {
    case Activation::kNone: return v;
    case Activation::kSilu: return silu(v);
    case Activation::kGelu: return gelu(v);
    case Activation::kGeluTanh: return gelu_tanh(v);
    case Activation::kRelu: return relu(v);
  }
  return v;
}

class Linear {
 public:
  static constexpr int kPhases = 2;  // rows, panels

  // `inputs` and y [T, outputs] may be filled after the constructor, except for the number of rows.
  Linear(const LinearAttributes& attributes, const LinearInputs& inputs, float* y)
      : a_(attributes), in_(inputs), sizes_(attributes), y_(y), num_rows_(inputs.x.shape[0]) {}

  // Computes y from checked inputs.
  bool compute(const Threads& threads, Error& error) {
    if (!open(threads.count, error)) return false;
    // Few inputs are quantized before the other threads are woken, which is faster than synchronizing them.
    if (row_chunks_ > 0 && num_rows_ * sizes_.inputs <= 4096) {
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
    const size_t bytes_of_input = a_.weight_format == WeightFormat::kFloat32 ? sizeof(float) : sizeof(int8_t);
    const size_t num_values = as_they_are_ ? 0 : (size_t)(num_rows_ * sizes_.inputs);
    const size_t num_scales = (size_t)(num_rows_ * sizes_.blocks);
    scratch_.open(Scratch::bytes_of<char>(num_values * bytes_of_input) + Scratch::bytes_of<float>(num_scales) +
                  Scratch::bytes_of<int32_t>(num_scales));
    if (!scratch_) return error.set("out of memory for %lld rows", (long long)num_rows_);
    char* values = scratch_.take<char>(num_values * bytes_of_input);
    q_ = reinterpret_cast<int8_t*>(values);
    normed_ = reinterpret_cast<float*>(values);
    scales_ = scratch_.take<float>(num_scales);
    starts_ = scratch_.take<int32_t>(num_scales);
    row_chunks_ = as_they_are_ ? 0 : (num_rows_ + 3) / 4;
    row_groups_ = (num_rows_ + kChunkRows - 1) / kChunkRows;
    // A chunk has about 64 KiB of weights, to be worth its overhead, but each thread gets several.
    panels_of_chunk_ = smaller(65536 / sizes_.panel_bytes, sizes_.panels / (8 * num_threads));
    if (panels_of_chunk_ < 1) panels_of_chunk_ = 1;
    panel_chunks_ = (sizes_.panels + panels_of_chunk_ - 1) / panels_of_chunk_ * row_groups_;
    return true;
  }

  // Both phases. `weights` are prefetched while the thread waits for the rows of others.
  void work(Team team, size_t index, Prefetch& weights) {
    if (row_chunks_ > 0) {
      team.take(0, row_chunks_, [&](int64_t chunk) { prepare(4 * chunk, smaller(4 * chunk + 4, num_rows_)); });
      team.wait(0, row_chunks_, weights);
    }
    team.take_ranges(1, panel_chunks_, index, num_threads_, [&](int64_t chunk) {
      const int64_t group = chunk % row_groups_, first = chunk / row_groups_ * panels_of_chunk_;
      const int64_t from = num_rows_ * group / row_groups_, to = num_rows_ * (group + 1) / row_groups_;
      for (int64_t p = first; p < smaller(first + panels_of_chunk_, sizes_.panels); p++) multiply_panel(p, from, to);
    });
  }

  // Waits until y is complete.
  void wait(Team team, Prefetch& next) { team.wait(1, panel_chunks_, next); }

  // The weights that a thread multiplies first, for earlier waits: at most what its L2 cache has room for.
  Prefetch first_weights(size_t index) const {
    constexpr int64_t kMost = 192 << 10;
    const int64_t first = Team::first_chunk(panel_chunks_, index, num_threads_) / row_groups_ * panels_of_chunk_;
    const int64_t bytes = (sizes_.panels - first) * sizes_.panel_bytes;
    return {in_.weight.as<char>() + first * sizes_.panel_bytes, smaller(bytes, kMost)};
  }

 private:
  static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

  // Normalises and quantizes rows [from, to) of x.
  void prepare(int64_t from, int64_t to) {
    for (int64_t row = from; row < to; row++) {
      switch (a_.norm) {
        case Norm::kNone: prepare_row<Norm::kNone>(row); break;
        case Norm::kRms: prepare_row<Norm::kRms>(row); break;
        case Norm::kLayer: prepare_row<Norm::kLayer>(row); break;
      }
    }
  }

  template <Norm norm>
  void prepare_row(int64_t row) {
    const int64_t n = a_.in_features, padded = sizes_.inputs, blocks = sizes_.blocks;
    const NormedRow<norm> normed(in_.x.as<float>() + row * n, in_.norm_weight.as<float>(), in_.norm_bias.as<float>(), n,
                                 a_.epsilon);
    if (a_.weight_format == WeightFormat::kFloat32) {
      for (int64_t i = 0; i < n; i += kLanes) store_first(normed_ + row * n + i, normed.get(i, n - i), n - i);
      return;
    }
    const int64_t block = padded / blocks;
    const bool is_int4 = a_.weight_format == WeightFormat::kInt4Block;
    for (int64_t b = 0; b < blocks; b++) {
      round_inputs(normed, b * block, smaller(n, b * block + block), b * block + block, !is_int4,
                   is_int4 ? kInt4Offset : kInt8Offset, q_ + row * padded, scales_ + row * blocks + b,
                   starts_ + row * blocks + b);
    }
  }

  void multiply_panel(int64_t panel, int64_t from, int64_t to) {
    switch (a_.weight_format) {
      case WeightFormat::kInt8: return multiply_panel<Int8Format>(panel, from, to);
      case WeightFormat::kInt8Block: return multiply_panel<Int8BlockFormat>(panel, from, to);
      case WeightFormat::kInt4Block: return multiply_panel<Int4BlockFormat>(panel, from, to);
      case WeightFormat::kFloat32: return multiply_panel<Float32Format>(panel, from, to);
    }
  }

  // Multiplies a panel by rows [from, to), in tiles of about equal heights.
  template <class Format>
  void multiply_panel(int64_t panel, int64_t from, int64_t to) {
    const InputRows rows{q_ + from * sizes_.inputs,
                    (as_they_are_ ? in_.x.as<float>() : normed_) + from * sizes_.inputs,
                    sizes_.inputs,
                    scales_ + from * sizes_.blocks,
                    starts_ + from * sizes_.blocks,
                    sizes_.blocks};
    const char* weights = in_.weight.as<char>() + panel * sizes_.panel_bytes;
    const float* scales = in_.scales.present() ? in_.scales.as<float>() + panel * sizes_.blocks * kPanel : nullptr;
    Outputs y[Format::kRowsOfTile];
    int64_t tiles = (to - from + Format::kRowsOfTile - 1) / Format::kRowsOfTile;
    const int64_t step = (64 + tiles - 1) / tiles;
    const char* next = weights + sizes_.panel_bytes;
    for (int64_t row = 0; tiles > 0; tiles--, next += step * (sizes_.panel_bytes / 64)) {
      Ahead ahead{next, step};
      if (num_rows_ <= 2) ahead = {weights + 4096, 64};
      if (from > 0) ahead = {weights, 0};  // the first group of rows has prefetched it
      const int height = (int)((to - from - row + tiles - 1) / tiles);
      prefetch_rows(panel, from + row, height);
      multiply<Format>(height, rows, row, weights, scales, ahead, y);
      finish(panel, from + row, height, y);
      row += height;
    }
  }

  // Prefetches what finish() writes of y and reads of the residual, which may be another page of memory for each row.
  void prefetch_rows(int64_t panel, int64_t row, int height) const {
    const int64_t width = a_.gated ? kLanes : kPanel;
    for (int r = 0; r < height; r++) {
      const int64_t place = (row + r) * sizes_.outputs + panel * width;
      for (int64_t i = 0; i < width; i += kLanes) {
        __builtin_prefetch(y_ + place + i, 1);
        if (in_.residual.present()) __builtin_prefetch(in_.residual.as<float>() + place + i);
      }
    }
  }

  // Applies bias, activation, gate, soft cap and residual to a tile, and stores it in y.
  void finish(int64_t panel, int64_t row, int height, const Outputs* y) {
    const int64_t width = a_.gated ? kLanes : kPanel;
    for (int64_t group = 0; group < width / kLanes; group++) {
      const int64_t at = panel * width + group * kLanes;
      const int64_t count = sizes_.outputs - at;
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
  float* y_;
  int64_t num_rows_;
  int num_threads_ = 1;
  bool as_they_are_ = false;  // rows of x are read without preparation
  int64_t row_chunks_ = 0;
  int64_t row_groups_ = 0;    // of up to kChunkRows rows
  int64_t panels_of_chunk_ = 0;
  int64_t panel_chunks_ = 0;
  Scratch scratch_;
  int8_t* q_ = nullptr;
  float* normed_ = nullptr;
  float* scales_ = nullptr;
  int32_t* starts_ = nullptr;
};

}  // namespace genserve
