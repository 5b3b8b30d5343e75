// logits.hpp: scans rows of logits in one pass for the best token, the best k and NaN; a second pass over the cached
// row computes log-sum-exp.
#pragma once

#include <math.h>

#include "team.hpp"
#include "vector.hpp"

namespace genserve {

// The k best tokens of a row so far: a heap with the worst of them at its root. Keys order by value, and equal values
// by the lower id:
//
//     | value, as an integer of the same order | 2^32 - 1 - id |
class BestK {
 public:
  BestK(uint64_t* keys, int64_t k) : keys_(keys), k_(k) {}

  // The value that a token must exceed to be among them; -inf never does.
  float threshold() const { return threshold_; }

  void add(float value, uint32_t id) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, value + 0.0f);  // -0 is 0
    const uint32_t ordered = bits >> 31 ? ~bits : bits | 0x80000000u;
    const uint64_t key = (uint64_t)ordered << 32 | (0xffffffffu - id);
    if (count_ < k_) {
      int64_t at = count_++;
      for (; at > 0 && keys_[(at - 1) / 2] > key; at = (at - 1) / 2) keys_[at] = keys_[(at - 1) / 2];
      keys_[at] = key;
    } else {
      sink(key, count_);
    }
    if (count_ == k_) threshold_ = value_of(keys_[0]);
  }

  // Their number, and their values in any order.
  int64_t count() const { return count_; }
  float value(int64_t i) const { return value_of(keys_[i]); }

  // Their ids, the best first; -1 if the row has fewer than k.
  void sorted(int64_t* ids) {
    for (int64_t i = count_; i < k_; i++) ids[i] = -1;
    for (int64_t left = count_; left > 0; left--) {
      ids[left - 1] = 0xffffffffu - (uint32_t)keys_[0];
      sink(keys_[left - 1], left - 1);
    }
  }

 private:
  static float value_of(uint64_t key) {
    const uint32_t ordered = (uint32_t)(key >> 32);
    return __builtin_bit_cast(float, ordered >> 31 ? ordered & 0x7fffffffu : ~ordered);
  }

  // Replaces the root of a heap of `count` keys.
  void sink(uint64_t key, int64_t count) {
    int64_t at = 0;
    for (int64_t child; (child = 2 * at + 1) < count; at = child) {
      if (child + 1 < count && keys_[child + 1] < keys_[child]) child++;
      if (keys_[child] >= key) break;
      keys_[at] = keys_[child];
    }
    keys_[at] = key;
  }

  uint64_t* keys_;
  int64_t k_, count_ = 0;
  float threshold_ = -__builtin_inff();
};

struct RowScan {
  int64_t best_id;  // the lowest of equal ones
  float best;       // NaN if the row has one
};

// The best token of a row of `size` values, and optionally the k best (`best_k`) and the maximum of each part of the
// row (`maxima`). Most parts are skipped after their maximum.
constexpr int64_t kPart = 16 * kLanes;
inline RowScan scan_row(const float* row, int64_t size, BestK* best_k, float* maxima = nullptr) {
  float padded[kPart];  // the last part, padded with -inf
  float best = -__builtin_inff();
  int64_t best_part = 0;
  i32x16 nan{};
  for (int64_t at = 0; at < size; at += kPart) {
    const float* part = row + at;
    if (size - at < kPart) {
      for (int64_t i = 0; i < kPart; i++) padded[i] = at + i < size ? part[i] : -__builtin_inff();
      part = padded;
    }
    f32x16 tops[2] = {broadcast(-__builtin_inff()), broadcast(-__builtin_inff())};
    for (int64_t i = 0; i < kPart; i += 2 * kLanes) {
      const f32x16 a = load(part + i), b = load(part + i + kLanes);
      nan |= (a != a) | (b != b);
      tops[0] = max(a, tops[0]);
      tops[1] = max(b, tops[1]);
    }
    const f32x16 top = max(tops[0], tops[1]);
    if (maxima != nullptr) maxima[at / kPart] = maximum(top);
    if (any(top > best)) {
      best = maximum(top);
      best_part = at;
    }
    if (best_k == nullptr || !any(top > best_k->threshold())) continue;
    for (int64_t i = 0; i < kPart; i += kLanes) {
      for (uint32_t hits = bits(load(part + i) > best_k->threshold()); hits != 0; hits &= hits - 1) {
        const int64_t place = i + __builtin_ctz(hits);
        if (part[place] > best_k->threshold()) best_k->add(part[place], (uint32_t)(at + place));
      }
    }
  }
  if (any(nan)) return {0, __builtin_nanf("")};
  int64_t best_id = best_part;
  while (best_id + 1 < size && row[best_id] != best) best_id++;
  return {best_id, best};
}

// log(sum(exp(row))); 1,024 values at a time are summed in float, and their sums in double.
inline double log_sum_exp(const float* row, int64_t size, float best) {
  double total = 0;
  for (int64_t from = 0; from < size; from += 1024) {
    const int64_t to = from + 1024 < size ? from + 1024 : size;
    f32x16 part{};
    for (int64_t i = from; i < to; i += kLanes) {
      part += keep_first(exp(load_first(row + i, to - i) - best), to - i);
    }
    total += sum(part);
  }
  return best + ::log(total);
}

// Rows [num_rows, size] of logits. `best_ids` and `best` are [num_rows]; `top_ids` is [num_rows, k], or null with k = 0;
// `log_sums` is [num_rows] or null. False: out of memory.
inline bool scan_logits(const float* logits, int64_t num_rows, int64_t size, int64_t k, int64_t* best_ids, float* best,
                        int64_t* top_ids, double* log_sums) {
  Scratch scratch(Scratch::bytes_of<uint64_t>((size_t)k));
  if (!scratch) return false;
  uint64_t* keys = scratch.take<uint64_t>((size_t)k);
  for (int64_t r = 0; r < num_rows; r++) {
    const float* row = logits + r * size;
    BestK best_k(keys, k);
    const RowScan found = scan_row(row, size, k > 0 ? &best_k : nullptr);
    best_ids[r] = found.best_id;
    best[r] = found.best;
    if (k > 0) best_k.sorted(top_ids + r * k);
    if (log_sums != nullptr) log_sums[r] = log_sum_exp(row, size, found.best);
  }
  return true;
}

}  // namespace genserve
