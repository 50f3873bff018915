// The tables of the two modules. Python knows targets by these names.
#pragma once

#include <tuple>

#include "ffi/cross_entropy.h"
#include "ffi/gated_norm.h"
#include "ffi/gated_norm_quantized.h"
#include "ffi/group_norm.h"
#include "ffi/norm.h"
#include "ffi/norm_shard.h"
#include "ffi/qk_norm_rotary.h"
#include "ffi/quantized_dot.h"
#include "ffi/quantized_norm.h"
#include "ffi/sandwich_norm.h"
#include "ffi/softmax.h"
#include "ffi/table.h"

namespace jaxnorm {

// The functions of a platform that keeps nothing beside results. Another has functions of its own by these names.
struct NoWorkspaces {
  template <Kind kind>
  static constexpr WorkspaceFunction* norm = nullptr;
  static constexpr WorkspaceFunction *norm_grad = nullptr, *gated_norm_grad = nullptr, *qk_norm_rotary_grad = nullptr;
  static constexpr WorkspaceFunction *sandwich_norm = nullptr, *sandwich_norm_grad = nullptr, *softmax = nullptr;
  static constexpr WorkspaceFunction *group_norm = nullptr, *group_norm_grad = nullptr;
};

template <class Workspaces>
inline constexpr std::tuple kOps{
    Row{"jaxnorm_rms_norm_fwd", read_norm<Kind::rms>, Workspaces::template norm<Kind::rms>},
    Row{"jaxnorm_layer_norm_fwd", read_norm<Kind::layer>, Workspaces::template norm<Kind::layer>},
    Row{"jaxnorm_rms_norm_quantized_fwd", read_quantized_norm<Kind::rms>},
    Row{"jaxnorm_layer_norm_quantized_fwd", read_quantized_norm<Kind::layer>},
    Row{"jaxnorm_gated_rms_norm_fwd", read_gated_norm},
    Row{"jaxnorm_gated_rms_norm_quantized_fwd", read_gated_norm_quantized},
    Row{"jaxnorm_group_norm_fwd", read_group_norm, Workspaces::group_norm},
    Row{"jaxnorm_rms_norm_add_rms_norm_fwd", read_sandwich_norm, Workspaces::sandwich_norm},
    Row{"jaxnorm_qk_norm_rotary_fwd", read_qk_norm_rotary},
    Row{"jaxnorm_softmax_fwd", read_softmax<false>, Workspaces::softmax},
    Row{"jaxnorm_log_softmax_fwd", read_softmax<true>, Workspaces::softmax},
    Row{"jaxnorm_cross_entropy_fwd", read_cross_entropy},
    Row{"jaxnorm_rms_norm_bwd", read_norm_grad<Kind::rms>, Workspaces::norm_grad},
    Row{"jaxnorm_layer_norm_bwd", read_norm_grad<Kind::layer>, Workspaces::norm_grad},
    Row{"jaxnorm_gated_rms_norm_bwd", read_gated_norm_grad, Workspaces::gated_norm_grad},
    Row{"jaxnorm_group_norm_bwd", read_group_norm_grad, Workspaces::group_norm_grad},
    Row{"jaxnorm_rms_norm_add_rms_norm_bwd", read_sandwich_norm_grad, Workspaces::sandwich_norm_grad},
    Row{"jaxnorm_qk_norm_rotary_bwd", read_qk_norm_rotary_grad, Workspaces::qk_norm_rotary_grad},
    Row{"jaxnorm_softmax_bwd", read_softmax_grad},
    Row{"jaxnorm_log_softmax_bwd", read_log_softmax_grad},
    Row{"jaxnorm_cross_entropy_bwd", read_cross_entropy_grad},
};

// For rows that are sharded over devices, which no platform but CUDA has.
inline constexpr std::tuple kShardOps{
    Row{"jaxnorm_rms_norm_statistics", read_shard_statistics<Kind::rms>},
    Row{"jaxnorm_layer_norm_statistics", read_shard_statistics<Kind::layer>},
    Row{"jaxnorm_rms_norm_apply", read_shard_apply<Kind::rms>},
    Row{"jaxnorm_layer_norm_apply", read_shard_apply<Kind::layer>},
};

// What a library computes, which no platform but CUDA has.
template <class Workspaces>
inline constexpr std::tuple kLibraryOps{
    Row{"jaxnorm_quantized_dot", read_quantized_dot, Workspaces::quantized_dot},
};

}  // namespace jaxnorm
