// What the two modules share: their tables and the limits, as Python sees them.
#pragma once

#include <nanobind/nanobind.h>

#include <type_traits>
#include <vector>

#include "ffi/table.h"
#include "ops/norm/call.h"
#include "ops/shared/quantization.h"

namespace jaxnorm {

template <class Platform, const auto& table>
std::vector<Handler> handlers() {
  std::vector<Handler> all;
  for_each_entry<Platform, table>([&](const auto& entry) {
    if constexpr (std::is_same_v<decltype(entry), const Handler&>) all.push_back(entry);
  });
  return all;
}

template <class Platform, const auto& table>
nanobind::dict capsules() {
  nanobind::dict all;
  for (const Handler& handler : handlers<Platform, table>())
    all[handler.target] = nanobind::capsule(reinterpret_cast<void*>(handler.call));
  return all;
}

template <class Platform, const auto& table>
nanobind::dict limits() {
  nanobind::dict all;
  for_each_entry<Platform, table>([&](const auto& entry) {
    if constexpr (std::is_same_v<decltype(entry), const Limit&>) all[entry.name] = entry.value;
  });
  nanobind::list groups;
  for (const int64_t group : kGroups) groups.append(group);
  all["groups"] = nanobind::tuple(groups);
  all["smallest_scale"] = kSmallestScale;
  return all;
}

template <class Platform, const auto& table>
void define(nanobind::module_& module) {
  module.def("handlers", &capsules<Platform, table>, "The XLA FFI handlers, by target name.");
  module.def(
      "limits", &limits<Platform, table>,
      "How many columns a row has at most, by what reads it, how many may share a scale, and the smallest scale.");
}

}  // namespace jaxnorm
