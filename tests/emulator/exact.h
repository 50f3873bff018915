// The formulas in float64.
#pragma once

#include "array.h"

namespace jaxnorm {

// What a call is expected to give.
struct Exact {
  std::vector<double> y, dx, dx_and_dsum, dscale, dbias;

  Exact(bool layer, int64_t rows, int64_t cols, const Array& x, const Array& scale, double offset, const Array& bias,
        const Array& dy, const Array& dsum)
      : y(rows * cols), dx(rows * cols), dx_and_dsum(rows * cols), dscale(cols), dbias(cols) {
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t at = row * cols;
      const auto mean_of = [&](auto f) {
        double sum = 0;
        for (int64_t i = 0; i < cols; ++i) sum += f(i);
        return sum / cols;
      };
      const double mean = layer ? mean_of([&](int64_t i) { return x[at + i]; }) : 0;
      const auto centred = [&](int64_t i) { return x[at + i] - mean; };
      const double rstd = 1 / std::sqrt(mean_of([&](int64_t i) { return centred(i) * centred(i); }) + 1e-6);
      const auto x_hat = [&](int64_t i) { return centred(i) * rstd; };
      const auto g = [&](int64_t i) { return dy[at + i] * (scale[i] + offset); };
      const double gx = mean_of([&](int64_t i) { return g(i) * x_hat(i); }), g_mean = layer ? mean_of(g) : 0;
      for (int64_t i = 0; i < cols; ++i) {
        y[at + i] = x_hat(i) * (scale[i] + offset) + (layer ? bias[i] : 0);
        dx[at + i] = rstd * (g(i) - g_mean - x_hat(i) * gx);
        dx_and_dsum[at + i] = dx[at + i] + dsum[at + i];
        dscale[i] += dy[at + i] * x_hat(i);
        dbias[i] += dy[at + i];
      }
    }
  }
};

}  // namespace jaxnorm
