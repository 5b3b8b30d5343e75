// experts.hpp: the operator Experts,  y = residual + sum of weight * expert(norm(x)) over the experts that a row chooses.
//
//     x -- norm, router -- choose top_k --.
//     x -- norm, shared inner -- shared down      sorted by expert -- inner -- down --+ y
//
// The router is a Linear in float32. Rows are sorted by the experts that they choose, so that the panels of an expert are
// read once for all of its rows; the panels, the rows and the tiles are those of Linear. All experts have the same sizes and
// formats: their weights are one tensor, the panels of one expert after those of the other.
//
// The bits of an output depend only on its row: experts are added in the order of their indices, after the residual and the
// shared expert, and an expert's products have the bits of a Linear.
#pragma once

#include "linear.hpp"

namespace genserve {

// How scores follow from the router's logits, and weights from the scores:
//     softmax           over all experts
//     sigmoid           of each
//     softmax_of_top    the logits are the scores; weights are the softmax over those that are chosen
//     sigmoid_of_top    the logits are the scores; weights are the sigmoids of those that are chosen
//     sparsemixer       the two best; the weight of each is its softmax over those experts whose logits are close to it
//                       (Liu et al., "GRIN" (2024), without noise)
enum class Score : int32_t { kSoftmax, kSigmoid, kSoftmaxOfTop, kSparseMixer, kSigmoidOfTop };

struct RouterAttributes {
  int64_t num_experts;
  int64_t top_k;
  Score score;
  int32_t num_groups;   // consecutive experts form groups, of which the best are kept; 0: no groups
  int32_t kept_groups;
  int32_t group_top;    // a group's score is the sum of this many of its best scores: 1 or 2
  float normalise;      // weights are divided by their sum + this; negative: they are not
  float scale;          // multiplies the weights
  float jitter;         // of sparsemixer: logits within twice this share of the best are close to it
};

struct ExpertsAttributes {
  RouterAttributes router;
  LinearAttributes inner, down;                // of one expert; `inner` has the norm
  LinearAttributes shared_inner, shared_down;  // in_features 0: no shared expert
  int32_t shared_score;                        // the router's last output is the logit of the shared expert's weight
  int32_t scales_inputs;                       // weights multiply what experts read, not what they return
};

// The operator's inputs, in order.
struct ExpertsInputs {
  Tensor x;                           // [T, hidden] float32
  Tensor router_weight;               // panels in float32: of the experts, and of the shared expert's score
  Tensor inner_weight, down_weight;   // the panels of all experts
  Tensor inner_scales, down_scales;
  Tensor norm_weight, norm_bias;      // [hidden]
  Tensor router_bias;                 // [experts]
  Tensor choice_bias;                 // [experts]: is added to the scores for the choice only
  Tensor inner_bias, down_bias;       // [experts, out_features]
  Tensor shared_inner_weight, shared_inner_scales, shared_inner_bias;
  Tensor shared_down_weight, shared_down_scales, shared_down_bias;
  Tensor residual;                    // [T, hidden]
  Tensor router_norm_weight;          // [hidden]: of the router's norm, if it differs from that of the experts
  Tensor expert_scales;               // [experts]: multiply the weights of the chosen experts
};

constexpr int kMaxGroups = 256;

// Sets the attributes of the parts from those that they share.
inline bool complete(ExpertsAttributes& a, int64_t hidden, int64_t intermediate, int64_t shared, Error& error) {
  typedef long long ll;
  const RouterAttributes& r = a.router;
  const int64_t limit = INT32_MAX / 4;
  if (!is_size(hidden) || !is_size(intermediate) || intermediate > limit || shared < 0 || shared > limit) {
    return error.set("hidden_size %lld, intermediate_size %lld and shared_size %lld make no layer", (ll)hidden,
                     (ll)intermediate, (ll)shared);
  }
  if (r.num_experts < 1 || r.num_experts > 4096 || r.top_k < 1 || r.top_k > r.num_experts) {
    return error.set("top_k is %lld of %lld experts", (ll)r.top_k, (ll)r.num_experts);
  }
  if (r.num_groups != 0) {
    const int64_t size = r.num_groups > 0 ? r.num_experts / r.num_groups : 0;
    if (r.num_groups > kMaxGroups || size * r.num_groups != r.num_experts || r.kept_groups < 1 || r.kept_groups > r.num_groups ||
        r.group_top < 1 || r.group_top > 2 || r.group_top > size || size * r.kept_groups < r.top_k) {
      return error.set("%d of %d groups of %lld experts make no choice of %lld", r.kept_groups, r.num_groups,
                       (ll)r.num_experts, (ll)r.top_k);
    }
  }
  if (r.score == Score::kSparseMixer && r.top_k != 2) return error.set("sparsemixer chooses 2 experts, not %lld", (ll)r.top_k);
  if (a.inner.activation == Activation::kClampedSwiglu && (!a.inner.gated || shared > 0)) {
    return error.set("the activation \"clamped_swiglu\" needs a gate, and no shared expert");
  }
  a.shared_inner.norm = a.inner.norm;
  a.shared_inner.epsilon = a.inner.epsilon;
  a.shared_inner.activation = a.inner.activation;
  a.shared_inner.gated = a.inner.gated;
  a.inner.in_features = a.down.out_features = hidden;
  a.inner.out_features = a.inner.gated ? 2 * intermediate : intermediate;
  a.down.in_features = intermediate;
  a.shared_inner.in_features = shared > 0 ? hidden : 0;
  a.shared_inner.out_features = a.inner.gated ? 2 * shared : shared;
  a.shared_down.in_features = shared;
  a.shared_down.out_features = hidden;
  return true;
}

// Chooses experts by the logits of a row.
class Router {
 public:
  // `scores` is memory for num_experts floats, and as many for the choice.
  Router(const RouterAttributes& a, const float* choice_bias) : a_(a), choice_bias_(choice_bias) {}

