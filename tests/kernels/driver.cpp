// driver.cpp: the kernels without Python and ONNX Runtime, for sanitizers and for machines that are emulated.
//
// It computes fixed cases from numbers that any machine makes alike, each on one thread and on several, and prints a
// hash of the bits of each case: equal on every instruction set. It ends with 1 where threads change a bit.
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "attention.hpp"
#include "decoder_layer.hpp"
#include "linear.hpp"
#include "logits.hpp"
#include "sampling.hpp"

using namespace genserve;

#if __has_feature(thread_sanitizer)
// What clang calls and the runtime of gcc does not have; it sees the functions that these call.
#define UNSEEN extern "C" __attribute__((no_sanitize("thread"), noinline))
UNSEEN void* __tsan_memcpy(void* to, const void* from, size_t size) { return memcpy(to, from, size); }
UNSEEN void* __tsan_memmove(void* to, const void* from, size_t size) { return memmove(to, from, size); }
UNSEEN void* __tsan_memset(void* to, int value, size_t size) { return memset(to, value, size); }
#endif

namespace {

// Numbers of a linear congruential generator; floats are multiples of 2^-23 below one.
struct Numbers {
  uint64_t state;
  uint32_t next() {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 33);
  }
  float next_float() { return (float)(int32_t)(next() % (1u << 24)) / (1 << 23) - 1.0f; }
};

// Memory of exactly the size of a tensor, so that a sanitizer sees a step beyond it.
struct Owned {
  Tensor tensor{};
  Owned() = default;
  template <class... Sizes>
  explicit Owned(Type type, Sizes... sizes) {
    const int64_t shape[] = {static_cast<int64_t>(sizes)...};
    tensor.type = type;
    tensor.rank = sizeof...(sizes);
    for (size_t i = 0; i < sizeof...(sizes); i++) tensor.shape[i] = shape[i];
    tensor.data = malloc(bytes() + 1);
  }
  ~Owned() { free(tensor.data); }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;

  size_t size() const {
    size_t n = 1;
    for (int i = 0; i < tensor.rank; i++) n *= (size_t)tensor.shape[i];
    return n;
  }
  size_t bytes() const {
    const size_t width = tensor.type == Type::kUint8 || tensor.type == Type::kInt8 ? 1
                         : tensor.type == Type::kFloat16                           ? 2
                                                                                   : 4;
    return size() * width;
  }
  void fill(Numbers& numbers) {
    for (size_t i = 0; i < size(); i++) {
      if (tensor.type == Type::kFloat32) tensor.as<float>()[i] = numbers.next_float();
      if (tensor.type == Type::kUint8) tensor.as<uint8_t>()[i] = (uint8_t)(1 + numbers.next() % 255);
    }
  }
};

uint64_t hash(const Owned& values) {  // FNV-1a
  uint64_t h = 14695981039346656037u;
  for (size_t i = 0; i < values.bytes(); i++) h = (h ^ values.tensor.as<uint8_t>()[i]) * 1099511628211u;
  return h;
}

struct Call {
  void (*work)(void*, size_t);
  void* job;
  size_t index;
};

void parallel_for(void*, size_t count, void (*work)(void*, size_t), void* job) {
  pthread_t threads[8];
  Call calls[8];
  for (size_t i = 1; i < count; i++) {
    calls[i] = {work, job, i};
    pthread_create(&threads[i], nullptr, [](void* call) -> void* {
      const Call& c = *static_cast<Call*>(call);
      c.work(c.job, c.index);
      return nullptr;
    }, &calls[i]);
  }
  work(job, 0);
  for (size_t i = 1; i < count; i++) pthread_join(threads[i], nullptr);
}

constexpr int kThreads[] = {1, 3};

Threads team_of(int count) {
  Threads threads;
  threads.count = count;
  if (count > 1) threads.parallel_for = parallel_for;
  return threads;
}

[[noreturn]] void fail(const char* name, const char* what) {
  fprintf(stderr, "%s: %s\n", name, what);
  exit(1);
}

