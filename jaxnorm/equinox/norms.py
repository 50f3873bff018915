"""Equinox' norms and Embedding, computed by the functions of this package."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from jaxnorm.flax import replacement
from jaxnorm.ops.embedding.api import embedding
from jaxnorm.ops.group_norm.api import group_norm
from jaxnorm.ops.norm.api import layer_norm, rms_norm

_NO_STATE = object()


class RMSNorm(eqx.nn.RMSNorm):
    """`equinox.nn.RMSNorm` with the same constructor, fields and result dtype, computed by `jaxnorm.rms_norm`.

        y = x * rsqrt(mean(x²) + eps) * weight + bias

    x has the shape of the module. It is computed in float32 and rounded once, to x's dtype. Under `jax.vmap` over x, in
    any depth, the norm stays one native call each way. x and weights of other dtypes than float32, bfloat16 and float16
    are computed by Equinox' own code.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019, https://arxiv.org/abs/1910.07467.
    """

    def __call__(self, x: Any, state: Any = _NO_STATE, *, key: Any = None) -> Any:
        served = _is_served(self, x, self.shape)
        return _with_state(_of_shape(self, x, rms_norm) if served else super().__call__(x), state)


class LayerNorm(eqx.nn.LayerNorm):
    """`equinox.nn.LayerNorm` with the same constructor, fields and result dtype, computed by `jaxnorm.layer_norm`.

        y = (x - mean) * rsqrt(mean((x - mean)²) + eps) * weight + bias

    The rest is as `RMSNorm` says.

    Source: Ba, Kiros and Hinton, Layer Normalization, 2016, https://arxiv.org/abs/1607.06450.
    """

    def __call__(self, x: Any, state: Any = _NO_STATE, *, key: Any = None) -> Any:
        served = _is_served(self, x, self.shape)
        return _with_state(_of_shape(self, x, layer_norm) if served else super().__call__(x), state)


class GroupNorm(eqx.nn.GroupNorm):
    """`equinox.nn.GroupNorm` with the same constructor, fields and result dtype, computed by `jaxnorm.group_norm`.

        y = (x - mean) * rsqrt(mean((x - mean)²) + eps) * weight + bias

    x has shape (channels, ...), and the means are over a group of neighbouring channels and all positions. With
    channels first `group_norm` has kernels on CPUs, and is its formula on GPUs. The rest is as `RMSNorm` says.

    Source: Wu and He, Group Normalization, 2018, https://arxiv.org/abs/1803.08494.
    """

    def __call__(self, x: Any, state: Any = _NO_STATE, *, key: Any = None) -> Any:
        # Equinox has the errors for what its groups do not divide.
        fits = _is_served(self, x) and x.shape[0] % self.groups == 0
        if not fits or (self.weight is not None and x.shape[:1] != self.weight.shape):
            return _with_state(super().__call__(x), state)
        y = group_norm(x[None], self.weight, self.bias, num_groups=self.groups, epsilon=self.eps, channel_axis=1)
        return _with_state(y[0], state)


class Embedding(eqx.nn.Embedding):
    """`equinox.nn.Embedding` with the same constructor, field and result, by `jaxnorm.embedding`.

        x = jax.vmap(Embedding(50_257, 768, key=key))(ids)

    The rows have Equinox' bits. As there negative indices count from the end, and what is out of range is the first or
    the last row, in the gradient too. That is summed in float32, in the same order in each run, and rounded once. Under
    `jax.vmap` over x, in any depth, it stays one native call. Weights of other dtypes than float32, bfloat16 and
    float16, and indices that are no array of integers, are computed by Equinox' own code.
    """

    def __call__(self, x: Any, *, key: Any = None) -> jax.Array:
        if not _is_index(x) or why_never(self) is not None or self.weight.ndim != 2 or not len(self.weight):
            return super().__call__(x)
        rows: jax.Array = embedding(self.weight, _clamped(x, self.weight.shape[0]))
        return rows


def why_never(module: Any) -> str | None:
    """Why no kernel serves any call of a layer of Equinox; None if that depends on the call."""
    weights = {name: array for name in ("weight", "bias") if (array := getattr(module, name, None)) is not None}
    if why := why_no_arrays(weights):
        return why
    dtypes = [weight.dtype for weight in weights.values()]
    why = replacement.why_epsilon(getattr(module, "eps", 0.0)) or replacement.why_dtypes(*dtypes)
    return why and f"no kernel serves {why}"


def why_no_arrays(weights: dict[str, Any]) -> str | None:
    """Which of a module's weights is no array but a `SharedNode`, or what a filter left; None if all are arrays."""
    others = {name: type(weight).__name__ for name, weight in weights.items() if not hasattr(weight, "dtype")}
    return next((f"its {name} is no array but a {of}" for name, of in others.items()), None)


def _is_served(module: Any, x: Any, shape: tuple[int, ...] | None = None) -> bool:
    """Whether a kernel computes `module(x)`, where x has this shape or, without one, an axis of channels."""
    if not isinstance(x, jax.Array) or not x.ndim or shape not in (None, x.shape):
        return False
    return why_never(module) is None and replacement.why_dtypes(x.dtype) is None


def _of_shape(module: Any, x: jax.Array, norm: Callable[..., jax.Array]) -> jax.Array:
    axes = tuple(range(-x.ndim, 0))
    return norm(x, module.weight, bias=module.bias, epsilon=module.eps, axis=axes)


def _with_state(y: jax.Array, state: Any) -> Any:
    """The result, and the state of a `StateIndex` beside it where the call was given one."""
    return y if state is _NO_STATE else (y, state)


def _is_index(x: Any) -> bool:
    """Whether x is a scalar that is not cast before it counts, as uint32 is."""
    if not isinstance(x, jax.Array) or x.shape or not jnp.issubdtype(x.dtype, jnp.integer):
        return False
    return jnp.issubdtype(x.dtype, jnp.signedinteger) or x.dtype.itemsize < 4


def _clamped(x: jax.Array, length: int) -> jax.Array:
    x = x if x.dtype.itemsize >= 4 else x.astype(jnp.int32)
    return jnp.clip(jnp.where(x < 0, x + length, x), 0, length - 1)
