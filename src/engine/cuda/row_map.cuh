// RowMap on the device: which row of an operand goes with a row of x.
#pragma once

#include <cstdint>

#include "operands.h"

namespace jaxnorm::cuda {

// Quotients by a number that is known at the launch, without a division: exact for 0 to 2^63 - 1.
struct Divisor {
  int64_t value;
  uint64_t factor;  // 2^(63 + shift) / value, rounded up
  int shift;        // 2^shift is at least `value`

  explicit Divisor(int64_t value) : value(value), shift(0) {
    while (uint64_t{1} << shift < static_cast<uint64_t>(value)) ++shift;
    factor = static_cast<uint64_t>(((static_cast<unsigned __int128>(1) << (63 + shift)) + value - 1) / value);
  }

  __device__ int64_t quotient(int64_t number) const {
    return static_cast<int64_t>(__umul64hi(2 * static_cast<uint64_t>(number), factor) >> shift);
  }
  __device__ int64_t remainder(int64_t number) const { return number - quotient(number) * value; }
};

// The same of numbers from 0 to 2^31 - 1, in a few instructions.
struct SmallDivisor {
  int value;
  uint32_t factor;  // 2^(31 + shift) / value, rounded up
  int shift;        // 2^shift is at least `value`

  explicit SmallDivisor(int64_t value) : value(static_cast<int>(value)), shift(0) {
    while (int64_t{1} << shift < value) ++shift;
    factor = static_cast<uint32_t>(((uint64_t{1} << (31 + shift)) + value - 1) / value);
  }

  __device__ int quotient(int number) const {
    const uint64_t product = uint64_t{2 * static_cast<uint32_t>(number)} * factor;
    return static_cast<int>(static_cast<uint32_t>(product >> 32) >> shift);
  }
  __device__ int remainder(int number) const { return number - quotient(number) * value; }
};

// The same map without a division. A plain op has one row of weights, and pays a branch for it.
struct RowMapLaunch {
  Divisor count, inner;
  int64_t skipped;      // rows of x between the runs of neighbouring rows that go with one row of the operand
  bool has_neighbours;  // whether there are such runs, and of several rows

  explicit RowMapLaunch(const RowMap& weight_rows)
      : count(weight_rows.count),
        inner(weight_rows.inner),
        skipped((weight_rows.count - 1) * weight_rows.inner),
        has_neighbours(weight_rows.count > 1 && weight_rows.inner > 1) {}

  // The row of the operand.
  __device__ int64_t of_row(int64_t row) const {
    return count.value == 1 ? 0 : count.remainder(inner.value == 1 ? row : inner.quotient(row));
  }

  // The index-th of the rows of x that go with a row of the operand.
  __device__ int64_t row_of(int64_t operand_row, int64_t index) const {
    return count.value == 1 ? index : index + inner.quotient(index) * skipped + operand_row * inner.value;
  }
};

// An operand from element `at` on, if it is there.
__device__ inline Input from(const Input& weight, int64_t at) {
  if (!weight.data) return weight;
  return {static_cast<const char*>(weight.data) + at * (weight.dtype == Dtype::f32 ? 4 : 2), weight.dtype};
}

}  // namespace jaxnorm::cuda
