// embedding.hpp: the operator Embedding, rows of a weight in the panels of Linear.
//
// A tied head has the weight of the embedding. Its panels have the numbers of 32 tokens side by side, of which the operator
// reads one. A row is read once per token, which costs little, and the weight is stored once.
#pragma once

#include "linear.hpp"

namespace genserve {

struct EmbeddingInputs {
  Tensor ids, weight, scales;
};

inline bool check_embedding(const LinearAttributes& a, const EmbeddingInputs& in, Error& error) {
  if ((!in_blocks(a.weight_format) && a.weight_format != WeightFormat::kInt8Block) || a.more[0].outputs != 0) {
    return error.set("weight_format is neither \"int8_block\" nor one of the formats in blocks");
  }
  LinearInputs weights{};
  weights.weight = in.weight;
  weights.scales = in.scales;
  return check_weights(a, weights, error) && check(in.ids, "ids", Type::kInt64, error, kAny);
}

// The weights of one output of a panel in "int8_block", as floats: `panel` is [inputs / 4][kPanel][4], and `scales` is
// [inputs / kInt8Block][kPanel].
inline void read_int8_block(const uint8_t* panel, const float* scales, int output, int64_t inputs, float* to) {
  for (int64_t i = 0; i < inputs; i++) {
    const int code = panel[(i / 4 * kPanel + output) * 4 + i % 4] - EightBitScales::Code::kOffset;
    to[i] = (float)code * scales[i / kInt8Block * kPanel + output];
  }
}

// Writes the rows of the tokens `ids` [T] to y [T, in_features].
inline bool read_rows(const LinearAttributes& a, const EmbeddingInputs& in, float* y, Error& error) {
  const LinearSizes sizes(a);
  for (int64_t i = 0; i < in.ids.shape[0]; i++, y += a.in_features) {
    const int64_t id = in.ids.as<int64_t>()[i];
    if (id < 0 || id >= a.out_features) {
      return error.set("the id %lld is not below %lld", (long long)id, (long long)a.out_features);
    }
    const int64_t panel = id / kPanel;
    const int output = (int)(id % kPanel);
    const uint8_t* const weight = in.weight.as<uint8_t>() + sizes.offset_of(panel);
    if (in_blocks(a.weight_format)) {
      with_blocks(a.weight_format, [&](auto blocks) { blocks.read(weight, output, a.in_features, y); });
    } else {
      read_int8_block(weight, in.scales.as<float>() + panel * sizes.blocks * kPanel, output, a.in_features, y);
    }
  }
  return true;
}

}  // namespace genserve
