// RMSNorm and LayerNorm of rows that are sharded over devices: the statistics of a device's shard of each row, which
// the devices exchange, and y of the shard from the statistics of whole rows.
#pragma once

#include "ops/norm.h"

namespace jaxnorm {

struct ShardStatistics {
  Kind kind;
  int64_t rows, cols;
  Input x;
  float* mean;      // LayerNorm: a value a row
  float* variance;  // a value a row: about the shard's own mean; RMSNorm: about zero
};

struct ShardApply {
  Kind kind;
  int64_t rows, cols;
  Input x, scale, bias;
  Output y;
  const float* mean;  // LayerNorm only
  const float* rstd;
  float scale_offset;
  bool multiply_before_cast;
};

}  // namespace jaxnorm
