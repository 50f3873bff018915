"""How the one product of queries, keys and values is laid out, found from its shape and what comes with it."""

from typing import Any, NamedTuple

import jax
import numpy as np

from jaxnorm.native import compat
from jaxnorm.ops import checks
from jaxnorm.ops.qk_norm_rotary.checks import Rotation, Tokens, check_head_size, check_whole_heads
from jaxnorm.primitive import weights
from jaxnorm.sharding import dims


class Heads(NamedTuple):
    """How many there are: of q, and of each of k and v."""

    q: int
    kv: int

    @property
    def packed(self) -> int:
        return self.q + 2 * self.kv


def check_counts(function: str, heads: Any, kv_heads: Any) -> Heads:
    counts = []
    for name, value, of in (("heads", heads, "queries"), ("kv_heads", kv_heads, "keys, as many as values")):
        count = checks.check_int(function, name, value, f"pass the number of heads of {of}")
        if count < 1:
            raise ValueError(f"{function}: {name} must be positive, got {count}; it is the number of heads of {of}.")
        counts.append(count)
    return Heads(*counts)


class Beside(NamedTuple):
    """What comes with qkv and tells a head's size, or the tokens, unchecked."""

    q_scale: Any
    k_scale: Any
    rotation: Rotation

    def fits(self, tokens: tuple[Any, ...], cols: int) -> bool:
        positions, rotary_dim = self.rotation.positions, self.rotation.rotary_dim
        dim = rotary_dim if isinstance(rotary_dim, int) else cols
        pairs = ((table, (dim // 2, dim)) for table in self.rotation.tables)
        lengths = [(self.q_scale, (cols,)), (self.k_scale, (cols,)), *pairs]
        fit = (np.shape(array)[-1:] in [(n,) for n in known] for array, known in lengths if array is not None)
        return (positions is None or weights.are_batch_dims(np.shape(positions), tokens)) and all(fit)


def check_packed(function: str, value: Any, heads: Heads, beside: Beside) -> Tokens:
    """qkv as an array of heads, of which the last axis has the elements.

    Of four axes or more, the last two are heads and elements. Of fewer, the last may have both. A shape that can be
    read in both ways is read as fits what comes with it, and is an error where that tells nothing: as many tokens as
    heads are no reason to read them otherwise than others.
    """
    qkv = checks.check_array(function, "qkv", value)
    *tokens, last = check_head_size(function, Tokens(qkv, -2, "qkv")).x.shape if qkv.ndim else (0,)
    by_heads = bool(tokens) and isinstance(tokens[-1], int) and tokens[-1] == heads.packed
    is_flat = qkv.ndim in (1, 2, 3) and last > 0 and last % heads.packed == 0
    if by_heads and is_flat:
        fit = beside.fits(tuple(tokens[:-1]), last), beside.fits(tuple(tokens), last // heads.packed)
        if fit[0] == fit[1]:
            raise _both(function, qkv.shape, heads)
        by_heads, is_flat = fit
    if by_heads:
        return check_whole_heads(function, Tokens(_with_heads_on(function, qkv, -2, heads), -2, "qkv"))
    if not is_flat:
        raise ValueError(
            f"{function}: qkv has shape {qkv.shape}, expected (..., tokens, {heads.packed}, head size), with "
            f"heads + 2 * kv_heads = {heads.packed} heads on the last axis but one, or (batch, tokens, {heads.packed} "
            f"* head size), of at most three axes. Reshape qkv."
        )
    shape = (*tokens, heads.packed, last // heads.packed)
    return Tokens(_with_heads_on(function, qkv, -1, heads).reshape(shape), -2, "qkv", " by heads")


def _both(function: str, shape: tuple[Any, ...], heads: Heads) -> ValueError:
    *tokens, last = shape
    whole = (1,) * (4 - len(shape)) + shape
    split = (1,) * (3 - len(shape)) + (*tokens, heads.packed, last // heads.packed)
    return ValueError(
        f"{function}: qkv has shape {shape}, in which the {heads.packed} heads may be the last axis but one, or in the "
        f"last axis. Reshape it to {whole}, or to {split}: of four axes, the last two are heads and elements."
    )


def _with_heads_on(function: str, qkv: jax.Array, axis: int, heads: Heads) -> jax.Array:
    """qkv, whose heads are along this axis, in parts of which each has heads of q, of k or of v, or all."""
    shards = compat.shard_count(qkv, axis)
    if any(count % shards for count in heads):
        raise ValueError(
            f"{function}: the heads of qkv, which has shape {qkv.shape}, are split over {shards} devices of an "
            f"Explicit mesh, which do not divide heads={heads.q} and kv_heads={heads.kv}. Reshard qkv, so that each "
            f"device has all heads of its tokens."
        )
    return dims.unsharded(qkv, axis) if shards == 1 else qkv
