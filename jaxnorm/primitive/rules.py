"""What the primitives of all ops have in common."""

from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir, partial_eval
from jax.tree_util import PyTreeDef

from jaxnorm.native import compat, private
from jaxnorm.primitive import lowering, registry, weights
from jaxnorm.primitive.decide import Call
from jaxnorm.primitive.op import STATISTIC, AnyOp, Record, Role, RowSpec, Spec, public_name
from jaxnorm.primitive.reasons import RowCall
from jaxnorm.primitive.registry import Described
from jaxnorm.sharding import partition
from jaxnorm.sharding.dims import CallMaps, DimMap
from jaxnorm.sharding.partition import Partitionable

# What rules get and give: the operands of a primitive, absent ones left out, their types, the axes of their examples,
# and their tangents; the results with theirs, or of examples with the axes of these.
Leaves = Sequence[jax.Array]
Types = Sequence[ShapedArray]
Axes = Sequence[int | None]
Dots = Sequence[jax.Array | ad.Zero]
Derived = tuple[Leaves, Dots]
Batched = tuple[Leaves, Sequence[int]]

# What a derivative may want again: the results, the sum with an addend, the row statistics.
NAMES = ("jaxnorm_result", "jaxnorm_sum", "jaxnorm_statistics")
SPELLING = {"forward": "fwd", "backward": "bwd"}


def primitive_name(op: str, direction: str) -> str:
    """The name of a primitive, with its direction as the targets of calls have it."""
    return f"jaxnorm_{op}_{SPELLING.get(direction, direction)}"


def named(kind: str, values: Sequence[jax.Array]) -> list[jax.Array]:
    """The values, known to `jax.checkpoint`'s policies by one of NAMES: a "result", a "sum" or "statistics"."""
    return [_named(value, f"jaxnorm_{kind}") for value in values]


def _named(value: jax.Array, name: str) -> jax.Array:
    if value.dtype.itemsize == 1:
        # As integers: `jax.checkpoint` rounds what it keeps to its dtype, and takes a float8 to have infinities.
        integers = checkpoint_name(lax.bitcast_convert_type(value, jnp.int8), name)
        return lax.bitcast_convert_type(integers, value.dtype)
    whole: jax.Array = checkpoint_name(value, name)
    return whole


def is_named(primitive: Primitive, params: dict[str, Hashable]) -> bool:
    """Whether an equation gives one of NAMES to a value."""
    return primitive.name == "name" and params["name"] in NAMES


def bind(primitive: Primitive, operands: Record, **params: Hashable) -> list[jax.Array]:
    """The results of a primitive whose operands are the leaves of a tuple, in which an absent one is None."""
    leaves, tree = jax.tree.flatten(operands)
    values: list[jax.Array] = primitive.bind(*compat.match_varying_axes(*leaves), tree=tree, **params)
    return values


def all_none(values: Iterable[object]) -> bool:
    return all(value is None for value in values)


def fold(operands: Record, dims: Record) -> Record:
    """The operands with the batch as their leading axis, repeated over it where an operand has none."""
    return jax.vmap(lambda *values: values, in_axes=dims)(*operands)


def at_front(results: Record) -> Batched:
    leaves = jax.tree.leaves(results)
    return leaves, [0] * len(leaves)


def examples_first(leaves: Leaves, axes: Axes) -> list[jax.Array]:
    """The operands of a batching rule with their examples' axis in front, 1 long where they have none."""
    return [
        jnp.expand_dims(leaf, 0) if axis is None else jnp.moveaxis(leaf, axis, 0)
        for leaf, axis in zip(leaves, axes, strict=True)
    ]


def batch_size(leaves: Leaves, axes: Axes) -> int:
    """How many examples the operands of a batching rule have."""
    return next(leaf.shape[axis] for leaf, axis in zip(leaves, axes, strict=True) if axis is not None)


def no_tangent(result: jax.Array) -> ad.Zero:
    """The tangent of what does not move."""
    return ad.Zero(jax.typeof(result).to_tangent_aval())


def tangents_jnp(
    formula: Callable[..., Leaves], primals: Leaves, tangents: Sequence[jax.Array | ad.Zero | None]
) -> Leaves:
    """The tangents of formula's results; zero tangents stay symbolic, as None or a Zero."""
    moving = [i for i, tangent in enumerate(tangents) if tangent is not None and type(tangent) is not ad.Zero]

    def of_moving(*values: jax.Array) -> Leaves:
        operands = dict(enumerate(primals)) | dict(zip(moving, values, strict=True))
        return formula(*operands.values())

    dots: Leaves
    _, dots = jax.jvp(of_moving, [primals[i] for i in moving], [tangents[i] for i in moving])
    return dots


def leaves_of(arrays: Record) -> Iterator[tuple[str, Any]]:
    """The arrays of a NamedTuple in their order, each with the name of its field."""
    for name, value in zip(arrays._fields, arrays, strict=True):
        yield from ((name, array) for array in jax.tree.leaves(value))


