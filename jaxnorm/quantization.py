"""How an array is quantised, and the quantised array."""

from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax

from jaxnorm.ops.checks import check_flag
from jaxnorm.ops.quantize import checks

Granularity = Literal["token", "tensor", "group"]
ScalesLayout = Literal["row", "column"]
# The largest values: of what norms quantise to, and of what only weights are.
LARGEST = {jnp.dtype("float8_e4m3fn"): 448.0, jnp.dtype("float8_e5m2"): 57344.0, jnp.dtype("int8"): 127.0}
LARGEST_OF_WEIGHTS = {jnp.dtype("int4"): 7.0, jnp.dtype("float4_e2m1fn"): 6.0}
GROUP_SIZES = (32, 64, 128)
FLOAT32, EXPONENT = jnp.dtype("float32"), jnp.dtype("float8_e8m0fnu")


@jax.tree_util.register_static
@dataclass(frozen=True)
class Quantization:
    """How norms and `quantize` quantise: hashable, equal by value, static for `jax.jit`.

        >>> to = Quantization("int8", "group", group_size=64)

    Args:
      dtype: `jax.numpy.float8_e4m3fn` (values to ±448), `float8_e5m2` (±57344) or `int8` (symmetric, ±127); for weights
        also `int4` (symmetric, ±7) and `float4_e2m1fn` (±6).
      granularity: what shares a scale. "token": a row along the normalised axes, or an output channel of weights.
        "group": `group_size` neighbouring elements of a row. "tensor": everything; for a norm you give that scale.
      group_size: 32, 64 or 128 with "group" (None is 128), otherwise None.
      power_of_two: rounds computed scales up to powers of two, for floats only.
      max_scale: upper bound of computed scales, at least 2**-126; larger values are clipped. None: no bound.
      scales_dtype: `float32`, or for groups of floats `float8_e8m0fnu`, an 8-bit exponent: scales, and max_scale, are
        powers of two then. With a group_size of 32 that is an MX format, rounded up.
      scales_layout: "row", or for groups "column": the axis of groups comes first in scales, as block-scaled products
        read them.

    Raises:
      ValueError, TypeError: an option is none of the above, or options do not go together.
    """

    dtype: Any
    granularity: Granularity = "token"
    group_size: int | None = None
    power_of_two: bool = False
    max_scale: float | None = None
    scales_dtype: Any = FLOAT32
    scales_layout: ScalesLayout = "row"

    def __post_init__(self) -> None:
        checked = {
            "dtype": checks.check_dtype("dtype", self.dtype, [*LARGEST, *LARGEST_OF_WEIGHTS]),
            "granularity": checks.check_granularity(self.granularity),
            "group_size": checks.check_group_size(self.group_size, self.granularity, GROUP_SIZES),
            "power_of_two": check_flag("Quantization", "power_of_two", self.power_of_two),
            "max_scale": checks.check_max_scale(self.max_scale),
            "scales_dtype": checks.check_dtype("scales_dtype", self.scales_dtype, (FLOAT32, EXPONENT)),
            "scales_layout": checks.check_scales_layout(self.scales_layout),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        checks.check_stored_scales(self, self.scales_dtype == EXPONENT)
        object.__setattr__(self, "power_of_two", self.power_of_two or self.scales_dtype == EXPONENT)
        checks.check_scale_options(self)

    @property
    def largest(self) -> float:
        """The largest magnitude of a value."""
        return (LARGEST | LARGEST_OF_WEIGHTS)[self.dtype]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Quantized:
    """A quantised array, a pytree: `values * scales` approximates the array.

    Attributes:
      values: of the array's shape, but see `transposed`, and of the dtype it was quantised to.
      scales: float32 or float8_e8m0fnu. For rows: values' shape with normalised axes of length 1. For groups: values'
        shape with an axis of groups for the last one, at the end or in front. For everything: a scalar.
      carrier: zeros of the array's shape and dtype, never transposed, through which `dequantize` and products pass a
        straight-through gradient; None where none was asked for.
      groups_axis: the axis of groups in scales, counted from the end: -1 by row, minus the array's rank by column.
      transposed: whether values and scales have the array's last two axes swapped, as `quantize_kernel` makes them.
    """

    values: jax.Array
    scales: jax.Array
    carrier: jax.Array | None = None
    groups_axis: int = field(default=-1, metadata={"static": True})
    transposed: bool = field(default=False, metadata={"static": True})

    def dequantize(self, dtype: Any = jnp.float32) -> jax.Array:
        """`values * scales` plus the carrier, computed in float32 and rounded to dtype; of the array's shape.

        Its derivative is the carrier's: the cotangent of this result is that of the array.
        """
        shape, scales = self.values.shape, self.scales.astype(jnp.float32)
        if self.groups_axis != -1:
            scales = jnp.moveaxis(scales, self.groups_axis, -1)
        # Of fewer axes than values, scales have the leading ones: those of a vmap over a scalar.
        scales = scales.reshape(*scales.shape, *(1,) * (len(shape) - scales.ndim), 1)
        groups = scales.shape[-2]
        values = self.values.reshape(*shape[:-1], groups, shape[-1] // (groups or 1)).astype(jnp.float32)
        array = lax.stop_gradient((values * scales).reshape(shape))
        array = jnp.swapaxes(array, -1, -2) if self.transposed else array
        if self.carrier is not None:
            array = array + self.carrier.astype(jnp.float32)
        return array.astype(np.dtype(dtype))


def quantized(quantization: Quantization, values: jax.Array, scales: jax.Array, carrier: jax.Array | None) -> Quantized:
    """The array with its scales, computed as float32 and by row, as quantization says."""
    if quantization.scales_dtype == EXPONENT:
        # The exponent is all there is of a power of two. That of infinity and NaN is NaN.
        exponents = lax.bitcast_convert_type(scales, jnp.uint32) >> 23
        scales = lax.bitcast_convert_type(exponents.astype(jnp.uint8), EXPONENT)
    if quantization.scales_layout == "row":
        return Quantized(values, scales, carrier)
    return Quantized(values, jnp.moveaxis(scales, -1, 0), carrier, -values.ndim)


def _written(static: tuple[int, bool]) -> bytes:
    groups_axis, transposed = static
    return b"" if static == (-1, False) else f"{groups_axis}{' transposed' * transposed}".encode()


def _read(text: bytes) -> tuple[int, bool]:
    groups_axis, _, transposed = (bytes(text) or b"-1").partition(b" ")
    return int(groups_axis), bool(transposed)


# So that a program whose result is one can be serialised. Those of before there were scales by column say nothing.
export.register_pytree_node_serialization(
    Quantized, serialized_name="jaxnorm.Quantized", serialize_auxdata=_written, deserialize_auxdata=_read
)
