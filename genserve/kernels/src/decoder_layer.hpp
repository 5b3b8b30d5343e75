// decoder_layer.hpp: the operator DecoderLayer, one layer of a decoder.
//
//     x -- norm, qkv -- attention -- output, + x -- attended -- norm, inner -- down, + attended -- y
//
// In a parallel layer, `inner` reads x. The parts are those of Linear and PagedAttention, so the bits are those of five
// nodes. One call of the threads computes all of them: between nodes, all cores but one would wait for ONNX Runtime,
// and none would read memory. While a thread waits for others, it prefetches the weights that it multiplies next.
#pragma once

#include "attention.hpp"
#include "linear.hpp"

namespace genserve {

struct DecoderLayerAttributes {
  LinearAttributes qkv, output, inner, down;
  AttentionAttributes attention;
  int64_t head_dim;
  int32_t parallel;
};

// The operator's inputs, in order. Weights, scales and norms are those of Linear, the others those of PagedAttention.
struct DecoderLayerInputs {
  Tensor x;  // [T, hidden] float32
  Tensor key_cache, value_cache;
  Tensor cumulative_sequence_length, past_seqlens, block_table;
  Tensor key_scales, value_scales;
  Tensor qkv_weight, qkv_scales, qkv_bias;
  Tensor output_weight, output_scales, output_bias;
  Tensor inner_weight, inner_scales, inner_bias;
  Tensor down_weight, down_scales, down_bias;
  Tensor attention_norm_weight, attention_norm_bias;  // before qkv
  Tensor mlp_norm_weight, mlp_norm_bias;              // before inner
  Tensor cos_cache, sin_cache;
  Tensor q_norm_weight, k_norm_weight;
  Tensor alibi_slopes;
  Tensor qkv_order, output_order, inner_order, down_order;
};

// Sets the attributes of the parts from those that they share.
inline bool complete(DecoderLayerAttributes& a, int64_t hidden, int64_t intermediate, Error& error) {
  typedef long long ll;
  if (!check_attributes(a.attention, error)) return false;
  const int64_t heads = a.attention.num_heads, all_heads = heads + 2 * a.attention.kv_num_heads;
  if (!is_size(hidden) || !is_size(intermediate) || !is_size(a.head_dim) ||
      a.head_dim > INT32_MAX / all_heads) {
    return error.set("hidden_size %lld, intermediate_size %lld and head_dim %lld make no layer", (ll)hidden,
                     (ll)intermediate, (ll)a.head_dim);
  }
  a.qkv.in_features = a.inner.in_features = a.output.out_features = a.down.out_features = hidden;
  a.qkv.out_features = a.head_dim * all_heads;
  a.output.in_features = a.head_dim * heads;
  a.inner.out_features = a.inner.gated ? 2 * intermediate : intermediate;
  a.down.in_features = intermediate;
  return true;
}

class DecoderLayer {
 public:
  static constexpr int kLinears = 4;  // qkv, output, inner, down

  // `adapters`: of qkv, output, inner and down; null: none.
  DecoderLayer(const DecoderLayerAttributes& attributes, const DecoderLayerInputs& in,
               const LinearAdapters* adapters = nullptr)
      : a_(attributes), adapters_(adapters) {
    qkv_ = {in.x, in.qkv_weight, in.qkv_scales, in.qkv_bias, in.attention_norm_weight, in.attention_norm_bias, {},
            in.qkv_order};
    output_ = {{}, in.output_weight, in.output_scales, in.output_bias, {}, {}, in.x, in.output_order};
    inner_ = {in.x, in.inner_weight, in.inner_scales, in.inner_bias, in.mlp_norm_weight, in.mlp_norm_bias, {},
              in.inner_order};
    down_ = {{}, in.down_weight, in.down_scales, in.down_bias, {}, {}, {}, in.down_order};
    attention_ = {{}, in.key_cache, in.value_cache, in.cumulative_sequence_length, in.past_seqlens, in.block_table,
                  in.cos_cache, in.sin_cache, in.q_norm_weight, in.k_norm_weight, in.alibi_slopes, in.key_scales,
                  in.value_scales, {}, {}, {}};
  }

  // Whether all required weights are given.
  bool has_weights() const {
    return genserve::has_weights(a_.qkv, qkv_) && genserve::has_weights(a_.output, output_) &&
           genserve::has_weights(a_.inner, inner_) && genserve::has_weights(a_.down, down_);
  }

