// states.hpp: the states of sequences, which CausalConv and LinearAttention keep beside the paged cache.
//
// A slot holds the states of one sequence after some of its tokens. A row of the batch is a sequence: its new tokens begin
// from the state of its source slot, and the state after the last of them goes to its target slot. A source may be the
// target, or the source of several rows; a target belongs to one row, and no other row reads it.
#pragma once

#include "tensor.hpp"

namespace genserve {

constexpr int32_t kZeroState = -1;  // the source of a sequence without earlier tokens

// The inputs of an operator that describe the sequences and their states, in order.
struct StateInputs {
  Tensor cumulative_sequence_length;  // [B + 1] int32: row b has the tokens [b] to [b + 1] - 1
  Tensor state_source, state_target;  // [B] int32: slots
  Tensor past_state;                  // [slots, ...] float32; the output is the same memory
};

// Whether the inputs describe `num_tokens` tokens, and states of the given sizes.
template <class... Sizes>
bool check_states(const StateInputs& in, int64_t num_tokens, Error& error, Sizes... sizes) {
  const int64_t batch = in.state_source.present() && in.state_source.rank == 1 ? in.state_source.shape[0] : 0;
  if (!check(in.state_source, "state_source", Type::kInt32, error, kAny) ||
      !check(in.state_target, "state_target", Type::kInt32, error, batch) ||
      !check(in.cumulative_sequence_length, "cumulative_sequence_length", Type::kInt32, error, batch + 1) ||
      !check(in.past_state, "past_state", Type::kFloat32, error, kAny, sizes...)) {
    return false;
  }
  const int32_t* starts = in.cumulative_sequence_length.as<int32_t>();
  bool ascends = starts[0] == 0 && starts[batch] == num_tokens;
  for (int64_t row = 0; row < batch; row++) ascends = ascends && starts[row] < starts[row + 1];
  if (!ascends) return error.set("cumulative_sequence_length does not ascend from 0 to the number of tokens");
  const int64_t slots = in.past_state.shape[0];
  const int32_t *sources = in.state_source.as<int32_t>(), *targets = in.state_target.as<int32_t>();
  for (int64_t row = 0; row < batch; row++) {
    const int32_t source = sources[row], target = targets[row];
    if (source < kZeroState || source >= slots || target < 0 || target >= slots) {
      return error.set("row %lld reads slot %d and writes slot %d of %lld", (long long)row, source, target, (long long)slots);
    }
  }
  for (int64_t row = 0; row < batch; row++) {
    for (int64_t other = 0; other < batch; other++) {
      if (other == row) continue;
      if (targets[other] == targets[row]) return error.set("rows %lld and %lld write the same slot", (long long)row, (long long)other);
      if (sources[other] == targets[row]) {
        return error.set("row %lld reads a slot that row %lld writes", (long long)other, (long long)row);
      }
    }
  }
  return true;
}

// A sequence of the batch.
struct StateRow {
  int64_t first, end;  // its tokens
  const float* from;   // the state of its source slot; null: zeros
  float* to;           // that of its target slot

  StateRow(const StateInputs& in, int64_t row, int64_t slot_size) {
    const int32_t* starts = in.cumulative_sequence_length.as<int32_t>();
    const int32_t source = in.state_source.as<int32_t>()[row], target = in.state_target.as<int32_t>()[row];
    first = starts[row];
    end = starts[row + 1];
    from = source == kZeroState ? nullptr : in.past_state.as<float>() + source * slot_size;
    to = in.past_state.as<float>() + target * slot_size;
  }
};

}  // namespace genserve
