// attention.hpp: PagedAttention, the attention of packed tokens over a paged key/value cache.
//
// A call has new tokens of many sequences, one or a chunk of each, after any past. It writes their keys and values into
// the cache, and then computes the attention of every token over its whole sequence in the cache.
//
//     block       consecutive heads; each has keys in groups of 16 tokens [D][16], and values per token [D]
//     sequence    block_table -> blocks -> groups of 16 tokens, the unit in which the cache is read
//     tile        tokens of one sequence, up to 48 query rows: the work item of a thread. It has one head of the cache,
//                 or with few rows several, whose keys and values lie together, so that memory is read in order
//
// Order of additions: keys are processed in tiles of 64, tiles are summed in segments of 512, and segments are merged
// from the first to the last. Tiles and segments start at multiples of 64 and 512 in the sequence. Therefore the bits
// of an output depend only on the token's own history: not on other tokens, chunks, threads or blocks.
#pragma once

#include <stdlib.h>

#include "team.hpp"
#include "tensor.hpp"
#include "vector.hpp"

namespace genserve {

constexpr int kGroup = kLanes;      // tokens whose keys are interleaved
constexpr int kKeyTile = 64;        // keys whose scores and weights are computed together
constexpr int kSegment = 512;       // keys that are summed before they are merged with others
constexpr int kRows = 6;            // query rows that are multiplied together
constexpr int kQueryTile = 48;      // query rows of a work item, unless a group of heads is larger
constexpr int kTileGroups = kKeyTile / kGroup;
constexpr int kSegmentGroups = kSegment / kGroup;
constexpr int kAhead = 2 * kTileGroups;  // groups of a head between the read and the prefetched one, shared by the heads

// The number of vectors of 16 lanes in registers.
#if defined(__AVX512F__)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 8;
#endif

GENSERVE_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// The operator's attributes.
struct AttentionAttributes {
  int64_t num_heads;
  int64_t kv_num_heads;
  int64_t do_rotary;
  int64_t local_window_size;  // number of attended keys, including the token's own; -1: all
  int64_t local_chunk_size;   // tokens attend within chunks of this many positions; -1: they do not
  int64_t shares_cache;       // not 0: keys and values were written by an earlier layer, and the query has none
  float scale;                // 0: 1 / sqrt(D)
  float softcap;              // 0: none
  float qk_norm_epsilon;
};

// The operator's inputs, in order. Those from cos_cache on are optional.
struct AttentionInputs {
  Tensor query;                       // [T, (Hq + 2 Hk) * D] float32 or float16; [T, Hq * D] if it shares a cache
  Tensor key_cache;                   // [num_blocks, block_size, Hk, D] float32, float16 or int8
  Tensor value_cache;
  Tensor cumulative_sequence_length;  // [B + 1] int32
  Tensor past_seqlens;                // [B] int32
  Tensor block_table;                 // [B, max_blocks] int32
  Tensor cos_cache;                   // [positions, R / 2] float32
  Tensor sin_cache;
  Tensor q_norm_weight;               // [D] float32
  Tensor k_norm_weight;
  Tensor alibi_slopes;                // [Hq] float32
  Tensor key_scales;                  // [num_blocks, block_size, Hk] float32, with an int8 cache only
  Tensor value_scales;
  Tensor attention_metadata;          // for CUDA; ignored here
  Tensor sinks;                       // [Hq] float32: the score of one more key, which has no value
  Tensor v_norm_weight;               // [D] float32
};

// Its outputs; all but the first share the memory of inputs, and are left out by a layer that shares a cache.
struct AttentionOutputs {
  Tensor output;  // [T, Hq * D] of the query's type
  Tensor key_cache;
  Tensor value_cache;
  Tensor key_scales;
  Tensor value_scales;
};

// A checked call. Optional pointers may be null.
struct PagedAttention {
  const void* query;
  void* key_cache;
  void* value_cache;
  float* key_scales;
  float* value_scales;
  const int32_t* cumulative_sequence_length;
  const int32_t* past_seqlens;
  const int32_t* block_table;
  const float* cos_cache;
  const float* sin_cache;
  const float* q_norm_weight;
  const float* k_norm_weight;
  const float* alibi_slopes;
  const float* sinks;
  const float* v_norm_weight;
  Type query_type;
  Type cache_type;
  int64_t num_tokens;
  int64_t num_sequences;
  int64_t max_blocks;
  int64_t num_blocks;
  int64_t block_size;
  int64_t num_heads;
  int64_t kv_num_heads;
  int64_t head_dim;
  int64_t num_positions;
  int64_t rotary_half;
  int64_t local_window_size;
  int64_t local_chunk_size;
  int64_t written_heads;  // of keys and of values in the query; 0: they were written by an earlier layer
  float scale;
  float softcap;
  float qk_norm_epsilon;

  int64_t heads_per_kv() const { return num_heads / kv_num_heads; }
  int64_t padded_dim() const { return (head_dim + kLanes - 1) / kLanes * kLanes; }
  int64_t tokens_of(int64_t sequence) const {
    return (int64_t)cumulative_sequence_length[sequence + 1] - cumulative_sequence_length[sequence];
  }
  // The index of the group with a position; the groups of a head in a block are consecutive, and so are its heads.
  int64_t group_of(int64_t sequence, int64_t head, int64_t position) const {
    const int64_t block = block_table[sequence * max_blocks + position / block_size];
    return (block * kv_num_heads + head) * (block_size / kGroup) + position % block_size / kGroup;
  }
  // The first position that a token attends to.
  int64_t reach(int64_t position) const {
    const int64_t window = local_window_size < 0 ? 0 : larger(0, position - local_window_size + 1);
    return local_chunk_size < 0 ? window : larger(window, position - position % local_chunk_size);
  }

