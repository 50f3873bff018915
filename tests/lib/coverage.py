"""Combinations of factors, by the tier: each value once, each pair of values, or all; and one of each test."""

import itertools
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import pytest

Named = list[tuple[str, Any]]

_tier = "pairs"


def set_tier(tier: Literal["quick", "once", "rest", "pairs", "full"]) -> None:
    """Before test modules are imported."""
    global _tier
    _tier = tier


def one_of_each(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """One case of each test; of another test that of another op."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return [cases[zlib.crc32(name.encode()) % len(cases)] for name, cases in tests.items()]


def in_full(*cases: Any) -> tuple[Any, ...]:
    """These, in the full tier only."""
    return cases if _tier == "full" else ()


def once(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Rows in which each value of each factor stands, for factors with this many values."""
    return [tuple(i % size for size in sizes) for i in range(max(sizes))]


def pairwise(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Rows of a covering array for factors with this many values: any two values stand together in some row."""
    factors = range(len(sizes))
    together = {
        ((i, a), (j, b))
        for i, j in itertools.combinations(factors, 2)
        for a, b in itertools.product(range(sizes[i]), range(sizes[j]))
    }
    rows = []
    while together:
        row = dict(min(together))
        for i in factors:
            if i not in row:
                known = list(row.items())
                new = [sum(tuple(sorted([(i, a), other])) in together for other in known) for a in range(sizes[i])]
                row[i] = new.index(max(new))
        together -= set(itertools.combinations(sorted(row.items()), 2))
        rows.append(tuple(row[i] for i in factors))
    return rows or list(itertools.product(*map(range, sizes)))


def cover(**factors: Iterable[Any]):
    """Parametrises a test with these factors. A dict gives each value a name, else a value is its own name."""
    named = [_named(values) for values in factors.values()]
    return pytest.mark.parametrize(list(factors), _params(named))


def over(
    ops: Iterable[Any],
    *,
    default: Sequence[Any] | None = None,
    pairs: bool = True,
    **factors: Callable[[Any], Iterable[Any]],
):
    """Parametrises a test with `op` and these factors, each a function of the op.

    Ops with the same factors share a covering array, in which the op is one factor more. An op that has no value for
    some factor has no such test. Where `default` is given, the other ops have theirs with `--full`. Without `pairs`
    each value comes once, if not with `--full`.
    """
    groups: dict[str, tuple[list[Any], list[Named]]] = {}
    for op in sorted(ops, key=lambda op: default is not None and op not in default):
        named = [_named(values(op)) for values in factors.values()]
        if all(named):
            groups.setdefault(repr(named), ([], named))[0].append(op)
    params = []
    for alike, named in groups.values():
        first = [op for op in alike if default is None or op in default]
        params += _params([_named(alike), *named], len(first), pairs=pairs)
    return pytest.mark.parametrize(("op", *factors), params)


def _named(values: Iterable[Any]) -> Named:
    if isinstance(values, dict):
        return list(values.items())
    return [(" ".join(map(str, value)) if type(value) is tuple else str(value), value) for value in values]


def _params(named: list[Named], first: int | None = None, *, pairs: bool = True) -> list[Any]:
    """Of the first factor, only so many values are in the tiers that are not full."""
    sizes = [len(values) for values in named]
    some = [sizes[0] if first is None else first, *sizes[1:]]
    if _tier == "full":
        table = itertools.product(*map(range, sizes))
    elif not all(some):
        table = ()
    else:
        table = sorted(pairwise(some) if pairs and _tier == "pairs" else once(some))
    return [
        pytest.param(
            *(values[i][1] for values, i in zip(named, row, strict=True)),
            id="-".join(values[i][0] for values, i in zip(named, row, strict=True)),
        )
        for row in table
    ]
