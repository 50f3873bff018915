"""Derivatives that are a convention: of what is rounded and multiplied, as if nothing had been rounded.

What computes such results stands still: its primitives are `Still`. A `Convention` hands the results on, and has the
rule for their tangents. What the rule reads stands beside them among its operands; its code reads nothing of that. It
is a primitive: JAX drops the rule of a `custom_jvp` where it linearises the body of a loop.
"""

import dataclasses
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad
from jax.sharding import PartitionSpec

from jaxnorm.primitive.op import Record
from jaxnorm.primitive.rules import Rules, all_none, at_front, batch_size, bind, examples_first, no_tangent


class Still(Rules):
    """A primitive whose results do not move."""

    def jvp(self, primals: Any, dots: Any, **params: Any) -> tuple[Any, Any]:
        results = self.primitive.bind(*primals, **params)
        return results, list(map(no_tangent, results))


class Convention(Rules):
    """The derivative of results, for operands that are the fields of a NamedTuple, x the first one.

    `spec.batch` says how many leading axes all of them have that `jax.vmap` made, 1 long where an operand has none. But
    where only fields in `rows` have a batch, and a row has a scale of its own, examples of rows are rows.
    """

    is_checked = False
    rows: tuple[str, ...] = ()

    def __call__(self, spec: Any, results: Sequence[jax.Array], operands: Record, **params: Any) -> list[jax.Array]:
        """The results."""
        return bind(self.primitive, (tuple(results), operands), spec=spec, **params)

    @abstractmethod
    def tangents(self, spec: Any, results: Any, operands: Any, dots: Any, **params: Any) -> list[Any]:
        """Those of the results, of which None is zero; dots are those of the operands."""

    def abstract(self, *leaves: Any, tree: Any, **params: Any) -> list[Any]:
        results, _ = jax.tree.unflatten(tree, leaves)
        return [result.update(weak_type=False) for result in results]

    def formula(self, *leaves: Any, tree: Any, **params: Any) -> list[jax.Array]:
        results, _ = jax.tree.unflatten(tree, leaves)
        return list(results)

    def jvp(self, primals: Any, dots: Any, *, tree: Any, spec: Any, **params: Any) -> tuple[Any, Any]:
        _, operands = jax.tree.unflatten(tree, primals)
        _, moving = jax.tree.unflatten(tree, [None if type(dot) is ad.Zero else dot for dot in dots])
        results = self.primitive.bind(*primals, tree=tree, spec=spec, **params)
        if all_none(jax.tree.leaves(moving)):
            return results, list(map(no_tangent, results))
        tangents = self.tangents(spec, results, operands, moving, **params)
        return results, [no_tangent(of) if dot is None else dot for of, dot in zip(results, tangents, strict=True)]

    def batch(self, leaves: Any, axes: Any, *, tree: Any, spec: Any, **params: Any) -> tuple[Any, Any]:
        size = batch_size(leaves, axes)
        (_, operands), (_, batch) = jax.tree.unflatten(tree, leaves), jax.tree.unflatten(tree, axes)
        results, front = jax.tree.unflatten(tree, examples_first(leaves, axes))
        results = tuple(jnp.broadcast_to(result, (size, *result.shape[1:])) for result in results)
        others = [axis for name, axis in batch._asdict().items() if name not in self.rows]
        if self.rows and not spec.batch and spec.scaling == "row" and all_none(jax.tree.leaves(others)):
            lengths = results[0].shape[:-1]
            of_rows = {name: getattr(front, name) for name in self.rows}
            whole = jax.tree.map(lambda array: jnp.broadcast_to(array, (*lengths, array.shape[-1])), of_rows)
            return at_front(self(with_rows(spec), results, operands._replace(**whole), **params))
        return at_front(self(with_examples(spec), results, front, **params))


def with_rows(spec: Any) -> Any:
    """The spec of rows with one axis more, in front."""
    if spec.out_spec is None:
        return spec
    return dataclasses.replace(spec, out_spec=PartitionSpec(None, *spec.out_spec))


def with_examples(spec: Any) -> Any:
    return dataclasses.replace(spec, batch=spec.batch + 1)
