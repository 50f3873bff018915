"""Pictures of a GPU run: GB/s against the row length, for each op and dtype, forward and backward.

    python -m bench plot bench/results/h200.json

One picture of each direction stands beside the JSON then: h200-forward.png, h200-backward.png, h200-step.png. They
show the suite "grid", whose arrays are all of one size.
"""

import itertools
import math
import textwrap
from pathlib import Path

from bench import report

PEER, RECORDED = "best other package", "best other package (recorded)"
STYLES = {
    "jaxnorm": {"color": "tab:blue", "marker": "o", "linewidth": 2},
    "XLA": {"color": "tab:orange", "marker": "s"},
    PEER: {"color": "tab:green", "marker": "^"},
    RECORDED: {"color": "tab:green", "marker": "^"},
    "copy": {"color": "0.5", "linestyle": "--"},
}


def add_arguments(parser):
    parser.add_argument("results", type=Path, nargs="?", default=Path("bench/results/h200.json"))
    parser.add_argument("--out", type=Path, help="the folder of the pictures; that of the results if not given")


def main(args):
    results = report.load(args.results)
    folder = args.out or args.results.parent
    folder.mkdir(parents=True, exist_ok=True)
    for direction, picture in pictures(results):
        path = folder / f"{args.results.stem}-{direction}.png"
        picture.savefig(path)
        print(path)


def pictures(results):
    """The directions, each with its figure."""
    for direction, panels in panels_of(results["rows"]).items():
        yield direction, draw(results["header"], direction, panels)


def panels_of(rows):
    """The rows of the grid by direction, and in that by (op, dtype), in order of length."""
    panels = {}
    for row in rows:
        if row["shape"].startswith("grid ") and ", " not in row["op"]:  # a variant has two of its shapes
            name, direction = row["op"].split()
            panels.setdefault(direction, {}).setdefault((name, row["dtype"]), []).append(row)
    for cells in itertools.chain.from_iterable(by_panel.values() for by_panel in panels.values()):
        cells.sort(key=lambda row: row["N"])
    return panels


def lines_of(cells):
    """GB/s by name, one number for each cell, NaN where there is none."""
    lines = {"jaxnorm": [row["GB/s"] for row in cells], "copy": [row["copy GB/s"] for row in cells]}
    named = [row["best peer"] for row in cells if row.get("best peer")]
    peer = RECORDED if all(name.endswith("(recorded)") for name in named) else PEER
    for name, ratio in (("XLA", "x XLA"), (peer, "x best peer")):
        if any(row.get(ratio) for row in cells):
            lines[name] = [row["GB/s"] / row[ratio] if row.get(ratio) else math.nan for row in cells]
    return lines


def draw(header, direction, panels):
    """A figure with a row of panels for each op and a column for each dtype."""
    from matplotlib.figure import Figure

    ops, dtypes = (sorted({key[i] for key in panels}) for i in (0, 1))
    figure = Figure(figsize=(1.2 + 3.4 * len(dtypes), 1.4 + 2.6 * len(ops)), dpi=100, layout="constrained")
    axes = figure.subplots(len(ops), len(dtypes), squeeze=False, sharey=True)
    for (i, op), (j, dtype) in itertools.product(enumerate(ops), enumerate(dtypes)):
        if cells := panels.get((op, dtype)):
            fill(axes[i][j], f"{op} {direction}, {dtype}", lines_of(cells), [row["N"] for row in cells])
    handles = {}
    for panel in axes.flat:
        handles |= {label: handle for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    names = [name for name in STYLES if name in handles]
    figure.legend([handles[name] for name in names], names, loc="outside lower center", ncols=len(names))
    facts = f"{header['gpu']}, jax {header['jax']}, commit {header['commit']}, {header['date']}: {header['command']}"
    figure.suptitle("\n".join(textwrap.wrap(facts, 40 * len(dtypes))), fontsize=9)
    return figure


def fill(panel, title, lines, lengths):
    for name, rates in lines.items():
        panel.plot(lengths, rates, label=name, markersize=4, **STYLES[name])
    panel.set_xscale("log", base=2)
    panel.set_ylim(bottom=0)
    panel.set_title(title, fontsize=9)
    panel.set_xlabel("row length", fontsize=8)
    panel.set_ylabel("GB/s", fontsize=8)
    panel.tick_params(labelsize=8)
    panel.grid(alpha=0.3)
