"""Linear layers of `flax.nnx` that are computed in float8, and how a model gets them."""

from typing import Any

import jax

from jaxnorm.flax import float8_calls, nnx_calls, nnx_layers
from jaxnorm.flax.calls import nnx
from jaxnorm.flax.explained import explained
from jaxnorm.flax.replacement import Only
from jaxnorm.ops.float8_linear.api import DEFAULT
from jaxnorm.ops.float8_linear.recipe import Float8Recipe, check_recipe
from jaxnorm.quantization import Quantized
from jaxnorm.reports import Report


@explained
class Float8Linear(nnx.Linear):
    """A `flax.nnx.Linear` that is computed by `jaxnorm.float8_linear`, forward and backward, without state.

        layer = Float8Linear(256, 512, dtype=jnp.bfloat16, rngs=rngs)
        y = layer(x)  # float8_linear(x, layer.kernel, bias=layer.bias, recipe=layer.recipe, out_dtype=jnp.bfloat16)

    `jaxnorm.float8_linears` makes them of the layers of a model. Parameters, their names, metadata and checkpoints are
    Flax's. `recipe` says how the function rounds, and what it keeps for the derivative.

    The kernel is rounded once, from its own dtype, where Flax rounds it to `dtype` before `dot_general`; its gradient
    is as it is, of float32 for a float32 kernel. x is rounded to `dtype` first, as Flax does it. The bias is added in
    float32 before the result is rounded, and its gradient is a sum in float32.

    An x that is a `Quantized` of float8_e4m3fn, as a `QuantizedRMSNorm` gives it, is taken as it is, and with
    `straight_through=True` there its gradient flows on. The result has Flax's dtype; that of a `Quantized` is `dtype`,
    or bfloat16 where that is None.

    The constructor's other arguments are Flax's; a `precision` of "highest" multiplies what was rounded in float32, and
    others change nothing.

    Raises:
      TypeError: recipe is no `Float8Recipe`, or there is a `dot_general` or `promote_dtype` that is not Flax's, or a
        dtype that is not float32, bfloat16 or float16. Of a call, those of `float8_linear`.
    """

    recipe: Float8Recipe

    def __init__(self, in_features: int, out_features: int, *, recipe: Float8Recipe = DEFAULT, **flax: Any) -> None:
        recipe = check_recipe("Float8Linear", recipe)
        super().__init__(in_features, out_features, **flax)
        nnx_layers.check_own(self, "computed in float8")
        self.recipe = recipe

    def __call__(self, inputs: jax.Array | Quantized, out_sharding: Any = None) -> jax.Array:
        kernel, bias = self.kernel[...], nnx_calls.value(self.bias)
        return float8_calls.linear(self, self.recipe, inputs, kernel, bias, out_sharding)


nnx_layers.OURS[Float8Linear] = "it is computed in float8 already"
COMPUTE_IN_FLOAT8 = nnx_layers.Change(
    "float8_linears",
    "compute in float8",
    "computed in float8",
    of_linen="its modules are of flax.linen: call it within jaxnorm.linen.using_float8()",
    linen_remedy="a linen module has no layers until it is called. Call it within jaxnorm.linen.using_float8()",
    remedy=": give this one dot_general=recipe.dot_general",
)


def float8_linears(model: Any, recipe: Float8Recipe, only: Only | None) -> tuple[Any, Report]:
    """`jaxnorm.float8_linears`."""
    recipe = check_recipe("float8_linears", recipe)
    report, layers = nnx_layers.chosen(COMPUTE_IN_FLOAT8, model, only)
    for layer in layers:
        nnx_layers.become(layer, Float8Linear)
        layer.recipe = recipe
    return model, report
