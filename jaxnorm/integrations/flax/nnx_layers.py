"""The norms of `jaxnorm.nnx`, and its Embed and GatedActivation."""

from collections.abc import Callable
from functools import partial
from typing import Any, Unpack, overload

import jax
import jax.numpy as jnp

from jaxnorm.integrations.flax import calls, served
from jaxnorm.integrations.flax.served import nnx
from jaxnorm.integrations.replacing import explained
from jaxnorm.ops.activation import Synonym
from jaxnorm.ops.gated_activation.api import gated_activation
from jaxnorm.ops.gated_activation.formula import Activation as OfGate
from jaxnorm.ops.group_norm.formula import Activation as OfGroups
from jaxnorm.ops.norm.gated import Activation
from jaxnorm.ops.options import Implementation
from jaxnorm.ops.qk_norm_rotary.api import Normalize
from jaxnorm.quantization import Quantization, Quantized
from jaxnorm.results import QK


class _Options(nnx.Module):
    """What all norms have beside Flax's options.

    A module, so that instances lie in memory as those of Flax's norms: `replace_layers` makes these norms of ours.
    """

    # A norm of Flax that became one of these has no attributes for them.
    scale_offset: float = 0.0
    multiply_before_cast: bool = True
    implementation: Implementation | None = None

    _why_never = staticmethod(served.why_never)

    def __init__(
        self,
        num_features: int,
        *,
        scale_offset: float = 0.0,
        multiply_before_cast: bool = True,
        implementation: Implementation | None = None,
        **flax: Any,
    ) -> None:
        self.scale_offset = scale_offset
        self.multiply_before_cast = multiply_before_cast
        self.implementation = implementation
        if served.options(self)["scale_offset"]:
            flax.setdefault("scale_init", nnx.initializers.zeros)
        super().__init__(num_features, **flax)  # type: ignore[call-arg]


@explained
class RMSNorm(_Options, nnx.RMSNorm):
    """`flax.nnx.RMSNorm` with the same constructor, parameters and result dtype, computed by `jaxnorm.rms_norm`.

    The constructor also takes `scale_offset`, `multiply_before_cast` and `implementation` of the function. Where
    `scale_offset` is not 0, the default of `scale_init` is zeros.

    The kernels serve the calls whose `reduction_axes` and `feature_axes` are trailing axes: the same ones, or with
    features before those that are reduced, a scale for each head: `reduction_axes=-1, feature_axes=(-2, -1)`. A `mask`,
    `axis_index_groups`, other axes, parameters that an Explicit mesh splits otherwise than x, a `promote_dtype` of
    one's own, and dtypes other than float32, bfloat16 and float16 are computed by Flax's own code. That has no
    `scale_offset` and no `multiply_before_cast=False`: with one of these, the formula computes what it can, and the
    rest is an error, as it is with `implementation="native"`.
    """

    _functions = calls.RMS

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        y: jax.Array | None = calls.fused(self._functions.norm, self, (jnp.asarray(x),), mask)
        return super().__call__(x, mask) if y is None else y


@explained
class LayerNorm(_Options, nnx.LayerNorm):
    """`flax.nnx.LayerNorm` with the same constructor, parameters and result dtype, computed by `jaxnorm.layer_norm`.

    The kernels serve the same calls as for `RMSNorm`. Their variance is always that of the centred values, so
    `use_fast_variance=True`, Flax's default, costs no accuracy here: results differ from Flax's by rounding, and where
    the mean is large against the deviation, Flax's lose digits.
    """

    _functions = calls.LAYER

    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        y: jax.Array | None = calls.fused(self._functions.norm, self, (jnp.asarray(x),), mask)
        return super().__call__(x, mask=mask) if y is None else y


class _Add:
    """What makes a norm one of the sum of x and a residual."""

    _functions: calls.Functions

    def __call__(
        self, x: jax.Array, residual: jax.Array, *, mask: jax.Array | None = None, **of_sum: Unpack[calls.OfSum]
    ) -> Any:
        rows = calls.with_other(self, x, "residual", residual, "added")
        results: Any = calls.fused(partial(self._functions.add, **of_sum), self, rows, mask)
        of_flax: Callable[..., Any] = super().__call__  # type: ignore[misc]
        return calls.add_first(of_flax, rows, mask, **of_sum) if results is None else results


