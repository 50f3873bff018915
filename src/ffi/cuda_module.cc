// The module jaxnorm._cuda: XLA FFI handlers of the CUDA kernels, and the launch plans behind them.
#include <cuda_runtime_api.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <initializer_list>
#include <string>

#include "cuda/engine/device.h"
#include "cuda/engine/plan.h"
#include "cuda/norms.h"
#include "ffi/handlers.h"
#include "ffi/shard_arguments.h"

namespace nb = nanobind;

namespace jaxnorm {
namespace {

struct Cuda {
  using Context = ffi::PlatformStream<cudaStream_t>;
  static constexpr std::initializer_list<ffi::Traits> kTraits = {ffi::Traits::kCmdBufferCompatible};

  static const Workspaces* workspaces() {
    static constexpr Workspaces functions{cuda::has_tickets, cuda::row_segments, cuda::partial_rows};
    return &functions;
  }

  static ffi::Error run(const Forward& f, cudaStream_t stream) {
    return checked(f.kind, "forward", cuda::forward(f, stream));
  }
  static ffi::Error run(const Backward& b, cudaStream_t stream) {
    return checked(b.kind, "backward", cuda::backward(b, stream));
  }
  static ffi::Error run(const ShardStatistics& p, cudaStream_t stream) {
    return checked(p.kind, "statistics", cuda::shard_statistics(p, stream));
  }
  static ffi::Error run(const ShardApply& p, cudaStream_t stream) {
    return checked(p.kind, "apply", cuda::shard_apply(p, stream));
  }

 private:
  static ffi::Error checked(Kind kind, const char* way, cudaError_t error) {
    if (error == cudaSuccess) return ffi::Error::Success();
    const std::string op = kind == Kind::rms ? "rms_norm " : "layer_norm ";
    return ffi::Error::Internal("jaxnorm: launch of " + op + way + " failed: " + cudaGetErrorString(error));
  }
};

template <Kind kind>
ffi::Error statistics(ffi::RemainingArgs operands, ffi::RemainingRets results, PartStatisticsAttributes attributes,
                      cudaStream_t stream) {
  const auto arguments = part_statistics_arguments(kind, operands, results, attributes);
  return arguments ? Cuda::run(*arguments, stream) : arguments.error();
}

template <Kind kind>
ffi::Error apply(ffi::RemainingArgs operands, ffi::RemainingRets results, PartApplyAttributes attributes,
                 cudaStream_t stream) {
  const auto arguments = part_apply_arguments(kind, operands, results, attributes);
  return arguments ? Cuda::run(*arguments, stream) : arguments.error();
}

// Those of every platform, and those for rows that are split over devices.
nb::dict all_handlers() {
  constexpr auto rms_statistics = statistics<Kind::rms>, layer_statistics = statistics<Kind::layer>;
  constexpr auto rms_apply = apply<Kind::rms>, layer_apply = apply<Kind::layer>;
  constexpr auto traits = Cuda::kTraits;
  XLA_FFI_DEFINE_HANDLER(rms_norm_statistics, rms_statistics, bind<PartStatisticsAttributes>().Ctx<Cuda::Context>(),
                         traits);
  XLA_FFI_DEFINE_HANDLER(layer_norm_statistics, layer_statistics, bind<PartStatisticsAttributes>().Ctx<Cuda::Context>(),
                         traits);
  XLA_FFI_DEFINE_HANDLER(rms_norm_apply, rms_apply, bind<PartApplyAttributes>().Ctx<Cuda::Context>(), traits);
  XLA_FFI_DEFINE_HANDLER(layer_norm_apply, layer_apply, bind<PartApplyAttributes>().Ctx<Cuda::Context>(), traits);

  nb::dict all = handlers<Cuda>();
  all["jaxnorm_rms_norm_statistics"] = nb::capsule(reinterpret_cast<void*>(rms_norm_statistics));
  all["jaxnorm_layer_norm_statistics"] = nb::capsule(reinterpret_cast<void*>(layer_norm_statistics));
  all["jaxnorm_rms_norm_apply"] = nb::capsule(reinterpret_cast<void*>(rms_norm_apply));
  all["jaxnorm_layer_norm_apply"] = nb::capsule(reinterpret_cast<void*>(layer_norm_apply));
  return all;
}

Dtype dtype_of(const std::string& name) {
  if (name == "float32") return Dtype::f32;
  if (name == "float16") return Dtype::f16;
  if (name == "bfloat16") return Dtype::bf16;
  throw nb::value_error(("dtype is " + name + ", expected float32, float16 or bfloat16").c_str());
}

Kind kind_of(const std::string& name) {
  if (name == "rms") return Kind::rms;
  if (name == "layer") return Kind::layer;
  throw nb::value_error(("kind is " + name + ", expected rms or layer").c_str());
}

nb::dict plan(const std::string& op, const std::string& kind, const std::string& x_dtype, int64_t cols, int max_cluster,
              const std::string& gate, bool adds) {
  if (op != "forward" && op != "backward") throw nb::value_error("op is neither forward nor backward");
  if (cols < 1 || max_cluster < 1) throw nb::value_error("cols and max_cluster are expected to be positive");
  if (gate != "" && gate != "first" && gate != "last") throw nb::value_error("gate is neither first nor last");
  const bool gated = gate != "", forward = op == "forward";
  if (gated && (kind != "rms" || cols > kGatedCols)) throw nb::value_error("no kernel has gates for such rows");
  const Dtype x = dtype_of(x_dtype);
  cuda::Plan plan =
      !gated    ? cuda::make_plan(forward ? cuda::Op::forward : cuda::Op::backward, kind_of(kind), x, cols, max_cluster)
      : forward ? cuda::make_gated_forward_plan(x, cols, gate == "first")
                : cuda::make_gated_backward_plan(x, cols, max_cluster);
  if (adds && !forward) plan = cuda::beside_extra_operand(plan);
  const int rows_per_team = forward ? cuda::rows_at_once(plan.threads_per_row, plan.vectors, gated || adds ? 2 : 1) : 1;
  nb::dict out;
  out["regime"] = plan.regime();
  out["rows_per_block"] = plan.rows_per_block * rows_per_team;
  out["rows_per_team"] = rows_per_team;
  out["blocks_per_row"] = plan.blocks_per_row;
  out["threads_per_row"] = plan.threads_per_row * plan.blocks_per_row;
  out["elements_per_thread"] = plan.vectors * cuda::vector_of(x);
  out["segments"] = plan.segments;
  out["ring"] = plan.vectors > 0 && (op == "backward" || plan.blocks_per_row > 1);
  return out;
}

}  // namespace
}  // namespace jaxnorm

