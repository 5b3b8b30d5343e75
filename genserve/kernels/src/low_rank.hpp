// low_rank.hpp: adapters of linear layers (LoRA),  y += B (A x)  for the rows that have one.
//
// A call of a session may have rows of several adapters, and rows without one. `kernels/low_rank.py` packs the matrices,
// beside weights in float32 as
//
//     down    [rank / 4][inputs / 16][4][16] float32    A, whose inputs are padded with zeros
//     up      lines of 16 outputs, float32              B, in the order of the panels' groups: of the ranks that change the group
//
// and beside all other weights in int8, for dot():
//
//     down    [rank / 16][inputs / 4][16][4]            with a factor per rank
//     up      lines of 16 outputs and 4 ranks           with the factors of the ranks, and a scale per group
//
// There A multiplies rows in 8 bits (those of the layer, or rows of "int8_block"), and A x is rounded to 8 bits, with a scale
// for every four ranks.
//
// The bits of a row depend only on the row and its adapter: sums over inputs and ranks have a fixed order, or are exact.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "tensor.hpp"
#include "tiles.hpp"

namespace genserve {

constexpr int kRanks = 4;  // that are computed together; those of a part are padded to a multiple of it
#if defined(__AVX512F__)
constexpr int kLowRankRows = 4;  // rows of one adapter that read `down` together: their sums fit in the registers
#else
constexpr int kLowRankRows = 2;
#endif

// What changes 16 outputs of a linear layer, which are half of a panel.
struct LowRankGroup {
  float scale;
  uint32_t first;       // line of `up`
  uint16_t begin, end;  // ranks
};

// The adapter of one linear layer.
struct LowRank {
  const void* down;
  const float* factors;  // [rank], unless it is in float32
  const void* up;
  const LowRankGroup* groups;  // [2 * panels]
  int32_t rank;                // 0: the layer stays as it is
  Type type;                   // of the matrices

  bool is_float() const { return type == Type::kFloat32; }
  int64_t lines_of(const LowRankGroup& group) const { return (group.end - group.begin) / (is_float() ? 1 : kRanks); }
};
constexpr int64_t kLineBytes = 64;

// Sixteen ranks of A x, in 8 bits.
struct alignas(64) LowBlock {
  int8_t q[kLanes];
  float scales[kLanes / kRanks];
  int32_t starts[kLanes / kRanks];  // the initial values of the sums
};
static_assert(sizeof(LowBlock) == kLanes * sizeof(float));

// The rows of the tensors in a call.
struct AdapterRows {
  int64_t num_rows;
  const int32_t* adapters;  // [num_rows]: the adapter of each row; -1: none
  const int32_t* order;     // [num_rows]: the rows in the order of their adapters, those without one first
  int64_t num_adapted;
};

// The adapters in a call of a session.
struct Adapters {
  int64_t num_layers;
  const uint64_t* names;         // [num_layers]: digests of the names of the layers' weights, ascending
  int64_t num_adapters;
  const LowRank* const* layers;  // [num_adapters], each [num_layers]
  AdapterRows rows[2];           // of all tokens, and of those whose logits are wanted
};

// The adapters of the calls on this thread, which Python sets for each; null: none. Nodes are computed on the thread of the
// call, and only parts of them on others.
inline thread_local const Adapters* current_adapters = nullptr;

// The digest of a name (FNV-1a).
inline uint64_t digest_of(const char* name) {
  uint64_t digest = 0xcbf29ce484222325u;
  for (; *name != '\0'; name++) digest = (digest ^ (uint8_t)*name) * 0x100000001b3u;
  return digest;
}

// The adapters of one linear layer in a call.
class LinearAdapters {
 public:
  LinearAdapters() = default;
  LinearAdapters(const AdapterRows& rows, const LowRank* const* layers, int64_t num_adapters, int64_t layer)
      : rows_(rows), layers_(layers), num_adapters_(num_adapters), layer_(layer) {
    for (int64_t i = 0; i < num_adapters; i++) {
      const int32_t rank = layers[i][layer].rank;
      if (rank > most_ranks_) most_ranks_ = rank;
    }
  }

