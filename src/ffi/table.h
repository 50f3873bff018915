// The table of handlers: how a target name, a reader and an op become an XLA FFI handler of a platform.
//
// A platform has `Context`, what XLA hands a call beside its buffers, in the words of the binding; `kTraits`; and
// call(target, op, context).
#pragma once

#include <array>
#include <tuple>
#include <type_traits>
#include <utility>

#include "ffi/reader.h"

namespace jaxnorm {

using WorkspaceFunction = WorkspaceSize(const WorkspaceQuery&);

// `Op` is the struct of an op and direction.
template <class Op>
struct Row {
  const char* target;
  Op (*read)(Reader&);
  WorkspaceFunction* workspace;  // null: there is none

  constexpr Row(const char* target, Op (*read)(Reader&), WorkspaceFunction* workspace = nullptr)
      : target(target), read(read), workspace(workspace) {}
};

// Of an op that no platform but CUDA has.
template <class Op>
struct CudaRow : Row<Op> {
  using Row<Op>::Row;
};
template <class Op>
CudaRow(const char*, Op (*)(Reader&)) -> CudaRow<Op>;
template <class Op>
CudaRow(const char*, Op (*)(Reader&), WorkspaceFunction*) -> CudaRow<Op>;

// A number that Python is to know of, beside the rows, or an array of them.
template <class T>
struct Limit {
  const char* name;
  T value;
};
template <class T>
Limit(const char*, T) -> Limit<T>;
template <class T, size_t N>
Limit(const char*, const T (&)[N]) -> Limit<const T (&)[N]>;

struct Handler {
  const char* target;
  XLA_FFI_Error* (*call)(XLA_FFI_CallFrame*);
  WorkspaceFunction* workspace;
};

// `table` is a constexpr tuple of rows.
template <class Platform, const auto& table, size_t index>
ffi::Error read_and_run(ffi::RemainingArgs operands, ffi::RemainingRets results, ffi::Dictionary attributes,
                        typename ffi::CtxDecoding<typename Platform::Context>::Type context) {
  constexpr auto row = std::get<index>(table);
  Reader reader(row.target, operands, results, attributes, row.workspace != nullptr);
  const auto op = row.read(reader);
  const ffi::Error error = reader.finish();
  return error.success() ? Platform::call(row.target, op, context) : error;
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

// Calls f(handler) for the row of this index, where there is one that the platform has, or f(limit).
template <class Platform, const auto& table, size_t index, class Op, class F>
void with_entry(const Row<Op>& row, F f) {
  f(Handler{row.target, handle<Platform, table, index>, row.workspace});
}
template <class Platform, const auto& table, size_t index, class Op, class F>
void with_entry(const CudaRow<Op>& row, F f) {
  if constexpr (Platform::kIsCuda) f(Handler{row.target, handle<Platform, table, index>, row.workspace});
}
template <class Platform, const auto& table, size_t index, class T, class F>
void with_entry(const Limit<T>& limit, F f) {
  f(limit);
}

template <class Platform, const auto& table, class F, size_t... index>
void for_each_entry(F f, std::index_sequence<index...>) {
  (with_entry<Platform, table, index>(std::get<index>(table), f), ...);
}

// Calls f(handler) and f(limit) for what a platform has of a table.
template <class Platform, const auto& table, class F>
void for_each_entry(F f) {
  for_each_entry<Platform, table>(f, std::make_index_sequence<std::tuple_size_v<std::decay_t<decltype(table)>>>{});
}

}  // namespace jaxnorm
