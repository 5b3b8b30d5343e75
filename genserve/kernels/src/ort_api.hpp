// ort_api.hpp: the part of ONNX Runtime's C API that operators use.
//
// No package of pip has the C header, but its ABI is versioned: OrtApi is a table of functions that only grows, so that
// a function is identified by its position, and the functions of version 17 (ONNX Runtime 1.17, January 2024) keep
// theirs. The status of every call is checked.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "low_rank.hpp"
#include "team.hpp"
#include "tensor.hpp"

namespace genserve::ort {

constexpr uint32_t kVersion = 17;

struct Status;
struct Value;
struct KernelInfo;
struct KernelContext;
struct SessionOptions;
struct Domain;
struct TypeAndShape;

struct ApiBase {
  const void* (*get_api)(uint32_t version);
  const char* (*get_version)();
};

// The functions, by position. `Api` is set once, when the library is registered.
class Api {
 public:
  static bool open(const ApiBase* base) {
    table_ = static_cast<void* const*>(base->get_api(kVersion));
    return table_ != nullptr;
  }

  // The status for an ONNX Runtime that is too old; the function that creates it exists in all versions.
  static Status* refuse(const ApiBase* base) {
    table_ = static_cast<void* const*>(base->get_api(1));
    char text[160];
    snprintf(text, sizeof text, "genserve's kernels need ONNX Runtime 1.17 or later; this is %s", base->get_version());
    return create_status(text);
  }

  static Status* create_status(const char* message) { return call<0, Status*>(kFail, message); }
  static const char* message(const Status* status) { return call<2, const char*>(status); }
  static Status* create_domain(const char* name, Domain** out) { return call<26, Status*>(name, out); }
  static Status* add_to_domain(Domain* domain, const struct CustomOp* op) { return call<27, Status*>(domain, op); }
  static Status* add_domain(SessionOptions* options, Domain* domain) { return call<28, Status*>(options, domain); }
  static Status* data(Value* value, void** out) { return call<51, Status*>(value, out); }
  static Status* element_type(const TypeAndShape* info, int32_t* out) { return call<60, Status*>(info, out); }
  static Status* rank(const TypeAndShape* info, size_t* out) { return call<61, Status*>(info, out); }
  static Status* shape(const TypeAndShape* info, int64_t* out, size_t rank) { return call<62, Status*>(info, out, rank); }
  static Status* type_and_shape(const Value* value, TypeAndShape** out) { return call<65, Status*>(value, out); }
  static Status* attribute(const KernelInfo* info, const char* name, float* out) { return call<85, Status*>(info, name, out); }
  static Status* attribute(const KernelInfo* info, const char* name, int64_t* out) { return call<86, Status*>(info, name, out); }
  // `out` may be null, to get the size.
  static Status* attribute(const KernelInfo* info, const char* name, char* out, size_t* size) {
    return call<87, Status*>(info, name, out, size);
  }
  static Status* count_inputs(const KernelContext* context, size_t* out) { return call<88, Status*>(context, out); }
  static Status* input(const KernelContext* context, size_t index, const Value** out) {
    return call<90, Status*>(context, index, out);
  }
  static Status* output(KernelContext* context, size_t index, const int64_t* shape, size_t rank, Value** out) {
    return call<91, Status*>(context, index, shape, rank, out);
  }
  static void release(Status* status) { call<93, void>(status); }
  static void release(TypeAndShape* info) { call<99, void>(info); }
  static Status* count_inputs(const KernelInfo* info, size_t* out) { return call<230, Status*>(info, out); }
  // `out` may be null, to get the size.
  static Status* input_name(const KernelInfo* info, size_t index, char* out, size_t* size) {
    return call<232, Status*>(info, index, out, size);
  }
  static Status* constant_input(const KernelInfo* info, size_t index, int* is_constant, const Value** out) {
    return call<249, Status*>(info, index, is_constant, out);
  }
  static Status* parallel_for(const KernelContext* context, void (*work)(void*, size_t), size_t count, size_t batches,
                              void* job) {
    return call<274, Status*>(context, work, count, batches, job);
  }

 private:
  static constexpr int32_t kFail = 1;

  template <int position, class Result, class... Arguments>
  static Result call(Arguments... arguments) {
    return reinterpret_cast<Result (*)(Arguments...)>(table_[position])(arguments...);
  }

