// operators.cpp: what the library offers: the operators to ONNX Runtime, and plain C functions to tests and to Python.

#include "ort_api.hpp"
#include "vector.hpp"

#define GENSERVE_EXPORT extern "C" __attribute__((visibility("default")))

using namespace genserve;

// Called by SessionOptions.register_custom_ops_library.
GENSERVE_EXPORT ort::Status* RegisterCustomOps(ort::SessionOptions*, const ort::ApiBase* base) {
  ort::Api::open(base);
  return nullptr;
}
