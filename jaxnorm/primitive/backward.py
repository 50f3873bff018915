"""The backward primitive of an op: (cotangents of the results, saved) -> the wanted gradients, in one call.

A gradient is wanted where its dtype is given; those of weights have the batch dims that are a parameter. The first
result's cotangent comes before what is saved, and those of other results after it.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
from jax.interpreters import ad, mlir

from jaxnorm.native import compat, ffi
from jaxnorm.primitive import fallback, weights
from jaxnorm.primitive.batching import CASES, Batched, Case
from jaxnorm.primitive.op import AnyOp, BatchDims, Derivative, Record, RowSpec, rows_and_cols
from jaxnorm.primitive.reasons import RowCall
from jaxnorm.primitive.rules import all_none, at_front, bind, has, leaves_of, present
from jaxnorm.sharding import dims
from jaxnorm.sharding.dims import CallMaps, DimMap


class Transposed(Protocol):
    """The linear primitive, which the transpose of this one binds: see `jaxnorm.primitive.linear`."""

    def with_zeros(self, spec: RowSpec, dots: Record, like: Mapping[str, Any]) -> Any: ...

    def bind(self, spec: RowSpec, saved: Record, dots: Record, *, with_sum: bool) -> Any: ...


class Backward(Batched):
    def __init__(self, op: AnyOp, derivative: Derivative[Any, Any, Any], linear: Transposed) -> None:
        self.derivative = derivative
        self.linear = linear
        super().__init__(op, "backward")

    @property
    def in_place(self) -> Any:
        return self.abstract if self.derivative.in_place else None

    def bind(self, spec: RowSpec, cotangents: Any, saved: Record, *, wanted: Any, batch_dims: BatchDims) -> Any:
        first, *others = cotangents
        operands = first, tuple(saved), tuple(others)
        # Of a plain tuple a parameter's text can be made, see `jaxnorm.sharding.partition`.
        values = bind(self.primitive, operands, spec=spec, wanted=tuple(wanted), batch_dims=batch_dims)
        return self._by_name(wanted, values)

    def _operands(self, tree: Any, values: Any) -> tuple[Record, Record]:
        first, saved, others = jax.tree.unflatten(tree, values)
        return self.op.results(first, *others), self.derivative.saved(*saved)

    def _by_name(self, wanted: Any, values: Sequence[Any]) -> Any:
        given = iter(values)
        return self.derivative.variables(*(None if dtype is None else next(given) for dtype in wanted))

    def _x(self, cotangents: Record, saved: Record) -> Any:
        """x, or what is like it where x is not saved."""
        return cotangents[0] if saved[0] is None else saved[0]

    def _types(self, spec: RowSpec, cotangents: Record, saved: Record, wanted: Any, batch_dims: BatchDims) -> Any:
        x = self._x(cotangents, saved)
        like = {name: getattr(cotangents, result) for name, result in self.derivative.unsaved(spec).items()}
        variables = self.derivative.variables(*wanted)
        gradients = {}
        for name, dtype in leaves_of(variables):
            role = self.role(name)
            array = like.get(name, getattr(saved, name, x))
            shape = role.shape(spec, x.shape, batch_dims) if role.shape else array.shape
            gradients[name] = dims.result_like(x, role.dim_map(spec, x.ndim, shape), shape, dtype)
        return variables._replace(**gradients)

    def abstract(self, *leaves: Any, tree: Any, spec: RowSpec, wanted: Any, batch_dims: BatchDims) -> list[Any]:
        return jax.tree.leaves(self._types(spec, *self._operands(tree, leaves), wanted, batch_dims))

    def formula(self, *leaves: Any, **params: Any) -> list[jax.Array]:
        return self._gradients(self.derivative.backward, leaves, **params)

    def of_shard(self, *leaves: Any, **params: Any) -> list[jax.Array]:
        return self._gradients(self.derivative.backward_of_shard or self.derivative.backward, leaves, **params)

    def _gradients(
        self, backward: Callable[..., Any], leaves: Any, *, tree: Any, spec: RowSpec, wanted: Any, batch_dims: BatchDims
    ) -> list[jax.Array]:
        cotangents, saved = self._operands(tree, leaves)
        return jax.tree.leaves(backward(spec, cotangents, saved, self.derivative.variables(*wanted), batch_dims))

    def native(
        self, platform: str, ctx: Any, *leaves: Any, tree: Any, spec: RowSpec, wanted: Any, batch_dims: BatchDims
    ) -> Sequence[Any]:
        native = self.op.native
        assert native is not None
        assert native.backward is not None
        if (in_parts := self.derivative.in_parts(spec)) is not None:
            gradients = functools.partial(self._gradients, tree=tree, spec=spec, wanted=wanted, batch_dims=batch_dims)
            parts: Sequence[Any] = mlir.lower_fun(lambda *values: gradients(in_parts, values))(ctx, *leaves)
            return parts
        cotangents, saved = self._operands(tree, ctx.avals_in)
        variables = self.derivative.variables(*wanted)
        x = self._x(cotangents, saved)
        rows, cols = rows_and_cols(spec, x)
        count, inner = weights.heads_of(x.shape, spec.row_ndim, batch_dims)
        target = f"{native.name(spec)}_bwd"
        needs = {
            "weights": len(self.weights_of(variables)),
            "count": count,
            "inner": inner,
            "with_dx": variables[0] is not None,
            **native.workspace(saved, variables),
        }
        workspace = ffi.workspace(platform, target, x.dtype, rows, cols, **needs)
        attributes = {**native.backward(spec, saved), **has("has_", saved, self.op.later), **has("has_d", cotangents)}
        return ffi.call(
            platform,
            target,
            ctx,
            leaves,
            workspace=workspace,
            aliases=self._in_place(tree, leaves, variables),
            attributes=attributes | has("with_d", variables),
        )

    def _in_place(self, tree: Any, values: Sequence[Any], variables: Record) -> dict[int, int]:
        """Which operands give their buffers to which results.

        XLA copies one that lives on, as what a program is given does: so only what the program has computed does.
        """
        _, places = self._operands(tree, range(len(values)))
        wanted = [name for name, _ in leaves_of(variables)]
        pairs = [(getattr(places, a), b) for a, b in self.derivative.in_place.items() if b in wanted]
        return {place: wanted.index(name) for place, name in pairs if compat.is_computed(values[place])}

    def call(self, *types: Any, tree: Any, spec: RowSpec, wanted: Any, batch_dims: BatchDims) -> RowCall:
        cotangents, saved = self._operands(tree, types)
        adds = self.op.addend is not None and not all_none(cotangents[1:])
        return RowCall(self.op, spec, "backward", self._x(cotangents, saved), adds)

    def dim_maps(self, places: Any, *, spec: RowSpec, wanted: Any, batch_dims: BatchDims) -> CallMaps:
        first, saved, others = places
        cotangents, saved = self.op.results(first, *others), self.derivative.saved(*saved)
        ndim = self._x(cotangents, saved).ndim
        of_first, *of_others = self.maps_of(spec, ndim, cotangents)
        types = self._types(spec, cotangents, saved, wanted, batch_dims)
        gradients = self.maps_of(spec, ndim, types)
        names = [name for name, _ in leaves_of(types)]
        summed = [self._summed(spec, ndim, saved, *of_gradient) for of_gradient in zip(names, gradients, strict=True)]
        place_of = {name: place for place, (name, _) in enumerate(leaves_of(saved), start=1)}
        operands = [of_first, *self.maps_of(spec, ndim, saved), *of_others]
        return CallMaps(ndim, operands, gradients, summed, [place_of.get(name) for name in names])

    def _summed(self, spec: RowSpec, ndim: int, saved: Record, name: str, dim_map: DimMap) -> tuple[int, ...]:
        """The axes of x along which the gradient with this dim map is a sum, of a row's those of what broadcasts."""
        if self.role(name).broadcasts:
            return tuple(axis for axis in range(ndim) if axis not in dim_map)
        if self.is_row(name):
            return ()
        rows_of = self.role(name).rows_of
        axes: DimMap = dims.like_x(ndim)
        if rows_of is not None:
            axes = self.role(rows_of).dim_map(spec, ndim, getattr(saved, rows_of).shape)
        return tuple(a for a in axes if a is not None and a - ndim not in spec.axes and a not in dim_map)

    def batch(self, leaves: Any, axes: Any, *, tree: Any, spec: RowSpec, wanted: Any, batch_dims: BatchDims) -> Any:
        params: dict[str, Any] = {"tree": tree, "spec": spec, "wanted": wanted, "batch_dims": batch_dims}
        by_formula = functools.partial(self.batch_formula, leaves, axes, **params)
        (cotangents, saved), (of_cotangents, of_saved) = self._operands(tree, leaves), self._operands(tree, axes)
        if saved[0] is not None and not self.rows_of(of_saved):
            return by_formula()
        rows = list(filter(self.is_row, saved._fields))
        pairs = ((cotangents, of_cotangents, cotangents._fields), (saved, of_saved, rows))
        given = [(name, getattr(of, name), getattr(axes, name)) for of, axes, names in pairs for name in names]
        variables = self.derivative.variables(*wanted)
        folded = self.fold(given, len(cotangents), {name for name, _ in leaves_of(variables)})
        cotangents = self.op.results(*folded[: len(cotangents)])
        saved = saved._replace(**dict(zip(rows, folded[len(cotangents) :], strict=True)))
        x = self._x(cotangents, saved)
        # The batch dims of weights that each example has for itself, if kernels take them.
        own = weights.batch_dims_in_front(x, 0, spec.row_ndim, batch_dims) if self.op.weights_batch else None
        others = [name for name, _ in leaves_of(of_saved) if not self.is_row(name)]
        if self.is_scattered(saved) or (others and (own is None or not all(map(self.is_weight, others)))):
            return by_formula()
        of_rows, of_sums = (self._only(variables, rows=rows) for rows in (True, False))
        case = self._case(of_sums, own, math.prod(x.shape[: -spec.row_ndim]), has_weights=bool(others))
        native = variables if case.sums == "native" else of_rows
        gradients = self.derivative.variables()
        if not all_none(native):
            dims_of_call = own if case.has_weights and own is not None else batch_dims
            whole = self._with_batch_dims(spec, x, saved, of_saved, dims_of_call)
            gradients = self.bind(spec, cotangents, whole, wanted=native, batch_dims=dims_of_call)
        if case.sums == "native":
            shape = (-1, *batch_dims, *x.shape[-spec.row_ndim :])
            sums = {name: array.reshape(shape) for name, array in leaves_of(gradients) if self.is_weight(name)}
            gradients = gradients._replace(**sums)
        elif case.sums == "formula":
            of_examples = self._sums_of_examples(spec, cotangents, saved, of_saved, of_sums, batch_dims)
            gradients = gradients._replace(**dict(leaves_of(of_examples)))
        return at_front(present(gradients))

    def _only(self, variables: Record, *, rows: bool) -> Any:
        """The gradients that have rows, or those that are sums over them."""
        return variables._replace(**{name: None for name in variables._fields if self.is_row(name) is not rows})

    def _case(self, sums: Record, own: BatchDims | None, rows: int, *, has_weights: bool) -> Case:
        """Of these sums, and so many rows of all examples; has_weights: an example has weights for itself."""
        how = None if all_none(sums) else "formula"
        if how and own is not None and rows != math.prod(own) and all(self.is_weight(n) for n, _ in leaves_of(sums)):
            how = "native"
        facts = has_weights or how == "native", how
        return next(case for case in CASES if (case.has_weights, case.sums) == facts)

    def _with_batch_dims(self, spec: RowSpec, x: Any, saved: Record, axes: Record, batch_dims: BatchDims) -> Any:
        """What is saved, with weights of these batch dims, whose batch goes along these axes."""
        whole = {}
        for name in filter(self.is_weight, saved._fields):
            weight = weights.in_front(getattr(saved, name), getattr(axes, name), x.ndim)
            whole[name] = weights.with_batch_dims(jax.typeof(x), batch_dims, spec.row_ndim, weight)
        return saved._replace(**whole)

    def _sums_of_examples(
        self, spec: RowSpec, cotangents: Record, saved: Record, axes: Record, wanted: Any, batch_dims: BatchDims
    ) -> Any:
        why = "a sum over the rows of each example of jax.vmap has no kernel"
        fallback.traced(self.op, spec, saved, "backward", lambda: why)
        kept = {name: getattr(axes, name) for name in saved._fields if not self.is_row(name)}
        in_axes = jax.tree.map(lambda _: 0, cotangents), jax.tree.map(lambda _: 0, saved)._replace(**kept)

        def formula(cotangents: Any, saved: Record) -> Any:
            return self.derivative.backward(spec, cotangents, saved, wanted, batch_dims)

        return jax.vmap(formula, in_axes=in_axes)(cotangents, saved)

    def transpose(
        self, cotangents: Any, *leaves: Any, tree: Any, spec: RowSpec, wanted: Any, batch_dims: BatchDims
    ) -> list[Any]:
        """The gradients are linear in the cotangents; `linear` is the transpose of that in these of the results."""
        of_results, saved = self._operands(tree, leaves)
        dots = self._by_name(wanted, [None if type(dot) is ad.Zero else dot for dot in cotangents])
        like = {name: getattr(of_results, result) for name, result in self.derivative.unsaved(spec).items()}
        dots = self.linear.with_zeros(spec, dots, {name: dot.aval for name, dot in like.items()})
        with_sum = getattr(of_results, "sum", None) is not None and dots[0] is not None
        bars = self.linear.bind(spec, saved, dots, with_sum=with_sum)
        first, *others = (bar for bar, given in zip(bars, of_results, strict=True) if given is not None)
        return [first, *(None for _ in jax.tree.leaves(saved)), *others]
