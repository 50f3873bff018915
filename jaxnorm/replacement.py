"""Functions that change the layers of an existing `flax.nnx` model."""

from typing import Any

from jax.typing import DTypeLike

from jaxnorm.inspect.compare import Loss
from jaxnorm.integrations.replacing import Custom, Only
from jaxnorm.ops.float8_linear.api import DEFAULT, Float8Recipe
from jaxnorm.ops.misuse import explained
from jaxnorm.quantization import Quantization
from jaxnorm.reports import Comparison, Report


def replace_layers(model: Any, custom: Custom | None = None) -> tuple[Any, Report]:
    """Replaces norms and Embeds of a `flax.nnx` model with jaxnorm's, in place: see `jaxnorm.nnx.replace_layers`.

        >>> from flax import nnx
        >>> model, report = replace_layers(nnx.LayerNorm(8, rngs=nnx.Rngs(0)))

    For models of `flax.linen` use `jaxnorm.linen.using_layers`.
    """
    from jaxnorm import nnx  # Flax is optional

    return nnx.replace_layers(model, custom)


def restore_layers(model: Any) -> tuple[Any, Report]:
    """Undoes `replace_layers` on a `flax.nnx` model, in place: see `jaxnorm.nnx.restore_layers`.

    >>> from flax import nnx
    >>> model, report = restore_layers(replace_layers(nnx.LayerNorm(8, rngs=nnx.Rngs(0)))[0])
    """
    from jaxnorm import nnx  # Flax is optional

    return nnx.restore_layers(model)


def compare_layers(model: Any, *args: Any, loss: Loss | None = None, **kwargs: Any) -> Comparison:
    """Compares a `flax.nnx` model that `replace_layers` changed with a copy that has its own norms: results and times.

        >>> from flax import nnx
        >>> model, _ = replace_layers(nnx.LayerNorm(8, rngs=nnx.Rngs(0)))
        >>> comparison = compare_layers(model, jnp.ones((2, 8)), loss=lambda model, x: model(x).var())

    Both run in turns under `jax.jit`, with the same parameters and other variables: forward, and the gradient of `loss`
    by the parameters. For a model of `flax.linen` use `jaxnorm.linen.compare_layers`.

    Args:
      model: a module that `replace_layers` changed.
      *args: arguments of its call. Arrays are traced, and modules, such as a cache; all else is static.
      **kwargs: likewise, by name.
      loss: a function of the model, args and kwargs that returns a scalar. None: the mean square of each floating-point
        output, and the sum of these.

    Returns:
      A `jaxnorm.reports.Comparison`: the largest differences, relative to the largest magnitude with the model's own
      norms, and the median times. It prints as a small table.

    Raises:
      TypeError: model is no module of flax.nnx that can be called, an array has no values, or loss is no function.
      ValueError: no layer of the model was replaced, or results have other shapes than with its own norms.
    """
    from jaxnorm.integrations.flax import nnx_replace  # Flax is optional

    return nnx_replace.compare_layers(model, args, loss, kwargs)


@explained
def quantize_linears(
    model: Any,
    kernels: Quantization | DTypeLike,
    inputs: Quantization | DTypeLike | None = None,
    *,
    only: Only | None = None,
) -> tuple[Any, Report]:
    """Quantises the linear layers of a trained `flax.nnx` model, in place and at any depth.

        >>> from flax import nnx
        >>> model, report = quantize_linears(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), kernels=jnp.int8)

    Each `flax.nnx.Linear`, in stacked layers too, becomes a `jaxnorm.nnx.QuantizedLinear` and stays the same object.
    `values` (out, in) and `scales` (out, 1), no `nnx.Param`s, replace its kernel (in, out). Other layers, subclasses
    with their own `__call__`, and layers with their own `dot_general` or `promote_dtype` stay.

    Args:
      model: a module, or a list, dict or other pytree of modules. To load a quantised checkpoint, pass what
        `nnx.eval_shape` makes of the model, and `nnx.update` the result.
      kernels: a `Quantization` to float8_e4m3fn, float8_e5m2, int8 or int4 with granularity "token", or its dtype.
      inputs: how inputs are quantised at each call, likewise: float8 with float8 kernels, int8 with int8 and int4
        kernels. None leaves inputs as they are: weight-only.
      only: a function of path and layer, true for those to quantise. None is all.

    Returns:
      The same model and a `jaxnorm.reports.Report`: `replaced` has (path, class) of each layer that was quantised,
      `left` has (path, class, why) of each that was not.

    Raises:
      TypeError: model is of `flax.linen` or no model, or kernels or inputs are no such dtypes.
      ValueError: no layer is quantised, model is an argument of a running `nnx.jit`, or a granularity is not "token".
    """
    from jaxnorm.integrations.flax import nnx_linear  # Flax is optional

    return nnx_linear.quantize_linears(model, kernels, inputs, only)


def float8_linears(model: Any, recipe: Float8Recipe = DEFAULT, *, only: Only | None = None) -> tuple[Any, Report]:
    """Makes the linear layers of a `flax.nnx` model compute in float8, forward and backward, in place and at any depth.

        >>> from flax import nnx
        >>> model, report = float8_linears(nnx.Linear(8, 4, rngs=nnx.Rngs(0)))

    Each `flax.nnx.Linear`, in stacked layers too, becomes a `jaxnorm.nnx.Float8Linear`, which calls `float8_linear`,
    and stays the same object with the same parameters. `LinearGeneral`, `Einsum`, convolutions, `Embed`, subclasses
    with their own `__call__`, layers with their own `dot_general` or `promote_dtype`, and dtypes other than float32,
    bfloat16 and float16 stay as they are. For `flax.linen` use `jaxnorm.linen.using_float8`.

    Args:
      model: a module, or a list, dict or other pytree of modules.
      recipe: how layers round, and what they keep for the derivative.
      only: a function of path and layer, true for those to change. None is all. Layers in float8 already stay, so a
        model with several recipes takes one call for each.

    Returns:
      The same model and a `jaxnorm.reports.Report`: `replaced` has (path, class) of each layer that is now in float8,
      `left` has (path, class, why) of each that is not.

    Raises:
      TypeError: model is of `flax.linen` or no model, recipe is no `Float8Recipe`, or only is no function.
      ValueError: model has no `flax.nnx.Linear` to change and none that was changed before, or is an argument of a
        running transformation of flax.nnx, as `nnx.jit`.
    """
    from jaxnorm.integrations.flax import nnx_linear  # Flax is optional

    return nnx_linear.float8_linears(model, recipe, only)
