"""How primitives become code: native calls where there are kernels, the formula in jax.numpy elsewhere."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jaxnorm.native import compat, ffi
from jaxnorm.primitive import fallback, reasons
from jaxnorm.primitive.spec import Spec
from jaxnorm.sharding import partition

Formula = Callable[..., list[Any]]


class NativeRule(Protocol):
    def __call__(self, platform: str, ctx: Any, *operands: Any, **params: Any) -> Sequence[Any]: ...


class SlowerRule(Protocol):
    def __call__(self, platform: str, *types: Any, **params: Any) -> str | None: ...


def register(
    primitive: Primitive,
    formula: Formula,
    native: NativeRule | None,
    of_shard: Formula | None = None,
    slower: SlowerRule | None = None,
    *,
    direction: str = "forward",
    in_place: Callable[..., Any] | None = None,
    splits: bool = False,
) -> None:
    """Lowers a primitive, one of whose parameters is a `Spec`, to its native call on the platforms that have one.

    None is for a primitive without kernels. Where rows have sharded axes, of_shard computes a device's shard; None is
    the formula. In a program for several devices the call is one that XLA partitions, if
    `jaxnorm.sharding.partition.register` was told how, and else the formula. slower says why XLA's code runs all the
    same, by the lengths of the operands or as it is asked for; of a call that must be native in this direction it says
    why it cannot be. in_place, the abstract evaluation, is for a native rule that asks where an operand comes from.
    splits: the native rule is for a program for several devices, too.
    """
    lower_formula = mlir.lower_fun(formula)
    lower_shard = mlir.lower_fun(of_shard or formula)

    def rule(platform: str) -> Callable[..., Any]:
        def lower(ctx: Any, *operands: Any, spec: Spec, **params: Any) -> Any:
            if spec.shards is not None:
                return lower_shard(ctx, *operands, spec=spec, **params)
            program = reasons.Program(ctx, splits or partition.is_registered(primitive))
            reason = reasons.why_not(place=reasons.Place(platform, native is not None), program=program)
            native_for = spec.native_in(direction)
            if native is None or reason is not None:
                if native_for and reason is not None:
                    raise reasons.cannot_compile(native_for, platform, reason)
                if native is not None and reason is not None:
                    fallback.lowered(primitive.name, platform, reason, getattr(ctx, "traceback", None))
                return lower_formula(ctx, *operands, spec=spec, **params)
            is_split = compat.is_split_by_xla(ctx)
            if slower and (reason := slower(platform, *ctx.avals_in, spec=spec, **params)):
                if not native_for:
                    return lower_formula(ctx, *operands, spec=spec, **params)
                if not is_split:  # a device's shard may have its kernel
                    raise reasons.cannot_compile(native_for, platform, reason)
            if is_split and not splits:
                return partition.lower(
                    platform, primitive, ctx, *operands, in_place=bool(in_place), spec=spec, **params
                )
            return native(platform, ctx, *operands, spec=spec, **params)

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
    """Lowers a primitive to its formula everywhere."""
    mlir.register_lowering(primitive, mlir.lower_fun(formula))


def zeros(ctx: Any, aval: Any) -> Any:
    """An array of this type in the program that is lowered."""
    fill = mlir.lower_fun(lambda: jnp.zeros(aval.shape, aval.dtype), multiple_results=False)
    (value,) = fill(ctx.replace(avals_in=[], avals_out=[aval]))
    return value


def replaced(function: Callable[..., list[Any]], ctx: Any, values: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
    """What jax.numpy makes of a call's operands, in their place in the program that is lowered."""
    avals = jax.make_jaxpr(function)(*ctx.avals_in).out_avals
    return ctx.replace(avals_in=avals), tuple(mlir.lower_fun(function)(ctx.replace(avals_out=avals), *values))


def register_inner(
    primitive: Primitive, formula: Formula, native: Callable[..., Any], platforms: Iterable[str]
) -> None:
    """Lowers a primitive that is only bound while another is lowered: natively wherever one of the platforms has it."""
    lower_formula = mlir.lower_fun(formula)
    mlir.register_lowering(primitive, lower_formula)

    def rule(platform: str) -> Callable[..., Any]:
        def lower(ctx: Any, *operands: Any, **params: Any) -> Any:
            if ffi.why_unfit(platform):
                return lower_formula(ctx, *operands, **params)
            if compat.is_split_by_xla(ctx):
                return partition.lower(platform, primitive, ctx, *operands, in_place=False, **params)
            return native(ctx, *operands, **params)

        return lower

    for platform in filter(ffi.available, platforms):
        mlir.register_lowering(primitive, rule(platform), platform=platform)
