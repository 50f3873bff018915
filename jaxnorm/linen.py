"""`flax.linen`'s norms on jaxnorm's kernels: change the import line, keep the model and its checkpoints."""

from jaxnorm.flax.compare import linen_compare as compare
from jaxnorm.flax.linen_activations import GatedActivation
from jaxnorm.flax.linen_float8 import float8_linears
from jaxnorm.flax.linen_groups import GroupNorm, InstanceNorm
from jaxnorm.flax.linen_linear import quantized_linears
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
from jaxnorm.flax.linen_quantize import quantize_linears
from jaxnorm.flax.linen_replace import replace_norms

__all__ = [
    "AddLayerNorm",
    "AddRMSNorm",
    "GatedActivation",
    "GatedRMSNorm",
    "GroupNorm",
    "InstanceNorm",
    "LayerNorm",
    "QKNormRotary",
    "QuantizedLayerNorm",
    "QuantizedRMSNorm",
    "RMSNorm",
    "compare",
    "float8_linears",
    "quantize_linears",
    "quantized_linears",
    "replace_norms",
]
