// driver.cpp: the kernels without Python and ONNX Runtime, for sanitizers and for machines that are emulated.
//
// It computes fixed cases from numbers that any machine makes alike, each on one thread and on several, and prints a
// hash of the bits of each case: equal on every instruction set. It ends with 1 where threads change a bit.
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

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
                         : tensor.type == Type::kInt64                             ? 8
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

// An adapter whose ranks change all outputs of a linear layer.
struct RandomAdapter {
  Owned down, factors, up, groups;
  LowRank layer;

  RandomAdapter(Numbers& numbers, const LinearAttributes& a, const LinearSizes& sizes, int64_t rank)
      : RandomAdapter(numbers, a.in_features, 2 * sizes.panels, rank, a.weight_format == WeightFormat::kFloat32) {}

 private:
  RandomAdapter(Numbers& numbers, int64_t inputs, int64_t num_groups, int64_t rank, bool floats)
      : down(floats ? Type::kFloat32 : Type::kUint8, rank, floats ? (inputs + 15) / 16 * 16 : (inputs + 63) / 64 * 64),
        factors(Type::kFloat32, rank),
        up(down.tensor.type, num_groups, rank, kLanes),
        groups(Type::kUint8, num_groups * (int64_t)sizeof(LowRankGroup)),
        layer{down.tensor.data, factors.tensor.as<float>(), up.tensor.data,
              static_cast<LowRankGroup*>(groups.tensor.data), (int32_t)rank, down.tensor.type} {
    Owned* const filled[] = {&down, &factors, &up};
    for (Owned* each : filled) each->fill(numbers);
    for (int64_t g = 0; g < num_groups; g++) {
      LowRankGroup& group = static_cast<LowRankGroup*>(groups.tensor.data)[g];
      group = {numbers.next_float(), 0, 0, (uint16_t)rank};
      group.first = (uint32_t)(g * layer.lines_of(group));
    }
  }
};

// Of every three rows one has no adapter, and each of the others one of two.
struct AdaptedRows {
  Owned adapters, order;
  AdapterRows rows;

  explicit AdaptedRows(int64_t count) : adapters(Type::kInt32, count), order(Type::kInt32, count) {
    int64_t place = 0, num_plain = 0;
    for (int32_t adapter = -1; adapter < 2; adapter++) {
      for (int64_t row = adapter + 1; row < count; row += 3) {
        adapters.tensor.as<int32_t>()[row] = adapter;
        order.tensor.as<int32_t>()[place++] = (int32_t)row;
      }
      if (adapter < 0) num_plain = place;
    }
    rows = {count, adapters.tensor.as<int32_t>(), order.tensor.as<int32_t>(), count - num_plain};
  }
};

