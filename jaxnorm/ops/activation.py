"""Activations: their formulas, and the names and functions that a caller has for them."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad

from jaxnorm.native import private
from jaxnorm.ops import checks
from jaxnorm.primitive.rules import Rules, no_tangent

# A function of jax.nn, or another name, in place of ours.
Synonym = Literal["swish"] | Callable[..., Any]
_NAMES = {"swish": "silu"}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "silu": jax.nn.silu,
    "sigmoid": jax.nn.sigmoid,
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
}
_ROOT, _CUBIC = math.sqrt(8 / math.pi), 0.044715


class Formula(NamedTuple):
    plain: Callable[[jax.Array], jax.Array]
    sloped: Callable[[jax.Array, jax.Array], jax.Array]  # (d, v) -> d times the slope at v

    def of(self, v: jax.Array) -> jax.Array:
        """The activation of v, whose derivative is `sloped`.

        A primitive: `jax.experimental.jet` takes no `custom_jvp`, and what JAX makes of `plain` multiplies before it
        adds, so that an infinity times a slope has NaN where kernels have infinity.
        """
        activated: jax.Array
        (activated,) = _ACTIVATION.primitive.bind(v, formula=self)
        return activated


def _times_logistic(w: Callable[[jax.Array], jax.Array], w_slope: Callable[[jax.Array], jax.Array | float]) -> Formula:
    """v * logistic(w(v)). 1 - logistic(w) is logistic(-w), which loses nothing where it is small."""
    return Formula(
        lambda v: v * lax.logistic(w(v)),
        lambda d, v: d * (lax.logistic(w(v)) + v * (lax.logistic(w(v)) * lax.logistic(-w(v))) * w_slope(v)),
    )


def _of_near(w: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """w of v, or of a bound beyond which logistic(w) is 0 or 1 and its slope 0, not 0 times infinity."""

    def of(v: jax.Array) -> jax.Array:
        # `jax.experimental.jet` cannot take `jnp.clip`. At an infinite v the slope is none, as in `jax.nn`.
        near = jnp.where(v > 64, 64, jnp.where(v < -64, -64, v))
        return w(jnp.where(jnp.abs(v) == jnp.inf, v, near))

    return of


def _relu(v: jax.Array, power: int = 1) -> jax.Array:
    """As `jax.nn.relu`, which `jax.experimental.jet` cannot take: NaN stays, and the slope at 0 and NaN is 0."""
    return jnp.where(jnp.isnan(v), lax.stop_gradient(v), jnp.where(v > 0, v, 0) ** power)


def _where_positive(d: jax.Array, v: jax.Array) -> jax.Array:
    """d where v is positive: nothing passes elsewhere, an infinity neither."""
    return jnp.where(v > 0, d, jnp.zeros_like(d))


# By powers of s from -0.5 to 0.5 the share of the normal distribution below s - 1, off by 4e-9 of it at most: the least
# relative squares at the zeros of a Chebyshev polynomial.
_NEAR_MINUS_ONE = (
    *(0.158655254, 0.241970734, 0.120985301, -5.45669123e-07, -0.0201629756),
    *(-0.00402450022, 0.00200822465, 0.000721462527, -0.000102827785),
)


def _normal(v: jax.Array) -> jax.Array:
    """The share of the normal distribution below v."""
    share = 0.5 * lax.erfc(-math.sqrt(0.5) * v)
    if v.dtype != jnp.float32:
        return share
    # Here `lax.erfc` subtracts a number near 1 from 1, and loses digits of float32.
    is_near = (v > -1.5) & (v < -0.5)
    s = jnp.where(is_near, v + 1, 0)
    series = jnp.full_like(s, _NEAR_MINUS_ONE[-1])
    for factor in _NEAR_MINUS_ONE[-2::-1]:  # `jnp.polyval` scans, and fails on an Explicit mesh
        series = series * s + factor
    return jnp.where(is_near, series, share)


class _Activation(Rules):
    is_checked = False

    def abstract(self, *types: Any, formula: Formula) -> list[Any]:
        return [types[0].update(weak_type=False)]

    def formula(self, *values: jax.Array, formula: Formula) -> list[jax.Array]:
        return [formula.plain(*values)]

    def batch(self, values: Any, axes: Any, *, formula: Formula) -> tuple[Any, Any]:
        return self.primitive.bind(*values, formula=formula), axes

    def jvp(self, primals: Any, dots: Any, *, formula: Formula) -> tuple[Any, Any]:
        ((v,), (dot,)) = primals, dots
        y = formula.of(v)
        return [y], [no_tangent(y) if type(dot) is ad.Zero else formula.sloped(dot, v)]

    def jet(self, primals: Any, series: Any, *, formula: Formula) -> tuple[Any, Any]:
        y, terms = private.jet_of_formula(formula.plain, primals, series)
        return [y], [terms]


_ACTIVATION = _Activation("jaxnorm_activation")

FORMULAS: dict[str | None, Formula] = {
    None: Formula(lambda v: v, lambda d, _: d),
    "silu": _times_logistic(lambda v: v, lambda _: 1.0),
    "sigmoid": Formula(lax.logistic, lambda d, v: d * lax.logistic(v) * lax.logistic(-v)),
    "relu": Formula(_relu, _where_positive),
    "relu2": Formula(lambda v: _relu(v, 2), lambda d, v: _where_positive(d * _where_positive(2 * v, v), v)),
    # With tanh, as `jax.nn.gelu` writes it, a small result would lose its digits in a sum with 1.
    "gelu": _times_logistic(
        _of_near(lambda v: _ROOT * (v + _CUBIC * v**3)), _of_near(lambda v: _ROOT * (1 + 3 * _CUBIC * v**2))
    ),
    "gelu_exact": Formula(
        lambda v: v * _normal(v), lambda d, v: d * (_normal(v) + v * (jnp.exp(-0.5 * v**2) / math.sqrt(2 * math.pi)))
    ),
}


def check_activation(function: str, activation: Any, known: Sequence[str | None]) -> Any:
    """One of the known names, for what is asked for."""
    if not callable(activation):
        is_synonym = isinstance(activation, str) and activation in _NAMES
        return checks.check_one_of(function, "activation", _NAMES[activation] if is_synonym else activation, known)
    for name, meant in _FUNCTIONS.items():
        if _parts(activation) == _parts(meant) and name in known:
            return name
    *others, last = map(repr, known)
    raise ValueError(
        f"{function}: unknown activation {activation!r}; expected {', '.join(others)} or {last}, or that function of "
        f"jax.nn as it stands. Take another one of the result."
    )


def _parts(function: Callable[..., Any]) -> Any:
    """What two functions have alike that are the same with the same arguments."""
    if isinstance(function, functools.partial):
        return function.func, function.args, function.keywords
    return function