  static inline void* const* table_ = nullptr;
};

// True if a call succeeded; otherwise `error` gets its message.
inline bool ok(Status* status, Error& error) {
  if (status == nullptr) return true;
  error.set("%s", Api::message(status));
  Api::release(status);
  return false;
}

// The status for an error; null: none.
inline Status* status_of(const char* where, const Error& error) {
  if (!error) return nullptr;
  char text[sizeof error.message + 64];
  snprintf(text, sizeof text, "%s: %s", where, error.message);
  return Api::create_status(text);
}

// Converts a tensor of ONNX Runtime; null is an input that was left out.
inline bool view(const Value* value, Tensor& tensor, Error& error) {
  tensor = {};
  if (value == nullptr) return true;
  TypeAndShape* info = nullptr;
  if (!ok(Api::type_and_shape(value, &info), error)) return false;
  int32_t type = 0;
  size_t rank = 0;
  bool good = ok(Api::element_type(info, &type), error) && ok(Api::rank(info, &rank), error);
  if (good && rank > kMaxRank) good = error.set("an input has %zu dimensions, more than any operator takes", rank);
  good = good && ok(Api::shape(info, tensor.shape, rank), error);
  Api::release(info);
  if (!good || !ok(Api::data(const_cast<Value*>(value), &tensor.data), error)) return false;
  tensor.type = static_cast<Type>(type);
  tensor.rank = (int32_t)rank;
  return true;
}

// Allocates an output of the type and shape of `like`, which has no data.
inline bool allocate_output(KernelContext* context, size_t index, const Tensor& like, Tensor& tensor, Error& error) {
  Value* value = nullptr;
  tensor = like;
  if (!ok(Api::output(context, index, like.shape, (size_t)like.rank, &value), error)) return false;
  if (value == nullptr) return error.set("output %zu is left out", index);
  return ok(Api::data(value, &tensor.data), error);
}

// The threads of the session that runs a node: `count`, including the caller's.
inline Threads threads_of(KernelContext* context, int count) {
  Threads threads;
  threads.host = context;
  threads.count = count;
  threads.parallel_for = [](void* host, size_t count, void (*work)(void*, size_t), void* job) {
    Status* failed = Api::parallel_for(static_cast<KernelContext*>(host), work, count, 0, job);
    if (failed == nullptr) return;
    Api::release(failed);
    work(job, 0);  // one thread alone finishes
  };
  return threads;
}

// The declaration of an input or output of an operator.
struct Port {
  Type type;  // kMissing: any
  bool optional;
};

// OrtCustomOp in the layout of version 17, followed by the data of our functions.
struct CustomOp {
  uint32_t version;
  void* (*create_kernel_v1)(const CustomOp*, const void*, const KernelInfo*);
  const char* (*get_name)(const CustomOp*);
  const char* (*get_provider)(const CustomOp*);
  int32_t (*get_input_type)(const CustomOp*, size_t);
  size_t (*get_input_count)(const CustomOp*);
  int32_t (*get_output_type)(const CustomOp*, size_t);
  size_t (*get_output_count)(const CustomOp*);
  void (*compute_v1)(void*, KernelContext*);
  void (*destroy)(void*);
  int32_t (*get_input_characteristic)(const CustomOp*, size_t);
  int32_t (*get_output_characteristic)(const CustomOp*, size_t);
  int32_t (*get_input_memory)(const CustomOp*, size_t);
  int (*get_variadic_input_arity)(const CustomOp*);
  int (*get_variadic_input_homogeneity)(const CustomOp*);
  int (*get_variadic_output_arity)(const CustomOp*);
  int (*get_variadic_output_homogeneity)(const CustomOp*);
  Status* (*create_kernel)(const CustomOp*, const void*, const KernelInfo*, void**);
  Status* (*compute)(void*, KernelContext*);
  Status* (*infer_shape)(const CustomOp*, void*);
  int (*get_start_version)(const CustomOp*);
  int (*get_end_version)(const CustomOp*);
  void* unused[4];  // of version 18: in-place maps

