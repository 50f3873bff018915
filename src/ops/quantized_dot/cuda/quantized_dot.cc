// The product of matrices of 8-bit floats by cuBLASLt.
//
// Its matrices are stored by columns, so it is asked for the transposed product: y' = weights * x'. `a` is weights, as
// depth x cols and transposed, `b` is x, as depth x rows, and `d` is y, as cols x rows.
#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "engine/cuda/cublaslt.h"
#include "engine/cuda/device.h"
#include "ops/quantized_dot/cuda/copied_dot.h"

namespace jaxnorm::cuda {
namespace {

using namespace cublaslt;

constexpr int64_t kWorkspaceBytes = 32 << 20;  // what cuBLASLt's authors advise for Hopper
constexpr int64_t kWorkspaceAlignment = 256;

struct Type {
  cudaDataType type;
  const char* name;
};

Type type_of(Dtype dtype) {
  if (dtype == Dtype::f8e4m3fn) return {CUDA_R_8F_E4M3, "F8E4M3FN"};
  if (dtype == Dtype::f8e5m2) return {CUDA_R_8F_E5M2, "F8E5M2"};
  if (dtype == Dtype::f16) return {CUDA_R_16F, "F16"};
  return dtype == Dtype::bf16 ? Type{CUDA_R_16BF, "BF16"} : Type{CUDA_R_32F, "F32"};
}

// What went wrong first.
class Checks {
 public:
  explicit Checks(const Library& library) : library_(library) {}
  bool operator()(const char* what, Status status) {
    if (status != kSuccess && why_.empty()) why_ = std::string(what) + ": " + library_.status_name(status);
    return status == kSuccess;
  }
  const std::string& why() const { return why_; }

 private:
  const Library& library_;
  std::string why_;
};

// A descriptor, destroyed by this function of the library.
template <class T>
using Owned = std::unique_ptr<T, Status (*)(T*)>;

Owned<Layout> layout_of(const Library& lt, Dtype dtype, int64_t rows, int64_t cols, Checks& check) {
  Layout* layout = nullptr;
  check("cublasLtMatrixLayoutCreate", lt.layout_create(&layout, type_of(dtype).type, rows, cols, rows));
  return {layout, lt.layout_destroy};
}

Owned<Desc> desc_of(const Library& lt, const QuantizedDot& p, Checks& check) {
  Desc* desc = nullptr;
  if (!check("cublasLtMatmulDescCreate", lt.desc_create(&desc, kCompute32f, CUDA_R_32F)))
    return {nullptr, lt.desc_destroy};
  const auto set = [&](DescAttribute attribute, const auto& value) {
    check("cublasLtMatmulDescSetAttribute", lt.desc_set(desc, attribute, &value, sizeof value));
  };
  set(kDescTransA, kTranspose);
  set(kDescFastAccum, static_cast<int8_t>(p.fast_accumulation));
  set(kDescAScaleMode, kScaleOuterVec32f);
  set(kDescBScaleMode, kScaleOuterVec32f);
  set(kDescAScalePointer, p.weight_scales);
  set(kDescBScalePointer, p.x_scales);
  if (p.bias) {
    set(kDescEpilogue, kEpilogueBias);
    set(kDescBiasPointer, p.bias.data);
  }
  return {desc, lt.desc_destroy};
}

// The part of the workspace that begins where cuBLASLt wants it to. How large it is does not depend on the address, or
// the algorithm would, and with it the bits of y.
struct Room {
  void* data = nullptr;
  size_t bytes = 0;

  explicit Room(const Workspace& workspace) {
    const int64_t whole = workspace.floats * static_cast<int64_t>(sizeof(float)) / kWorkspaceAlignment - 1;
    if (whole < 1) return;
    const uintptr_t begin = reinterpret_cast<uintptr_t>(workspace.data) + kWorkspaceAlignment - 1;
    data = reinterpret_cast<void*>(begin / kWorkspaceAlignment * kWorkspaceAlignment);
    bytes = whole * kWorkspaceAlignment;
  }

  // What is left behind so many bytes.
  Room behind(size_t used) const {
    used = (used + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
    Room left = *this;
    left.data = static_cast<char*>(data) + used, left.bytes = bytes - used;
    return left;
  }
};

// How a product of these shapes and dtypes is computed on a device.
struct DotPlan {
  Algorithm algorithm;
  size_t workspace_bytes;
};

// What the algorithm may depend on, and nothing else may.
using Key = std::array<int64_t, 10>;

Key key_of(const Context* handle, const QuantizedDot& p, const Room& room) {
  const auto number = [](Dtype dtype) { return static_cast<int64_t>(dtype); };
  return {reinterpret_cast<int64_t>(handle),
          p.rows,
          p.cols,
          p.depth,
          number(p.x.dtype),
          number(p.weights.dtype),
          number(p.y.dtype),
          p.bias ? 1 : 0,
          p.fast_accumulation ? 1 : 0,
          static_cast<int64_t>(room.bytes)};
}

Owned<Preference> preference_of(const Library& lt, size_t workspace_bytes, Checks& check) {
  Preference* preference = nullptr;
  if (!check("cublasLtMatmulPreferenceCreate", lt.preference_create(&preference)))
    return {nullptr, lt.preference_destroy};
  const auto set = [&](PreferenceAttribute attribute, const auto& value) {
    check("cublasLtMatmulPreferenceSetAttribute", lt.preference_set(preference, attribute, &value, sizeof value));
  };
  set(kPreferenceMaxWorkspaceBytes, static_cast<uint64_t>(workspace_bytes));
  // All that is known of every call, wherever its arrays lie.
  for (const auto attribute : {kPreferenceMinAlignmentABytes, kPreferenceMinAlignmentBBytes,
                               kPreferenceMinAlignmentCBytes, kPreferenceMinAlignmentDBytes})
    set(attribute, static_cast<uint32_t>(kDotMultiple));
  return {preference, lt.preference_destroy};
}

std::string no_algorithm(const Library& lt, const QuantizedDot& p, const Room& room, Status status) {
  const auto matrix = [](Dtype dtype, int64_t rows, int64_t cols) {
    return std::string(type_of(dtype).name) + "[" + std::to_string(rows) + "," + std::to_string(cols) + "]";
  };
  return "cuBLASLt " + version_of(lt) + " has no algorithm on this GPU for x " + matrix(p.x.dtype, p.rows, p.depth) +
         ", weights " + matrix(p.weights.dtype, p.cols, p.depth) + " and y " + matrix(p.y.dtype, p.rows, p.cols) +
         (p.bias ? " with a bias" : "") + ", scaled by row and column, in " + std::to_string(room.bytes) +
         " bytes of workspace (" + lt.status_name(status) + ")";
}

struct Layouts {
  Owned<Layout> a, b, d;

