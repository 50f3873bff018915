"""The linear primitive of an op: (saved, dots) -> the tangents of the results, linear in dots.

dots are the tangents of the op's variables, None for zero ones. With an addend, what is saved as x is the sum; and
with_sum its tangent is handed on as a result, so that the transpose sees the cotangents of all results together and
`backward` adds that of the sum to x's.
"""

from collections.abc import Mapping
from typing import Any

import jax
from jax.interpreters import ad

from jaxnorm.primitive import lowering, weights
from jaxnorm.primitive.backward import Backward
from jaxnorm.primitive.batching import Batched
from jaxnorm.primitive.op import AnyOp, Derivative, Record, RowSpec
from jaxnorm.primitive.reasons import RowCall
from jaxnorm.primitive.rules import all_none, at_front, bind, leaves_of, no_tangent


class Linear(Batched):
    def __init__(self, op: AnyOp, derivative: Derivative[Any, Any, Any]) -> None:
        super().__init__(op, "linear")
        self.derivative = derivative
        self.backward = Backward(op, derivative, self)

    def lower(self) -> None:
        lowering.register_formula(self.primitive, self.formula)

    def bind(self, spec: RowSpec, saved: Record, dots: Record, *, with_sum: bool) -> Any:
        """The tangents of the results; None for what does not move."""
        if all_none(dots):
            return self.op.results(*(None for _ in self.op.results._fields))
        values = bind(self.primitive, (tuple(saved), tuple(dots)), spec=spec, with_sum=with_sum)
        types = self._types(spec, *jax.tree.map(jax.typeof, (saved, dots)), with_sum=with_sum)
        return jax.tree.unflatten(jax.tree.structure(types), values)

    def _operands(self, tree: Any, values: Any) -> tuple[Record, Record]:
        saved, dots = jax.tree.unflatten(tree, values)
        return self.derivative.saved(*saved), self.derivative.variables(*dots)

    def with_zeros(self, spec: RowSpec, dots: Record, like: Mapping[str, Any]) -> Any:
        """The tangents, with zeros for variables that are not saved; `like` are these, or their types."""
        absent = [name for name in self.derivative.unsaved(spec) if getattr(dots, name) is None]
        if all_none(dots):
            return dots
        zeros = (no_tangent(like[name]) for name in absent)
        return dots._replace(**dict(zip(absent, map(ad.instantiate_zeros, zeros), strict=True)))

    def _types(self, spec: RowSpec, saved: Record, dots: Record, *, with_sum: bool) -> Any:
        x, *others = self.op.operands._fields
        given = {x: saved[0]} | {name: getattr(saved, name, None) for name in others}
        given |= {name: getattr(dots, name) for name in self.derivative.unsaved(spec)}
        types = self.op.types(spec, self.op.operands(**given))
        return types._replace(sum=saved[0].update(weak_type=False)) if with_sum else types

    def abstract(self, *leaves: Any, tree: Any, spec: RowSpec, with_sum: bool) -> list[Any]:
        return jax.tree.leaves(self._types(spec, *self._operands(tree, leaves), with_sum=with_sum))

    def call(self, *types: Any, tree: Any, spec: RowSpec, with_sum: bool) -> RowCall:
        return RowCall(self.op, spec, "linear", types[0])

    def formula(self, *leaves: Any, tree: Any, spec: RowSpec, with_sum: bool) -> list[jax.Array]:
        saved, dots = self._operands(tree, leaves)
        results = self.derivative.linear(spec, saved, dots)
        return jax.tree.leaves(results._replace(sum=dots[0]) if with_sum else results)

    def batch(self, leaves: Any, axes: Any, *, tree: Any, spec: RowSpec, with_sum: bool) -> Any:
        params: dict[str, Any] = {"spec": spec, "with_sum": with_sum}
        values, batch = self._operands(tree, leaves), self._operands(tree, axes)
        whole = self.batch_in_front(spec, values, batch) if self.rows_of(batch[0]) else None
        if whole is None:
            return self.batch_formula(leaves, axes, tree=tree, **params)
        return at_front(bind(self.primitive, tuple(map(tuple, whole)), **params))

    def transpose(self, cotangents: Any, *leaves: Any, tree: Any, spec: RowSpec, with_sum: bool) -> list[Any]:
        saved, dots = self._operands(tree, leaves)
        wanted = {name: dot.aval for name, dot in dots._asdict().items() if ad.is_undefined_primal(dot)}
        there = {name: dot for name, dot in dots._asdict().items() if dot is not None}
        of_dots = {name: dot.aval if name in wanted else jax.typeof(dot) for name, dot in there.items()}
        types = self._types(spec, jax.tree.map(jax.typeof, saved), dots._replace(**of_dots), with_sum=with_sum)
        given = dict(zip((name for name, _ in leaves_of(types)), cotangents, strict=True))
        dsum = given.pop("sum", None)
        x, *_ = dots._fields
        if type(dsum) is ad.Zero or x not in wanted:
            dsum = None
        if dsum is not None and all(type(cotangent) is ad.Zero for cotangent in given.values()):
            gradients = self.derivative.variables(**{x: dsum})
        else:
            # A zero is left out where the result may be absent, and nothing is read for it.
            optional = self.op.results._field_defaults
            given = {
                name: None if name in optional and type(cotangent) is ad.Zero else ad.instantiate_zeros(cotangent)
                for name, cotangent in given.items()
            }
            of_results = self.op.results(**given)
            gradients = self.backward.bind(
                spec,
                of_results if dsum is None else of_results._replace(sum=dsum),
                saved,
                wanted=self.derivative.variables(**{name: aval.dtype for name, aval in wanted.items()}),
                batch_dims=weights.batch_dims_of(
                    spec.row_ndim,
                    [*self.weights_of(saved), *(aval for name, aval in wanted.items() if self.is_weight(name))],
                ),
            )
        bars = (getattr(gradients, name) if name in wanted else None for name in there)
        return [*(None for _ in jax.tree.leaves(saved)), *bars]
