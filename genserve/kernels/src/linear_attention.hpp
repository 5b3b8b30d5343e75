// linear_attention.hpp: the operator LinearAttention: heads with a state S [key_dim, value_dim] in place of a cache,
//
//     gated delta rule    S = a S + k (beta (v - a k^T S))^T,   o = q^T S
//     gated               S = a S + k (step v)^T,               o = q^T S + skip v          (Mamba 2: q = C, k = B, v = x)
//
// of a token, where
//
//     step = softplus(step input + step bias), within limits;   a = e^(-step rate);   beta = beta_scale sigmoid(beta input)
//
// and the delta rule's keys and queries have the length 1, its queries also the factor 1 / sqrt(key_dim). Several heads may
// share keys and queries. The outputs are normed and gated: norm(o) silu(z), norm(o silu(z)), or o silu(z) without a norm.
// Sources: Yang et al., "Gated Delta Networks" (2025); Dao and Gu, "Transformers are SSMs" (2024).
//
// The tokens of a sequence are computed one after the other, since the forms in chunks have other bits where the chunks begin
// elsewhere. The numbers of v and o are independent of each other: a task has 32 of a head, whose part of the state stays in
// the L1 cache, and no sum crosses its lanes.
//
//     x -- L2 norms, steps, decays --+-- state, outputs --+-- norm, gate -- y
//
// The state is stored as it is computed, [heads, panels of 32 values, key_dim, 32]; lanes after value_dim are zero.
#pragma once

#include "states.hpp"
#include "team.hpp"
#include "vector.hpp"

namespace genserve {

constexpr int64_t kStatePanel = 2 * kLanes;

enum class Rule : int32_t { kGated, kGatedDelta };
enum class OutputNorm : int32_t { kNone, kNormThenGate, kGateThenNorm };

struct LinearAttentionAttributes {
  int64_t num_key_heads, num_heads, key_dim, value_dim;
  int64_t norm_size;                              // consecutive outputs that are normed together
  int64_t gate_offset, step_offset, beta_offset;  // columns of `gates`; beta: of the delta rule only
  Rule rule;
  OutputNorm norm;
  float epsilon;
  float beta_scale;
  float step_min, step_max;
};

// The operator's inputs, in order.
struct LinearAttentionInputs {
  Tensor x;            // [T, 2 * num_key_heads * key_dim + num_heads * value_dim] float32: queries, keys, values
  Tensor gates;        // [T, columns] float32: z [num_heads * value_dim], step and beta [num_heads] at their offsets
  Tensor rate;         // [num_heads]: e^A_log
  Tensor step_bias;    // [num_heads]
  Tensor skip;         // [num_heads]; of the gated rule
  Tensor norm_weight;  // [num_heads * value_dim]
  StateInputs states;
};

class LinearAttention {
 public:
  LinearAttention(const LinearAttentionAttributes& attributes, const LinearAttentionInputs& inputs)
      : a_(attributes),
        in_(inputs),
        num_keys_(a_.num_key_heads * a_.key_dim),
        num_values_(a_.num_heads * a_.value_dim),
        panels_((a_.value_dim + kStatePanel - 1) / kStatePanel) {}

  bool check_inputs(Error& error) const {
    typedef long long ll;
    const int64_t heads = a_.num_heads, limit = INT32_MAX / 8;
    const bool has_sizes = is_size(a_.num_key_heads) && is_size(heads) && is_size(a_.key_dim) && is_size(a_.value_dim) &&
                           a_.key_dim <= limit / a_.num_key_heads && a_.value_dim <= limit / heads;
    if (!has_sizes || heads % a_.num_key_heads != 0) {
      return error.set("%lld heads of %lld values and %lld heads of %lld keys make no attention", (ll)heads,
                       (ll)a_.value_dim, (ll)a_.num_key_heads, (ll)a_.key_dim);
    }
    if (a_.norm != OutputNorm::kNone && (a_.norm_size < 1 || num_values_ % a_.norm_size != 0)) {
      return error.set("norm_size is %lld of %lld outputs", (ll)a_.norm_size, (ll)num_values_);
    }
    if (!check(in_.x, "x", Type::kFloat32, error, kAny, 2 * num_keys_ + num_values_) ||
        !check(in_.gates, "gates", Type::kFloat32, error, in_.x.shape[0], kAny)) {
      return false;
    }
    const int64_t columns = in_.gates.shape[1];
    const auto fits = [&](int64_t offset, int64_t size) { return offset >= 0 && offset <= columns - size; };
    if (!fits(a_.gate_offset, num_values_) || !fits(a_.step_offset, heads) || (is_delta() && !fits(a_.beta_offset, heads))) {
      return error.set("gates has %lld columns, and lacks some from %lld, %lld or %lld on", (ll)columns, (ll)a_.gate_offset,
                       (ll)a_.step_offset, (ll)a_.beta_offset);
    }
    const Type f32 = Type::kFloat32;
    return check(in_.rate, "rate", f32, error, heads) && check(in_.step_bias, "step_bias", f32, error, heads) &&
           check_optional(in_.skip, "skip", f32, error, heads) &&
           (a_.norm == OutputNorm::kNone || check(in_.norm_weight, "norm_weight", f32, error, num_values_)) &&
           check_states(in_.states, in_.x.shape[0], error, heads, panels_, a_.key_dim, kStatePanel);
  }

