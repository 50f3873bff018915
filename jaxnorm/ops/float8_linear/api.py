"""The public side of linear layers in float8: recipes, the function, and what `lax.dot_general` is replaced by."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jaxnorm.native import compat
from jaxnorm.ops import products
from jaxnorm.ops.checks import check_array, check_flag, check_implementation, check_one_of
from jaxnorm.ops.float8_linear import checks, op
from jaxnorm.ops.float8_linear.formula import Float8Linear, Operands
from jaxnorm.ops.misuse import explained
from jaxnorm.ops.options import DIRECTIONS, Implementation
from jaxnorm.primitive import decide
from jaxnorm.quantization import Quantized

WeightGradient = Literal["float8", "compute"]
Save = Literal["quantized", "inputs"]
OutSharding = NamedSharding | PartitionSpec | None


@jax.tree_util.register_static
@dataclass(frozen=True)
class Float8Recipe:
    """How `float8_linear` rounds and what it keeps: hashable, equal by value, static for `jax.jit`.

    All values are float8_e4m3fn. A row of x or dy, and a column of the kernel, has the scale that `quantize` gives it:
    its largest magnitude over 448.

    Args:
      weight_gradient: "float8": a product in float8 too. "compute": one in the dtype of x and dy, without rounding dy.
      fast_accumulation: which of the products "y", "dx" and "dw" may be summed with fewer digits than float32 has, as
        tensor cores of Hopper do faster; all of them by default.
      power_of_two: rounds scales up to powers of two.
      save: what a derivative reads. "quantized": x and the kernel as they were rounded, a byte each with their scales;
        "inputs": both as they were given, to be rounded again.

    Raises:
      ValueError, TypeError: an option is none of those above.
    """

    weight_gradient: WeightGradient = "float8"
    fast_accumulation: tuple[str, ...] = ("y", "dx", "dw")
    power_of_two: bool = False
    save: Save = "quantized"

    def __post_init__(self) -> None:
        check_one_of("Float8Recipe", "weight_gradient", self.weight_gradient, ("float8", "compute"))
        check_one_of("Float8Recipe", "save", self.save, ("quantized", "inputs"))
        object.__setattr__(self, "fast_accumulation", checks.check_fast_accumulation(self.fast_accumulation))
        object.__setattr__(self, "power_of_two", check_flag("Float8Recipe", "power_of_two", self.power_of_two))

    @classmethod
    def named(cls, name: str) -> "Float8Recipe":
        """The recipe nearest to torchao's `Float8LinearConfig.from_recipe_name(name)`.

        "rowwise", whose scales are powers of two, or "rowwise_with_gw_hp"; another name is a ValueError.
        """
        return NAMED[check_one_of("Float8Recipe.named", "recipe", name, tuple(NAMED))]

    @property
    def dot_general(self) -> "Float8DotGeneral":
        """`float8_linear` by this recipe in place of `jax.lax.dot_general`."""
        return Float8DotGeneral(self)


# https://docs.pytorch.org/ao/main/api_reference/generated/torchao.float8.Float8LinearRecipeName.html
NAMED = {
    "rowwise": Float8Recipe(power_of_two=True),
    "rowwise_with_gw_hp": Float8Recipe(weight_gradient="compute"),
}


def check_recipe(function: str, recipe: object) -> Float8Recipe:
    if not isinstance(recipe, Float8Recipe):
        raise TypeError(
            f"{function}: recipe must be a jaxnorm.Float8Recipe, got {recipe!r}; pass jaxnorm.Float8Recipe(), or leave "
            "it out."
        )
    return recipe


@jax.tree_util.register_static
@dataclass(frozen=True)
class Float8DotGeneral:
    """`jax.lax.dot_general` of an array and a kernel, computed as `float8_linear` does by a recipe; equal by value."""

    recipe: Float8Recipe

    def __call__(
        self,
        x: Any,
        kernel: Any,
        dimension_numbers: lax.DotDimensionNumbers,
        precision: lax.PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
        *,
        out_sharding: OutSharding = None,
    ) -> jax.Array:
        """x times the kernel, summed over axes of both; the others of x and then those of the kernel stay.

        dimension_numbers have no batch axes, which is a ValueError. precision "highest" sums up in float32 throughout;
        others change nothing. out_sharding is that over an Explicit mesh.
        """
        function = "float8_dot_general"
        (of_x, of_kernel), batch = dimension_numbers
        if any(map(len, batch)):
            raise ValueError(
                f"{function}: dimension_numbers have batch axes {tuple(map(tuple, batch))}, expected none: a kernel is "
                f"one matrix. For several use jax.vmap, or jax.lax.dot_general for a product without a kernel."
            )
        x, kernel = checks.check_x(function, x), check_array(function, "kernel", kernel)
        if isinstance(x, Quantized):
            raise TypeError(f"{function}: x is a jaxnorm.Quantized, expected an array; use jaxnorm.float8_linear.")
        lengths = [x.shape[axis] for axis in of_x]
        if lengths != [kernel.shape[axis] for axis in of_kernel]:
            raise ValueError(
                f"{function}: x has shape {x.shape} and kernel {kernel.shape}, whose axes {tuple(of_x)} and "
                f"{tuple(of_kernel)} are summed together, expected the same lengths there."
            )
        # In the kernel's order, which is moved less.
        pairs = sorted(zip(of_kernel, of_x, strict=True))
        kernel, outputs = _summed(kernel, [axis for axis, _ in pairs], last=False)
        x, rows = _summed(x, [axis for _, axis in pairs], last=True)
        dtype = jnp.promote_types(x.dtype, kernel.dtype) if preferred_element_type is None else preferred_element_type
        is_matrix = len(outputs) == 1
        y = linear(function, x, kernel, None, dtype, self.recipe, None, precision, out_sharding if is_matrix else None)
        return y if is_matrix else lax.reshape(y, (*rows, *outputs), out_sharding=out_sharding)


float8_dot_general = Float8Recipe().dot_general
"""`float8_linear` by the default recipe in place of `jax.lax.dot_general`, as `flax.nnx.Linear(dot_general=)`,
`flax.linen.Dense(dot_general=)` and `jax.numpy.einsum(_dot_general=)` take it."""


DEFAULT = Float8Recipe()


@explained
def float8_linear(
    x: Any,
    kernel: Any,
    *,
    bias: Any = None,
    out_dtype: DTypeLike | None = None,
    recipe: Float8Recipe = DEFAULT,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Multiplies x by a kernel in float8, forward and backward, without state.

        y[m,n]  = s_x[m] s_w[n] Σ_k q_x[m,k] q_w[k,n] + bias[n]
        dx[m,k] = s_u[m] Σ_n q_u[m,n] q_w[k,n]              u[m,n] = dy[m,n] s_w[n], rounded by rows
        dw[k,n] = s_v[n] Σ_m q_x[m,k] q_v[m,n]              v[m,n] = dy[m,n] s_x[m], rounded by columns

        >>> y = float8_linear(jnp.ones((2, 8)), jnp.ones((8, 4)))

    q are float8_e4m3fn and s float32, as `quantize` makes them. Sums are float32, and a result is rounded once. The
    gradient is that of the product of the rounded operands, with dy rounded once for each; jvp rounds no tangent.

    Args:
      x: floating-point array (..., K) of at most 32 bits; or a `Quantized` of float8_e4m3fn with a scale for each row
        or one for all, whose gradient is its carrier's.
      kernel: such an array (K, N), as Flax has it; or one of `quantize_kernel`, which is not rounded again.
      recipe: a `Float8Recipe`: which products are float8, what is kept for the derivative.
      implementation: as of `quantized_dot`, for rounding and products; None chooses for each product.

    Raises:
      ValueError: K differs, kernel is no matrix, bias has another shape, or what is quantised has other scales.
      TypeError: an operand is not floating-point or of float64, or recipe is no `Float8Recipe`.
      RuntimeError: implementation="native", and no kernel serves the call.

    Source: Micikevicius et al., FP8 Formats for Deep Learning, 2022, https://arxiv.org/abs/2209.05433.
    """
    recipe = check_recipe(op.NAME, recipe)
    return linear(op.NAME, x, kernel, bias, out_dtype, recipe, implementation)


