// operators.cpp: the library's interface: operators for ONNX Runtime, and plain C functions for Python and tests.

#include "activation.hpp"
#include "attention.hpp"
#include "causal_conv.hpp"
#include "cpu.hpp"
#include "decoder_layer.hpp"
#include "embedding.hpp"
#include "experts.hpp"
#include "grouped_linear.hpp"
#include "linear.hpp"
#include "linear_attention.hpp"
#include "logits.hpp"
#include "norm.hpp"
#include "sampling.hpp"
#include "stream_mix.hpp"
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
    {Type::kInt32, true},     // order [K]
};
constexpr ort::Port kLinearOutputs[] = {{Type::kFloat32, false}};
constexpr size_t kNumLinearInputs = sizeof kLinearInputs / sizeof *kLinearInputs;

// The values of the attributes, in the order of their enums.
constexpr const char* kWeightFormats[] = {"int8", "int8_block", "int4_block", "float32", "q4",     "q5",     "q8",
                                          "q4k",  "q5k",        "q6k",        "q4z_32",  "q4z_64", "q4z_128"};
constexpr const char* kNorms[] = {"", "rms", "layer"};
constexpr const char* kActivations[] = {"", "silu", "gelu", "gelu_tanh", "relu", "relu2"};

// The inputs in order, which are all members of LinearInputs.
inline Tensor* begin(LinearInputs& inputs) { return &inputs.x; }
static_assert(sizeof(LinearInputs) == kNumLinearInputs * sizeof(Tensor));

// The attribute weight_format: a format, or several with their outputs, such as "q4:384,q8:192". Without the attribute,
// the layer has the format of `fallback`.
inline bool read_formats(const ort::KernelInfo* info, const char* name, const LinearAttributes& fallback,
                         LinearAttributes& a, Error& error) {
  char text[128] = "";
  if (!ort::attribute(info, name, text, error)) return false;
  a.weight_format = fallback.weight_format;
  memcpy(a.more, fallback.more, sizeof a.more);
  if (text[0] == '\0') return true;
  memset(a.more, 0, sizeof a.more);
  const char* at = text;
  for (int i = 0; i <= kMoreSegments; i++) {
    size_t length = strcspn(at, ":,");
    int index = 0;
    while (index < (int)(sizeof kWeightFormats / sizeof *kWeightFormats) &&
           (strlen(kWeightFormats[index]) != length || strncmp(at, kWeightFormats[index], length) != 0)) {
      index++;
    }
    if (index == (int)(sizeof kWeightFormats / sizeof *kWeightFormats)) break;
    at += length;
    int64_t outputs = 0;
    if (*at == ':') {
      for (at++; *at >= '0' && *at <= '9' && outputs < INT32_MAX; at++) outputs = 10 * outputs + (*at - '0');
    }
    if (i == 0) {
      a.weight_format = static_cast<WeightFormat>(index);
    } else if (outputs == 0) {
      break;
    } else {
      a.more[i - 1] = {outputs, static_cast<WeightFormat>(index)};
    }
    if (*at == '\0') return true;
    if (*at++ != ',') break;
  }
  return error.set("%s is \"%s\", which is not known", name, text);
}

struct LinearKernel {
  static constexpr const char* kName = "genserve.Linear";
  LinearAttributes attributes;
  LinearInputs constants;  // the constants of the graph, checked once
  size_t num_inputs;
  uint64_t name;  // see LinearAdapters::find
  int num_threads;

  bool create(const ort::KernelInfo* info, Error& error) {
    num_threads = count_cores();
    attributes.in_features = ort::attribute(info, "in_features", int64_t{0});
    attributes.out_features = ort::attribute(info, "out_features", int64_t{0});
    attributes.gated = ort::attribute(info, "gated", int64_t{0}) != 0;
    attributes.epsilon = ort::attribute(info, "epsilon", 1e-5f);
    attributes.softcap = ort::attribute(info, "softcap", 0.0f);
    name = ort::name_digest(info, 1);
    return read_formats(info, "weight_format", {}, attributes, error) &&
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
    LinearAdapters adapters;
    const Tensor like{nullptr, Type::kFloat32, 2, {inputs.x.shape[0], LinearSizes(attributes).outputs}};
    return LinearAdapters::find(name, inputs.x.shape[0], adapters, error) &&
           ort::allocate_output(context, 0, like, y, error) &&
           Linear(attributes, inputs, y.as<float>(), adapters).compute(ort::threads_of(context, num_threads), error);
  }
};

// ------------------------------------------------------------------------------------------- genserve.Embedding

constexpr ort::Port kEmbeddingInputs[] = {
    {Type::kInt64, false},    // ids [T]
    {Type::kMissing, false},  // weight: uint8, panels
    {Type::kFloat32, true},   // scales
};
constexpr ort::Port kEmbeddingOutputs[] = {{Type::kFloat32, false}};
constexpr size_t kNumEmbeddingInputs = sizeof kEmbeddingInputs / sizeof *kEmbeddingInputs;

