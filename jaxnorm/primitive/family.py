"""The primitives of an op, which follow from its record.

- `forward` gives the results and, where a derivative follows, the row statistics. Its JVP binds
- `linear`, the tangents of the results, which is linear in the tangents of the variables. Its transpose binds
- `backward`, the wanted ones of the gradients, in one call.

So a gradient is one native call each way; forward mode and higher derivatives go through the formulas. Each primitive
has its abstract evaluation, lowering, batching, JVP and transpose in a file of its own.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Generic

import jax
import numpy as np
from jax import lax

from jaxnorm.native import compat
from jaxnorm.primitive import decide, fallback, reasons, registry
from jaxnorm.primitive.forward import Forward
from jaxnorm.primitive.linear import Linear
from jaxnorm.primitive.op import BatchDims, O, Op, R, Record, S, Statistics


class Family(Generic[S, O, R]):
    """An op that is registered: it can be called, by the kernels where there are some."""

    def __init__(self, op: Op[S, O, R]) -> None:
        self.op = op
        self._linear = linear = None if op.derivative is None else Linear(op, op.derivative)
        self._forward = Forward(op, linear)
        registry.add_types(op.spec, *op.static_types)
        registry.add_op(op)
        registry.entry(self._forward.primitive).is_forward = True
        if op.native is not None:
            compat.allow_export(op.native.targets)

    def wants_primitive(self, spec: S, operands: O, implementation: str | None) -> bool:
        """Whether a call should be the primitive: a kernel on some platform, and little kept for a derivative.

        If it must be native, an error where no kernel is at hand.
        """
        is_asked_for, types = implementation == "xla", jax.tree.map(jax.typeof, operands)
        if is_asked_for:
            wants = False
        elif spec.native_for:  # in either direction: both are one call's
            asked = dataclasses.replace(spec, native_ways=("forward",), formula_for=())
            decide.check_native(reasons.RowCall.of(self.op, asked, types))
            wants = True
        elif spec.shards is None or compat.UNKNOWN:
            wants = self.why_not(spec, types) is None
        else:  # a primitive that exchanges shards would not know what to do with the axis of a vmap
            manual = jax.sharding.get_abstract_mesh().manual_axes
            is_trailing = reasons.is_trailing(spec.axes) or not self.op.is_trailing
            wants = set(spec.shards.names) <= set(manual) and is_trailing
        if not wants:

            def why() -> str:
                return fallback.ASKED_FOR if is_asked_for else str(self.why_not(spec, types))

            fallback.traced(self.op, spec, operands, "forward", why)
        return wants

    def bind(self, spec: S, operands: O, *, with_stats: bool = False) -> tuple[R, Statistics]:
        """The results, native on the platforms that have a kernel, and with_stats the statistics."""
        operands = self._summed_wide(self.aligned(spec, operands))
        results: tuple[R, Statistics] = self._forward.bind(spec, operands, with_stats=with_stats)
        return results

    def _summed_wide(self, operands: O) -> O:
        """The operands with weights in float32 whose gradients are summed over a `shard_map`'s devices.

        So these are rounded to their dtypes once, after that.
        """
        there = {name: array for name, array in operands._asdict().items() if array is not None}
        summed = zip(there, compat.are_summed(*there.values()), strict=True)
        names = [name for name, is_summed in summed if is_summed and self._forward.is_summed(name)]
        return operands._replace(**{name: there[name].astype(np.float32) for name in names})

    def aligned(self, spec: S, operands: O) -> O:
        """The operands with weights as primitives have them."""
        names = [name for name in operands._fields if self._forward.is_weight(name)]
        given = [getattr(operands, name) for name in names]
        whole = self._forward.aligned(spec, names, jax.typeof(operands[0]), given)
        return operands._replace(**dict(zip(names, whole, strict=True)))

    def __call__(self, spec: S, operands: O, implementation: str | None) -> R:
        """The results, from the primitive or in plain jax.numpy, as `wants_primitive` says."""
        if self.wants_primitive(spec, operands, implementation):
            return self.bind(spec, operands)[0]
        return (self.op.plain or self._first)(spec, operands)

    def with_statistics(self, spec: S, operands: O, implementation: str | None) -> tuple[R, Statistics]:
        """The same with the statistics, of which no derivative is taken."""
        if self.wants_primitive(spec, operands, implementation):
            results, stats = self.bind(spec, operands, with_stats=True)
        else:
            results, stats = (self.op.plain or self._first)(spec, operands), self.op.forward(spec, operands)[1]
        return results, tuple(lax.stop_gradient(array) for array in stats)

    def _first(self, spec: S, operands: O) -> R:
        return self.op.forward(spec, operands)[0]

    def tangents(
        self, spec: S, operands: O, results: R, stats: Statistics, dots: O
    ) -> tuple[R, Callable[[], Sequence[Any]]]:
        """As `Forward.tangents`."""
        return self._forward.tangents(spec, operands, results, stats, dots)

    def gradients(self, spec: S, cotangents: R, saved: Record, wanted: Any, batch_dims: BatchDims) -> Any:
        """The gradients whose dtypes are given, native on the platforms that have a kernel."""
        assert self._linear is not None
        return self._linear.backward.bind(spec, cotangents, saved, wanted=wanted, batch_dims=batch_dims)

    def why_not(self, spec: S, types: O) -> str | None:
        """Why no platform has a kernel for a call with operands of these types; None if one has."""
        return reasons.why_nowhere(reasons.Traced(self.op, spec, types))
