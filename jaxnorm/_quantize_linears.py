"""Quantising the linear layers of a model that is there already: `quantize_linears`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxnorm.ops.quantized_dot.checks import dtypes_beside
from jaxnorm.quantization import Quantization
from jaxnorm.replacement import Path, Report

Only = Callable[[Path, Any], bool]  # of the path of a module and the module


def quantize_linears(
    model: Any,
    weights: Quantization | DTypeLike,
    activations: Quantization | DTypeLike | None = None,
    *,
    only: Only | None = None,
) -> Report:
    """Quantises the linear layers of a trained `flax.nnx` model, in place and at any depth.

        report = jaxnorm.quantize_linears(model, Quantization(jnp.int8), Quantization(jnp.int8))
        print(report)

    Each `flax.nnx.Linear` becomes a `jaxnorm.nnx.QuantizedLinear`, in stacked layers too: in place of its kernel of
    shape (in, out) it has `values` of shape (out, in) and `scales` of shape (out, 1), one for each output. The bias
    stays. Modules stay the same objects, and those that share a kernel share its values. `values` and `scales` are no
    `nnx.Param`, so that neither an optimiser nor `nnx.grad` sees them by default.

    Left are `LinearGeneral`, `Einsum`, convolutions and embeddings, subclasses with a `__call__` of their own, and
    layers with a `dot_general` or `promote_dtype` of their own. What is not part of the model's graph, as a module in a
    closure, is not found.

    Args:
      model: a module, or a list, dict or other pytree of modules. To load a quantised checkpoint, call this on what
        `nnx.eval_shape` makes of the model, and `nnx.update` the result.
      weights: to float8_e4m3fn, float8_e5m2, int8 or int4, with granularity "token"; a dtype alone stands for that.
      activations: how the input of a layer is quantised on the way, likewise: to float8 for weights of float8, to int8
        for those of int8 and int4. None is weight-only: the input stays as it is.
      only: a function of the path and the layer, true of those to quantise. None is all. A model of mixed types takes
        a call for each: what is quantised already is left.

    Returns:
      A `jaxnorm.replacement.Report`: `replaced` has (path, class) of each layer that was quantised, `left` has
      (path, class, why) of each that was not.

    Raises:
      TypeError: model is of `flax.linen` or no model, weights or activations is no `Quantization`, or their dtypes do
        not go together.
      ValueError: the model has no `flax.nnx.Linear` to quantise, or is an argument of a transformation of flax.nnx, as
        `nnx.jit`, which is running; or a granularity is not "token".
    """
    weights, activations = check_pair("quantize_linears", weights, activations)
    if only is not None and not callable(only):
        raise TypeError(f"quantize_linears: only must be a function of a path and a module, got {only!r}.")
    from jaxnorm import _nnx_linear  # Flax is optional

    return _nnx_linear.quantize(model, weights, activations, only)


def check_pair(function: str, weights: Any, activations: Any) -> tuple[Quantization, Quantization | None]:
    """Both, quantised with a scale for each row, to dtypes of which there is a product."""
    weights = _quantization(function, "weights", weights)
    given = {"weights": weights}
    if activations is not None:
        given["activations"] = activations = _quantization(function, "activations", activations)
    for name, quantization in given.items():
        if quantization.granularity != "token":
            why = "an output" if name == "weights" else "a row of the input"
            raise ValueError(
                f"{function}: {name} has granularity={quantization.granularity!r}, expected 'token', a scale for {why}."
            )
    if activations is None:
        return weights, None
    theirs, ours = (jnp.dtype(quantization.dtype) for quantization in (weights, activations))
    if ours.name not in (expected := dtypes_beside(theirs)):
        raise TypeError(
            f"{function}: activations are quantised to {ours}, expected {' or '.join(expected)} for weights of "
            f"{theirs}; leave activations out to quantise the weights only."
        )
    return weights, activations


def _quantization(function: str, name: str, given: Any) -> Quantization:
    """What is given, or what a dtype stands for."""
    if isinstance(given, Quantization):
        return given
    try:
        # Of an array numpy would take its dtype.
        return Quantization(jnp.dtype(given) if isinstance(given, (str, type, np.dtype)) else None)
    except TypeError as error:
        example = f"{name}=jaxnorm.Quantization(jax.numpy.int8)"
        raise TypeError(
            f"{function}: {name} must be a jaxnorm.Quantization, as {example}, or a dtype that it takes, got {given!r}."
        ) from error