void run_linear(WeightFormat format, Norm norm, Activation activation, bool gated, int64_t rows, int64_t k, int64_t n,
                bool adapted = false) {
  char name[112];
  snprintf(name, sizeof name, "linear format %d norm %d activation %d gated %d%s, %lld x %lld -> %lld", (int)format,
           (int)norm, (int)activation, gated, adapted ? " adapted" : "", (long long)rows, (long long)k, (long long)n);
  const LinearAttributes a{k, n, format, norm, activation, gated, 1e-5f, 0.0f, {}};
  const LinearSizes sizes(a);
  Numbers numbers{(uint64_t)(rows * 1000003 + k * 1009 + n)};
  const bool floats = format == WeightFormat::kFloat32;
  const bool blocks = in_blocks(format);
  const int64_t step = format == WeightFormat::kInt4Block ? 8 : 4;
  Owned x(Type::kFloat32, rows, k), bias(Type::kFloat32, n), norm_weight(Type::kFloat32, k);
  Owned residual(Type::kFloat32, rows, sizes.outputs), float_weight(Type::kFloat32, sizes.panels, sizes.inputs, kPanel);
  Owned weight(Type::kUint8, sizes.panels, sizes.inputs / step, kPanel, 4), stream(Type::kUint8, sizes.weight_bytes);
  Owned row_scales(Type::kFloat32, sizes.panels, kPanel), scales(Type::kFloat32, sizes.panels, sizes.blocks, kPanel);
  Owned* const filled[] = {&x, &bias, &norm_weight, &residual, &float_weight, &weight, &stream, &row_scales, &scales};
  for (Owned* each : filled) each->fill(numbers);
  LinearInputs in{};
  in.x = x.tensor;
  // Numbers of fp16 are finite without the highest bit of the exponent.
  for (int64_t i = 1; i < sizes.weight_bytes; i += 2) stream.tensor.as<uint8_t>()[i] &= 0xbf;
  in.weight = floats ? float_weight.tensor : blocks ? stream.tensor : weight.tensor;
  if (!floats && !blocks) in.scales = format == WeightFormat::kInt8 ? row_scales.tensor : scales.tensor;
  in.bias = bias.tensor;
  if (norm != Norm::kNone) in.norm_weight = norm_weight.tensor;
  in.residual = residual.tensor;
  Owned order(Type::kInt32, k);
  for (int64_t i = 0; i < k; i++) order.tensor.as<int32_t>()[i] = (int32_t)(k - 1 - i);
  if (format >= WeightFormat::kQ4Z32) in.order = order.tensor;
  const RandomAdapter first(numbers, a, sizes, 16), second(numbers, a, sizes, 48);
  const LowRank* const layers[] = {&first.layer, &second.layer};
  const AdaptedRows of_rows(rows);
  uint64_t hashes[2];
  for (int threads : kThreads) {
    Owned y(Type::kFloat32, rows, sizes.outputs);
    Error error;
    if (!check_weights(a, in, error) || !check_rows(a, in, error)) fail(name, error.message);
    const LinearAdapters used = adapted ? LinearAdapters(of_rows.rows, layers, 2, 0) : LinearAdapters();
    if (!Linear(a, in, y.tensor.as<float>(), used).compute(team_of(threads), error)) fail(name, error.message);
    hashes[threads > 1] = hash(y);
  }
  if (hashes[0] != hashes[1]) fail(name, "several threads give other bits than one");
  printf("%s: %016llx\n", name, (unsigned long long)hashes[0]);
}

