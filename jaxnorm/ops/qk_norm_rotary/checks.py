"""What is checked of the arguments of `qk_norm_rotary` and `qkv_norm_rotary`, and made of them for their ops."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm.native import compat
from jaxnorm.ops import checks
from jaxnorm.ops.qk_norm_rotary.formula import HeadNorm
from jaxnorm.primitive import weights
from jaxnorm.sharding import dims

NORMALIZE: dict[Any, HeadNorm] = {True: "rms", "rms": "rms", "layer": "layer", False: "none"}


class Tokens(NamedTuple):
    """The tokens of an array of heads, as it is laid out."""

    x: jax.Array
    heads_axis: int  # -2 or -3
    name: str = "q"
    how: str = ""  # it is laid out, if not as it was given

    @property
    def axes(self) -> list[int]:
        """Those of x, counted from the end, that are neither the heads' nor a head's."""
        return [axis for axis in range(-self.x.ndim, -1) if axis != self.heads_axis]

    @property
    def shape(self) -> tuple[Any, ...]:
        return tuple(self.x.shape[axis] for axis in self.axes)

    @property
    def what(self) -> str:
        """x, in a message."""
        return f"{self.name}, which has shape {self.x.shape}{self.how}"


class Rotation(NamedTuple):
    """The keywords about the rotation, as a caller gave them, or checked: positions or tables are None then."""

    positions: Any
    cos: Any
    sin: Any
    theta: Any
    frequencies: Any
    rotary_dim: Any
    interleaved: Any

    @property
    def tables(self) -> tuple[Any, ...]:
        return self.frequencies, self.cos, self.sin


def check_tokens(function: str, q: Any, heads_axis: Any) -> Tokens:
    """q as an array of heads, of which the last axis has the elements."""
    q = checks.check_array(function, "q", q)
    axis = checks.check_int(function, "heads_axis", heads_axis, "pass -2 or -3")
    heads_axis = axis - q.ndim if axis >= 0 else axis
    if heads_axis not in (-2, -3) or q.ndim < -heads_axis:
        raise ValueError(
            f"{function}: heads_axis={axis} of q, which has shape {q.shape}, expected -2, of (..., tokens, heads, "
            f"head size), or -3, of (..., heads, tokens, head size). Transpose or reshape q."
        )
    return check_whole_heads(function, check_head_size(function, Tokens(q, heads_axis)))


def check_head_size(function: str, tokens: Tokens) -> Tokens:
    if not isinstance(tokens.x.shape[-1], int):
        raise ValueError(
            f"{function}: the last axis of {tokens.what}, has a symbolic length, expected a number: the frequencies "
            f"depend on it. Export the program for this head size."
        )
    return tokens


def check_whole_heads(function: str, tokens: Tokens) -> Tokens:
    if (shards := compat.shard_count(tokens.x, -1)) > 1:
        raise ValueError(
            f"{function}: the last axis of {tokens.what}, is split over {shards} devices of an Explicit mesh, and so "
            f"would be what is rotated together; shard the heads, or reshard {tokens.name}."
        )
    return tokens


def check_k(function: str, value: Any, tokens: Tokens) -> jax.Array:
    k, q = checks.check_array(function, "k", value), tokens.x
    expected = [n if axis - q.ndim != tokens.heads_axis else "any" for axis, n in enumerate(q.shape)]
    if k.ndim != q.ndim or any(want not in ("any", n) for n, want in zip(k.shape, expected, strict=True)):
        raise ValueError(
            f"{function}: k has shape {k.shape}, expected ({', '.join(map(str, expected))}): the tokens and the head "
            f"size of q, which has shape {q.shape}, and any number of heads on axis {tokens.heads_axis}. Are the heads "
            f"on another axis? Then pass heads_axis."
        )
    spec, q_spec = jax.typeof(k).sharding.spec, jax.typeof(q).sharding.spec
    if any(spec[axis] != q_spec[axis] for axis in (*tokens.axes, -1)):
        raise ValueError(
            f"{function}: k is sharded as {spec} over an Explicit mesh, expected the tokens to be sharded as q's are, "
            f"{q_spec}. Reshard k."
        )
    return k


def check_normalize(function: str, normalize: Any) -> HeadNorm:
    if not isinstance(normalize, (bool, np.bool, str)) or normalize not in NORMALIZE:
        error = ValueError if isinstance(normalize, str) else TypeError
        raise error(f"{function}: normalize must be True or 'rms', 'layer' or False, got {normalize!r}.")
    return NORMALIZE[normalize]


def check_rotary_dim(function: str, rotary_dim: Any, tokens: Tokens) -> int:
    cols: Any = tokens.x.shape[-1]
    if rotary_dim is None and cols % 2:
        raise ValueError(
            f"{function}: the last axis of {tokens.what}, has an odd length, of which no pairs can be made; pass "
            f"rotary_dim, how many of its elements are rotated."
        )
    if rotary_dim is None:
        dim = cols
    else:
        dim = checks.check_int(function, "rotary_dim", rotary_dim, "None rotates whole heads")
    if not 0 < dim <= cols or dim % 2:
        raise ValueError(
            f"{function}: rotary_dim={dim}, expected an even number from 2 to {cols}, the head size of "
            f"{tokens.what}. It is the number of rotated elements, not that of pairs."
        )
    return int(dim)


def check_scale(function: str, name: str, value: Any, heads: Any, tokens: Tokens, norm: HeadNorm) -> Any:
    """A scale as an array, of one head's shape or with a row for each of so many heads in x; None for None."""
    if value is None:
        return None
    scale = checks.check_array(function, name, value)
    if norm == "none":
        raise ValueError(
            f"{function}: {name} is given with normalize=False, expected None: a scale is of the norm. Leave it out, "
            f"or multiply before."
        )
    x, cols = tokens.x, tokens.x.shape[-1]
    if scale.shape not in ((cols,), (heads, cols)):
        remedy = "A number: did you mean scale_offset=...?" if scale.shape == () else f"Reshape {name}."
        raise ValueError(
            f"{function}: {name} has shape {scale.shape}, expected {(cols,)}, the head size of {tokens.what}, "
            f"or {(heads, cols)}, a scale for each head. {remedy}"
        )
    scale = checks.sharded_along(function, name, scale, tokens.name, x, (tokens.heads_axis, -1)[-scale.ndim :])
    # Kernels take none of no heads; as one for all of them it is read as seldom.
    return scale if scale.size or scale.ndim == 1 else jnp.sum(scale, 0)


