// The table of handlers: how a target name, a reader and an op become an XLA FFI handler of a platform.
//
// A platform has `Context`, what XLA hands a call beside its buffers, in the words of the binding; `kTraits`; and
// run(target, op, context).
#pragma once

#include <array>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>

#include "ffi/reader.h"

namespace jaxnorm {

using WorkspaceFunction = WorkspaceSize(const WorkspaceQuery&);

// `Op` is the struct of an op and direction, or a variant of them where one target stands for several.
template <class Op>
struct Row {
  const char* target;
  Op (*read)(Reader&);
  WorkspaceFunction* workspace;  // null: there is none

  constexpr Row(const char* target, Op (*read)(Reader&), WorkspaceFunction* workspace = nullptr)
      : target(target), read(read), workspace(workspace) {}
};

struct Handler {
  const char* target;
  XLA_FFI_Error* (*call)(XLA_FFI_CallFrame*);
  WorkspaceFunction* workspace;
};

template <class Platform, class Op, class Context>
ffi::Error run(const char* target, const Op& op, Context& context) {
  return Platform::run(target, op, context);
}

template <class Platform, class... Ops, class Context>
ffi::Error run(const char* target, const std::variant<Ops...>& ops, Context& context) {
  return std::visit([&](const auto& op) { return Platform::run(target, op, context); }, ops);
}

// `table` is a constexpr tuple of rows.
template <class Platform, const auto& table, size_t index>
ffi::Error read_and_run(ffi::RemainingArgs operands, ffi::RemainingRets results, ffi::Dictionary attributes,
                        typename ffi::CtxDecoding<typename Platform::Context>::Type context) {
  constexpr auto row = std::get<index>(table);
  Reader reader(row.target, operands, results, attributes, row.workspace != nullptr);
  const auto op = row.read(reader);
  const ffi::Error error = reader.finish();
  return error.success() ? run<Platform>(row.target, op, context) : error;
}

template <class Platform, const auto& table, size_t index>
XLA_FFI_Error* handle(XLA_FFI_CallFrame* frame) {
  static auto* const handler = ffi::Ffi::Bind()
                                   .RemainingArgs()
                                   .RemainingRets()
                                   .Attrs()
                                   .template Ctx<typename Platform::Context>()
                                   .To(read_and_run<Platform, table, index>, Platform::kTraits)
                                   .release();
  return handler->Call(frame);
}

template <class Platform, const auto& table, size_t... index>
constexpr auto handlers(std::index_sequence<index...>) {
  return std::array<Handler, sizeof...(index)>{
      Handler{std::get<index>(table).target, handle<Platform, table, index>, std::get<index>(table).workspace}...};
}

template <class Platform, const auto& table>
constexpr auto handlers() {
  return handlers<Platform, table>(std::make_index_sequence<std::tuple_size_v<std::decay_t<decltype(table)>>>{});
}

}  // namespace jaxnorm