  bool open(const AttentionAttributes& attributes, const AttentionInputs& inputs, Error& error);
  bool check_sequences(Error& error) const;
  bool check_outputs(const AttentionInputs& in, const AttentionOutputs& out, Error& error) const;
  bool compute(const AttentionInputs& in, const AttentionOutputs& out, const Threads& threads, Error& error) const;
  template <class Use>
  bool with_job(const Tensor& output, Use&& use) const;
};

// Whether the attributes are valid, apart from the inputs.
inline bool check_attributes(const AttentionAttributes& a, Error& error) {
  typedef long long ll;
  if (a.num_heads <= 0 || a.kv_num_heads <= 0 || a.num_heads > INT32_MAX || a.num_heads % a.kv_num_heads != 0) {
    return error.set("num_heads is %lld, not a multiple of kv_num_heads, %lld", (ll)a.num_heads, (ll)a.kv_num_heads);
  }
  if (a.local_window_size != -1 && (a.local_window_size < 1 || a.local_window_size > INT32_MAX)) {
    return error.set("local_window_size is %lld, neither -1 nor at least 1", (ll)a.local_window_size);
  }
  if (a.local_chunk_size != -1 && (a.local_chunk_size < 1 || a.local_chunk_size > INT32_MAX)) {
    return error.set("local_chunk_size is %lld, neither -1 nor at least 1", (ll)a.local_chunk_size);
  }
  if (!(a.softcap >= 0)) return error.set("softcap is %g, not at least 0", (double)a.softcap);
  return true;
}

// Checks types, shapes and attributes, and stores the sizes.
inline bool PagedAttention::open(const AttentionAttributes& attributes, const AttentionInputs& in, Error& error) {
  typedef long long ll;
  *this = {};
  if (!check_attributes(attributes, error)) return false;
  num_heads = attributes.num_heads;
  kv_num_heads = attributes.kv_num_heads;
  local_window_size = attributes.local_window_size;
  local_chunk_size = attributes.local_chunk_size;
  written_heads = attributes.shares_cache != 0 ? 0 : kv_num_heads;
  softcap = attributes.softcap;
  qk_norm_epsilon = attributes.qk_norm_epsilon;
  query_type = in.query.type == Type::kFloat16 ? Type::kFloat16 : Type::kFloat32;
  if (!check(in.query, "query", query_type, error, kAny, kAny)) return false;
  num_tokens = in.query.shape[0];
  const int64_t columns = in.query.shape[1], heads = num_heads + 2 * written_heads;
  head_dim = columns / heads;
  if (head_dim == 0 || head_dim * heads != columns) {
    return error.set("query has %lld columns, not a multiple of its %lld heads", (ll)columns, (ll)heads);
  }
  scale = attributes.scale != 0 ? attributes.scale : 1.0f / __builtin_sqrtf((float)head_dim);

  cache_type = in.key_cache.type;
  if (cache_type != Type::kFloat16 && cache_type != Type::kInt8) cache_type = Type::kFloat32;
  if (!check(in.key_cache, "key_cache", cache_type, error, kAny, kAny, kv_num_heads, head_dim)) return false;
  num_blocks = in.key_cache.shape[0];
  block_size = in.key_cache.shape[1];
  if (block_size <= 0 || block_size % kGroup != 0 || block_size > INT32_MAX) {
    return error.set("key_cache has blocks of %lld tokens, not a multiple of 16", (ll)block_size);
  }
  if (!check(in.value_cache, "value_cache", cache_type, error, num_blocks, block_size, kv_num_heads, head_dim)) {
    return false;
  }
  if (cache_type == Type::kInt8) {
    if (!check(in.key_scales, "key_scales", Type::kFloat32, error, num_blocks, block_size, kv_num_heads) ||
        !check(in.value_scales, "value_scales", Type::kFloat32, error, num_blocks, block_size, kv_num_heads)) {
      return false;
    }
    key_scales = in.key_scales.as<float>();
    value_scales = in.value_scales.as<float>();
  } else if (in.key_scales.present() || in.value_scales.present()) {
    return error.set("key_scales and value_scales are given, and the cache has type %s", name_of(cache_type));
  }

  if (!check(in.past_seqlens, "past_seqlens", Type::kInt32, error, kAny)) return false;
  num_sequences = in.past_seqlens.shape[0];
  if (!check(in.cumulative_sequence_length, "cumulative_sequence_length", Type::kInt32, error, num_sequences + 1) ||
      !check(in.block_table, "block_table", Type::kInt32, error, num_sequences, kAny)) {
    return false;
  }
  max_blocks = in.block_table.shape[1];

  if (attributes.do_rotary != 0) {
    if (!check(in.cos_cache, "cos_cache", Type::kFloat32, error, kAny, kAny)) return false;
    num_positions = in.cos_cache.shape[0];
    rotary_half = in.cos_cache.shape[1];
    if (!check(in.sin_cache, "sin_cache", Type::kFloat32, error, num_positions, rotary_half)) return false;
    if (rotary_half > head_dim / 2) {
      return error.set("cos_cache turns %lld pairs of numbers, and a head has %lld numbers", (ll)rotary_half,
                       (ll)head_dim);
    }
    cos_cache = in.cos_cache.as<float>();
    sin_cache = in.sin_cache.as<float>();
  }
  if (!check_optional(in.q_norm_weight, "q_norm_weight", Type::kFloat32, error, head_dim) ||
      !check_optional(in.k_norm_weight, "k_norm_weight", Type::kFloat32, error, head_dim) ||
      !check_optional(in.alibi_slopes, "alibi_slopes", Type::kFloat32, error, num_heads) ||
      !check_optional(in.sinks, "sinks", Type::kFloat32, error, num_heads) ||
      !check_optional(in.v_norm_weight, "v_norm_weight", Type::kFloat32, error, head_dim)) {
    return false;
  }
  q_norm_weight = in.q_norm_weight.as<float>();
  k_norm_weight = in.k_norm_weight.as<float>();
  alibi_slopes = in.alibi_slopes.as<float>();
  sinks = in.sinks.as<float>();
  v_norm_weight = in.v_norm_weight.as<float>();
  query = in.query.data;
  key_cache = in.key_cache.data;
  value_cache = in.value_cache.data;
  cumulative_sequence_length = in.cumulative_sequence_length.as<int32_t>();
  past_seqlens = in.past_seqlens.as<int32_t>();
  block_table = in.block_table.as<int32_t>();
  return check_sequences(error);
}

// Checks lengths and the blocks of the tokens. Unused entries of the block table may have any value.
inline bool PagedAttention::check_sequences(Error& error) const {
  typedef long long ll;
  const int32_t* edges = cumulative_sequence_length;
  if (edges[0] != 0) return error.set("cumulative_sequence_length begins with %d, not with 0", edges[0]);
  if (edges[num_sequences] != num_tokens) {
    return error.set("cumulative_sequence_length ends with %d, and the query has %lld tokens", edges[num_sequences],
                     (ll)num_tokens);
  }
  for (int64_t b = 0; b < num_sequences; b++) {
    if (edges[b + 1] < edges[b]) {
      return error.set("cumulative_sequence_length falls from %d to %d", edges[b], edges[b + 1]);
    }
  }
  for (int64_t b = 0; b < num_sequences; b++) {
    const int64_t tokens = tokens_of(b), past = past_seqlens[b], length = past + tokens;
    if (past < 0) return error.set("past_seqlens[%lld] is %lld, below 0", (ll)b, (ll)past);
    if (tokens == 0) continue;
    if (length > INT32_MAX || (length - 1) / block_size >= max_blocks) {
      return error.set("sequence %lld has %lld tokens, and its row of block_table has %lld blocks of %lld", (ll)b,
                       (ll)length, (ll)max_blocks, (ll)block_size);
    }
    if (cos_cache != nullptr && length > num_positions) {
      return error.set("sequence %lld has %lld tokens, and cos_cache %lld positions", (ll)b, (ll)length,
                       (ll)num_positions);
    }
    for (int64_t i = reach(past) / block_size; i <= (length - 1) / block_size; i++) {
      const int32_t block = block_table[b * max_blocks + i];
      if (block < 0 || block >= num_blocks) {
        return error.set("block_table[%lld, %lld] is %d, and the cache has %lld blocks", (ll)b, (ll)i, block,
                         (ll)num_blocks);
      }
    }
  }
  return true;
}

// ------------------------------------------------------------------------------------------- a head of a token

GENSERVE_INLINE void prefetch(const void* at) { __builtin_prefetch(at, 0, 2); }

// Loads a head, and applies its norm, rotary position and scale: [padded_dim], padded with zeros. Null pointers leave
// norm or rotation out.
template <class Q>
inline void load_head(const PagedAttention& a, const Q* from, const float* norm_weight, const float* cos_cache,
                      int64_t position, float scale, float* to) {
  const int64_t dim = a.head_dim;
  f32x16 squares{};
  for (int64_t d = 0; d < dim; d += kLanes) {
    const f32x16 x = load_first(from + d, dim - d);
    store(to + d, x);
    squares = fma(x, x, squares);
  }
  if (norm_weight != nullptr) {
    const float inverse = 1.0f / __builtin_sqrtf(sum(squares) / (float)dim + a.qk_norm_epsilon);
    for (int64_t d = 0; d < dim; d += kLanes) {
      store(to + d, load(to + d) * inverse * load_first(norm_weight + d, dim - d));
    }
  }
  if (cos_cache != nullptr) {
    const int64_t half = a.rotary_half;
    const float* cos = cos_cache + position * half;
    const float* sin = a.sin_cache + position * half;
    for (int64_t d = 0; d < half; d += kLanes) {
      const int64_t count = half - d;
      const f32x16 x = load_first(to + d, count), y = load_first(to + half + d, count);
      const f32x16 c = load_first(cos + d, count), s = load_first(sin + d, count);
      store_first(to + d, fma(x, c, -(y * s)), count);
      store_first(to + half + d, fma(y, c, x * s), count);
    }
  }
  if (scale != 1.0f) {
    for (int64_t d = 0; d < dim; d += kLanes) store(to + d, load(to + d) * scale);
  }
}

// ------------------------------------------------------------------------------------------- the cache

// The cache of one element type, indexed by groups.
template <class T>
struct Cache {
  T* keys;
  T* values;
  float* key_scales;
  float* value_scales;
  int64_t group_size;  // elements of a group: 16 * D

