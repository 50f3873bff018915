// Reads an activation.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>

#include "ffi/reader.h"
#include "ops/shared/activation.h"

namespace jaxnorm {

// One of those that the op knows.
inline Activation read_activation(Reader& in, std::initializer_list<Activation> known) {
  const auto name = in.attribute<std::string_view>("activation");
  std::string names;
  for (const Activation activation : known) {
    if (name == name_of(activation)) return activation;
    names += std::string(names.empty() ? "" : ", ") + name_of(activation);
  }
  in.fail("activation is none of " + names);
  return *known.begin();
}

}  // namespace jaxnorm
