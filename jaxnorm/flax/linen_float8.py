"""How the linear layers of models of `flax.linen` are computed in float8."""

import contextlib
from functools import partial
from typing import Any

import jax

from jaxnorm.flax import float8_calls, linen_layers, replacement
from jaxnorm.flax.calls import linen
from jaxnorm.ops.float8_linear.api import DEFAULT
from jaxnorm.ops.float8_linear.recipe import Float8Recipe, check_recipe
from jaxnorm.quantization import Quantized
from jaxnorm.reports import Report


def using_float8(
    recipe: Float8Recipe = DEFAULT, *, only: replacement.Only | None = None
) -> contextlib._GeneratorContextManager[Report]:
    """Computes the linear layers of all models that are called, or traced, within by `jaxnorm.float8_linear`.

        with jaxnorm.linen.using_float8() as report:
            logits = model.apply(variables, tokens)

    Each `flax.linen.Dense` is computed as a `jaxnorm.nnx.Float8Linear` is, of a `Quantized` too. Modules, parameters,
    their names and checkpoints stay the same, and `init` within makes the same parameters. Left to their own code are
    `DenseGeneral`, `Einsum`, convolutions and embeddings, subclasses with a `__call__` of their own, layers with a
    `dot_general`, `dot_general_cls` or `promote_dtype` of their own, and dtypes other than float32, bfloat16 and
    float16. What counts is where a program is traced, so `jax.grad` may be outside; it goes with `using_layers`.

    Args:
      recipe: how layers are rounded, and what is kept for the derivative.
      only: a function of the path and the layer, true of those to compute in float8. None is all.

    Yields:
      A `jaxnorm.reports.Report` that fills while calls are traced: `replaced` has (path, class) of each layer that is
      computed in float8, `left` has (path, class, why) of each that is not.

    Raises:
      TypeError: recipe is no `Float8Recipe`, or only no function.

    Source: `flax.linen.intercept_methods`.
    """
    replacement.check_only("using_float8", only)
    compute = partial(_dense, check_recipe("using_float8", recipe))
    remedy = ": give this one dot_general=recipe.dot_general"
    change = linen_layers.Change("computed in float8", (linen.Dense,), compute, linen_layers.why_left, remedy)
    return linen_layers.changed(change, only, recipe)


def _dense(recipe: Float8Recipe, module: Any, x: Any) -> jax.Array:
    rows = x.values if isinstance(x, Quantized) else x
    kernel = module.param("kernel", module.kernel_init, (rows.shape[-1], module.features), module.param_dtype)
    bias = module.param("bias", module.bias_init, (module.features,), module.param_dtype) if module.use_bias else None
    return float8_calls.linear(module, recipe, x, kernel, bias)
