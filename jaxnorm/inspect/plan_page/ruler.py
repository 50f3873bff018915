"""At which row lengths the plan changes: the ruler of the page."""

from collections.abc import Callable, Iterator
from typing import Any

Plan = dict[str, Any]
PlanOf = Callable[[int], Plan]

# Of a row: elements a thread, blocks, and threads of it if they are of one warp. More threads come one warp at a time.
Rule = tuple[str, int, int, int]
LONGEST = 1 << 21
_EACH_TO = 4096  # lengths in vectors up to which each is asked for: there are many rules for short rows


def rule_of(plan: Plan) -> Rule:
    threads = plan["threads_per_row"] // plan["blocks_per_row"]
    return plan["regime"], plan["elements_per_thread"], plan["blocks_per_row"], threads if threads <= 32 else 0


def marks(plan_of: PlanOf, cols: int, vector: int, longest: int | None = None) -> list[dict[str, Any]]:
    """The stretches of row lengths with one rule, up to `longest`: the first and last length, and the plans there.

    Lengths are those with as many columns past the last whole vector as `cols` has: others may have other rules.
    """
    rest = cols % vector
    end = (max(LONGEST, cols) if longest is None else longest) // vector - (1 if rest and longest else 0)
    found: list[dict[str, Any]] = []
    for first, last in _stretches(lambda i: rule_of(plan_of(i * vector + rest)), 0 if rest else 1, end):
        begin, stop = first * vector + rest, last * vector + rest
        found.append({"from": begin, "to": stop, "first": plan_of(begin), "last": plan_of(stop)})
    return found


def _stretches(rule: Callable[[int], Rule], begin: int, end: int) -> Iterator[tuple[int, int]]:
    first = begin
    while first <= end:
        last = _last_alike(rule, first, end)
        yield first, last
        first = last + 1


def _last_alike(rule: Callable[[int], Rule], first: int, end: int) -> int:
    """The last length from `first` on with its rule; beyond the short ones rules are as long as their lengths."""
    wanted = rule(first)
    last = first
    while last < min(end, _EACH_TO) and rule(last + 1) == wanted:
        last += 1
    if last < _EACH_TO:
        return last
    high = last
    while high < end and rule(high) == wanted:
        last, high = high, min(end, high + max(1, high // 64))
    if rule(high) == wanted:
        return high
    while high - last > 1:
        middle = (last + high) // 2
        last, high = (middle, high) if rule(middle) == wanted else (last, middle)
    return last
