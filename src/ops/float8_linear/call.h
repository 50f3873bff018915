// What a linear layer in float8 rounds: arrays to float8_e4m3fn for products that are summed along rows or columns.
//
//   v      = x * factor
//   scale  = max |v| of a row or column / 448, as of `Quantization`, and 0 where that is 0
//   values = v * (1 / scale), clipped to +-448, rounded to nearest even
#pragma once

#include "operands.h"

namespace jaxnorm {

// (rows, cols), of f32 or a half type.
struct Rounding {
  int64_t rows, cols;
  Input x;
  bool power_of_two;
};

struct RoundRows : Rounding {
  const float* factors;  // of columns; may be absent
  Output values;         // (rows, cols)
  float* scales;         // (rows)
};

struct RoundColumns : Rounding {
  Output values;      // (rows, cols); may be absent
  Output transposed;  // (cols, rows), as products want what they sum up
  float* scales;      // (cols)
  Workspace workspace;
};

// Both of one array, each with factors of its own.
struct RoundGradient : Rounding {
  const float *of_columns, *of_rows;  // the factors of rows and of columns; may be absent
  Output values;                      // by rows, (rows, cols); may be absent
  float* scales;                      // (rows)
  Output transposed;                  // by columns, (cols, rows)
  float* column_scales;               // (cols)
  Workspace workspace;
};

// Of values that were rounded, so that products sum up along their first axis.
struct TransposeBytes {
  int64_t rows, cols;
  const uint8_t* x;
  uint8_t* y;  // (cols, rows)
};

namespace cuda {

Outcome run(const RoundRows& p, Stream stream);
Outcome run(const RoundColumns& p, Stream stream);
Outcome run(const RoundGradient& p, Stream stream);
Outcome run(const TransposeBytes& p, Stream stream);

// The columns' largest magnitudes.
WorkspaceSize round_columns_workspace(const WorkspaceQuery& query);

}  // namespace cuda

}  // namespace jaxnorm
