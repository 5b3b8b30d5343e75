// operators.cpp: what the library offers: operators to ONNX Runtime, and plain C functions to Python and to tests.

#include "cpu.hpp"
#include "linear.hpp"
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

// The inputs in their order; LinearInputs has nothing else.
inline Tensor* begin(LinearInputs& inputs) { return &inputs.x; }
static_assert(sizeof(LinearInputs) == kNumLinearInputs * sizeof(Tensor));

struct LinearKernel {
  static constexpr const char* kName = "genserve.Linear";
  LinearAttributes attributes;
  LinearInputs constants;  // what the graph holds: seen and checked once
  size_t num_inputs;

  bool create(const ort::KernelInfo* info, Error& error) {
    attributes.in_features = ort::attribute(info, "in_features", int64_t{0});
    attributes.out_features = ort::attribute(info, "out_features", int64_t{0});
    attributes.gated = ort::attribute(info, "gated", int64_t{0}) != 0;
    attributes.epsilon = ort::attribute(info, "epsilon", 1e-5f);
    attributes.softcap = ort::attribute(info, "softcap", 0.0f);
    return ort::attribute(info, "weight_format", {"int8", "int8_block", "int4_block", "float32"}, attributes.weight_format, error) &&
           ort::attribute(info, "norm", {"", "rms", "layer"}, attributes.norm, error) &&
           ort::attribute(info, "activation", {"", "silu", "gelu", "gelu_tanh", "relu"}, attributes.activation, error) &&
           ort::constant_inputs(info, begin(constants), kNumLinearInputs, num_inputs, error) &&
           (!constants.weight.present() || check_weights(attributes, constants, error));
  }

  bool compute(ort::KernelContext* context, Error& error) const {
    LinearInputs inputs = constants;
    if (!ort::inputs(context, begin(inputs), num_inputs, error) || !check_weights(attributes, inputs, error) ||
        !check_rows(attributes, inputs, error)) {
      return false;
    }
    Tensor y;
    const int64_t shape[] = {inputs.x.shape[0], LinearSizes(attributes).outputs};
    return ort::allocate_output(context, 0, shape, 2, y, error) &&
           Linear(attributes, inputs, y.as<float>()).compute(ort::threads_of(context), error);
  }
};

}  // namespace genserve

using namespace genserve;

// Called by SessionOptions.register_custom_ops_library.
GENSERVE_EXPORT ort::Status* RegisterCustomOps(ort::SessionOptions* options, const ort::ApiBase* base) {
  if (!ort::Api::open(base)) return ort::Api::refuse(base);
  static const ort::CustomOp linear =
      ort::make_operator<LinearKernel>("Linear", kLinearInputs, kNumLinearInputs, kLinearOutputs, 1);
  ort::Domain* domain = nullptr;
  if (ort::Status* failed = ort::Api::create_domain("genserve", &domain)) return failed;
  if (ort::Status* failed = ort::Api::add_to_domain(domain, &linear)) return failed;
  return ort::Api::add_domain(options, domain);
}

// The instruction set that this library was compiled for.
GENSERVE_EXPORT const char* genserve_instruction_set() { return kInstructionSet; }

// Whether this machine runs the library of an instruction set.
GENSERVE_EXPORT int32_t genserve_cpu_supports(const char* instruction_set) { return cpu_supports(instruction_set); }

// Linear on tensors of the caller's. Returns whether it went well; else `error` says what did not.
GENSERVE_EXPORT int32_t genserve_linear(const LinearAttributes* attributes, const LinearInputs* inputs, const Tensor* y,
                                        const Threads* threads, Error* error) {
  const bool good = check_weights(*attributes, *inputs, *error) && check_rows(*attributes, *inputs, *error) &&
                    check(*y, "y", Type::kFloat32, *error, inputs->x.shape[0], LinearSizes(*attributes).outputs);
  return good && Linear(*attributes, *inputs, y->as<float>()).compute(*threads, *error);
}
