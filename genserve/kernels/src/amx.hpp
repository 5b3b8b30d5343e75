// amx.hpp: products of many rows on AMX, whose registers are matrices.
//
//     sums [16 rows, 16 outputs] += rows [16, 64 inputs] x weights [64 inputs, 16 outputs]
//
// is one instruction, with eight times the products per cycle of vpdpbusd. It reads weights of 8 bits in their order in a
// panel. Sixteen rows cost as much as one, so that a tile of few rows stays with vectors; what follows the last row in memory
// is multiplied in vain. Sums of integers are exact in any order, so the bits are those of dot().
//
// Blocks of 32 inputs do not gain: their sums go through memory to be scaled, and that costs what the instruction saves.
#pragma once

#include "tiles.hpp"

namespace genserve {

constexpr int kRowsOfMatrix = 16, kInputsOfMatrix = 64;

// The sums of the 32 outputs of a panel and up to kMatrixRows rows.
class MatrixSums {
 public:
  __attribute__((always_inline)) u32x16 get(int row, int group) const {
    u32x16 sums;
    memcpy(&sums, values_[group][row], sizeof sums);
    return sums;
  }
  // Those of 16 rows and 16 outputs, in the order of both.
  int32_t* at(int row, int group) { return values_[group][row]; }

 private:
  alignas(64) int32_t values_[2][kMatrixRows + 1][kLanes];  // kMatrixRows may be 0, and an array not
};

// The matrix registers of a thread; while they are in use, each switch of threads saves them.
class MatrixRegisters {
 public:
  MatrixRegisters();
  ~MatrixRegisters();
  MatrixRegisters(const MatrixRegisters&) = delete;
  MatrixRegisters& operator=(const MatrixRegisters&) = delete;

  // Multiplies the first `inputs` (a multiple of 64) of up to kMatrixRows rows, `stride` bytes apart, by weights
  // [inputs / 4, 32, 4].
  void multiply(int height, const int8_t* rows, int64_t stride, const uint8_t* weights, int64_t inputs, Ahead& ahead,
                MatrixSums& sums) const;
};

#if defined(__AMX_INT8__)

// The instructions contain the numbers of registers: sums 0 to 3, rows 4 and 5, weights 6 and 7.
inline MatrixRegisters::MatrixRegisters() {
  struct alignas(64) {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes_of_row[16];
    uint8_t rows[16];
  } shapes{};
  shapes.palette = 1;
  for (int i = 0; i < 8; i++) {
    shapes.bytes_of_row[i] = 64;
    shapes.rows[i] = 16;
  }
  _tile_loadconfig(&shapes);
}

inline MatrixRegisters::~MatrixRegisters() { _tile_release(); }

inline void MatrixRegisters::multiply(int height, const int8_t* rows, int64_t stride, const uint8_t* weights, int64_t inputs,
                                      Ahead& ahead, MatrixSums& sums) const {
  constexpr int kBytes = kInputsOfMatrix * kPanel, kLine = 4 * kPanel, kRow = 4 * kLanes;
  for (int row = 0; row < height; row += 2 * kRowsOfMatrix) {
    const bool two = row + kRowsOfMatrix < height;
    const int8_t* const q = rows + row * stride;
    const uint8_t* w = weights;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < inputs; i += kInputsOfMatrix, w += kBytes) {
      _tile_loadd(6, w, kLine);
      _tile_loadd(7, w + 64, kLine);
      _tile_loadd(4, q + i, stride);
      _tile_dpbsud(0, 4, 6);
      _tile_dpbsud(1, 4, 7);
      if (two) {
        _tile_loadd(5, q + i + kRowsOfMatrix * stride, stride);
        _tile_dpbsud(2, 5, 6);
        _tile_dpbsud(3, 5, 7);
      }
      for (int line = 0; line < kBytes / 64 && row == 0; line++) ahead.prefetch();
    }
    _tile_stored(0, sums.at(row, 0), kRow);
    _tile_stored(1, sums.at(row, 1), kRow);
    if (two) {
      _tile_stored(2, sums.at(row + kRowsOfMatrix, 0), kRow);
      _tile_stored(3, sums.at(row + kRowsOfMatrix, 1), kRow);
    }
  }
}

#endif

}  // namespace genserve
