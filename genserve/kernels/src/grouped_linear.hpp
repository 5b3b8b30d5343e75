// grouped_linear.hpp: the operator GroupedLinear,  y[:, g] = x[:, g] W_g^T  for each group g of the columns.
//
// In latent attention the groups are heads. Weights are the panels of one group after those of the other, as for Experts.
#pragma once

#include "linear.hpp"

namespace genserve {

struct GroupedLinearAttributes {
  LinearAttributes group;  // in_features, out_features and weight_format of one group
  int64_t num_groups;
};

struct GroupedLinearInputs {
  Tensor x;  // [T, groups * in_features] float32
  Tensor weight, scales;
};

class GroupedLinear {
 public:
  GroupedLinear(const GroupedLinearAttributes& attributes, const GroupedLinearInputs& inputs)
      : a_(attributes),
        in_(inputs),
        weights_{{}, inputs.weight, inputs.scales, {}, {}, {}, {}, {}},
        sizes_(attributes.group),
        rows_(a_.group, weights_, sizes_) {}

  bool has_weights() const { return genserve::has_weights(a_.group, weights_); }

  bool check_weights(Error& error) const {
    if (a_.num_groups < 1 || a_.num_groups > 4096) return error.set("num_groups is %lld", (long long)a_.num_groups);
    if (!is_size(a_.group.in_features) || !is_size(a_.group.out_features)) {
      return error.set("in_features and out_features of a group are missing");
    }
    if (a_.group.more[0].outputs != 0) return error.set("the weights of groups have one format");
    return genserve::check_weights(stacked(a_.group, a_.num_groups), weights_, error);
  }

  bool check_rows(Error& error) const {
    return check(in_.x, "x", Type::kFloat32, error, kAny, a_.num_groups * a_.group.in_features);
  }

  int64_t outputs() const { return a_.num_groups * a_.group.out_features; }

  // Computes y [T, groups * out_features] from checked inputs.
  bool compute(float* y, const Threads& threads, Error& error) {
    const int64_t rows = in_.x.shape[0], groups = a_.num_groups, inputs = a_.group.in_features;
    if (rows == 0) return true;
    Scratch scratch(rows_.bytes(rows * groups));
    if (!scratch) return error.set("out of memory for %lld rows", (long long)rows);
    rows_.open(scratch, rows * groups);
    const int64_t parts = (rows + kChunkRows - 1) / kChunkRows, chunks = groups * sizes_.panels * parts;
    Phase phases[2]{};
    auto work = [&](size_t index) {
      Team team(phases);
      Prefetch none;
      team.take(0, rows, [&](int64_t row) {
        for (int64_t group = 0; group < groups; group++) {
          rows_.prepare(group * rows + row, in_.x.as<float>() + (row * groups + group) * inputs);
        }
      });
      team.wait(0, rows, none);
      team.take_ranges(1, chunks, index, threads.count, [&](int64_t chunk) {
        const int64_t part = chunk % parts, panel = chunk / parts, group = panel / sizes_.panels;
        const int64_t first = rows * part / parts, end = rows * (part + 1) / parts;
        const int64_t at = panel % sizes_.panels * kPanel, outputs = a_.group.out_features;
        multiply_rows(a_.group, sizes_, in_.weight, in_.scales, rows_, group * rows + first, end - first, panel,
                      [&](int64_t row, int height, const Outputs* found) {
          for (int r = 0; r < height; r++) {
            float* to = y + ((first + row + r) * groups + group) * outputs;
            for (int64_t i = 0; i < 2 && at + i * kLanes < outputs; i++) {
              store_first(to + at + i * kLanes, found[r][i], outputs - at - i * kLanes);
            }
          }
        });
      });
    };
    threads.run(threads.count, work);
    return true;
  }

 private:
  const GroupedLinearAttributes& a_;
  const GroupedLinearInputs& in_;
  const LinearInputs weights_;
  const LinearSizes sizes_;
  PreparedRows rows_;
};

}  // namespace genserve
