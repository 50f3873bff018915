"""How linear layers of `flax.linen` compute with quantised kernels and in float8, and why others stay."""

import contextlib
import math
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxnorm.integrations import replacing
from jaxnorm.integrations.flax import calls
from jaxnorm.integrations.flax.linen_replace import Chosen, Contexts, path_of
from jaxnorm.integrations.flax.served import linen
from jaxnorm.integrations.replacing import of_rows, pair
from jaxnorm.ops.float8_linear.api import DEFAULT, Float8Recipe, check_recipe
from jaxnorm.ops.misuse import explained
from jaxnorm.ops.quantize.api import quantize
from jaxnorm.ops.quantized_dot.api import quantized_dot
from jaxnorm.quantization import Quantization, Quantized
from jaxnorm.reports import ALREADY, Report

LAYERS = (linen.Dense, linen.DenseGeneral)
# Layers of Flax with weights.
ALL = (linen.Dense, linen.DenseGeneral, linen.Einsum, linen.Conv, linen.ConvLocal, linen.ConvTranspose, linen.Embed)
FLAXS_OWN = {"dot_general": None, "dot_general_cls": None, "promote_dtype": linen.dtypes.promote_dtype}


class Change(NamedTuple):
    """Another way to compute linear layers: it is `done`, as "computed in float8"."""

    done: str
    classes: tuple[type, ...]  # of Flax, whose calls are computed so
    compute: Callable[[Any, Any], jax.Array]  # of a module and what it is called with
    why_left: Callable[[Any, Any], str | None]  # why a call of a module is left to Flax; None if it is not
    remedy: str = ""  # for a DenseGeneral that is left


_contexts = Contexts()


@explained
def using_quantized(
    inputs: Quantization | DTypeLike | None = None, *, only: replacing.Only | None = None
) -> contextlib._GeneratorContextManager[Report]:
    """A context in which linear layers run with kernels that `jaxnorm.linen.quantize_linears` has quantised.

        with jaxnorm.linen.using_quantized(jnp.int8) as report:
            logits = model.apply(variables, tokens)

    `jaxnorm.quantized_dot` computes each, as in a `jaxnorm.nnx.QuantizedLinear`, for a `Quantized` x too. Layers with a
    kernel are left to Flax, so `init` within makes the same parameters. Outside the context Flax does not find the
    kernel of a quantised layer. Contexts act at trace time, as `using_layers`; an outer one is asked first.
    Values and scales get no gradient: keep them from the optimiser.

    Args:
      inputs: how x is quantised at each call: a `Quantization` with granularity "token", or its dtype. float8 for
        float8 kernels, int8 for int8 and int4 kernels. None leaves x as it is: weight-only.
      only: a function of path and layer, true for those that this context computes. None is all.

    Yields:
      A `jaxnorm.reports.Report` that fills while calls are traced.

    Raises:
      TypeError: inputs is no `Quantization`, or only is no function; for a call, a kernel does not go with inputs.
      ValueError: a granularity is not "token".

    Source: `flax.linen.intercept_methods`.
    """
    if inputs is not None:
        inputs = of_rows("using_quantized", "inputs", inputs)
    replacing.check_only("using_quantized", only)

    def compute(layer: Any, x: Any) -> jax.Array:
        return product(layer, x, None, inputs)

    def why_left(layer: Any, x: Any) -> str | None:
        return None if is_quantised(layer) else "its kernel is not quantised"

    return changed(Change("quantised", LAYERS, compute, why_left), only, inputs)


def summed_axes(layer: Any, x: Any) -> tuple[int, ...]:
    """The axes of x over which a layer sums, counted from the last, in the order in which its kernel has them."""
    axis = getattr(layer, "axis", -1)
    rank = x.values.ndim if isinstance(x, Quantized) else x.ndim
    return tuple(sorted(a - rank if a >= 0 else a for a in ((axis,) if isinstance(axis, int) else axis)))


def product(layer: Any, x: Any, quantized: Quantized | None, inputs: Quantization | None) -> jax.Array:
    """The result of a layer with this kernel, or that of its variables."""
    features = (layer.features,) if isinstance(layer.features, int) else tuple(layer.features)
    axes = summed_axes(layer, x)
    rows = x.values if isinstance(x, Quantized) else x
    summed = [rows.shape[axis] for axis in axes]
    length = math.prod(summed)
    if quantized is None:
        shapes = {"values": (*features, *summed), "scales": (*features, *[1] * len(summed))}
        zeros = linen.initializers.zeros
        quantized = Quantized(*(layer.param(name, zeros, shape, jnp.float32) for name, shape in shapes.items()))
        if inputs is not None:
            pair("using_quantized", quantized.values.dtype, inputs)
    bias = layer.param("bias", layer.bias_init, features, layer.param_dtype) if layer.use_bias else None
    dtype = dtype_of(layer, x, bias)
    if not isinstance(x, Quantized):
        x = jnp.moveaxis(x.astype(dtype), axes, range(-len(axes), 0))
        x = x.reshape(*x.shape[: -len(axes)], length)
        x = x if inputs is None else quantize(x, inputs)
    matrix = Quantized(
        quantized.values.reshape(math.prod(features), length), quantized.scales.reshape(-1, 1), transposed=True
    )
    y = quantized_dot(x, matrix, out_dtype=dtype, bias=None if bias is None else bias.reshape(-1))
    return y.reshape(*y.shape[:-1], *features)


