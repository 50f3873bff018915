"""Equinox' norms, Embedding and linear layers on jaxnorm's kernels: change the import line, or a model."""

import importlib.util
from typing import TYPE_CHECKING

if importlib.util.find_spec("equinox") is None:
    raise ImportError("jaxnorm.equinox needs Equinox: pip install 'equinox>=0.13'")

from jaxnorm.equinox.linear import QuantizedLinear
from jaxnorm.equinox.norms import Embedding, GroupNorm, LayerNorm, RMSNorm
from jaxnorm.equinox.replace import quantize_linears, replace_layers
from jaxnorm.ops import misuse

__all__ = ["Embedding", "GroupNorm", "LayerNorm", "QuantizedLinear", "RMSNorm", "quantize_linears", "replace_layers"]

if not TYPE_CHECKING:
    __getattr__ = misuse.no_attribute(__name__)
