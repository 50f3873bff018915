"""Activations, by the names and functions that a caller has for them."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax

from jaxnorm.ops import checks

# A function of jax.nn, or another name, in place of ours.
Synonym = Literal["swish"] | Callable[..., Any]
_NAMES = {"swish": "silu"}
_FUNCTIONS = {"silu": jax.nn.silu, "sigmoid": jax.nn.sigmoid, "relu": jax.nn.relu, "gelu": jax.nn.gelu}


def check_activation(function: str, activation: Any, known: Sequence[str | None]) -> Any:
    """One of the known names, for what is asked for."""
    if not callable(activation):
        is_synonym = isinstance(activation, str) and activation in _NAMES
        return checks.check_one_of(function, "activation", _NAMES[activation] if is_synonym else activation, known)
    for name, meant in _FUNCTIONS.items():
        if activation is meant and name in known:
            return name
    *others, last = map(repr, known)
    raise ValueError(
        f"{function}: unknown activation {activation!r}; expected {', '.join(others)} or {last}, or that function of "
        f"jax.nn as it stands. Take another one of the result."
    )
