"""Norms and Embed of `flax.nnx` on jaxnorm's kernels: change the import line, keep the model and its checkpoints."""

from typing import TYPE_CHECKING

from jaxnorm.integrations.flax.nnx_layers import (
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
from jaxnorm.integrations.flax.nnx_linear import Float8Linear, QuantizedLinear, QuantizedParam
from jaxnorm.integrations.flax.nnx_replace import replace_layers, restore_layers
from jaxnorm.ops import misuse

__all__ = [
    "AddLayerNorm",
    "AddRMSNorm",
    "Embed",
    "Float8Linear",
    "GatedActivation",
    "GatedRMSNorm",
    "GroupNorm",
    "InstanceNorm",
    "LayerNorm",
    "QKNormRotary",
    "QuantizedLayerNorm",
    "QuantizedLinear",
    "QuantizedParam",
    "QuantizedRMSNorm",
    "RMSNorm",
    "replace_layers",
    "restore_layers",
]

if not TYPE_CHECKING:
    __getattr__ = misuse.no_attribute(__name__)
