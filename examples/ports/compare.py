"""What the ports share: a model before and after, and what differs between the two."""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.flatten_util
import jax.numpy as jnp


class Port(NamedTuple):
    """A model as it was and as it is ported: functions of the same parameters and inputs."""

    before: Callable[..., jax.Array]
    after: Callable[..., jax.Array]
    parameters: Any
    inputs: jax.Array


class Comparison(NamedTuple):
    output: float  # relative difference in the L2 norm
    gradient: float  # that of the gradient by all parameters
    calls: dict[str, int]  # kernels in the compiled gradient of the ported model


def compare(port: Port) -> Comparison:
    before, after = (jax.jit(results(model)).lower(*port[2:]).compile() for model in port[:2])
    differences = map(difference, before(*port[2:]), after(*port[2:]))
    calls = Counter(re.findall(r'custom_call_target="jaxnorm_(\w+)"', after.as_text()))
    return Comparison(*differences, dict(calls))


def results(model: Callable[..., jax.Array]) -> Callable[..., tuple[jax.Array, Any]]:
    """Of a model the output, and the gradient of a sum with weights of both signs, which no norm sends to zero."""

    def output_and_gradient(parameters: Any, inputs: jax.Array) -> tuple[jax.Array, Any]:
        y, pull_back = jax.vjp(lambda parameters: model(parameters, inputs), parameters)
        return y, pull_back(jax.random.normal(jax.random.key(3), y.shape).astype(y.dtype))[0]

    return output_and_gradient


def difference(expected: Any, actual: Any) -> float:
    """Of all numbers together: a gradient by one bias may be zero but for rounding."""
    types = [jax.tree.map(lambda a: (a.shape, a.dtype), tree) for tree in (expected, actual)]
    assert types[0] == types[1], f"not of the same types: {types}"
    a, b = (jax.flatten_util.ravel_pytree(jax.tree.map(jnp.float32, tree))[0] for tree in (expected, actual))
    return float(jnp.linalg.norm(b - a) / jnp.linalg.norm(a))


def randomised(parameters: Any, dtype: Any) -> Any:
    """Parameters of a dtype that are not those of initialisers, so that a forgotten scale or bias shows."""
    leaves, structure = jax.tree.flatten(parameters)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    leaves = [p + 0.1 * jax.random.normal(key, p.shape) for p, key in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(structure, [p.astype(dtype) for p in leaves])
