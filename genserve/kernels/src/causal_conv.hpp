// causal_conv.hpp: the operator CausalConv, a convolution of each channel over the tokens of a sequence,
//
//     y_t = f(bias + sum over j < k of weight_j * u_{t - k + 1 + j}),  u = x,  f = none or SiLU
//     gated:  u = b * x,  and y_t is multiplied by c_t, where b, c and x are beside each other in a row
//
// The state of a sequence is its last k - 1 inputs u. The sum begins with the bias and the oldest input, so that its bits do
// not depend on where a sequence is cut.
#pragma once

#include "states.hpp"
#include "team.hpp"
#include "vector.hpp"

namespace genserve {

constexpr int64_t kMaxKernel = 16;

enum class ConvActivation : int32_t { kNone, kSilu };

struct CausalConvAttributes {
  int64_t channels, kernel_size;
  int64_t offset;   // the first column of a row that the operator reads
  int32_t gated;
  ConvActivation activation;
};

// The operator's inputs, in order.
struct CausalConvInputs {
  Tensor x;       // [T, columns] float32
  Tensor weight;  // [kernel_size, channels]
  Tensor bias;    // [channels]
  StateInputs states;
};

class CausalConv {
 public:
  CausalConv(const CausalConvAttributes& attributes, const CausalConvInputs& inputs) : a_(attributes), in_(inputs) {}

  bool check_inputs(Error& error) const {
    typedef long long ll;
    if (!is_size(a_.channels) || a_.kernel_size < 2 || a_.kernel_size > kMaxKernel || a_.offset < 0) {
      return error.set("%lld channels from column %lld with kernel_size %lld make no convolution", (ll)a_.channels,
                       (ll)a_.offset, (ll)a_.kernel_size);
    }
    if (!check(in_.x, "x", Type::kFloat32, error, kAny, kAny)) return false;
    const int64_t columns = (a_.gated ? 3 : 1) * a_.channels;
    if (a_.offset > in_.x.shape[1] - columns) {
      return error.set("x has %lld columns, not %lld from column %lld", (ll)in_.x.shape[1], (ll)columns, (ll)a_.offset);
    }
    return check(in_.weight, "weight", Type::kFloat32, error, a_.kernel_size, a_.channels) &&
           check_optional(in_.bias, "bias", Type::kFloat32, error, a_.channels) &&
           check_states(in_.states, in_.x.shape[0], error, a_.kernel_size - 1, a_.channels);
  }

  // Computes y [T, channels] from checked inputs, and the new states in place.
  void compute(float* y, const Threads& threads) const {
    const int64_t batch = in_.states.state_source.shape[0], blocks = (a_.channels + kBlock - 1) / kBlock;
    const int64_t tasks = batch * blocks;
    Phase phase[1]{};
    auto work = [&](size_t) {
      Team(phase).take(0, tasks, [&](int64_t task) {
        const StateRow row(in_.states, task / blocks, (a_.kernel_size - 1) * a_.channels);
        const int64_t first = task % blocks * kBlock;
        switch (a_.kernel_size) {
          case 3: return convolve<3>(row, first, y);
          case 4: return convolve<4>(row, first, y);
          default: return convolve<0>(row, first, y);
        }
      });
    };
    threads.run(tasks, work);
  }

 private:
  static constexpr int64_t kVectors = 4, kBlock = kVectors * kLanes;  // the channels of a task

  // The tokens of a row, in the channels of a block. kSize is the kernel size, or 0: any.
  template <int64_t kSize>
  void convolve(const StateRow& row, int64_t first, float* y) const {
    const int64_t kernel = kSize > 0 ? kSize : a_.kernel_size, columns = in_.x.shape[1], channels = a_.channels;
    f32x16 weights[kVectors][kSize > 0 ? kSize : kMaxKernel], inputs[kVectors][kSize > 0 ? kSize : kMaxKernel];
    f32x16 bias[kVectors]{};
    const auto count = [&](int64_t i) { return channels - first - i * kLanes; };
    const int64_t vectors = smaller(kVectors, (channels - first + kLanes - 1) / kLanes);
    for (int64_t i = 0; i < vectors; i++) {
      const int64_t at = first + i * kLanes;
      if (in_.bias.present()) bias[i] = load_first(in_.bias.as<float>() + at, count(i));
      for (int64_t j = 0; j < kernel; j++) {
        weights[i][j] = load_first(in_.weight.as<float>() + j * channels + at, count(i));
        if (j + 1 == kernel) break;
        inputs[i][j] = row.from == nullptr ? f32x16{} : load_first(row.from + j * channels + at, count(i));
      }
    }
    for (int64_t token = row.first; token < row.end; token++) {
      for (int64_t i = 0; i < vectors; i++) {
        const float* x = in_.x.as<float>() + token * columns + a_.offset + first + i * kLanes;
        f32x16 u = load_first(x + (a_.gated ? 2 * channels : 0), count(i));
        if (a_.gated) u *= load_first(x, count(i));
        inputs[i][kernel - 1] = u;
        f32x16 sum = bias[i];
        for (int64_t j = 0; j < kernel; j++) sum = fma(weights[i][j], inputs[i][j], sum);
        for (int64_t j = 1; j < kernel; j++) inputs[i][j - 1] = inputs[i][j];
        if (a_.activation == ConvActivation::kSilu) sum = silu(sum);
        if (a_.gated) sum *= load_first(x + channels, count(i));
        store_first(y + token * channels + first + i * kLanes, sum, count(i));
      }
    }
    for (int64_t i = 0; i < vectors; i++) {
      for (int64_t j = 0; j + 1 < kernel; j++) {
        store_first(row.to + j * channels + first + i * kLanes, inputs[i][j], count(i));
      }
    }
  }

  const CausalConvAttributes& a_;
  const CausalConvInputs& in_;
};

}  // namespace genserve