  static size_t floats(const RouterAttributes& a) { return 2 * (size_t)a.num_experts; }

  // Writes the chosen experts in the order of their scores, and their weights: [top_k]. Of equal scores, the one of the
  // lowest index is the better; of scores that are not numbers, any.
  void choose(const float* logits, float* memory, int32_t* chosen, float* weights) const {
    const int64_t n = a_.num_experts, k = a_.top_k;
    if (a_.score == Score::kSparseMixer) return mix(logits, chosen, weights);
    float *scores = memory, *choice = memory + n;
    if (a_.score == Score::kSoftmaxOfTop || a_.score == Score::kSigmoidOfTop) {
      memcpy(scores, logits, (size_t)n * sizeof(float));
    } else if (a_.score == Score::kSoftmax) {
      softmax(logits, n, scores);
    } else {
      sigmoid(logits, n, scores);
    }
    for (int64_t i = 0; i < n; i++) choice[i] = scores[i] + (choice_bias_ == nullptr ? 0.0f : choice_bias_[i]);
    if (a_.num_groups > 1) keep_groups(choice);
    for (int64_t j = 0; j < k; j++) {
      chosen[j] = (int32_t)best(choice, n);
      choice[chosen[j]] = kTaken;
      weights[j] = scores[chosen[j]];
    }
    if (a_.score == Score::kSoftmaxOfTop) softmax(weights, k, weights);
    if (a_.score == Score::kSigmoidOfTop) sigmoid(weights, k, weights);
    if (a_.normalise >= 0.0f) {
      float total = 0.0f;
      for (int64_t j = 0; j < k; j++) total += weights[j];
      for (int64_t j = 0; j < k; j++) weights[j] /= total + a_.normalise;
    }
    for (int64_t j = 0; j < k; j++) weights[j] *= a_.scale;
  }

 private:
  static constexpr float kTaken = -__builtin_inff();

