// operators.cpp: the library's interface: operators for ONNX Runtime, and plain C functions for Python and tests.

#include "attention.hpp"
#include "cpu.hpp"
#include "decoder_layer.hpp"
#include "linear.hpp"
#include "logits.hpp"
#include "sampling.hpp"
#include "ort_api.hpp"

#define GENSERVE_EXPORT extern "C" __attribute__((visibility("default")))

namespace genserve {

// ------------------------------------------------------------------------------------------- genserve.Linear

constexpr ort::Port kLinearInputs[] = {
    {Type::kFloat32, false},  // x [T, K]
    {Type::kMissing, false},  // weight: uint8 or float32, panels
    {Type::kFloat32, true},   // scales
    {Type::kFloat32, true},   // bias [N]
    {Type::kFloat32, true},   // norm_weight [K]
    {Type::kFloat32, true},   // norm_bias [K]
    {Type::kFloat32, true},   // residual [T, N]
};
constexpr ort::Port kLinearOutputs[] = {{Type::kFloat32, false}};
constexpr size_t kNumLinearInputs = sizeof kLinearInputs / sizeof *kLinearInputs;

// The values of the attributes, in the order of their enums.
constexpr const char* kWeightFormats[] = {"int8", "int8_block", "int4_block", "float32"};
constexpr const char* kNorms[] = {"", "rms", "layer"};
constexpr const char* kActivations[] = {"", "silu", "gelu", "gelu_tanh", "relu"};

// The inputs in order, which are all members of LinearInputs.
inline Tensor* begin(LinearInputs& inputs) { return &inputs.x; }
static_assert(sizeof(LinearInputs) == kNumLinearInputs * sizeof(Tensor));

struct LinearKernel {
  static constexpr const char* kName = "genserve.Linear";
  LinearAttributes attributes;
  LinearInputs constants;  // the constants of the graph, checked once
  size_t num_inputs;
  int num_threads;

  bool create(const ort::KernelInfo* info, Error& error) {
    num_threads = count_cores();
    attributes.in_features = ort::attribute(info, "in_features", int64_t{0});
    attributes.out_features = ort::attribute(info, "out_features", int64_t{0});
    attributes.gated = ort::attribute(info, "gated", int64_t{0}) != 0;
    attributes.epsilon = ort::attribute(info, "epsilon", 1e-5f);
    attributes.softcap = ort::attribute(info, "softcap", 0.0f);
    return ort::attribute(info, "weight_format", kWeightFormats, attributes.weight_format, error) &&
           ort::attribute(info, "norm", kNorms, attributes.norm, error) &&
           ort::attribute(info, "activation", kActivations, attributes.activation, error) &&
           ort::constant_inputs(info, begin(constants), kNumLinearInputs, num_inputs, error) &&
           (!has_weights(attributes, constants) || check_weights(attributes, constants, error));
  }

