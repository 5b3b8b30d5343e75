// sampling.hpp: samples a token for each row of logits: greedy, or a draw with temperature, top-k, top-p and min-p.
//
// Each rule keeps the tokens that reach a level, and the draw inverts their cumulative distribution in the order of
// ids. A row is divided into parts of 256 tokens; parts whose maximum is below the level are skipped.
#pragma once

#include "logits.hpp"

namespace genserve {

// How one row is sampled. genserve/kernels/sampling_kernels.py has the same fields.
struct SamplingRule {
  double uniform;     // the number that the draw inverts, in [0, 1)
  double top_p;       // 1: all
  int64_t top_k;      // 0: all
  float temperature;  // 0: greedy
  float log_min_p;    // -inf: all
};

struct SampledRow {
  int64_t token_id;  // undefined if best is not finite
  float best;        // the row's largest logit; NaN if the row has one
  float level;       // the candidates had (logit - best) / temperature >= level
};

// The candidates of top-p.
class Candidates {
 public:
  struct Candidate {
    uint32_t distance;  // from the best logit: the bits of a non-negative float, which have the same order
    float weight;
  };

  explicit Candidates(Candidate* memory) : found_(memory) {}

  void clear() { count_ = 0, mass_ = 0; }
  void add(float scaled, float weight) {
    found_[count_++] = {__builtin_bit_cast(uint32_t, 0.0f - scaled), weight};
    mass_ += weight;
  }
  double mass() const { return mass_; }

  // The highest level at which the tokens that reach it have the wanted mass, or the lowest level if rounding errors
  // keep the sum below it. A radix selection by eight bits of the distance at a time: the weights are summed by these
  // bits, and only the candidates of the sum that reaches the mass go on.
  float level_of(double wanted) {
    double before = 0;
    for (int shift = 24; shift >= 0 && count_ > 1; shift -= 8) {
      double masses[256] = {};
      uint32_t farthest = 0;
      for (int64_t i = 0; i < count_; i++) {
        const uint32_t digit = found_[i].distance >> shift & 255;
        masses[digit] += found_[i].weight;
        if (digit > farthest) farthest = digit;
      }
      uint32_t reached = 0;
      while (reached < farthest && before + masses[reached] < wanted) before += masses[reached++];
      int64_t left = 0;
      for (int64_t i = 0; i < count_; i++) {
        found_[left] = found_[i];
        left += (found_[i].distance >> shift & 255) == reached;
      }
      count_ = left;
    }
    return -__builtin_bit_cast(float, found_[0].distance);
  }

 private:
  Candidate* found_;
  int64_t count_ = 0;
  double mass_ = 0;
};

// A row of logits, less the best one, divided by the temperature.
struct ScaledRow {
  const float* logits;
  int64_t size;
  float best, temperature;
  const float* maxima;  // of its parts

  float scaled(float logit) const { return (logit - best) / temperature; }
  bool reaches(int64_t part, float level) const { return scaled(maxima[part]) >= level; }
  f32x16 scaled_at(int64_t at) const { return (load_first(logits + at, size - at) - best) / temperature; }

  // The weights of sixteen tokens: 0 below the level, and beyond the row's end.
  f32x16 weights(f32x16 scaled, int64_t at, float level) const {
    return keep_first(scaled >= level ? exp(scaled) : f32x16{}, size - at);
  }

  // The sum of the weights of the tokens that reach the level; `sums` gets those of each part.
  double weigh(float level, double* sums) const {
    constexpr float kWeightless = -88.0f;  // exp() is 0 below
    if (level < kWeightless) level = kWeightless;
    double total = 0;
    for (int64_t at = 0; at < size; at += kPart) {
      f32x16 sum_of_part{};
      if (reaches(at / kPart, level)) {
        for (int64_t i = at; i < at + kPart && i < size; i += kLanes) sum_of_part += weights(scaled_at(i), i, level);
      }
      total += sums[at / kPart] = sum(sum_of_part);
    }
    return total;
  }

