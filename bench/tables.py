"""The results as tables in README.md and docs/, so that no number there is typed.

    python -m bench tables           # writes them
    python -m bench tables --check   # fails if they are not what the results say

A table stands between `<!-- table: NAME -->` and `<!-- end -->`, with a line about its run above it. Where a page has
`<!-- drawn: NAME -->`, MkDocs draws the table (`tools/doc_results.py`).
"""

import difflib
import re
import statistics
from pathlib import Path

from bench import (
    dot_tables,
    model_tables,
    report,
    row_tables,
    shapes,
    sharded_tables,
    targets,
    trainer_tables,
    trainers,
)
from bench.table_parts import about, code, is_chained, is_step, pivot, position, whole

MARKED = re.compile(r"<!-- table: (\S+) -->\n.*?<!-- end -->", re.DOTALL)
DRAWN = re.compile(r"<!-- drawn: (\S+) -->")
CPU_SHAPE = (4096, 4096)
SMALL = frozenset(shape.name for shape in shapes.DECODE)
MODELS = frozenset(shape.name for shape in shapes.suites(2)["models"])


def add_arguments(parser):
    parser.add_argument("--pages", type=Path, nargs="+", help="the Markdown files (default: README.md and docs/)")
    parser.add_argument("--results", type=Path, default=Path("bench/results"), help="the folder of the JSON files")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if something would change")


def main(args):
    changed = False
    for page in args.pages or [Path("README.md"), *sorted(Path("docs").rglob("*.md"))]:
        old = page.read_text()
        new = render(old, args.results)
        changed |= new != old
        if args.check:
            lines = difflib.unified_diff(old.splitlines(), new.splitlines(), str(page), "results", lineterm="")
            print(*lines, sep="\n")
        elif new != old:
            page.write_text(new)
    return int(args.check and changed)


def render(text, folder):
    """The text with every table between its marks made anew."""
    return MARKED.sub(lambda match: f"<!-- table: {match[1]} -->\n{table(match[1], folder)}\n<!-- end -->", text)


def drawn(text, folder):
    """The text with a table in the place of each mark that stands for one."""
    return DRAWN.sub(lambda match: table(match[1], folder), text)


def table(name, folder):
    if name not in TABLES:
        raise SystemExit(f"no table is called {name}; there are {', '.join(TABLES)}")
    files, lines_of = TABLES[name]
    found = {file: sorted(folder.glob(file)) for file in ((files,) if isinstance(files, str) else files)}
    missing = [file for file, paths in found.items() if not paths]
    if missing:
        return f"Not measured yet: there is no `{', '.join(missing)}`."
    return "\n".join(lines_of(*(report.load(path) for paths in found.values() for path in paths)))


def headline(results):
    """One line about all shapes."""
    steps = [row for row in results["rows"] if is_step(row) and row["x XLA"]]
    what = f"{results['header']['gpu']}, {len(steps)} programs of a result and all its gradients"
    return [ratios(what, steps)] if steps else []


def cpu_headline(results):
    """The same, of programs that run alone and in a chain."""
    header, rows = results["header"], [row for row in results["rows"] if row.get("x XLA")]
    return [ratios(f"{header['cpu']}, {header['cores']} cores, {len(rows)} programs", rows)]


def grid(results):
    """GB/s by op and row length, and how many times as fast as XLA."""
    everything = [row for row in results["rows"] if row["shape"].startswith("grid ")]
    steps = [row for row in everything if is_step(row) and row["x XLA"]]
    below = ["", ratios("The result and all gradients in one program", steps)] if steps else []
    return rates(results["header"], everything, "row length", lambda row: row["N"]) + below


def models(results):
    """The same by op and shape, of what is neither the grid nor small."""
    others = [row for row in results["rows"] if not row["shape"].startswith("grid ") and row["shape"] not in SMALL]
    return rates(results["header"], others, "shape", lambda row: f"{row['shape']}, {row['M']}x{row['N']}")


def rates(header, rows, corner, column_of):
    rows = [row for row in rows if not is_step(row)]
    if not rows:
        return ["Not measured yet: the run has none of these shapes."]
    copy = statistics.median(row["copy GB/s"] for row in rows)
    legend = f"A copy reaches {copy:.0f} GB/s. † misses its target: {targets.in_words(rows)}."

    def cell(row):
        return f"{row['GB/s']:.0f}{in_parentheses(row)}{'†' if targets.shortfalls(row) else ''}"

    return about(header, legend) + pivot(corner, rows, column_of, cell)


def in_parentheses(row):
    """How many times as fast as XLA, if that was measured."""
    return "" if row["x XLA"] is None else f" ({row['x XLA']:.2f})"


def bfloat16_of_models(results):
    """Microseconds, and how many times as fast as XLA: a line for each shape of a model."""
    rows = [row for row in results["rows"] if row["dtype"] == "bfloat16" and row["shape"] in MODELS]
    ops = sorted({row["op"] for row in rows}, key=lambda op: position((op, "bfloat16")))
    lines = {}
    for row in rows:
        lines.setdefault(f"{row['shape']}, {row['M']}x{row['N']}", {})[row["op"]] = (
            f"{row['us']:.1f}{in_parentheses(row)}"
        )
    return about(results["header"]) + report.table(
        ["bfloat16", *map(code, ops)], [[shape, *(cells.get(op, "-") for op in ops)] for shape, cells in lines.items()]
    )