  // The first of the highest values; of values that are no numbers, one that is not taken.
  static int64_t best(const float* values, int64_t n) {
    int64_t found = -1;
    for (int64_t i = 0; i < n; i++) {
      if (values[i] == kTaken) continue;
      if (found < 0 || values[i] > values[found]) found = i;
    }
    if (found >= 0) return found;
    return 0;
  }

  static void sigmoid(const float* logits, int64_t n, float* to) {
    for (int64_t i = 0; i < n; i += kLanes) {
      store_first(to + i, 1.0f / (exp(-load_first(logits + i, n - i)) + 1.0f), n - i);
    }
  }

  static void softmax(const float* logits, int64_t n, float* to) {
    float highest = logits[0];
    for (int64_t i = 1; i < n; i++) highest = logits[i] > highest ? logits[i] : highest;
    f32x16 total{};
    for (int64_t i = 0; i < n; i += kLanes) {
      const f32x16 v = keep_first(exp(load_first(logits + i, n - i) - highest), n - i);
      total += v;
      store_first(to + i, v, n - i);
    }
    const float all = sum(total);
    for (int64_t i = 0; i < n; i++) to[i] /= all;
  }

  // Takes the experts of all groups but the best.
  void keep_groups(float* choice) const {
    const int64_t size = a_.num_experts / a_.num_groups;
    float sums[kMaxGroups];
    for (int64_t group = 0; group < a_.num_groups; group++) {
      float first = kTaken, second = kTaken;
      for (int64_t i = group * size; i < (group + 1) * size; i++) {
        if (choice[i] > first) {
          second = first;
          first = choice[i];
        } else if (choice[i] > second) {
          second = choice[i];
        }
      }
      sums[group] = a_.group_top == 2 ? first + second : first;
    }
    bool kept[kMaxGroups] = {};
    for (int i = 0; i < a_.kept_groups; i++) {
      int64_t group = -1;
      for (int64_t g = 0; g < a_.num_groups; g++) {
        if (!kept[g] && (group < 0 || sums[g] > sums[group])) group = g;
      }
      kept[group] = true;
    }
    for (int64_t i = 0; i < a_.num_experts; i++) {
      if (!kept[i / size]) choice[i] = kTaken;
    }
  }

  // The two best of the logits, each with its share among those that are close to it.
  void mix(const float* logits, int32_t* chosen, float* weights) const {
    const int64_t n = a_.num_experts;
    for (int turn = 0; turn < 2; turn++) {
      const auto is_taken = [&](int64_t i) { return turn == 1 && i == chosen[0]; };
      int64_t found = -1;
      for (int64_t i = 0; i < n; i++) {
        if (!is_taken(i) && (found < 0 || logits[i] > logits[found])) found = i;
      }
      const float highest = logits[found];
      float total = 0.0f;
      for (int64_t i = 0; i < n; i++) {
        const float size = __builtin_fabsf(logits[i]), factor = size > highest ? size : highest;
        if (!is_taken(i) && !((highest - logits[i]) / factor > 2.0f * a_.jitter)) total += exp(logits[i] - highest);
      }
      chosen[turn] = (int32_t)found;
      weights[turn] = a_.scale / total;
    }
  }

  const RouterAttributes& a_;
  const float* choice_bias_;
};

// The activation of gpt-oss: a gate up to 7 times the sigmoid of 1.702 times itself, and a value from -7 to 7, plus 1.
GENSERVE_INLINE f32x16 clamped_swiglu(f32x16 gate, f32x16 up) {
  const f32x16 limit = broadcast(7.0f), g = min(limit, gate), u = max(-limit, min(limit, up));
  return g / (exp(-1.702f * g) + 1.0f) * (u + 1.0f);
}

class Experts {
 public:
  Experts(const ExpertsAttributes& attributes, const ExpertsInputs& inputs) : a_(attributes), in_(inputs) {
    const bool scored = a_.shared_score != 0;
    router_a_ = a_.inner;
    router_a_.weight_format = WeightFormat::kFloat32;
    router_a_.activation = Activation::kNone;
    router_a_.gated = 0;
    router_a_.out_features = a_.router.num_experts + (scored ? 1 : 0);
    const bool has_own_norm = in_.router_norm_weight.present();
    router_ = {in_.x, in_.router_weight, {}, {}, has_own_norm ? in_.router_norm_weight : in_.norm_weight,
               has_own_norm ? Tensor{} : in_.norm_bias, {}, {}};
    inner_ = {in_.x, in_.inner_weight, in_.inner_scales, {}, in_.norm_weight, in_.norm_bias, {}, {}};
    down_ = {{}, in_.down_weight, in_.down_scales, {}, {}, {}, {}, {}};
    shared_inner_ = {in_.x,           in_.shared_inner_weight, in_.shared_inner_scales, in_.shared_inner_bias,
                     in_.norm_weight, in_.norm_bias,           {},                      {}};
    shared_down_ = {{}, in_.shared_down_weight, in_.shared_down_scales, in_.shared_down_bias, {}, {}, {}, {}};
  }

