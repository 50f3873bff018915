"""What the rules of several primitives have in common."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxnorm import compat, ffi, partition
from jaxnorm.reference import Norm
from jaxnorm.signatures import Layouts

# What a derivative may want again: the result, the sum with a residual, the row statistics.
NAMES = ("jaxnorm_result", "jaxnorm_sum", "jaxnorm_statistics")


def named(kind: str, values: Sequence[Any]) -> list[Any]:
    """The values, known to `jax.checkpoint`'s policies by one of NAMES: a "result", a "sum" or "statistics"."""
    return [checkpoint_name(value, f"jaxnorm_{kind}") for value in values]


def is_named(primitive: Primitive, params: dict[str, Any]) -> bool:
    """Whether an equation gives one of NAMES to a value."""
    return primitive.name == "name" and params["name"] in NAMES


def bind(primitive: Primitive, operands: Any, **params: Any) -> Any:
    leaves, tree = jax.tree.flatten(operands)
    return primitive.bind(*compat.match_varying_axes(*leaves), tree=tree, **params)


def all_none(values: Sequence[object]) -> bool:
    return all(value is None for value in values)


def fold(operands: Any, dims: Any) -> Any:
    """The operands with the batch as their leading axis, repeated over it where an operand has none."""
    return jax.vmap(lambda *values: values, in_axes=dims)(*operands)


def at_front(results: Any) -> tuple[Any, Any]:
    return results, [0] * len(results)


def batch_jnp(formula: Callable[..., Any], operands: Any, dims: Any) -> tuple[Any, Any]:
    return at_front(jax.vmap(formula, in_axes=tuple(dims))(*operands))


def tangents_jnp(formula: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    """The tangents of formula's results; zero tangents stay symbolic, as None or a Zero."""
    moving = [i for i, tangent in enumerate(tangents) if tangent is not None and type(tangent) is not ad.Zero]

    def of_moving(*values: Any) -> Any:
        operands = dict(enumerate(primals)) | dict(zip(moving, values, strict=True))
        return formula(*operands.values())

    return jax.jvp(of_moving, [primals[i] for i in moving], [tangents[i] for i in moving])[1]


def lowering(
    primitive: Primitive,
    formula: Callable[..., Any],
    native: Callable[..., Any] | None = None,
    platform: str = "this platform",
    of_parts: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    lower_formula = mlir.lower_fun(formula)
    lower_parts = mlir.lower_fun(of_parts or formula)

    def lower(ctx: Any, *operands: Any, **params: Any) -> Any:
        if params["norm"].split is not None:
            return lower_parts(ctx, *operands, **params)
        if native is None or not ffi.available(platform):
            reason = ffi.why_not(platform)
        elif not compat.is_split_by_xla(ctx):
            return native(platform, ctx, *operands, **params)
        elif not compat.has_partitioner():
            reason = "XLA splits kernels over devices with its partitioner Shardy only, which is switched off"
        elif not all(isinstance(n, int) for aval in ctx.avals_in for n in aval.shape):
            reason = "a program for several devices has arrays of unknown shape"
        elif compat.partly_manual(ctx) and len(ctx.module_context.platforms) > 1:
            # It has branches for platforms then, and XLA does not remove those in which devices exchange something.
            reason = "a program for several platforms has a shard_map over some axes of a mesh"
        else:
            return partition.lower(platform, primitive, ctx, *operands, **params)
        norm: Norm = params["norm"]
        if norm.native_for:
            raise RuntimeError(
                f"{norm.native_for}: implementation='native' cannot be compiled for {platform}: {reason}. "
                "With implementation=None it runs in jax.numpy."
            )
        return lower_formula(ctx, *operands, **params)

    return lower


def register(
    primitive: Primitive,
    abstract: Callable[..., Any],
    formula: Callable[..., Any],
    batch: Callable[..., Any],
    jvp: Callable[..., Any] | None = None,
    transpose: Callable[..., Any] | None = None,
) -> None:
    """Gives a primitive of several results its rules; its lowering is the formula, see `register_native`."""
    primitive.multiple_results = True
    primitive.def_abstract_eval(abstract)
    compat.run_eagerly(primitive)
    compat.check_nans(primitive)
    batching.primitive_batchers[primitive] = batch
    if jvp is not None:
        ad.primitive_jvps[primitive] = jvp
    if transpose is not None:
        ad.primitive_transposes[primitive] = transpose
    mlir.register_lowering(primitive, mlir.lower_fun(formula))


def register_native(
    primitive: Primitive,
    formula: Callable[..., Any],
    native: Callable[..., Any],
    layouts: Layouts,
    of_parts: Callable[..., Any] | None = None,
) -> None:
    """Lowers a primitive to its native call on the platforms that have one, and over several devices by its layouts.

    Of rows that are split over devices, of_parts computes a device's part; None is the formula.
    """
    partition.register(primitive, layouts)
    mlir.register_lowering(primitive, lowering(primitive, formula, of_parts=of_parts))
    for platform in ffi.PLATFORMS:
        rule = lowering(primitive, formula, native, platform, of_parts)
        mlir.register_lowering(primitive, rule, platform=platform)
