// What the kernels of GroupNorm work on. They know neither groups nor examples: what is summed up is summed up for each
// column of a tile, and what differs between channels comes as an array with a value for each column.
#pragma once

#include <cstdint>

namespace jaxnorm::cpu {

// Neighbouring elements of one example: rows of the channels of a position each or, where those are few, of several
// neighbouring positions.
struct GroupTile {
  int64_t begin, rows, cols;  // begin: the first element in x
};

// The sums over the rows of a tile, a value for each column.
struct GroupMoments {
  float *mean, *rest, *m2;  // mean + rest is the mean, to more than a float holds; m2 the sum of squared deviations
};
struct GroupGradSums {
  float *dz, *dz_x_hat;
};

// A value for each column. Without a scale or a bias there is the constant that changes no bit.
struct GroupColumns {
  const float *mean, *rstd, *scale, *bias;
  const float* shift;                        // forward: what x_hat lacks since mean is rounded
  const float *mean_g, *minus_mean_g_x_hat;  // backward
};

}  // namespace jaxnorm::cpu