  // Whether all required weights are given.
  bool has_weights() const {
    return genserve::has_weights(router_a_, router_) && genserve::has_weights(a_.inner, inner_) &&
           genserve::has_weights(a_.down, down_) &&
           (!has_shared() || (genserve::has_weights(a_.shared_inner, shared_inner_) &&
                              genserve::has_weights(a_.shared_down, shared_down_)));
  }

  // Whether the weights match the attributes.
  bool check_weights(Error& error) const {
    const int64_t count = a_.router.num_experts;
    const Type f32 = Type::kFloat32;
    if (a_.inner.more[0].outputs != 0 || a_.down.more[0].outputs != 0) {
      return error.set("the weights of experts have one format");
    }
    if (!has_shared() && (a_.shared_score || in_.shared_inner_weight.present() || in_.shared_down_weight.present())) {
      return error.set("weights or a score of a shared expert are given and shared_size is 0");
    }
    return error.in("router", genserve::check_weights(router_a_, router_, error)) &&
           error.in("inner", genserve::check_weights(stacked(a_.inner, count), inner_, error)) &&
           error.in("down", genserve::check_weights(stacked(a_.down, count), down_, error)) &&
           (!has_shared() ||
            (error.in("shared inner", genserve::check_weights(a_.shared_inner, shared_inner_, error)) &&
             error.in("shared down", genserve::check_weights(a_.shared_down, shared_down_, error)))) &&
           check_optional(in_.router_bias, "router_bias", f32, error, count) &&
           check_optional(in_.choice_bias, "choice_bias", f32, error, count) &&
           check_optional(in_.expert_scales, "expert_scales", f32, error, count) &&
           check_optional(in_.inner_bias, "inner_bias", f32, error, count, a_.inner.out_features) &&
           check_optional(in_.down_bias, "down_bias", f32, error, count, a_.down.out_features);
  }

  bool check_rows(Error& error) const {
    return genserve::check_rows(a_.inner, inner_, error) &&
           check_optional(in_.residual, "residual", Type::kFloat32, error, in_.x.shape[0], a_.down.out_features);
  }