def present(arrays: Record) -> list[Any]:
    """The fields of a NamedTuple that are there; a symbolic zero is one."""
    return [array for array in arrays if array is not None]


def has(prefix: str, arrays: Record, later: Sequence[str | None] = ()) -> dict[str, bool]:
    """For each field of a NamedTuple that may be absent whether it is there, as attributes of a native call.

    Statistics need no attribute: an op has them or not by what its own attributes say. Those in `later`, which programs
    of before do not know, have an attribute where they are there.
    """
    is_there = {name: getattr(arrays, name) is not None for name in arrays._field_defaults if name != "stats"}
    return {f"{prefix}{name}": there for name, there in is_there.items() if there or name not in later}


class Rules:
    """One primitive. The methods of a subclass are its rules; what it does not have, JAX is not told.

    Without `call` it is lowered to its formula everywhere; else as `jaxnorm.primitive.lowering.register` says, with
    `native` and `of_shard`, and where it has `dim_maps` split over devices by them. The operands of one with a
    parameter `tree` are the leaves of a tuple, in which an absent one is None.
    """

    is_checked = True  # by `jax.experimental.checkify`, for NaN in its results
    formula: lowering.Formula  # the results in jax.numpy
    jvp: Callable[..., Derived] | None = None
    transpose: Callable[..., Sequence[jax.Array | None]] | None = None
    jet: Callable[..., object] | None = None
    call: Callable[..., Call] | None = None
    native: lowering.NativeRule | None = None
    of_shard: lowering.Formula | None = None
    dim_maps: Callable[..., CallMaps] | None = None
    is_product = False  # whether none of its arrays has all axes
    on_device: Callable[..., Spec] = staticmethod(lambda spec, _: spec)
    described: Callable[..., Described] | None = None

    def __init__(self, name: str) -> None:
        self.primitive = Primitive(name)
        self.primitive.multiple_results = True
        self.traced = jax.jit(lambda params, *leaves: self.formula(*leaves, **dict(params)), static_argnums=0)
        self.primitive.def_abstract_eval(self.abstract)
        compat.run_eagerly(self.primitive)
        batching.primitive_batchers[self.primitive] = self.batch
        if self.is_checked:
            compat.check_nans(self.primitive)
        if self.jet is not None:
            private.register_jet(self.primitive, self.jet)
        if self.described is not None:
            registry.entry(self.primitive).describe = self.described
        self.differentiate()
        self.lower()

    def differentiate(self) -> None:
        if self.jvp is not None:
            ad.primitive_jvps[self.primitive] = self.jvp
        if self.transpose is not None:
            ad.primitive_transposes[self.primitive] = self.transpose

    def lower(self) -> None:
        if self.dim_maps is not None:
            how = Partitionable(self.primitive, self.dim_maps, is_product=self.is_product, on_device=self.on_device)
            partition.register(how)
        if self.call is None:
            lowering.register_formula(self.primitive, self.formula)
        else:
            lowering.register(self.primitive, self.formula, self.native, self.call, self.of_shard)

    def abstract(self, *leaves: Any, **params: Any) -> list[ShapedArray]:
        """The types of the results, by default the formula's: jit keeps them, where JAX asks again for each tangent."""
        return list(self.traced.trace(tuple(params.items()), *leaves).jaxpr.out_avals)

    def batch(self, *leaves_and_axes: Any, **params: Any) -> Batched:
        """By default the formula of each example."""
        leaves, axes = leaves_and_axes
        return at_front(jax.vmap(lambda *values: self.formula(*values, **params), in_axes=tuple(axes))(*leaves))


class Inner(Rules):
    """A primitive that is only bound while another is lowered, about which is decided before: its kernel wherever
    there is one."""

    platforms: tuple[str, ...] = ("cuda",)

    def call(self, *_: ShapedArray, **params: Hashable) -> Call:
        call = Call()
        call.platforms, call.is_partitionable = self.platforms, self.dim_maps is not None
        return call