def small(results):
    """Microseconds of small arrays: ours, XLA's, the best other's."""
    rows = [row for row in results["rows"] if row["shape"] in SMALL and not is_step(row)]
    if not rows:
        return ["Not measured yet: the run has no small shapes."]

    def cell(row):
        peer = row["x best peer"] and row["us"] * row["x best peer"]
        return " / ".join("-" if us is None else f"{us:.1f}" for us in (row["us"], row["XLA us"], peer))

    return about(results["header"]) + pivot("shape", rows, lambda row: f"{row['M']}x{row['N']}", cell)


def cpu(results):
    """Milliseconds of one shape, for all dtypes beside each other, and what all cells have in common."""
    rows = [row for row in results["rows"] if row.get("x XLA")]
    chosen = [row for row in rows if (row["M"], row["N"]) == CPU_SHAPE]
    keys = sorted({(row["op"], row["dtype"]) for row in chosen}, key=position)
    ops, dtypes = (list(dict.fromkeys(key[i] for key in keys)) for i in (0, 1))
    cells = {(row["op"], row["dtype"]): cpu_cells(row) for row in chosen}
    columns = [f"{CPU_SHAPE[0]}x{CPU_SHAPE[1]}"]
    columns += [name for dtype in dtypes for name in (f"{dtype} ms", "XLA", "ratio")]
    lines = [[code(op), *(text for dtype in dtypes for text in cells.get((op, dtype), "---"))] for op in ops]
    return [*about(results["header"]), *report.table(columns, lines), "", *cpu_summary(rows)]


def cpu_summary(rows):
    """A line for each way in which the programs run: alone, or as their op says at its end."""
    groups = {}
    for row in rows:
        groups.setdefault(report.CHAINED if is_chained(row) else "alone", []).append(row)
    return [ratios(f"All {len(group)} cells, {name}", group) for name, group in groups.items()]


def ratios(what, rows):
    """How rows compare with XLA, the worst by name."""
    mean = statistics.geometric_mean(row["x XLA"] for row in rows)
    low, high = (pick(rows, key=lambda row: row["x XLA"]) for pick in (min, max))
    return (
        f"- {what}: {mean:.2f} times as fast as XLA's code in geometric mean, from {low['x XLA']:.2f} "
        f"({code(low['op'])}, {low['dtype']}, {low['M']}x{low['N']}) to {high['x XLA']:.2f}."
    )


def cpu_cells(row):
    return [f"{row['ms']:.1f}", f"{row['XLA ms']:.1f}", f"{row['x XLA']:.1f}"]


TABLES = {
    "h200-grid": ("h200.json", grid),
    "h200-headline": ("h200.json", headline),
    "h200-small": ("h200.json", small),
    "h200-models": ("h200.json", bfloat16_of_models),
    "h200-add-grid": ("h200_add.json", grid),
    "h200-add-small": ("h200_add.json", small),
    "h200-gated-grid": ("h200_gated.json", grid),
    "h200-gated-models": ("h200_gated.json", models),
    "h200-quantized-grid": ("h200_quantized.json", grid),
    "h200-quantized-small": ("h200_quantized.json", small),
    "rows": ("h200_rows.json", row_tables.percent),
    "cpu": ("cpu.json", cpu),
    "cpu-headline": ("cpu.json", cpu_headline),
    "cpu-neighbours": ("cpu_neighbours.json", cpu),
    "cpu-activations": ("cpu_activations.json", cpu),
    "cpu-quantized": ("cpu_quantized.json", cpu),
    "cpu-rows": ("cpu_rows.json", cpu),
    "cpu-rows-grid": ("cpu_rows.json", row_tables.cpu_grid),
    "sharding": ("h200_x4_sharding.json", whole),
    "sharded-steps": ("h?00_x?_steps_*.json", sharded_tables.steps),
    "model-default": ("h200_model_default.json", whole),
    "model-more": ("h200_model_more.json", whole),
    "model-dit": ("h200_model_dit.json", whole),
    "model-32000": ("h200_model_32000.json", whole),
    "model-rotary": ("h200_model_rotary.json", whole),
    "model-separate": ("h200_model_separate.json", whole),
    "decode-separate": ("h200_decode_separate.json", whole),
    "rotary": ("h?00_rotary.json", dot_tables.steps),
    "groups": ("h200_groups.json", whole),
    "dots": ("h200_dots.json", dot_tables.products),
    "decoding-quantised": ("h100_decode_quantised.json", dot_tables.decoding),
    "dots-library": ("h200_dots.json", dot_tables.by_library),
    "float8": ("h?00_float8_*.json", dot_tables.steps),
    "gemma": (trainers.RUNS, trainer_tables.drawn),
    "gemma-headline": (trainers.RUNS, trainer_tables.headline),
    "gemma-h100": ("h100_x2_gemma.json", trainer_tables.ways),
    "whole-programs": (
        (
            "h100_model_new.json",
            "h100_model_joint.json",
            "h100_model_qwen.json",
            "h100_blocks.json",
            "h100_decode_joint.json",
        ),
        model_tables.headline,
    ),
    "blocks": ("h100_blocks.json", model_tables.blocks),
    "model-new": ("h100_model_new.json", whole),
    "steps-new": (("h100_model_new.json", "h100_model_joint.json", "h100_model_qwen.json"), model_tables.steps),
    "steps": (("h200_model_default.json", "h200_model_separate.json"), model_tables.steps),
    "decoding": (("h100_decode.json", "h100_decode_joint.json"), model_tables.decoding),
    "decoding-float32": (("h200_decode_float32.json",), model_tables.decoding),
    "joint": (("h100_model_joint.json", "h100_model_qwen.json"), dot_tables.steps),
    "joint-wide": (("h100_model_8b.json", "h100_model_151936.json"), dot_tables.steps),
    "tuned": ("h100_tuned_*.json", dot_tables.steps),
}
