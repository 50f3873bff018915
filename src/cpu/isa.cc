// The kernels for one instruction set: compiled once for each, under the name JAXNORM_ISA.
#include "cpu/kernels.h"
#include "cpu/ops/arrays.h"
#include "cpu/ops/cross_entropy_rows.h"
#include "cpu/ops/gated_norm_quantized_rows.h"
#include "cpu/ops/gated_norm_rows.h"
#include "cpu/ops/group_norm_rows.h"
#include "cpu/ops/norm_rows.h"
#include "cpu/ops/qk_norm_rotary_rows.h"
#include "cpu/ops/quantized_norm_rows.h"
#include "cpu/ops/sandwich_norm_rows.h"
#include "cpu/ops/softmax_rows.h"

namespace jaxnorm::cpu {

extern const Kernels JAXNORM_ISA = {
    JAXNORM_ISA_NAME,
    norm,
    quantized_norm,
    gated_norm,
    gated_norm_quantized,
    sandwich_norm,
    norm_grad,
    gated_norm_grad,
    sandwich_norm_grad,
    softmax,
    softmax_grad,
    log_softmax_grad,
    cross_entropy,
    cross_entropy_grad,
    qk_norm_rotary,
    qk_norm_rotary_grad,
    group_norm_rows,
    group_moments,
    group_norm,
    group_norm_sums,
    group_norm_grad,
    add,
    cast,
    widen,
};

}  // namespace jaxnorm::cpu
