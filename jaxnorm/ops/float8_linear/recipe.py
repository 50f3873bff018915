"""How a linear layer is computed in float8, and the function in place of `jax.lax.dot_general` that does so."""

from dataclasses import dataclass
from typing import Any, Literal

import jax

from jaxnorm.ops.checks import check_flag, check_one_of
from jaxnorm.ops.float8_linear import call, checks

Scaling = Literal["row", "tensor"]
WeightGradient = Literal["float8", "compute"]
Save = Literal["quantized", "inputs"]
# https://docs.pytorch.org/ao/main/api_reference/generated/torchao.float8.Float8LinearRecipeName.html
NAMED: dict[str, dict[str, Any]] = {
    "tensorwise": {"scaling": "tensor"},
    "rowwise": {"power_of_two": True},
    "rowwise_with_gw_hp": {"weight_gradient": "compute"},
}


@jax.tree_util.register_static
@dataclass(frozen=True)
class Float8Recipe:
    """How `float8_linear` rounds and what it keeps: hashable, equal by value, static for `jax.jit`.

    All values are float8_e4m3fn, and a scale is the largest magnitude over 448, as `quantize` has them.

    Args:
      scaling: what shares a scale. "row": a row of x and of dy, a column of the kernel. "tensor": everything, by XLA's
        own products.
      weight_gradient: "float8": its product is one of float8 too. "compute": it is one in the dtype of x and dy, and
        dy is not rounded for it.
      fast_accumulation: which of the products "y", "dx" and "dw" may be summed up with fewer digits than float32 has,
        as tensor cores of Hopper do faster.
      power_of_two: rounds scales up to powers of two.
      save: what a derivative reads. "quantized": x and the kernel as they were rounded, a byte each with their scales;
        "inputs": both as they were given, to be rounded again.

    Raises:
      ValueError, TypeError: an option is none of those above.
    """

    scaling: Scaling = "row"
    weight_gradient: WeightGradient = "float8"
    fast_accumulation: tuple[str, ...] = ("y",)
    power_of_two: bool = False
    save: Save = "quantized"

    def __post_init__(self) -> None:
        check_one_of("Float8Recipe", "scaling", self.scaling, ("row", "tensor"))
        check_one_of("Float8Recipe", "weight_gradient", self.weight_gradient, ("float8", "compute"))
        check_one_of("Float8Recipe", "save", self.save, ("quantized", "inputs"))
        object.__setattr__(self, "fast_accumulation", checks.check_fast_accumulation(self.fast_accumulation))
        object.__setattr__(self, "power_of_two", check_flag("Float8Recipe", "power_of_two", self.power_of_two))

    @classmethod
    def named(cls, name: str) -> "Float8Recipe":
        """The recipe that is nearest to torchao's of `Float8LinearConfig.from_recipe_name(name)`.

        "tensorwise", "rowwise", whose scales are powers of two, or "rowwise_with_gw_hp"; another is a ValueError.
        """
        return cls(**NAMED[check_one_of("Float8Recipe.named", "recipe", name, tuple(NAMED))])

    @property
    def dot_general(self) -> "Float8DotGeneral":
        """`float8_linear` by this recipe in place of `jax.lax.dot_general`."""
        return Float8DotGeneral(self)


def check_recipe(function: str, recipe: Any) -> Float8Recipe:
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
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        *,
        out_sharding: Any = None,
    ) -> jax.Array:
        """x times the kernel, summed over axes of both; the others of x and then those of the kernel stay.

        dimension_numbers have no batch axes, which is a ValueError. precision "highest" sums up in float32 throughout;
        others change nothing. out_sharding is that over an Explicit mesh.
        """
        given = dimension_numbers, precision, preferred_element_type
        return call.dot_general("float8_dot_general", x, kernel, *given, self.recipe, out_sharding)


float8_dot_general = Float8Recipe().dot_general
"""`float8_linear` by the default recipe in place of `jax.lax.dot_general`, as `flax.nnx.Linear(dot_general=)`,
`flax.linen.Dense(dot_general=)` and `jax.numpy.einsum(_dot_general=)` take it."""
