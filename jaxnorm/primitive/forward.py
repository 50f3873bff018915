"""The forward primitive of an op: operands -> results, and with_stats the statistics behind them."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, mlir

from jaxnorm.native import ffi
from jaxnorm.primitive import lowering, rules, weights
from jaxnorm.primitive.addend import add
from jaxnorm.primitive.batching import Batched
from jaxnorm.primitive.linear import Linear
from jaxnorm.primitive.op import AnyOp, Record, RowSpec, Statistics, rows_and_cols
from jaxnorm.primitive.reasons import RowCall
from jaxnorm.sharding import dims
from jaxnorm.sharding.dims import CallMaps


def _without(spec: RowSpec, results: Record) -> Any:
    """The results, or their types or tangents, without those that are omitted."""
    return results._replace(**dict.fromkeys(spec.omitted))


class Forward(Batched):
    def __init__(self, op: AnyOp, linear: Linear | None) -> None:
        super().__init__(op, "forward")
        rules.drop_unread(self.primitive, self._without_unread)
        self._results_tree = functools.lru_cache(maxsize=4096)(self._tree_of_results)
        self._linear: Any = linear  # None only where nothing asks for it

    def bind(self, spec: RowSpec, operands: Record, *, with_stats: bool = False) -> tuple[Any, Statistics]:
        values = rules.bind(self.primitive, tuple(operands), spec=spec, with_stats=with_stats)
        tree = self._results_tree(spec, jax.tree.map(jax.typeof, operands))
        return jax.tree.unflatten(tree, values[: tree.num_leaves]), tuple(values[tree.num_leaves :])

    def is_summed(self, name: str) -> bool:
        """Whether the gradient of an operand is a sum over rows."""
        derivative = self.op.derivative
        by_derivative = self.is_weight(name) if derivative is None else name in derivative.variables._fields
        has_gradient = by_derivative or name == self.op.factor
        return has_gradient and not self.role(name).is_of_rows

    def _operands(self, tree: Any, values: Any) -> Record:
        return self.op.operands(*jax.tree.unflatten(tree, values))

    def _tree_of_results(self, spec: RowSpec, types: Any) -> Any:
        return jax.tree.structure(self._types(spec, types))

    def _types(self, spec: RowSpec, operands: Record) -> Any:
        return _without(spec, self.op.types(spec, operands))

    def abstract(self, *leaves: Any, tree: Any, spec: RowSpec, with_stats: bool) -> list[Any]:
        operands = self._operands(tree, leaves)
        types = jax.tree.leaves(self._types(spec, operands))
        return [*types, *self.op.statistics(spec, operands)] if with_stats else types

    def formula(self, *leaves: Any, **params: Any) -> list[jax.Array]:
        return self._results(self.op.forward, leaves, **params)

    def of_shard(self, *leaves: Any, **params: Any) -> list[jax.Array]:
        return self._results(self.op.forward_of_shard or self.op.forward, leaves, **params)

    def _results(
        self, forward: Callable[..., Any], leaves: Any, *, tree: Any, spec: RowSpec, with_stats: bool
    ) -> list[jax.Array]:
        results, stats = forward(spec, self._operands(tree, leaves))
        return [*jax.tree.leaves(_without(spec, results)), *(stats if with_stats else ())]

    def native(
        self, platform: str, ctx: Any, *leaves: Any, tree: Any, spec: RowSpec, with_stats: bool
    ) -> Sequence[Any]:
        native = self.op.native
        assert native is not None
        if (in_parts := self.op.in_parts(spec)) is not None:
            forward = functools.partial(in_parts, with_stats=with_stats)
            results = functools.partial(self._results, tree=tree, spec=spec, with_stats=with_stats)
            parts: Sequence[Any] = mlir.lower_fun(lambda *values: results(forward, values))(ctx, *leaves)
            return parts
        if self.op.factor is not None:
            ctx, leaves = lowering.replaced(functools.partial(self._as_read, spec, tree), ctx, leaves)
        operands = self._operands(tree, ctx.avals_in)
        normalised = RowCall.of(self.op, spec, operands).normalised
        rows, cols = rows_and_cols(spec, normalised)
        target = f"{native.name(spec)}_fwd"
        carrier = self._place_of_carrier(spec, operands)
        written = [aval for place, aval in enumerate(ctx.avals_out) if place != carrier]
        values = ffi.call(
            platform,
            target,
            ctx.replace(avals_out=written),
            leaves,
            workspace=ffi.workspace(
                platform, target, normalised.dtype, rows, cols, **native.forward_workspace(operands)
            ),
            # The sum goes where the addend was, so that a dead or donated one needs no second buffer. XLA copies one
            # that lives on: where a derivative follows it does, as the sum that the backward of the op before this one
            # wants.
            aliases={} if with_stats else self._in_place(spec, operands),
            attributes={
                **native.forward(spec, operands),
                **rules.has("has_", operands, (self.op.factor, *self.op.later)),
            },
        )
        if carrier is None:
            return values
        return [*values[:carrier], lowering.zeros(ctx, ctx.avals_out[carrier]), *values[carrier:]]

    def _as_read(self, spec: RowSpec, tree: Any, *leaves: Any) -> list[Any]:
        """The operands as a kernel reads them: beside a factor all weights are of one type, and so written out here."""
        operands = self._operands(tree, leaves)
        given = {name: array for name, array in rules.leaves_of(operands) if self.is_weight(name)}
        if self.op.factor in given:
            read = weights.of_one_type(jax.typeof(operands[0]), spec.row_ndim, list(given.values()))
            operands = operands._replace(**dict(zip(given, read, strict=True)))
        return jax.tree.leaves(tuple(operands))

    def _place_of_carrier(self, spec: RowSpec, operands: Record) -> int | None:
        """Where among the results the one stands that no kernel writes."""
        convention = self.op.convention
        names = [name for name, _ in rules.leaves_of(self._types(spec, operands))]
        return names.index(convention.carrier) if convention and convention.carrier in names else None

    def call(self, *types: Any, tree: Any, spec: RowSpec, with_stats: bool) -> RowCall:
        call = RowCall.of(self.op, spec, self._operands(tree, types), differentiated=with_stats)
        return dataclasses.replace(call, traced=None)

    def _addend(self, operands: Record) -> Any:
        return getattr(operands, self.op.addend) if self.op.addend else None

    def _in_place(self, spec: RowSpec, operands: Record) -> dict[int, int]:
        given, results = ([name for name, _ in rules.leaves_of(a)] for a in (operands, self._types(spec, operands)))
        pairs = self.op.in_place.items()
        return {given.index(a): results.index(b) for a, b in pairs if a in given and b in results}

    def _without_unread(
        self, is_read: Sequence[bool], types: Any, *, spec: RowSpec, with_stats: bool, **params: Any
    ) -> Any:
        """The parameters of a call that gives no result which nobody reads, and which results it gives."""
        operands = self._operands(params["tree"], types)
        names = [name for name, _ in rules.leaves_of(self._types(spec, operands))]
        may_omit = self.op.may_omit(spec, operands)
        dropped = [name for name, read in zip(names, is_read, strict=False) if not read and name in may_omit]
        of_stats = is_read[len(names) :]
        kept = [name not in dropped for name in names] + [any(of_stats)] * len(of_stats)
        spec = dataclasses.replace(spec, omitted=(*spec.omitted, *dropped))
        return {"spec": spec, "with_stats": with_stats and any(of_stats), **params}, kept

    def dim_maps(self, places: Any, *, spec: RowSpec, with_stats: bool) -> CallMaps:
        operands = self.op.operands(*places)
        ndim = operands[0].ndim
        types = self._types(spec, operands)
        results = self.maps_of(spec, ndim, types)
        # A result that is the same for all rows is a sum over them.
        rows = [axis for axis in range(ndim) if axis - ndim not in spec.axes]
        summed = [
            () if self.is_row(name) else tuple(axis for axis in rows if axis not in dim_map)
            for (name, _), dim_map in zip(rules.leaves_of(types), results, strict=True)
        ]
        stats = self.op.statistics(spec, operands) if with_stats else []
        of_stats = [self.role("stats").dim_map(spec, ndim, array.shape) for array in stats]
        results += of_stats
        summed += [()] * len(of_stats)
        return CallMaps(ndim, self.maps_of(spec, ndim, operands), results, summed, [None] * len(results))

    def batch(self, leaves: Any, axes: Any, *, tree: Any, spec: RowSpec, with_stats: bool) -> Any:
        params: dict[str, Any] = {"spec": spec, "with_stats": with_stats}
        # What calls others' kernels may add up rows, and so do their rules for examples.
        one_call = not self.op.calls_others
        given, batch = self._operands(tree, leaves), self._operands(tree, axes)
        whole = self.batch_in_front(spec, [given], [batch]) if one_call else None
        if whole is None or self.is_scattered(whole[0]):
            return self.batch_formula(leaves, axes, tree=tree, **params)
        return rules.at_front(rules.bind(self.primitive, tuple(whole[0]), **params))

    def jvp(self, primals: Any, dots: Any, *, tree: Any, spec: RowSpec, with_stats: bool) -> tuple[Any, Any]:
        operands = self._operands(tree, primals)
        given, spec = spec, dataclasses.replace(spec, omitted=())
        moving = self._operands(tree, [None if type(dot) is ad.Zero else dot for dot in dots])
        results, stats = self.named(*self.bind(spec, operands, with_stats=True))
        results_dot, stats_dot = self.tangents(spec, operands, results, stats, moving)
        results, results_dot = _without(given, results), _without(given, results_dot)
        if not with_stats:
            return rules.present(results), rules.present(results_dot)
        # Only a second derivative comes here.
        return [*rules.present(results), *stats], [*rules.present(results_dot), *stats_dot()]

    def named(self, results: Record, stats: Statistics) -> tuple[Any, Statistics]:
        fields = {
            name: rules.named("sum" if name == "sum" else "result", [array])[0]
            for name, array in rules.leaves_of(results)
        }
        return results._replace(**fields), tuple(rules.named("statistics", stats))

    def tangents(
        self, spec: RowSpec, operands: Record, results: Record, stats: Statistics, dots: Record
    ) -> tuple[Any, Callable[[], Sequence[Any]]]:
        """The tangents of the results, zeros among them, and as a function those of the statistics.

        dots are the tangents of the operands, of which None is zero and not all are.
        """
        if self.op.convention is None:
            results_dot, of_stats = self._true_tangents(spec, operands, results, stats, dots)
        else:
            results_dot, of_stats = self.op.convention.tangents(spec, operands, results, stats, dots)
        zeros = {
            name: rules.no_tangent(array)
            for name, array in rules.leaves_of(results)
            if getattr(results_dot, name) is None
        }
        return results_dot._replace(**zeros), of_stats

    def _true_tangents(
        self, spec: RowSpec, operands: Record, results: Record, stats: Statistics, dots: Record
    ) -> tuple[Any, Callable[[], Sequence[Any]]]:
        """As `tangents`, with None for zeros."""
        saved = self._saved(spec, operands, results, stats)
        variables = self._linear.with_zeros(spec, self._variables(spec, operands, dots), operands._asdict())
        with_sum = self._addend(operands) is not None and variables[0] is not None
        results_dot = self._linear.bind(spec, saved, variables, with_sum=with_sum)

        def statistics(*values: Any) -> Statistics:
            return self.op.forward(spec, self.op.operands(*values))[1]

        if with_sum:
            operands = self._without_addend(operands, results.sum)
            dots = self._without_addend(dots, variables[0])
        return results_dot, lambda: rules.tangents_jnp(statistics, operands, dots)

    @staticmethod
    def _add(spec: RowSpec, x: jax.Array, addend: jax.Array, factor: jax.Array | None = None) -> jax.Array:
        """The sum, for its derivative, which takes no note of how it is rounded."""
        if factor is None:
            return add(x, addend)
        wide = dims.wide_dtype((x.dtype, addend.dtype, factor.dtype))
        factor = weights.of_rank(x.ndim, spec.axes, factor)
        return (factor.astype(wide) * x.astype(wide) + addend.astype(wide)).astype(addend.dtype)

    def _without_addend(self, operands: Record, total: Any) -> Any:
        """The operands, or their tangents, of a forward that has nothing to add."""
        absent = dict.fromkeys(name for name in (self.op.addend, self.op.factor) if name is not None)
        return operands._replace(**{operands._fields[0]: total} | absent)

    def _saved(self, spec: RowSpec, operands: Record, results: Record, stats: Statistics) -> Any:
        """What a derivative reads. With an addend the sum is in x's place."""
        x, *_ = operands._fields
        arrays = {**operands._asdict(), **results._asdict(), "stats": stats}
        if self._addend(operands) is not None:
            arrays[x] = results.sum
        derivative = self._linear.derivative
        arrays |= dict.fromkeys(derivative.unsaved(spec))
        return derivative.saved(**{name: arrays[name] for name in derivative.saved._fields})

    def _variables(self, spec: RowSpec, operands: Record, dots: Record) -> Any:
        """The tangents of what a derivative is taken by. With an addend that of the sum is in x's place."""
        x, *_ = operands._fields
        moving, addend = dots._asdict(), self._addend(operands)
        if addend is not None:
            names = [name for name in (x, self.op.addend, self.op.factor) if name is not None]
            given = {name: getattr(operands, name) for name in names if getattr(operands, name) is not None}
            of_given = [moving[name] for name in given]
            add_up: Callable[..., Any] = functools.partial(self._add, spec)
            if self.op.factor in given:  # or the product would keep x in float32
                add_up = jax.checkpoint(add_up, prevent_cse=False)
            moving[x] = None if rules.all_none(of_given) else rules.tangents_jnp(add_up, list(given.values()), of_given)
        variables = self._linear.derivative.variables
        return variables(**{name: moving[name] for name in variables._fields})

    def transpose(self, cotangents: Any, *leaves: Any, tree: Any, spec: RowSpec, with_stats: bool) -> list[Any]:
        """The results are linear in weights, each alone; all else is known."""
        op, derivative, given = self.op, self._linear.derivative, self._operands(tree, leaves)._asdict()
        wanted = {name: value.aval for name, value in given.items() if ad.is_undefined_primal(value)}
        linear_in = [name for name in given if self.is_weight(name)] if op.linear_in is None else op.linear_in(spec)
        if with_stats or not {*wanted} <= {*linear_in}:
            what = f"its {', '.join(linear_in)} alone" if linear_in else "none of its operands"
            raise NotImplementedError(f"{op.name} is linear in {what}")
        # The gradient of what broadcasts, or has rows, is shaped as that; what it is changes nothing.
        like = {name: jnp.zeros_like(aval) if self.is_row(name) else None for name, aval in wanted.items()}
        operands = op.operands(**given | like)
        tree = self._results_tree(spec, jax.tree.map(jax.typeof, operands))
        of_results = jax.tree.unflatten(tree, map(ad.instantiate_zeros, cotangents))
        spec = dataclasses.replace(spec, omitted=())
        if self._addend(operands) is not None:
            of_results = of_results._replace(sum=None)
        gradients = derivative.backward(
            spec,
            of_results,
            self._saved(spec, operands, *op.forward(spec, operands)),
            derivative.variables(**{name: aval.dtype for name, aval in wanted.items()}),
            weights.batch_dims_of(spec.row_ndim, [aval for name, aval in wanted.items() if self.is_weight(name)]),
        )
        there = (name for name, value in given.items() if value is not None)
        return [getattr(gradients, name) if name in wanted else None for name in there]
