"""How primitives become code: native calls where there are kernels, the formula in jax.numpy elsewhere."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jaxnorm.native import ffi
from jaxnorm.primitive import fallback
from jaxnorm.primitive.decide import Call, Platform, Program, decide, not_native
from jaxnorm.primitive.op import Spec
from jaxnorm.sharding import partition

Formula = Callable[..., list[Any]]
Value = Any  # in the program that is lowered: an `ir.Value`, which takes a parameter for type checkers alone
Values = Sequence[Value]


class Context(Protocol):
    """What JAX tells a lowering rule of a call, whose operands and results are arrays."""

    avals_in: Sequence[ShapedArray]
    avals_out: Sequence[ShapedArray]

    def replace(self, **avals: Sequence[ShapedArray]) -> "Context": ...


class NativeRule(Protocol):
    def __call__(self, platform: str, ctx: Any, *operands: Any, **params: Any) -> Sequence[Any]: ...


def register(
    primitive: Primitive,
    formula: Formula,
    native: NativeRule | None,
    call: Callable[..., Call],
    of_shard: Formula | None = None,
    *,
    in_place: Callable[..., Any] | None = None,
) -> None:
    """Lowers a primitive as is decided of its call on each platform. One of its parameters may be a `Spec`.

    `call` tells of the call by the types of its operands and its parameters. `native` is the rule for one device, None
    for a primitive without kernels; in a program for several devices XLA splits the call as
    `jaxnorm.sharding.partition.register` was told. Where rows have sharded axes, of_shard computes a device's shard;
    None is the formula. in_place, the abstract evaluation, is for a native rule that asks where an operand comes from.
    """
    lower_formula = mlir.lower_fun(formula)
    lower_shard = mlir.lower_fun(of_shard or formula)

    def rule(name: str) -> Callable[..., Any]:
        def lower(ctx: Any, *operands: Any, **params: Any) -> Any:
            spec: Spec | None = params.get("spec")
            if spec is not None and spec.shards is not None:
                return lower_shard(ctx, *operands, **params)
            platform, asked = Platform.here(name), call(*ctx.avals_in, **params)
            how, why, stage = decide(platform, asked, Program.of(ctx))
            if how == "error":
                raise not_native(str(asked.native_for), f"cannot be compiled for {name}", str(why))
            if how == "split":
                return partition.lower(name, primitive, ctx, *operands, in_place=bool(in_place), **params)
            if how == "native" and native is not None:
                return native(name, ctx, *operands, **params)
            if why is not None and (stage == "program" or why == platform.lacks):
                fallback.lowered(primitive.name, name, why, getattr(ctx, "traceback", None))
            return lower_formula(ctx, *operands, **params)

        return lower

    lowered = _in_place_on_one_platform(primitive, rule, in_place) if in_place else primitive
    mlir.register_lowering(lowered, rule("this platform"))
    for platform in ffi.PLATFORMS:
        mlir.register_lowering(lowered, rule(platform), platform=platform)


def _in_place_on_one_platform(
    primitive: Primitive, rule: Callable[[str], Callable[..., Any]], abstract: Callable[..., Any]
) -> Primitive:
    """Lets the primitive's rule see where operands come from, in a program for one platform.

    JAX lowers equations that are alike once, in a function, and a rule does not see beyond its arguments; only that of
    a primitive that is not cached does. JAX 0.10 cannot lower such a one for several platforms by a rule for each, so
    there the primitive that is returned takes its place.
    """
    on_several = Primitive(f"{primitive.name}_on_several_platforms")
    on_several.multiple_results = True
    on_several.def_abstract_eval(abstract)

    def lower(ctx: Any, *operands: Any, **params: Any) -> Any:
        platforms = ctx.module_context.platforms
        if len(platforms) == 1:
            return rule(platforms[0])(ctx, *operands, **params)
        return mlir.lower_fun(lambda *values: on_several.bind(*values, **params))(ctx, *operands)

    mlir.register_lowering(primitive, lower, cacheable=False)
    return on_several


def register_formula(primitive: Primitive, formula: Formula) -> None:
    mlir.register_lowering(primitive, mlir.lower_fun(formula))


def zeros(ctx: Any, aval: Any) -> Any:
    """An array of this type in the program that is lowered."""
    fill = mlir.lower_fun(lambda: jnp.zeros(aval.shape, aval.dtype), multiple_results=False)
    (value,) = fill(ctx.replace(avals_in=[], avals_out=[aval]))
    return value


def replaced(function: Formula, ctx: Context, values: Values) -> tuple[Context, tuple[Value, ...]]:
    """What jax.numpy makes of a call's operands, in their place in the program that is lowered."""
    avals = jax.make_jaxpr(function)(*ctx.avals_in).out_avals
    return ctx.replace(avals_in=avals), tuple(mlir.lower_fun(function)(ctx.replace(avals_out=avals), *values))
