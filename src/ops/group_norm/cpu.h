// What a call runs on the CPU: `run` on the threads that it is given, and the kernels of an instruction set.
#pragma once

#include "engine/cpu/launch.h"
#include "ops/group_norm/call.h"
#include "ops/group_norm/cpu/group_tile.h"

namespace jaxnorm::cpu {

// std::bad_alloc: there is no memory for f32 weights, for rows or for sums over them.
void run(const GroupNormForward& p, const ParallelFor& parallel_for);
void run(const GroupNormBackward& p, const ParallelFor& parallel_for);

// `traffic` is how many bytes all rows of the call read and write.
struct GroupNormKernels {
  static const GroupNormKernels baseline, avx2, avx512;

  // Of groups [begin, end) without positions, with weights that are the same for all examples.
  void (*rows)(const GroupNormForward& p, int64_t begin, int64_t end, int64_t traffic);
  // Of a tile.
  void (*moments)(Input x, const GroupTile& tile, const GroupMoments& moments);
  void (*forward)(const GroupNormForward& p, const GroupTile& tile, const GroupColumns& columns, int64_t traffic);
  void (*sums)(const GroupNormBackward& p, const GroupTile& tile, const GroupColumns& columns,
               const GroupGradSums& sums);
  void (*backward)(const GroupNormBackward& p, const GroupTile& tile, const GroupColumns& columns, int64_t traffic);
};

}  // namespace jaxnorm::cpu