def using_float8(
    recipe: Float8Recipe = DEFAULT, *, only: replacing.Only | None = None
) -> contextlib._GeneratorContextManager[Report]:
    """A context in which linear layers of `flax.linen` compute in float8, forward and backward.

        with jaxnorm.linen.using_float8() as report:
            logits = model.apply(variables, tokens)

    `jaxnorm.float8_linear` computes each `flax.linen.Dense` that is called or traced within, as in a
    `jaxnorm.nnx.Float8Linear`, for a `Quantized` x too. Modules and checkpoints stay the same, as do parameters and
    their names, also by `init` within. `DenseGeneral`, `Einsum`, convolutions, embeddings, subclasses with their own
    `__call__`, layers with their own `dot_general`, `dot_general_cls` or `promote_dtype`, and dtypes other than
    float32, bfloat16 and float16 run their own code. The context acts at trace time, so `jax.grad` may be outside; it
    goes with `using_layers`.

    Args:
      recipe: how layers round, and what they keep for the derivative.
      only: a function of path and layer, true for those to compute in float8. None is all.

    Yields:
      A `jaxnorm.reports.Report` that fills while calls are traced: `replaced` has (path, class) of each layer that is
      computed in float8, `left` has (path, class, why) of each that is not.

    Raises:
      TypeError: recipe is no `Float8Recipe`, or only is no function.

    Source: `flax.linen.intercept_methods`.
    """
    replacing.check_only("using_float8", only)
    compute = partial(_dense, check_recipe("using_float8", recipe))
    remedy = ": give this one dot_general=recipe.dot_general"
    change = Change("computed in float8", (linen.Dense,), compute, why_left, remedy)
    return changed(change, only, recipe)


def _dense(recipe: Float8Recipe, module: Any, x: Any) -> jax.Array:
    rows = x.values if isinstance(x, Quantized) else x
    kernel = module.param("kernel", module.kernel_init, (rows.shape[-1], module.features), module.param_dtype)
    bias = module.param("bias", module.bias_init, (module.features,), module.param_dtype) if module.use_bias else None
    return calls.float8_linear(module, recipe, x, kernel, bias)


def changed(change: Change, only: replacing.Only | None, key: Hashable) -> contextlib._GeneratorContextManager[Report]:
    """Computes the layers of all models that are called within so, and has them in a report.

    What is traced may serve where `done`, `only` and the key are the same.
    """
    return _contexts(partial(_chosen, change, only), f"it is {change.done}{ALREADY}", (change.done, only, key))


def _chosen(change: Change, only: replacing.Only | None, module: Any, args: Any, kwargs: Any) -> Chosen:
    """What computes a layer in place of its own code, or why nothing does; None of what is no linear layer."""
    cls = type(module)
    if not replacing.find(cls, dict.fromkeys(change.classes, True)):
        why = _why_class(cls, change)
        return None if why is None else (why, None)
    x = _inputs(*args, **kwargs)
    why = change.why_left(module, x)
    if why is None and only is not None and not only(path_of(module), module):
        why = "only is false of it"
    return why, None if why else partial(change.compute, module, x)


def _inputs(inputs: Any) -> Any:
    return inputs if isinstance(inputs, Quantized) else jnp.asarray(inputs)


def _why_class(cls: type, change: Change) -> str | None:
    """Why a module of a class is left. None if it is no linear layer."""
    if issubclass(cls, change.classes):
        return "its __call__ is not Flax's"
    names = " and ".join(f"{'' if place else 'flax.linen.'}{of.__name__}" for place, of in enumerate(change.classes))
    remedy = change.remedy if issubclass(cls, linen.DenseGeneral) else ""
    verb = "are" if len(change.classes) > 1 else "is"
    return f"only {names} {verb} {change.done}{remedy}" if issubclass(cls, ALL) else None


def is_quantised(layer: Any) -> bool:
    return layer.scope is not None and layer.has_variable("params", "values")


def why_left(module: Any, x: Any) -> str | None:
    """Why any other way is not what Flax's code says. None if it may be."""
    if is_quantised(module):
        return "it is quantised already"
    why = replacing.why_dtypes(module.param_dtype, dtype_of(module, x))
    return replacing.why_own(module, FLAXS_OWN) or (why and f"it is of {why}")


def dtype_of(module: Any, x: Any, bias: jax.Array | None = None) -> Any:
    """The dtype to which Flax promotes x, kernel and bias. Of a `Quantized` the module's, which may be None."""
    if isinstance(x, Quantized):
        return module.dtype
    return calls.dtype_of(module, x, jnp.zeros((), module.param_dtype), bias)