  explicit Cache(const PagedAttention& a)
      : keys(static_cast<T*>(a.key_cache)),
        values(static_cast<T*>(a.value_cache)),
        key_scales(a.key_scales),
        value_scales(a.value_scales),
        group_size(kGroup * a.head_dim) {}
};

// Whether the elements are integers, with a scale per token and head.
template <class T>
constexpr bool kHasScales = sizeof(T) == 1;

// Rounds a head, [padded_dim], to the type of the cache, and returns its scale (1 for floats).
inline float round_head(const float* x, int64_t padded, float* to) {
  memcpy(to, x, (size_t)padded * sizeof(float));
  return 1.0f;
}
inline float round_head(const float* x, int64_t padded, _Float16* to) {
  constexpr float kLargest = 65504.0f;  // the largest finite fp16; infinity would spread to every sum with it
  for (int64_t d = 0; d < padded; d += kLanes) {
    store(to + d, max(broadcast(-kLargest), min(broadcast(kLargest), load(x + d))));
  }
  return 1.0f;
}
inline float round_head(const float* x, int64_t padded, int8_t* to) {
  f32x16 sizes{};
  for (int64_t d = 0; d < padded; d += kLanes) sizes = max(sizes, abs(load(x + d)));
  const float largest = maximum(sizes);
  const f32x16 inverse = broadcast(largest > 0 ? 127.0f / largest : 0.0f);
  for (int64_t d = 0; d < padded; d += kLanes) store(to + d, round_to_int(load(x + d), inverse));
  return largest / 127.0f;
}

// Replaces values that are not finite. Earlier tokens multiply this one's value by a weight of zero, and zero times NaN
// or infinity would be NaN. For tokens that attend to it, its key makes the output NaN.
inline float* finite(float* x, int64_t padded) {
  const f32x16 most = broadcast(__FLT_MAX__);
  for (int64_t d = 0; d < padded; d += kLanes) {
    const f32x16 v = load(x + d);
    store(x + d, v == v ? min(most, max(-most, v)) : f32x16{});
  }
  return x;
}

// Writes the key and the value of a token's head into the cache.
template <class T>
inline void write_token(const PagedAttention& a, const Cache<T>& cache, int64_t sequence, int64_t head,
                        int64_t position, const float* key, float* value, T* rounded) {
  const int64_t dim = a.head_dim, place = position % kGroup;
  const int64_t group = a.group_of(sequence, head, position);
  const float key_scale = round_head(key, a.padded_dim(), rounded);
  T* keys = cache.keys + group * cache.group_size + place;
  for (int64_t d = 0; d < dim; d++) keys[d * kGroup] = rounded[d];
  const float value_scale = round_head(finite(value, a.padded_dim()), a.padded_dim(), rounded);
  memcpy(cache.values + group * cache.group_size + place * dim, rounded, (size_t)dim * sizeof(T));
  if constexpr (kHasScales<T>) {
    cache.key_scales[group * kGroup + place] = key_scale;
    cache.value_scales[group * kGroup + place] = value_scale;
  }
}

// ------------------------------------------------------------------------------------------- products

// Up to 64 keys of a head with their values, in groups, and the groups to prefetch meanwhile.
template <class T>
struct KeyTile {
  int64_t position;  // of the first key
  int num_groups;
  const T* keys[kTileGroups];
  const T* values[kTileGroups];
  const T* keys_ahead[kTileGroups];
  const T* values_ahead[kTileGroups];
  alignas(64) float key_scales[kKeyTile];
  alignas(64) float value_scales[kKeyTile];

