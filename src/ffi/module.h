// What the two modules share: their tables and the limits, as Python sees them.
#pragma once

#include <nanobind/nanobind.h>

#include <type_traits>
#include <vector>

#include "ffi/table.h"

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

template <class T>
nanobind::object to_python(const T& number) {
  return nanobind::cast(number);
}
template <class T, size_t N>
nanobind::object to_python(const T (&numbers)[N]) {
  nanobind::list all;
  for (const T number : numbers) all.append(number);
  return nanobind::tuple(all);
}

template <class Platform, const auto& table>
nanobind::dict limits() {
  nanobind::dict all;
  for_each_entry<Platform, table>([&](const auto& entry) {
    if constexpr (!std::is_same_v<decltype(entry), const Handler&>) all[entry.name] = to_python(entry.value);
  });
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
