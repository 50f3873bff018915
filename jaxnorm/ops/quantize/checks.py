"""Checks of what describes a quantised array, as `jaxnorm.ops.checks`."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm.ops.checks import check_number, check_whole_groups, is_array
from jaxnorm.ops.misuse import QUANTIZATION

SMALLEST_SCALE = 2.0**-126  # the smallest float32 whose reciprocal is finite and that no platform takes for zero


def check_float32(function: str, operands: Mapping[str, jax.Array | None]) -> None:
    """That float32 is wide enough for all of them."""
    for name, operand in operands.items():
        if operand is not None and operand.dtype == np.float64:
            raise TypeError(
                f"{function}: {name} is float64, expected 16 or 32 bits: what is quantised is computed in float32. "
                f"Convert it first, as with {name}.astype(jax.numpy.float32)."
            )


def check_dtype(name: str, dtype: Any, known: Iterable[np.dtype[Any]]) -> np.dtype[Any]:
    """The dtype of what is quantised to, or of scales."""
    expected = f"expected {', '.join(d.name for d in known)}"
    try:
        canonical: np.dtype[Any] = np.dtype(jnp.dtype(dtype))
    except TypeError:
        raise TypeError(f"Quantization: {name} must be a dtype, got {dtype!r}; {expected}.") from None
    if dtype is None or canonical not in known:
        raise TypeError(f"Quantization: {name} cannot be {canonical if dtype is not None else None}; {expected}.")
    return canonical


def check_granularity(granularity: Any) -> Any:
    if granularity not in ("token", "tensor", "group"):
        raise ValueError(
            f"Quantization: unknown granularity {granularity!r}; expected 'token' (a scale for each row), 'tensor' "
            f"(one that you give) or 'group' (one for each group_size elements of a row)."
        )
    return granularity


def check_group_size(group_size: Any, granularity: str, known: Sequence[int]) -> int | None:
    if granularity != "group":
        if group_size is not None:
            raise ValueError(
                f"Quantization: group_size={group_size!r} goes with granularity='group', got {granularity!r}; "
                f"leave one of them out."
            )
        return None
    if group_size is None:
        return known[-1]
    if isinstance(group_size, (bool, np.bool)) or group_size not in known:
        raise ValueError(f"Quantization: group_size must be {' or '.join(map(str, known))}, got {group_size!r}.")
    return int(group_size)


def check_max_scale(max_scale: Any) -> float | None:
    if max_scale is None:
        return None
    number = float(np.float32(check_number("Quantization", "max_scale", max_scale)))
    if number < SMALLEST_SCALE:
        raise ValueError(f"Quantization: max_scale must be at least 2**-126, got {max_scale}; None is no bound.")
    return number


def check_scales_layout(layout: Any) -> Any:
    if layout not in ("row", "column"):
        raise ValueError(
            f"Quantization: unknown scales_layout {layout!r}; expected 'row' (the axis of groups is the last of "
            f"scales) or 'column' (it is the first)."
        )
    return layout


def check_stored_scales(quantization: Any, as_exponents: bool) -> None:
    """That scales can be stored as they are to be."""
    others = {"scales_dtype": as_exponents, "scales_layout": quantization.scales_layout != "row"}
    for name in (name for name, given in others.items() if given and quantization.granularity != "group"):
        raise ValueError(
            f"Quantization: {name}={getattr(quantization, name)} is about scales of groups, got "
            f"granularity={quantization.granularity!r}; leave it out or take granularity='group'."
        )
    if not as_exponents:
        return
    if jnp.issubdtype(quantization.dtype, jnp.integer):
        raise ValueError(
            f"Quantization: scales_dtype=float8_e8m0fnu has powers of two, which are for floats, got "
            f"{quantization.dtype}; leave it out."
        )
    if quantization.max_scale is not None and math.frexp(quantization.max_scale)[0] != 0.5:
        raise ValueError(
            f"Quantization: max_scale must be a power of two with scales_dtype=float8_e8m0fnu, which has no other "
            f"scales, got {quantization.max_scale}."
        )


def check_scale_options(quantization: Any) -> None:
    """That the options of a computed scale go with the granularity and the dtype."""
    computed = {"power_of_two": quantization.power_of_two, "max_scale": quantization.max_scale is not None}
    for name in (name for name, given in computed.items() if given and quantization.granularity == "tensor"):
        raise ValueError(
            f"Quantization: {name} is about a scale that is computed, and with granularity='tensor' you give it; "
            f"leave {name} out."
        )
    if quantization.power_of_two and jnp.issubdtype(quantization.dtype, jnp.integer):
        raise ValueError(
            f"Quantization: power_of_two is for floats, whose values a power of two scales without rounding, got "
            f"{quantization.dtype}; leave it out."
        )


def check_activations(function: str, quantization: Any, known: Iterable[np.dtype[Any]]) -> None:
    """That a `Quantization` is to one of these dtypes, and not one of weights alone."""
    if quantization.dtype not in known:
        raise TypeError(
            f"{function}: quantization has dtype {quantization.dtype}, which is for weights; expected "
            f"{', '.join(d.name for d in known)}."
        )


def check_quantization(function: str, quantization: Any, kind: type[Any], x: jax.Array, axes: tuple[int, ...]) -> None:
    """That it is of the kind `Quantization` and its groups divide x's rows."""
    if not isinstance(quantization, kind):
        raise TypeError(
            f"{function}: quantization must be a jaxnorm.Quantization, got {quantization!r}; {QUANTIZATION}."
        )
    group_size = quantization.group_size
    if group_size is None:
        return
    if axes != (-1,):
        raise ValueError(
            f"{function}: granularity='group' groups the last axis, expected axis=-1, got the normalised axes {axes}; "
            f"reshape x, or take granularity='token'."
        )
    cols = x.shape[-1]
    if not isinstance(cols, int) or cols % group_size:
        raise ValueError(
            f"{function}: group_size {group_size} does not divide the normalised axis of x, which has shape {x.shape}; "
            f"take another group_size or granularity='token', or pad x's last axis."
        )
    check_whole_groups(function, group_size, x)


def check_static_scale(function: str, value: Any, granularity: str) -> jax.Array | None:
    """The caller's scale as a float32 scalar, which goes with the granularity "tensor" and with no other."""
    if granularity != "tensor":
        if value is not None:
            raise ValueError(
                f"{function}: static_scale goes with granularity='tensor', got granularity={granularity!r}, whose "
                f"scales are computed; leave static_scale out."
            )
        return None
    if value is None:
        raise ValueError(f"{function}: granularity='tensor' needs static_scale, the scale of all values; got None.")
    if is_array(value):
        value = jnp.asarray(value)
        if value.shape != ():
            raise ValueError(
                f"{function}: static_scale must be a scalar, got shape {value.shape}; for a scale a row "
                f"take granularity='token', which computes it."
            )
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise TypeError(
                f"{function}: static_scale must have a floating-point dtype, got {value.dtype}; convert it."
            )
        return jnp.asarray(value, jnp.float32)
    number = check_number(function, "static_scale", value)
    if number < SMALLEST_SCALE:
        raise ValueError(f"{function}: static_scale must be at least 2**-126, got {number}: it is divided by.")
    return jnp.asarray(number, jnp.float32)
