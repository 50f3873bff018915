"""Norms and Embed of `flax.linen` on jaxnorm's kernels: change the import line, keep the model and its checkpoints."""

from typing import TYPE_CHECKING

from jaxnorm.integrations.flax.linen_layers import (
    AddLayerNorm,
    AddRMSNorm,
    Embed,
    GatedActivation,
    GatedRMSNorm,
    GroupNorm,
    InstanceNorm,
    LayerNorm,
    QKNormRotary,
    QuantizedLayerNorm,
    QuantizedRMSNorm,
    RMSNorm,
)
from jaxnorm.integrations.flax.linen_linear import using_float8, using_quantized
from jaxnorm.integrations.flax.linen_quantize import quantize_linears
from jaxnorm.integrations.flax.linen_replace import compare_layers, using_layers
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
