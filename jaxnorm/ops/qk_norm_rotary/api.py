"""The public functions: queries and keys apart, or in one product with the values."""

from typing import Any, Literal

from jaxnorm.ops import checks
from jaxnorm.ops.misuse import explained
from jaxnorm.ops.norm.checks import of_every_norm
from jaxnorm.ops.options import Implementation
from jaxnorm.ops.qk_norm_rotary import checks as own_checks
from jaxnorm.ops.qk_norm_rotary.formula import Operands, QKNormRotary
from jaxnorm.ops.qk_norm_rotary.op import QK_NORM_ROTARY
from jaxnorm.ops.qk_norm_rotary.packed import QKV_NORM_ROTARY, Operands as PackedOperands, QKVNormRotary
from jaxnorm.results import QK, QKV

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

    and k likewise, by the angle position * frequency. It computes, rounds and transforms as `rms_norm` does. q, k and
    the scales have gradients; those of positions, frequencies and tables are zero.

    Args:
      q: floating-point array (..., tokens, heads, head size), or (..., heads, tokens, head size) with heads_axis=-3.
      k: array like q, with any number of heads. Kernels want q and k of one dtype.
      q_scale: factor of q's norm, of the head size, or (heads, head size); None is 1. k_scale is that of k's.
      cos: in place of positions, with sin: a table whose last axis has an element for each pair, or, as in models of
        the hubs, for each element.

    Returns:
      `QK`, (q, k): arrays of the shapes and dtypes of q and k.

    Raises:
      ValueError, TypeError, RuntimeError: arrays or options do not go with each other; otherwise as `rms_norm` does.

    Source: RoFormer, https://arxiv.org/abs/2104.09864; Query-Key Normalization, https://arxiv.org/abs/2010.04245.
    """
    name = "qk_norm_rotary"
    choice = checks.check_implementation(name, implementation)
    tokens = own_checks.check_tokens(name, q, heads_axis)
    q, k = tokens.x, own_checks.check_k(name, k, tokens)
    norm = own_checks.check_normalize(name, normalize)
    of_k = tokens._replace(x=k, name="k")
    q_scale = own_checks.check_scale(name, "q_scale", q_scale, q.shape[tokens.heads_axis], tokens, norm)
    k_scale = own_checks.check_scale(name, "k_scale", k_scale, k.shape[tokens.heads_axis], of_k, norm)
    given = own_checks.Rotation(positions, cos, sin, theta, frequencies, rotary_dim, interleaved)
    rotation = own_checks.check_rotation(name, given, tokens)
    spec = QKNormRotary(
        norm=norm,
        heads_axis=tokens.heads_axis,
        rotary_dim=rotation.rotary_dim,
        interleaved=rotation.interleaved,
        **of_every_norm(name, choice, epsilon, scale_offset, q.dtype, (q, k, q_scale, k_scale, *rotation.tables)),
    )
    operands = Operands(q, k, q_scale, k_scale, **own_checks.angles_of(name, rotation, tokens, spec.compute_dtype))
    return QK(*QK_NORM_ROTARY(spec, operands, choice.implementation))


@explained
def qkv_norm_rotary(
    qkv: Any,
    q_scale: Any = None,
    k_scale: Any = None,
    positions: Any = None,
    *,
    heads: int,
    kv_heads: int,
    cos: Any = None,
    sin: Any = None,
    theta: float = 10000.0,
    frequencies: Any = None,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    normalize: Normalize = True,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    implementation: Implementation | None = None,
) -> QKV:
    """Takes queries, keys and values out of their one product, and normalises and rotates the queries and keys.

        q, k, v = split(qkv, [heads, heads + kv_heads], axis=-2)      by heads: those of q, then of k, then of v
        q, k = qk_norm_rotary(q, k, q_scale, k_scale, positions, ...)

        >>> q, k, v = qkv_norm_rotary(jnp.ones((2, 6, 8, 16)), jnp.ones(16), jnp.ones(16), heads=4, kv_heads=2)

    One call reads each where it lies, and another writes the gradient, one array like qkv: nothing is sliced or
    concatenated. v is copied as it is, unless a program does not read it.

    Args:
      qkv: floating-point array (..., tokens, heads + 2 * kv_heads, head size); or of at most three axes with all heads
        along the last, (batch, tokens, (heads + 2 * kv_heads) * head size).
      q_scale: factor of q's norm, of the head size, or (heads, head size).
      k_scale: factor of k's norm, of the head size, or (kv_heads, head size). The others are as for `qk_norm_rotary`.

    Returns:
      `QKV`, (q, k, v): arrays (..., tokens, heads, head size), and kv_heads, of qkv's dtype.

    Raises:
      ValueError, TypeError, RuntimeError: qkv has another shape, or one that can be read in both ways: reshape it to
        four axes; or as `qk_norm_rotary`.

    Source: as for `qk_norm_rotary`.
    """
    name = "qkv_norm_rotary"
    choice = checks.check_implementation(name, implementation)
    counts = own_checks.check_counts(name, heads, kv_heads)
    given = own_checks.Rotation(positions, cos, sin, theta, frequencies, rotary_dim, interleaved)
    tokens = own_checks.check_packed(name, qkv, counts, own_checks.Beside(q_scale, k_scale, given))
    x, norm = tokens.x, own_checks.check_normalize(name, normalize)
    q_scale = own_checks.check_scale(name, "q_scale", q_scale, counts.q, tokens, norm)
    k_scale = own_checks.check_scale(name, "k_scale", k_scale, counts.kv, tokens, norm)
    rotation = own_checks.check_rotation(name, given, tokens)
    spec = QKVNormRotary(
        norm=norm,
        heads=counts.q,
        kv_heads=counts.kv,
        rotary_dim=rotation.rotary_dim,
        interleaved=rotation.interleaved,
        **of_every_norm(name, choice, epsilon, scale_offset, x.dtype, (x, q_scale, k_scale, *rotation.tables)),
    )
    operands = PackedOperands(x, q_scale, k_scale, **own_checks.angles_of(name, rotation, tokens, spec.compute_dtype))
    results = QKV_NORM_ROTARY(spec, operands, choice.implementation)
    assert results.v_out is not None
    return QKV(results.q_out, results.k_out, results.v_out)
