"""GroupNorm, InstanceNorm, Embed and GatedActivation of `jaxnorm.nnx`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxnorm.flax import calls, group_calls, nnx_calls
from jaxnorm.flax.calls import nnx
from jaxnorm.flax.replacement import explained
from jaxnorm.ops.activation import Synonym
from jaxnorm.ops.gated_activation.api import gated_activation
from jaxnorm.ops.gated_activation.formula import Activation as OfGate
from jaxnorm.ops.group_norm.api import group_norm
from jaxnorm.ops.group_norm.formula import Activation
from jaxnorm.ops.options import Implementation


def grouped(module: Any, mask: jax.Array | None, x: jax.Array, **more: Any) -> jax.Array | None:
    """`group_norm` of x, called as `module` and `more` say, or None where Flax's own code computes it."""
    parameters = nnx_calls.parameters_of(module)
    dtype = nnx.nn.dtypes.canonicalize_dtype(x, *parameters, dtype=module.dtype)
    dtypes = (dtype, *(a.dtype for a in (x, *parameters) if a is not None))
    why = group_calls.why_flax(module, x, mask, parameters, dtypes)
    if not group_calls.is_called(module, x, mask, why):
        return None
    keywords = group_calls.keywords(module, x.ndim) | more
    (x,), (scale, bias) = nnx_calls.operands((x,), parameters, dtype, (keywords["channel_axis"],))
    return group_norm(x, scale, bias, out_dtype=dtype, **keywords)


class _Groups(nnx.Module):
    """What a GroupNorm and an InstanceNorm have beside Flax's options; see `_Options`."""

    activation: Activation | Synonym | None = None
    scale_offset: float = 0.0
    implementation: Implementation | None = None

    _why_never = staticmethod(calls.why_options)

    def __init__(
        self,
        num_features: int,
        *groups: int | None,
        activation: Activation | Synonym | None = None,
        scale_offset: float = 0.0,
        implementation: Implementation | None = None,
        **flax: Any,
    ) -> None:
        self.activation = activation
        self.scale_offset = scale_offset
        self.implementation = implementation
        if calls.options(self)["scale_offset"]:
            flax.setdefault("scale_init", nnx.initializers.zeros)
        super().__init__(num_features, *groups, **flax)  # type: ignore[call-arg]

    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        x = jnp.asarray(x)
        y = grouped(self, mask, x)
        of_flax: Callable[..., jax.Array] = super().__call__
        return group_calls.activated(self, of_flax(x, mask=mask)) if y is None else y


@explained
class GroupNorm(_Groups, nnx.GroupNorm):
    """`flax.nnx.GroupNorm` with the same constructor, parameters and result dtype, computed by `jaxnorm.group_norm`.

        norm = GroupNorm(320, num_groups=32, activation="silu", rngs=rngs)
        y = norm(x)

    The constructor also takes `activation`, `scale_offset` and `implementation` of the function. Where `scale_offset`
    is not 0, the default of `scale_init` is zeros.

    The kernels serve the calls whose `reduction_axes` are all axes but the first, as they are by default. A `mask`,
    `axis_index_groups`, other axes, parameters that an Explicit mesh splits otherwise than x, a `promote_dtype` of
    one's own, and dtypes other than float32, bfloat16 and float16 are computed by Flax's own code, and the activation
    of its result. That has no `scale_offset`: with one, the formula computes what it can, and the rest is an error, as
    it is with `implementation="native"`. The variance is that of the centred values, also with
    `use_fast_variance=True`.
    """


@explained
class InstanceNorm(_Groups, nnx.InstanceNorm):
    """`flax.nnx.InstanceNorm` with the same constructor, parameters and result dtype: a `GroupNorm` of single channels.

    The kernels serve the calls whose `feature_axes` are the last axis. Options and all else are as of `GroupNorm`.
    """


@explained
class Embed(nnx.Embed):
    """`flax.nnx.Embed` with the same constructor, parameter and result, by `jaxnorm.embedding`.

        embed = Embed(50_257, 768, dtype=jnp.bfloat16, rngs=rngs)
        x = embed(ids)
        logits = embed.attend(x)

    The rows have Flax's bits, with NaN where an id is out of range; negative ids count from the end. Flax rounds the
    table to `dtype` and sums its gradient in that. Here the rows are rounded, and the gradient is summed in float32 and
    rounded once, to the table's dtype; so it is of `num_embeddings=1`, whose row is broadcast to all ids, as in Flax.
    `attend` is Flax's.

    The constructor also takes `implementation` of the function. A `promote_dtype` of one's own, and dtypes other than
    float32, bfloat16 and float16, are computed by Flax's own code, and are errors with `implementation="native"`.
    """

    # An Embed of Flax that became one of these has no attribute for it.
    implementation: Implementation | None = None

    _why_never = staticmethod(calls.why_never_looked_up)

    def __init__(
        self, num_embeddings: int, features: int, *, implementation: Implementation | None = None, **flax: Any
    ) -> None:
        super().__init__(num_embeddings, features, **flax)
        self.implementation = implementation

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        rows = calls.looked_up(self, self.embedding[...], inputs, out_sharding)
        return super().__call__(inputs, out_sharding) if rows is None else rows


@explained
class GatedActivation(nnx.Module):
    """An activation of a gate, times what it gates: `jaxnorm.gated_activation`, without parameters.

        gate = GatedActivation(activation="silu")
        h = gate(linear(x))

    The options are the function's.
    """

    def __init__(
        self, *, activation: OfGate | Synonym = "silu", axis: int = -1, implementation: Implementation | None = None
    ) -> None:
        self.activation, self.axis, self.implementation = activation, axis, implementation

    def __call__(self, x: jax.Array | tuple[jax.Array, jax.Array]) -> jax.Array:
        return gated_activation(x, activation=self.activation, axis=self.axis, implementation=self.implementation)
