// tensor.hpp: the tensors of operators, and the errors for wrong ones.
//
// Operators use these instead of ONNX Runtime's types, so that the same code runs in a session, in a test through
// ctypes, and in a test program for another machine.
#pragma once

#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

namespace genserve {

// The element types, with ONNX's numbers.
enum class Type : int32_t { kMissing = 0, kFloat32 = 1, kUint8 = 2, kInt8 = 3, kInt32 = 6, kInt64 = 7, kFloat16 = 10 };

inline const char* name_of(Type type) {
  switch (type) {
    case Type::kMissing: return "missing";
    case Type::kFloat32: return "float32";
    case Type::kUint8: return "uint8";
    case Type::kInt8: return "int8";
    case Type::kInt32: return "int32";
    case Type::kInt64: return "int64";
    case Type::kFloat16: return "float16";
  }
  return "another type";
}

constexpr int kMaxRank = 6;

// A tensor in C order. A missing optional input has the type kMissing and no data.
struct Tensor {
  void* data;
  Type type;
  int32_t rank;
  int64_t shape[kMaxRank];

  bool present() const { return type != Type::kMissing; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

// The message of the first error; later errors are ignored.
struct Error {
  char message[320] = "";

  explicit operator bool() const { return message[0] != '\0'; }

  // Always false, so that a check can say `return error.set(...)`.
  __attribute__((format(printf, 2, 3))) bool set(const char* format, ...) {
    if (*this) return false;
    va_list values;
    va_start(values, format);
    vsnprintf(message, sizeof message, format, values);
    va_end(values);
    return false;
  }

  // Puts the name of a part before its message; returns `good`, whether the part has none.
  bool in(const char* part, bool good) {
    if (good) return true;
    char text[sizeof message];
    memcpy(text, message, sizeof text);
    snprintf(message, sizeof message, "%s: %.*s", part, (int)(sizeof text - 16), text);
    return false;
  }
};

// Whether a tensor has the type and shape; a size of kAny matches all. `name` is its name in the error.
constexpr int64_t kAny = -1;

inline bool check_shape(const Tensor& tensor, const char* name, Type type, const int64_t* want, int rank, Error& error) {
  if (!tensor.present()) return error.set("%s is missing", name);
  if (tensor.type != type) return error.set("%s has type %s, not %s", name, name_of(tensor.type), name_of(type));
  bool fits = tensor.rank == rank;
  for (int i = 0; fits && i < rank; i++) fits = want[i] == kAny ? tensor.shape[i] >= 0 : tensor.shape[i] == want[i];
  if (fits) return true;
  char texts[2][96];
  const int64_t* shapes[2] = {tensor.shape, want};
  const int ranks[2] = {tensor.rank, rank};
  for (int which = 0; which < 2; which++) {
    size_t used = 0;
    texts[which][0] = '\0';
    for (int i = 0; i < ranks[which] && i < kMaxRank && used < sizeof texts[which]; i++) {
      const char* comma = i == 0 ? "" : ", ";
      const int wrote = shapes[which][i] == kAny
                            ? snprintf(texts[which] + used, sizeof texts[which] - used, "%sany", comma)
                            : snprintf(texts[which] + used, sizeof texts[which] - used, "%s%lld", comma,
                                       (long long)shapes[which][i]);
      used += (size_t)wrote;
    }
  }
  return error.set("%s has shape [%s], not [%s]", name, texts[0], texts[1]);
}

// Whether n may be the number of rows or columns of a weight.
inline bool is_size(int64_t n) { return n >= 1 && n <= INT32_MAX; }

// check(tensor, "bias", Type::kFloat32, error, n): one dimension with n values.
template <class... Sizes>
bool check(const Tensor& tensor, const char* name, Type type, Error& error, Sizes... sizes) {
  const int64_t want[] = {static_cast<int64_t>(sizes)...};
  return check_shape(tensor, name, type, want, (int)sizeof...(sizes), error);
}

// The same for an optional input.
template <class... Sizes>
bool check_optional(const Tensor& tensor, const char* name, Type type, Error& error, Sizes... sizes) {
  return !tensor.present() || check(tensor, name, type, error, sizes...);
}

}  // namespace genserve
