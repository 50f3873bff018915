"""`compare_layers`: a model of Flax with its own layers and with those that replaced them."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxnorm.flax import linen_replace, nnx_replace, replacement
from jaxnorm.flax.calls import linen, nnx
from jaxnorm.inspect import turns
from jaxnorm.inspect.compare import Loss, compared
from jaxnorm.reports import Comparison

# Lines that compare what models of other libraries give.
BY_HAND = {
    "equinox": "new, report = jaxnorm.equinox.replace_layers(model)\nprint(abs(new(x) - model(x)).max())",
    "keras": "own = model(x)\nmodel, report = jaxnorm.keras.replace_layers(model)\nprint(abs(model(x) - own).max())",
}


def compare_layers(model: Any, args: Any, loss: Loss | None, kwargs: Any) -> Comparison:
    """`jaxnorm.compare_layers`."""
    _check_library(model)
    if isinstance(model, linen.Module):
        raise TypeError(
            f"compare_layers: got a module of flax.linen, {type(model).__name__}: call "
            f"jaxnorm.linen.compare_layers(module, variables, x)."
        )
    if not (isinstance(model, nnx.Module) and callable(model)):
        raise TypeError(
            f"compare_layers: model must be a flax.nnx module that can be called, got {type(model).__name__}; "
            f"call it on the module whose results are to be compared."
        )
    _check_loss(loss)
    turns.check_values("compare_layers", (model, *args), kwargs)
    own = nnx.merge(*nnx.split(model))
    _, restored = nnx_replace.restore_layers(own)
    if not restored.replaced:
        raise ValueError(
            f"compare_layers: no layer of {type(model).__name__} was replaced: call jaxnorm.replace_layers(model) "
            f"first."
        )
    definition, *variables = nnx.split(model, _is_trained, ...)
    of_own, of_model = (partial(nnx.merge, graph) for graph in (nnx.graphdef(own), definition))
    return compared(of_own, of_model, (*variables, args, kwargs), loss)


def _is_trained(path: Any, variable: Any) -> bool:
    return isinstance(variable, nnx.Param) and jnp.issubdtype(variable.dtype, jnp.inexact)


def linen_compare_layers(
    module: Any,
    variables: Any,
    *args: Any,
    custom: replacement.Custom | None = None,
    loss: Loss | None = None,
    **kwargs: Any,
) -> Comparison:
    """Runs a model of `flax.linen` as it is and within `jaxnorm.linen.using_layers(custom)`, and compares the two.

        print(jaxnorm.linen.compare_layers(module, variables, x, custom={GemmaNorm: gemma_norm}))

    What is compared and timed is what `jaxnorm.compare_layers` says of models of flax.nnx.

    Args:
      module: the model.
      variables: what its `apply` takes. Gradients are taken by those of "params".
      *args: of `module.apply(variables, *args, **kwargs)`.
      **kwargs: likewise.
      custom: that of `jaxnorm.linen.using_layers`.
      loss: a function of `model` and args and kwargs, where `model(x)` is `module.apply(variables, x)`.

    Returns:
      A `jaxnorm.reports.Comparison`.

    Raises:
      TypeError: module is no module of flax.linen, variables have no "params", an argument has no values, or loss is
        no function.
      ValueError: no layer of the model is replaced.
    """
    _check_library(module)
    if not isinstance(module, linen.Module):
        raise TypeError(
            f"compare_layers: expected a module of flax.linen, got {type(module).__name__}; see jaxnorm.compare_layers."
        )
    if not isinstance(variables, Mapping) or "params" not in variables:
        got = list(variables) if isinstance(variables, Mapping) else type(variables).__name__
        raise TypeError(f"compare_layers: variables must be a mapping with 'params', as init gives it, got {got}.")
    _check_loss(loss)
    turns.check_values("compare_layers", (module, variables, *args), kwargs)
    others = {name: collection for name, collection in variables.items() if name != "params"}
    reports = []

    def own(params: Any, others: Any) -> Callable[..., Any]:
        return partial(module.apply, {"params": params, **others})

    def replaced(params: Any, others: Any) -> Callable[..., Any]:
        def apply(*args: Any, **kwargs: Any) -> Any:
            with linen_replace.using_layers(custom) as report:
                reports.append(report)
                return own(params, others)(*args, **kwargs)

        return apply

    jax.eval_shape(lambda params: replaced(params, others)(*args, **kwargs), variables["params"])
    if not reports[0].replaced:
        raise ValueError(
            f"compare_layers: no layer of {type(module).__name__} is replaced; give custom={{Class: function}} for "
            f"norms of its own:\n{reports[0]}"
        )
    return compared(own, replaced, (variables["params"], others, args, kwargs), loss)


def _check_library(model: Any) -> None:
    library = replacement.library_of(model)
    if library in BY_HAND:
        raise TypeError(
            f"compare_layers: got {type(model).__name__}, a model of {library}, expected one of Flax. Before the norms "
            f"of {library} are replaced, compare by hand:\n{BY_HAND[library]}"
        )


def _check_loss(loss: Any) -> None:
    if loss is not None and not callable(loss):
        raise TypeError(f"compare_layers: loss must be a function of a model and its arguments, got {loss!r}.")