  bool compute(ort::KernelContext* context, Error& error) const {
    LinearInputs inputs = constants;
    if (!ort::inputs(context, begin(inputs), num_inputs, error) || !check_weights(attributes, inputs, error) ||
        !check_rows(attributes, inputs, error)) {
      return false;
    }
    Tensor y;
    const Tensor like{nullptr, Type::kFloat32, 2, {inputs.x.shape[0], LinearSizes(attributes).outputs}};
    return ort::allocate_output(context, 0, like, y, error) &&
           Linear(attributes, inputs, y.as<float>()).compute(ort::threads_of(context, num_threads), error);
  }
};

// ------------------------------------------------------------------------------------------- genserve.PagedAttention

constexpr ort::Port kAttentionInputs[] = {
    {Type::kMissing, false},  // query [T, (Hq + 2 Hk) * D]: float32 or float16
    {Type::kMissing, false},  // key_cache [num_blocks, block_size, Hk, D]: float32, float16 or int8
    {Type::kMissing, false},  // value_cache
    {Type::kInt32, false},    // cumulative_sequence_length [B + 1]
    {Type::kInt32, false},    // past_seqlens [B]
    {Type::kInt32, false},    // block_table [B, max_blocks]
    {Type::kFloat32, true},   // cos_cache [positions, R / 2]
    {Type::kFloat32, true},   // sin_cache
    {Type::kFloat32, true},   // q_norm_weight [D]
    {Type::kFloat32, true},   // k_norm_weight [D]
    {Type::kFloat32, true},   // alibi_slopes [Hq]
    {Type::kFloat32, true},   // key_scales [num_blocks, block_size, Hk]
    {Type::kFloat32, true},   // value_scales
    {Type::kInt32, true},     // attention_metadata: for CUDA
};
constexpr ort::Port kAttentionOutputs[] = {
    {Type::kMissing, false},  // output [T, Hq * D]
    {Type::kMissing, false},  // key_cache_out
    {Type::kMissing, false},  // value_cache_out
    {Type::kFloat32, true},   // key_scales_out
    {Type::kFloat32, true},   // value_scales_out
};
constexpr size_t kNumAttentionInputs = sizeof kAttentionInputs / sizeof *kAttentionInputs;
constexpr size_t kNumAttentionOutputs = sizeof kAttentionOutputs / sizeof *kAttentionOutputs;

inline Tensor* begin(AttentionInputs& inputs) { return &inputs.query; }
static_assert(sizeof(AttentionInputs) == kNumAttentionInputs * sizeof(Tensor));
static_assert(sizeof(AttentionOutputs) == kNumAttentionOutputs * sizeof(Tensor));

inline AttentionAttributes attention_attributes(const ort::KernelInfo* info) {
  return {
      .num_heads = ort::attribute(info, "num_heads", int64_t{0}),
      .kv_num_heads = ort::attribute(info, "kv_num_heads", int64_t{0}),
      .do_rotary = ort::attribute(info, "do_rotary", int64_t{0}),
      .local_window_size = ort::attribute(info, "local_window_size", int64_t{-1}),
      .scale = ort::attribute(info, "scale", 0.0f),
      .softcap = ort::attribute(info, "softcap", 0.0f),
      .qk_norm_epsilon = ort::attribute(info, "qk_norm_epsilon", 1e-6f),
  };
}

// Allocates the output, of the shape of `like`, and the caches; `inputs` are those of PagedAttention or DecoderLayer.
template <class Inputs>
bool allocate_outputs(ort::KernelContext* context, const Tensor& like, const Inputs& inputs, AttentionOutputs& outputs,
                      Error& error) {
  const bool scales = inputs.key_scales.present();
  return ort::allocate_output(context, 0, like, outputs.output, error) &&
         ort::allocate_output(context, 1, inputs.key_cache, outputs.key_cache, error) &&
         ort::allocate_output(context, 2, inputs.value_cache, outputs.value_cache, error) &&
         (!scales || (ort::allocate_output(context, 3, inputs.key_scales, outputs.key_scales, error) &&
                      ort::allocate_output(context, 4, inputs.value_scales, outputs.value_scales, error)));
}

struct PagedAttentionKernel {
  static constexpr const char* kName = "genserve.PagedAttention";
  AttentionAttributes attributes;
  AttentionInputs constants;
  size_t num_inputs;
  int num_threads;

  bool create(const ort::KernelInfo* info, Error& error) {
    num_threads = count_cores();
    attributes = attention_attributes(info);
    return check_attributes(attributes, error) &&
           ort::constant_inputs(info, begin(constants), kNumAttentionInputs, num_inputs, error);
  }

  bool compute(ort::KernelContext* context, Error& error) const {
    AttentionInputs inputs = constants;
    PagedAttention attention;
    if (!ort::inputs(context, begin(inputs), num_inputs, error) || !attention.open(attributes, inputs, error)) {
      return false;
    }
    AttentionOutputs outputs{};
    const Tensor like{nullptr, inputs.query.type, 2, {inputs.query.shape[0], attributes.num_heads * attention.head_dim}};
    return allocate_outputs(context, like, inputs, outputs, error) &&
           attention.compute(inputs, outputs, ort::threads_of(context, num_threads), error);
  }
};

// The type of an output must be fixed, so there is one operator per pair of types.
struct PagedAttentionOperator {
  ort::Port inputs[kNumAttentionInputs], outputs[kNumAttentionOutputs];
  ort::CustomOp op;

