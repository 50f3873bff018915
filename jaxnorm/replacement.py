"""The functions that change the layers of a model of `flax.nnx` that is there already."""

from typing import Any

from jax.typing import DTypeLike

from jaxnorm.inspect.compare import Loss
from jaxnorm.integrations.replacing import Custom, Only
from jaxnorm.ops.float8_linear.api import DEFAULT, Float8Recipe
from jaxnorm.ops.misuse import explained
from jaxnorm.quantization import Quantization
from jaxnorm.reports import Comparison, Report


def replace_layers(model: Any, custom: Custom | None = None) -> tuple[Any, Report]:
    """Puts jaxnorm's norms and Embed into a model of `flax.nnx`, in place: `jaxnorm.nnx.replace_layers`, which see.

        >>> from flax import nnx
        >>> model, report = replace_layers(nnx.LayerNorm(8, rngs=nnx.Rngs(0)))

    For models of `flax.linen` there is `jaxnorm.linen.using_layers`.
    """
    from jaxnorm import nnx  # Flax is optional

    return nnx.replace_layers(model, custom)


def restore_layers(model: Any) -> tuple[Any, Report]:
    """Takes what `replace_layers` put into a model of `flax.nnx` out again: `jaxnorm.nnx.restore_layers`, which see.

    >>> from flax import nnx
    >>> model, report = restore_layers(replace_layers(nnx.LayerNorm(8, rngs=nnx.Rngs(0)))[0])
    """
    from jaxnorm import nnx  # Flax is optional

    return nnx.restore_layers(model)


def compare_layers(model: Any, *args: Any, loss: Loss | None = None, **kwargs: Any) -> Comparison:
    """Runs a `flax.nnx` model that `replace_layers` changed beside a copy with its own norms, and compares the two.

        >>> from flax import nnx
        >>> model, _ = replace_layers(nnx.LayerNorm(8, rngs=nnx.Rngs(0)))
        >>> comparison = compare_layers(model, jnp.ones((2, 8)), loss=lambda model, x: model(x).var())

    Both run with the same parameters and other variables, forward and as the gradient of `loss` by the parameters,
    under `jax.jit`, in turns. For a model of `flax.linen` there is `jaxnorm.linen.compare_layers`.

    Args:
      model: a module that `replace_layers` changed.
      *args: those of its call. Arrays are traced, modules, as a cache, too, and all else stays what it is.
      **kwargs: likewise, by name.
      loss: a function of the model, args and kwargs that gives a scalar. None is the mean of squares of each floating
        array that the model gives, and the sum of these.

    Returns:
      A `jaxnorm.reports.Comparison`: the largest differences, relative to the largest magnitude with the model's own
      norms, and the median times. Printed, it is a small table.

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

    Each `flax.nnx.Linear` becomes a `jaxnorm.nnx.QuantizedLinear`, in stacked layers too, and stays the same object: in
    place of its kernel (in, out) it has `values` (out, in) and `scales` (out, 1), which are no `nnx.Param`. Left are
    other layers, subclasses with a `__call__`, layers with a `dot_general` or `promote_dtype` of their own.

    Args:
      model: a module, or a list, dict or other pytree of modules. To load a quantised checkpoint, call this on what
        `nnx.eval_shape` makes of the model, and `nnx.update` the result.
      kernels: to float8_e4m3fn, float8_e5m2, int8 or int4, with granularity "token"; a dtype alone stands for that.
      inputs: how the input of a layer is quantised on the way, likewise: to float8 for kernels of float8, to int8
        for those of int8 and int4. None is weight-only: the input stays as it is.
      only: a function of the path and the layer, true of those to quantise; None is all. The others are left.

    Returns:
      The same model and a `jaxnorm.reports.Report`: `replaced` has (path, class) of each layer that was quantised,
      `left` has (path, class, why) of each that was not.

    Raises:
      TypeError: model is of `flax.linen` or no model, or kernels and inputs are no such dtypes.
      ValueError: no layer is quantised, the model is an argument of a running `nnx.jit`, or one is not of "token".
    """
    from jaxnorm.integrations.flax import nnx_linear  # Flax is optional

    return nnx_linear.quantize_linears(model, kernels, inputs, only)


def float8_linears(model: Any, recipe: Float8Recipe = DEFAULT, *, only: Only | None = None) -> tuple[Any, Report]:
    """Computes the linear layers of a `flax.nnx` model in float8, forward and backward, in place and at any depth.

        >>> from flax import nnx
        >>> model, report = float8_linears(nnx.Linear(8, 4, rngs=nnx.Rngs(0)))

    Each `flax.nnx.Linear` becomes a `jaxnorm.nnx.Float8Linear`, in stacked layers too, which calls `float8_linear`.
    Modules stay the same objects with the same parameters. Left are `LinearGeneral`, `Einsum`, convolutions, `Embed`,
    subclasses with a `__call__` of their own, layers with a `dot_general` or `promote_dtype` of their own, other dtypes
    than float32, bfloat16 and float16, and modules of `flax.linen`, for which there is `jaxnorm.linen.using_float8`.

    Args:
      model: a module, or a list, dict or other pytree of modules.
      recipe: how layers are rounded, and what is kept for the derivative.
      only: a function of the path and the layer, true of those to compute in float8; None is all. What is in float8
        already is left, so a model of mixed recipes takes a call for each.

    Returns:
      The same model and a `jaxnorm.reports.Report`: `replaced` has (path, class) of each layer that is computed in
      float8, `left` has (path, class, why) of each that is not.

    Raises:
      TypeError: model is of `flax.linen` or no model, recipe is no `Float8Recipe`, or only no function.
      ValueError: there is no `flax.nnx.Linear` to compute in float8, and none that was changed before, or the model is
        an argument of a transformation of flax.nnx, as `nnx.jit`, which is running.
    """
    from jaxnorm.integrations.flax import nnx_linear  # Flax is optional

    return nnx_linear.float8_linears(model, recipe, only)
