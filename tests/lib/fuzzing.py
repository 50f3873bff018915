"""What the fuzzers share: ops of the table at random, how far from exact a result may lie, and the loop over seeds."""

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from cases import DTYPES
from op import Op, Size
from table import OPS
from tolerances import DSCALE, DX

# A program of several derivatives loses more digits than a norm. What it is compared with says how many, but for
# chance.
SLACK = 4
# Around whole vectors, warps and blocks, and what lies between.
COLS = (3, 4, 5, 7, 8, 12, 17, 24, 31, 33, 64, 65, 100, 127, 128, 129, 257, 384, 1000, 1021)
LENGTHS = (1, 2, 3, 5, 7)

Pick = Callable[[Any], Any]


def _alike(op: Op) -> tuple[Any, ...]:
    """What ops of one kind share, whatever the norm, the activation or the dtype is."""
    return op.forward.replace(op.kind, ""), op.arrays, len(op.small.weights), *op.small.options


KINDS_OF_OPS = [list(alike) for _, alike in itertools.groupby(sorted(OPS, key=_alike), _alike)]


def is_quantised(op: Op) -> bool:
    return "quantized" in op.forward


def picker(rng: np.random.Generator) -> Pick:
    return lambda values: values[rng.integers(len(values))]


def draw_op(pick: Pick) -> tuple[Op, tuple[str, ...], tuple[str | None, ...]]:
    """An op of the table, the dtypes of its arrays, and those of its weights, None for one that is absent."""
    op = pick(pick(KINDS_OF_OPS))
    dtypes = pick(op.dtypes)
    return op, dtypes, tuple(pick((dtypes[0], None, *DTYPES)) for _ in op.weights)


def draw_size(
    op: Op, rng: np.random.Generator, pick: Pick, *, cols=COLS, lengths=LENGTHS, heads=(1, 2, 3), groups=(1, 2, 3, 5)
) -> Size:
    """A shape that the op takes, of a few thousand elements at most, with its options."""
    dims, weights, options = op.small
    last = pick([n for n in cols if not op.has_pairs or n % 2 == 0])
    for unit in (options.get("group_size"), *(group for group in (64, 128) if f"groups of {group}" in op.name)):
        last = last if unit is None else unit * pick(groups)
    lead: list[int] = []
    while len(lead) < pick((1, 2, 3)) and np.prod(lead) * last < 2000:
        lead.append(pick(lengths))
    fewest = 3 if "qkv" in op.operands else 1  # a head of each
    head = [pick([n for n in heads if n >= fewest])] if len(dims) > 2 else []
    options = {**options, **(pick(op.options) if op.options and rng.random() < 0.5 else {})}
    return Size((*lead, *head, last), (*head, last)[-len(weights) :], options)


def arrays(function: Callable) -> Callable:
    """The function with a flat tuple of results."""
    return lambda *args: tuple(jax.tree.leaves(function(*args)))


def law_of(*dtypes: str | None) -> float:
    """The relative error that the laws allow where all is rounded to the narrowest of these."""
    return max(law[dtype] for law in (DX, DSCALE) for dtype in {*dtypes} - {None})


def error(ours: np.ndarray, theirs: np.ndarray, exact: np.ndarray, law: float) -> float:
    """The L2 error as a multiple of what is allowed. Not a number is right where the formula has none."""
    ours, wide = (a.astype(np.float64) for a in (ours, theirs))
    there = np.isfinite(wide) & np.isfinite(exact)
    if not np.array_equal(np.isfinite(ours)[there], there[there]):
        return np.inf
    ours, wide, exact = ours[there], wide[there], exact[there]
    allowed = SLACK * (law * np.linalg.norm(exact) + np.linalg.norm(wide - exact)) + 1e-6
    return float(np.linalg.norm(ours - exact) / allowed)


def fuzz(
    draw: Callable[[int], Any],
    complaints: Callable[[Any], list[str]],
    first: int,
    *,
    seconds: float = np.inf,
    examples: float = np.inf,
) -> Iterator[str]:
    """For each example from a seed on its failure, or nothing, until so many seconds or examples are over."""
    end, seed = time.monotonic() + seconds, first
    while time.monotonic() < end and seed < first + examples:
        example = draw(seed)
        try:
            found = complaints(example)
        except Exception as raised:
            found = [f"{type(raised).__name__}: {raised}"]
        yield f"{example}\n  " + "\n  ".join(found) if found else ""
        if seed % 50 == 49:
            jax.clear_caches()
        seed += 1


def main(doc: str | None, fuzz: Callable[..., Iterator[str]]) -> None:
    """The command line of a fuzzer."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first example")
    parser.add_argument("--seconds", type=float, default=np.inf)
    parser.add_argument("--examples", type=float, default=np.inf)
    examples = failures = 0
    for failure in fuzz(**vars(parser.parse_args())):
        examples += 1
        if failure:
            failures += 1
            print(failure, flush=True)
    print(f"{examples} examples, {failures} failures")
    sys.exit(failures > 0)