class RowRules(Rules):
    """One primitive of an op of rows.

    Its operands are the leaves of a tuple of tuples, in which an absent one is None; the structure of it is the
    parameter `tree`. Operands keep x's rank, so that a result's sharding and varying mesh axes follow from x's type.
    All weights of one primitive, tangents included, have the same batch dims, see `jaxnorm.primitive.weights`.
    """

    transpose: Callable[..., Sequence[jax.Array | None]]
    dim_maps: Callable[..., CallMaps]

    def __init__(self, op: AnyOp, direction: str) -> None:
        self.op = op
        self.direction = direction
        super().__init__(primitive_name(op.name, direction))

    def differentiate(self) -> None:
        op = self.op
        if op.derivative is not None or op.convention is not None:
            ad.primitive_jvps[self.primitive] = self.jvp
        elif op.calls_others:
            ad.primitive_jvps[self.primitive] = self.jvp_of_formula
        if op.derivative is not None:
            ad.primitive_transposes[self.primitive] = self.transpose

    @property
    def in_place(self) -> Callable[..., list[ShapedArray]] | None:
        """The abstract evaluation, where the native rule asks where an operand comes from."""
        return None

    def lower(self) -> None:
        op = self.op
        partition.register(Partitionable(self.primitive, self.dim_maps, op.can_shard))
        native = self.native if op.native is not None else self.by_formula if op.calls_others else None
        lowering.register(self.primitive, self.formula, native, self.call, self.of_shard, in_place=self.in_place)

    @abstractmethod
    def call(self, *types: Any, **params: Any) -> RowCall:
        """The call, by the types of its operands."""

    def described(self, *types: Any, **params: Any) -> Described:
        """The call as `jaxnorm.explain` tells of it."""
        tree, spec = params["tree"], params["spec"]
        operands, cotangents = self.named_operands(tree, types), self._operands(tree, types)[0]
        name = public_name(self.op, spec, cotangents if self.direction == "backward" else operands)
        note = self.op.note(spec, operands) if self.direction == "forward" else ()
        return Described(name, operands, self.direction, self.call(*types, **params), note)

    def by_formula(self, platform: str, ctx: lowering.Context, *leaves: lowering.Value, **params: Hashable) -> Any:
        """The native rule of an op whose formula calls other ops' kernels."""
        return mlir.lower_fun(self.formula)(ctx, *leaves, **params)

    def jvp_of_formula(self, primals: Leaves, dots: Dots, **params: Hashable) -> tuple[Leaves, Leaves]:
        def formula(*leaves: jax.Array) -> list[jax.Array]:
            return self.formula(*leaves, **params)

        return self.primitive.bind(*primals, **params), tangents_jnp(formula, primals, dots)

    jvp: Callable[..., Derived] = jvp_of_formula

    def jet(self, primals: Leaves, series: Sequence[Leaves], **params: Hashable) -> Any:
        """The rule of `jax.experimental.jet`: higher derivatives are the formula's."""
        return private.jet_of_formula(lambda *leaves: self.formula(*leaves, **params), primals, series)

    def named_operands(self, tree: PyTreeDef, leaves: Types | Leaves) -> Record:
        """The operands among these values, or what a derivative reads in their place."""
        records = self._operands(tree, leaves)
        return records if self.direction == "forward" else records[self.direction == "backward"]

    @abstractmethod
    def _operands(self, tree: PyTreeDef, values: Types | Leaves) -> Record:
        """What the leaves of the operands are."""

    def role(self, name: str) -> Role:
        return self.op.roles.get(name, STATISTIC) if name == "stats" else self.op.roles[name]

    def maps_of(self, spec: RowSpec, ndim: int, arrays: Record) -> list[DimMap]:
        """Those of all arrays of a NamedTuple of types, for an x of this rank."""
        return [self.role(name).dim_map(spec, ndim, array.shape) for name, array in leaves_of(arrays)]

    def aligned(self, spec: RowSpec, names: Sequence[str], x: ShapedArray, given: Sequence[Any]) -> list[Any]:
        """Weights, for an x of this type, as primitives have them: of the same batch dims, a factor with its own."""
        whole = list(given)
        for of_factor in (False, True):
            places = [place for place, name in enumerate(names) if (name == self.op.factor) is of_factor]
            together = weights.aligned(x, spec.row_ndim, [given[place] for place in places])
            for place, weight in zip(places, together, strict=True):
                whole[place] = weight
        return whole

    def is_row(self, name: str) -> bool:
        return self.role(name).batch == "fold"

    def is_weight(self, name: str) -> bool:
        return self.role(name).batch == "weight"

    def weights_of(self, arrays: Record) -> list[Any]:
        return [array for name, array in leaves_of(arrays) if self.is_weight(name)]


def drop_unread(primitive: Primitive, without_unread: Callable[..., tuple[dict[str, Any], Sequence[bool]]]) -> None:
    """Let calls of primitive leave out results: jit asks before it lowers a program.

    Of which results are read, the types of the operands and the parameters, without_unread gives the parameters of the
    call that takes its place, and which of the results that gives. The rule has one argument more since JAX 0.12.
    """

    def rule(is_read: list[bool], *more: Any) -> tuple[list[bool], JaxprEqn | None]:
        *_, equation = more
        if not any(is_read):
            return [False] * len(equation.invars), None
        if not all(is_read):
            types = [operand.aval for operand in equation.invars]
            params, is_given = without_unread(is_read, types, **equation.params)
            results = [result for result, given in zip(equation.outvars, is_given, strict=True) if given]
            equation = equation.replace(params=params, outvars=results)
        return [True] * len(equation.invars), equation

    partial_eval.dce_rules[primitive] = rule