void run_linear(WeightFormat format, Norm norm, Activation activation, bool gated, int64_t rows, int64_t k, int64_t n) {
  char name[96];
  snprintf(name, sizeof name, "linear format %d norm %d activation %d gated %d, %lld x %lld -> %lld", (int)format,
           (int)norm, (int)activation, gated, (long long)rows, (long long)k, (long long)n);
  const LinearAttributes a{k, n, format, norm, activation, gated, 1e-5f, 0.0f};
  const LinearSizes sizes(a);
  Numbers numbers{(uint64_t)(rows * 1000003 + k * 1009 + n)};
  const bool floats = format == WeightFormat::kFloat32;
  const int64_t step = format == WeightFormat::kInt4Block ? 8 : 4;
  Owned x(Type::kFloat32, rows, k), bias(Type::kFloat32, n), norm_weight(Type::kFloat32, k);
  Owned residual(Type::kFloat32, rows, sizes.outputs), float_weight(Type::kFloat32, sizes.panels, sizes.inputs, kPanel);
  Owned weight(Type::kUint8, sizes.panels, sizes.inputs / step, kPanel, 4);
  Owned row_scales(Type::kFloat32, sizes.panels, kPanel), scales(Type::kFloat32, sizes.panels, sizes.blocks, kPanel);
  Owned* const filled[] = {&x, &bias, &norm_weight, &residual, &float_weight, &weight, &row_scales, &scales};
  for (Owned* each : filled) each->fill(numbers);
  LinearInputs in{};
  in.x = x.tensor;
  in.weight = floats ? float_weight.tensor : weight.tensor;
  if (!floats) in.scales = format == WeightFormat::kInt8 ? row_scales.tensor : scales.tensor;
  in.bias = bias.tensor;
  if (norm != Norm::kNone) in.norm_weight = norm_weight.tensor;
  in.residual = residual.tensor;
  uint64_t hashes[2];
  for (int threads : kThreads) {
    Owned y(Type::kFloat32, rows, sizes.outputs);
    Error error;
    if (!check_weights(a, in, error) || !check_rows(a, in, error)) fail(name, error.message);
    if (!Linear(a, in, y.tensor.as<float>()).compute(team_of(threads), error)) fail(name, error.message);
    hashes[threads > 1] = hash(y);
  }
  if (hashes[0] != hashes[1]) fail(name, "several threads give other bits than one");
  printf("%s: %016llx\n", name, (unsigned long long)hashes[0]);
}

void run_attention(Type cache_type, int64_t heads, int64_t kv_heads, int64_t dim, int64_t block_size) {
  char name[96];
  snprintf(name, sizeof name, "attention cache %s, %lld heads, %lld kv heads, %lld, blocks of %lld", name_of(cache_type),
           (long long)heads, (long long)kv_heads, (long long)dim, (long long)block_size);
  const int32_t lengths[] = {1, 37, 5, 1}, pasts[] = {700, 0, 3, 64};  // of every four sequences
  constexpr int64_t kSequences = 16, kTokens = 4 * 44;
  const int64_t max_blocks = (704 + block_size - 1) / block_size, num_blocks = kSequences * max_blocks;
  const int64_t rotary = dim / 4 * 2;
  Numbers numbers{(uint64_t)(heads * 131 + dim)};
  Owned cu(Type::kInt32, kSequences + 1), past(Type::kInt32, kSequences), table(Type::kInt32, kSequences, max_blocks);
  cu.tensor.as<int32_t>()[0] = 0;
  for (int64_t i = 0; i < kSequences; i++) {
    cu.tensor.as<int32_t>()[i + 1] = cu.tensor.as<int32_t>()[i] + lengths[i % 4];
    past.tensor.as<int32_t>()[i] = pasts[i % 4];
    for (int64_t j = 0; j < max_blocks; j++) {
      table.tensor.as<int32_t>()[i * max_blocks + j] = (int32_t)(j * kSequences + i);
    }
  }
  Owned query(Type::kFloat32, kTokens, (heads + 2 * kv_heads) * dim), cos(Type::kFloat32, 800, rotary / 2);
  Owned sin(Type::kFloat32, 800, rotary / 2);
  query.fill(numbers);
  cos.fill(numbers);
  sin.fill(numbers);
  uint64_t hashes[2];
  for (int threads : kThreads) {
    Owned keys(cache_type, num_blocks, block_size, kv_heads, dim), values(cache_type, num_blocks, block_size, kv_heads, dim);
    Owned key_scales(Type::kFloat32, num_blocks, block_size, kv_heads);
    Owned value_scales(Type::kFloat32, num_blocks, block_size, kv_heads);
    Owned* const empty[] = {&keys, &values, &key_scales, &value_scales};
    for (Owned* each : empty) memset(each->tensor.data, 0, each->bytes());
    Owned y(Type::kFloat32, kTokens, heads * dim);
    AttentionInputs in{};
    in.query = query.tensor;
    in.key_cache = keys.tensor;
    in.value_cache = values.tensor;
    in.cumulative_sequence_length = cu.tensor;
    in.past_seqlens = past.tensor;
    in.block_table = table.tensor;
    in.cos_cache = cos.tensor;
    in.sin_cache = sin.tensor;
    AttentionOutputs out{y.tensor, keys.tensor, values.tensor, {}, {}};
    if (cache_type == Type::kInt8) {
      in.key_scales = out.key_scales = key_scales.tensor;
      in.value_scales = out.value_scales = value_scales.tensor;
    }
    const AttentionAttributes a{heads, kv_heads, 1, -1, 0.0f, 0.0f, 1e-6f};
    PagedAttention call;
    Error error;
    for (int turn = 0; turn < 2; turn++) {  // the second reads what the first has written
      if (!call.open(a, in, error) || !call.compute(in, out, team_of(threads), error)) fail(name, error.message);
    }
    hashes[threads > 1] = hash(y) ^ hash(keys) ^ hash(values);
  }
  if (hashes[0] != hashes[1]) fail(name, "several threads give other bits than one");
  printf("%s: %016llx\n", name, (unsigned long long)hashes[0]);
}