  // numbers[i] + offset is the index of group i; numbers[i + ahead] + offset is that of the group to prefetch.
  KeyTile(const Cache<T>& cache, const int64_t* numbers, int64_t offset, int ahead, int64_t position, int num_groups)
      : position(position), num_groups(num_groups) {
    for (int g = 0; g < num_groups; g++) {
      const int64_t here = numbers[g] + offset, later = numbers[g + ahead] + offset;
      keys[g] = cache.keys + here * cache.group_size;
      values[g] = cache.values + here * cache.group_size;
      keys_ahead[g] = cache.keys + later * cache.group_size;
      values_ahead[g] = cache.values + later * cache.group_size;
      if constexpr (kHasScales<T>) {
        store(key_scales + g * kGroup, load(cache.key_scales + here * kGroup));
        store(value_scales + g * kGroup, load(cache.value_scales + here * kGroup));
      }
    }
  }
};

// The number of vectors that are summed together per row: as many as fit in registers, with some for what is read.
constexpr int vectors_for(int rows) {
  return (rows + 1) * 4 <= kRegisters ? 4 : (rows + 1) * 2 <= kRegisters ? 2 : 1;
}

// If the sums fill the registers, makes the compiler load queries or weights again, instead of keeping those of all rows.
template <int ROWS, int VECTORS>
GENSERVE_INLINE void forget_rows() {
  if constexpr ((ROWS + 1) * VECTORS == kRegisters) __asm__ volatile("" ::: "memory");
}

// The scores of ROWS query rows, [ROWS][stride], with the keys of GROUPS groups: scores [ROWS][64].
template <int ROWS, int GROUPS, class T>
inline void score_groups(const float* query, int64_t stride, int64_t dim, const KeyTile<T>& tile, int group,
                         float* scores) {
  f32x16 sums[ROWS][GROUPS];
  GENSERVE_UNROLL
  for (int r = 0; r < ROWS; r++) {
    GENSERVE_UNROLL
    for (int g = 0; g < GROUPS; g++) sums[r][g] = f32x16{};
  }
  constexpr int64_t kLine = 64 / (kGroup * sizeof(T));  // dimensions of a head whose keys fill a cache line
  const T* keys[GROUPS];
  const T* ahead[GROUPS];
  GENSERVE_UNROLL
  for (int g = 0; g < GROUPS; g++) {
    keys[g] = tile.keys[group + g];
    ahead[g] = tile.keys_ahead[group + g];
  }
  RowPointers<float, ROWS> rows(query, stride);
  _Pragma("clang loop unroll(disable)")  // unrolled by two, the compiler would keep sums in memory
  for (int64_t d = 0; d < dim; d++) {
    GENSERVE_UNROLL
    for (int g = 0; g < GROUPS; g++) {
      if (d % kLine == 0) prefetch(ahead[g] + d * kGroup);
      const f32x16 k = load(keys[g] + d * kGroup);
      GENSERVE_UNROLL
      for (int r = 0; r < ROWS; r++) sums[r][g] = fma(*rows.at(r), k, sums[r][g]);
      forget_rows<ROWS, GROUPS>();
    }
    rows.advance(1);
  }
  GENSERVE_UNROLL
  for (int r = 0; r < ROWS; r++) {
    GENSERVE_UNROLL
    for (int g = 0; g < GROUPS; g++) store(scores + r * kKeyTile + (group + g) * kGroup, sums[r][g]);
  }
}

// The same for all groups of a tile.
template <int ROWS, class T>
inline void score(const float* query, int64_t stride, int64_t dim, const KeyTile<T>& tile, float* scores) {
  constexpr int kVectors = vectors_for(ROWS);
  int g = 0;
  for (; g + kVectors <= tile.num_groups; g += kVectors) {
    score_groups<ROWS, kVectors>(query, stride, dim, tile, g, scores);
  }
  if (kVectors > 2 && g + 2 <= tile.num_groups) {
    score_groups<ROWS, 2>(query, stride, dim, tile, g, scores);
    g += 2;
  }
  if (g < tile.num_groups) score_groups<ROWS, 1>(query, stride, dim, tile, g, scores);
}

// Scales 16 * COLUMNS columns of the output, [ROWS][stride], and adds the values of the keys [from, to) of a tile times
// their weights [ROWS][64]. PARTIAL: the last columns of a head, fewer than 16.
template <int ROWS, int COLUMNS, bool PARTIAL, class T>
inline void add_columns(const float* weights, int from, int to, int64_t dim, const KeyTile<T>& tile, int64_t column,
                        const float* rescale, float* output, int64_t stride) {
  f32x16 sums[ROWS][COLUMNS];
  GENSERVE_UNROLL
  for (int r = 0; r < ROWS; r++) {
    GENSERVE_UNROLL
    for (int c = 0; c < COLUMNS; c++) sums[r][c] = load(output + r * stride + column + c * kLanes) * rescale[r];
  }
  for (int key = from; key < to;) {
    const int group = key / kGroup, end = (int)smaller(to, (group + 1) * kGroup);
    const int64_t first = key % kGroup * dim + column;
    const T* v = tile.values[group] + first;
    const T* ahead = tile.values_ahead[group] + first;
    for (; key < end; key++, v += dim, ahead += dim) {
      GENSERVE_UNROLL
      for (size_t i = 0; i < COLUMNS * kLanes; i += 64 / sizeof(T)) prefetch(ahead + i);
      GENSERVE_UNROLL
      for (int c = 0; c < COLUMNS; c++) {
        const f32x16 x = PARTIAL ? load_first(v, dim - column) : load(v + c * kLanes);
        GENSERVE_UNROLL
        for (int r = 0; r < ROWS; r++) sums[r][c] = fma(weights[r * kKeyTile + key], x, sums[r][c]);
        forget_rows<ROWS, COLUMNS>();
      }
    }
  }
  GENSERVE_UNROLL
  for (int r = 0; r < ROWS; r++) {
    GENSERVE_UNROLL
    for (int c = 0; c < COLUMNS; c++) store(output + r * stride + column + c * kLanes, sums[r][c]);
  }
}

// The same for all columns of a head.
template <int ROWS, class T>
inline void add_values(const float* weights, int from, int to, int64_t dim, const KeyTile<T>& tile,
                       const float* rescale, float* output, int64_t stride) {
  constexpr int kVectors = vectors_for(ROWS);
  int64_t c = 0;
  for (; c + kVectors * kLanes <= dim; c += kVectors * kLanes) {
    add_columns<ROWS, kVectors, false>(weights, from, to, dim, tile, c, rescale, output, stride);
  }
  if (kVectors > 2 && c + 2 * kLanes <= dim) {
    add_columns<ROWS, 2, false>(weights, from, to, dim, tile, c, rescale, output, stride);
    c += 2 * kLanes;
  }
  if (kVectors > 1 && c + kLanes <= dim) {
    add_columns<ROWS, 1, false>(weights, from, to, dim, tile, c, rescale, output, stride);
    c += kLanes;
  }
  if (c < dim) add_columns<ROWS, 1, true>(weights, from, to, dim, tile, c, rescale, output, stride);
}

// ------------------------------------------------------------------------------------------- softmax

constexpr float kNever = -__builtin_inff();  // the score of a masked key

// Query rows: for each head of the cache equally many, in the order of their positions.
struct Rows {
  int heads;
  int of_head;
  float* query;        // [count][padded_dim]
  int32_t* positions;  // [count]
  float* slopes;       // [count], 0 without ALiBi

