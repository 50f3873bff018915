"""Finds what a norm of a model's own class computes: it is called on random rows and compared with the formulas."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm.flax import formula
from jaxnorm.flax.formula import Formula, Own
from jaxnorm.flax.subject import DTYPES, F32, Call, NoMatch, Subject

ROWS = 12
# Of x; the first that a module takes serves to find the formula.
LEADING = {3: (3, 4), 4: (2, 3, 2), 2: (12,)}
# Of a row's largest element: some hundred roundings of float32, which a sum over a long row has; four of a half type,
# as a module may round the statistics, x_hat and the product.
LIMIT, ROUNDINGS = 1e-5, 4
TINY = 1e-15  # its square is far below any epsilon, and a normal number
Values = dict[str, np.ndarray[Any, Any]]


class Matcher:
    """The formulas of a model's modules, of which `lines` gets the text. Modules that are alike are tried once."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines
        self._found: list[tuple[Any, Subject, Own | str]] = []

    def __call__(self, subject: Subject) -> Own | str:
        """The formulas of a module, or why it has none."""
        key = (subject.cls, subject.shapes, {name: _key(value) for name, value in subject.attributes.items()})
        # The subject is kept, so that no other object gets the id of one of its attributes.
        for of, _, found in self._found:
            if of == key:
                return found
        # What JAX and Flax are tracing around here, and their contexts, belong to this thread.
        with ThreadPoolExecutor(1) as thread:
            found = thread.submit(_match, subject).result()
        self._found.append((key, subject, found))
        if isinstance(found, Own) and found.text not in self._lines:
            self._lines.append(found.text)
        return found


def _is_dtype(value: Any) -> bool:
    """Whether an attribute names a floating-point dtype."""
    return isinstance(value, type | np.dtype) and jnp.issubdtype(value, jnp.floating)


def _key(value: Any) -> Any:
    return value if isinstance(value, int | float | str | type | np.dtype | None) else id(value)


def _match(subject: Subject) -> Own | str:
    names = formula.arguments(subject.cls)
    required = formula.required(subject.cls)
    found: list[Formula | None] = []
    whys = []
    for arrays in (1, 2):
        if len(names) < arrays or required > arrays:
            found.append(None)
            continue
        try:
            found.append(_find(subject, arrays == 2))
        except NoMatch as why:
            found.append(None)
            whys.append(str(why))
        except Exception as error:
            found.append(None)
            whys.append(f"its call on random rows raises {type(error).__name__}: {str(error).partition(chr(10))[0]}")
    return Own(subject.cls, *found) if any(found) else next(iter(whys), "its call takes no array, or more than two")


def _find(subject: Subject, gated: bool) -> Formula:
    """The formula by calls in float32, then what is rounded where, and which dtype results have, by calls in each."""
    values = _values(subject)
    wide = {name: F32 for name, value in subject.attributes.items() if _is_dtype(value)}
    call = subject.copy({name: jnp.asarray(value) for name, value in values.items()}, wide)
    ranks = _ranks(call, _rows(subject, 1.0, gated))
    wide_values = {name: jnp.asarray(value) for name, value in values.items()}
    rows = _rows(subject, 100.0, gated)
    nearest = _nearest(_called(call, rows, ranks[0]), _candidates(subject, gated), wide_values, rows)
    epsilon, name = _epsilon(subject, nearest, values, wide, ranks[0])
    found = replace(nearest, epsilon=epsilon, epsilon_name=name)
    for magnitude in (1.0, *(factor * math.sqrt(epsilon) for factor in (0.3, 3.0) if epsilon)):
        rows = _rows(subject, magnitude, gated)
        for rank in ranks:
            _check(found, _differences(found, _called(call, rows, rank), wide_values, rows))
    length, dtype = next(iter(subject.shapes.values()))
    return replace(_with_dtypes(subject, found, values, ranks[0]), ranks=tuple(sorted(ranks)), row=(length, dtype))


def _values(subject: Subject) -> Values:
    """Parameters that tell offsets 0 and 1, and scale and bias, apart, rounded to the dtypes that the module has."""
    rng = np.random.default_rng(0)
    draws = {name: rng.uniform(0.5, 2, length) for name, (length, _) in subject.shapes.items()}
    return {name: np.asarray(draw.astype(subject.shapes[name][1]), np.float32) for name, draw in draws.items()}


def _rows(subject: Subject, magnitude: float, gated: bool, dtype: Any = F32) -> list[jax.Array]:
    """x of random rows that are not centred, and a gate."""
    length = next(iter(subject.shapes.values()))[0]
    x, gate = np.random.default_rng(1).normal(size=(2, ROWS, length))
    return [jnp.asarray(array, F32).astype(dtype) for array in (magnitude * (x + 0.3), gate)[: 1 + gated]]


def _called(call: Call, rows: Sequence[jax.Array], rank: int) -> Any:
    """What a module gives for the rows in an x of this rank."""
    length = rows[0].shape[-1]
    y = call(*(array.reshape(*LEADING[rank], length) for array in rows))
    if not (isinstance(y, jax.Array) and y.shape == (*LEADING[rank], length)):
        raise NoMatch("its call gives something else than one array of x's shape")
    return y.reshape(ROWS, length)


def _ranks(call: Call, rows: Sequence[jax.Array]) -> list[int]:
    """The ranks of x that a module takes and gives back."""
    ranks, errors = [], []
    for rank in LEADING:
        try:
            _called(call, rows, rank)
        except Exception as error:
            errors.append(error)
        else:
            ranks.append(rank)
    if not ranks:
        raise errors[0]
    return ranks


