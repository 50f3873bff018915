// Calls of the handlers with every array elsewhere: so many elements behind whole vectors, so that it is aligned to
// them and to nothing more. Results are bytes of ones before, and what lies beside them has to stay that.
#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "emulator.h"
#include "xla/ffi/api/ffi.h"

namespace {

using Handler = XLA_FFI_Error*(XLA_FFI_CallFrame*);

constexpr size_t kBeside = 64, kHandlers = 128;
constexpr char kUntouched = '\xff';

int first = 0, distance = 0;  // elements by which the first array is moved, 0: none is, and each one more than the last

struct Elsewhere {
  std::vector<char> bytes;
  char* data;
  size_t size;

  Elsewhere(size_t size, size_t offset) : bytes(size + offset + 3 * kBeside, kUntouched), size(size) {
    const auto begin = reinterpret_cast<uintptr_t>(bytes.data());
    data = bytes.data() + kBeside + (kBeside - begin % kBeside) % kBeside + offset;
  }

  bool is_untouched_beside() const {
    const auto is = [](char byte) { return byte == kUntouched; };
    return std::all_of(bytes.data(), static_cast<const char*>(data), is) &&
           std::all_of(static_cast<const char*>(data) + size, bytes.data() + bytes.size(), is);
  }
};

class Moved {
 public:
  // What XLA has in one place, as a result in place of an operand, stays so.
  void* move(void* buffer, bool is_operand) {
    XLA_FFI_Buffer moved = *static_cast<XLA_FFI_Buffer*>(buffer);
    const size_t width = xla::ffi::ByteWidth(static_cast<xla::ffi::DataType>(moved.dtype));
    size_t size = width;
    for (int64_t i = 0; i < moved.rank; ++i) size *= moved.dims[i];
    auto& there = arrays_[moved.data];
    if (!there) {
      there = std::make_unique<Elsewhere>(size, (first + distance * buffers_.size()) * width);
      if (is_operand) std::memcpy(there->data, moved.data, size);
    }
    if (!is_operand) results_.push_back(moved.data);
    moved.data = there->data;
    buffers_.push_back(std::make_unique<XLA_FFI_Buffer>(moved));
    return buffers_.back().get();
  }

  bool give_back() const {
    bool holds = true;
    for (const auto& [data, there] : arrays_) holds &= there->is_untouched_beside();
    for (void* data : results_) std::memcpy(data, arrays_.at(data)->data, arrays_.at(data)->size);
    return holds;
  }

 private:
  std::map<void*, std::unique_ptr<Elsewhere>> arrays_;  // by where XLA has them
  std::vector<void*> results_;
  std::vector<std::unique_ptr<XLA_FFI_Buffer>> buffers_;
};

XLA_FFI_Error* error_of(const XLA_FFI_CallFrame* frame, const char* message) {
  XLA_FFI_Error_Create_Args args{};
  args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
  args.message = message;
  args.errc = XLA_FFI_Error_Code_INTERNAL;
  return frame->api->XLA_FFI_Error_Create(&args);
}

XLA_FFI_Error* call(Handler* handler, XLA_FFI_CallFrame* frame) {
  if (first == 0 || frame->extension_start || frame->stage != XLA_FFI_ExecutionStage_EXECUTE) return handler(frame);
  Moved moved;
  std::vector<void*> operands, results;
  for (int64_t i = 0; i < frame->args.size; ++i) operands.push_back(moved.move(frame->args.args[i], true));
  for (int64_t i = 0; i < frame->rets.size; ++i) results.push_back(moved.move(frame->rets.rets[i], false));
  XLA_FFI_CallFrame elsewhere = *frame;
  elsewhere.args.args = operands.data(), elsewhere.rets.rets = results.data();
  XLA_FFI_Error* error = handler(&elsewhere);
  const bool holds = moved.give_back();
  return error || holds ? error : error_of(frame, "a kernel wrote beside an array");
}

Handler* handlers[kHandlers];
size_t count = 0;

template <size_t I>
XLA_FFI_Error* call_of(XLA_FFI_CallFrame* frame) {
  return call(handlers[I], frame);
}

template <size_t... I>
Handler* movable(Handler* handler, std::index_sequence<I...>) {
  constexpr Handler* calls[] = {call_of<I>...};
  handlers[count] = handler;
  return calls[count++];
}

}  // namespace

#define EXPORTED extern "C" [[gnu::visibility("default")]]

// A handler whose arrays can be moved, in place of this one.
EXPORTED Handler* emulator_movable(Handler* handler) {
  return count < kHandlers ? movable(handler, std::make_index_sequence<kHandlers>{}) : nullptr;
}

// How many the device has.
EXPORTED void emulator_set_multiprocessors(int count) { emulator::multiprocessors = count; }

EXPORTED void emulator_move(int first_by, int more) { first = first_by, distance = more; }
