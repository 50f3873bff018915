"""Derivatives that are a convention: of what is rounded and multiplied, as if nothing had been rounded.

What computes such results stands still: its primitives are `Still`. A `Convention` hands the results on, and has the
rule for their tangents. What the rule reads stands beside them among its operands; its code reads nothing of that. It
is a primitive: JAX drops the rule of a `custom_jvp` where it linearises the body of a loop.
"""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.interpreters import ad
from jax.sharding import PartitionSpec
from jax.tree_util import PyTreeDef

from jaxnorm.primitive import rules
from jaxnorm.primitive.op import Record, Spec
from jaxnorm.primitive.rules import Axes, Batched, Derived, Dots, Leaves, Rules, all_none, at_front, no_tangent


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProductSpec(Spec):
    """What is static about a product, or an op that is made of some."""

    out_dtype: np.dtype
    out_spec: PartitionSpec | None = None  # of y over an Explicit mesh, where both matrices do not say it
    wants_all_digits: bool = False  # of a sum, by `jax.default_matmul_precision`
    batch: int = 0  # how many leading axes every operand has that vmap made, 1 long where it has no batch


P = TypeVar("P", bound=ProductSpec)


class Still(Rules):
    """A primitive whose results do not move."""

    def jvp(self, primals: Leaves, dots: Dots, **params: Hashable) -> Derived:
        results = self.primitive.bind(*primals, **params)
        return results, list(map(no_tangent, results))


class Convention(Rules):
    """The derivative of results, for operands that are the fields of a NamedTuple, x the first one.

    `spec.batch` says how many leading axes all of them have that `jax.vmap` made, 1 long where an operand has none. But
    where only fields in `rows` have a batch, and a row has a scale of its own, examples of rows are rows.
    """

    is_checked = False
    rows: tuple[str, ...] = ()
    # Those of the results, of which None is zero, by the spec, results, operands, tangents of operands and parameters.
    tangents: Callable[..., Sequence[jax.Array | None]]

    def __call__(self, spec: ProductSpec, results: Leaves, operands: Record, **params: Hashable) -> list[jax.Array]:
        """The results."""
        return rules.bind(self.primitive, (tuple(results), operands), spec=spec, **params)

    def abstract(self, *leaves: ShapedArray, tree: PyTreeDef, **params: Hashable) -> list[ShapedArray]:
        results, _ = jax.tree.unflatten(tree, leaves)
        return [result.update(weak_type=False) for result in results]

    def formula(self, *leaves: jax.Array, tree: PyTreeDef, **params: Hashable) -> list[jax.Array]:
        results, _ = jax.tree.unflatten(tree, leaves)
        return list(results)

    def jvp(self, primals: Leaves, dots: Dots, *, tree: PyTreeDef, spec: ProductSpec, **params: Hashable) -> Derived:
        _, operands = jax.tree.unflatten(tree, primals)
        _, moving = jax.tree.unflatten(tree, [None if type(dot) is ad.Zero else dot for dot in dots])
        results = self.primitive.bind(*primals, tree=tree, spec=spec, **params)
        if all_none(jax.tree.leaves(moving)):
            return results, list(map(no_tangent, results))
        tangents = self.tangents(spec, results, operands, moving, **params)
        return results, [no_tangent(of) if dot is None else dot for of, dot in zip(results, tangents, strict=True)]

    def batch(self, leaves: Leaves, axes: Axes, *, tree: PyTreeDef, spec: ProductSpec, **params: Hashable) -> Batched:
        size = rules.batch_size(leaves, axes)
        (_, operands), (_, batch) = jax.tree.unflatten(tree, leaves), jax.tree.unflatten(tree, axes)
        results, front = jax.tree.unflatten(tree, rules.examples_first(leaves, axes))
        results = tuple(jnp.broadcast_to(result, (size, *result.shape[1:])) for result in results)
        others = [axis for name, axis in batch._asdict().items() if name not in self.rows]
        if self.rows and not spec.batch and all_none(jax.tree.leaves(others)):
            lengths = results[0].shape[:-1]
            of_rows = {name: getattr(front, name) for name in self.rows}
            whole = jax.tree.map(lambda array: jnp.broadcast_to(array, (*lengths, array.shape[-1])), of_rows)
            return at_front(self(with_rows(spec), results, operands._replace(**whole), **params))
        return at_front(self(with_examples(spec), results, front, **params))


def with_rows(spec: P) -> P:
    """The spec of rows with one axis more, in front."""
    return spec if spec.out_spec is None else dataclasses.replace(spec, out_spec=PartitionSpec(None, *spec.out_spec))


def with_examples(spec: P) -> P:
    return dataclasses.replace(spec, batch=spec.batch + 1)