void run_decoder_layer(WeightFormat format, bool parallel, int64_t rows, int64_t hidden, int64_t intermediate) {
  char name[96];
  snprintf(name, sizeof name, "decoder layer format %d parallel %d, %lld x %lld -> %lld", (int)format, parallel,
           (long long)rows, (long long)hidden, (long long)intermediate);
  constexpr int64_t heads = 6, kv_heads = 2, dim = 20, block_size = 16;
  DecoderLayerAttributes a{};
  a.qkv = a.inner = {hidden, 0, format, Norm::kRms, Activation::kNone, 0, 1e-5f, 0.0f};
  a.output = a.down = {intermediate, 0, format, Norm::kNone, Activation::kNone, 0, 1e-5f, 0.0f};
  a.inner.activation = Activation::kSilu;
  a.inner.gated = 1;
  a.attention = {heads, kv_heads, 0, -1, 0.0f, 0.0f, 1e-6f};
  a.head_dim = dim;
  a.parallel = parallel;
  Error error;
  if (!complete(a, hidden, intermediate, error)) fail(name, error.message);
  Numbers numbers{(uint64_t)(hidden * 131 + rows)};
  struct Weights {
    Owned weight, scales;
    Weights(const LinearAttributes& a, const LinearSizes& s)
        : weight(a.weight_format == WeightFormat::kFloat32 ? Type::kFloat32 : Type::kUint8, s.panels,
                 a.weight_format == WeightFormat::kFloat32 ? s.inputs : s.inputs / 4, kPanel, 4),
          scales(Type::kFloat32, s.panels, kPanel) {
      if (a.weight_format == WeightFormat::kFloat32) weight.tensor.rank = 3;
    }
  };
  Weights qkv(a.qkv, LinearSizes(a.qkv)), output(a.output, LinearSizes(a.output));
  Weights inner(a.inner, LinearSizes(a.inner)), down(a.down, LinearSizes(a.down));
  Owned x(Type::kFloat32, rows, hidden), norm(Type::kFloat32, hidden);
  x.fill(numbers);
  norm.fill(numbers);
  Weights* const all[] = {&qkv, &output, &inner, &down};
  for (Weights* each : all) {
    each->weight.fill(numbers);
    each->scales.fill(numbers);
  }
  Owned cu(Type::kInt32, 2), past(Type::kInt32, 1), table(Type::kInt32, 1, 16);
  cu.tensor.as<int32_t>()[0] = past.tensor.as<int32_t>()[0] = 0;
  cu.tensor.as<int32_t>()[1] = (int32_t)rows;
  for (int32_t i = 0; i < 16; i++) table.tensor.as<int32_t>()[i] = 15 - i;
  uint64_t hashes[2];
  for (int threads : kThreads) {
    Owned y(Type::kFloat32, rows, hidden), keys(Type::kFloat16, 16, block_size, kv_heads, dim);
    Owned values(Type::kFloat16, 16, block_size, kv_heads, dim);
    memset(keys.tensor.data, 0, keys.bytes());
    memset(values.tensor.data, 0, values.bytes());
    DecoderLayerInputs in{};
    in.x = x.tensor;
    in.key_cache = keys.tensor;
    in.value_cache = values.tensor;
    in.cumulative_sequence_length = cu.tensor;
    in.past_seqlens = past.tensor;
    in.block_table = table.tensor;
    Tensor* const weights[] = {&in.qkv_weight, &in.output_weight, &in.inner_weight, &in.down_weight};
    for (int i = 0; i < 4; i++) {
      weights[i][0] = all[i]->weight.tensor;  // the scales follow
      if (format != WeightFormat::kFloat32) weights[i][1] = all[i]->scales.tensor;
    }
    in.attention_norm_weight = in.mlp_norm_weight = norm.tensor;
    DecoderLayer layer(a, in);
    const AttentionOutputs out{y.tensor, keys.tensor, values.tensor, {}, {}};
    const bool good = layer.check_weights(error) && layer.check_rows(error) && layer.compute(out, team_of(threads), error);
    if (!good) fail(name, error.message);
    hashes[threads > 1] = hash(y) ^ hash(keys) ^ hash(values);
  }
  if (hashes[0] != hashes[1]) fail(name, "several threads give other bits than one");
  printf("%s: %016llx\n", name, (unsigned long long)hashes[0]);
}