  // Whether the weights match the attributes.
  bool check_weights(Error& error) const {
    return error.in("qkv", genserve::check_weights(a_.qkv, qkv_, error)) &&
           error.in("output", genserve::check_weights(a_.output, output_, error)) &&
           error.in("inner", genserve::check_weights(a_.inner, inner_, error)) &&
           error.in("down", genserve::check_weights(a_.down, down_, error));
  }

  bool check_rows(Error& error) const { return genserve::check_rows(a_.qkv, qkv_, error); }

  // Checks the other inputs and the outputs, of which the first is y [T, hidden], and computes them.
  bool compute(const AttentionOutputs& outputs, const Threads& threads, Error& error) {
    const int64_t hidden = a_.qkv.in_features, rows = qkv_.x.shape[0];
    const Tensor& y = outputs.output;
    if (!check(y, "y", Type::kFloat32, error, rows, hidden)) return false;
    Tensor packed = rows_of(rows, a_.qkv.out_features), heads = rows_of(rows, a_.output.in_features);
    Tensor attended = rows_of(rows, hidden), expanded = rows_of(rows, a_.down.in_features);
    Tensor* const made[] = {&packed, &heads, &attended, &expanded};
    size_t bytes = 0;
    for (const Tensor* each : made) bytes += Scratch::bytes_of<float>(size_of(*each));
    Scratch scratch(bytes);
    if (!scratch) return error.set("out of memory for %lld rows", (long long)rows);
    for (Tensor* each : made) each->data = scratch.take<float>(size_of(*each));
    attention_.query = packed;
    output_.x = heads;
    down_.residual = attended;
    if (!a_.parallel) inner_.x = attended;
    down_.x = expanded;
    AttentionOutputs attention_outputs = outputs;
    attention_outputs.output = heads;
    PagedAttention call;
    if (!call.open(a_.attention, attention_, error) || !call.check_outputs(attention_, attention_outputs, error)) {
      return false;
    }
    if (rows == 0) return true;
    const LinearAdapters none[kLinears]{};
    const LinearAdapters* const adapters = adapters_ == nullptr ? none : adapters_;
    Linear qkv(a_.qkv, qkv_, packed.as<float>(), adapters[0]);
    Linear output(a_.output, output_, attended.as<float>(), adapters[1]);
    Linear inner(a_.inner, inner_, expanded.as<float>(), adapters[2]);
    Linear down(a_.down, down_, y.as<float>(), adapters[3]);
    return call.with_job(heads, [&](auto& attention) {
      const int count = threads.count;
      // In the reverse order of their destructors: see Scratch.
      if (!qkv.open(count, error) || !output.open(count, error) || !inner.open(count, error) ||
          !down.open(count, error) || !attention.open(count, error)) {
        return false;
      }
      run(threads, qkv, attention, output, inner, down);
      return true;
    });
  }

 private:
  static Tensor rows_of(int64_t rows, int64_t columns) { return {nullptr, Type::kFloat32, 2, {rows, columns}}; }
  static size_t size_of(const Tensor& tensor) { return (size_t)(tensor.shape[0] * tensor.shape[1]); }

  template <class Attention>
  static void run(const Threads& threads, Linear& qkv, Attention& attention, Linear& output, Linear& inner,
                  Linear& down) {
    Phase phases[4 * Linear::kPhases + Attention::kPhases]{};
    const Team first(phases), second = first.from(Linear::kPhases), third = second.from(Attention::kPhases),
               fourth = third.from(Linear::kPhases), fifth = fourth.from(Linear::kPhases);
    auto work = [&](size_t index) {
      Prefetch weights = qkv.first_weights(index);
      qkv.work(first, index, weights);
      weights = output.first_weights(index);
      qkv.wait(first, weights);
      attention.work(second, index, weights);
      attention.wait(second, weights);
      output.work(third, index, weights);
      weights = inner.first_weights(index);
      output.wait(third, weights);
      inner.work(fourth, index, weights);
      weights = down.first_weights(index);
      inner.wait(fourth, weights);
      down.work(fifth, index, weights);
    };
    threads.run(threads.count, work);
  }

  const DecoderLayerAttributes& a_;
  const LinearAdapters* adapters_;
  LinearInputs qkv_, output_, inner_, down_;
  AttentionInputs attention_;
};

}  // namespace genserve
