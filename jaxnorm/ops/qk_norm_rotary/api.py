"""The public function of rotary embedding with the norms of queries and keys."""

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from jaxnorm.ops import checks
from jaxnorm.ops.misuse import explained
from jaxnorm.ops.options import Implementation
from jaxnorm.ops.qk_norm_rotary.checks import (
    Rotation,
    angles_of,
    check_k,
    check_normalize,
    check_rotation,
    check_scale,
    check_tokens,
)
from jaxnorm.ops.qk_norm_rotary.formula import Operands, QKNormRotary
from jaxnorm.ops.qk_norm_rotary.op import QK_NORM_ROTARY
from jaxnorm.results import QK
from jaxnorm.sharding import dims

NAME = "qk_norm_rotary"
Normalize = bool | Literal["rms", "layer"]


@explained
def qk_norm_rotary(
    q: Any,
    k: Any,
    q_scale: Any = None,
    k_scale: Any = None,
    positions: Any = None,
    *,
    cos: Any = None,
    sin: Any = None,
    theta: float = 10000.0,
    frequencies: Any = None,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    normalize: Normalize = True,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    heads_axis: int = -2,
    implementation: Implementation | None = None,
) -> QK:
    """Normalises queries and keys over each head, and rotates pairs of their elements by the position of the token.

        h = rms_norm(q, q_scale, ...)                            q itself with normalize=False
        q = (h_a * cos - h_b * sin, h_b * cos + h_a * sin)       for each pair (a, b) of the first rotary_dim elements

        >>> q, k = qk_norm_rotary(jnp.ones((2, 6, 4, 8)), jnp.ones((2, 6, 1, 8)), jnp.ones(8), jnp.ones(8), theta=1e6)

    and k likewise, by the angle position * frequency. It is computed, rounded and transformed as `rms_norm` says.
    Gradients are those of q, k and the scales: positions, frequencies and tables have none, which is zero.

    Args:
      q: floating-point array (..., tokens, heads, head size), or (..., heads, tokens, head size) with heads_axis=-3.
      k: array like q, with any number of heads. Kernels want q and k of one dtype.
      q_scale: factor of q's norm, of the head size, or (heads, head size); None is 1. k_scale is that of k's.
      cos: in place of positions, a table with an element for each pair on the last axis, or for each element, as models
        of the hubs have it, beside sin.

    Returns:
      `QK`, (q, k): arrays of the shapes and dtypes of q and k.

    Raises:
      ValueError, TypeError, RuntimeError: arrays or options do not go with each other; otherwise as `rms_norm` does.

    Source: RoFormer, https://arxiv.org/abs/2104.09864; Query-Key Normalization, https://arxiv.org/abs/2010.04245.
    """
    options = Options(epsilon, scale_offset, normalize, implementation)
    rotation = Rotation(positions, cos, sin, theta, frequencies, rotary_dim, interleaved)
    return _rotated(options, rotation, Operands(q, k, q_scale, k_scale), heads_axis)


class Options(NamedTuple):
    """The keywords that are not about the rotation, nor where the heads are, as a caller gave them."""

    epsilon: Any
    scale_offset: Any
    normalize: Any
    implementation: Any

    def checked(self, function: str, x: jax.Array, rotation: Rotation, arrays: Iterable[Any]) -> dict[str, Any]:
        """The fields of a spec, for a checked rotation and all arrays that are computed with."""
        return {
            "norm": check_normalize(function, self.normalize),
            "rotary_dim": rotation.rotary_dim,
            "interleaved": rotation.interleaved,
            "epsilon": checks.check_epsilon(function, self.epsilon),
            "scale_offset": checks.check_scale_offset(function, self.scale_offset),
            "compute_dtype": dims.wide_dtype(a.dtype for a in (*arrays, *rotation.tables) if a is not None),
            "out_dtype": np.dtype(x.dtype),
        }


def _rotated(options: Options, rotation: Rotation, arrays: Operands, heads_axis: Any) -> QK:
    choice = checks.check_implementation(NAME, options.implementation)
    tokens = check_tokens(NAME, arrays.q, heads_axis)
    q, k = tokens.x, check_k(NAME, arrays.k, tokens)
    norm = check_normalize(NAME, options.normalize)
    of_k = tokens._replace(x=k, name="k")
    q_scale = check_scale(NAME, "q_scale", arrays.q_scale, q.shape[tokens.heads_axis], tokens, norm)
    k_scale = check_scale(NAME, "k_scale", arrays.k_scale, k.shape[tokens.heads_axis], of_k, norm)
    rotation = check_rotation(NAME, rotation, tokens)
    fields = options.checked(NAME, q, rotation, (q, k, q_scale, k_scale))
    spec = QKNormRotary(heads_axis=tokens.heads_axis, **fields, **choice.asks(NAME))
    angles = angles_of(NAME, rotation, tokens, spec.compute_dtype)
    operands = Operands(q, k, q_scale, k_scale, **angles)
    return QK(*QK_NORM_ROTARY(spec, operands, choice.implementation))