  int count() const { return heads * of_head; }
};

// The sums of each row over some keys: the largest score, the sum of the weights e^(score - top), and the weighted sum
// of the values.
struct Sums {
  float* top;     // [count]
  float* total;   // [count]
  float* output;  // [count][padded_dim]
};

// Finishes the scores of a row with a tile of keys, [64]: applies scale, soft cap and ALiBi, and kNever to masked keys.
// Returns the largest.
template <class T>
inline float finish_scores(const PagedAttention& a, const KeyTile<T>& tile, int64_t position, float slope,
                           float* scores) {
  static constexpr i32x16 kCount = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const int32_t first = (int32_t)(a.reach(position) - tile.position), last = (int32_t)(position - tile.position);
  f32x16 top = broadcast(kNever);
  if (!kHasScales<T> && a.softcap == 0 && slope == 0 && first <= 0 && last >= kKeyTile - 1) {  // already final
    for (int k = 0; k < kKeyTile; k += kLanes) top = max(top, load(scores + k));
    return maximum(top);
  }
  for (int k = 0; k < kKeyTile; k += kLanes) {
    const i32x16 key = kCount + k;
    f32x16 x = load(scores + k);
    if constexpr (kHasScales<T>) x *= load(tile.key_scales + k);
    if (a.softcap != 0) x = a.softcap * tanh(x * (1.0f / a.softcap));
    if (slope != 0) x = fma(broadcast(slope), __builtin_convertvector(key - last, f32x16), x);
    x = ((key >= first) & (key <= last)) ? x : broadcast(kNever);
    store(scores + k, x);
    top = max(top, x);
  }
  return maximum(top);
}

// Replaces scores by the weights of the values, and returns the sum of e^(score - top).
template <class T>
inline float weigh(const KeyTile<T>& tile, float top, float* scores) {
  f32x16 weights[kTileGroups];
  for (int g = 0; g < kTileGroups; g++) {
    f32x16 w = weights[g] = exp(load(scores + g * kLanes) - top);
    if constexpr (kHasScales<T>) w = w == 0 ? w : w * load(tile.value_scales + g * kLanes);
    store(scores + g * kLanes, w);
  }
  return sum((weights[0] + weights[1]) + (weights[2] + weights[3]));
}

// Adds a tile of keys to the sums of the rows [r0, r0 + ROWS).
template <int ROWS, class T>
inline void add_tile(const PagedAttention& a, const KeyTile<T>& tile, const Rows& rows, int r0, const Sums& sums) {
  const int64_t stride = a.padded_dim();
  const int64_t first = larger(tile.position, a.reach(rows.positions[r0]));
  const int64_t end = smaller(tile.position + kKeyTile, rows.positions[r0 + ROWS - 1] + 1);
  if (first >= end) return;  // all keys are masked in all rows
  alignas(64) float scores[ROWS * kKeyTile] = {};
  score<ROWS>(rows.query + r0 * stride, stride, a.head_dim, tile, scores);
  float tops[ROWS];
  alignas(64) float rescale[kLanes] = {};
  for (int r = 0; r < ROWS; r++) {
    const float found = finish_scores(a, tile, rows.positions[r0 + r], rows.slopes[r0 + r], scores + r * kKeyTile);
    const float before = sums.top[r0 + r], top = before > found ? before : found;
    sums.top[r0 + r] = top;
    tops[r] = top == kNever ? 0 : top;  // all keys were masked so far: the weights must be zero, not NaN
    rescale[r] = before - tops[r];
  }
  store(rescale, exp(load(rescale)));
  for (int r = 0; r < ROWS; r++) {
    sums.total[r0 + r] = fma(sums.total[r0 + r], rescale[r], weigh(tile, tops[r], scores + r * kKeyTile));
  }
  add_values<ROWS>(scores, (int)(first - tile.position), (int)(end - tile.position), a.head_dim, tile, rescale,
                   sums.output + r0 * stride, stride);
}

// The same for a variable number of rows.
template <int MOST, class T>
inline void add_tile(int count, const PagedAttention& a, const KeyTile<T>& tile, const Rows& rows, int r0,
                     const Sums& sums) {
  if (count == MOST) return add_tile<MOST>(a, tile, rows, r0, sums);
  if constexpr (MOST > 1) add_tile<MOST - 1>(count, a, tile, rows, r0, sums);
}

// Computes the sums of rows over the keys [from, to) of a segment. groups[i] is the index of the first head's group at
// from + 16 * i; after the last tile there are kAhead more, to prefetch.
template <class T>
inline void attend(const PagedAttention& a, const Cache<T>& cache, const Rows& rows, const int64_t* groups,
                   int64_t from, int64_t to, const Sums& sums) {
  for (int r = 0; r < rows.count(); r++) {
    sums.top[r] = kNever;
    sums.total[r] = 0;
  }
  memset(sums.output, 0, (size_t)(rows.count() * a.padded_dim()) * sizeof(float));
  const int parts = (rows.of_head + kRows - 1) / kRows, ahead = (int)larger(1, kAhead / rows.heads);
  const int64_t per_block = a.block_size / kGroup;
  for (int64_t position = from; position < to; position += kKeyTile, groups += kTileGroups) {
    const int num_groups = (int)((smaller(kKeyTile, to - position) + kGroup - 1) / kGroup);
    for (int head = 0; head < rows.heads; head++) {
      const KeyTile<T> tile(cache, groups, head * per_block, ahead, position, num_groups);
      for (int part = 0; part < parts; part++) {
        const int first = rows.of_head * part / parts, end = rows.of_head * (part + 1) / parts;
        add_tile<kRows>(end - first, a, tile, rows, head * rows.of_head + first, sums);
      }
    }
  }
}

// Merges the sums over the next segment, `b`, into those over the previous segments, `a`.
inline void merge(int count, int64_t stride, const Sums& a, const Sums& b) {
  for (int r = 0; r < count; r++) {
    if (b.top[r] == kNever) continue;
    if (a.top[r] == kNever) {
      a.top[r] = b.top[r];
      a.total[r] = b.total[r];
      memcpy(a.output + r * stride, b.output + r * stride, (size_t)stride * sizeof(float));
      continue;
    }
    const float top = a.top[r] > b.top[r] ? a.top[r] : b.top[r];
    const float ours = exp(a.top[r] - top), theirs = exp(b.top[r] - top);
    a.top[r] = top;
    a.total[r] = fma(a.total[r], ours, b.total[r] * theirs);
    for (int64_t d = r * stride; d < (r + 1) * stride; d += kLanes) {
      store(a.output + d, fma(load(a.output + d), broadcast(ours), load(b.output + d) * theirs));
    }
  }
}

// ------------------------------------------------------------------------------------------- the work

// Tokens of one sequence whose queries are multiplied together by some heads of the cache.
struct QueryTile {
  int64_t sequence;
  int64_t head;      // the first one
  int64_t heads;
  int64_t token;     // the first one's row of the query
  int64_t position;  // the first one's
  int64_t count;
  int64_t first_segment;
  int64_t num_segments;
  int64_t kept;  // the row at which the sums of its first segment are stored
};

// A work item of a thread: a tile, or one segment of it.
struct WorkItem {
  int64_t cost;
  int64_t tile;
  int64_t segment;  // kWhole: all of them
};
constexpr int64_t kWhole = -1;

// The memory of a thread.
struct Workspace {
  Rows rows;
  Sums sums;
  Sums segment_sums;
  float* key;
  float* value;
  void* rounded;
  int64_t groups[kSegmentGroups + kAhead];
};

// A call on a cache of one element type.
template <class T>
class AttentionJob {
 public:
  static constexpr int kPhases = 3;  // tokens written, items, tiles merged

