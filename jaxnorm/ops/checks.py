"""Checks of what a caller passes, made once, while tracing.

A message says which argument, what came, what was expected and what to do. ValueError: shapes, axes, values.
TypeError: dtypes and values that are no arrays or no static numbers.
"""

import math
import operator
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxnorm.native import compat
from jaxnorm.ops import misuse
from jaxnorm.ops.options import IMPLEMENTATIONS, Choice, choice
from jaxnorm.primitive import weights
from jaxnorm.sharding import dims
from jaxnorm.sharding.shards import Shards

DTYPES = frozenset(map(jnp.dtype, ("float16", "bfloat16", "float32", "float64")))
ARRAYS = (jax.Array, np.ndarray, np.generic)


def is_array(value: object) -> bool:
    """Whether it is an array, or like one as a parameter of a library is: jax.numpy knows what is in it."""
    return isinstance(value, ARRAYS) or hasattr(value, "__jax_array__")


def check_array(function: str, name: str, value: Any) -> jax.Array:
    """value as a floating-point jax.Array."""
    given = value
    if not isinstance(value, ARRAYS):
        if not is_array(value):
            raise TypeError(
                f"{function}: {name} must be an array, got {type(value).__name__}; {misuse.no_array(name, value)}"
            )
        given = jnp.asarray(value)
    # Of float64 without 64-bit types jax.numpy makes float32.
    if given.dtype not in DTYPES:
        raise TypeError(
            f"{function}: {name} must have a floating-point dtype of 16, 32 or 64 bits, got {given.dtype}; "
            f"convert it first, as with {name}.astype(jax.numpy.float32)."
        )
    return given if isinstance(given, jax.Array) else jnp.asarray(given)


def check_order(function: str, name: str, numbers: Any, **others: Any) -> None:
    """That numbers are not in the place of one of the others, which are floating-point."""
    for of, other in others.items():
        if _is(other, jnp.integer) and _is(numbers, jnp.floating):
            raise TypeError(
                f"{function}: {of} {'are' if of.endswith('s') else 'is'} {other.dtype} and {name} {numbers.dtype}; are "
                f"they in each other's place?"
            )


def _is(value: Any, kind: Any) -> bool:
    return hasattr(value, "dtype") and jnp.issubdtype(value.dtype, kind)


def check_x(function: str, x: object, name: str = "x") -> jax.Array:
    array = check_array(function, name, x)
    if array.ndim == 0:
        raise ValueError(
            f"{function}: {name} must have at least one axis, got a scalar: give it the axis to normalise over."
        )
    return array


def check_axes(function: str, axis: int | Sequence[int], ndim: int, name: str = "x") -> tuple[int, ...]:
    """The set of normalised axes, counted from the end (-1 is the last), ascending."""
    given = axis if isinstance(axis, Sequence) else (axis,)
    try:
        axes = [operator.index(a) for a in given]
    except TypeError:
        axes = None
    if axes is None or any(isinstance(a, (bool, np.bool)) for a in given):
        raise TypeError(f"{function}: axis must be an int or a sequence of ints, got {axis!r}.")
    if not axes:
        raise ValueError(f"{function}: axis is empty; give at least one axis to normalise over, as with axis=-1.")
    for a in axes:
        if not -ndim <= a < ndim:
            raise ValueError(
                f"{function}: axis {a} is out of range for {name} with {ndim} axes; expected {-ndim} <= axis < {ndim}."
            )
    canonical = sorted(a - ndim if a >= 0 else a for a in axes)
    if len(set(canonical)) < len(canonical):
        raise ValueError(
            f"{function}: axis={axis!r} names an axis of {name} (which has {ndim}) twice; name each axis once."
        )
    return tuple(canonical)