def linear(
    function: str,
    x: object,
    kernel: object,
    bias: object,
    out_dtype: DTypeLike | None,
    recipe: Float8Recipe,
    implementation: Implementation | None = None,
    precision: lax.PrecisionLike = None,
    out_sharding: OutSharding = None,
) -> jax.Array:
    choice = check_implementation(op.NAME, implementation)
    x = checks.check_x(function, x)
    values, *of_x = (x.values, x.scales, x.carrier) if isinstance(x, Quantized) else (x, None, None)
    weights, *of_kernel = checks.check_kernel(function, kernel, values.shape)
    order = 1 if of_kernel[0] is None else -1
    spec = Float8Linear(
        out_dtype=checks.check_out_dtype(function, out_dtype, x),
        **vars(recipe),
        out_spec=_out_spec(values, weights, order, out_sharding),
        wants_all_digits=products.wants_all_digits(precision),
        **choice.asks(function),
    )
    if of_x[0] is not None and not of_x[0].ndim:
        of_x[0] = of_x[0].reshape((1,) * values.ndim)
    bias = checks.check_bias(function, bias, weights.shape[::order])
    operands = _summed_wide(Operands(values, weights, bias, *of_x, *of_kernel))
    if spec.native_for:
        # One that must be native backward alone is held to the same.
        asked = dataclasses.replace(spec, native_ways=DIRECTIONS, formula_for=())
        decide.check_native(op.call_of(asked, jax.tree.map(jax.typeof, operands)))
    return op.linear(spec, operands)