  AttentionJob(const PagedAttention& call, const Tensor& output) : a(call), cache_(call), output_(output) {}

  bool compute(const Threads& threads, Error& error) {
    if (!open(threads.count, error)) return false;
    Phase phases[kPhases]{};
    auto work = [&](size_t index) {
      Prefetch none;
      this->work(Team(phases), index, none);
    };
    threads.run(larger(num_items_, num_chunks()), work);
    return true;
  }

  // The parts of compute(): open(), and then on each thread work(), and wait() if more is computed behind it.
  bool open(int num_threads, Error& error) {
    int64_t segments = 0, kept_rows = 0, tiles = 0;
    for (int64_t b = 0; b < a.num_sequences; b++) tiles += tiles_of_head(b);
    most_heads_ = larger(1, tiles * a.kv_num_heads / (kTilesPerThread * num_threads));
    num_tiles_ = each_tile([&](const QueryTile& tile) {
      segments += tile.num_segments;
      kept_rows += tile.num_segments * rows_of(tile);
    });
    split_ = num_threads > 1 && num_tiles_ < kItemsPerThread * num_threads && segments > num_tiles_;
    num_items_ = split_ ? segments : num_tiles_;
    if (!split_) kept_rows = 0;
    const int64_t rows = larger(kQueryTile, a.heads_per_kv());
    const size_t bytes = Scratch::bytes_of<int32_t>((size_t)a.num_tokens) +
                         Scratch::bytes_of<QueryTile>((size_t)num_tiles_) +
                         Scratch::bytes_of<WorkItem>((size_t)num_items_) + bytes_of_sums(kept_rows) +
                         (size_t)num_threads * bytes_of_workspace(rows);
    scratch_.open(bytes);
    if (!scratch_) return error.set("out of memory");
    sequences_ = scratch_.take<int32_t>((size_t)a.num_tokens);
    tiles_ = scratch_.take<QueryTile>((size_t)num_tiles_);
    items_ = scratch_.take<WorkItem>((size_t)num_items_);
    kept_ = take_sums(scratch_, kept_rows);
    workspaces_ = scratch_.take<Workspace>((size_t)num_threads);
    for (int i = 0; i < num_threads; i++) take_workspace(scratch_, rows, workspaces_[i]);
    plan();
    num_workspaces_ = num_threads;
    return true;
  }

  // All phases; a thread that waits prefetches what comes behind this call.
  void work(Team team, size_t index, Prefetch& next) {
    Workspace& mine = workspaces_[index];
    team.take(0, num_chunks(), [&](int64_t chunk) { write_tokens(chunk, mine); });
    team.wait(0, num_chunks(), next);
    team.take_dealt(1, num_items_, index, num_workspaces_, [&](int64_t i) { compute_item(i, mine); });
    if (!split_) return;
    team.wait(1, num_items_, next);
    team.take(2, num_tiles_, [&](int64_t i) { merge_tile(tiles_[i]); });
  }

  // Waits until the output is complete.
  void wait(Team team, Prefetch& next) {
    if (split_) return team.wait(2, num_tiles_, next);
    team.wait(1, num_items_, next);
  }

 private:
  static constexpr int64_t kItemsPerThread = 8;  // with fewer items, tiles are split, so that all threads have work
  static constexpr int64_t kTilesPerThread = 4;  // heads share a tile as long as there are about this many
  static constexpr int64_t kChunk = 16;          // tokens of a chunk of the first phase

  int64_t num_chunks() const { return (a.num_tokens + kChunk - 1) / kChunk * a.written_heads; }
  int64_t rows_of(const QueryTile& tile) const { return tile.heads * tile.count * a.heads_per_kv(); }
  // The query's token and head of a row: rows are listed by head of the cache, token, and head of its group.
  int64_t token_of(const QueryTile& tile, int64_t row) const {
    return row % (tile.count * a.heads_per_kv()) / a.heads_per_kv();
  }
  int64_t head_of(const QueryTile& tile, int64_t row) const {
    return (tile.head + row / (tile.count * a.heads_per_kv())) * a.heads_per_kv() + row % a.heads_per_kv();
  }
  int64_t tokens_per_tile() const { return larger(1, kQueryTile / a.heads_per_kv()); }

  int64_t tiles_of_head(int64_t sequence) const {
    return (a.tokens_of(sequence) + tokens_per_tile() - 1) / tokens_per_tile();
  }

