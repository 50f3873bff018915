"""How the linear layers of models of `flax.linen` are computed in float8."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp

from jaxnorm.flax import calls, float8_calls, replacement
from jaxnorm.flax.calls import linen
from jaxnorm.ops.float8_linear.api import DEFAULT
from jaxnorm.ops.float8_linear.recipe import Float8Recipe, check_recipe
from jaxnorm.quantization import Quantized

# Layers of Flax with weights that are left as they are.
OTHERS = (linen.DenseGeneral, linen.Einsum, linen.Conv, linen.ConvLocal, linen.ConvTranspose, linen.Embed)
FLAXS_OWN = {"dot_general": None, "dot_general_cls": None, "promote_dtype": linen.dtypes.promote_dtype}


def float8_linears(
    recipe: Float8Recipe = DEFAULT, *, only: replacement.Only | None = None
) -> contextlib._GeneratorContextManager[replacement.Report]:
    """Computes the linear layers of all models that are called, or traced, within by `jaxnorm.float8_linear`.

        with jaxnorm.linen.float8_linears() as report:
            logits = model.apply(variables, tokens)
        print(report)

    Each `flax.linen.Dense` is computed as a `jaxnorm.nnx.Float8Linear` is: its kernel is rounded once, from its own
    dtype, the kernel's gradient has that dtype, and the bias's gradient is a sum in float32. It takes a `Quantized` as
    well. Modules, parameters, their names and checkpoints stay the same, and `init` within makes the same parameters.

    Left to their own code are `DenseGeneral`, `Einsum`, convolutions and embeddings, subclasses with a `__call__` of
    their own, layers with a `dot_general`, `dot_general_cls` or `promote_dtype` of their own, and dtypes other than
    float32, bfloat16 and float16. Of calls that are alike, the report has one.

    What counts is where a program is traced, as for `replace_norms`, and both contexts go together. Gradients are taken
    of what was traced, so `jax.grad` may be outside.

    Args:
      recipe: how layers are rounded, and what is kept for the derivative.
      only: a function of the path and the layer, true of those to compute in float8. None is all.

    Yields:
      A `jaxnorm.replacement.Report` that fills while calls are traced: `replaced` has (path, class) of each layer that
      is computed in float8, `left` has (path, class, why) of each that is not.

    Raises:
      TypeError: recipe is no `Float8Recipe`, or only no function.

    Source: `flax.linen.intercept_methods`.
    """
    replacement.check_only("float8_linears", only)
    return _computing(check_recipe("float8_linears", recipe), only)


@contextlib.contextmanager
def _computing(recipe: Float8Recipe, only: replacement.Only | None) -> Iterator[replacement.Report]:
    report = replacement.Report()
    with linen.intercept_methods(_interceptor(report, recipe, only)):
        yield report


def _interceptor(report: replacement.Report, recipe: Float8Recipe, only: replacement.Only | None) -> Callable[..., Any]:
    """What `linen.intercept_methods` calls for each method of a module."""

    def intercept(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        module, cls = context.module, type(context.module)
        if context.method_name != "__call__":
            return call(*args, **kwargs)
        path = () if module.scope is None else module.path
        if replacement.find(cls, {linen.Dense: True}):
            x = _inputs(*args, **kwargs)
            why = _why_left(module, x) or ("only is false of it" if only and not only(path, module) else None)
            if why is None:
                call, args, kwargs = _dense, (module, recipe, x), {}
        elif (why := _why_class(cls)) is None:
            return call(*args, **kwargs)
        report.add(path, cls, why)
        return call(*args, **kwargs)

    return intercept


def _inputs(inputs: Any) -> Any:
    """The argument of a `Dense`."""
    return inputs if isinstance(inputs, Quantized) else jnp.asarray(inputs)


def _dense(module: Any, recipe: Float8Recipe, x: Any) -> Any:
    rows = x.values if isinstance(x, Quantized) else x
    kernel = module.param("kernel", module.kernel_init, (rows.shape[-1], module.features), module.param_dtype)
    bias = module.param("bias", module.bias_init, (module.features,), module.param_dtype) if module.use_bias else None
    return float8_calls.linear(module, recipe, x, kernel, bias)


def _why_class(cls: type) -> str | None:
    """Why a module of a class is left. None if it is no linear layer."""
    if issubclass(cls, linen.Dense):
        return "its __call__ is not Flax's"
    remedy = ": give this one dot_general=recipe.dot_general" if issubclass(cls, linen.DenseGeneral) else ""
    return f"only flax.linen.Dense is computed in float8{remedy}" if issubclass(cls, OTHERS) else None


def _why_left(module: Any, x: Any) -> str | None:
    """Why a call of a `Dense` is left to Flax's code. None if it is computed in float8."""
    if isinstance(x, Quantized):
        dtypes = [module.dtype] if module.dtype else []
    else:
        dtypes = [linen.dtypes.canonicalize_dtype(x, jnp.zeros((), module.param_dtype), dtype=module.dtype)]
    why = calls.why_dtypes(module.param_dtype, *dtypes)
    return replacement.why_own(module, FLAXS_OWN) or (why and f"it is of {why}")
