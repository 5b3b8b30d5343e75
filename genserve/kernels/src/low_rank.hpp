// low_rank.hpp: adapters of linear layers (LoRA),  y += B (A x)  for the rows that have one.
//
// A call of a session may have rows of several adapters, and rows without one. A matrix is in float32, or in fp16 with a
// factor per rank that is a power of two, so that fp16 holds small numbers as exactly as large ones. `kernels/low_rank.py`
// packs them:
//
//     down    [rank / 4][inputs / 16][4][16]   A, whose inputs are padded with zeros
//     up      lines of 16 outputs, in the order of the panels' groups: those of the ranks that change the group
//
// The bits of a row depend only on the row and its adapter: sums over inputs have a chain per lane and one tree, sums over
// ranks two chains.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "tensor.hpp"
#include "vector.hpp"

namespace genserve {

constexpr int kRanks = 4;  // that are computed together; ranks are padded to a multiple of it
#if defined(__AVX512F__)
constexpr int kLowRankRows = 4;  // rows of one adapter that read `down` together: their sums fit in the registers
#else
constexpr int kLowRankRows = 2;
#endif

// What changes 16 outputs of a linear layer, which are half of a panel.
struct LowRankGroup {
  uint32_t first;       // line of `up`
  uint16_t begin, end;  // ranks
};

// The adapter of one linear layer.
struct LowRank {
  const void* down;
  const float* factors;  // [rank]
  const void* up;
  const LowRankGroup* groups;  // [2 * panels]
  int32_t rank;                // 0: the layer stays as it is
  Type type;                   // of the matrices
};

// Calls `work` with the type of an adapter's matrices.
template <class Work>
GENSERVE_INLINE auto with_type(const LowRank& adapter, Work work) {
  return adapter.type == Type::kFloat16 ? work(_Float16()) : work(float());
}

// The rows of the tensors in a call.
struct AdapterRows {
  int64_t num_rows;
  const int32_t* adapters;  // [num_rows]: the adapter of each row; -1: none
  const int32_t* order;     // [num_adapted]: the rows with an adapter, in the order of adapters
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
  int64_t num_adapted() const { return any() ? rows_.num_adapted : 0; }
  int64_t row(int64_t place) const { return rows_.order[place]; }
  int32_t adapter_of(int64_t row) const { return rows_.adapters[row]; }
  const LowRank& of_row(int64_t row) const { return layers_[rows_.adapters[row]][layer_]; }

  // Prefetches what the outputs of a panel need.
  void prefetch(int64_t panel) const {
    for (int64_t i = 0; i < num_adapters_; i++) {
      const LowRank& each = layers_[i][layer_];
      if (each.rank == 0) continue;
      const LowRankGroup* const group = each.groups + 2 * panel;
      const int64_t end = group[1].first + group[1].end - group[1].begin;
      const int64_t bytes = kLanes * (each.type == Type::kFloat16 ? sizeof(_Float16) : sizeof(float));
      const char* const up = static_cast<const char*>(each.up);
      for (int64_t at = group[0].first * bytes; at < end * bytes; at += 64) __builtin_prefetch(up + at, 0, 2);
    }
  }

 private:
  AdapterRows rows_{};
  const LowRank* const* layers_ = nullptr;
  int64_t num_adapters_ = 0;
  int64_t layer_ = 0;
  int64_t most_ranks_ = 0;
};

// A x of a few rows [inputs] with one adapter: low[r] [rank].
template <int kRows, class T>
inline void project_down(const LowRank& adapter, int64_t inputs, const float* const* x, float* const* low) {
  const T* w = static_cast<const T*>(adapter.down);
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
      for (int k = 0; k < kRanks; k++) low[r][rank + k] = sum(sums[r][k]) * adapter.factors[rank + k];
    }
  }
}

// B times `low` [rank], for the 16 outputs of a group.
template <class T>
GENSERVE_INLINE f32x16 project_up(const LowRank& adapter, const LowRankGroup& group, const float* low) {
  f32x16 even{}, odd{};
  const T* w = static_cast<const T*>(adapter.up) + (int64_t)group.first * kLanes;
  for (int64_t k = group.begin; k < group.end; k += 2, w += 2 * kLanes) {
    even = fma(low[k], load(w), even);
    odd = fma(low[k + 1], load(w + kLanes), odd);
  }
  return even + odd;
}

}  // namespace genserve
