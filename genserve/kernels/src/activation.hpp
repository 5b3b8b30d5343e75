// activation.hpp: the operator Activation,  y = activation(x) * factor,  and the activations of other operators.
#pragma once

#include "team.hpp"
#include "tensor.hpp"
#include "vector.hpp"

namespace genserve {

enum class Activation : int32_t {
  kNone, kSilu, kGelu, kGeluTanh, kRelu, kRelu2,
  kClampedSwiglu,    // of experts only
  kSigmoid, kXielu,  // of the operator only
};

// The activations without parameters.
GENSERVE_INLINE f32x16 activate(Activation activation, f32x16 v) {
  switch (activation) {
    case Activation::kNone:
    case Activation::kClampedSwiglu:
    case Activation::kXielu: return v;
    case Activation::kSilu: return silu(v);
    case Activation::kGelu: return gelu(v);
    case Activation::kGeluTanh: return gelu_tanh(v);
    case Activation::kRelu: return relu(v);
    case Activation::kRelu2: return relu(v) * relu(v);
    case Activation::kSigmoid: return sigmoid(v);
  }
  return v;
}

struct ActivationAttributes {
  Activation activation;
  float alpha_p, alpha_n, beta;  // of xielu
};

// The operator's inputs, in order.
struct ActivationInputs {
  Tensor x;       // [T, columns] float32
  Tensor factor;  // [T, columns]
};

// alpha_p x^2 + beta x above 0, and alpha_n (e^x - 1 - x) + beta x below. Source: Huang and Schlag, "Deriving Activation
// Functions Using Integration" (2024).
GENSERVE_INLINE f32x16 xielu(const ActivationAttributes& a, f32x16 x) {
  const f32x16 curve = x > 0.0f ? a.alpha_p * (x * x) : a.alpha_n * (exp(x) - 1.0f - x);
  return curve + a.beta * x;
}

inline bool check_attributes(const ActivationAttributes& a, Error& error) {
  return a.activation != Activation::kClampedSwiglu || error.set("\"clamped_swiglu\" is an activation of experts only");
}

inline bool check_activation(const ActivationAttributes& a, const ActivationInputs& in, Error& error) {
  return check_attributes(a, error) && check(in.x, "x", Type::kFloat32, error, kAny, kAny) &&
         check_optional(in.factor, "factor", Type::kFloat32, error, in.x.shape[0], in.x.shape[1]);
}

// Computes y [T, columns] from checked inputs.
inline void activate_all(const ActivationAttributes& a, const ActivationInputs& in, float* y, const Threads& threads) {
  const int64_t count = in.x.shape[0] * in.x.shape[1];
  take_parts((count + kLanes - 1) / kLanes, kLanes, threads, [&](int64_t first, int64_t end) {
    for (int64_t i = first * kLanes; i < end * kLanes; i += kLanes) {
      const f32x16 x = load_first(in.x.as<float>() + i, count - i);
      f32x16 v = a.activation == Activation::kXielu ? xielu(a, x) : activate(a.activation, x);
      if (in.factor.present()) v *= load_first(in.factor.as<float>() + i, count - i);
      store_first(y + i, v, count - i);
    }
  });
}

}  // namespace genserve
