// The module jaxnorm._cuda: XLA FFI handlers of the CUDA kernels, and the launch plans behind them.
#include <cuda_runtime_api.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "cuda_ops.h"
#include "engine/cuda/cublaslt.h"
#include "engine/cuda/device.h"
#include "engine/cuda/plan.h"
#include "ffi/cuda.h"
#include "ffi/module.h"

namespace nb = nanobind;

namespace jaxnorm {
namespace {

Dtype dtype_of(const std::string& name) {
  if (name == "float32") return Dtype::f32;
  if (name == "float16") return Dtype::f16;
  if (name == "bfloat16") return Dtype::bf16;
  throw nb::value_error(("dtype is " + name + ", expected float32, float16 or bfloat16").c_str());
}

// Asks no device, so that there need not be one.
int driver() {
  int version = 0;
  return cudaDriverGetVersion(&version) == cudaSuccess ? version : 0;
}

// Empty where it is open.
std::string open_cublaslt(const std::vector<std::string>& paths) {
  std::string why;
  return cuda::cublaslt::open(paths, why) ? "" : why;
}

nb::tuple workspace(const std::string& target, const std::string& dtype, int64_t cols, int weights, int64_t count,
                    int64_t inner, bool with_dx, bool keeps_row, bool widens_row) {
  if (cols < 1 || weights < 0 || count < 1 || inner < 1) {
    throw nb::value_error("cols, count and inner are expected to be positive, and weights not to be negative");
  }
  for (const Handler& handler : handlers<Cuda, kTable<Cuda>>()) {
    if (target != handler.target) continue;
    if (!handler.workspace) return nb::make_tuple(0, 0);
    WorkspaceSize size =
        handler.workspace({dtype_of(dtype), cols, weights, {count, inner}, with_dx, keeps_row, widens_row});
    // One float might be taken for the statistic of a single row.
    if (size.floats_a_row == 0 && size.floats == 1) size.floats = 2;
    return nb::make_tuple(size.floats_a_row, size.floats);
  }
  throw nb::value_error(("there is no target " + target).c_str());
}

nb::dict plan(const std::string& op, const std::string& kind, const std::string& x_dtype, int64_t cols, int max_cluster,
              const std::string& gated, bool adds) {
  if (op != "forward" && op != "backward") throw nb::value_error("op is neither forward nor backward");
  if (cols < 1 || max_cluster < 1) throw nb::value_error("cols and max_cluster are expected to be positive");
  if (gated != "" && gated != "first" && gated != "last") throw nb::value_error("gated is neither first nor last");
  if (kind != "rms" && kind != "layer") throw nb::value_error(("kind is " + kind + ", expected rms or layer").c_str());
  const Dtype x = dtype_of(x_dtype);
  const auto answer =
      cuda::answer({op == "forward", kind == "layer", x, cols, max_cluster, gated != "", gated == "first", adds});
  if (!answer) throw nb::value_error("no kernel has gates for such rows");
  const cuda::Plan& plan = answer->plan;
  nb::dict out;
  out["regime"] = plan.regime();
  out["rows_per_block"] = plan.rows_per_block * answer->rows_at_once;
  out["rows_per_team"] = answer->rows_at_once;
  out["blocks_per_row"] = plan.blocks_per_row;
  out["threads_per_row"] = plan.threads_per_row * plan.blocks_per_row;
  out["elements_per_thread"] = plan.vectors * cuda::vector_of(x);
  out["segments"] = plan.segments;
  out["registers"] = answer->registers;
  out["ring"] = plan.vectors > 0 && (op == "backward" || plan.blocks_per_row > 1);
  return out;
}

}  // namespace
}  // namespace jaxnorm

NB_MODULE(_cuda, module) {
  using nb::arg;
  jaxnorm::define<jaxnorm::Cuda, jaxnorm::kTable<jaxnorm::Cuda>>(module);
  module.def("architectures", [] { return JAXNORM_CUDA_ARCHITECTURES; }, "What the kernels were compiled for.");
  module.def("toolkit", [] { return JAXNORM_CUDA_TOOLKIT; }, "The version of the CUDA compiler.");
  module.def("driver", &jaxnorm::driver, "The newest CUDA that the driver serves, 12040 for 12.4; 0: there is none.");
  module.def("cublaslt", &jaxnorm::open_cublaslt, arg("paths"),
             "Opens cuBLASLt, for the whole process and once: one that is loaded, or that the loader finds, or at one "
             "of these paths. Returns why there is none that will do, or nothing.");
  module.def(
      "workspace", &jaxnorm::workspace, arg("target"), arg("dtype"), arg("cols"), nb::kw_only(), arg("weights") = 0,
      arg("count") = 1, arg("inner") = 1, arg("with_dx") = false, arg("keeps_row") = false, arg("widens_row") = false,
      "How many floats a call of `target` wants in its workspace for each row, and how many more, where rows of "
      "`cols` elements of `dtype` are normalised: the gradients of so many `weights` are wanted, of `count` heads "
      "of `inner` neighbouring rows each, and the gradient of x; and whether a row is kept for each row, and one of a "
      "half type may be as float32.");
  module.def(
      "max_cluster", [] { return jaxnorm::cuda::current_device().max_cluster(); },
      "How many blocks a cluster of the current GPU has at most; 1: it has no clusters.");
  module.def(
      "plan", &jaxnorm::plan, arg("op"), arg("kind"), arg("x_dtype"), arg("cols"), arg("max_cluster") = 16,
      arg("gated") = "", arg("adds") = false,
      "The launch plan for rows of `cols` elements, gated `first` or `last` or not, and with another array if one is "
      "added; elements_per_thread is 0 where a row is read more than once, registers are the most that a thread has "
      "where results are not quantised, ring tells whether shared memory fetches rows ahead, where the GPU can.");
}