  Layouts(const Library& lt, const QuantizedDot& p, Checks& check)
      : a(layout_of(lt, p.weights.dtype, p.depth, p.cols, check)),
        b(layout_of(lt, p.x.dtype, p.depth, p.rows, check)),
        d(layout_of(lt, p.y.dtype, p.cols, p.rows, check)) {}
};

// The call, with arrays that begin at a word and at nothing more: cuBLASLt has no algorithm for a bias between words,
// and the algorithm is not to depend on which call came first.
QuantizedDot at_a_word(QuantizedDot p) {
  void* const word = reinterpret_cast<void*>(kDotMultiple);
  p.x_scales = p.weight_scales = static_cast<const float*>(word);
  if (p.bias) p.bias.data = word;
  return p;
}

// Nothing where there is none, and why.
std::optional<DotPlan> make_plan(const Library& lt, Context* handle, const QuantizedDot& p, const Room& room,
                                 std::string& why) {
  Checks check(lt);
  const auto desc = desc_of(lt, at_a_word(p), check);
  const Layouts layouts(lt, p, check);
  const auto preference = preference_of(lt, room.bytes, check);
  why = check.why();
  if (!why.empty()) return std::nullopt;
  Heuristic best{};
  int found = 0;
  Status status = lt.heuristic(handle, desc.get(), layouts.a.get(), layouts.b.get(), layouts.d.get(), layouts.d.get(),
                               preference.get(), 1, &best, &found);
  if (status == kSuccess && found > 0) status = best.state;
  if (status == kSuccess && found > 0) return DotPlan{best.algorithm, best.workspace_bytes};
  why = no_algorithm(lt, p, room, status);
  return std::nullopt;
}

// The plan of such calls, made by the first. A failure is not kept, since it may pass.
std::optional<DotPlan> plan_of(const Library& lt, Context* handle, const QuantizedDot& p, const Room& room,
                               std::string& why) {
  constexpr size_t kMostPlans = 4096;  // of a process that multiplies ever new shapes
  static std::mutex mutex;
  static std::map<Key, DotPlan> plans;
  const std::lock_guard<std::mutex> lock(mutex);
  const Key key = key_of(handle, p, room);
  if (const auto kept = plans.find(key); kept != plans.end()) return kept->second;
  const auto plan = make_plan(lt, handle, p, room, why);
  if (plans.size() == kMostPlans) plans.clear();
  if (plan) plans.emplace(key, *plan);
  return plan;
}

// A call of the library. What it is given begins at words.
struct Product {
  const Library& lt;
  Context* handle;
  const Room& room;
  const DotPlan& plan;
  cudaStream_t stream;

  std::string operator()(const QuantizedDot& p) const {
    Checks check(lt);
    const auto desc = desc_of(lt, p, check);
    const Layouts layouts(lt, p, check);
    if (!check.why().empty()) return check.why();
    const float alpha = 1, beta = 0;
    check("cublasLtMatmul", lt.matmul(handle, desc.get(), &alpha, p.weights.data, layouts.a.get(), p.x.data,
                                      layouts.b.get(), &beta, p.y.data, layouts.d.get(), p.y.data, layouts.d.get(),
                                      &plan.algorithm, room.data, plan.workspace_bytes, stream));
    return check.why();
  }
};

// Where cuBLASLt wants all arrays to begin.
bool begins_at_words(const QuantizedDot& p) {
  for (const void* array : {p.x.data, static_cast<const void*>(p.x_scales), p.weights.data,
                            static_cast<const void*>(p.weight_scales), p.bias.data, static_cast<const void*>(p.y.data)})
    if (reinterpret_cast<uintptr_t>(array) % kDotMultiple != 0) return false;
  return true;
}

}  // namespace

std::string run(const QuantizedDot& p, Stream stream) {
  if (p.rows == 0 || p.cols == 0) return "";
  const RelaxedCapture relaxed;
  std::string why;
  const Library* const lt = open({}, why);
  if (!lt) return why;
  Context* const handle = handle_of_device(*lt, why);
  if (!handle) return why;
  const Room room(p.workspace);
  const auto plan = plan_of(*lt, handle, p, room, why);
  if (!plan) return why;
  const Product product{*lt, handle, room, *plan, stream};
  if (begins_at_words(p)) return product(p);
  const Room left = room.behind(plan->workspace_bytes);
  return CopiedDot(p, {static_cast<char*>(left.data), static_cast<int64_t>(left.bytes)}, stream).run(product);
}

WorkspaceSize quantized_dot_workspace(const WorkspaceQuery&) {
  return {0, kWorkspaceBytes / static_cast<int64_t>(sizeof(float))};
}

}  // namespace jaxnorm::cuda