def _summed_wide(operands: Operands[jax.Array]) -> Operands[jax.Array]:
    """The operands, in float32 where a `shard_map` adds up gradients over devices: they are rounded after that."""
    leaves, tree = jax.tree.flatten(operands)
    summed = zip(leaves, compat.are_summed(*leaves), strict=True)
    wide = (array.astype(np.float32) if is_summed else array for array, is_summed in summed)
    return Operands(*jax.tree.unflatten(tree, wide))


def _out_spec(x: jax.Array, kernel: jax.Array, order: int, out_sharding: OutSharding) -> PartitionSpec | None:
    """How y is split over an Explicit mesh, where that is given or what is summed is split: as its rows and columns."""
    if out_sharding is not None:
        return out_sharding if isinstance(out_sharding, PartitionSpec) else out_sharding.spec
    (*rows, of_x), lies = (tuple(jax.typeof(array).sharding.spec) for array in (x, kernel))
    of_kernel, columns = lies[::order]
    names = jax.tree.leaves((rows, columns))
    # What is split twice by one name is no sharding, and JAX's product says so.
    is_known = (of_x is None and of_kernel is None) or len(set(names)) < len(names)
    return None if is_known else PartitionSpec(*rows, columns)


def _summed(array: jax.Array, axes: list[int], *, last: bool) -> tuple[jax.Array, list[int]]:
    """The array with these axes as one, its last or first; of a kernel the others are one too. And their lengths."""
    others = [axis for axis in range(array.ndim) if axis not in axes]
    lengths = [array.shape[axis] for axis in others]
    order = [*others, *axes] if last else [*axes, *others]
    if order != list(range(array.ndim)):
        array = array.transpose(order)
    depth = math.prod(array.shape[order.index(axis)] for axis in axes)
    shape = (*lengths, depth) if last else (depth, math.prod(lengths))
    return array if array.shape == shape else array.reshape(shape), lengths
