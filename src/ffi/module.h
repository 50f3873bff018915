// What the two modules share: their tables and the limits, as Python sees them.
#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "ffi/ops.h"

namespace jaxnorm {

// The handlers of several tables.
template <class Platform, const auto&... tables>
std::vector<Handler> all_handlers() {
  std::vector<Handler> all;
  const auto append = [&](const auto& some) {
    for (const Handler& handler : some) all.push_back(handler);
  };
  (append(handlers<Platform, tables>()), ...);
  return all;
}

inline nanobind::dict capsules(const std::vector<Handler>& handlers) {
  nanobind::dict all;
  for (const Handler& handler : handlers) {
    all[handler.target] = nanobind::capsule(reinterpret_cast<void*>(handler.call));
  }
  return all;
}

inline nanobind::dict limits() {
  nanobind::dict all;
  all["per_head_cols"] = kPerHeadCols;
  all["gated_cols"] = kGatedCols;
  all["rotary_cols"] = kRotaryCols;
  nanobind::list groups;
  for (const int64_t group : kGroups) groups.append(group);
  all["groups"] = nanobind::tuple(groups);
  all["smallest_scale"] = kSmallestScale;
  return all;
}

template <class Handlers>
void define(nanobind::module_& module, Handlers handlers) {
  module.def("handlers", [handlers] { return capsules(handlers()); }, "The XLA FFI handlers, by target name.");
  module.def(
      "limits", &limits,
      "The longest rows with weights for each head, of the gated norm and of the rotary embedding, how many columns "
      "may share a scale, and the smallest scale.");
}

}  // namespace jaxnorm