  // Computes y [T, hidden] from checked inputs.
  bool compute(float* y, const Threads& threads, Error& error) {
    if (in_.x.shape[0] == 0) return true;
    const int64_t rows = in_.x.shape[0], hidden = a_.inner.in_features, shared = a_.shared_down.in_features;
    const int64_t logits_width = router_a_.out_features;
    Scratch scratch(Scratch::bytes_of<float>((size_t)(rows * logits_width)) +
                    Scratch::bytes_of<float>((size_t)(rows * shared)) +
                    Scratch::bytes_of<float>(has_shared() ? (size_t)(rows * hidden) : 0));
    if (!scratch) return out_of_memory(error);
    float* logits = scratch.take<float>((size_t)(rows * logits_width));
    float* expanded = scratch.take<float>((size_t)(rows * shared));
    float* added = scratch.take<float>(has_shared() ? (size_t)(rows * hidden) : 0);
    shared_down_.x = {expanded, Type::kFloat32, 2, {rows, shared}};
    Linear router(router_a_, router_, logits);
    Linear shared_inner(a_.shared_inner, shared_inner_, expanded), shared_down(a_.shared_down, shared_down_, added);
    Routed routed(a_, in_, inner_, down_, logits, has_shared() ? added : nullptr, y);
    const int count = threads.count;
    // In the reverse order of their destructors: see Scratch.
    if (!router.open(count, error)) return false;
    if (has_shared() && (!shared_inner.open(count, error) || !shared_down.open(count, error))) return false;
    if (!routed.open(count, error)) return false;
    Phase phases[3 * Linear::kPhases + Routed::kPhases]{};
    const Team first(phases), second = first.from(Linear::kPhases), third = second.from(Linear::kPhases),
               last = third.from(Linear::kPhases);
    auto work = [&](size_t index) {
      Prefetch weights = router.first_weights(index);
      router.work(first, index, weights);
      if (has_shared()) {
        weights = shared_inner.first_weights(index);
        shared_inner.work(second, index, weights);
        weights = shared_down.first_weights(index);
        shared_inner.wait(second, weights);
        shared_down.work(third, index, weights);
        shared_down.wait(third, weights);
      }
      router.wait(first, weights);
      routed.work(last, index);
    };
    threads.run(threads.count, work);
    return true;
  }

 private:
  // A part of the rows of an expert: the slots [from, to) of the sorted rows.
  struct Group {
    int64_t expert, from, to;
  };

  // The part after the router's logits: sorts the rows by expert, and multiplies them.
  class Routed {
   public:
    static constexpr int kPhases = 6;  // choice, order, rows, inner, inner rows, down

    Routed(const ExpertsAttributes& a, const ExpertsInputs& in, const LinearInputs& inner, const LinearInputs& down,
           float* logits, const float* shared, float* y)
        : a_(a),
          in_(in),
          inner_sizes_(a.inner),
          down_sizes_(a.down),
          inner_rows_(a.inner, inner, inner_sizes_),
          down_rows_(a.down, down, down_sizes_),
          logits_(logits),
          shared_(shared),
          y_(y),
          num_rows_(in.x.shape[0]),
          slots_(num_rows_ * a.router.top_k),
          most_groups_(a.router.num_experts + slots_ / kChunkRows + 1) {}

    bool open(int num_threads, Error& error) {
      num_threads_ = num_threads;
      down_as_they_are_ = a_.down.weight_format == WeightFormat::kFloat32;
      const size_t slots = (size_t)slots_, rows = (size_t)num_rows_, down_rows = down_as_they_are_ ? 0 : slots;
      const size_t expanded = slots * (size_t)a_.down.in_features, choices = rows * Router::floats(a_.router);
      scratch_.open(inner_rows_.bytes((int64_t)slots) + down_rows_.bytes((int64_t)down_rows) +
                    Scratch::bytes_of<float>(expanded) + Scratch::bytes_of<float>(choices) +
                    2 * Scratch::bytes_of<int32_t>(slots) + 2 * Scratch::bytes_of<float>(slots) +
                    Scratch::bytes_of<int32_t>(slots) + Scratch::bytes_of<Group>((size_t)most_groups_) +
                    Scratch::bytes_of<int64_t>((size_t)a_.router.num_experts + 1));
      if (!scratch_) return error.set("out of memory for %lld rows", (long long)num_rows_);
      inner_rows_.open(scratch_, (int64_t)slots);
      down_rows_.open(scratch_, (int64_t)down_rows);
      expanded_ = scratch_.take<float>(expanded);
      choices_ = scratch_.take<float>(choices);
      chosen_ = scratch_.take<int32_t>(slots);
      weights_ = scratch_.take<float>(slots);
      slot_of_ = scratch_.take<int32_t>(slots);
      row_of_ = scratch_.take<int32_t>(slots);
      weight_of_ = scratch_.take<float>(slots);
      groups_ = scratch_.take<Group>((size_t)most_groups_);
      starts_ = scratch_.take<int64_t>((size_t)a_.router.num_experts + 1);
      row_chunks_ = (num_rows_ + 3) / 4;
      slot_chunks_ = (slots_ + 3) / 4;
      const int64_t mean_rows = slots_ / a_.router.num_experts, inner_panels = inner_sizes_.panels * a_.router.top_k;
      inner_together_ = panels_together(a_.inner.weight_format, mean_rows, inner_panels, num_threads);
      down_together_ = panels_together(a_.down.weight_format, mean_rows, down_sizes_.panels, num_threads);
      return true;
    }