@explained
class AddRMSNorm(_Add, RMSNorm):  # type: ignore[misc]
    """The sum of a residual connection and its `RMSNorm`, computed by `jaxnorm.add_rms_norm`.

        y, new_residual = norm(x, residual)  # new_residual = x + residual, y = RMSNorm(...)(new_residual)
        y, new_residual = norm(x, residual, branch_scale=gate)  # new_residual = gate * x + residual

    Constructor, parameters and the dtype of y are those of `RMSNorm`, whose input is the sum. That has residual's
    dtype, and is not rounded to another `dtype` before it is normalised, as flax.nnx rounds its input: only y is. What
    the kernels of `RMSNorm` do not serve is added first and then computed by Flax's own code.
    """


@explained
class AddLayerNorm(_Add, LayerNorm):  # type: ignore[misc]
    """The sum of a residual connection and its `LayerNorm`, computed by `jaxnorm.add_layer_norm`; see `AddRMSNorm`."""


@explained
class GatedRMSNorm(RMSNorm):
    """An `RMSNorm` that is gated, computed by `jaxnorm.gated_rms_norm`.

        norm = GatedRMSNorm(features, gate_first=True, group_size=1024, rngs=rngs)  # Mamba2's
        y = norm(x, gate)

    Constructor and parameters are those of `RMSNorm`, and of the function `gate_first`, `activation` and `group_size`.
    As in flax.nnx, `dtype` is that of the operands, which are rounded to it, and of y; None is what they promote to.
    The kernels want x, gate and y of one dtype: with float32 parameters, give `dtype` for a gated norm of half types.

    `reduction_axes` and `feature_axes` must be -1. A `mask`, `axis_index_groups` and a `promote_dtype` of one's own are
    errors.
    """

    def __init__(
        self,
        num_features: int,
        *,
        gate_first: bool,
        activation: Activation | Synonym = "silu",
        group_size: int | None = None,
        **flax: Any,
    ) -> None:
        super().__init__(num_features, **flax)
        self.gate_first = gate_first
        self.activation = activation
        self.group_size = group_size

    def __call__(  # type: ignore[override]
        self, x: jax.Array, gate: jax.Array, *, mask: None = None
    ) -> jax.Array:
        return calls.gated(self, x, gate, mask)