def check_weight(
    function: str, name: str, value: object, x: jax.Array, axes: tuple[int, ...], *, with_batch_dims: bool = True
) -> jax.Array | None:
    """value as an array with the normalised axes' shape and, where these may be, batch dims before them."""
    if value is None:
        return None
    weight = check_array(function, name, value)
    features = tuple(x.shape[axis] for axis in axes)
    expected = f"{features}: the normalised axes {axes} of x, which has shape {x.shape}"
    batch_dims = weight.shape[: max(0, weight.ndim - len(axes))]
    if with_batch_dims and axes == tuple(range(-len(axes), 0)):
        others = x.shape[: x.ndim - len(axes)]
        expected += f", and before them, if anything, what broadcasts against its other axes {others}"
        is_batch = weights.are_batch_dims(batch_dims, others)
    else:
        is_batch = not batch_dims
    if weight.shape[len(batch_dims) :] != features or not is_batch:
        raise ValueError(
            f"{function}: {name} has shape {weight.shape}, expected {expected}. "
            f"{misuse.no_weight(function, name, weight.shape, x.shape)}"
        )
    of_rows = [axis for axis in range(-x.ndim, 0) if axis not in axes]
    return sharded_along(function, name, weight, "x", x, [*of_rows[x.ndim - weight.ndim :], *axes])


def sharded_along(
    function: str, name: str, array: jax.Array, x_name: str, x: jax.Array, along: Sequence[int | None]
) -> jax.Array:
    """array, each axis of which is split over an Explicit mesh as that axis of x is; of None it is not split."""
    spec, x_spec = jax.typeof(array).sharding.spec, jax.typeof(x).sharding.spec
    pairs = zip(array.shape, along, strict=True)
    wanted = PartitionSpec(*(None if n == 1 or axis is None else x_spec[axis] for n, axis in pairs))
    if spec == wanted or any(map(compat.awaits_reduction, map(jax.typeof, (x, array)))):
        return array
    if any(spec):
        raise ValueError(
            f"{function}: {name} is sharded as {spec} over an Explicit mesh, expected {wanted}, as {x_name}'s axes "
            f"{tuple(along)} are, or all of it on each device. Reshard it, as with "
            f"jax.sharding.reshard({name}, {wanted})."
        )
    return dims.resharded(array, x, wanted)


def check_axis_name(function: str, axis_name: object) -> Shards | None:
    """The mesh or vmap axes over which rows are split, each bound here and named once; None for None."""
    if axis_name is None:
        return None
    names = tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)
    if not all(isinstance(name, Hashable) for name in names):
        raise TypeError(f"{function}: axis_name={axis_name!r} must be the name of an axis or a tuple of names.")
    if not names or len(set(names)) < len(names):
        raise ValueError(f"{function}: axis_name={axis_name!r} must name at least one axis, and each once.")
    for name in names:
        try:
            jax.lax.axis_size(name)
        except NameError:
            raise ValueError(
                f"{function}: axis_name={axis_name!r}, but no axis {name!r} is bound here; call {function} under "
                f"jax.shard_map over a mesh with that axis, or under jax.vmap(..., axis_name={name!r}). Outside of "
                f"these leave axis_name out: what jit shards needs none."
            ) from None
    return Shards(names)


def check_whole_groups(function: str, group_size: int, x: jax.Array) -> None:
    """That an Explicit mesh splits rows between groups of so many columns only."""
    if x.shape[-1] // group_size % (shards := compat.shard_count(x, -1)):
        raise ValueError(
            f"{function}: the last axis of x, which has shape {x.shape}, is split over {shards} devices of an Explicit "
            f"mesh, and so would be a group of {group_size} columns; take another group_size, or reshard x."
        )


def check_pad_to(function: str, pad_to: object, axes: tuple[int, ...], axis_name: object) -> int:
    """The multiple to which y's last axis is padded; 1 for None."""
    if pad_to is None:
        return 1
    multiple = check_int(function, "pad_to", pad_to, "None pads nothing", positive=True)
    if axes != (-1,):
        raise ValueError(
            f"{function}: pad_to pads the last axis, expected axis=-1, got the normalised axes {axes}; "
            f"reshape x, or leave pad_to out."
        )
    if axis_name is not None:
        raise ValueError(
            f"{function}: pad_to={pad_to} with axis_name={axis_name!r}: zeros would stand after each part of a row. "
            f"Leave pad_to out."
        )
    return multiple


