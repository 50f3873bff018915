"""The norms of `jaxnorm.nnx`, and its Embed and GatedActivation."""

from collections.abc import Callable
from functools import partial
from typing import Any, Unpack

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
from jaxnorm.quantization import Quantization
from jaxnorm.results import QK


class _Options(nnx.Module):
    """Options of all norms beside Flax's.

    A module, so that instances lie in memory as Flax's norms do, which `replace_layers` turns into these.
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

        norm = RMSNorm(64, scale_offset=1.0, rngs=rngs)  # Gemma's

    The constructor also takes the function's `scale_offset`, `multiply_before_cast` and `implementation`. With a
    `scale_offset` other than 0, `scale_init` is zeros by default.

    Kernels serve trailing `reduction_axes` and `feature_axes`: the same axes, or more features in front, as for a scale
    for each head: `reduction_axes=-1, feature_axes=(-2, -1)`. Flax's own code runs for a `mask`, `axis_index_groups`,
    other axes, parameters that an Explicit mesh splits otherwise than x, your own `promote_dtype`, and dtypes other
    than float32, bfloat16 and float16. It has no `scale_offset` and no `multiply_before_cast=False`: with one of these
    the formula computes what it can, and the rest is an error, as with `implementation="native"`.
    """

    _functions = calls.RMS

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        y: jax.Array | None = calls.fused(self._functions.norm, self, (jnp.asarray(x),), mask)
        return super().__call__(x, mask) if y is None else y


@explained
class LayerNorm(_Options, nnx.LayerNorm):
    """`flax.nnx.LayerNorm` with the same constructor, parameters and result dtype, computed by `jaxnorm.layer_norm`.

    Kernels serve the same calls as for `RMSNorm`. They always take the variance of centred values, so Flax's default,
    `use_fast_variance=True`, costs no accuracy. Results differ from Flax's by rounding, and where the mean is large
    against the deviation, by the digits that Flax's lose.
    """

    _functions = calls.LAYER

    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        y: jax.Array | None = calls.fused(self._functions.norm, self, (jnp.asarray(x),), mask)
        return super().__call__(x, mask=mask) if y is None else y


class _Add:
    """Adds a residual before a norm."""

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
    """Adds x to a residual stream, and applies `RMSNorm` to the sum, by `jaxnorm.add_rms_norm`.

        y, new_residual = norm(x, residual)  # new_residual = x + residual, y = RMSNorm(...)(new_residual)
        y, new_residual = norm(x, residual, branch_scale=gate)  # new_residual = gate * x + residual

    Constructor, parameters and y's dtype are those of `RMSNorm`. The sum has residual's dtype and is normalised as it
    is: only y is rounded to `dtype`, where flax.nnx rounds the input of a norm too. Where `RMSNorm`'s kernels do not
    serve a call, XLA adds first, and Flax's own code runs.
    """


@explained
class AddLayerNorm(_Add, LayerNorm):  # type: ignore[misc]
    """Adds x to a residual stream, and applies `LayerNorm`, by `jaxnorm.add_layer_norm`; see `AddRMSNorm`."""


@explained
class GatedRMSNorm(RMSNorm):
    """An `RMSNorm` with a gate, computed by `jaxnorm.gated_rms_norm`.

        norm = GatedRMSNorm(features, gate_first=True, group_size=1024, rngs=rngs)  # Mamba2's
        y = norm(x, gate)

    Constructor and parameters are those of `RMSNorm`, with the function's `gate_first`, `activation` and `group_size`.
    As in flax.nnx, operands are rounded to `dtype`, which is y's too; None is what they promote to. Kernels want x,
    gate and y of one dtype: for x of 16 bits with float32 parameters, pass `dtype`.

    `reduction_axes` and `feature_axes` must be -1. `mask`, `axis_index_groups` and your own `promote_dtype` are errors.
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
    """RMSNorm or LayerNorm of each head of queries and keys, and their rotary embedding, by `jaxnorm.qk_norm_rotary`.

        rotary = QKNormRotary(128, theta=500_000.0, rngs=rngs)
        q, k = rotary(q, k, positions)  # or rotary(q, k, cos=cos, sin=sin)

    The constructor takes the function's options; a call takes positions or tables cos and sin, and frequencies. The
    parameters `q_scale` and `k_scale` have shape (head_dim,), or one row a head with `heads`, the numbers of heads of
    queries and of keys; there are none without a norm or with `use_scale=False`. q and k are converted to `dtype`; None
    keeps their own, whatever the parameters'.
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


