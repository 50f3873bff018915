// What the programs that run the CUDA kernels on the host share.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "operands.h"

namespace jaxnorm {

class Array {
 public:
  Array(Dtype dtype, int64_t elements, int64_t offset = 0)
      : dtype_(dtype), elements_(elements), bytes_((elements + offset) * size_of(dtype) + 64, '\xff') {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(bytes_.data());
    data_ = bytes_.data() + (32 - begin % 32) % 32 + offset * size_of(dtype);
  }

  Array(const Array&) = delete;
  Array(Array&&) = default;

  static Array normal(Dtype dtype, int64_t elements, int64_t offset) {
    static std::mt19937 random;
    std::normal_distribution<float> draw;
    Array array(dtype, elements, offset);
    for (int64_t i = 0; i < elements; ++i) array.set(i, draw(random));
    return array;
  }

  float operator[](int64_t i) const {
    if (dtype_ == Dtype::f16) return __half2float(reinterpret_cast<const __half*>(data_)[i]);
    return dtype_ == Dtype::f32 ? reinterpret_cast<const float*>(data_)[i]
                                : __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(data_)[i]);
  }

  void set(int64_t i, float value) {
    if (dtype_ == Dtype::f32) {
      reinterpret_cast<float*>(data_)[i] = value;
    } else if (dtype_ == Dtype::f16) {
      reinterpret_cast<__half*>(data_)[i] = __float2half_rn(value);
    } else {
      reinterpret_cast<__nv_bfloat16*>(data_)[i] = __float2bfloat16_rn(value);
    }
  }

  // The same bits; but what is not a number has one pattern on a GPU, and several here.
  bool operator==(const Array& other) const {
    const int size = size_of(dtype_);
    for (int64_t i = 0; i < elements_; ++i)
      if (std::memcmp(data_ + i * size, other.data_ + i * size, size) != 0)
        if (!std::isnan((*this)[i]) || !std::isnan(other[i])) return false;
    return true;
  }

  // The relative L2 error.
  double error(const std::vector<double>& exact) const {
    double difference = 0, size = 0;
    for (int64_t i = 0; i < elements_; ++i) {
      difference += ((*this)[i] - exact[i]) * ((*this)[i] - exact[i]);
      size += exact[i] * exact[i];
    }
    return std::sqrt(difference / size);
  }

  operator Input() const { return {data_, dtype_}; }
  operator Output() { return {data_, dtype_}; }
  Workspace workspace() { return {floats(), elements_}; }
  float* floats() { return reinterpret_cast<float*>(data_); }

 private:
  Dtype dtype_;
  int64_t elements_;
  std::vector<char> bytes_;
  char* data_;
};

}  // namespace jaxnorm
