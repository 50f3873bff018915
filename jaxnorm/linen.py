"""`flax.linen`'s norms and Embed on jaxnorm's kernels: change the import line, keep the model and its checkpoints."""

from typing import TYPE_CHECKING

from jaxnorm.flax.compare import linen_compare_layers as compare_layers
from jaxnorm.flax.linen_linear import using_float8, using_quantized
from jaxnorm.flax.linen_norms import (
    AddLayerNorm,
    AddRMSNorm,
    GatedRMSNorm,
    LayerNorm,
    QKNormRotary,
    QuantizedLayerNorm,
    QuantizedRMSNorm,
    RMSNorm,
)
from jaxnorm.flax.linen_others import Embed, GatedActivation, GroupNorm, InstanceNorm
from jaxnorm.flax.linen_quantize import quantize_linears
from jaxnorm.flax.linen_replace import using_layers
from jaxnorm.ops import misuse

__all__ = [
    "AddLayerNorm",
    "AddRMSNorm",
    "Embed",
    "GatedActivation",
    "GatedRMSNorm",
    "GroupNorm",
    "InstanceNorm",
    "LayerNorm",
    "QKNormRotary",
    "QuantizedLayerNorm",
    "QuantizedRMSNorm",
    "RMSNorm",
    "compare_layers",
    "quantize_linears",
    "using_float8",
    "using_layers",
    "using_quantized",
]

if not TYPE_CHECKING:
    __getattr__ = misuse.no_attribute(__name__)
