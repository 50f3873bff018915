"""The text of a call that XLA partitions: what it computes, in JSON.

Nothing in it refers to the process that made it, so a program may be cached or exported and compiled elsewhere. An
exported program outlives the package's code, so what is here stays readable: a dataclass in it may get fields with
defaults, and anything else needs a new VERSION.
"""

import dataclasses
import json
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from jaxnorm.primitive.registry import TYPES

VERSION = 1


def encode(*call: Any) -> str:
    return json.dumps([VERSION, *call], default=_encode, sort_keys=True)


def decode(text: bytes) -> Any:
    """The arguments of `encode`, with tuples in place of lists."""
    version, *call = _decode(json.loads(text))
    if version != VERSION:
        raise ValueError(
            f"jaxnorm: a program has a call of version {version}, this jaxnorm reads {VERSION}; export it again."
        )
    return call


def _encode(value: object) -> dict[str, Any] | None:
    if isinstance(value, np.dtype):
        return {"dtype": value.name}
    if isinstance(value, PartitionSpec):  # over an Explicit mesh, which a device's program has no axis of
        return None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {type(value).__name__: fields}
    raise TypeError(f"{value!r} cannot stand in a call's text")


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_decode, value))
    if value == "jnp":  # what the implementation "xla" was called
        return "xla"
    if not isinstance(value, dict):
        return value
    decoded = {key: _decode(item) for key, item in value.items()}
    if len(decoded) > 1:
        return decoded
    ((name, content),) = decoded.items()
    if name == "dtype":
        return np.dtype(content)
    return TYPES[name](**content) if name in TYPES else decoded