inline Tensor* begin(EmbeddingInputs& inputs) { return &inputs.ids; }
static_assert(sizeof(EmbeddingInputs) == kNumEmbeddingInputs * sizeof(Tensor));

struct EmbeddingKernel {
  static constexpr const char* kName = "genserve.Embedding";
  LinearAttributes attributes;
  EmbeddingInputs constants;
  size_t num_inputs;

  bool create(const ort::KernelInfo* info, Error& error) {
    attributes.in_features = ort::attribute(info, "in_features", int64_t{0});
    attributes.out_features = ort::attribute(info, "out_features", int64_t{0});
    return read_formats(info, "weight_format", {}, attributes, error) &&
           ort::constant_inputs(info, begin(constants), kNumEmbeddingInputs, num_inputs, error);
  }

  bool compute(ort::KernelContext* context, Error& error) const {
    EmbeddingInputs inputs = constants;
    if (!ort::inputs(context, begin(inputs), num_inputs, error) || !check_embedding(attributes, inputs, error)) return false;
    Tensor y;
    const Tensor like{nullptr, Type::kFloat32, 2, {inputs.ids.shape[0], attributes.in_features}};
    return ort::allocate_output(context, 0, like, y, error) && read_rows(attributes, inputs, y.as<float>(), error);
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
    {Type::kFloat32, true},   // sinks [Hq]
    {Type::kFloat32, true},   // v_norm_weight [D]
};
constexpr ort::Port kAttentionOutputs[] = {
    {Type::kMissing, false},  // output [T, Hq * D]
    {Type::kMissing, true},   // key_cache_out
    {Type::kMissing, true},   // value_cache_out
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
      .local_chunk_size = ort::attribute(info, "local_chunk_size", int64_t{-1}),
      .shares_cache = ort::attribute(info, "shares_cache", int64_t{0}),
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
    const bool allocated = attributes.shares_cache != 0 ? ort::allocate_output(context, 0, like, outputs.output, error)
                                                        : allocate_outputs(context, like, inputs, outputs, error);
    return allocated && attention.compute(inputs, outputs, ort::threads_of(context, num_threads), error);
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
  uint64_t names[DecoderLayer::kLinears];  // see LinearAdapters::find
  int num_threads;

  bool create(const ort::KernelInfo* info, Error& error) {
    num_threads = count_cores();
    LinearAttributes normed{};
    normed.epsilon = ort::attribute(info, "epsilon", 1e-5f);
    if (!ort::attribute(info, "norm", kNorms, normed.norm, error)) return false;
    attributes.qkv = attributes.inner = normed;
    if (!read_formats(info, "weight_format", {}, attributes.qkv, error) ||
        !read_formats(info, "residual_weight_format", {}, attributes.output, error) ||
        !read_formats(info, "inner_weight_format", attributes.qkv, attributes.inner, error) ||
        !read_formats(info, "down_weight_format", attributes.output, attributes.down, error)) {
      return false;
    }
    attributes.inner.gated = ort::attribute(info, "gated", int64_t{0}) != 0;
    attributes.parallel = ort::attribute(info, "parallel", int64_t{0}) != 0;
    attributes.head_dim = ort::attribute(info, "head_dim", int64_t{0});
    attributes.attention = attention_attributes(info);
    const Tensor* const weights[] = {&constants.qkv_weight, &constants.output_weight, &constants.inner_weight,
                                     &constants.down_weight};
    for (int i = 0; i < DecoderLayer::kLinears; i++) names[i] = ort::name_digest(info, (size_t)(weights[i] - begin(constants)));
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
    LinearAdapters adapters[DecoderLayer::kLinears];
    for (int i = 0; i < DecoderLayer::kLinears; i++) {
      if (!LinearAdapters::find(names[i], inputs.x.shape[0], adapters[i], error)) return false;
    }
    DecoderLayer layer(attributes, inputs, adapters);
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

// ------------------------------------------------------------------------------------------- genserve.Experts

constexpr size_t kNumExpertsInputs = sizeof(ExpertsInputs) / sizeof(Tensor);
constexpr const char* kExpertActivations[] = {"", "silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_swiglu"};
constexpr const char* kScores[] = {"softmax", "sigmoid", "softmax_of_top", "sparsemixer", "sigmoid_of_top"};

inline Tensor* begin(ExpertsInputs& inputs) { return &inputs.x; }

struct ExpertsKernel {
  static constexpr const char* kName = "genserve.Experts";
  ExpertsAttributes attributes{};
  ExpertsInputs constants;
  size_t num_inputs;
  int num_threads;

  bool create(const ort::KernelInfo* info, Error& error) {
    num_threads = count_cores();
    ExpertsAttributes& a = attributes;
    a.router.num_experts = ort::attribute(info, "num_experts", int64_t{0});
    a.router.top_k = ort::attribute(info, "top_k", int64_t{0});
    a.router.num_groups = (int32_t)ort::attribute(info, "num_groups", int64_t{0});
    a.router.kept_groups = (int32_t)ort::attribute(info, "kept_groups", int64_t{0});
    a.router.group_top = (int32_t)ort::attribute(info, "group_top", int64_t{1});
    a.router.normalise = ort::attribute(info, "normalise", -1.0f);
    a.router.scale = ort::attribute(info, "scale", 1.0f);
    a.router.jitter = ort::attribute(info, "jitter", 0.0f);
    a.shared_score = ort::attribute(info, "shared_score", int64_t{0}) != 0;
    a.scales_inputs = ort::attribute(info, "scales_inputs", int64_t{0}) != 0;
    a.inner.epsilon = ort::attribute(info, "epsilon", 1e-5f);
    a.inner.gated = ort::attribute(info, "gated", int64_t{0}) != 0;
    return ort::attribute(info, "score", kScores, a.router.score, error) &&
           ort::attribute(info, "norm", kNorms, a.inner.norm, error) &&
           ort::attribute(info, "activation", kExpertActivations, a.inner.activation, error) &&
           read_formats(info, "weight_format", {}, a.inner, error) &&
           read_formats(info, "down_weight_format", a.inner, a.down, error) &&
           read_formats(info, "shared_weight_format", a.inner, a.shared_inner, error) &&
           read_formats(info, "shared_down_weight_format", a.down, a.shared_down, error) &&
           complete(a, ort::attribute(info, "hidden_size", int64_t{0}),
                    ort::attribute(info, "intermediate_size", int64_t{0}),
                    ort::attribute(info, "shared_size", int64_t{0}), error) &&
           ort::constant_inputs(info, begin(constants), kNumExpertsInputs, num_inputs, error) &&
           weights_are_valid(error);
  }

  // Whether the weights match the attributes; those that are inputs of the graph are checked in each run.
  bool weights_are_valid(Error& error) const {
    const Experts experts(attributes, constants);
    return !experts.has_weights() || experts.check_weights(error);
  }

  bool compute(ort::KernelContext* context, Error& error) const {
    ExpertsInputs inputs = constants;
    if (!ort::inputs(context, begin(inputs), num_inputs, error)) return false;
    Experts experts(attributes, inputs);
    Tensor y;
    return experts.check_weights(error) && experts.check_rows(error) &&
           ort::allocate_output(context, 0, inputs.x, y, error) &&
           experts.compute(y.as<float>(), ort::threads_of(context, num_threads), error);
  }
};

struct ExpertsOperator {
  ort::Port inputs[kNumExpertsInputs];
  ort::CustomOp op;

  ExpertsOperator() {
    constexpr size_t kFirstOptional = 4;  // inner_scales
    for (size_t i = 0; i < kNumExpertsInputs; i++) inputs[i] = {Type::kMissing, i >= kFirstOptional};
    inputs[0].type = Type::kFloat32;
    op = ort::make_operator<ExpertsKernel>("Experts", inputs, kNumExpertsInputs, kLinearOutputs, 1);
  }
};

// ------------------------------------------------------------------------------------------- genserve.GroupedLinear

constexpr ort::Port kGroupedInputs[] = {
    {Type::kFloat32, false},  // x [T, groups * K]
    {Type::kMissing, false},  // weight: the panels of all groups
    {Type::kFloat32, true},   // scales, as for Linear
};
constexpr size_t kNumGroupedInputs = sizeof kGroupedInputs / sizeof *kGroupedInputs;

inline Tensor* begin(GroupedLinearInputs& inputs) { return &inputs.x; }

struct GroupedLinearKernel {
  static constexpr const char* kName = "genserve.GroupedLinear";
  GroupedLinearAttributes attributes{};
  GroupedLinearInputs constants;
  size_t num_inputs;
  int num_threads;

  bool create(const ort::KernelInfo* info, Error& error) {
    num_threads = count_cores();
    attributes.num_groups = ort::attribute(info, "num_groups", int64_t{0});
    attributes.group.in_features = ort::attribute(info, "in_features", int64_t{0});
    attributes.group.out_features = ort::attribute(info, "out_features", int64_t{0});
    return read_formats(info, "weight_format", {}, attributes.group, error) &&
           ort::constant_inputs(info, begin(constants), kNumGroupedInputs, num_inputs, error) && weights_are_valid(error);
  }

  // Whether the weights match the attributes; those that are inputs of the graph are checked in each run.
  bool weights_are_valid(Error& error) const {
    const GroupedLinear linear(attributes, constants);
    return !linear.has_weights() || linear.check_weights(error);
  }

  bool compute(ort::KernelContext* context, Error& error) const {
    GroupedLinearInputs inputs = constants;
    if (!ort::inputs(context, begin(inputs), num_inputs, error)) return false;
    GroupedLinear linear(attributes, inputs);
    if (!linear.check_weights(error) || !linear.check_rows(error)) return false;
    Tensor y;
    const Tensor like{nullptr, Type::kFloat32, 2, {inputs.x.shape[0], linear.outputs()}};
    return ort::allocate_output(context, 0, like, y, error) &&
           linear.compute(y.as<float>(), ort::threads_of(context, num_threads), error);
  }
};

// ------------------------------------------------------------------------------------------- genserve.Norm

constexpr ort::Port kNormInputs[] = {
    {Type::kFloat32, false},  // x [T, columns]
    {Type::kFloat32, false},  // weight [columns]
    {Type::kFloat32, true},   // bias [columns]
    {Type::kFloat32, true},   // residual [T, columns]
};
constexpr size_t kNumNormInputs = sizeof kNormInputs / sizeof *kNormInputs;

inline Tensor* begin(NormInputs& inputs) { return &inputs.x; }
static_assert(sizeof(NormInputs) == kNumNormInputs * sizeof(Tensor));

struct NormKernel {
  static constexpr const char* kName = "genserve.Norm";
  NormAttributes attributes;
  NormInputs constants;
  size_t num_inputs;
  int num_threads;

  bool create(const ort::KernelInfo* info, Error& error) {
    num_threads = count_cores();
    attributes.num_groups = ort::attribute(info, "num_groups", int64_t{1});
    attributes.epsilon = ort::attribute(info, "epsilon", 1e-5f);
    return ort::attribute(info, "norm", kNorms, attributes.norm, error) &&
           ort::constant_inputs(info, begin(constants), kNumNormInputs, num_inputs, error) &&
           (!constants.weight.present() || check_norm_weights(attributes, constants, error));
  }

  bool compute(ort::KernelContext* context, Error& error) const {
    NormInputs inputs = constants;
    Tensor y;
    if (!ort::inputs(context, begin(inputs), num_inputs, error) || !check_norm(attributes, inputs, error) ||
        !ort::allocate_output(context, 0, inputs.x, y, error)) {
      return false;
    }
    norm_rows(attributes, inputs, y.as<float>(), ort::threads_of(context, num_threads));
    return true;
  }
};

// ------------------------------------------------------------------------------------------- genserve.Activation

constexpr ort::Port kActivationInputs[] = {
    {Type::kFloat32, false},  // x [T, columns]
    {Type::kFloat32, true},   // factor [T, columns]
};
constexpr size_t kNumActivationInputs = sizeof kActivationInputs / sizeof *kActivationInputs;
constexpr const char* kAllActivations[] = {"",      "silu",           "gelu",    "gelu_tanh", "relu",
                                           "relu2", "clamped_swiglu", "sigmoid", "xielu"};

inline Tensor* begin(ActivationInputs& inputs) { return &inputs.x; }
static_assert(sizeof(ActivationInputs) == kNumActivationInputs * sizeof(Tensor));

struct ActivationKernel {
  static constexpr const char* kName = "genserve.Activation";
  ActivationAttributes attributes;
  size_t num_inputs;
  int num_threads;

  bool create(const ort::KernelInfo* info, Error& error) {
    num_threads = count_cores();
    attributes.alpha_p = ort::attribute(info, "alpha_p", 0.0f);
    attributes.alpha_n = ort::attribute(info, "alpha_n", 0.0f);
    attributes.beta = ort::attribute(info, "beta", 0.0f);
    return ort::attribute(info, "activation", kAllActivations, attributes.activation, error) &&
           check_attributes(attributes, error) && ort::ok(ort::Api::count_inputs(info, &num_inputs), error);
  }

  bool compute(ort::KernelContext* context, Error& error) const {
    ActivationInputs inputs{};
    Tensor y;
    if (!ort::inputs(context, begin(inputs), num_inputs, error) || !check_activation(attributes, inputs, error) ||
        !ort::allocate_output(context, 0, inputs.x, y, error)) {
      return false;
    }
    activate_all(attributes, inputs, y.as<float>(), ort::threads_of(context, num_threads));
    return true;
  }
};

// ------------------------------------------------------------------------------------------- genserve.StreamMix

constexpr ort::Port kStreamMixInputs[] = {
    {Type::kFloat32, false},  // x [T, streams, columns]
    {Type::kFloat32, false},  // matrices [T, streams, streams]
};
constexpr size_t kNumStreamMixInputs = sizeof kStreamMixInputs / sizeof *kStreamMixInputs;

inline Tensor* begin(StreamMixInputs& inputs) { return &inputs.x; }
static_assert(sizeof(StreamMixInputs) == kNumStreamMixInputs * sizeof(Tensor));

struct StreamMixKernel {
  static constexpr const char* kName = "genserve.StreamMix";
  int num_threads;

  bool create(const ort::KernelInfo*, Error&) {
    num_threads = count_cores();
    return true;
  }

  bool compute(ort::KernelContext* context, Error& error) const {
    StreamMixInputs inputs{};
    Tensor y;
    if (!ort::inputs(context, begin(inputs), kNumStreamMixInputs, error) || !check_stream_mix(inputs, error) ||
        !ort::allocate_output(context, 0, inputs.x, y, error)) {
      return false;
    }
    mix_streams(inputs, y.as<float>(), ort::threads_of(context, num_threads));
    return true;
  }
};

// ------------------------------------------------------------------------------------------- genserve.CausalConv

// The last inputs of an operator with states; the state is bound to the same memory as the last output.
#define GENSERVE_STATE_PORTS                                                                                    \
  {Type::kInt32, false},   /* cumulative_sequence_length [B + 1] */                                              \
  {Type::kInt32, false},   /* state_source [B] */                                                                \
  {Type::kInt32, false},   /* state_target [B] */                                                                \
  {Type::kFloat32, false}  /* past_state [slots, ...] */

constexpr ort::Port kConvInputs[] = {
    {Type::kFloat32, false},  // x [T, columns]
    {Type::kFloat32, false},  // weight [kernel_size, channels]
    {Type::kFloat32, true},   // bias [channels]
    GENSERVE_STATE_PORTS,
};
constexpr size_t kNumConvInputs = sizeof kConvInputs / sizeof *kConvInputs;
constexpr ort::Port kStateOutputs[] = {
    {Type::kFloat32, false},  // y [T, n]
    {Type::kFloat32, false},  // present_state
};
constexpr const char* kConvActivations[] = {"", "silu"};

inline Tensor* begin(CausalConvInputs& inputs) { return &inputs.x; }
static_assert(sizeof(CausalConvInputs) == kNumConvInputs * sizeof(Tensor));

// Allocates the output [T, width] of an operator with states, whose other output is the memory of the states.
inline bool allocate_with_states(ort::KernelContext* context, int64_t tokens, int64_t width, const StateInputs& states,
                                 Tensor& y, Error& error) {
  Tensor present;
  const Tensor like{nullptr, Type::kFloat32, 2, {tokens, width}};
  if (!ort::allocate_output(context, 0, like, y, error) ||
      !ort::allocate_output(context, 1, states.past_state, present, error)) {
    return false;
  }
  return present.data == states.past_state.data ||
         error.set("present_state is not bound to the memory of past_state");
}

struct CausalConvKernel {
  static constexpr const char* kName = "genserve.CausalConv";
  CausalConvAttributes attributes{};
  CausalConvInputs constants;
  size_t num_inputs;
  int num_threads;

  bool create(const ort::KernelInfo* info, Error& error) {
    num_threads = count_cores();
    attributes.channels = ort::attribute(info, "channels", int64_t{0});
    attributes.kernel_size = ort::attribute(info, "kernel_size", int64_t{0});
    attributes.offset = ort::attribute(info, "offset", int64_t{0});
    attributes.gated = ort::attribute(info, "gated", int64_t{0}) != 0;
    return ort::attribute(info, "activation", kConvActivations, attributes.activation, error) &&
           ort::constant_inputs(info, begin(constants), kNumConvInputs, num_inputs, error);
  }

  bool compute(ort::KernelContext* context, Error& error) const {
    CausalConvInputs inputs = constants;
    if (!ort::inputs(context, begin(inputs), num_inputs, error)) return false;
    const CausalConv conv(attributes, inputs);
    Tensor y;
    if (!conv.check_inputs(error) ||
        !allocate_with_states(context, inputs.x.shape[0], attributes.channels, inputs.states, y, error)) {
      return false;
    }
    conv.compute(y.as<float>(), ort::threads_of(context, num_threads));
    return true;
  }
};

// ------------------------------------------------------------------------------------------- genserve.LinearAttention

constexpr ort::Port kLinearAttentionInputs[] = {
    {Type::kFloat32, false},  // x [T, 2 * num_key_heads * key_dim + num_heads * value_dim]
    {Type::kFloat32, false},  // gates [T, columns]
    {Type::kFloat32, false},  // rate [num_heads]
    {Type::kFloat32, false},  // step_bias [num_heads]
    {Type::kFloat32, true},   // skip [num_heads]
    {Type::kFloat32, true},   // norm_weight [num_heads * value_dim]
    GENSERVE_STATE_PORTS,
};
constexpr size_t kNumLinearAttentionInputs = sizeof kLinearAttentionInputs / sizeof *kLinearAttentionInputs;
constexpr const char* kRules[] = {"gated", "gated_delta"};
constexpr const char* kOutputNorms[] = {"", "norm_then_gate", "gate_then_norm"};

inline Tensor* begin(LinearAttentionInputs& inputs) { return &inputs.x; }
static_assert(sizeof(LinearAttentionInputs) == kNumLinearAttentionInputs * sizeof(Tensor));

struct LinearAttentionKernel {
  static constexpr const char* kName = "genserve.LinearAttention";
  LinearAttentionAttributes attributes{};
  LinearAttentionInputs constants;
  size_t num_inputs;
  int num_threads;

  bool create(const ort::KernelInfo* info, Error& error) {
    num_threads = count_cores();
    LinearAttentionAttributes& a = attributes;
    a.num_key_heads = ort::attribute(info, "num_key_heads", int64_t{0});
    a.num_heads = ort::attribute(info, "num_heads", int64_t{0});
    a.key_dim = ort::attribute(info, "key_dim", int64_t{0});
    a.value_dim = ort::attribute(info, "value_dim", int64_t{0});
    a.norm_size = ort::attribute(info, "norm_size", int64_t{0});
    a.gate_offset = ort::attribute(info, "gate_offset", int64_t{0});
    a.step_offset = ort::attribute(info, "step_offset", int64_t{0});
    a.beta_offset = ort::attribute(info, "beta_offset", int64_t{0});
    a.epsilon = ort::attribute(info, "epsilon", 1e-5f);
    a.beta_scale = ort::attribute(info, "beta_scale", 1.0f);
    a.step_min = ort::attribute(info, "step_min", 0.0f);
    a.step_max = ort::attribute(info, "step_max", __builtin_inff());
    return ort::attribute(info, "rule", kRules, a.rule, error) &&
           ort::attribute(info, "norm", kOutputNorms, a.norm, error) &&
           ort::constant_inputs(info, begin(constants), kNumLinearAttentionInputs, num_inputs, error);
  }

  bool compute(ort::KernelContext* context, Error& error) const {
    LinearAttentionInputs inputs = constants;
    if (!ort::inputs(context, begin(inputs), num_inputs, error)) return false;
    const LinearAttention attention(attributes, inputs);
    Tensor y;
    return attention.check_inputs(error) &&
           allocate_with_states(context, inputs.x.shape[0], attributes.num_heads * attributes.value_dim, inputs.states, y,
                                error) &&
           attention.compute(y.as<float>(), ort::threads_of(context, num_threads), error);
  }
};

}  // namespace genserve

using namespace genserve;

// Created when the library is loaded instead of registered, since several sessions may register it concurrently.
static const ort::CustomOp linear =
    ort::make_operator<LinearKernel>("Linear", kLinearInputs, kNumLinearInputs, kLinearOutputs, 1);
static const ort::CustomOp embedding =
    ort::make_operator<EmbeddingKernel>("Embedding", kEmbeddingInputs, kNumEmbeddingInputs, kEmbeddingOutputs, 1);
static const PagedAttentionOperator attention[] = {
    {Type::kFloat32, Type::kFloat32}, {Type::kFloat32, Type::kFloat16}, {Type::kFloat32, Type::kInt8},
    {Type::kFloat16, Type::kFloat32}, {Type::kFloat16, Type::kFloat16}, {Type::kFloat16, Type::kInt8},
};

static const ExpertsOperator experts;
static const ort::CustomOp grouped_linear = ort::make_operator<GroupedLinearKernel>(
    "GroupedLinear", kGroupedInputs, kNumGroupedInputs, kLinearOutputs, 1);

static const ort::CustomOp norm = ort::make_operator<NormKernel>("Norm", kNormInputs, kNumNormInputs, kLinearOutputs, 1);
static const ort::CustomOp activation = ort::make_operator<ActivationKernel>(
    "Activation", kActivationInputs, kNumActivationInputs, kLinearOutputs, 1);
static const ort::CustomOp stream_mix =
    ort::make_operator<StreamMixKernel>("StreamMix", kStreamMixInputs, kNumStreamMixInputs, kLinearOutputs, 1);

static const ort::CustomOp causal_conv =
    ort::make_operator<CausalConvKernel>("CausalConv", kConvInputs, kNumConvInputs, kStateOutputs, 2);
static const ort::CustomOp linear_attention = ort::make_operator<LinearAttentionKernel>(
    "LinearAttention", kLinearAttentionInputs, kNumLinearAttentionInputs, kStateOutputs, 2);

static const DecoderLayerOperator decoder_layer[] = {
    DecoderLayerOperator(Type::kFloat32), DecoderLayerOperator(Type::kFloat16), DecoderLayerOperator(Type::kInt8)};

// Called by SessionOptions.register_custom_ops_library, which may get the path from another process.
GENSERVE_EXPORT ort::Status* RegisterCustomOps(ort::SessionOptions* options, const ort::ApiBase* base) {
  if (!ort::Api::open(base)) return ort::Api::refuse(base);
  if (!cpu_supports(kInstructionSet)) {
    return ort::Api::create_status("this processor or its operating system does not support these kernels of genserve");
  }
  ort::Domain* domain = nullptr;
  if (ort::Status* failed = ort::Api::create_domain("genserve", &domain)) return failed;
  if (ort::Status* failed = ort::Api::add_to_domain(domain, &linear)) return failed;
  if (ort::Status* failed = ort::Api::add_to_domain(domain, &embedding)) return failed;
  if (ort::Status* failed = ort::Api::add_to_domain(domain, &experts.op)) return failed;
  if (ort::Status* failed = ort::Api::add_to_domain(domain, &grouped_linear)) return failed;
  if (ort::Status* failed = ort::Api::add_to_domain(domain, &norm)) return failed;
  if (ort::Status* failed = ort::Api::add_to_domain(domain, &activation)) return failed;
  if (ort::Status* failed = ort::Api::add_to_domain(domain, &stream_mix)) return failed;
  if (ort::Status* failed = ort::Api::add_to_domain(domain, &causal_conv)) return failed;
  if (ort::Status* failed = ort::Api::add_to_domain(domain, &linear_attention)) return failed;
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

// Sets the adapters of the calls on this thread; null: none.
GENSERVE_EXPORT void genserve_use_adapters(const Adapters* adapters) { current_adapters = adapters; }

// The digest by which `Adapters` has a layer.
GENSERVE_EXPORT uint64_t genserve_name_digest(const char* name) { return digest_of(name); }

// Linear on the caller's tensors; with adapters on this thread, those of the layer "". Returns whether it succeeded; otherwise `error` has the message.
GENSERVE_EXPORT int32_t genserve_linear(const LinearAttributes* attributes, const LinearInputs* inputs, const Tensor* y,
                                        const Threads* threads, Error* error) {
  const bool good = check_weights(*attributes, *inputs, *error) && check_rows(*attributes, *inputs, *error) &&
                    check(*y, "y", Type::kFloat32, *error, inputs->x.shape[0], LinearSizes(*attributes).outputs);
  LinearAdapters adapters;
  return good && LinearAdapters::find(digest_of(""), inputs->x.shape[0], adapters, *error) &&
         Linear(*attributes, *inputs, y->as<float>(), adapters).compute(*threads, *error);
}

// Embedding on the caller's tensors, in the same way.
GENSERVE_EXPORT int32_t genserve_embedding(const LinearAttributes* attributes, const EmbeddingInputs* inputs,
                                           const Tensor* y, Error* error) {
  return check_embedding(*attributes, *inputs, *error) &&
         check(*y, "y", Type::kFloat32, *error, inputs->ids.shape[0], attributes->in_features) &&
         read_rows(*attributes, *inputs, y->as<float>(), *error);
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

// Experts on the caller's tensors, in the same way. The sizes of the layer are inner.in_features, down.in_features and
// shared_down.in_features.
GENSERVE_EXPORT int32_t genserve_experts(const ExpertsAttributes* attributes, const ExpertsInputs* inputs, const Tensor* y,
                                         const Threads* threads, Error* error) {
  ExpertsAttributes a = *attributes;
  if (!complete(a, a.inner.in_features, a.down.in_features, a.shared_down.in_features, *error)) return false;
  Experts experts(a, *inputs);
  return experts.check_weights(*error) && experts.check_rows(*error) &&
         check(*y, "y", Type::kFloat32, *error, inputs->x.shape[0], a.inner.in_features) &&
         experts.compute(y->as<float>(), *threads, *error);
}

// A GroupedLinear on the caller's tensors, in the same way.
GENSERVE_EXPORT int32_t genserve_grouped_linear(const GroupedLinearAttributes* attributes,
                                                const GroupedLinearInputs* inputs, const Tensor* y,
                                                const Threads* threads, Error* error) {
  GroupedLinear linear(*attributes, *inputs);
  return linear.check_weights(*error) && linear.check_rows(*error) &&
         check(*y, "y", Type::kFloat32, *error, inputs->x.shape[0], linear.outputs()) &&
         linear.compute(y->as<float>(), *threads, *error);
}

// Norm on the caller's tensors, in the same way.
GENSERVE_EXPORT int32_t genserve_norm(const NormAttributes* attributes, const NormInputs* inputs, const Tensor* y,
                                      const Threads* threads, Error* error) {
  if (!check_norm(*attributes, *inputs, *error) ||
      !check(*y, "y", Type::kFloat32, *error, inputs->x.shape[0], inputs->x.shape[1])) {
    return false;
  }
  norm_rows(*attributes, *inputs, y->as<float>(), *threads);
  return true;
}

// Activation on the caller's tensors, in the same way.
GENSERVE_EXPORT int32_t genserve_activation(const ActivationAttributes* attributes, const ActivationInputs* inputs,
                                            const Tensor* y, const Threads* threads, Error* error) {
  if (!check_activation(*attributes, *inputs, *error) ||
      !check(*y, "y", Type::kFloat32, *error, inputs->x.shape[0], inputs->x.shape[1])) {
    return false;
  }
  activate_all(*attributes, *inputs, y->as<float>(), *threads);
  return true;
}

// StreamMix on the caller's tensors, in the same way.
GENSERVE_EXPORT int32_t genserve_stream_mix(const StreamMixInputs* inputs, const Tensor* y, const Threads* threads,
                                            Error* error) {
  if (!check_stream_mix(*inputs, *error) ||
      !check(*y, "y", Type::kFloat32, *error, inputs->x.shape[0], inputs->x.shape[1], inputs->x.shape[2])) {
    return false;
  }
  mix_streams(*inputs, y->as<float>(), *threads);
  return true;
}

// CausalConv on the caller's tensors, in the same way; the states are written in place.
GENSERVE_EXPORT int32_t genserve_causal_conv(const CausalConvAttributes* attributes, const CausalConvInputs* inputs,
                                             const Tensor* y, const Threads* threads, Error* error) {
  const CausalConv conv(*attributes, *inputs);
  if (!conv.check_inputs(*error) ||
      !check(*y, "y", Type::kFloat32, *error, inputs->x.shape[0], attributes->channels)) {
    return false;
  }
  conv.compute(y->as<float>(), *threads);
  return true;
}

// LinearAttention on the caller's tensors, in the same way; the states are written in place.
GENSERVE_EXPORT int32_t genserve_linear_attention(const LinearAttentionAttributes* attributes,
                                                  const LinearAttentionInputs* inputs, const Tensor* y,
                                                  const Threads* threads, Error* error) {
  const LinearAttention attention(*attributes, *inputs);
  return attention.check_inputs(*error) &&
         check(*y, "y", Type::kFloat32, *error, inputs->x.shape[0], attributes->num_heads * attributes->value_dim) &&
         attention.compute(y->as<float>(), *threads, *error);
}

// The best tokens of rows of logits: see scan_logits.
GENSERVE_EXPORT int32_t genserve_scan_logits(const float* logits, int64_t num_rows, int64_t size, int64_t k,
                                             int64_t* best_ids, float* best, int64_t* top_ids, double* log_sums) {
  return scan_logits(logits, num_rows, size, k, best_ids, best, top_ids, log_sums);
}

// A matrix of rows, such as the blocks of one buffer of a KV cache.
struct RowBuffer {
  char* data;
  int64_t row_bytes;
};

// Calls copy(row of a buffer, its place in `rows`, bytes): row i of `rows` has row `indices[i]` of each buffer, one after the
// other.
template <class Rows, class Copy>
void copy_rows(const RowBuffer* buffers, int64_t num_buffers, const int64_t* indices, int64_t num_rows, Rows* rows,
               Copy&& copy) {
  for (int64_t i = 0; i < num_rows; i++) {
    for (const RowBuffer* each = buffers; each != buffers + num_buffers; rows += each->row_bytes, each++) {
      copy(each->data + indices[i] * each->row_bytes, rows, (size_t)each->row_bytes);
    }
  }
}

// Copies rows of several buffers into `rows`, see copy_rows.
GENSERVE_EXPORT void genserve_gather_rows(const RowBuffer* buffers, int64_t num_buffers, const int64_t* indices,
                                          int64_t num_rows, char* rows) {
  copy_rows(buffers, num_buffers, indices, num_rows, rows,
            [](const char* row, char* to, size_t bytes) { memcpy(to, row, bytes); });
}

// Overwrites rows of the buffers with rows of genserve_gather_rows.
GENSERVE_EXPORT void genserve_scatter_rows(const RowBuffer* buffers, int64_t num_buffers, const int64_t* indices,
                                           int64_t num_rows, const char* rows) {
  copy_rows(buffers, num_buffers, indices, num_rows, rows,
            [](char* row, const char* from, size_t bytes) { memcpy(row, from, bytes); });
}

// Samples a token for each row of logits: see sample_logits.
GENSERVE_EXPORT int32_t genserve_sample_logits(const float* logits, int64_t num_rows, int64_t size,
                                               const SamplingRule* rules, SampledRow* sampled) {
  return sample_logits(logits, num_rows, size, rules, sampled);
}
