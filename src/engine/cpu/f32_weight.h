// A weight as the kernels want it: f32, with its offset in it.
#pragma once

#include <memory>

#include "engine/cpu/arrays.h"
#include "engine/cpu/isa.h"
#include "engine/cpu/parallel.h"

namespace jaxnorm::cpu {

// Replaces *weight, where it is not so already, for as long as this lives.
class F32Weight {
 public:
  F32Weight(Input* weight, float offset, int64_t count, const ParallelFor& parallel_for) {
    if (!*weight || (weight->dtype == Dtype::f32 && offset == 0)) return;
    data_.reset(new float[count]);
    for_each_block(parallel_for, count, [&](int64_t begin, int64_t end) {
      const char* const data = static_cast<const char*>(weight->data) + begin * size_of(weight->dtype);
      kernels<ArrayKernels>().widen({data, weight->dtype}, offset, data_.get() + begin, end - begin);
    });
    *weight = {data_.get(), Dtype::f32};
  }

 private:
  std::unique_ptr<float[]> data_;
};

}  // namespace jaxnorm::cpu