    void work(Team team, size_t index) {
      Prefetch none;
      team.take(0, row_chunks_, [&](int64_t chunk) {
        for (int64_t row = 4 * chunk; row < smaller(4 * chunk + 4, num_rows_); row++) choose(row);
      });
      team.wait(0, row_chunks_, none);
      team.take(1, 1, [&](int64_t) { sort(); });
      team.wait(1, 1, none);
      team.take(2, row_chunks_, [&](int64_t chunk) {
        for (int64_t row = 4 * chunk; row < smaller(4 * chunk + 4, num_rows_); row++) prepare(row);
      });
      team.wait(2, row_chunks_, none);
      const int64_t inner_chunks = chunks_of(inner_sizes_, inner_together_), chunks = num_groups_ * inner_chunks;
      team.take_ranges(3, chunks, index, num_threads_, [&](int64_t chunk) { multiply_inner(chunk, inner_chunks); });
      team.wait(3, chunks, none);
      if (!down_as_they_are_) {
        team.take(4, slot_chunks_, [&](int64_t chunk) {
          for (int64_t slot = 4 * chunk; slot < smaller(4 * chunk + 4, slots_); slot++) {
            down_rows_.prepare(slot, expanded_ + slot * a_.down.in_features);
          }
        });
        team.wait(4, slot_chunks_, none);
      }
      team.take(5, chunks_of(down_sizes_, down_together_), [&](int64_t chunk) {
        multiply_down(chunk * down_together_, smaller((chunk + 1) * down_together_, down_sizes_.panels));
      });
    }

   private:
    void choose(int64_t row) {
      const int64_t experts = a_.router.num_experts, k = a_.router.top_k;
      float* logits = logits_ + row * (experts + (a_.shared_score ? 1 : 0));
      if (in_.router_bias.present()) {
        for (int64_t i = 0; i < experts; i++) logits[i] += in_.router_bias.as<float>()[i];
      }
      Router(a_.router, in_.choice_bias.as<float>())
          .choose(logits, choices_ + row * (int64_t)Router::floats(a_.router), chosen_ + row * k, weights_ + row * k);
      if (!in_.expert_scales.present()) return;
      for (int64_t j = 0; j < k; j++) weights_[row * k + j] *= in_.expert_scales.as<float>()[chosen_[row * k + j]];
    }

    // Gives each choice of a row a slot: by expert, and then by row.
    void sort() {
      const int64_t experts = a_.router.num_experts, k = a_.router.top_k;
      memset(starts_, 0, (size_t)(experts + 1) * sizeof *starts_);
      for (int64_t i = 0; i < slots_; i++) starts_[chosen_[i] + 1]++;
      num_groups_ = 0;
      for (int64_t expert = 0; expert < experts; expert++) {
        const int64_t from = starts_[expert], count = starts_[expert + 1], parts = (count + kChunkRows - 1) / kChunkRows;
        for (int64_t part = 0; part < parts; part++) {
          groups_[num_groups_++] = {expert, from + count * part / parts, from + count * (part + 1) / parts};
        }
        starts_[expert + 1] += from;
      }
      for (int64_t i = 0; i < slots_; i++) {
        const int64_t slot = starts_[chosen_[i]]++;
        slot_of_[i] = (int32_t)slot;
        row_of_[slot] = (int32_t)(i / k);
        weight_of_[slot] = weights_[i];
      }
    }

