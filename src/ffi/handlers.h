// The XLA FFI handlers of a platform, by target name.
#pragma once

#include <nanobind/nanobind.h>

#include <initializer_list>

#include "ffi/arguments.h"
#include "ffi/gated_arguments.h"

namespace jaxnorm {

// Platform: `Context`, what XLA hands a call beside its buffers, in the words of the binding; `kTraits`;
// `workspaces()`, or null; and `run`, of a Forward or a Backward in a context.
template <class Platform, Kind kind>
ffi::Error forward(ffi::RemainingArgs operands, ffi::RemainingRets results, ForwardAttributes attributes,
                   typename ffi::CtxDecoding<typename Platform::Context>::Type context) {
  const auto arguments = forward_arguments(kind, operands, results, attributes, Platform::workspaces());
  return arguments ? Platform::run(*arguments, context) : arguments.error();
}

template <class Platform, Kind kind>
ffi::Error quantized(ffi::RemainingArgs operands, ffi::RemainingRets results, QuantizedAttributes attributes,
                     typename ffi::CtxDecoding<typename Platform::Context>::Type context) {
  const auto arguments = quantized_arguments(kind, operands, results, attributes);
  return arguments ? Platform::run(*arguments, context) : arguments.error();
}

template <class Platform, Kind kind>
ffi::Error backward(ffi::RemainingArgs operands, ffi::RemainingRets results, BackwardAttributes attributes,
                    typename ffi::CtxDecoding<typename Platform::Context>::Type context) {
  const auto arguments = backward_arguments(kind, operands, results, attributes, Platform::workspaces());
  return arguments ? Platform::run(*arguments, context) : arguments.error();
}

template <class Platform>
ffi::Error gated(ffi::RemainingArgs operands, ffi::RemainingRets results, GatedForwardAttributes attributes,
                 typename ffi::CtxDecoding<typename Platform::Context>::Type context) {
  const auto arguments = gated_forward_arguments(operands, results, attributes);
  return arguments ? Platform::run(*arguments, context) : arguments.error();
}

template <class Platform>
ffi::Error gated_backward(ffi::RemainingArgs operands, ffi::RemainingRets results, GatedBackwardAttributes attributes,
                          typename ffi::CtxDecoding<typename Platform::Context>::Type context) {
  const auto arguments = gated_backward_arguments(operands, results, attributes, Platform::workspaces());
  return arguments ? Platform::run(*arguments, context) : arguments.error();
}

template <class Platform>
nanobind::dict handlers() {
  using Context = typename Platform::Context;
  constexpr auto rms_fwd = forward<Platform, Kind::rms>, layer_fwd = forward<Platform, Kind::layer>;
  constexpr auto rms_quantized = quantized<Platform, Kind::rms>, layer_quantized = quantized<Platform, Kind::layer>;
  constexpr auto rms_bwd = backward<Platform, Kind::rms>, layer_bwd = backward<Platform, Kind::layer>;
  constexpr auto gated_fwd = gated<Platform>, gated_bwd = gated_backward<Platform>;
  constexpr auto traits = Platform::kTraits;
  XLA_FFI_DEFINE_HANDLER(rms_norm_fwd, rms_fwd, bind<ForwardAttributes>().template Ctx<Context>(), traits);
  XLA_FFI_DEFINE_HANDLER(layer_norm_fwd, layer_fwd, bind<ForwardAttributes>().template Ctx<Context>(), traits);
  XLA_FFI_DEFINE_HANDLER(rms_norm_quantized_fwd, rms_quantized, bind<QuantizedAttributes>().template Ctx<Context>(),
                         traits);
  XLA_FFI_DEFINE_HANDLER(layer_norm_quantized_fwd, layer_quantized, bind<QuantizedAttributes>().template Ctx<Context>(),
                         traits);
  XLA_FFI_DEFINE_HANDLER(rms_norm_bwd, rms_bwd, bind<BackwardAttributes>().template Ctx<Context>(), traits);
  XLA_FFI_DEFINE_HANDLER(layer_norm_bwd, layer_bwd, bind<BackwardAttributes>().template Ctx<Context>(), traits);
  XLA_FFI_DEFINE_HANDLER(gated_rms_norm_fwd, gated_fwd, bind<GatedForwardAttributes>().template Ctx<Context>(), traits);
  XLA_FFI_DEFINE_HANDLER(gated_rms_norm_bwd, gated_bwd, bind<GatedBackwardAttributes>().template Ctx<Context>(),
                         traits);

  nanobind::dict all;
  all["jaxnorm_rms_norm_fwd"] = nanobind::capsule(reinterpret_cast<void*>(rms_norm_fwd));
  all["jaxnorm_layer_norm_fwd"] = nanobind::capsule(reinterpret_cast<void*>(layer_norm_fwd));
  all["jaxnorm_rms_norm_quantized_fwd"] = nanobind::capsule(reinterpret_cast<void*>(rms_norm_quantized_fwd));
  all["jaxnorm_layer_norm_quantized_fwd"] = nanobind::capsule(reinterpret_cast<void*>(layer_norm_quantized_fwd));
  all["jaxnorm_rms_norm_bwd"] = nanobind::capsule(reinterpret_cast<void*>(rms_norm_bwd));
  all["jaxnorm_layer_norm_bwd"] = nanobind::capsule(reinterpret_cast<void*>(layer_norm_bwd));
  all["jaxnorm_gated_rms_norm_fwd"] = nanobind::capsule(reinterpret_cast<void*>(gated_rms_norm_fwd));
  all["jaxnorm_gated_rms_norm_bwd"] = nanobind::capsule(reinterpret_cast<void*>(gated_rms_norm_bwd));
  return all;
}

}  // namespace jaxnorm