  // Those of the layer whose weight's name has this digest, for `rows` rows of x.
  static bool find(uint64_t name, int64_t rows, LinearAdapters& found, Error& error) {
    const Adapters* const all = current_adapters;
    if (all == nullptr) return true;
    int64_t low = 0, high = all->num_layers;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (all->names[middle] < name) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    if (low == all->num_layers || all->names[low] != name) return true;
    for (const AdapterRows& each : all->rows) {
      if (each.num_rows != rows) continue;
      found = LinearAdapters(each, all->layers, all->num_adapters, low);
      return true;
    }
    return error.set("there are adapters for %lld or %lld rows, and x has %lld", (long long)all->rows[0].num_rows,
                     (long long)all->rows[1].num_rows, (long long)rows);
  }

  bool any() const { return most_ranks_ > 0 && rows_.num_adapted > 0; }
  int64_t most_ranks() const { return most_ranks_; }
  int64_t num_plain() const { return rows_.num_rows - rows_.num_adapted; }
  int64_t row(int64_t place) const { return rows_.order[place]; }
  int32_t adapter_of(int64_t row) const { return rows_.adapters[row]; }
  const LowRank& of_row(int64_t row) const { return layers_[rows_.adapters[row]][layer_]; }

  // Prefetches what the outputs of a panel need.
  void prefetch(int64_t panel) const {
    for (int64_t i = 0; i < num_adapters_; i++) {
      const LowRank& each = layers_[i][layer_];
      if (each.rank == 0) continue;
      const LowRankGroup* const group = each.groups + 2 * panel;
      const char* const up = static_cast<const char*>(each.up);
      const int64_t end = group[1].first + each.lines_of(group[1]);
      for (int64_t line = group[0].first; line < end; line++) __builtin_prefetch(up + line * kLineBytes, 0, 2);
    }
  }

