"""Whole blocks of models, with what stands beside their norms: functions for the mapping of `replace_norms`."""

from jaxnorm.flax.block_models import KNOWN, of
from jaxnorm.flax.blocks import (
    decoder_layer,
    dit_layer,
    gated_mlp,
    gelu_mlp,
    resnet_block,
    sandwich_layer,
    silu_mlp,
    timed_resnet_block,
    vit_layer,
)

__all__ = [
    "KNOWN",
    "decoder_layer",
    "dit_layer",
    "gated_mlp",
    "gelu_mlp",
    "of",
    "resnet_block",
    "sandwich_layer",
    "silu_mlp",
    "timed_resnet_block",
    "vit_layer",
]