def check_tables(
    function: str, cos: Any, sin: Any, tokens: Tokens, rotary_dim: int, interleaved: bool
) -> tuple[jax.Array, jax.Array] | None:
    """cos and sin as arrays, an element for each pair."""
    if cos is None and sin is None:
        return None
    if cos is None or sin is None:
        there, missing = ("sin", "cos") if cos is None else ("cos", "sin")
        raise ValueError(f"{function}: {there} is given without {missing}, expected both or neither; pass {missing}.")
    tables = []
    for name, table in (("cos", cos), ("sin", sin)):
        table = checks.check_array(function, name, table)
        width = table.shape[-1] if table.ndim else 0
        if width not in (rotary_dim // 2, rotary_dim) or not weights.are_batch_dims(table.shape[:-1], tokens.shape):
            raise ValueError(
                f"{function}: {name} has shape {table.shape}, expected rotary_dim / 2 = {rotary_dim // 2} elements, or "
                f"these twice, on the last axis, and before it what broadcasts against the tokens {tokens.shape} of "
                f"{tokens.what}. It has no axis for heads; where a part of a head is rotated, pass rotary_dim."
            )
        if width == rotary_dim:
            table = table[..., ::2] if interleaved else table[..., : rotary_dim // 2]
        tables.append(table)
    return tables[0], tables[1]


def check_positions(function: str, positions: Any, tokens: Tokens) -> jax.Array:
    """positions as an array; None counts along the last axis of tokens."""
    if positions is None:
        if not tokens.shape:
            raise ValueError(
                f"{function}: {tokens.name} has shape {tokens.x.shape}, without an axis of tokens to count positions "
                f"along; pass positions."
            )
        return jnp.arange(tokens.shape[-1])
    if isinstance(positions, bool) or not (isinstance(positions, int) or checks.is_array(positions)):
        raise TypeError(
            f"{function}: positions must be an array of integers or floats, got {type(positions).__name__}; pass "
            f"jax.numpy.asarray(positions)."
        )
    # Of integers of 64 bits jax.numpy makes others of 32.
    wide = isinstance(positions, (int, np.ndarray, np.generic)) and np.asarray(positions).dtype.str[1:] in ("i8", "u8")
    array = jnp.asarray(np.asarray(positions, np.float64) if wide else positions)
    if array.dtype == jnp.bool or not jnp.issubdtype(array.dtype, jnp.number) or jnp.iscomplexobj(array):
        raise TypeError(f"{function}: positions must be integers or floats, got {array.dtype}; convert them first.")
    if not weights.are_batch_dims(array.shape, tokens.shape):
        raise ValueError(
            f"{function}: positions has shape {array.shape}, expected what broadcasts against the tokens "
            f"{tokens.shape} of {tokens.what}. Reshape positions, as with positions[:, None] for one of each sequence."
        )
    return array


def check_theta(function: str, theta: Any) -> float:
    number = checks.check_number(function, "theta", theta)
    if number <= 0:
        raise ValueError(f"{function}: theta must be positive, got {number}; 10000.0 is usual.")
    return number


def check_frequencies(function: str, frequencies: Any, rotary_dim: int) -> jax.Array | None:
    if frequencies is None:
        return None
    array = checks.check_array(function, "frequencies", frequencies)
    if array.shape != (rotary_dim // 2,):
        raise ValueError(
            f"{function}: frequencies has shape {array.shape}, expected {(rotary_dim // 2,)}, one for each pair of the "
            f"{rotary_dim} elements that are rotated. Where a part of a head is rotated, pass rotary_dim."
        )
    return array


def check_rotation(function: str, rotation: Rotation, tokens: Tokens) -> Rotation:
    dim = check_rotary_dim(function, rotation.rotary_dim, tokens)
    interleaved = checks.check_flag(function, "interleaved", rotation.interleaved)
    tables = check_tables(function, rotation.cos, rotation.sin, tokens, dim, interleaved)
    theta = check_theta(function, rotation.theta)
    if tables is None:
        positions = check_positions(function, rotation.positions, tokens)
        frequencies = check_frequencies(function, rotation.frequencies, dim)
        return Rotation(positions, None, None, theta, frequencies, dim, interleaved)
    for name in ("positions", "frequencies"):
        if getattr(rotation, name) is not None:
            raise ValueError(
                f"{function}: {name} and the tables cos and sin are given, expected one of the two: the tables have "
                f"the angles of all tokens. Leave {name} out, or cos and sin."
            )
    return Rotation(None, *tables, theta, None, dim, interleaved)


def angles_of(function: str, rotation: Rotation, tokens: Tokens, dtype: Any) -> dict[str, jax.Array]:
    """The operands of the op that say the angles, of this dtype; they have no derivative."""
    if rotation.cos is not None:
        tables = {"cos": rotation.cos, "sin": rotation.sin}
        return {name: by_token(function, name, table.astype(dtype), tokens) for name, table in tables.items()}
    dim, frequencies = rotation.rotary_dim, rotation.frequencies
    if frequencies is None:  # in float64, rounded once
        frequencies = jnp.asarray(rotation.theta ** (-np.arange(0, dim, 2) / dim), dtype)
    return {
        "positions": by_token(function, "positions", rotation.positions.astype(dtype), tokens),
        "frequencies": lax.stop_gradient(frequencies.astype(dtype)),
    }


def by_token(function: str, name: str, table: jax.Array, tokens: Tokens) -> jax.Array:
    """Positions or a table, with an axis for each of the tokens', that have no derivative.

    Kernels find a token's row along two runs of axes at most. One of them is kept for those in front, that vmap adds.
    """
    shape, own = tokens.shape, 0 if name == "positions" else 1
    table = lax.expand_dims(lax.stop_gradient(table), range(len(shape) + own - table.ndim))
    table = checks.sharded_along(function, name, table, tokens.name, tokens.x, (*tokens.axes, *[None] * own))
    counted = [axis for axis, n in enumerate(shape) if n != 1]
    differ = [axis for axis in counted if table.shape[axis] != 1]
    in_front = [axis for i, axis in enumerate(counted) if differ[: i + 1] == counted[: i + 1]]
    behind = [axis for axis in differ if axis not in in_front]
    if not behind:
        return table
    run = range(behind[0], behind[-1] + 1)
    whole = [shape[axis] if axis in run else n for axis, n in enumerate(table.shape)]
    if tuple(whole) == table.shape:
        return table
    axes = (*(None if n == 1 else axis for n, axis in zip(whole, tokens.axes, strict=False)), *[None] * own)
    return dims.broadcast(table, whole, jax.typeof(tokens.x), axes)


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
