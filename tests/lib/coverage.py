"""Combinations of factors: each value once, or with `--full` each pair of values; and one case of each test."""

import itertools
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

Named = list[tuple[str, Any]]

_pairs = True


def set_pairs(pairs: bool) -> None:
    """Before test modules are imported."""
    global _pairs
    _pairs = pairs


def one_of_each(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """One case of each test; of another test that of another op."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return [cases[zlib.crc32(name.encode()) % len(cases)] for name, cases in tests.items()]


def in_full(*cases: Any) -> tuple[Any, ...]:
    """These, with `--full` only."""
    return cases if _pairs else ()


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


def over(ops: Iterable[Any], *, pairs: bool = True, **factors: Callable[[Any], Iterable[Any]]):
    """Parametrises a test with `op` and these factors, each a function of the op.

    Ops with the same factors share a covering array, in which the op is one factor more. An op that has no value for
    some factor has no such test. Without `pairs` each value comes once.
    """
    groups: dict[str, tuple[list[Any], list[Named]]] = {}
    for op in ops:
        named = [_named(values(op)) for values in factors.values()]
        if all(named):
            groups.setdefault(repr(named), ([], named))[0].append(op)
    params = [row for alike, named in groups.values() for row in _params([_named(alike), *named], pairs=pairs)]
    return pytest.mark.parametrize(("op", *factors), params)


def _named(values: Iterable[Any]) -> Named:
    if isinstance(values, dict):
        return list(values.items())
    names = ((" ".join(map(str, value)) if type(value) is tuple else str(value), value) for value in values)
    return [(re.sub(r" at 0x\w+", "", name), value) for name, value in names]  # addresses differ between workers


def _params(named: list[Named], *, pairs: bool = True) -> list[Any]:
    sizes = [len(values) for values in named]
    table = sorted(pairwise(sizes) if pairs and _pairs else once(sizes)) if all(sizes) else ()
    return [
        pytest.param(
            *(values[i][1] for values, i in zip(named, row, strict=True)),
            id="-".join(values[i][0] for values, i in zip(named, row, strict=True)),
        )
        for row in table
    ]
