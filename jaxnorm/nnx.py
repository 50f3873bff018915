"""`flax.nnx`'s norms on jaxnorm's kernels: change the import line, keep the model and its checkpoints."""

from jaxnorm.flax.nnx_activations import GatedActivation
from jaxnorm.flax.nnx_float8 import Float8Linear
from jaxnorm.flax.nnx_groups import GroupNorm, InstanceNorm
from jaxnorm.flax.nnx_linear import QuantizedLinear, QuantizedParam
from jaxnorm.flax.nnx_norms import (
    AddLayerNorm,
    AddRMSNorm,
    GatedRMSNorm,
    LayerNorm,
    QKNormRotary,
    QuantizedLayerNorm,
    QuantizedRMSNorm,
    RMSNorm,
)
from jaxnorm.flax.nnx_replace import replace_norms
from jaxnorm.flax.nnx_restore import restore_norms

__all__ = [
    "AddLayerNorm",
    "AddRMSNorm",
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
    "replace_norms",
    "restore_norms",
]