def check_like_x(function: str, name: str, value: object, x: jax.Array, they_are: str) -> jax.Array:
    """value as an array of x's shape; `they_are` says what is done with both, element by element."""
    array = check_array(function, name, value)
    if array.shape != x.shape:
        raise ValueError(
            f"{function}: {name} has shape {array.shape}, expected x's shape {x.shape}: they are {they_are} element by "
            f"element. {misuse.not_like_x(name, array.shape, x.shape)}"
        )
    return array


def check_int(function: str, name: str, value: object, remedy: str, *, positive: bool = False) -> int:
    """value as a Python int, known while tracing."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{function}: {name} must be known while tracing, got the traced value {value}; pass a Python int."
        )
    try:
        number = None if isinstance(value, (bool, np.bool)) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{function}: {name} must be an int, got {value!r}; {remedy}.")
    if positive and number < 1:
        raise ValueError(f"{function}: {name} must be positive, got {number}; {remedy}.")
    return number


def check_number(function: str, name: str, value: object) -> float:
    """value as a finite Python float, known while tracing."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{function}: {name} must be known while tracing, got the traced value {value}; pass a Python float "
            f"(under jax.jit, close over it or mark its argument static)."
        )
    try:
        number = None if isinstance(value, (str, bytes, bool)) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = None
    except OverflowError:
        number = math.inf
    if number is None:
        raise TypeError(f"{function}: {name} must be a number, got {value!r}; pass a Python float.")
    if not abs(number) <= float(np.finfo(np.float32).max):
        raise ValueError(f"{function}: {name} must be finite in float32, got {number}.")
    return number


def check_flag(function: str, name: str, value: object, remedy: str = "pass True or False") -> bool:
    """value as a Python bool, known while tracing."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{function}: {name} must be known while tracing, got the traced value {value}; pass a Python bool."
        )
    if not isinstance(value, (bool, np.bool)):
        raise TypeError(f"{function}: {name} must be a bool, got {value!r}; {remedy}.")
    return bool(value)


def check_not_negative(function: str, name: str, value: object, remark: str) -> float:
    number = check_number(function, name, value)
    if number < 0:
        raise ValueError(f"{function}: {name} must not be negative, got {number}; {remark}.")
    return number


def check_epsilon(function: str, epsilon: object) -> float:
    return check_not_negative(function, "epsilon", epsilon, "1e-6 is usual")


def check_out_dtype(function: str, out_dtype: Any, default: np.dtype[Any], name: str = "out_dtype") -> np.dtype[Any]:
    if out_dtype is None:
        return default
    try:
        dtype: np.dtype[Any] | None = np.dtype(jnp.dtype(out_dtype))
    except TypeError:
        dtype = None
    if dtype not in DTYPES:
        what = "a dtype" if dtype is None else "a floating-point dtype of 16, 32 or 64 bits"
        remedy = misuse.no_dtype(out_dtype, {known.name for known in DTYPES})
        raise TypeError(f"{function}: {name} must be {what}, got {dtype or repr(out_dtype)}; {remedy}")
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise TypeError(
            f"{function}: {name}={dtype} needs 64-bit types; enable them with jax_enable_x64, or pass float32."
        )
    return dtype


def check_one_of(function: str, name: str, value: Any, known: Sequence[str | None]) -> Any:
    """value, which is one of these strings, or None where that is among them."""
    if not isinstance(value, (str, type(None))) or value not in known:
        *others, last = map(repr, known)
        raise ValueError(f"{function}: unknown {name} {value!r}; expected {', '.join(others)} or {last}.")
    return value


def check_implementation(function: str, implementation: Any) -> Choice:
    """What is chosen, by the argument or, where it is None, by the context or the environment."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"{function}: unknown implementation {implementation!r}; expected None (native where it exists), "
            f"'native' (an error where it does not) or 'xla'.{misuse.renamed(implementation)}"
        )
    return choice(function, implementation)
