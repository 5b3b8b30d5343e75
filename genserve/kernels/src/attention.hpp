// attention.hpp: PagedAttention, attention of packed tokens over a key/value cache in blocks.
//
// A call takes tokens of many sequences, each with one token or a chunk of them behind any past. It writes their keys and
// values into the cache, and then computes every token's attention over all that its sequence has there.
//
//     cache         block [Hk heads]    head    keys: groups of 16 tokens [D][16]   values: tokens [D]   scales: [token]
//     sequence      block_table -> blocks -> groups of 16 tokens, the unit in which the cache is read
//     work item     the tokens of one sequence that fit a tile (48 rows of query), for one head of the cache
//
// Order of additions: keys are taken in tiles of 64, tiles are joined in segments of 512, and segments are merged from
// the first to the last. Tiles and segments begin at multiples of 64 and 512 in the sequence, so the bits of a token's
// output depend on its own history alone: not on other tokens, nor on where a chunk begins, nor on threads or blocks.
#pragma once

#include <stdio.h>

#include <algorithm>

#include "team.hpp"
#include "vector.hpp"

namespace genserve {

constexpr int kGroup = kLanes;      // tokens whose keys lie side by side
constexpr int kKeyTile = 64;        // keys whose scores are computed, and made weights, at a time
constexpr int kSegment = 512;       // keys that are added up before they are merged with the others
constexpr int kQueryTile = 48;      // rows of query of a work item, if a group of heads is not larger
constexpr int kRows = 6;            // rows of query that are multiplied at a time
constexpr int kTileGroups = kKeyTile / kGroup;
constexpr int kSegmentGroups = kSegment / kGroup;
constexpr int kAhead = 2 * kTileGroups;  // groups between the one that is read and the one that is fetched

// Sums that fit into the registers, in vectors.
#if defined(__AVX512F__)
constexpr int kSums = 24;
#else
constexpr int kSums = 6;
#endif

// Element types by their numbers in ONNX.
constexpr int32_t kFloat32 = 1, kInt8 = 3, kFloat16 = 10;

// A call. Shapes: query [T, (Hq + 2 Hk) * D]; caches [num_blocks, block_size, Hk, D], updated in place; scales
// [num_blocks, block_size, Hk], with an int8 cache only; cos, sin [num_positions, rotary_dims / 2]; output [T, Hq * D] of
// the query's type. What is optional may be null.
struct PagedAttention {
  const void* query;
  void* key_cache;
  void* value_cache;
  float* key_scales;
  float* value_scales;
  const int32_t* cumulative_sequence_length;  // [B + 1]
  const int32_t* past_seqlens;                // [B]
  const int32_t* block_table;                 // [B, max_blocks]
  const float* cos_cache;
  const float* sin_cache;
  const float* q_norm_weight;  // [D]
  const float* k_norm_weight;  // [D]
  const float* alibi_slopes;   // [Hq]
  void* output;
  int64_t num_tokens;
  int64_t num_sequences;
  int64_t max_blocks;
  int64_t num_blocks;
  int64_t block_size;
  int64_t num_heads;
  int64_t kv_num_heads;
  int64_t head_dim;
  int64_t num_positions;
  int64_t rotary_dims;
  int64_t local_window_size;  // keys that a token sees, itself included; -1: all
  int32_t query_type;
  int32_t cache_type;
  float scale;    // 0: 1 / sqrt(D)
  float softcap;  // 0: none
  float qk_norm_epsilon;