  const char* name;
  const Port* inputs;
  size_t num_inputs;
  const Port* outputs;
  size_t num_outputs;
};

// An operator of the CPU, computed by a Kernel: a plain struct that is zero-initialized, has the name `kName`, and
//     bool create(const KernelInfo*, Error&)      reads attributes, checks weights; failure: the session does not load
//     bool compute(KernelContext*, Error&)        checks the other inputs and computes; failure: the run fails
// Several threads may run one session concurrently, so a kernel keeps no state of a call.
template <class Kernel>
CustomOp make_operator(const char* name, const Port* inputs, size_t num_inputs, const Port* outputs, size_t num_outputs) {
  CustomOp op;
  memset(&op, 0, sizeof op);
  op.version = kVersion;
  op.get_name = [](const CustomOp* op) { return op->name; };
  op.get_provider = [](const CustomOp*) { return "CPUExecutionProvider"; };
  op.get_input_type = [](const CustomOp* op, size_t i) { return (int32_t)op->inputs[i].type; };
  op.get_input_count = [](const CustomOp* op) { return op->num_inputs; };
  op.get_output_type = [](const CustomOp* op, size_t i) { return (int32_t)op->outputs[i].type; };
  op.get_output_count = [](const CustomOp* op) { return op->num_outputs; };
  op.get_input_characteristic = [](const CustomOp* op, size_t i) { return (int32_t)op->inputs[i].optional; };
  op.get_output_characteristic = [](const CustomOp* op, size_t i) { return (int32_t)op->outputs[i].optional; };
  op.get_input_memory = [](const CustomOp*, size_t) -> int32_t { return 0; };
  op.get_variadic_input_arity = [](const CustomOp*) { return 1; };
  op.get_variadic_input_homogeneity = [](const CustomOp*) { return 1; };
  op.get_variadic_output_arity = [](const CustomOp*) { return 1; };
  op.get_variadic_output_homogeneity = [](const CustomOp*) { return 1; };
  op.create_kernel = [](const CustomOp* op, const void*, const KernelInfo* info, void** out) -> Status* {
    Error error;
    Kernel* kernel = static_cast<Kernel*>(calloc(1, sizeof(Kernel)));
    if (kernel == nullptr || !kernel->create(info, error)) {
      error.set("out of memory");
      free(kernel);
      return status_of(op->name, error);
    }
    *out = kernel;
    return nullptr;
  };
  op.compute = [](void* kernel, KernelContext* context) -> Status* {
    Error error;
    static_cast<Kernel*>(kernel)->compute(context, error);
    return status_of(Kernel::kName, error);
  };
  op.destroy = [](void* kernel) { free(kernel); };
  op.get_start_version = [](const CustomOp*) { return 1; };
  op.get_end_version = [](const CustomOp*) { return 0x7fffffff; };
  op.name = name;
  op.inputs = inputs;
  op.num_inputs = num_inputs;
  op.outputs = outputs;
  op.num_outputs = num_outputs;
  return op;
}

// Attributes; `fallback` if the node does not have it.
inline int64_t attribute(const KernelInfo* info, const char* name, int64_t fallback) {
  int64_t value = 0;
  Error ignored;
  return ok(Api::attribute(info, name, &value), ignored) ? value : fallback;
}
inline float attribute(const KernelInfo* info, const char* name, float fallback) {  // an integral value may be stored as an int
  float value = 0;
  int64_t whole = 0;
  Error ignored;
  if (ok(Api::attribute(info, name, &value), ignored)) return value;
  return ok(Api::attribute(info, name, &whole), ignored) ? (float)whole : fallback;
}

// The text of an attribute; it stays as it is if the node does not have the attribute.
template <size_t most>
bool attribute(const KernelInfo* info, const char* name, char (&text)[most], Error& error) {
  size_t size = 0;
  Error ignored;
  if (!ok(Api::attribute(info, name, nullptr, &size), ignored)) return true;
  if (size > most) return error.set("%s is a word of %zu letters, which is not known", name, size - 1);
  return ok(Api::attribute(info, name, text, &size), error);
}

// The index of an attribute in a list of words; the first one if the node does not have it.
template <class Enum, size_t count>
bool attribute(const KernelInfo* info, const char* name, const char* const (&words)[count], Enum& value, Error& error) {
  char text[64];
  snprintf(text, sizeof text, "%s", words[0]);
  if (!attribute(info, name, text, error)) return false;
  for (size_t i = 0; i < count; i++) {
    if (strcmp(text, words[i]) != 0) continue;
    value = static_cast<Enum>(i);
    return true;
  }
  return error.set("%s is \"%s\", which is not known", name, text);
}

// Views of the inputs that are constants of the graph; the others stay missing. `count` is the number of inputs.
inline bool constant_inputs(const KernelInfo* info, Tensor* tensors, size_t most, size_t& count, Error& error) {
  if (!ok(Api::count_inputs(info, &count), error)) return false;
  if (count > most) return error.set("%zu inputs are more than %zu", count, most);
  for (size_t i = 0; i < count; i++) {
    int is_constant = 0;
    const Value* value = nullptr;
    Error ignored;  // of an input that was left out
    if (!ok(Api::constant_input(info, i, &is_constant, &value), ignored) || !is_constant) continue;
    if (!view(value, tensors[i], error)) return false;
  }
  return true;
}

// The digest of an input's name, which is that of a weight; 0: it has none that is of interest.
inline uint64_t name_digest(const KernelInfo* info, size_t index) {
  char name[256] = "";
  size_t size = sizeof name;
  Error ignored;
  return ok(Api::input_name(info, index, name, &size), ignored) ? digest_of(name) : 0;
}

// Views of the inputs that are still missing.
inline bool inputs(const KernelContext* context, Tensor* tensors, size_t count, Error& error) {
  for (size_t i = 0; i < count; i++) {
    if (tensors[i].present()) continue;
    const Value* value = nullptr;
    if (!ok(Api::input(context, i, &value), error) || !view(value, tensors[i], error)) return false;
  }
  return true;
}

}  // namespace genserve::ort