  // Calls visit(tile) for the tiles of all sequences, each with up to `most_heads_`; returns their number.
  template <class Visit>
  int64_t each_tile(Visit&& visit) const {
    int64_t number = 0, kept = 0;
    for (int64_t b = 0; b < a.num_sequences; b++) {
      const int64_t tokens = a.tokens_of(b), tiles = tiles_of_head(b);
      for (int64_t i = 0; i < tiles; i++) {
        const int64_t first = tokens * i / tiles, end = tokens * (i + 1) / tiles;
        const int64_t position = a.past_seqlens[b] + first, last = a.past_seqlens[b] + end - 1;
        const int64_t first_segment = a.reach(position) / kSegment;
        const int64_t num_segments = last / kSegment - first_segment + 1;
        const int64_t fitting = kQueryTile / ((end - first) * a.heads_per_kv());
        const int64_t most = larger(1, smaller(most_heads_, fitting)), parts = (a.kv_num_heads + most - 1) / most;
        for (int64_t part = 0; part < parts; part++) {
          const int64_t head = a.kv_num_heads * part / parts, heads = a.kv_num_heads * (part + 1) / parts - head;
          const QueryTile tile{b, head, heads, a.cumulative_sequence_length[b] + first, position, end - first,
                               first_segment, num_segments, kept};
          visit(tile);
          kept += num_segments * rows_of(tile);
          number++;
        }
      }
    }
    return number;
  }

  Sums take_sums(Scratch& scratch, int64_t rows) const {
    return {scratch.take<float>((size_t)rows), scratch.take<float>((size_t)rows),
            scratch.take<float>((size_t)(rows * a.padded_dim()))};
  }
  size_t bytes_of_sums(int64_t rows) const {
    return 2 * Scratch::bytes_of<float>((size_t)rows) + Scratch::bytes_of<float>((size_t)(rows * a.padded_dim()));
  }
  void take_workspace(Scratch& scratch, int64_t rows, Workspace& workspace) const {
    const size_t dim = (size_t)a.padded_dim();
    workspace.rows.query = scratch.take<float>((size_t)rows * dim);
    workspace.rows.positions = scratch.take<int32_t>((size_t)rows);
    workspace.rows.slopes = scratch.take<float>((size_t)rows);
    workspace.sums = take_sums(scratch, rows);
    workspace.segment_sums = take_sums(scratch, rows);
    workspace.key = scratch.take<float>(dim);
    workspace.value = scratch.take<float>(dim);
    workspace.rounded = scratch.take<float>(dim);
  }
  size_t bytes_of_workspace(int64_t rows) const {
    const size_t dim = (size_t)a.padded_dim();
    return Scratch::bytes_of<Workspace>(1) + Scratch::bytes_of<float>((size_t)rows * dim) +
           2 * Scratch::bytes_of<float>((size_t)rows) + 2 * bytes_of_sums(rows) + 3 * Scratch::bytes_of<float>(dim);
  }

  // Lists the work items, the longest first.
  void plan() {
    for (int64_t b = 0; b < a.num_sequences; b++) {
      const int32_t* edges = a.cumulative_sequence_length + b;
      for (int32_t token = edges[0]; token < edges[1]; token++) sequences_[token] = (int32_t)b;
    }
    int64_t number = 0;
    WorkItem* item = items_;
    each_tile([&](const QueryTile& tile) {
      tiles_[number] = tile;
      for (int64_t s = 0; s < (split_ ? tile.num_segments : 1); s++, item++) {
        *item = {0, number, split_ ? tile.first_segment + s : kWhole};
        const int64_t keys = end_of(*item) - begin_of(*item);
        constexpr int64_t kReading = 8;  // the cost of reading a key and a value, in query rows
        item->cost = keys * (rows_of(tile) + tile.heads * kReading);
      }
      number++;
    });
    qsort(items_, (size_t)num_items_, sizeof(WorkItem), [](const void* one, const void* other) {
      const WorkItem &x = *static_cast<const WorkItem*>(one), &y = *static_cast<const WorkItem*>(other);
      if (x.cost != y.cost) return x.cost > y.cost ? -1 : 1;
      if (x.tile != y.tile) return x.tile < y.tile ? -1 : 1;
      return x.segment < y.segment ? -1 : 1;
    });
  }

  // The keys of an item, from the start of the tile with the first attended key to the last one.
  int64_t begin_of(const WorkItem& item) const {
    const int64_t begin = a.reach(tiles_[item.tile].position) / kKeyTile * kKeyTile;
    return item.segment == kWhole ? begin : larger(begin, item.segment * kSegment);
  }
  int64_t end_of(const WorkItem& item) const {
    const int64_t end = tiles_[item.tile].position + tiles_[item.tile].count;
    return item.segment == kWhole ? end : smaller(end, (item.segment + 1) * kSegment);
  }

  // Phase 0: the keys and values of a chunk of tokens, for one head.
  void write_tokens(int64_t chunk, Workspace& mine) const {
    const int64_t head = chunk % a.kv_num_heads, first = chunk / a.kv_num_heads * kChunk;
    for (int64_t token = first; token < smaller(first + kChunk, a.num_tokens); token++) {
      const int64_t sequence = sequences_[token];
      const int64_t position = a.past_seqlens[sequence] + token - a.cumulative_sequence_length[sequence];
      load_query_head(token, a.num_heads + head, a.k_norm_weight, a.cos_cache, position, 1.0f, mine.key);
      load_query_head(token, a.num_heads + a.kv_num_heads + head, a.v_norm_weight, nullptr, position, 1.0f, mine.value);
      write_token(a, cache_, sequence, head, position, mine.key, mine.value, static_cast<T*>(mine.rounded));
    }
  }

  void load_query_head(int64_t token, int64_t head, const float* norm_weight, const float* cos, int64_t position,
                       float scale, float* to) const {
    const int64_t from = (token * (a.num_heads + 2 * a.written_heads) + head) * a.head_dim;
    if (a.query_type == Type::kFloat16) {
      load_head(a, static_cast<const _Float16*>(a.query) + from, norm_weight, cos, position, scale, to);
    } else {
      load_head(a, static_cast<const float*>(a.query) + from, norm_weight, cos, position, scale, to);
    }
  }