  PagedAttentionOperator(Type query, Type cache) {
    memcpy(inputs, kAttentionInputs, sizeof inputs);
    memcpy(outputs, kAttentionOutputs, sizeof outputs);
    inputs[0].type = outputs[0].type = query;
    inputs[1].type = inputs[2].type = outputs[1].type = outputs[2].type = cache;
    op = ort::make_operator<PagedAttentionKernel>("PagedAttention", inputs, kNumAttentionInputs, outputs,
                                                  kNumAttentionOutputs);
  }
};

// ------------------------------------------------------------------------------------------- genserve.DecoderLayer

constexpr size_t kNumLayerInputs = sizeof(DecoderLayerInputs) / sizeof(Tensor);
constexpr size_t kFirstOptionalInput = 6;  // key_scales

inline Tensor* begin(DecoderLayerInputs& inputs) { return &inputs.x; }

struct DecoderLayerKernel {
  static constexpr const char* kName = "genserve.DecoderLayer";
  DecoderLayerAttributes attributes;
  DecoderLayerInputs constants;
  size_t num_inputs;
  int num_threads;

  bool create(const ort::KernelInfo* info, Error& error) {
    num_threads = count_cores();
    LinearAttributes normed{}, residual{};
    normed.epsilon = ort::attribute(info, "epsilon", 1e-5f);
    if (!ort::attribute(info, "norm", kNorms, normed.norm, error) ||
        !ort::attribute(info, "weight_format", kWeightFormats, normed.weight_format, error) ||
        !ort::attribute(info, "residual_weight_format", kWeightFormats, residual.weight_format, error)) {
      return false;
    }
    attributes.qkv = attributes.inner = normed;
    attributes.output = attributes.down = residual;
    attributes.inner.gated = ort::attribute(info, "gated", int64_t{0}) != 0;
    attributes.parallel = ort::attribute(info, "parallel", int64_t{0}) != 0;
    attributes.head_dim = ort::attribute(info, "head_dim", int64_t{0});
    attributes.attention = attention_attributes(info);
    return ort::attribute(info, "activation", kActivations, attributes.inner.activation, error) &&
           complete(attributes, ort::attribute(info, "hidden_size", int64_t{0}),
                    ort::attribute(info, "intermediate_size", int64_t{0}), error) &&
           ort::constant_inputs(info, begin(constants), kNumLayerInputs, num_inputs, error) &&
           weights_are_valid(error);
  }

  // Whether the weights match the attributes; those that are inputs of the graph are checked in each run.
  bool weights_are_valid(Error& error) const {
    const DecoderLayer layer(attributes, constants);
    return !layer.has_weights() || layer.check_weights(error);
  }

  bool compute(ort::KernelContext* context, Error& error) const {
    DecoderLayerInputs inputs = constants;
    if (!ort::inputs(context, begin(inputs), num_inputs, error)) return false;
    AttentionOutputs outputs{};
    DecoderLayer layer(attributes, inputs);
    if (!layer.check_weights(error) || !layer.check_rows(error)) return false;
    return allocate_outputs(context, inputs.x, inputs, outputs, error) &&
           layer.compute(outputs, ort::threads_of(context, num_threads), error);
  }
};

// An operator per type of the cache, as for PagedAttention.
struct DecoderLayerOperator {
  ort::Port inputs[kNumLayerInputs], outputs[kNumAttentionOutputs];
  ort::CustomOp op;

  explicit DecoderLayerOperator(Type cache) {
    for (size_t i = 0; i < kNumLayerInputs; i++) inputs[i] = {Type::kMissing, i >= kFirstOptionalInput};
    memcpy(outputs, kAttentionOutputs, sizeof outputs);
    inputs[0].type = outputs[0].type = Type::kFloat32;
    inputs[1].type = inputs[2].type = outputs[1].type = outputs[2].type = cache;
    op = ort::make_operator<DecoderLayerKernel>("DecoderLayer", inputs, kNumLayerInputs, outputs, kNumAttentionOutputs);
  }
};

}  // namespace genserve

using namespace genserve;

// Created when the library is loaded instead of registered, since several sessions may register it concurrently.
static const ort::CustomOp linear =
    ort::make_operator<LinearKernel>("Linear", kLinearInputs, kNumLinearInputs, kLinearOutputs, 1);
