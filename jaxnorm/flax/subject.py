"""A norm of a model's own class as something to try: its parameters' shapes, and copies of it with other values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm.flax.calls import linen, nnx

F32 = jnp.dtype(jnp.float32)
DTYPES = (F32, jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
Call = Callable[..., Any]


class NoMatch(Exception):
    """Says why a module is left."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """A module to find a formula for."""

    cls: type
    shapes: dict[str, tuple[int, Any]]  # of its parameters: length of a row, and dtype
    attributes: dict[str, Any]
    # A copy with these values as parameters, and attributes changed, as a function of arrays; it raises NoMatch where
    # a call changes state.
    copy: Callable[[Mapping[str, jax.Array], Mapping[str, Any]], Call]


def of_nnx(module: Any) -> Subject | None:
    """A module of flax.nnx to try, if it has one or two parameters, each a row, and no modules within.

    Axes before the last are those of layers that are stacked.
    """
    definition, state = nnx.split(module)
    variables = dict(nnx.to_flat_state(state))
    of_rngs = {path: variable for path, variable in variables.items() if isinstance(variable, nnx.RngState)}
    shapes = _shapes({path: v.get_value() for path, v in variables.items() if path not in of_rngs})
    within = [other for _, other in nnx.iter_modules(module) if other is not module]
    if shapes is None or within or not all(isinstance(variables[name,], nnx.Param) for name in shapes):
        return None

    def copy(parameters: Mapping[str, jax.Array], attributes: Mapping[str, Any]) -> Call:
        def call(*arrays: jax.Array) -> Any:
            new = {path: variable.replace(_of_rngs(variable)) for path, variable in of_rngs.items()}
            new |= {(name,): variables[name,].replace(parameters[name]) for name in shapes}
            made = nnx.merge(definition, nnx.from_flat_state(list(new.items())))
            for name, value in attributes.items():
                setattr(made, name, value)
            before = jax.tree.flatten(nnx.split(made))
            y = made(*arrays)
            if not _is_same(before, jax.tree.flatten(nnx.split(made))):
                raise NoMatch("its call changes its state")
            return y

        return call

    attributes = {name: value for name, value in vars(module).items() if not isinstance(value, nnx.Variable)}
    attributes = {name: value for name, value in attributes.items() if not name.startswith(("_pytree__", "_object__"))}
    return Subject(type(module), shapes, attributes, copy)


def of_linen(module: Any) -> Subject | None:
    """A module of flax.linen to try, within its call, if it has one or two parameters, each a row, and none within."""
    collections = {name: value for name, value in linen.unbox(module.variables).items() if value}
    parameters = collections.pop("params", {})
    shapes = _shapes({(name,): value for name, value in parameters.items() if not isinstance(value, Mapping)})
    if shapes is None or len(shapes) < len(parameters) or any(value.ndim > 1 for value in parameters.values()):
        return None
    if collections.keys() - {"intermediates"}:
        return None
    fields = {field.name for field in dataclasses.fields(module)} - {"parent", "name"}

    def copy(parameters: Mapping[str, jax.Array], attributes: Mapping[str, Any]) -> Call:
        changed = {name: value for name, value in attributes.items() if name in fields}
        made = module.clone(parent=None, name=None, **changed)

        def call(*arrays: jax.Array) -> Any:
            y, after = made.apply({"params": dict(parameters)}, *arrays, mutable=True)
            if not _is_same(*(jax.tree.flatten(dict(state)) for state in ({"params": dict(parameters)}, after))):
                raise NoMatch("its call changes its state")
            return y

        return call

    attributes = {name: getattr(module, name) for name in fields}
    attributes |= {name: value for name, value in vars(module).items() if isinstance(value, float)}
    return Subject(type(module), shapes, attributes, copy)


def _shapes(parameters: Mapping[tuple[Any, ...], Any]) -> dict[str, tuple[int, Any]] | None:
    """The lengths and dtypes of one or two parameters, if these are attributes, floating-point rows and alike."""
    values = [*parameters.values()]
    if not 1 <= len(values) <= 2 or any(len(path) != 1 or not value.ndim for path, value in parameters.items()):
        return None
    if len({value.shape for value in values}) > 1 or any(value.dtype not in DTYPES for value in values):
        return None
    return {path[0]: (value.shape[-1], jnp.dtype(value.dtype)) for path, value in parameters.items()}


def _of_rngs(variable: Any) -> jax.Array:
    """What stands for a variable of random generators, which may have no value."""
    dtype = variable.get_value().dtype
    return jax.random.key(0) if jnp.issubdtype(dtype, jax.dtypes.prng_key) else jnp.zeros((), dtype)


def _is_same(before: tuple[list[Any], Any], after: tuple[list[Any], Any]) -> bool:
    """Whether two flattened pytrees are one, bit for bit."""
    (leaves, structure), (others, other) = before, after
    same = (np.array_equal(_bits(a), _bits(b)) for a, b in zip(leaves, others, strict=False))
    return structure == other and all(same)


def _bits(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
