// The module jaxnorm._cuda: XLA FFI handlers of the CUDA kernels, and the launch plans behind them.
#include <cuda_runtime_api.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "cuda/norms.h"
#include "cuda/plan.h"
#include "ffi/arguments.h"

namespace nb = nanobind;

namespace jaxnorm {
namespace {

template <class Arguments>
ffi::Error run(cudaError_t (*kernel)(const Arguments&, cudaStream_t), const char* op,
               const ffi::ErrorOr<Arguments>& arguments, cudaStream_t stream) {
  if (!arguments) return arguments.error();
  const cudaError_t error = kernel(*arguments, stream);
  if (error == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string("jaxnorm_") + op + ": launch failed: " + cudaGetErrorString(error));
}

template <Kind kind>
ffi::Error forward(ffi::RemainingArgs operands, ffi::RemainingRets results, ForwardAttributes attributes,
                   cudaStream_t stream) {
  return run(cuda::forward, kind == Kind::rms ? "rms_norm_fwd" : "layer_norm_fwd",
             forward_arguments(kind, operands, results, attributes), stream);
}

constexpr Workspaces kWorkspaces{cuda::row_segments, cuda::partial_rows};

template <Kind kind>
ffi::Error backward(ffi::RemainingArgs operands, ffi::RemainingRets results, BackwardAttributes attributes,
                    cudaStream_t stream) {
  return run(cuda::backward, kind == Kind::rms ? "rms_norm_bwd" : "layer_norm_bwd",
             backward_arguments(kind, operands, results, attributes, &kWorkspaces), stream);
}

using Stream = ffi::PlatformStream<cudaStream_t>;
#define JAXNORM_DEFINE_HANDLER(NAME, FUNCTION, ATTRIBUTES) \
  XLA_FFI_DEFINE_HANDLER(NAME, FUNCTION, bind<ATTRIBUTES>().Ctx<Stream>(), {ffi::Traits::kCmdBufferCompatible})

JAXNORM_DEFINE_HANDLER(rms_norm_fwd, forward<Kind::rms>, ForwardAttributes);
JAXNORM_DEFINE_HANDLER(layer_norm_fwd, forward<Kind::layer>, ForwardAttributes);
JAXNORM_DEFINE_HANDLER(rms_norm_bwd, backward<Kind::rms>, BackwardAttributes);
JAXNORM_DEFINE_HANDLER(layer_norm_bwd, backward<Kind::layer>, BackwardAttributes);

nb::dict handlers() {
  nb::dict all;
  all["jaxnorm_rms_norm_fwd"] = nb::capsule(reinterpret_cast<void*>(rms_norm_fwd));
  all["jaxnorm_layer_norm_fwd"] = nb::capsule(reinterpret_cast<void*>(layer_norm_fwd));
  all["jaxnorm_rms_norm_bwd"] = nb::capsule(reinterpret_cast<void*>(rms_norm_bwd));
  all["jaxnorm_layer_norm_bwd"] = nb::capsule(reinterpret_cast<void*>(layer_norm_bwd));
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

nb::dict plan(const std::string& op, const std::string& x_dtype, int64_t cols, int max_cluster) {
  if (op != "forward" && op != "backward") throw nb::value_error("op is neither forward nor backward");
  const Dtype x = dtype_of(x_dtype);
  const cuda::Plan plan =
      cuda::make_plan(op == "forward" ? cuda::Op::forward : cuda::Op::backward, x, cols, max_cluster);
  nb::dict out;
  out["regime"] = plan.regime();
  out["rows_per_block"] = plan.rows_per_block;
  out["blocks_per_row"] = plan.blocks_per_row;
  out["threads_per_row"] = plan.threads_per_row * plan.blocks_per_row;
  out["elements_per_thread"] = plan.vectors * cuda::vector_of(x);
  out["segments"] = plan.segments;
  return out;
}

}  // namespace
}  // namespace jaxnorm

NB_MODULE(_cuda, module) {
  using nb::arg;
  module.def("handlers", &jaxnorm::handlers, "The XLA FFI handlers, by target name.");
  module.def("architectures", [] { return JAXNORM_CUDA_ARCHITECTURES; }, "What the kernels were compiled for.");
  module.def("toolkit", [] { return JAXNORM_CUDA_TOOLKIT; }, "The version of the CUDA compiler.");
  module.def(
      "row_segments",
      [](const std::string& x_dtype, int64_t cols) {
        return jaxnorm::cuda::row_segments(jaxnorm::dtype_of(x_dtype), cols);
      },
      arg("x_dtype"), arg("cols"), "How many pairs of sums of each row the backward keeps in a workspace; 0: none.");
  module.def(
      "partial_rows",
      [](const std::string& kind, const std::string& x_dtype, int64_t cols) {
        return jaxnorm::cuda::partial_rows(jaxnorm::kind_of(kind), jaxnorm::dtype_of(x_dtype), cols);
      },
      arg("kind"), arg("x_dtype"), arg("cols"), "How many partial sums of dscale and dbias the backward keeps in its workspace.");
  module.def("plan", &jaxnorm::plan, arg("op"), arg("x_dtype"), arg("cols"), arg("max_cluster") = 16,
             "The launch plan for rows of `cols` elements; elements_per_thread is 0 where none are held in registers.");
}