 private:
  AdapterRows rows_{};
  const LowRank* const* layers_ = nullptr;
  int64_t num_adapters_ = 0;
  int64_t layer_ = 0;
  int64_t most_ranks_ = 0;
};

// A x of a few rows [inputs] with one adapter in float32: low[r] [rank].
template <int kRows>
inline void project_down(const LowRank& adapter, int64_t inputs, const float* const* x, float* const* low) {
  const float* w = static_cast<const float*>(adapter.down);
  for (int64_t rank = 0; rank < adapter.rank; rank += kRanks) {
    f32x16 sums[kRows][kRanks] = {};
    const auto step = [&](int64_t i, int64_t count) __attribute__((always_inline)) {
      f32x16 values[kRows];
      GENSERVE_UNROLL
      for (int r = 0; r < kRows; r++) values[r] = load_first(x[r] + i, count);
      GENSERVE_UNROLL
      for (int k = 0; k < kRanks; k++, w += kLanes) {
        const f32x16 weights = load(w);
        GENSERVE_UNROLL
        for (int r = 0; r < kRows; r++) sums[r][k] = fma(values[r], weights, sums[r][k]);
      }
    };
    int64_t i = 0;
    for (; i + kLanes <= inputs; i += kLanes) step(i, kLanes);
    if (i < inputs) step(i, inputs - i);
    for (int r = 0; r < kRows; r++) {
      for (int k = 0; k < kRanks; k++) low[r][rank + k] = sum(sums[r][k]);
    }
  }
}

// Rounds sixteen ranks to 8 bits, as round_inputs() does inputs: every four have a scale.
GENSERVE_INLINE void round_ranks(f32x16 v, LowBlock& to) {
  const auto of_four = [](auto v, auto fold) __attribute__((always_inline)) {
    v = fold(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
    return fold(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
  };
  const i32x16 magnitudes = max((i32x16)abs(v), (i32x16)abs(v + swap_neighbours(v)));  // NaN is above infinity
  const f32x16 top = (f32x16)of_four(magnitudes, [](i32x16 a, i32x16 b) { return max(a, b); });
  constexpr float kLeast = 1e-36f;
  const i32x16 small = top < kLeast, good = (top >= kLeast) & (top <= __FLT_MAX__);
  const i32x16 q = round_to_int(good ? v : f32x16{}, good ? 127.0f / top : f32x16{});
  const f32x16 scales = small ? f32x16{} : good ? top / 127.0f : broadcast(__builtin_nanf(""));
  const i32x16 starts = of_four(q, [](i32x16 a, i32x16 b) { return a + b; }) * -kInt8Offset;
  store(to.q, q);
  for (int i = 0; i < kLanes / kRanks; i++) {
    to.scales[i] = scales[kRanks * i];
    to.starts[i] = starts[kRanks * i];
  }
}

// A x of a few of the rows with one adapter in int8: low[r] [rank / 16].
template <int kRows>
inline void project_down(const LowRank& adapter, const InputRows& x, const int64_t* rows, LowBlock* const* low) {
  constexpr int kChains = kRows > 2 ? 1 : 4 / kRows;  // with few sums, latencies would add up
  const uint8_t* w = static_cast<const uint8_t*>(adapter.down);
  const int64_t inputs = x.stride / x.blocks;
  for (int64_t rank = 0; rank < adapter.rank; rank += kLanes) {
    f32x16 totals[kRows] = {};
    const int8_t* q[kRows];
    for (int r = 0; r < kRows; r++) q[r] = x.q + rows[r] * x.stride;
    for (int64_t block = 0; block < x.blocks; block++) {
      u32x16 sums[kRows][kChains] = {};
      GENSERVE_UNROLL
      for (int r = 0; r < kRows; r++) sums[r][0] = (u32x16)broadcast(x.starts[rows[r] * x.blocks + block]);
      for (int64_t i = 0; i < inputs; i += 4 * kChains) {
        GENSERVE_UNROLL
        for (int c = 0; c < kChains; c++, w += kLineBytes) {
          const Int8Weights weights = int8_weights(load_bytes(w));
          GENSERVE_UNROLL
          for (int r = 0; r < kRows; r++) sums[r][c] = dot(sums[r][c], weights, four_bytes(q[r] + i + 4 * c));
        }
      }
      GENSERVE_UNROLL
      for (int r = 0; r < kRows; r++) {
        GENSERVE_UNROLL
        for (int c = 1; c < kChains; c++) sums[r][0] += sums[r][c];
        const f32x16 integers = __builtin_convertvector((i32x16)sums[r][0], f32x16);
        totals[r] = fma(x.scales[rows[r] * x.blocks + block], integers, totals[r]);
        q[r] += inputs;
      }
    }
    for (int r = 0; r < kRows; r++) round_ranks(totals[r] * load(adapter.factors + rank), low[r][rank / kLanes]);
  }
}

// B times `low` [rank], for the 16 outputs of a group.
GENSERVE_INLINE f32x16 project_up(const LowRank& adapter, const LowRankGroup& group, const float* low) {
  f32x16 even{}, odd{};
  const float* w = static_cast<const float*>(adapter.up) + (int64_t)group.first * kLanes;
  for (int64_t k = group.begin; k < group.end; k += 2, w += 2 * kLanes) {
    even = fma(low[k], load(w), even);
    odd = fma(low[k + 1], load(w + kLanes), odd);
  }
  return even + odd;
}
GENSERVE_INLINE f32x16 project_up(const LowRank& adapter, const LowRankGroup& group, const LowBlock* low) {
  f32x16 total{};
  const uint8_t* w = static_cast<const uint8_t*>(adapter.up) + group.first * kLineBytes;
  for (int64_t k = group.begin; k < group.end; k += kRanks, w += kLineBytes) {
    const LowBlock& block = low[k / kLanes];
    const int64_t four = k % kLanes / kRanks;
    const u32x16 start = (u32x16)broadcast(block.starts[four]);
    const u32x16 sums = dot(start, int8_weights(load_bytes(w)), four_bytes(block.q + kRanks * four));
    total = fma(block.scales[four], __builtin_convertvector((i32x16)sums, f32x16), total);
  }
  return total * group.scale;
}

}  // namespace genserve
