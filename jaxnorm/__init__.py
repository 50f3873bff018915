"""Kernels for JAX, forward and backward, and the same formulas where there are none.

RMSNorm and LayerNorm, alone, with a residual add, between two blocks, with a gate or with an 8-bit result; GroupNorm;
gated activations, also with an 8-bit result; rotary embedding with the norms of queries and keys; softmax, log-softmax
and cross-entropy, also of a linear layer; `quantize` and products of 8-bit values, `quantized_dot` and `float8_linear`.
"""

import importlib.metadata
import importlib.util
import pkgutil
from types import ModuleType
from typing import TYPE_CHECKING

# Python started in a clone's root finds this source directory before the installed package. The native modules are
# in the installed one, so its directory is searched too.
__path__ = pkgutil.extend_path(__path__, __name__)

from jaxnorm import checkpoint_policies, reports
from jaxnorm.inspect.explain import explain
from jaxnorm.inspect.tune import tune
from jaxnorm.inspect.tuned import Tuned
from jaxnorm.ops import misuse
from jaxnorm.ops.cross_entropy.api import softmax_cross_entropy_with_integer_labels
from jaxnorm.ops.cross_entropy.linear_api import linear_cross_entropy
from jaxnorm.ops.float8_linear.api import float8_linear
from jaxnorm.ops.float8_linear.recipe import Float8Recipe, float8_dot_general
from jaxnorm.ops.gated_activation.api import gated_activation
from jaxnorm.ops.gated_activation.quantized_api import gated_activation_quantized
from jaxnorm.ops.group_norm.api import group_norm
from jaxnorm.ops.norm.added_api import add_layer_norm, add_rms_norm
from jaxnorm.ops.norm.api import layer_norm, rms_norm
from jaxnorm.ops.norm.gated_api import gated_rms_norm
from jaxnorm.ops.norm.gated_quantized import gated_rms_norm_quantized
from jaxnorm.ops.norm.quantized_api import layer_norm_quantized, rms_norm_quantized
from jaxnorm.ops.options import implementation
from jaxnorm.ops.qk_norm_rotary.api import qk_norm_rotary
from jaxnorm.ops.qk_norm_rotary.packed_api import qkv_norm_rotary
from jaxnorm.ops.quantize.api import quantize, quantize_kernel
from jaxnorm.ops.quantized_dot.api import quantized_dot
from jaxnorm.ops.sandwich_norm.api import rms_norm_add_rms_norm
from jaxnorm.ops.softmax.api import log_softmax, softmax
from jaxnorm.quantization import Quantization, Quantized
from jaxnorm.replacement import compare_layers, float8_linears, quantize_linears, replace_layers, restore_layers
from jaxnorm.results import QK, QKV, AddedNorm, QuantizedNorm, RowStatistics

try:
    __version__ = importlib.metadata.version(__name__)
except importlib.metadata.PackageNotFoundError:  # a source tree that was never installed
    __version__ = "unknown"

__all__ = [
    "QK",
    "QKV",
    "AddedNorm",
    "Float8Recipe",
    "Quantization",
    "Quantized",
    "QuantizedNorm",
    "RowStatistics",
    "Tuned",
    "__version__",
    "add_layer_norm",
    "add_rms_norm",
    "checkpoint_policies",
    "compare_layers",
    "explain",
    "float8_dot_general",
    "float8_linear",
    "float8_linears",
    "gated_activation",
    "gated_activation_quantized",
    "gated_rms_norm",
    "gated_rms_norm_quantized",
    "group_norm",
    "implementation",
    "layer_norm",
    "layer_norm_quantized",
    "linear_cross_entropy",
    "log_softmax",
    "qk_norm_rotary",
    "qkv_norm_rotary",
    "quantize",
    "quantize_kernel",
    "quantize_linears",
    "quantized_dot",
    "replace_layers",
    "reports",
    "restore_layers",
    "rms_norm",
    "rms_norm_add_rms_norm",
    "rms_norm_quantized",
    "softmax",
    "softmax_cross_entropy_with_integer_labels",
    "tune",
]

# Type checkers see these modules; a program imports one when it first names it, since the library that it is for, named
# here, is optional and takes long.
_LAZY = {"blocks": "flax", "info": "jax", "linen": "flax", "nnx": "flax", "equinox": "equinox", "keras": "keras"}
if TYPE_CHECKING:
    from jaxnorm import blocks as blocks, equinox as equinox, info as info, keras as keras, linen as linen, nnx as nnx
else:

    def __getattr__(name: str) -> ModuleType:
        if name not in _LAZY:
            misuse.no_attribute(__name__)(name)
        return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    """The public names, and no internals; none that needs a library which is not installed, so that each can be had."""
    public = {*__all__, *(name for name, library in _LAZY.items() if importlib.util.find_spec(library))}
    return sorted(public | {name for name in globals() if name[:2] == name[-2:] == "__"})
