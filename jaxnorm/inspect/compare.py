"""A model beside the same model with other norms: results, gradients and times, for `jaxnorm.compare_layers`."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm.inspect import turns
from jaxnorm.inspect.explain import of_arrays
from jaxnorm.reports import Comparison, Pair

Loss = Callable[..., jax.Array]  # of a model and its arguments
Bind = Callable[[Any, Any], Callable[..., Any]]  # of the parameters and what else a model reads: the model


def compared(own: Bind, replaced: Bind, given: tuple[Any, Any, Any, Any], loss: Loss | None) -> Comparison:
    """Both models, with the same parameters, other variables, args and kwargs, which are `given`."""
    results, times = [], []
    for function in (_outputs, _gradients(loss or _mean_of_squares)):
        runs, pair = [], []
        for bind in (own, replaced):
            arrays, traceable = of_arrays(function, (bind, *given), {})
            runs.append(turns.Run(turns.Program(jax.jit(traceable), (arrays,), {}), {}, []))
            pair.append(runs[-1].program.function(arrays))
        results.append(_difference(*pair))
        times.append(Pair(*turns.in_turns(runs)))
    (outputs, _), (gradients, where) = results
    names = [
        jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
        for path, _ in jax.tree_util.tree_leaves_with_path(given[0])
    ]
    return Comparison(outputs, gradients, names[where] if names else None, *times)


def _outputs(bind: Bind, params: Any, others: Any, args: Any, kwargs: Any) -> list[jax.Array]:
    return _numbers(bind(params, others)(*args, **kwargs))


def _gradients(loss: Loss) -> Callable[..., list[jax.Array]]:
    def gradients(bind: Bind, params: Any, *given: Any) -> list[jax.Array]:
        leaves, tree = jax.tree.flatten(given)

        def value(params: Any) -> jax.Array:
            # Modules among the arguments, as a cache, belong to the trace that they are made in.
            others, args, kwargs = jax.tree.unflatten(tree, leaves)
            return loss(bind(params, others), *args, **kwargs)

        return jax.tree.leaves(jax.grad(value)(params))

    return gradients


def _mean_of_squares(model: Callable[..., Any], *args: Any, **kwargs: Any) -> jax.Array:
    """Of each array that a model gives, and their sum."""
    arrays = [array for array in _numbers(model(*args, **kwargs)) if jnp.issubdtype(array.dtype, jnp.inexact)]
    if not arrays:
        raise ValueError("compare_layers: the model gives no floating array: pass loss, a function of the model.")
    return sum((jnp.square(jnp.abs(_wide(array))).mean() for array in arrays), jnp.zeros(()))


def _numbers(results: Any) -> list[jax.Array]:
    """The arrays of numbers, as keys of random generators are none."""
    arrays = [leaf for leaf in jax.tree.leaves(results) if isinstance(leaf, jax.Array)]
    return [array for array in arrays if not jnp.issubdtype(array.dtype, jax.dtypes.extended)]


def _wide(array: jax.Array) -> jax.Array:
    return array.astype(jnp.promote_types(array.dtype, jnp.float32))


def _difference(own: Sequence[jax.Array], replaced: Sequence[jax.Array]) -> tuple[float, int]:
    """The largest difference by the largest magnitude of `own`, and in which of the arrays it is."""
    shapes = [[array.shape for array in arrays] for arrays in (own, replaced)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"compare_layers: the model gives arrays of shapes {shapes[1]}, and with its own norms {shapes[0]}: a "
            f"function that replaces one of its classes must give what the class gives."
        )
    largest = max((float(_most(array)) for array in own), default=0.0)
    differences = [float(_most(_wide(b) - _wide(a))) for a, b in zip(own, replaced, strict=True)] or [0.0]
    where = int(np.argmax(differences))  # of NaN, the first
    most = differences[where]
    if largest == 0 and most:  # no part of nothing: infinity, or NaN
        return most * np.inf, where
    return most / largest if most else most, where


def _most(array: jax.Array) -> jax.Array:
    return jnp.max(jnp.abs(_wide(array)), initial=0)