  int64_t heads_per_kv() const { return num_heads / kv_num_heads; }
  int64_t padded_dim() const { return (head_dim + kLanes - 1) / kLanes * kLanes; }
  int64_t tokens_of(int64_t sequence) const {
    return cumulative_sequence_length[sequence + 1] - cumulative_sequence_length[sequence];
  }
  // The first position that a token sees.
  int64_t reach(int64_t position) const {
    return local_window_size < 0 ? 0 : std::max<int64_t>(0, position - local_window_size + 1);
  }
};

// Writes what is wrong with a call's numbers, if anything is, and says whether nothing is. The shapes and types of the
// tensors are right already.
inline bool check_paged_attention(const PagedAttention& a, char* message, size_t size) {
#define GENSERVE_REQUIRE(condition, ...) \
  if (!(condition)) return snprintf(message, size, "PagedAttention: " __VA_ARGS__), false
  typedef long long ll;
  GENSERVE_REQUIRE(a.num_heads > 0 && a.kv_num_heads > 0 && a.num_heads % a.kv_num_heads == 0,
                   "num_heads is %lld, which is no multiple of kv_num_heads, %lld", (ll)a.num_heads, (ll)a.kv_num_heads);
  GENSERVE_REQUIRE(a.head_dim > 0, "the query's columns are none of num_heads + 2 * kv_num_heads heads");
  GENSERVE_REQUIRE(a.block_size > 0 && a.block_size % kGroup == 0, "block_size is %lld, not a multiple of 16",
                   (ll)a.block_size);
  GENSERVE_REQUIRE(a.local_window_size == -1 || a.local_window_size > 0,
                   "local_window_size is %lld, neither -1 nor at least 1", (ll)a.local_window_size);
  GENSERVE_REQUIRE(a.rotary_dims >= 0 && a.rotary_dims % 2 == 0 && a.rotary_dims <= a.head_dim,
                   "cos_cache turns %lld numbers of a head of %lld", (ll)a.rotary_dims, (ll)a.head_dim);
  GENSERVE_REQUIRE(a.softcap >= 0, "softcap is %g, below 0", (double)a.softcap);
  const int32_t* edges = a.cumulative_sequence_length;
  GENSERVE_REQUIRE(edges[0] == 0, "cumulative_sequence_length begins with %d, not with 0", edges[0]);
  GENSERVE_REQUIRE(edges[a.num_sequences] == a.num_tokens,
                   "cumulative_sequence_length ends with %d, and the query has %lld tokens", edges[a.num_sequences],
                   (ll)a.num_tokens);
  for (int64_t b = 0; b < a.num_sequences; b++) {
    const int64_t tokens = (int64_t)edges[b + 1] - edges[b], past = a.past_seqlens[b], length = past + tokens;
    GENSERVE_REQUIRE(tokens >= 0, "cumulative_sequence_length falls from %d to %d at sequence %lld", edges[b],
                     edges[b + 1], (ll)b);
    GENSERVE_REQUIRE(past >= 0, "past_seqlens of sequence %lld is %lld", (ll)b, (ll)past);
    if (tokens == 0) continue;
    GENSERVE_REQUIRE(length <= a.max_blocks * a.block_size && length <= INT32_MAX,
                     "sequence %lld has %lld tokens, and its row of block_table holds %lld", (ll)b, (ll)length,
                     (ll)(a.max_blocks * a.block_size));
    GENSERVE_REQUIRE(a.cos_cache == nullptr || length <= a.num_positions,
                     "sequence %lld has %lld tokens, and cos_cache %lld positions", (ll)b, (ll)length,
                     (ll)a.num_positions);
    for (int64_t i = a.reach(past) / a.block_size; i * a.block_size < length; i++) {
      const int32_t block = a.block_table[b * a.max_blocks + i];
      GENSERVE_REQUIRE(block >= 0 && block < a.num_blocks,
                       "block_table[%lld, %lld] is %d, and the cache has %lld blocks", (ll)b, (ll)i, block,
                       (ll)a.num_blocks);
    }
  }
#undef GENSERVE_REQUIRE
  return true;
}

// ------------------------------------------------------------------------------------------- a head of a token

GENSERVE_INLINE void prefetch(const void* at) { __builtin_prefetch(at, 0, 2); }

// Loads a head, its norm applied, the first numbers turned by the token's position, and all of it scaled: [padded_dim],
// zeros at the end.
template <class Q>
inline void load_head(const PagedAttention& a, const Q* from, const float* norm_weight, int64_t position, float scale,
                      float* to) {
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
  if (a.cos_cache != nullptr) {
    const int64_t half = a.rotary_dims / 2;
    const float* cos = a.cos_cache + position * half;
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

// The cache of one element type. Groups have numbers: those of a head in a block follow one another.
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

  const T* keys_of(int64_t group) const { return keys + group * group_size; }
  const T* values_of(int64_t group) const { return values + group * group_size; }
};

// Lists the numbers of the groups `first` .. `first + count - 1` of a sequence; from `last` on it is that one's number.
inline void list_groups(const PagedAttention& a, int64_t sequence, int64_t head, int64_t first, int64_t last,
                        int64_t count, int64_t* groups) {
  const int64_t per_block = a.block_size / kGroup;
  const int32_t* block = a.block_table + sequence * a.max_blocks + first / per_block;
  int64_t place = first % per_block;
  for (int64_t i = 0; i < count; i++) {
    groups[i] = (*block * a.kv_num_heads + head) * per_block + place;
    if (first + i < last && ++place == per_block) {
      place = 0;
      block++;
    }
  }
}

// Rounds a head to the type of the cache, [D], and returns its scale (1 for floats).
inline float round_head(const float* x, int64_t, int64_t padded, float* to) {
  memcpy(to, x, (size_t)padded * sizeof(float));
  return 1.0f;
}
inline float round_head(const float* x, int64_t, int64_t padded, _Float16* to) {
  constexpr float kLargest = 65504.0f;  // beyond it fp16 is infinite, and so would be every sum that meets it
  for (int64_t d = 0; d < padded; d += kLanes) {
    store(to + d, max(broadcast(-kLargest), min(broadcast(kLargest), load(x + d))));
  }
  return 1.0f;
}
inline float round_head(const float* x, int64_t, int64_t padded, int8_t* to) {
  f32x16 sizes{};
  for (int64_t d = 0; d < padded; d += kLanes) sizes = max(sizes, abs(load(x + d)));
  const float largest = maximum(sizes);
  const f32x16 inverse = broadcast(largest > 0 ? 127.0f / largest : 0.0f);
  for (int64_t d = 0; d < padded; d += kLanes) store(to + d, round_to_int(load(x + d), inverse));
  return largest / 127.0f;
}

// Writes the key and the value of a token's head to its place in the cache.
template <class T>
inline void write_token(const PagedAttention& a, const Cache<T>& cache, int64_t sequence, int64_t head, int64_t position,
                        const float* key, const float* value, T* rounded) {
  const int64_t dim = a.head_dim, place = position % kGroup;
  int64_t group;
  list_groups(a, sequence, head, position / kGroup, position / kGroup, 1, &group);
  const float key_scale = round_head(key, dim, a.padded_dim(), rounded);
  T* keys = cache.keys + group * cache.group_size + place;
  for (int64_t d = 0; d < dim; d++) keys[d * kGroup] = rounded[d];
  const float value_scale = round_head(value, dim, a.padded_dim(), rounded);
  memcpy(cache.values + group * cache.group_size + place * dim, rounded, (size_t)dim * sizeof(T));
  if (cache.key_scales != nullptr) {
    cache.key_scales[group * kGroup + place] = key_scale;
    cache.value_scales[group * kGroup + place] = value_scale;
  }
}

// ------------------------------------------------------------------------------------------- products

// The scores of ROWS rows of query with the keys of GROUPS groups, to s [ROWS][64].
template <int ROWS, int GROUPS, class T>
inline void score_groups(const float* query, int64_t stride, int64_t dim, const T* const* keys, const T* const* ahead,
                         float* s) {
  f32x16 sums[ROWS][GROUPS] = {};
  const auto step = [&](int64_t d) __attribute__((always_inline)) {
    f32x16 k[GROUPS];
#pragma clang loop unroll(full)
    for (int g = 0; g < GROUPS; g++) k[g] = load(keys[g] + d * kGroup);
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; r++) {
      const f32x16 q = broadcast(query[r * stride + d]);
#pragma clang loop unroll(full)
      for (int g = 0; g < GROUPS; g++) sums[r][g] = fma(q, k[g], sums[r][g]);
    }
  };
  constexpr int64_t kLine = 4 / sizeof(T);  // numbers of a head whose keys fill a cache line
  int64_t d = 0;
  for (; d + kLine <= dim; d += kLine) {
#pragma clang loop unroll(full)
    for (int g = 0; g < GROUPS; g++) prefetch(ahead[g] + d * kGroup);
#pragma clang loop unroll(full)
    for (int64_t i = 0; i < kLine; i++) step(d + i);
  }
  for (; d < dim; d++) step(d);
#pragma clang loop unroll(full)
  for (int r = 0; r < ROWS; r++) {
#pragma clang loop unroll(full)
    for (int g = 0; g < GROUPS; g++) store(s + r * kKeyTile + g * kGroup, sums[r][g]);
  }
}

// The same for any number of groups, as many at a time as the registers hold.
template <int ROWS, class T>
inline void score(const float* query, int64_t stride, int64_t dim, int groups, const T* const* keys,
                  const T* const* ahead, float* s) {
  constexpr int kAtOnce = kSums / ROWS >= 4 ? 4 : kSums / ROWS >= 2 ? 2 : 1;
  int g = 0;
  for (; g + kAtOnce <= groups; g += kAtOnce) {
    score_groups<ROWS, kAtOnce>(query, stride, dim, keys + g, ahead + g, s + g * kGroup);
  }
  if constexpr (kAtOnce == 4) {
    if (g + 2 <= groups) {
      score_groups<ROWS, 2>(query, stride, dim, keys + g, ahead + g, s + g * kGroup);
      g += 2;
    }
  }
  if constexpr (kAtOnce > 1) {
    if (g < groups) score_groups<ROWS, 1>(query, stride, dim, keys + g, ahead + g, s + g * kGroup);
  }
}

// Adds the values of keys [from, to) of a tile, times their weights p [ROWS][64], to COLUMNS vectors of the output, which
// is scaled first. `last` is how many lanes of the last vector there are.
template <int ROWS, int COLUMNS, bool PARTIAL, class T>
inline void add_columns(const float* p, int from, int to, int64_t dim, const T* const* values, const T* const* ahead,
                        int64_t column, const float* rescale, float* output, int64_t stride) {
  f32x16 sums[ROWS][COLUMNS];
#pragma clang loop unroll(full)
  for (int r = 0; r < ROWS; r++) {
#pragma clang loop unroll(full)
    for (int c = 0; c < COLUMNS; c++) sums[r][c] = load(output + r * stride + column + c * kLanes) * rescale[r];
  }
  for (int key = from; key < to;) {
    const int group = key / kGroup, end = std::min(to, (group + 1) * kGroup);
    const T* v = values[group] + (key % kGroup) * dim + column;
    const T* next = ahead[group] + (key % kGroup) * dim + column;
    for (; key < end; key++, v += dim, next += dim) {
#pragma clang loop unroll(full)
      for (size_t b = 0; b < COLUMNS * kLanes; b += 64 / sizeof(T)) prefetch(next + b);
      f32x16 x[COLUMNS];
#pragma clang loop unroll(full)
      for (int c = 0; c < COLUMNS; c++) x[c] = PARTIAL ? load_first(v, dim - column) : load(v + c * kLanes);
#pragma clang loop unroll(full)
      for (int r = 0; r < ROWS; r++) {
        const f32x16 w = broadcast(p[r * kKeyTile + key]);
#pragma clang loop unroll(full)
        for (int c = 0; c < COLUMNS; c++) sums[r][c] = fma(w, x[c], sums[r][c]);
      }
    }
  }
#pragma clang loop unroll(full)
  for (int r = 0; r < ROWS; r++) {
#pragma clang loop unroll(full)
    for (int c = 0; c < COLUMNS; c++) store(output + r * stride + column + c * kLanes, sums[r][c]);
  }
}

// The same for all columns of a head.
template <int ROWS, class T>
inline void add_values(const float* p, int from, int to, int64_t dim, const T* const* values, const T* const* ahead,
                       const float* rescale, float* output, int64_t stride) {
  constexpr int kAtOnce = kSums / ROWS >= 4 ? 4 : kSums / ROWS >= 2 ? 2 : 1;
  int64_t c = 0;
  for (; c + kAtOnce * kLanes <= dim; c += kAtOnce * kLanes) {
    add_columns<ROWS, kAtOnce, false>(p, from, to, dim, values, ahead, c, rescale, output, stride);
  }
  for (; c + kLanes <= dim; c += kLanes) {
    add_columns<ROWS, 1, false>(p, from, to, dim, values, ahead, c, rescale, output, stride);
  }
  if (c < dim) add_columns<ROWS, 1, true>(p, from, to, dim, values, ahead, c, rescale, output, stride);
}

// ------------------------------------------------------------------------------------------- softmax

// Rows of query of one head of the cache, with the sums of their softmax: weights are e^(score - top), `total` is their
// sum, `output` [count][padded_dim] the sum of the values times them.
struct Rows {
  int count;
  float* query;        // [count][padded_dim]
  int32_t* positions;  // [count]
  float* slopes;       // [count], 0 without ALiBi
};
struct Sums {
  float* top;
  float* total;
  float* output;
};

// Makes the scores of one row with a tile of keys, s [64], final: scaled, capped, biased by distance, and -inf where the
// row does not see the key. Returns the largest.
inline float finish_scores(const PagedAttention& a, const float* scales, int64_t tile, int64_t position, float slope,
                           float* s) {
  constexpr float kNever = -__builtin_inff();
  static constexpr i32x16 kIota = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const int32_t first = (int32_t)(a.reach(position) - tile), last = (int32_t)(position - tile);
  f32x16 top = broadcast(kNever);
  for (int k = 0; k < kKeyTile; k += kLanes) {
    const i32x16 key = kIota + k;
    f32x16 x = load(s + k);
    if (scales != nullptr) x *= load(scales + k);
    if (a.softcap != 0) x = a.softcap * tanh(x * (1.0f / a.softcap));
    if (slope != 0) x = fma(broadcast(slope), __builtin_convertvector(key - last, f32x16), x);
    x = (key >= first) & (key <= last) ? x : broadcast(kNever);
    store(s + k, x);
    top = max(top, x);
  }
  return maximum(top);
}

// Turns scores into weights for the values, s [64], and returns the sum of the weights.
inline float weigh(const float* scales, float top, float* s) {
  f32x16 sums[kTileGroups];
  for (int g = 0; g < kTileGroups; g++) {
    const f32x16 x = load(s + g * kLanes), w = exp(x - top);
    sums[g] = w;
    store(s + g * kLanes, scales == nullptr ? w : w == 0 ? f32x16{} : w * load(scales + g * kLanes));
  }
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// Computes the sums of rows over the keys [from, to) of a segment. groups[i] is the number of the group at
// from + 16 * i, and goes on kAhead groups beyond the last with those that will be read next.
template <class T>
inline void attend(const PagedAttention& a, const Cache<T>& cache, const Rows& rows, const int64_t* groups, int64_t from,
                   int64_t to, const Sums& sums) {
  constexpr float kNever = -__builtin_inff();
  const int64_t stride = a.padded_dim(), dim = a.head_dim;
  for (int r = 0; r < rows.count; r++) {
    sums.top[r] = kNever;
    sums.total[r] = 0;
  }
  memset(sums.output, 0, (size_t)(rows.count * stride) * sizeof(float));
  for (int64_t tile = from; tile < to; tile += kKeyTile, groups += kTileGroups) {
    const int tile_groups = (int)(std::min<int64_t>(kKeyTile, to - tile) + kGroup - 1) / kGroup;
    const T *keys[kTileGroups], *values[kTileGroups], *keys_ahead[kTileGroups], *values_ahead[kTileGroups];
    alignas(64) float key_scales[kKeyTile] = {}, value_scales[kKeyTile] = {};
    for (int g = 0; g < tile_groups; g++) {
      keys[g] = cache.keys_of(groups[g]);
      values[g] = cache.values_of(groups[g]);
      keys_ahead[g] = cache.keys_of(groups[g + kAhead]);
      values_ahead[g] = cache.values_of(groups[g + kAhead]);
      if constexpr (sizeof(T) == 1) {
        store(key_scales + g * kGroup, load(cache.key_scales + groups[g] * kGroup));
        store(value_scales + g * kGroup, load(cache.value_scales + groups[g] * kGroup));
      }
    }
    const float* key_scale = sizeof(T) == 1 ? key_scales : nullptr;
    const float* value_scale = sizeof(T) == 1 ? value_scales : nullptr;
    const int parts = (rows.count + kRows - 1) / kRows;
    for (int part = 0; part < parts; part++) {
      const int r0 = rows.count * part / parts, count = rows.count * (part + 1) / parts - r0;
      // Rows are in the order of their positions.
      const int64_t first = std::max(tile, a.reach(rows.positions[r0]));
      const int64_t end = std::min<int64_t>(tile + kKeyTile, rows.positions[r0 + count - 1] + 1);
      if (first >= end) continue;
      alignas(64) float s[kRows * kKeyTile] = {};
      const float* query = rows.query + r0 * stride;
      switch (count) {
        case 1: score<1>(query, stride, dim, tile_groups, keys, keys_ahead, s); break;
        case 2: score<2>(query, stride, dim, tile_groups, keys, keys_ahead, s); break;
        case 3: score<3>(query, stride, dim, tile_groups, keys, keys_ahead, s); break;
        case 4: score<4>(query, stride, dim, tile_groups, keys, keys_ahead, s); break;
        case 5: score<5>(query, stride, dim, tile_groups, keys, keys_ahead, s); break;
        case 6: score<6>(query, stride, dim, tile_groups, keys, keys_ahead, s); break;
      }
      alignas(64) float rescale[kLanes] = {}, tops[kLanes] = {};
      for (int r = 0; r < count; r++) {
        const float found = finish_scores(a, key_scale, tile, rows.positions[r0 + r], rows.slopes[r0 + r],
                                          s + r * kKeyTile);
        const float old = sums.top[r0 + r], top = old > found ? old : found;
        tops[r] = top == kNever ? 0 : top;                     // nothing seen so far: all weights are zero
        rescale[r] = old - tops[r];
        sums.top[r0 + r] = top;
      }
      store(rescale, exp(load(rescale)));
      for (int r = 0; r < count; r++) {
        const float total = weigh(value_scale, tops[r], s + r * kKeyTile);
        sums.total[r0 + r] = fma(sums.total[r0 + r], rescale[r], total);
      }
      float* output = sums.output + r0 * stride;
      const int k0 = (int)(first - tile), k1 = (int)(end - tile);
      switch (count) {
        case 1: add_values<1>(s, k0, k1, dim, values, values_ahead, rescale, output, stride); break;
        case 2: add_values<2>(s, k0, k1, dim, values, values_ahead, rescale, output, stride); break;
        case 3: add_values<3>(s, k0, k1, dim, values, values_ahead, rescale, output, stride); break;
        case 4: add_values<4>(s, k0, k1, dim, values, values_ahead, rescale, output, stride); break;
        case 5: add_values<5>(s, k0, k1, dim, values, values_ahead, rescale, output, stride); break;
        case 6: add_values<6>(s, k0, k1, dim, values, values_ahead, rescale, output, stride); break;
      }
    }
  }
}

// Merges the sums over the next segment, `b`, into those over the segments before it, `a`.
inline void merge(int count, int64_t stride, const Sums& a, const Sums& b) {
  constexpr float kNever = -__builtin_inff();
  for (int r = 0; r < count; r++) {
    if (b.top[r] == kNever) continue;
    const float top = a.top[r] > b.top[r] ? a.top[r] : b.top[r];
    const float ours = exp(a.top[r] - top), theirs = exp(b.top[r] - top);
    a.top[r] = top;
    a.total[r] = fma(a.total[r], ours, b.total[r] * theirs);
    for (int64_t d = r * stride; d < (r + 1) * stride; d += kLanes) {
      store(a.output + d, fma(load(a.output + d), broadcast(ours), load(b.output + d) * theirs));
    }
  }
}
