"""How primitives become code: native calls where there are kernels, the formula in jax.numpy elsewhere."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jaxnorm.native import compat, ffi
from jaxnorm.primitive import fallback, reasons
from jaxnorm.primitive.op import Spec
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
    in_place: bool = False,
) -> None:
    """Lowers a primitive, one of whose parameters is a `Spec`, to its native call on the platforms that have one.

    None is for a primitive without kernels. Where rows have sharded axes, of_shard computes a device's shard; None is
    the formula. In a program for several devices the call is one that XLA partitions, if
    `jaxnorm.sharding.partition.register` was told how, and else the formula. slower says why XLA's code for the formula
    is faster than the native call: it runs then, unless the call must be native. in_place is for native rules that ask
    where an operand comes from: JAX lowers equations that are alike once, in a function whose arguments they do not see
    beyond, but for such a primitive.
    """
    lower_formula = mlir.lower_fun(formula)
    lower_shard = mlir.lower_fun(of_shard or formula)

    def rule(platform: str) -> Callable[..., Any]:
        def lower(ctx: Any, *operands: Any, spec: Spec, **params: Any) -> Any:
            if spec.shards is not None:
                return lower_shard(ctx, *operands, spec=spec, **params)
            program = reasons.Program(ctx, partition.is_registered(primitive))
            reason = reasons.why_not(place=reasons.Place(platform, native is not None), program=program)
            if native is None or reason is not None:
                if spec.native_for and reason is not None:
                    raise reasons.cannot_compile(spec.native_for, platform, reason)
                if native is not None and reason is not None:
                    fallback.lowered(primitive.name, platform, reason, getattr(ctx, "traceback", None))
                return lower_formula(ctx, *operands, spec=spec, **params)
            if slower and slower(platform, *ctx.avals_in, spec=spec, **params):
                return lower_formula(ctx, *operands, spec=spec, **params)
            if compat.is_split_by_xla(ctx):
                return partition.lower(platform, primitive, ctx, *operands, spec=spec, **params)
            return native(platform, ctx, *operands, spec=spec, **params)

        return lower

    by_platform = {None: rule("this platform")} | {platform: rule(platform) for platform in ffi.PLATFORMS}
    if in_place:
        _register_where_it_stands(primitive, by_platform)
    else:
        _register_by_platform(primitive, by_platform)


Rule = Callable[..., Any]
ByPlatform = dict[str | None, Rule]


def _register_by_platform(primitive: Primitive, rules: ByPlatform) -> None:
    for platform, rule in rules.items():
        mlir.register_lowering(primitive, rule, platform=platform)


def _register_where_it_stands(primitive: Primitive, rules: ByPlatform) -> None:
    """Lowers a primitive where it stands in the program, and not in a function that JAX keeps for all that are alike.

    JAX (0.11.2 and 0.12.0) fails to do so by platform in a program for several: there a twin of the primitive is in its
    place.
    """
    twin = Primitive(primitive.name)
    twin.multiple_results = True
    twin.def_effectful_abstract_eval(primitive.abstract_eval)
    _register_by_platform(twin, rules)
    lower_twin = mlir.lower_fun(twin.bind)

    def lower(ctx: Any, *operands: Any, **params: Any) -> Any:
        platforms = ctx.module_context.platforms
        rule = rules.get(platforms[0], rules[None]) if len(platforms) == 1 else lower_twin
        return rule(ctx, *operands, **params)

    mlir.register_lowering(primitive, lower, cacheable=False)


def register_formula(primitive: Primitive, formula: Formula) -> None:
    """Lowers a primitive to its formula everywhere."""
    mlir.register_lowering(primitive, mlir.lower_fun(formula))


def zeros(ctx: Any, aval: Any) -> Any:
    """An array of this type in the program that is lowered."""
    fill = mlir.lower_fun(lambda: jnp.zeros(aval.shape, aval.dtype), multiple_results=False)
    (value,) = fill(ctx.replace(avals_in=[], avals_out=[aval]))
    return value


def register_inner(
    primitive: Primitive, formula: Formula, native: Callable[..., Any], platforms: Iterable[str]
) -> None:
    """Lowers a primitive that is only bound while another is lowered: natively wherever one of the platforms has it."""
    lower_formula = mlir.lower_fun(formula)
    mlir.register_lowering(primitive, lower_formula)

    def rule(platform: str) -> Callable[..., Any]:
        return lambda *args, **params: (lower_formula if ffi.why_unfit(platform) else native)(*args, **params)

    for platform in filter(ffi.available, platforms):
        mlir.register_lowering(primitive, rule(platform), platform=platform)
