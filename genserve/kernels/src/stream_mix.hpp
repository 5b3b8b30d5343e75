// stream_mix.hpp: the operator StreamMix,  y = x + M x  for the streams x of each row and the row's own matrix M.
//
// An output is one chain: the number of its own stream, and then those of all streams in their order.
#pragma once

#include "team.hpp"
#include "tensor.hpp"
#include "vector.hpp"

namespace genserve {

// The operator's inputs, in order.
struct StreamMixInputs {
  Tensor x;         // [T, streams, columns] float32
  Tensor matrices;  // [T, streams, streams]
};

inline bool check_stream_mix(const StreamMixInputs& in, Error& error) {
  if (!check(in.x, "x", Type::kFloat32, error, kAny, kAny, kAny)) return false;
  if (!is_size(in.x.shape[1]) || !is_size(in.x.shape[2])) return error.set("x has no streams or no columns");
  return check(in.matrices, "matrices", Type::kFloat32, error, in.x.shape[0], in.x.shape[1], in.x.shape[1]);
}

// Computes y [T, streams, columns] from checked inputs.
inline void mix_streams(const StreamMixInputs& in, float* y, const Threads& threads) {
  const int64_t streams = in.x.shape[1], columns = in.x.shape[2], width = streams * columns;
  take_parts(in.x.shape[0], width, threads, [&](int64_t first, int64_t end) {
    for (int64_t row = first; row < end; row++) {
      const float* const x = in.x.as<float>() + row * width;
      const float* matrix = in.matrices.as<float>() + row * streams * streams;
      for (int64_t stream = 0; stream < streams; stream++, matrix += streams) {
        for (int64_t i = 0; i < columns; i += kLanes) {
          f32x16 sum = load_first(x + stream * columns + i, columns - i);
          for (int64_t k = 0; k < streams; k++) sum = fma(matrix[k], load_first(x + k * columns + i, columns - i), sum);
          store_first(y + row * width + stream * columns + i, sum, columns - i);
        }
      }
    }
  });
}

}  // namespace genserve
