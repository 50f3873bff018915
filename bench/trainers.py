"""A picture of what `examples/train_gemma.py` measured: loss curves, tokens a second, memory, time to compile.

    python -m bench trainers                       # the picture of the documentation
    python -m bench trainers FILE.json --out FILE.png

Each results file is a panel of loss curves, and a group of bars in the panels below.
"""

import os
import platform
import re
import textwrap
from pathlib import Path

import jax

from bench import report

RUNS = "h200*_gemma.json"  # of one GPU, and of several
PICTURE = Path("docs/benchmarks/h200-gemma.png")
COLORS = ("tab:orange", "tab:blue", "tab:green", "tab:purple")
# The bars: what is drawn, its unit, and the columns that are stacked in it.
BARS = (
    ("speed", "tokens a second", ("tokens/s",)),
    ("memory of the step: state, and temporary", "GiB a device", ("state GiB", "temp GiB")),
    ("time to compile", "seconds", ("compile s",)),
)


def add_arguments(parser):
    parser.add_argument("results", type=Path, nargs="*", help=f"JSON files (default: bench/results/{RUNS})")
    parser.add_argument("--out", type=Path, default=PICTURE, help=f"the PNG file (default: {PICTURE})")


def main(args):
    results = args.results or sorted(Path("bench/results").glob(RUNS))
    if not results:
        raise SystemExit(f"there is no bench/results/{RUNS}: name the results files")
    save(draw([report.load(path) for path in results]), args.out)
    print(args.out)


def save(figure, path):
    # Without the version of the program that drew it, the picture changes only if the results do.
    figure.savefig(path, metadata={"Software": None})


def differences(rows):
    """A line for each way but the first: what it changes, and how far its losses are from the first's."""
    first, *others = rows
    return [f"{row['way']}: {change(first, row)}" for row in others]


def change(first, row):
    """What a way changes of the first one, in words."""
    speed = 100 * (row["tokens/s"] / first["tokens/s"] - 1)
    scatter = max(100 * way["± ms"] / way["ms"] for way in (first, row))
    old, new = (way["state GiB"] + way["temp GiB"] for way in (first, row))
    apart, step = gap(first, row)
    return (
        f"{abs(speed):.1f} % {'more' if speed >= 0 else 'fewer'} tokens a second (scatter ±{scatter:.1f}), {new:.3g} "
        f"GiB of memory a device in place of {old:.3g}, losses {apart:.1e} apart at most (step {step} of "
        f"{len(row['losses'])})"
    )


def gap(first, row):
    """The largest difference of two rows' losses, and its step."""
    apart = [abs(a - b) for a, b in zip(first["losses"], row["losses"], strict=True)]
    return max(apart), apart.index(max(apart)) + 1


def hardware():
    """JAX's first device; a CPU by its own name, with its cores."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind
    info = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    return f"{named[1] if named else platform.machine()}, {os.cpu_count()} cores"


def draw(runs):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.5), dpi=100, layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(1.15, 1))
    for panel, run in zip(above.subplots(1, len(runs), squeeze=False).flat, runs, strict=True):
        curves(panel, run)
    for panel, bar in zip(below.subplots(1, len(BARS)), BARS, strict=True):
        bars(panel, runs, *bar)
    facts = "\n".join(line for run in runs for line in textwrap.wrap(facts_of(run["header"]), 150))
    figure.suptitle(facts, fontsize=8)
    return figure


def facts_of(header):
    names = ("device", "model", "batch", "dtype")
    known = ", ".join(str(header[name]) for name in names)
    return f"{known}, jax {header['jax']}, commit {header['commit']}, {header['date']}: {header['command']}"


def curves(panel, run):
    """The first way as a broad line, the others as thin ones on it, with dashes in each other's gaps."""
    for i, (row, color) in enumerate(zip(run["rows"], COLORS, strict=False)):
        others = len(run["rows"]) - 1
        style = {"lw": 1.2, "ls": (4 * i, (4, 4 * others))} if i else {"lw": 5, "alpha": 0.4}
        panel.plot(range(1, len(row["losses"]) + 1), row["losses"], label=row["way"], color=color, **style)
    panel.set(xlabel="step", ylabel="training loss, nats a token", title=run["header"]["device"])
    panel.grid(alpha=0.3)
    panel.legend(handlelength=6)


def bars(panel, runs, title, unit, columns):
    """A group for each run, a bar for each way; what is stacked grows paler."""
    ways = list(dict.fromkeys(row["way"] for run in runs for row in run["rows"]))
    width = 0.8 / len(ways)
    for group, run in enumerate(runs):
        for row in run["rows"]:
            i, bottom = ways.index(row["way"]), 0.0
            at = group + (i - (len(ways) - 1) / 2) * width
            for depth, column in enumerate(columns):
                panel.bar(at, row[column], 0.9 * width, bottom, color=COLORS[i], alpha=0.9 / (1 + depth))
                bottom += row[column]
            text = f"{bottom / 1000:.1f}k" if bottom >= 1000 else f"{bottom:.3g}"
            panel.text(at, bottom, text, ha="center", va="bottom", fontsize=7)
    panel.set_xticks(range(len(runs)), [run["header"]["device"] for run in runs], fontsize=8)
    panel.set_title(title, fontsize=9)
    panel.set_ylabel(unit, fontsize=8)
    panel.margins(y=0.12)