def _candidates(subject: Subject, gated: bool) -> Iterator[Formula]:
    """All formulas, without an epsilon."""
    names = tuple(subject.shapes)
    for offset in (0.0, 1.0):
        if gated:
            scale = names[0] if len(names) == 1 else None
            for first, activation in product((True, False), ("silu", "sigmoid") if scale else ()):
                gate: dict[str, Any] = {"gate_first": first, "activation": activation}
                yield Formula(function="gated_rms_norm", scale=scale, epsilon=0.0, scale_offset=offset, **gate)
            continue
        for scale, bias in ((names[0], None),) if len(names) == 1 else (names, names[::-1]):
            yield Formula(function="rms_norm", scale=scale, bias=bias, epsilon=0.0, scale_offset=offset)
            yield Formula(function="layer_norm", scale=scale, bias=bias, epsilon=0.0, scale_offset=offset)


def _nearest(
    y: jax.Array, candidates: Iterator[Formula], parameters: Mapping[str, jax.Array], rows: Sequence[jax.Array]
) -> Formula:
    differences = [(_differences(each, y, parameters, rows), each) for each in candidates]
    if not differences:
        raise NoMatch("no function of jaxnorm has a gate and a bias")
    difference, nearest = min(differences, key=lambda pair: float(pair[0].max()))
    _check(nearest, difference)
    return nearest


def _differences(
    found: Formula, y: jax.Array, parameters: Mapping[str, jax.Array], rows: Sequence[jax.Array]
) -> np.ndarray[Any, Any]:
    """How far y lies from a formula, as parts of each row's largest element; infinity where one is not finite."""
    ours = np.float64(found.compute(rows, parameters, out_dtype=y.dtype, implementation="jnp"))
    largest = np.maximum(np.abs(ours).max(-1, keepdims=True), np.finfo(np.float32).tiny)
    differences: np.ndarray[Any, Any] = np.nan_to_num(np.abs(np.float64(y) - ours) / largest, nan=np.inf)
    return differences


def _check(found: Formula, differences: np.ndarray[Any, Any]) -> None:
    if differences.max() > LIMIT:
        said = ", ".join(
            f"{name}={value}" for name, value in found.keywords().items() if name != "multiply_before_cast"
        )
        raise NoMatch(
            f"it is no norm that jaxnorm has: random rows differ by {differences.max():.1e} of their largest element "
            f"from the nearest, {found.function} with {said}"
        )


def _epsilon(
    subject: Subject, found: Formula, values: Values, wide: Mapping[str, Any], rank: int
) -> tuple[float, str | None]:
    """The epsilon, and the attribute that has it, where one does.

    Of rows far below it a norm is x * scale / sqrt(epsilon), and by the same with 1 in its place it is their ratio
    squared.
    """
    without_bias = values | ({found.bias: np.zeros_like(values[found.bias])} if found.bias else {})
    call = subject.copy({name: jnp.asarray(value, F32) for name, value in without_bias.items()}, wide)
    rows = _rows(subject, TINY, found.is_gated)
    y = np.float64(_called(call, rows, rank)).ravel()
    parameters = {name: jnp.asarray(value) for name, value in without_bias.items()}
    of_one = replace(found, epsilon=1.0)
    ours = np.float64(of_one.compute(rows, parameters, implementation="jnp")).ravel()
    epsilon = float(np.square(ours @ y / (y @ y))) if y @ y > 0 else math.inf
    if not math.isfinite(epsilon):
        raise NoMatch("its results of tiny rows are not finite, or 0")
    numbers = {name: value for name, value in subject.attributes.items() if isinstance(value, float) and value > 0}
    name = next((name for name, value in numbers.items() if math.isclose(value, epsilon, rel_tol=1e-3)), None)
    if name is not None:
        return numbers[name], name
    return (0.0 if epsilon < 1e-20 else float(f"{epsilon:.3g}")), None


def _with_dtypes(subject: Subject, found: Formula, values: Values, rank: int) -> Formula:
    """The formula with what is rounded where, for those dtypes of x with which it is the module's."""
    own = {name: jnp.asarray(value, subject.shapes[name][1]) for name, value in values.items()}
    call = subject.copy(own, {})
    scale = subject.shapes[str(found.scale)][1]
    rows = {dtype: _rows(subject, 1.0, found.is_gated, dtype) for dtype in DTYPES}
    results = {dtype: _called(call, rows[dtype], rank) for dtype in DTYPES}
    # Rules for the dtype of a result, the shortest first: x's, x's with the scale's, one for all.
    rules: list[dict[str, Any]] = [{}, {"with_scale": True}, *({"out_dtype": y.dtype} for y in results.values())]
    ranked: list[tuple[int, float, int, Formula]] = []
    for order in (True,) if found.is_gated else (True, False):
        each = replace(found, multiply_before_cast=order)
        means = {}
        for dtype, y in results.items():
            differences = _differences(each, y, own, rows[dtype])
            narrowest = max(float(jnp.finfo(of).eps) for of in (dtype, y.dtype))  # type: ignore[no-untyped-call]
            if np.max(differences) <= max(LIMIT, ROUNDINGS * narrowest):
                means[dtype] = float(np.mean(differences))
        for rule in rules:
            ruled = replace(each, **rule)
            served = tuple(dtype for dtype in means if ruled.result_dtype(dtype, scale) == results[dtype].dtype)
            mean = sum(means[dtype] for dtype in served)
            ranked.append((-len(served), mean, len(ranked), replace(ruled, dtypes=served)))
    best = min(ranked)[-1]
    if not best.dtypes:
        raise NoMatch("what it rounds, or the dtype of its result, is not as in a function of jaxnorm")
    return best
