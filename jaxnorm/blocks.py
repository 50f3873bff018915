"""Blocks of published models, each with what surrounds its norms: a mapping for `replace_layers`."""

from typing import TYPE_CHECKING

from jaxnorm.integrations.flax.blocks import KNOWN, find
from jaxnorm.ops import misuse

__all__ = ["KNOWN", "find"]

if not TYPE_CHECKING:
    __getattr__ = misuse.no_attribute(__name__)
