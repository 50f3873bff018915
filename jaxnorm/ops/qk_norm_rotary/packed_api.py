"""The public function of rotary embedding with the norms of queries and keys, of one product with the values."""

from typing import Any, NamedTuple

from jaxnorm.ops import checks
from jaxnorm.ops.misuse import explained
from jaxnorm.ops.options import Implementation
from jaxnorm.ops.qk_norm_rotary.api import Normalize, Options
from jaxnorm.ops.qk_norm_rotary.checks import Rotation, angles_of, check_normalize, check_rotation, check_scale
from jaxnorm.ops.qk_norm_rotary.packed import Operands, QKVNormRotary
from jaxnorm.ops.qk_norm_rotary.packed_checks import Beside, check_counts, check_packed
from jaxnorm.ops.qk_norm_rotary.packed_op import QKV_NORM_ROTARY
from jaxnorm.results import QKV

NAME = "qkv_norm_rotary"


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
    options = Options(epsilon, scale_offset, normalize, implementation)
    rotation = Rotation(positions, cos, sin, theta, frequencies, rotary_dim, interleaved)
    return _unpacked(options, rotation, Product(qkv, q_scale, k_scale, heads, kv_heads))


class Product(NamedTuple):
    """The arguments that are neither about the norm nor about the rotation, as a caller gave them."""

    qkv: Any
    q_scale: Any
    k_scale: Any
    heads: Any
    kv_heads: Any


def _unpacked(options: Options, rotation: Rotation, product: Product) -> QKV:
    choice = checks.check_implementation(NAME, options.implementation)
    counts = check_counts(NAME, product.heads, product.kv_heads)
    tokens = check_packed(NAME, product.qkv, counts, Beside(product.q_scale, product.k_scale, rotation))
    norm = check_normalize(NAME, options.normalize)
    q_scale = check_scale(NAME, "q_scale", product.q_scale, counts.q, tokens, norm)
    k_scale = check_scale(NAME, "k_scale", product.k_scale, counts.kv, tokens, norm)
    rotation = check_rotation(NAME, rotation, tokens)
    fields = options.checked(NAME, tokens.x, rotation, (tokens.x, q_scale, k_scale))
    spec = QKVNormRotary(heads=counts.q, kv_heads=counts.kv, **fields, **choice.asks(NAME))
    angles = angles_of(NAME, rotation, tokens, spec.compute_dtype)
    results = QKV_NORM_ROTARY(spec, Operands(tokens.x, q_scale, k_scale, **angles), choice.implementation)
    assert results.v_out is not None
    return QKV(results.q_out, results.k_out, results.v_out)
