// The kernels of the norms for an instruction set.
#include "ops/norm/cpu.h"
#include "ops/norm/cpu/gated_rows.h"
#include "ops/norm/cpu/norm_rows.h"
#include "ops/norm/cpu/quantized_rows.h"

namespace jaxnorm::cpu {

const NormKernels NormKernels::JAXNORM_ISA = {cpu::norm, cpu::quantized_norm, cpu::gated_norm, cpu::norm_grad,
                                              cpu::gated_norm_grad};

}  // namespace jaxnorm::cpu
