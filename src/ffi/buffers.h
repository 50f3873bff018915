// XLA's buffers: their shapes and dtypes, and how messages print them.
#pragma once

#include <cstdint>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "operands.h"
#include "xla/ffi/api/ffi.h"

namespace jaxnorm {

namespace ffi = xla::ffi;

using Shape = std::vector<int64_t>;

inline Shape shape_of(const ffi::AnyBuffer& buffer) {
  return Shape(buffer.dimensions().begin(), buffer.dimensions().end());
}

inline std::optional<Dtype> dtype_of(const ffi::AnyBuffer& buffer) {
  switch (buffer.element_type()) {
    case ffi::F32:
      return Dtype::f32;
    case ffi::F16:
      return Dtype::f16;
    case ffi::BF16:
      return Dtype::bf16;
    case ffi::F8E4M3FN:
      return Dtype::f8e4m3fn;
    case ffi::F8E5M2:
      return Dtype::f8e5m2;
    case ffi::S8:
      return Dtype::s8;
    default:
      return std::nullopt;
  }
}

inline const char* name_of(Dtype dtype) {
  constexpr const char* names[] = {"F32", "F16", "BF16", "F8E4M3FN", "F8E5M2", "S8"};
  return names[static_cast<int>(dtype)];
}

inline std::string text(const Shape& shape) {
  std::string out;
  for (int64_t extent : shape) out += (out.empty() ? "" : ",") + std::to_string(extent);
  return "[" + out + "]";
}

inline std::string text(const ffi::AnyBuffer& buffer) {
  std::ostringstream out;
  out << buffer.element_type() << text(shape_of(buffer));
  return out.str();
}

}  // namespace jaxnorm