  // Computes y [T, num_heads * value_dim] from checked inputs, and the new states in place.
  bool compute(float* y, const Threads& threads, Error& error) const {
    const int64_t tokens = in_.x.shape[0], batch = in_.states.state_source.shape[0];
    if (tokens == 0) return true;
    const size_t keys = is_delta() ? (size_t)(2 * tokens * num_keys_) : 0, factors = (size_t)(tokens * a_.num_heads);
    Scratch scratch(Scratch::bytes_of<float>(keys) + 2 * Scratch::bytes_of<float>(factors));
    if (!scratch) return error.set("out of memory for %lld tokens", (long long)tokens);
    float* normed = scratch.take<float>(keys);
    float* decays = scratch.take<float>(factors);
    float* weights = scratch.take<float>(factors);
    const int64_t tasks = batch * a_.num_heads * panels_, slot = a_.num_heads * panels_ * a_.key_dim * kStatePanel;
    Phase phases[3]{};
    auto work = [&](size_t) {
      Team team(phases);
      Prefetch none;
      team.take(0, tokens, [&](int64_t token) { prepare(token, normed, decays, weights); });
      team.wait(0, tokens, none);
      team.take(1, tasks, [&](int64_t task) {
        const int64_t panel = task % panels_, head = task / panels_ % a_.num_heads;
        const StateRow row(in_.states, task / (panels_ * a_.num_heads), slot);
        run(row, head, panel, normed, decays, weights, y);
      });
      team.wait(1, tasks, none);
      team.take(2, tokens, [&](int64_t token) { finish(token, y + token * num_values_); });
    };
    threads.run(tasks > tokens ? tasks : tokens, work);
    return true;
  }

 private:
  bool is_delta() const { return a_.rule == Rule::kGatedDelta; }
  const float* row_of(int64_t token) const { return in_.x.as<float>() + token * (2 * num_keys_ + num_values_); }
  const float* gates_of(int64_t token) const { return in_.gates.as<float>() + token * in_.gates.shape[1]; }

  // The decay and the weight of a token in each head, and queries and keys of length 1.
  void prepare(int64_t token, float* normed, float* decays, float* weights) const {
    const float* gates = gates_of(token);
    for (int64_t head = 0; head < a_.num_heads; head += kLanes) {
      const int64_t count = a_.num_heads - head, at = token * a_.num_heads + head;
      f32x16 step = load_first(gates + a_.step_offset + head, count);
      step = softplus(step + load_first(in_.step_bias.as<float>() + head, count));
      step = min(broadcast(a_.step_max), max(broadcast(a_.step_min), step));
      store_first(decays + at, exp(-step * load_first(in_.rate.as<float>() + head, count)), count);
      const f32x16 weight =
          is_delta() ? a_.beta_scale * sigmoid(load_first(gates + a_.beta_offset + head, count)) : step;
      store_first(weights + at, weight, count);
    }
    if (!is_delta()) return;
    const float scale = 1.0f / __builtin_sqrtf((float)a_.key_dim);
    for (int64_t head = 0; head < 2 * a_.num_key_heads; head++) {
      const float* from = row_of(token) + head * a_.key_dim;
      float* to = normed + token * 2 * num_keys_ + head * a_.key_dim;
      f32x16 squares{};
      for (int64_t i = 0; i < a_.key_dim; i += kLanes) {
        const f32x16 v = load_first(from + i, a_.key_dim - i);
        squares = fma(v, v, squares);
      }
      float factor = 1.0f / __builtin_sqrtf(sum(squares) + 1e-6f);
      if (head < a_.num_key_heads) factor *= scale;
      for (int64_t i = 0; i < a_.key_dim; i += kLanes) {
        store_first(to + i, load_first(from + i, a_.key_dim - i) * factor, a_.key_dim - i);
      }
    }
  }

