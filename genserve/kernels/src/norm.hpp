// norm.hpp: the operator Norm,  y = norm(x) * weight + bias + residual,  and the norms of rows that other operators read.
//
// The bits of a row depend only on the row: a sum has sixteen lanes, which one tree folds at its end.
#pragma once

#include <math.h>

#include "team.hpp"
#include "tensor.hpp"
#include "vector.hpp"

namespace genserve {

enum class Norm : int32_t { kNone, kRms, kLayer };

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

  // One value.
  __attribute__((always_inline)) float at(int64_t i) const {
    if constexpr (norm == Norm::kNone) return x[i];
    const float scaled = (norm == Norm::kLayer ? x[i] - mean : x[i]) * inverse;
    const float weighted = weight == nullptr ? scaled : scaled * weight[i];
    return bias == nullptr ? weighted : weighted + bias[i];
  }
};

struct NormAttributes {
  int64_t num_groups;  // of columns, each normed by itself, such as heads
  Norm norm;
  float epsilon;
};

// The operator's inputs, in order.
struct NormInputs {
  Tensor x;             // [T, columns] float32
  Tensor weight, bias;  // [columns]
  Tensor residual;      // [T, columns]
};

// Whether attributes, weight and bias make a norm.
inline bool check_norm_weights(const NormAttributes& a, const NormInputs& in, Error& error) {
  if (a.norm == Norm::kNone) return error.set("norm is missing");
  if (!check(in.weight, "weight", Type::kFloat32, error, kAny)) return false;
  const int64_t columns = in.weight.shape[0];
  if (!is_size(columns) || a.num_groups < 1 || columns % a.num_groups != 0) {
    return error.set("%lld columns make no %lld groups", (long long)columns, (long long)a.num_groups);
  }
  return check_optional(in.bias, "bias", Type::kFloat32, error, columns);
}

inline bool check_norm(const NormAttributes& a, const NormInputs& in, Error& error) {
  if (!check_norm_weights(a, in, error)) return false;
  const int64_t columns = in.weight.shape[0];
  return check(in.x, "x", Type::kFloat32, error, kAny, columns) &&
         check_optional(in.residual, "residual", Type::kFloat32, error, in.x.shape[0], columns);
}

template <Norm norm>
inline void norm_row(const NormAttributes& a, const NormInputs& in, int64_t row, float* y) {
  const int64_t columns = in.x.shape[1], size = columns / a.num_groups;
  for (int64_t first = 0; first < columns; first += size) {
    const int64_t at = row * columns + first;
    const float* const bias = in.bias.present() ? in.bias.as<float>() + first : nullptr;
    const NormedRow<norm> normed(in.x.as<float>() + at, in.weight.as<float>() + first, bias, size, a.epsilon);
    for (int64_t i = 0; i < size; i += kLanes) {
      f32x16 v = normed.get(i, size - i);
      if (in.residual.present()) v += load_first(in.residual.as<float>() + at + i, size - i);
      store_first(y + at + i, v, size - i);
    }
  }
}

// Computes y [T, columns] from checked inputs.
inline void norm_rows(const NormAttributes& a, const NormInputs& in, float* y, const Threads& threads) {
  take_parts(in.x.shape[0], in.x.shape[1], threads, [&](int64_t first, int64_t end) {
    for (int64_t row = first; row < end; row++) {
      a.norm == Norm::kRms ? norm_row<Norm::kRms>(a, in, row, y) : norm_row<Norm::kLayer>(a, in, row, y);
    }
  });
}

}  // namespace genserve
