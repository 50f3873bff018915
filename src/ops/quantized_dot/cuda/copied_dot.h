// A product of arrays that begin between words, where what multiplies wants them to begin at words: XLA may hand a call
// a part of another array. It goes by way of copies, of blocks of rows and columns that are as large as have room.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <string>
#include <utility>

#include "ops/quantized_dot/call.h"

namespace jaxnorm::cuda {

class CopiedDot {
 public:
  // What it copies to, which begins at a word.
  struct Room {
    char* data;
    int64_t bytes;
  };

  CopiedDot(const QuantizedDot& p, const Room& room, cudaStream_t stream)
      : p_(p), room_(room.data), stream_(stream), size_(size_of(p.y.dtype)) {
    const int64_t share = room.bytes / 3;  // of columns of weights, of rows of x, and of y
    cols_ = std::min(p.cols, share / (p.depth + kScale + size_) / kDotMultiple * kDotMultiple);
    if (cols_ > 0) rows_ = std::min({p.rows, share / (p.depth + kScale), share / (cols_ * size_)});
  }

  // Calls multiply(block), which returns why it could not, for each block, and returns the first reason.
  template <typename F>
  std::string run(F multiply) {
    if (rows_ <= 0) {
      return "an array begins between words of " + std::to_string(kDotMultiple) +
             " bytes, and the workspace has no room for copies of rows of " + std::to_string(p_.depth);
    }
    for (int64_t col = 0; col < p_.cols; col += cols_)
      for (int64_t row = 0; row < p_.rows; row += rows_) {
        const QuantizedDot block = copy_block(row, col);
        if (error_ == cudaSuccess)
          if (const std::string why = multiply(block); !why.empty()) return why;
        char* const y = static_cast<char*>(p_.y.data) + (row * p_.cols + col) * size_;
        keep(cudaMemcpy2DAsync(y, p_.cols * size_, block.y.data, block.cols * size_, block.cols * size_, block.rows,
                               cudaMemcpyDeviceToDevice, stream_));
        if (error_ != cudaSuccess) return std::string("a copy failed: ") + cudaGetErrorString(error_);
      }
    return "";
  }

 private:
  static constexpr int64_t kScale = sizeof(float);

  QuantizedDot copy_block(int64_t row, int64_t col) {
    QuantizedDot block = p_;
    block.rows = std::min(rows_, p_.rows - row), block.cols = std::min(cols_, p_.cols - col);
    char* to = room_;
    const auto take = [&](int64_t bytes) { return std::exchange(to, to + bytes); };
    const auto copy = [&](const void* array, int64_t first, int64_t count, int64_t bytes) {
      char* const copied = take(count * bytes);
      keep(cudaMemcpyAsync(copied, static_cast<const char*>(array) + first * bytes, count * bytes,
                           cudaMemcpyDeviceToDevice, stream_));
      return copied;
    };
    // All of these end at words, but for the last.
    block.y.data = take(block.rows * block.cols * size_);
    block.weights.data = copy(p_.weights.data, col, block.cols, p_.depth);
    block.weight_scales = reinterpret_cast<const float*>(copy(p_.weight_scales, col, block.cols, kScale));
    if (p_.bias) block.bias.data = copy(p_.bias.data, col, block.cols, size_);
    block.x.data = copy(p_.x.data, row, block.rows, p_.depth);
    block.x_scales = reinterpret_cast<const float*>(copy(p_.x_scales, row, block.rows, kScale));
    return block;
  }

  void keep(cudaError_t error) {
    if (error_ == cudaSuccess) error_ = error;
  }

  const QuantizedDot p_;
  char* const room_;
  const cudaStream_t stream_;
  const int64_t size_;  // of an element of y
  int64_t cols_ = 0, rows_ = 0;
  cudaError_t error_ = cudaSuccess;
};

}  // namespace jaxnorm::cuda