  // The tokens of a sequence, in 32 values of a head.
  void run(const StateRow& row, int64_t head, int64_t panel, const float* normed, const float* decays, const float* weights,
           float* y) const {
    const int64_t place = (head * panels_ + panel) * a_.key_dim * kStatePanel, count = a_.value_dim - panel * kStatePanel;
    const int64_t key_head = head * a_.num_key_heads / a_.num_heads, value = head * a_.value_dim + panel * kStatePanel;
    float* to = row.to + place;
    const float* from = row.from == nullptr ? to : row.from + place;
    if (row.from == nullptr) memset(to, 0, (size_t)(a_.key_dim * kStatePanel) * sizeof(float));
    const float skip = in_.skip.present() ? in_.skip.as<float>()[head] : 0.0f;
    for (int64_t token = row.first; token < row.end; token++, from = to) {
      const float* queries = (is_delta() ? normed + token * 2 * num_keys_ : row_of(token)) + key_head * a_.key_dim;
      const float* keys = queries + num_keys_;
      const float* values = row_of(token) + 2 * num_keys_ + value;
      const float decay = decays[token * a_.num_heads + head], weight = weights[token * a_.num_heads + head];
      const f32x16 v[2] = {load_first(values, count), count > kLanes ? load_first(values + kLanes, count - kLanes) : f32x16{}};
      f32x16 added[2] = {weight * v[0], weight * v[1]}, found[2]{};
      if (is_delta()) {
        f32x16 known[2]{};
        for (int64_t i = 0; i < a_.key_dim; i++) {
          known[0] = fma(keys[i], load(from + i * kStatePanel), known[0]);
          known[1] = fma(keys[i], load(from + i * kStatePanel + kLanes), known[1]);
        }
        for (int half = 0; half < 2; half++) added[half] = weight * fma(-decay, known[half], v[half]);
      }
      for (int64_t i = 0; i < a_.key_dim; i++) {
        for (int half = 0; half < 2; half++) {
          const int64_t at = i * kStatePanel + half * kLanes;
          const f32x16 s = fma(keys[i], added[half], decay * load(from + at));
          store(to + at, s);
          found[half] = fma(queries[i], s, found[half]);
        }
      }
      for (int half = 0; half < 2 && half * kLanes < count; half++) {
        store_first(y + token * num_values_ + value + half * kLanes, fma(skip, v[half], found[half]), count - half * kLanes);
      }
    }
  }

  // Norms and gates the outputs of a token.
  void finish(int64_t token, float* y) const {
    const float* z = gates_of(token) + a_.gate_offset;
    const bool has_norm = a_.norm != OutputNorm::kNone, gates_first = a_.norm == OutputNorm::kGateThenNorm;
    const int64_t size = has_norm ? a_.norm_size : num_values_;
    for (int64_t first = 0; first < num_values_; first += size) {
      f32x16 squares{};
      for (int64_t i = 0; i < size; i += kLanes) {
        f32x16 v = load_first(y + first + i, size - i);
        if (gates_first) {
          v *= silu(load_first(z + first + i, size - i));
          store_first(y + first + i, v, size - i);
        }
        squares = fma(v, v, squares);
      }
      const float factor = has_norm ? 1.0f / __builtin_sqrtf(sum(squares) / (float)size + a_.epsilon) : 1.0f;
      for (int64_t i = 0; i < size; i += kLanes) {
        f32x16 v = load_first(y + first + i, size - i);
        if (has_norm) v = v * factor * load_first(in_.norm_weight.as<float>() + first + i, size - i);
        if (!gates_first) v *= silu(load_first(z + first + i, size - i));
        store_first(y + first + i, v, size - i);
      }
    }
  }

  const LinearAttentionAttributes& a_;
  const LinearAttentionInputs& in_;
  const int64_t num_keys_, num_values_, panels_;
};

}  // namespace genserve