class _Quantized(calls.Quantizes):
    def __init__(
        self, num_features: int, *, quantization: Quantization, straight_through: bool = False, **flax: Any
    ) -> None:
        super().__init__(num_features, **flax)  # type: ignore[call-arg]
        self.quantization = quantization
        self.straight_through = straight_through


@explained
class QuantizedRMSNorm(_Quantized, RMSNorm):  # type: ignore[misc]
    """An `RMSNorm` with a quantised result, computed by `jaxnorm.rms_norm_quantized`.

        norm = QuantizedRMSNorm(features, quantization=Quantization(jnp.float8_e4m3fn), rngs=rngs)
        quantized = norm(x)
        quantized, new_residual = norm(x, residual)

    Constructor and parameters are those of `RMSNorm`, with the function's `quantization` and `straight_through`; a call
    also takes `residual`, `static_scale` and `smooth_scale`. Parameters, and x if there is no residual, are rounded to
    `dtype`, as in flax.nnx; the norm is float32 until it is quantised.

    `reduction_axes` and `feature_axes` must be the same axes: kernels serve trailing ones, the formula others. `mask`,
    `axis_index_groups` and your own `promote_dtype` are errors.
    """


@explained
class QuantizedLayerNorm(_Quantized, LayerNorm):  # type: ignore[misc]
    """A `LayerNorm` with a quantised result, computed by `jaxnorm.layer_norm_quantized`; see `QuantizedRMSNorm`."""


class _Groups(nnx.Module):
    """Options of GroupNorm and InstanceNorm beside Flax's; see `_Options`."""

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

    The constructor also takes the function's `activation`, `scale_offset` and `implementation`. With a `scale_offset`
    other than 0, `scale_init` is zeros by default.

    Kernels serve `reduction_axes` of all axes but the first, the default. Flax's own code, and then the activation,
    runs for a `mask`, `axis_index_groups`, other axes, parameters that an Explicit mesh splits otherwise than x, your
    own `promote_dtype`, and dtypes other than float32, bfloat16 and float16. It has no `scale_offset`: with one the
    formula computes what it can, and the rest is an error, as with `implementation="native"`. The variance is of
    centred values, with `use_fast_variance=True` too.
    """


@explained
class InstanceNorm(_Groups, nnx.InstanceNorm):
    """`flax.nnx.InstanceNorm` with the same constructor, parameters and result dtype: a `GroupNorm` of single channels.

    Kernels serve the last axis as `feature_axes`. All else, with the options, is as for `GroupNorm`.
    """


@explained
class Embed(nnx.Embed):
    """`flax.nnx.Embed` with the same constructor, parameter and result, computed by `jaxnorm.embedding`.

        embed = Embed(50_257, 768, dtype=jnp.bfloat16, rngs=rngs)
        x = embed(ids)
        logits = embed.attend(x)

    Rows have Flax's bits, NaN where an id is out of range; negative ids count from the end. The rows are rounded to
    `dtype`, and the table's gradient is summed in float32 and rounded once, to the table's dtype; Flax rounds the table
    and sums its gradient in `dtype`. With `num_embeddings=1` all ids get the one row, as in Flax. `attend` is Flax's.

    The constructor also takes the function's `implementation`. Flax's own code runs for your own `promote_dtype` and
    for dtypes other than float32, bfloat16 and float16, which are errors with `implementation="native"`.
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
    """`activation(gate) * up`, the elementwise step of a gated MLP, by `jaxnorm.gated_activation`, without parameters.

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
