"""Whole blocks of published models, with what stands beside their norms: a mapping for `replace_norms`."""

from typing import NoReturn

from jaxnorm.flax.block_models import KNOWN, of

__all__ = ["KNOWN", "of"]


def __getattr__(name: str) -> NoReturn:
    ending = name.rpartition("_")[2]
    remedy = (
        ": functions for any block of some children's names are gone, as what a class computes is not guessed. Give "
        "replace_norms jaxnorm.blocks.of(model) for the classes of jaxnorm.blocks.KNOWN; for others write a function, "
        "as docs/porting.md shows under Whole blocks, and check it by jaxnorm.compare"
    )
    raise AttributeError(
        f"module {__name__!r} has no attribute {name!r}{remedy if ending in ('layer', 'mlp', 'block') else ''}"
    )