    // Prepares a row for the experts that it chose.
    void prepare(int64_t row) {
      const int32_t* slots = slot_of_ + row * a_.router.top_k;
      inner_rows_.prepare(slots[0], in_.x.as<float>() + row * a_.inner.in_features);
      for (int64_t j = 1; j < a_.router.top_k; j++) inner_rows_.copy(slots[0], slots[j]);
    }

    static int64_t chunks_of(const LinearSizes& sizes, int64_t together) { return (sizes.panels + together - 1) / together; }

    // Multiplies panels [first, end) of an expert by the rows of a group, and calls finish(panel, row, height, outputs).
    // `next` is the panel of all experts' that is read afterwards.
    template <class Finish>
    void multiply(const LinearAttributes& a, const LinearSizes& sizes, const Tensor& weight, const Tensor& scales,
                  const PreparedRows& prepared, const Group& group, int64_t first, int64_t end, int64_t next, Finish&& finish,
                  const float* values = nullptr) {
      const int64_t start = group.expert * sizes.panels;
      const int64_t rows = group.to - group.from;
      if (end - first == kPanelsTogether && rows <= kFewRows) {
        const uint8_t* const panels = weight.as<uint8_t>();
        return multiply_panels_of_blocks(a.weight_format, panels + (start + first) * sizes.panel_bytes, sizes.panel_bytes,
                                         prepared.blocks_from(group.from), sizes.blocks, rows,
                                         panels + next * sizes.panel_bytes,
                                         [&](int i, const Outputs* y) { finish(first + i, int64_t{0}, (int)rows, y); });
      }
      for (int64_t panel = first; panel < end; panel++) {
        multiply_rows(a, sizes, weight, scales, prepared, group.from, rows, start + panel,
                      [&](int64_t row, int height, const Outputs* y) { finish(panel, row, height, y); }, values);
      }
    }

    void multiply_inner(int64_t chunk, int64_t chunks) {
      const auto panel_of = [&](int64_t number) { return number % chunks * inner_together_; };
      const Group& group = groups_[chunk / chunks];
      const int64_t last = num_groups_ * chunks - 1, after = smaller(chunk + 1, last);
      const int64_t first = panel_of(chunk), end = smaller(first + inner_together_, inner_sizes_.panels);
      multiply(a_.inner, inner_sizes_, in_.inner_weight, in_.inner_scales, inner_rows_, group, first, end,
               groups_[after / chunks].expert * inner_sizes_.panels + panel_of(after),
               [&](int64_t panel, int64_t row, int height, const Outputs* y) { finish_inner(group, panel, row, height, y); });
    }

    void finish_inner(const Group& group, int64_t panel, int64_t row, int height, const Outputs* y) {
      const int64_t width = a_.inner.gated ? kLanes : kPanel, outputs = inner_sizes_.outputs;
      const float* bias = in_.inner_bias.present()
                              ? in_.inner_bias.as<float>() + group.expert * a_.inner.out_features
                              : nullptr;
      for (int64_t i = 0; i < width / kLanes; i++) {
        const int64_t first = panel * width + i * kLanes, count = outputs - first;
        if (count <= 0) break;
        for (int r = 0; r < height; r++) {
          f32x16 v = y[r][i], up = y[r][1];
          if (a_.scales_inputs) {  // the products are linear in what they read
            v *= weight_of_[group.from + row + r];
            up *= weight_of_[group.from + row + r];
          }
          if (bias != nullptr) {
            v += load_first(bias + first, count);
            if (a_.inner.gated) up += load_first(bias + outputs + first, count);
          }
          if (a_.inner.activation == Activation::kClampedSwiglu) {
            v = clamped_swiglu(v, up);
          } else {
            v = activate(a_.inner.activation, v);
            if (a_.inner.gated) v *= up;
          }
          store_first(expanded_ + (group.from + row + r) * outputs + first, v, count);
        }
      }
    }