NB_MODULE(_cuda, module) {
  using nb::arg;
  module.def("handlers", &jaxnorm::all_handlers, "The XLA FFI handlers, by target name.");
  module.def("architectures", [] { return JAXNORM_CUDA_ARCHITECTURES; }, "What the kernels were compiled for.");
  module.def("toolkit", [] { return JAXNORM_CUDA_TOOLKIT; }, "The version of the CUDA compiler.");
  module.def(
      "has_tickets",
      [](const std::string& kind, const std::string& x_dtype, int64_t cols) {
        return jaxnorm::cuda::has_tickets(jaxnorm::kind_of(kind), jaxnorm::dtype_of(x_dtype), cols);
      },
      arg("kind"), arg("x_dtype"), arg("cols"), "Whether the forward has a count for its rows in a workspace.");
  module.def(
      "row_segments",
      [](const std::string& x_dtype, int64_t cols) {
        return jaxnorm::cuda::row_segments(jaxnorm::dtype_of(x_dtype), cols);
      },
      arg("x_dtype"), arg("cols"), "How many pairs of sums of each row the backward keeps in a workspace; 0: none.");
  module.def(
      "partial_rows",
      [](const std::string& x_dtype, int64_t cols, int64_t count, int64_t inner) {
        return jaxnorm::cuda::partial_rows(jaxnorm::dtype_of(x_dtype), cols, {count, inner});
      },
      arg("x_dtype"), arg("cols"), arg("count") = 1, arg("inner") = 1,
      "How many partial sums of dscale and dbias the backward keeps in its workspace, for `count` heads of `inner` "
      "neighbouring rows each.");
  module.def(
      "max_cluster", [] { return jaxnorm::cuda::current_device().max_cluster(); },
      "How many blocks a cluster of the current GPU has at most; 1: it has no clusters.");
  module.def(
      "plan", &jaxnorm::plan, arg("op"), arg("kind"), arg("x_dtype"), arg("cols"), arg("max_cluster") = 16,
      arg("gate") = "", arg("adds") = false,
      "The launch plan for rows of `cols` elements, with a gate that comes `first` or `last` or with none, and with a "
      "residual if one is added; elements_per_thread is 0 where a row is read more than once, ring tells whether rows "
      "are fetched ahead by "
      "way of shared memory, where the GPU can.");
}
