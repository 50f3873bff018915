// What the gradient of a row operation is made of. The engine reads rows of x and dy and computes
//
//   x_hat = s.x_hat(x)                                  s: the row's scalars, such as mean and rstd
//   g     = dy * (scale + scale_offset)                 dy, where there are no weights
//   sums  = sum of g * x_hat over the row, and of g     the second with two sums a row
//   dx    = s.dx(sums, 1 / cols)(g, x_hat)
//   dscale += dy * x_hat,  dbias += dy                  over rows
//
// An op gives a functor with these members, of which the gradient of the L2 norm in tests/toy is the shortest example:
//
//   X, DY        types of x and dy
//   State        what its kernels have to know besides GradCall; the functor is made from it
//   Scalars      of a row: x_hat(x); dx(sums, reciprocal_cols); within(remaining), which are those with which x_hat of
//   0
//                is 0 where no column remains; kSums, how many sums it has: 1 or 2
//   kWeights     gradients of weights that are summed up over rows: 0, 1 (dscale) or 2 (and dbias)
//   kExtra       how the extra operand is reached, if there is one
//   kTransforms  whether transform(x, dy, extra) makes what stands for x and dy above, in place, from all three; it
//                returns what is handed on to the result. Otherwise the extra operand is added to dx
//   fetch(row, s)            loads the scalars of a row
//   has_result(dx)           whether any result of rows is wanted
//   result<Tile>(dx, added, at)   stores the results of a row: at(array) is the row's place in an array of X
#pragma once

#include <cstdint>

#include "engine/cuda/vector.cuh"
#include "operands.h"

namespace jaxnorm::cuda {

// How a kernel reaches the extra operand, an array of x's type and shape.
enum class Extra : uint8_t { absent, in_memory, pipelined };

// A call as the kernels see it. `State`: the op's own.
template <typename State>
struct GradCall {
  int64_t rows, cols;
  Input dy, x, scale, extra;
  State state;
  Output dx;
  float scale_offset;
  int64_t dy_pad;  // elements after each row of dy
};

// What transform returns where nothing is handed on.
struct NothingKept {};

// The scalars of a row of a call; beyond the last row they stay as they are. The functor is made where it is used, so
// that what it has is read from the call's arguments then, and takes no registers before.
template <typename Op, typename Call>
__device__ void fetch_scalars(const Call& p, int64_t row, typename Op::Scalars& s) {
  if (static_cast<uint64_t>(row) < static_cast<uint64_t>(p.rows)) Op(p.state).fetch(row, s);
}

}  // namespace jaxnorm::cuda