static const PagedAttentionOperator attention[] = {
    {Type::kFloat32, Type::kFloat32}, {Type::kFloat32, Type::kFloat16}, {Type::kFloat32, Type::kInt8},
    {Type::kFloat16, Type::kFloat32}, {Type::kFloat16, Type::kFloat16}, {Type::kFloat16, Type::kInt8},
};

static const DecoderLayerOperator decoder_layer[] = {
    DecoderLayerOperator(Type::kFloat32), DecoderLayerOperator(Type::kFloat16), DecoderLayerOperator(Type::kInt8)};

// Called by SessionOptions.register_custom_ops_library.
GENSERVE_EXPORT ort::Status* RegisterCustomOps(ort::SessionOptions* options, const ort::ApiBase* base) {
  if (!ort::Api::open(base)) return ort::Api::refuse(base);
  ort::Domain* domain = nullptr;
  if (ort::Status* failed = ort::Api::create_domain("genserve", &domain)) return failed;
  if (ort::Status* failed = ort::Api::add_to_domain(domain, &linear)) return failed;
  for (const PagedAttentionOperator& each : attention) {
    if (ort::Status* failed = ort::Api::add_to_domain(domain, &each.op)) return failed;
  }
  for (const DecoderLayerOperator& each : decoder_layer) {
    if (ort::Status* failed = ort::Api::add_to_domain(domain, &each.op)) return failed;
  }
  return ort::Api::add_domain(options, domain);
}

// The instruction set that this library was compiled for.
GENSERVE_EXPORT const char* genserve_instruction_set() { return kInstructionSet; }

// Whether this machine supports the library of an instruction set.
GENSERVE_EXPORT int32_t genserve_cpu_supports(const char* instruction_set) { return cpu_supports(instruction_set); }

// Linear on the caller's tensors. Returns whether it succeeded; otherwise `error` has the message.
GENSERVE_EXPORT int32_t genserve_linear(const LinearAttributes* attributes, const LinearInputs* inputs, const Tensor* y,
                                        const Threads* threads, Error* error) {
  const bool good = check_weights(*attributes, *inputs, *error) && check_rows(*attributes, *inputs, *error) &&
                    check(*y, "y", Type::kFloat32, *error, inputs->x.shape[0], LinearSizes(*attributes).outputs);
  return good && Linear(*attributes, *inputs, y->as<float>()).compute(*threads, *error);
}

// PagedAttention on the caller's tensors, in the same way.
GENSERVE_EXPORT int32_t genserve_paged_attention(const AttentionAttributes* attributes, const AttentionInputs* inputs,
                                                 const AttentionOutputs* outputs, const Threads* threads,
                                                 Error* error) {
  PagedAttention attention;
  return attention.open(*attributes, *inputs, *error) && attention.compute(*inputs, *outputs, *threads, *error);
}

// DecoderLayer on the caller's tensors, in the same way; `outputs` are y and the caches. The sizes of the layer are
// qkv.in_features, down.in_features and head_dim.
GENSERVE_EXPORT int32_t genserve_decoder_layer(const DecoderLayerAttributes* attributes,
                                               const DecoderLayerInputs* inputs, const AttentionOutputs* outputs,
                                               const Threads* threads, Error* error) {
  DecoderLayerAttributes a = *attributes;
  if (!complete(a, a.qkv.in_features, a.down.in_features, *error)) return false;
  DecoderLayer layer(a, *inputs);
  return layer.check_weights(*error) && layer.check_rows(*error) && layer.compute(*outputs, *threads, *error);
}

// The best tokens of rows of logits: see scan_logits.
GENSERVE_EXPORT int32_t genserve_scan_logits(const float* logits, int64_t num_rows, int64_t size, int64_t k,
                                             int64_t* best_ids, float* best, int64_t* top_ids, double* log_sums) {
  return scan_logits(logits, num_rows, size, k, best_ids, best, top_ids, log_sums);
}

// Samples a token for each row of logits: see sample_logits.
GENSERVE_EXPORT int32_t genserve_sample_logits(const float* logits, int64_t num_rows, int64_t size,
                                               const SamplingRule* rules, SampledRow* sampled) {
  return sample_logits(logits, num_rows, size, rules, sampled);
}
