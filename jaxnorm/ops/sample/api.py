"""The public function `sample`."""

from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm.ops import checks, misuse
from jaxnorm.ops.mask import check_booleans, does_not_broadcast, fitted
from jaxnorm.ops.misuse import explained
from jaxnorm.ops.options import Implementation
from jaxnorm.ops.sample.formula import Operands, Results, Sample, differentiable
from jaxnorm.ops.sample.op import SAMPLE
from jaxnorm.primitive import broadcast, weights
from jaxnorm.sharding import dims

_MOST = 2**31 - 1


class _Options(TypedDict, total=False):
    """For type checkers: the keywords that do not decide what is returned."""

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    where: Any
    uniform: Any
    implementation: Implementation | None


@overload
def sample(
    logits: Any, key: Any = None, *, return_log_prob: Literal[False] = False, **_: Unpack[_Options]
) -> jax.Array: ...


@overload
def sample(
    logits: Any, key: Any = None, *, return_log_prob: Literal[True], **_: Unpack[_Options]
) -> tuple[jax.Array, jax.Array]: ...


@explained
def sample(
    logits: Any,
    key: Any = None,
    *,
    temperature: Any = 1.0,
    top_k: Any = None,
    top_p: Any = None,
    min_p: Any = None,
    where: Any = None,
    uniform: Any = None,
    return_log_prob: bool = False,
    implementation: Implementation | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Draws a column of each row of logits, as the next token, by one uniform number a row.

        p = softmax(logits / temperature)     over what top_k, top_p and min_p keep of what the one before left
        id = the first column with cumsum(p) > uniform

        >>> ids = sample(jnp.ones((2, 8)), jax.random.key(0), temperature=0.7, top_k=jnp.array([1, 4]), top_p=0.9)

    It computes in float32, for float64 in float64. A row's id depends on its logits and its numbers alone.

    Args:
      logits: floating-point array of rank 1 or more, with the columns along the last axis.
      key: a key of `jax.random`: uniform is `jax.random.uniform(key, rows)`; for several keys use `jax.vmap`.
      temperature: divides logits, from 0 on; 0 takes the largest logit, of equals the first.
      uniform: in key's place, numbers in [0, 1) that broadcast to the leading axes of logits.

    Returns:
      int32 of the leading axes of logits: -1 where a row has NaN, +inf, nothing above -inf, or a number out of range
      that is traced or in an array. With return_log_prob a pair of it and log(p[id]), float32 or float64, NaN where id
      is -1, with a derivative by logits and temperature that takes id and what is kept as constant.

    Raises:
      ValueError, TypeError, RuntimeError: both or none of key and uniform, numbers out of range; or as `rms_norm`.

    Source: top_p: https://arxiv.org/abs/1904.09751; min_p: https://arxiv.org/abs/2407.01082.
    """
    name = "sample"
    with_log = checks.check_flag(name, "return_log_prob", return_log_prob)
    choice = checks.check_implementation(name, implementation)
    logits = checks.check_x(name, logits, "logits")
    wide = dims.wide_dtype([logits.dtype])
    settings = _Settings(temperature, top_k, top_p, min_p).of_rows(logits, wide)
    is_greedy = _is_number(temperature) and temperature == 0
    uniform = _uniform(logits, wide, key, uniform, is_drawn=not is_greedy)
    operands = Operands(logits, uniform, *settings, _where(where, logits))
    spec = Sample(compute_dtype=wide, out_dtype=wide, is_greedy=is_greedy, **choice.asks(name))
    # What is drawn has no derivative, and needs none traced.
    results: Results = SAMPLE(spec, jax.tree.map(lax.stop_gradient, operands), choice.implementation)
    ids = lax.squeeze(results.ids, (logits.ndim - 1,))
    if not with_log:
        return ids
    return ids, lax.squeeze(differentiable(spec, operands, results), (logits.ndim - 1,))


class _Settings(NamedTuple):
    """The numbers of rows beside the uniform ones, as a caller gave them or `of_rows`."""

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any

    def of_rows(self, logits: jax.Array, wide: np.dtype[Any]) -> "_Settings":
        """A number for each row; None for a filter that keeps all of every row."""
        temperature, top_k, top_p, min_p = self
        cols = logits.shape[-1]
        if _is_number(temperature):
            temperature = checks.check_not_negative("sample", "temperature", temperature, "0 is the largest logit")
        if top_k is not None and _is_number(top_k):
            top_k = checks.check_int("sample", "top_k", top_k, "None keeps all")
            if top_k < -1:
                raise ValueError(f"sample: top_k must be positive, or 0 or -1 for all, got {top_k}.")
            top_k = None if top_k <= 0 or (isinstance(cols, int) and top_k >= cols) else min(top_k, _MOST)
        if top_p is not None and _is_number(top_p):
            top_p = checks.check_number("sample", "top_p", top_p)
            top_p = None if top_p >= 1 else top_p
        if min_p is not None and _is_number(min_p):
            min_p = checks.check_not_negative("sample", "min_p", min_p, "0 keeps all") or None
        return _Settings(
            _of_rows("temperature", temperature, logits, wide),
            _of_rows("top_k", top_k, logits, np.dtype(np.int32)),
            _of_rows("top_p", top_p, logits, wide),
            _of_rows("min_p", min_p, logits, wide),
        )


def _is_number(value: Any) -> bool:
    """Whether it is no array; it may be no number either, which a check says then."""
    return isinstance(value, np.generic) or not checks.is_array(value)


def _of_rows(name: str, value: Any, logits: jax.Array, dtype: np.dtype[Any]) -> jax.Array | None:
    """A number, or an array that broadcasts to the leading axes of logits, with logits' rank; None for None."""
    if value is None:
        return None
    given: Any = np.asarray(value) if _is_number(value) else value
    given = given if isinstance(given, (np.ndarray, jax.Array)) else jnp.asarray(given)
    kinds = (jnp.integer,) if dtype == np.int32 else (jnp.floating, jnp.integer)
    if not any(jnp.issubdtype(given.dtype, kind) for kind in kinds):
        what = "integers" if dtype == np.int32 else "numbers"
        raise TypeError(f"sample: {name} must be a number or an array of {what}, got {given.dtype}.")
    leading = logits.shape[:-1]
    if not weights.are_batch_dims(given.shape, leading):
        raise ValueError(
            f"sample: {name} has shape {given.shape}, expected one that broadcasts to {leading}: the leading axes of "
            f"logits, which have shape {logits.shape}."
        )
    array = jnp.asarray(_narrowed(given, dtype))
    array = lax.expand_dims(array, (*range(logits.ndim - 1 - array.ndim), logits.ndim - 1))
    array = checks.sharded_along("sample", name, array, "logits", logits, broadcast.dim_map(array.shape))
    shape = (*leading, 1)
    return array if array.shape == shape else dims.broadcast(array, shape, jax.typeof(logits), broadcast.dim_map(shape))


def _narrowed(array: Any, dtype: np.dtype[Any]) -> Any:
    """As this dtype: of integers none becomes another number, and what is below 1 stays so."""
    of = np if isinstance(array, np.ndarray) else jnp
    if dtype == np.int32:
        if array.dtype.itemsize < 4:
            return array.astype(dtype)
        info = np.iinfo(array.dtype)
        return of.clip(array, max(-_MOST, int(info.min)), min(_MOST, int(info.max))).astype(dtype)
    if array.dtype.itemsize <= dtype.itemsize:
        return array.astype(dtype)
    below_1 = np.nextafter(dtype.type(1), dtype.type(0))
    return of.where(array < 1, of.minimum(array.astype(dtype), below_1), array.astype(dtype))


def _uniform(logits: jax.Array, wide: np.dtype[Any], key: Any, uniform: Any, *, is_drawn: bool) -> jax.Array:
    """The uniform numbers, given or drawn, with logits' rank; zeros where nothing is drawn."""
    if (key is None) is (uniform is None):
        raise ValueError(
            f"sample: {'neither of key and uniform' if key is None else 'both key and uniform'} came, expected one of "
            "them, also where temperature is 0; pass key=jax.random.key(seed), or uniform=... in its place."
        )
    if uniform is None:
        key, rows = _check_key(key), logits.shape[:-1]
        uniform = jax.random.uniform(key, rows, wide) if is_drawn else 0.0
    elif _is_number(uniform):
        uniform = checks.check_number("sample", "uniform", uniform)
        if not 0 <= uniform < 1:
            raise ValueError(f"sample: uniform must be in [0, 1), got {uniform}.")
    array = _of_rows("uniform", uniform, logits, wide)
    assert array is not None
    return array


def _check_key(key: Any) -> jax.Array:
    """A key of jax.random, of a type of its own or as uint32."""
    is_typed = hasattr(key, "dtype") and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not is_typed and not (checks.is_array(key) and key.dtype == np.uint32 and key.ndim > 0):
        got = getattr(key, "dtype", None) or type(key).__name__
        remedy = "pass jax.random.key(seed)" if misuse.is_number(key) else "pass uniform=... for numbers"
        raise TypeError(f"sample: key must be a key of jax.random, got {got}; {remedy}.")
    if key.ndim > (0 if is_typed else 1):
        raise ValueError(
            f"sample: key has shape {key.shape}, expected one key; of several use jax.vmap, as with "
            "jax.vmap(jaxnorm.sample)(logits, keys)."
        )
    return jnp.asarray(key)


def _where(value: Any, logits: jax.Array) -> jax.Array | None:
    """The mask with all columns of a row, or None."""
    if value is None:
        return None
    where = check_booleans("sample", value)
    if not weights.are_batch_dims(where.shape, logits.shape):
        raise does_not_broadcast("sample", where, logits, "that of logits")
    where = fitted("sample", where, logits, (-1,))
    shape = (*where.shape[:-1], logits.shape[-1])
    return where if where.shape == shape else dims.broadcast(where, shape, jax.typeof(logits), broadcast.dim_map(shape))