void run_embedding(WeightFormat format, int64_t k, int64_t n) {
  const LinearAttributes a{k, n, format, Norm::kNone, Activation::kNone, 0, 1e-5f, 0.0f, {}};
  const LinearSizes sizes(a);
  Numbers numbers{(uint64_t)(k * 1009 + n)};
  Owned ids(Type::kInt64, 3), weight(Type::kUint8, sizes.weight_bytes), y(Type::kFloat32, 3, k);
  weight.fill(numbers);
  for (int64_t i = 1; i < sizes.weight_bytes; i += 2) weight.tensor.as<uint8_t>()[i] &= 0xbf;
  for (int64_t i = 0; i < 3; i++) ids.tensor.as<int64_t>()[i] = i * (n - 1) / 2;
  EmbeddingInputs in{ids.tensor, weight.tensor, {}};
  Owned scales(Type::kFloat32, sizes.panels, sizes.blocks, kPanel);
  scales.fill(numbers);
  if (format == WeightFormat::kInt8Block) {
    in.weight = Tensor{weight.tensor.data, Type::kUint8, 4, {sizes.panels, sizes.inputs / 4, kPanel, 4}};
    in.scales = scales.tensor;
  }
  Error error;
  if (!check_embedding(a, in, error) || !read_rows(a, in, y.tensor.as<float>(), error)) {
    fail("embedding", error.message);
  }
  printf("embedding format %d, %lld x %lld: %016llx\n", (int)format, (long long)n, (long long)k, (unsigned long long)hash(y));
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
    const AttentionAttributes a{heads, kv_heads, 1, -1, -1, 0, 0.0f, 0.0f, 1e-6f};
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
  a.qkv = a.inner = {hidden, 0, format, Norm::kRms, Activation::kNone, 0, 1e-5f, 0.0f, {}};
  a.output = a.down = {intermediate, 0, format, Norm::kNone, Activation::kNone, 0, 1e-5f, 0.0f, {}};
  a.inner.activation = Activation::kSilu;
  a.inner.gated = 1;
  a.attention = {heads, kv_heads, 0, -1, -1, 0, 0.0f, 0.0f, 1e-6f};
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

// The weights of several linear layers, as panels one after the other.
struct Weights {
  Owned weight, scales;
  Weights(const LinearAttributes& a, const LinearSizes& s, int64_t panels)
      : weight(a.weight_format == WeightFormat::kFloat32 ? Type::kFloat32 : Type::kUint8, panels,
               a.weight_format == WeightFormat::kFloat32      ? s.inputs
               : a.weight_format == WeightFormat::kInt4Block ? s.inputs / 8
                                                             : s.inputs / 4,
               kPanel, 4),
        scales(Type::kFloat32, panels, s.blocks, kPanel) {
    if (a.weight_format == WeightFormat::kFloat32) weight.tensor.rank = 3;
  }
};

void run_experts(WeightFormat format, Score score, int64_t rows, int64_t hidden, int64_t intermediate, int64_t shared) {
  char name[96];
  snprintf(name, sizeof name, "experts format %d score %d, %lld x %lld -> %lld, shared %lld", (int)format, (int)score,
           (long long)rows, (long long)hidden, (long long)intermediate, (long long)shared);
  ExpertsAttributes a{};
  a.router = {8, 2, score, 0, 0, 1, score == Score::kSoftmaxOfTop ? -1.0f : 0.0f, 1.5f, 0.1f};
  if (score == Score::kSigmoid) {
    a.router.num_groups = 4;
    a.router.kept_groups = a.router.group_top = 2;
  }
  a.inner = {0, 0, format, Norm::kRms, Activation::kSilu, 1, 1e-5f, 0.0f, {}};
  if (shared == 0) a.inner.activation = Activation::kClampedSwiglu;
  a.down = {0, 0, format, Norm::kNone, Activation::kNone, 0, 1e-5f, 0.0f, {}};
  a.shared_inner.weight_format = a.shared_down.weight_format = format;
  a.shared_score = shared > 0;
  Error error;
  if (!complete(a, hidden, intermediate, shared, error)) fail(name, error.message);
  const int64_t count = a.router.num_experts;
  Numbers numbers{(uint64_t)(hidden * 131 + rows)};
  const LinearSizes inner_sizes(a.inner), down_sizes(a.down);
  Weights inner(a.inner, inner_sizes, count * inner_sizes.panels), down(a.down, down_sizes, count * down_sizes.panels);
  const LinearAttributes inner_of_shared = shared > 0 ? a.shared_inner : a.inner;
  const LinearAttributes down_of_shared = shared > 0 ? a.shared_down : a.down;
  const LinearSizes shared_inner_sizes(inner_of_shared), shared_down_sizes(down_of_shared);
  Weights shared_inner(inner_of_shared, shared_inner_sizes, shared_inner_sizes.panels);
  Weights shared_down(down_of_shared, shared_down_sizes, shared_down_sizes.panels);
  Owned x(Type::kFloat32, rows, hidden), norm(Type::kFloat32, hidden), router(Type::kFloat32, 1, hidden, kPanel);
  Owned choice(Type::kFloat32, count), inner_bias(Type::kFloat32, count, a.inner.out_features);
  Owned down_bias(Type::kFloat32, count, hidden);
  Owned* const vectors[] = {&x, &norm, &router, &choice, &inner_bias, &down_bias};
  for (Owned* each : vectors) each->fill(numbers);
  Weights* const all[] = {&inner, &down, &shared_inner, &shared_down};
  for (Weights* each : all) {
    each->weight.fill(numbers);
    each->scales.fill(numbers);
  }
  ExpertsInputs in{};
  in.x = in.residual = x.tensor;
  in.router_weight = router.tensor;
  in.norm_weight = norm.tensor;
  in.choice_bias = choice.tensor;
  in.inner_bias = inner_bias.tensor;
  in.down_bias = down_bias.tensor;
  in.inner_weight = inner.weight.tensor;
  in.down_weight = down.weight.tensor;
  const bool floats = format == WeightFormat::kFloat32;
  if (!floats) in.inner_scales = inner.scales.tensor, in.down_scales = down.scales.tensor;
  if (shared > 0) {
    in.shared_inner_weight = shared_inner.weight.tensor;
    in.shared_down_weight = shared_down.weight.tensor;
    if (!floats) in.shared_inner_scales = shared_inner.scales.tensor, in.shared_down_scales = shared_down.scales.tensor;
  }
  uint64_t hashes[2];
  for (int threads : kThreads) {
    Owned y(Type::kFloat32, rows, hidden);
    Experts experts(a, in);
    const bool good = experts.check_weights(error) && experts.check_rows(error) &&
                      experts.compute(y.tensor.as<float>(), team_of(threads), error);
    if (!good) fail(name, error.message);
    hashes[threads > 1] = hash(y);
  }
  if (hashes[0] != hashes[1]) fail(name, "several threads give other bits than one");
  printf("%s: %016llx\n", name, (unsigned long long)hashes[0]);
}

// Three sequences of 1, 5 and 20 tokens, of which the first is new, and the last reads a slot that it does not write.
struct Sequences {
  static constexpr int64_t kTokens = 26, kSlots = 5;
  Owned starts{Type::kInt32, 4}, sources{Type::kInt32, 3}, targets{Type::kInt32, 3}, states;
  template <class... Sizes>
  explicit Sequences(Numbers& numbers, Sizes... sizes) : states(Type::kFloat32, kSlots, sizes...) {
    const int32_t values[] = {0, 1, 6, kTokens, -1, 1, 2, 0, 1, 3};
    memcpy(starts.tensor.data, values, sizeof(int32_t[4]));
    memcpy(sources.tensor.data, values + 4, sizeof(int32_t[3]));
    memcpy(targets.tensor.data, values + 7, sizeof(int32_t[3]));
    states.fill(numbers);
  }
  StateInputs inputs() const { return {starts.tensor, sources.tensor, targets.tensor, states.tensor}; }
};

void run_causal_conv(int64_t channels, int64_t kernel_size, bool gated) {
  char name[96];
  snprintf(name, sizeof name, "causal conv of %lld, %lld channels, gated %d", (long long)kernel_size, (long long)channels,
           gated);
  const CausalConvAttributes a{channels, kernel_size, 3, gated, gated ? ConvActivation::kNone : ConvActivation::kSilu};
  Error error;
  uint64_t hashes[2][2];
  for (int threads : kThreads) {
    Numbers numbers{(uint64_t)(channels * 131 + kernel_size)};
    Owned x(Type::kFloat32, Sequences::kTokens, 3 + (gated ? 3 : 1) * channels), bias(Type::kFloat32, channels);
    Owned weight(Type::kFloat32, kernel_size, channels), y(Type::kFloat32, Sequences::kTokens, channels);
    Owned* const filled[] = {&x, &bias, &weight};
    for (Owned* each : filled) each->fill(numbers);
    Sequences sequences(numbers, kernel_size - 1, channels);
    const CausalConvInputs in{x.tensor, weight.tensor, bias.tensor, sequences.inputs()};
    const CausalConv conv(a, in);
    if (!conv.check_inputs(error)) fail(name, error.message);
    conv.compute(y.tensor.as<float>(), team_of(threads));
    hashes[threads > 1][0] = hash(y);
    hashes[threads > 1][1] = hash(sequences.states);
  }
  if (memcmp(hashes[0], hashes[1], sizeof hashes[0]) != 0) fail(name, "several threads give other bits than one");
  printf("%s: %016llx %016llx\n", name, (unsigned long long)hashes[0][0], (unsigned long long)hashes[0][1]);
}

void run_linear_attention(Rule rule, OutputNorm norm, int64_t key_heads, int64_t heads, int64_t keys, int64_t values) {
  char name[96];
  snprintf(name, sizeof name, "linear attention rule %d norm %d, %lld of %lld heads %lld x %lld", (int)rule, (int)norm,
           (long long)key_heads, (long long)heads, (long long)keys, (long long)values);
  const int64_t width = heads * values;
  const LinearAttentionAttributes a{key_heads, heads, keys, values, values, 1, 1 + width, 1 + width + heads,
                                    rule,      norm,  1e-5f, 1.5f,  0.1f,   0.9f};
  Error error;
  uint64_t hashes[2][2];
  for (int threads : kThreads) {
    Numbers numbers{(uint64_t)(width * 131 + keys)};
    Owned x(Type::kFloat32, Sequences::kTokens, 2 * key_heads * keys + width);
    Owned gates(Type::kFloat32, Sequences::kTokens, 1 + width + 2 * heads), rate(Type::kFloat32, heads);
    Owned step_bias(Type::kFloat32, heads), skip(Type::kFloat32, heads), norm_weight(Type::kFloat32, width);
    Owned y(Type::kFloat32, Sequences::kTokens, width);
    Owned* const filled[] = {&x, &gates, &rate, &step_bias, &skip, &norm_weight};
    for (Owned* each : filled) each->fill(numbers);
    Sequences sequences(numbers, heads, (values + kStatePanel - 1) / kStatePanel, keys, kStatePanel);
    const LinearAttentionInputs in{x.tensor,    gates.tensor,       rate.tensor,       step_bias.tensor,
                                   skip.tensor, norm_weight.tensor, sequences.inputs()};
    const LinearAttention attention(a, in);
    if (!attention.check_inputs(error) || !attention.compute(y.tensor.as<float>(), team_of(threads), error)) {
      fail(name, error.message);
    }
    hashes[threads > 1][0] = hash(y);
    hashes[threads > 1][1] = hash(sequences.states);
  }
  if (memcmp(hashes[0], hashes[1], sizeof hashes[0]) != 0) fail(name, "several threads give other bits than one");
  printf("%s: %016llx %016llx\n", name, (unsigned long long)hashes[0][0], (unsigned long long)hashes[0][1]);
}

void run_grouped_linear(WeightFormat format, int64_t groups, int64_t rows, int64_t k, int64_t n) {
  char name[96];
  snprintf(name, sizeof name, "grouped linear format %d, %lld of %lld x %lld -> %lld", (int)format, (long long)groups,
           (long long)rows, (long long)k, (long long)n);
  const GroupedLinearAttributes a{{k, n, format, Norm::kNone, Activation::kNone, 0, 1e-5f, 0.0f, {}}, groups};
  const LinearSizes sizes(a.group);
  Numbers numbers{(uint64_t)(k * 131 + n)};
  Weights weights(a.group, sizes, groups * sizes.panels);
  Owned x(Type::kFloat32, rows, groups * k);
  x.fill(numbers);
  weights.weight.fill(numbers);
  weights.scales.fill(numbers);
  GroupedLinearInputs in{};
  in.x = x.tensor;
  in.weight = weights.weight.tensor;
  if (format != WeightFormat::kFloat32) in.scales = weights.scales.tensor;
  Error error;
  uint64_t hashes[2];
  for (int threads : kThreads) {
    GroupedLinear linear(a, in);
    Owned y(Type::kFloat32, rows, linear.outputs());
    const bool good = linear.check_weights(error) && linear.check_rows(error) &&
                      linear.compute(y.tensor.as<float>(), team_of(threads), error);
    if (!good) fail(name, error.message);
    hashes[threads > 1] = hash(y);
  }
  if (hashes[0] != hashes[1]) fail(name, "several threads give other bits than one");
  printf("%s: %016llx\n", name, (unsigned long long)hashes[0]);
}

void run_norm(Norm norm, int64_t rows, int64_t groups, int64_t size) {
  char name[96];
  snprintf(name, sizeof name, "norm %d, %lld x %lld of %lld", (int)norm, (long long)rows, (long long)groups, (long long)size);
  Numbers numbers{(uint64_t)(rows * 131 + size)};
  Owned x(Type::kFloat32, rows, groups * size), residual(Type::kFloat32, rows, groups * size);
  Owned weight(Type::kFloat32, groups * size), bias(Type::kFloat32, groups * size);
  Owned* const all[] = {&x, &residual, &weight, &bias};
  for (Owned* each : all) each->fill(numbers);
  const NormAttributes a{groups, norm, 1e-5f};
  const NormInputs in{x.tensor, weight.tensor, bias.tensor, residual.tensor};
  Error error;
  uint64_t hashes[2];
  for (int threads : kThreads) {
    Owned y(Type::kFloat32, rows, groups * size);
    if (!check_norm(a, in, error)) fail(name, error.message);
    norm_rows(a, in, y.tensor.as<float>(), team_of(threads));
    hashes[threads > 1] = hash(y);
  }
  if (hashes[0] != hashes[1]) fail(name, "several threads give other bits than one");
  printf("%s: %016llx\n", name, (unsigned long long)hashes[0]);
}

void run_activation(Activation activation, int64_t rows, int64_t columns) {
  char name[96];
  snprintf(name, sizeof name, "activation %d, %lld x %lld", (int)activation, (long long)rows, (long long)columns);
  Numbers numbers{(uint64_t)columns};
  Owned x(Type::kFloat32, rows, columns), factor(Type::kFloat32, rows, columns);
  x.fill(numbers);
  factor.fill(numbers);
  const ActivationAttributes a{activation, 0.8f, 1.3f, 0.5f};
  const ActivationInputs in{x.tensor, factor.tensor};
  Error error;
  uint64_t hashes[2];
  for (int threads : kThreads) {
    Owned y(Type::kFloat32, rows, columns);
    if (!check_activation(a, in, error)) fail(name, error.message);
    activate_all(a, in, y.tensor.as<float>(), team_of(threads));
    hashes[threads > 1] = hash(y);
  }
  if (hashes[0] != hashes[1]) fail(name, "several threads give other bits than one");
  printf("%s: %016llx\n", name, (unsigned long long)hashes[0]);
}

void run_stream_mix(int64_t rows, int64_t streams, int64_t columns) {
  char name[96];
  snprintf(name, sizeof name, "stream mix %lld x %lld x %lld", (long long)rows, (long long)streams, (long long)columns);
  Numbers numbers{(uint64_t)columns};
  Owned x(Type::kFloat32, rows, streams, columns), matrices(Type::kFloat32, rows, streams, streams);
  x.fill(numbers);
  matrices.fill(numbers);
  const StreamMixInputs in{x.tensor, matrices.tensor};
  Error error;
  uint64_t hashes[2];
  for (int threads : kThreads) {
    Owned y(Type::kFloat32, rows, streams, columns);
    if (!check_stream_mix(in, error)) fail(name, error.message);
    mix_streams(in, y.tensor.as<float>(), team_of(threads));
    hashes[threads > 1] = hash(y);
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
  if (!cpu_supports(kInstructionSet)) fail(kInstructionSet, "this machine does not support it");  // and asks for AMX
  const WeightFormat formats[] = {WeightFormat::kInt8, WeightFormat::kInt8Block, WeightFormat::kInt4Block,
                                  WeightFormat::kFloat32,  WeightFormat::kQ4,        WeightFormat::kQ5,
                                  WeightFormat::kQ8,       WeightFormat::kQ4K,       WeightFormat::kQ5K,
                                  WeightFormat::kQ6K,      WeightFormat::kQ4Z32,     WeightFormat::kQ4Z64,
                                  WeightFormat::kQ4Z128};
  for (WeightFormat format : formats) {
    run_linear(format, Norm::kNone, Activation::kNone, false, 1, 64, 32);
    run_linear(format, Norm::kRms, Activation::kSilu, true, 1, 201, 90);
    run_linear(format, Norm::kLayer, Activation::kGelu, false, 131, 77, 45);
    run_linear(format, Norm::kNone, Activation::kGeluTanh, true, 29, 130, 66);
    run_linear(format, Norm::kRms, Activation::kRelu, false, 200, 64, 5);
    run_linear(format, Norm::kRms, Activation::kSilu, true, 31, 201, 90, true);
    run_linear(format, Norm::kNone, Activation::kNone, false, 5, 130, 45, true);
    if (in_blocks(format)) {
      run_linear(format, Norm::kRms, Activation::kNone, false, 40, 700, 70);
      run_linear(format, Norm::kNone, Activation::kNone, false, 1, 300, 790);  // panels side by side
      run_linear(format, Norm::kRms, Activation::kSilu, true, 2, 300, 790, true);
    }
    if (in_blocks(format) || format == WeightFormat::kInt8Block) run_embedding(format, 300, 45);
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
  run_experts(WeightFormat::kInt8Block, Score::kSoftmax, 1, 120, 70, 0);
  run_experts(WeightFormat::kInt4Block, Score::kSigmoid, 37, 77, 45, 50);
  run_experts(WeightFormat::kFloat32, Score::kSoftmaxOfTop, 400, 77, 45, 50);
  run_experts(WeightFormat::kFloat32, Score::kSparseMixer, 37, 77, 45, 0);
  run_grouped_linear(WeightFormat::kInt8Block, 3, 37, 77, 45);
  run_grouped_linear(WeightFormat::kInt4Block, 4, 1, 64, 70);
  run_grouped_linear(WeightFormat::kFloat32, 2, 200, 77, 45);
  run_norm(Norm::kRms, 1, 1, 2304);
  run_norm(Norm::kRms, 70, 5, 77);
  run_norm(Norm::kLayer, 70, 1, 500);
  run_norm(Norm::kLayer, 3, 4, 1);
  run_activation(Activation::kSigmoid, 33, 1021);
  run_activation(Activation::kXielu, 1, 77);
  run_stream_mix(70, 4, 77);
  run_causal_conv(70, 3, true);
  run_causal_conv(129, 4, false);
  run_linear_attention(Rule::kGatedDelta, OutputNorm::kNormThenGate, 2, 4, 20, 40);
  run_linear_attention(Rule::kGated, OutputNorm::kGateThenNorm, 1, 17, 16, 64);
  run_linear_attention(Rule::kGated, OutputNorm::kNone, 3, 3, 33, 16);
  run_logits(5, 5);
  run_logits(5000, 50);
  run_sampling(3);
  run_sampling(5000);
  return 0;
}
