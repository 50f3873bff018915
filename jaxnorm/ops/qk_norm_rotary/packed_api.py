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
    return_v: bool = True,
    implementation: Implementation | None = None,
) -> QKV:
    """Takes queries, keys and values out of their one product, and normalises and rotates the queries and keys.

        q, k, v = split(qkv, [heads, heads + kv_heads], axis=-2)      by heads: those of q, then of k, then of v
        q, k = qk_norm_rotary(q, k, q_scale, k_scale, positions, ...)

    One call reads each where it lies, and another writes the gradient, one array like qkv: nothing is sliced or
    concatenated. v is copied as it is. For a gradient qkv is kept, and what `qk_norm_rotary` keeps beside q and k; with
    normalize=False positions or tables alone. A v that a program does not read is not copied, and its part of the
    gradient is 0.

    Args:
      qkv: floating-point array (..., tokens, heads + 2 * kv_heads, head size); or of at most three axes with all heads
        along the last, (batch, tokens, (heads + 2 * kv_heads) * head size). One token may come without its axis, with
        positions. A device is to have all heads of its tokens: over a mesh, Auto axes that split them are gathered, and
        with Explicit ones XLA's code runs.
      q_scale: factor of q's norm, of the head size, or (heads, head size).
      k_scale: factor of k's norm, of the head size, or (kv_heads, head size).
      heads: how many heads q has.
      kv_heads: how many heads each of k and v has.
      positions: as for `qk_norm_rotary`.
      cos: as for `qk_norm_rotary`.
      sin: as for `qk_norm_rotary`.
      theta: as for `qk_norm_rotary`.
      frequencies: as for `qk_norm_rotary`.
      rotary_dim: as for `qk_norm_rotary`.
      interleaved: as for `qk_norm_rotary`.
      normalize: as for `qk_norm_rotary`.
      epsilon: as for `qk_norm_rotary`.
      scale_offset: as for `qk_norm_rotary`.
      implementation: as for `qk_norm_rotary`.

    Returns:
      `QKV`, (q, k, v): arrays (..., tokens, heads, head size), and kv_heads, of qkv's dtype.

    Raises:
      ValueError: qkv has another shape, or one of at most three axes that can be read in both ways, of which no scale,
        positions or table tells one: reshape it to four; heads or kv_heads is not positive; an Explicit mesh splits the
        heads into parts that do not divide both numbers; otherwise as `qk_norm_rotary` does.
      TypeError, RuntimeError: as `rms_norm` does.

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
