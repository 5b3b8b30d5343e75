// tiles.hpp: what the tiles of all weight formats share: the rows that they read, and what they prefetch.
#pragma once

#include "instruction_set.hpp"

namespace genserve {

constexpr int kPanel = 32;  // outputs of a panel
constexpr int kFewRows = 2;  // so few are bound by memory
constexpr int kPanelsTogether = 4;  // panels in the formats of blocks.hpp that few rows are multiplied by, side by side

// The rows for a tile: int8 with scales and sums, or floats.
struct InputRows {
  const int8_t* q;        // [rows, stride]
  const float* values;    // [rows, stride], where weights are float32
  int64_t stride;
  const float* scales;    // [rows, blocks]
  const int32_t* starts;  // [rows, blocks]: the initial value of the sum of a block
  int64_t blocks;
};

typedef f32x16 Outputs[2];  // 32 outputs of a row

GENSERVE_INLINE int32_t four_bytes(const int8_t* from) {
  int32_t v;
  memcpy(&v, from, sizeof v);
  return v;
}

// The weights that a tile prefetches into the L2 cache; the L1 cache keeps the rows. One or two rows alone are bound by
// memory, and prefetch a little ahead of themselves. Of more rows, each tile prefetches its share of the next panel; a first
// tile that prefetched all of it would wait for memory.
struct Ahead {
  const char* at;
  int64_t step;  // for each 64 bytes of the tile's own weights

  __attribute__((always_inline)) void prefetch() {
    __builtin_prefetch(at, 0, 2);
    at += step;
  }
};

// The groups of 16 outputs that a tile computes together. With one or two rows these are all, so that weights are read in
// the order of memory.
constexpr int groups_of(int rows) { return rows <= kFewRows ? 2 : kGroupsOfTile; }

}  // namespace genserve
