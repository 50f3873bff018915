"""What tests use of the package beside its public names: every such import stands here."""

from jaxnorm.native import compat, ffi, fit, private
from jaxnorm.ops.gated_norm.formula import LONGEST as LONGEST_GATED
from jaxnorm.primitive import fallback, weights
from jaxnorm.primitive.weights import LONGEST as LONGEST_PER_HEAD
from jaxnorm.quantization import GROUP_SIZES, SMALLEST_SCALE

__all__ = [
    "GROUP_SIZES",
    "LONGEST_GATED",
    "LONGEST_PER_HEAD",
    "SMALLEST_SCALE",
    "compat",
    "fallback",
    "ffi",
    "fit",
    "private",
    "weights",
]