  // The level above which tokens have the share `top_p` of the total weight. It is nearly always close to the best.
  float top_p_level(double top_p, double* sums, Candidates& candidates) const {
    const double wanted = top_p > 0 ? top_p * weigh(-__builtin_inff(), sums) : __DBL_MIN__;  // keeps the best
    for (float nearby = -8.0f; candidates.mass() < wanted && nearby >= -128.0f; nearby *= 2) {
      candidates.clear();
      for (int64_t at = 0; at < size; at += kLanes) {
        if (!reaches(at / kPart, nearby)) continue;
        const f32x16 scaled = scaled_at(at), weight = weights(scaled, at, nearby);
        for (uint32_t hits = bits(weight > 0.0f); hits != 0; hits &= hits - 1) {
          const int lane = __builtin_ctz(hits);
          candidates.add(scaled[lane], weight[lane]);
        }
      }
    }
    return candidates.level_of(wanted);
  }

  // The first token that reaches the level and at which the cumulative distribution exceeds `uniform`.
  int64_t draw(double uniform, float level, double* sums) const {
    const double target = uniform * weigh(level, sums);
    // Tokens of weight zero are never drawn, whatever the rounding of the sum.
    double before = 0, through = 0;
    int64_t part = -1, token_id = -1;
    for (int64_t p = 0; p * kPart < size && (part < 0 || through <= target); p++) {
      if (sums[p] == 0) continue;
      part = p;
      before = through;
      through += sums[p];
    }
    for (int64_t at = part * kPart; at < size && at < (part + 1) * kPart; at += kLanes) {
      const f32x16 weight = weights(scaled_at(at), at, level);
      for (uint32_t hits = bits(weight > 0.0f); hits != 0; hits &= hits - 1) {
        token_id = at + __builtin_ctz(hits);
        if ((before += weight[token_id - at]) > target) return token_id;
      }
    }
    return token_id;
  }
};

inline SampledRow sample_row(const float* row, int64_t size, const SamplingRule& rule, uint64_t* keys, float* maxima,
                             double* sums, Candidates candidates) {
  const int64_t k = rule.temperature > 0 && rule.top_k < size ? rule.top_k : 0;
  BestK best_k(keys, k);
  const RowScan found = scan_row(row, size, k > 0 ? &best_k : nullptr, maxima);
  SampledRow sampled{found.best_id, found.best, -__builtin_inff()};
  if (!(rule.temperature > 0) || !__builtin_isfinite(found.best)) return sampled;
  const ScaledRow scaled{row, size, found.best, rule.temperature, maxima};
  if (k > 0 && rule.top_p < 1.0) {
    for (int64_t i = 0; i < best_k.count(); i++) {
      const float value = scaled.scaled(best_k.value(i));
      candidates.add(value, exp(value));
    }
    sampled.level = candidates.level_of(rule.top_p * candidates.mass());
  } else if (k > 0) {
    sampled.level = scaled.scaled(best_k.threshold());
  } else if (rule.top_p < 1.0) {
    sampled.level = scaled.top_p_level(rule.top_p, sums, candidates);
  }
  if (rule.log_min_p > sampled.level) sampled.level = rule.log_min_p < 0 ? rule.log_min_p : 0.0f;  // keeps the best
  sampled.token_id = scaled.draw(rule.uniform, sampled.level, sums);
  return sampled;
}

// Samples rows [num_rows, size] of logits, each by its rule. The result of a row depends only on its logits and its
// rule. False: out of memory.
inline bool sample_logits(const float* logits, int64_t num_rows, int64_t size, const SamplingRule* rules,
                          SampledRow* sampled) {
  int64_t most_k = 0;
  for (int64_t r = 0; r < num_rows; r++) most_k = rules[r].top_k > most_k ? rules[r].top_k : most_k;
  const size_t keys = (size_t)(most_k < size ? most_k : size), parts = (size_t)((size + kPart - 1) / kPart);
  using Candidate = Candidates::Candidate;
  Scratch scratch(Scratch::bytes_of<uint64_t>(keys) + Scratch::bytes_of<float>(parts) +
                  Scratch::bytes_of<double>(parts) + Scratch::bytes_of<Candidate>((size_t)size));
  if (!scratch) return false;
  uint64_t* const keys_of_best = scratch.take<uint64_t>(keys);
  float* const maxima = scratch.take<float>(parts);
  double* const sums = scratch.take<double>(parts);
  const Candidates candidates(scratch.take<Candidate>((size_t)size));
  for (int64_t r = 0; r < num_rows; r++) {
    sampled[r] = sample_row(logits + r * size, size, rules[r], keys_of_best, maxima, sums, candidates);
  }
  return true;
}

}  // namespace genserve