class _HeadScales(nnx.Module):
    """The parameters of a `QKNormRotary`."""

    def __init__(
        self,
        head_dim: int,
        *,
        heads: tuple[int, int] | None = None,
        use_scale: bool = True,
        scale_init: Any = nnx.initializers.ones,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        shapes = [(head_dim,)] * 2 if heads is None else [(count, head_dim) for count in heads]
        self.q_scale, self.k_scale = (
            nnx.Param(scale_init(rngs.params(), shape, param_dtype)) if use_scale else None for shape in shapes
        )
        self.head_dim, self.heads, self.use_scale = head_dim, heads, use_scale
        self.dtype, self.param_dtype = dtype, param_dtype


@explained
class QKNormRotary(_Options, _HeadScales):
    """RMSNorm or LayerNorm of each head of queries and keys, and their rotary embedding: `jaxnorm.qk_norm_rotary`.

        rotary = QKNormRotary(128, theta=500_000.0, rngs=rngs)
        q, k = rotary(q, k, positions)  # or rotary(q, k, cos=cos, sin=sin)

    The options are the function's, and the arrays of a call: positions, or tables cos and sin, and frequencies. The
    parameters are `q_scale` and `k_scale`, of `head_dim` elements, or for each head with `heads`, the numbers of those
    of queries and keys; `use_scale` is for a norm only. `dtype` is what q and k are converted to; None keeps their own,
    as float32 parameters do.
    """

    def __init__(
        self,
        head_dim: int,
        *,
        theta: float = 10000.0,
        rotary_dim: int | None = None,
        interleaved: bool = False,
        normalize: Normalize = True,
        use_scale: bool = True,
        epsilon: float = 1e-6,
        heads_axis: int = -2,
        **options: Any,
    ) -> None:
        super().__init__(head_dim, use_scale=use_scale and normalize is not False, **options)
        self.theta, self.rotary_dim, self.interleaved = theta, rotary_dim, interleaved
        self.normalize, self.epsilon, self.heads_axis = normalize, epsilon, heads_axis

    def __call__(
        self, q: jax.Array, k: jax.Array, positions: jax.Array | None = None, **tables: Unpack[calls.Tables]
    ) -> QK:
        scales = calls.value(self.q_scale), calls.value(self.k_scale)
        return calls.rotated(self, (q, k, *scales, positions), **tables)


class _Quantized:
    """What makes a norm one with a quantised result."""

    def __init__(
        self, num_features: int, *, quantization: Quantization, straight_through: bool = False, **flax: Any
    ) -> None:
        super().__init__(num_features, **flax)  # type: ignore[call-arg]
        self.quantization = quantization
        self.straight_through = straight_through

    @overload
    def __call__(self, x: jax.Array, residual: None = None, **_: Unpack[calls.Scales]) -> Quantized: ...

    @overload
    def __call__(self, x: jax.Array, residual: jax.Array, **_: Unpack[calls.Scales]) -> tuple[Quantized, jax.Array]: ...

    def __call__(
        self,
        x: jax.Array,
        residual: jax.Array | None = None,
        *,
        static_scale: Any = None,
        smooth_scale: jax.Array | None = None,
        mask: None = None,
    ) -> Quantized | tuple[Quantized, jax.Array]:
        scales = {"static_scale": static_scale, "smooth_scale": smooth_scale}
        return calls.quantized(self, x, residual, mask, scales)


@explained
class QuantizedRMSNorm(_Quantized, RMSNorm):  # type: ignore[misc]
    """An `RMSNorm` with a quantised result, computed by `jaxnorm.rms_norm_quantized`.

        norm = QuantizedRMSNorm(features, quantization=Quantization(jnp.float8_e4m3fn), rngs=rngs)
        quantized = norm(x)
        quantized, new_residual = norm(x, residual)

    Constructor and parameters are those of `RMSNorm`, and of the function `quantization`, `straight_through` and the
    call's `residual`, `static_scale` and `smooth_scale`. `dtype` is that of the operands, as in flax.nnx: the
    parameters, and x where there is no residual, are rounded to it; what comes of them is float32 until it is
    quantised.

    `reduction_axes` and `feature_axes` must be the same axes: kernels serve trailing ones, the formula others.
    A `mask`, `axis_index_groups` and a `promote_dtype` of one's own are errors.
    """


@explained
class QuantizedLayerNorm(_Quantized, LayerNorm):  # type: ignore[misc]
    """A `LayerNorm` with a quantised result, computed by `jaxnorm.layer_norm_quantized`; see `QuantizedRMSNorm`."""


class _Groups(nnx.Module):
    """What a GroupNorm and an InstanceNorm have beside Flax's options; see `_Options`."""

    activation: OfGroups | Synonym | None = None
    scale_offset: float = 0.0
    implementation: Implementation | None = None

    _why_never = staticmethod(served.why_options)

    def __init__(
        self,
        num_features: int,
        *groups: int | None,
        activation: OfGroups | Synonym | None = None,
        scale_offset: float = 0.0,
        implementation: Implementation | None = None,
        **flax: Any,
    ) -> None:
        self.activation = activation
        self.scale_offset = scale_offset
        self.implementation = implementation
        if served.options(self)["scale_offset"]:
            flax.setdefault("scale_init", nnx.initializers.zeros)
        super().__init__(num_features, *groups, **flax)  # type: ignore[call-arg]

    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        x = jnp.asarray(x)
        y = calls.grouped(self, x, mask)
        of_flax: Callable[..., jax.Array] = super().__call__
        return calls.activated(self, of_flax(x, mask=mask)) if y is None else y


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

    _why_never = staticmethod(served.why_never_looked_up)

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