  // Phase 1: the sums of an item over its keys and, if it has all of them, its output.
  void compute_item(int64_t number, Workspace& mine) const {
    const WorkItem& item = items_[number];
    const QueryTile& tile = tiles_[item.tile];
    Rows& rows = mine.rows;
    rows.heads = (int)tile.heads;
    rows.of_head = (int)(tile.count * a.heads_per_kv());
    for (int r = 0; r < rows.count(); r++) {
      const int64_t token = token_of(tile, r), position = tile.position + token, head = head_of(tile, r);
      load_query_head(tile.token + token, head, a.q_norm_weight, a.cos_cache, position, a.scale,
                      rows.query + r * a.padded_dim());
      rows.positions[r] = (int32_t)position;
      rows.slopes[r] = a.alibi_slopes == nullptr ? 0.0f : a.alibi_slopes[head];
    }
    const int64_t begin = begin_of(item), end = end_of(item);
    for (int64_t from = begin; from < end;) {
      const int64_t segment = from / kSegment, to = smaller((segment + 1) * kSegment, end);
      list_groups_of(number, from, to, mine.groups);
      if (item.segment != kWhole) {
        return attend(a, cache_, rows, mine.groups, from, to, kept_sums(tile, segment));
      }
      const bool is_first = from == begin;
      attend(a, cache_, rows, mine.groups, from, to, is_first ? mine.sums : mine.segment_sums);
      if (!is_first) merge(rows.count(), a.padded_dim(), mine.sums, mine.segment_sums);
      from = to;
    }
    store_rows(tile, mine.sums);
  }

  Sums kept_sums(const QueryTile& tile, int64_t segment) const {
    const int64_t row = tile.kept + (segment - tile.first_segment) * rows_of(tile);
    return {kept_.top + row, kept_.total + row, kept_.output + row * a.padded_dim()};
  }

  // Lists the groups of the tiles of keys from `from` to `to`, followed by kAhead groups of the item's next segment, or
  // of the items that this thread is likely to take next.
  void list_groups_of(int64_t number, int64_t from, int64_t to, int64_t* groups) const {
    const int64_t count = (to - from + kKeyTile - 1) / kKeyTile * kTileGroups + kAhead;
    for (int64_t listed = 0; listed < count; number += Team::stride(num_workspaces_)) {
      const WorkItem& item = items_[smaller(number, num_items_ - 1)];
      if (listed > 0) from = begin_of(item);
      const int64_t own = (end_of(item) - from + kKeyTile - 1) / kKeyTile * kTileGroups;
      list_groups(item, from, smaller(own, count - listed), groups + listed);
      listed += own;
    }
  }

  // Lists `count` groups of an item's sequence from the key `from` on. If all keys of a group are masked, its entry in
  // the block table may be invalid, and the nearest attended group is listed instead.
  void list_groups(const WorkItem& item, int64_t from, int64_t count, int64_t* groups) const {
    const QueryTile& tile = tiles_[item.tile];
    const int64_t first = larger(from, a.reach(tile.position)) / kGroup, last = (end_of(item) - 1) / kGroup;
    const int64_t per_block = a.block_size / kGroup;
    const int32_t* block = a.block_table + tile.sequence * a.max_blocks + first / per_block;
    int64_t place = first % per_block;
    for (int64_t i = 0, group = from / kGroup; i < count; i++, group++) {
      groups[i] = (*block * a.kv_num_heads + tile.head) * per_block + place;
      if (group >= first && group < last && ++place == per_block) {
        place = 0;
        block++;
      }
    }
  }

  // Phase 2: merges the segments of a split tile.
  void merge_tile(const QueryTile& tile) const {
    const Sums sums = kept_sums(tile, tile.first_segment);
    for (int64_t s = 1; s < tile.num_segments; s++) {
      merge((int)rows_of(tile), a.padded_dim(), sums, kept_sums(tile, tile.first_segment + s));
    }
    store_rows(tile, sums);
  }

  // The factor of a row's output: one over the sum of exp(score), of which `total` is that of exp(score - top).
  float inverse_total(float top, float total, int64_t head) const {
    if (a.sinks == nullptr) return 1.0f / total;
    const float sink = a.sinks[head], highest = top > sink ? top : sink, ours = exp(top - highest);
    return ours / fma(total, ours, exp(sink - highest));
  }

  void store_rows(const QueryTile& tile, const Sums& sums) const {
    const int64_t dim = a.head_dim;
    for (int64_t r = 0; r < rows_of(tile); r++) {
      const int64_t to = ((tile.token + token_of(tile, r)) * a.num_heads + head_of(tile, r)) * dim;
      const float inverse = inverse_total(sums.top[r], sums.total[r], head_of(tile, r));
      for (int64_t d = 0; d < dim; d += kLanes) {
        const f32x16 x = load(sums.output + r * a.padded_dim() + d) * inverse;
        if (a.query_type == Type::kFloat16) {
          store_first(output_.as<_Float16>() + to + d, x, dim - d);
        } else {
          store_first(output_.as<float>() + to + d, x, dim - d);
        }
      }
    }
  }

  const PagedAttention& a;
  const Cache<T> cache_;
  const Tensor& output_;
  Scratch scratch_;
  bool split_ = false;
  int64_t most_heads_ = 0;  // of a tile
  int64_t num_tiles_ = 0;
  int64_t num_items_ = 0;
  int num_workspaces_ = 0;
  int32_t* sequences_ = nullptr;  // [T]: the sequence of each token
  QueryTile* tiles_ = nullptr;
  WorkItem* items_ = nullptr;
  Sums kept_{};                   // the sums of every segment of split tiles
  Workspace* workspaces_ = nullptr;
};

// Whether the outputs have the right shape, and the caches are those of the inputs.
inline bool PagedAttention::check_outputs(const AttentionInputs& in, const AttentionOutputs& out, Error& error) const {
  if (!check(out.output, "output", query_type, error, num_tokens, num_heads * head_dim)) return false;
  if (written_heads == 0) return true;
  if (out.key_cache.data != in.key_cache.data || out.value_cache.data != in.value_cache.data) {
    return error.set("key_cache_out and value_cache_out are not bound to the memory of key_cache and value_cache");
  }
  if (cache_type == Type::kInt8 &&
      (out.key_scales.data != in.key_scales.data || out.value_scales.data != in.value_scales.data)) {
    return error.set("key_scales_out and value_scales_out are not bound to the memory of key_scales and value_scales");
  }
  return true;
}

// Calls use(job) with the AttentionJob for the type of the cache.
template <class Use>
bool PagedAttention::with_job(const Tensor& output, Use&& use) const {
  const auto with = [&](auto job) { return use(job); };
  switch (cache_type) {
    case Type::kFloat16: return with(AttentionJob<_Float16>(*this, output));
    case Type::kInt8: return with(AttentionJob<int8_t>(*this, output));
    default: return with(AttentionJob<float>(*this, output));
  }
}

// Computes the call that open() has checked.
inline bool PagedAttention::compute(const AttentionInputs& in, const AttentionOutputs& out, const Threads& threads,
                                    Error& error) const {
  if (!check_outputs(in, out, error)) return false;
  if (num_tokens == 0) return true;
  return with_job(out.output, [&](auto& job) { return job.compute(threads, error); });
}

}  // namespace genserve
