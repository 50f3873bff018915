"""A model beside the same model with other norms: results, gradients and times. `jaxnorm.compare` says of what."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm.inspect import turns
from jaxnorm.inspect.explain import of_arrays

Loss = Callable[..., jax.Array]  # of a model and its arguments
Bind = Callable[[Any, Any], Callable[..., Any]]  # of the parameters and what else a model reads: the model


class Pair(NamedTuple):
    """What a call takes with the model's own norms and as it is."""

    own: turns.Times
    replaced: turns.Times


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A model beside a copy with its own norms. Printed, it is a small table.

    `outputs` is the largest difference of the two models' outputs, relative to the largest magnitude of an output with
    the model's own norms, and `gradients` that of the gradients by the parameters, likewise; `parameter` is where it
    is, None for a model without parameters. `forward` and `backward` have the seconds of a call, `own` and `replaced`,
    each with its `median` and quartiles, `low` and `high`; backward is all that gradients take, the forward pass too.
    """

    outputs: float
    gradients: float
    parameter: str | None
    forward: Pair
    backward: Pair

    def __str__(self) -> str:
        lines = [f"{'':9}{'own norms':>12}{'replaced':>12}{'change':>9}{'largest difference':>20}"]
        rows = (("forward", self.forward, self.outputs), ("gradient", self.backward, self.gradients))
        for name, (own, replaced), difference in rows:
            times = "".join(f"{1e3 * of.median:9.4g} ms" for of in (own, replaced))
            change = f"{100 * (replaced.median / own.median - 1):+.0f} %"
            lines.append(f"{name:9}{times}{change:>9}{difference:20.2g}")
        return "\n".join(lines) + (f", of {self.parameter}" if self.parameter else "")


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
        raise ValueError("compare: the model gives no floating array: pass loss, a function of it and its arguments.")
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
            f"compare: the model gives arrays of shapes {shapes[1]}, and with its own norms {shapes[0]}: a function "
            f"that replaces one of its classes must give what the class gives."
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