    // The residual, the shared expert and the experts' outputs, in this order, of panels [from, end).
    void multiply_down(int64_t from, int64_t end) {
      const int64_t hidden = a_.down.out_features;
      for (int64_t row = 0; row < num_rows_; row++) {
        for (int64_t first = from * kPanel; first < smaller(end * kPanel, hidden); first += kLanes) {
          const int64_t count = hidden - first, place = row * hidden + first;
          f32x16 v{};
          if (in_.residual.present()) v = load_first(in_.residual.as<float>() + place, count);
          if (shared_ != nullptr) v = fma(weight_of_shared(row), load_first(shared_ + place, count), v);
          store_first(y_ + place, v, count);
        }
      }
      for (int64_t g = 0; g < num_groups_; g++) {
        const Group& group = groups_[g];
        const int64_t next = g + 1 < num_groups_ ? groups_[g + 1].expert * down_sizes_.panels + from
                                                 : groups_[0].expert * down_sizes_.panels + end;
        multiply(a_.down, down_sizes_, in_.down_weight, in_.down_scales, down_rows_, group, from, end, next,
                 [&](int64_t panel, int64_t row, int height, const Outputs* y) { finish_down(group, panel, row, height, y); },
                 down_as_they_are_ ? expanded_ : nullptr);
      }
    }

    void finish_down(const Group& group, int64_t panel, int64_t row, int height, const Outputs* y) {
      const int64_t hidden = a_.down.out_features;
      const float* bias = in_.down_bias.present() ? in_.down_bias.as<float>() + group.expert * hidden : nullptr;
      for (int r = 0; r < height; r++) {
        const int64_t slot = group.from + row + r;
        for (int64_t i = 0; i < kPanel / kLanes; i++) {
          const int64_t first = panel * kPanel + i * kLanes, count = hidden - first;
          if (count <= 0) break;
          float* to = y_ + row_of_[slot] * hidden + first;
          const f32x16 v = bias == nullptr ? y[r][i] : y[r][i] + load_first(bias + first, count);
          const float weight = a_.scales_inputs ? 1.0f : weight_of_[slot];
          store_first(to, fma(weight, v, load_first(to, count)), count);
        }
      }
    }

    float weight_of_shared(int64_t row) const {
      if (!a_.shared_score) return 1.0f;
      const int64_t experts = a_.router.num_experts;
      return 1.0f / (exp(-logits_[row * (experts + 1) + experts]) + 1.0f);
    }

    const ExpertsAttributes& a_;
    const ExpertsInputs& in_;
    const LinearSizes inner_sizes_, down_sizes_;
    PreparedRows inner_rows_, down_rows_;  // by slot
    float* logits_;                        // [rows, experts], and the logit of the shared expert's weight
    const float* shared_;                  // the outputs of the shared expert; null: there is none
    float* y_;
    const int64_t num_rows_, slots_, most_groups_;
    int num_threads_ = 1;
    bool down_as_they_are_ = false;        // the rows of `down` are read without preparation
    int64_t row_chunks_ = 0, slot_chunks_ = 0, num_groups_ = 0;
    int64_t inner_together_ = 1, down_together_ = 1;  // panels that a thread multiplies side by side
    Scratch scratch_;
    float* expanded_ = nullptr;            // [slots, intermediate]
    float* choices_ = nullptr;
    int32_t* chosen_ = nullptr;            // [rows, top_k]: experts
    float* weights_ = nullptr;             // [rows, top_k]
    int32_t* slot_of_ = nullptr;           // [rows, top_k]
    int32_t* row_of_ = nullptr;            // [slots]
    float* weight_of_ = nullptr;           // [slots]
    Group* groups_ = nullptr;              // in the order of the experts
    int64_t* starts_ = nullptr;            // [experts + 1]: the next slot of each expert
  };

  bool has_shared() const { return a_.shared_down.in_features > 0; }
  static bool out_of_memory(Error& error) { return error.set("out of memory for the rows of experts"); }

  const ExpertsAttributes& a_;
  const ExpertsInputs& in_;
  LinearAttributes router_a_;
  LinearInputs router_, inner_, down_, shared_inner_, shared_down_;
};

}  // namespace genserve