void run_logits(int64_t size, int64_t k) {
  Numbers numbers{(uint64_t)size};
  Owned logits(Type::kFloat32, 3, size), best(Type::kFloat32, 3), ids(Type::kFloat32, 3, 2), top(Type::kFloat32, 3, 2 * k);
  Owned sums(Type::kFloat32, 3, 2);
  logits.fill(numbers);
  if (!scan_logits(logits.tensor.as<float>(), 3, size, k, ids.tensor.as<int64_t>(), best.tensor.as<float>(),
                   top.tensor.as<int64_t>(), sums.tensor.as<double>())) {
    fail("logits", "out of memory");
  }
  printf("logits %lld, %lld best: %016llx\n", (long long)size, (long long)k, (unsigned long long)(hash(top) ^ hash(best)));
}

void run_sampling(int64_t size) {
  const float inf = __builtin_inff();
  const SamplingRule rules[] = {{0, 1, 0, 0, -inf},       {0.3, 1, 0, 0.7f, -inf},  {0.9, 1, 40, 0.01f, -inf},
                                {0.5, 0.9, 0, 2, -1.5f},  {0.99, 0.5, 40, 1, -inf}, {0, 1, size, 0.3f, -0.1f}};
  constexpr int64_t num_rules = sizeof rules / sizeof rules[0];
  Numbers numbers{(uint64_t)size};
  Owned logits(Type::kFloat32, num_rules, size), sampled(Type::kFloat32, num_rules, 4);
  logits.fill(numbers);
  if (!sample_logits(logits.tensor.as<float>(), num_rules, size, rules, sampled.tensor.as<SampledRow>())) {
    fail("sampling", "out of memory");
  }
  printf("sampling %lld: %016llx\n", (long long)size, (unsigned long long)hash(sampled));
}

}  // namespace

int main() {
  const WeightFormat formats[] = {WeightFormat::kInt8, WeightFormat::kInt8Block, WeightFormat::kInt4Block,
                                  WeightFormat::kFloat32};
  for (WeightFormat format : formats) {
    run_linear(format, Norm::kNone, Activation::kNone, false, 1, 64, 32);
    run_linear(format, Norm::kRms, Activation::kSilu, true, 1, 201, 90);
    run_linear(format, Norm::kLayer, Activation::kGelu, false, 131, 77, 45);
    run_linear(format, Norm::kNone, Activation::kGeluTanh, true, 29, 130, 66);
    run_linear(format, Norm::kRms, Activation::kRelu, false, 200, 64, 5);
  }
  const Type caches[] = {Type::kFloat32, Type::kFloat16, Type::kInt8};
  for (Type cache : caches) {
    run_attention(cache, 9, 3, 64, 16);
    run_attention(cache, 4, 4, 40, 32);
    run_attention(cache, 36, 4, 16, 16);
  }
  run_decoder_layer(WeightFormat::kInt8, false, 1, 120, 200);
  run_decoder_layer(WeightFormat::kInt8, true, 37, 77, 45);
  run_decoder_layer(WeightFormat::kFloat32, false, 37, 77, 45);
  run_logits(5, 5);
  run_logits(5000, 50);
  run_sampling(3);
  run_sampling(5000);
  return 0;
}
