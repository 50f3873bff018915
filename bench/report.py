"""How the benchmarks print what they measured, as a table, and keep it, as JSON."""

import json
import shlex
import subprocess
import sys
import textwrap
import time
from datetime import date
from pathlib import Path

import jax
import jaxlib

CHAINED = "in a chain"  # the last word on a row of several norms in one program
TIMES_XLA = 0.95  # what differs by less are two runs of one program


def op_name(kind, direction=""):
    """What a row calls an op: the function, its direction, and the variant: "rms_norm_quantized forward, int8"."""
    op, *variant = kind.split(", ")
    name, quantized, _ = op.partition("_quantized")
    norm = "_norm" if name.endswith(("rms", "layer")) else ""
    return ", ".join([f"{name}{norm}{quantized} {direction}".rstrip(), *variant])


def add_arguments(parser):
    """Of a command that writes results."""
    parser.add_argument("--out", type=Path, help="CARD/RUN: write the run into CARD.json, beside its other runs")
    parser.add_argument("--commit", help="what is measured, where there is no git (default: the checkout's)")


def versions(measured=None):
    """Of JAX, and the commit, `measured` if that is given."""
    return {"jax": jax.__version__, "jaxlib": jaxlib.__version__, "commit": measured or commit()}


def device(measured=None):
    """The header of a run on JAX's default device."""
    return {"device": jax.devices()[0].device_kind, **versions(measured)}


def commit():
    """The commit of the tree that is measured; empty where there is no checkout, or no git."""
    ask = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(ask, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        return ""


def command():
    """The command line, as one would type it."""
    program = ["-m", "bench"] if Path(sys.argv[0]).name == "__main__.py" else sys.argv[:1]
    return shlex.join(["python", *program, *sys.argv[1:]])


def tell(done, start):
    """On standard error, what was done since then, as a run may take minutes or be cut off."""
    print(f"{done} in {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)


def write(header, rows, out=None, derived=None, **lists):
    """Prints the table and the named lists of remarks below it; saves all but what is derived if `out` is given."""
    print(markdown(complete(header), rows, (derived or {}) | lists))
    if out:
        save(header, rows, out, **lists)


def remarks(rows):
    """The rows of single ops that are wrong or slower than XLA's code, in words."""
    found = []
    for row in rows:
        name = f"{row['op']}, {row['dtype']}, {row['shape']} ({row['M']}x{row['N']})"
        if not row["error / tolerance"] <= 1:  # NaN is wrong, too
            found.append(f"{name}: WRONG, {row['error / tolerance']:.2g} times the tolerance")
        if row["x XLA"] and row["x XLA"] < TIMES_XLA:
            found.append(f"{name}: {row['x XLA']:.2f} x XLA")
    return found


def save(header, rows, out, **lists):
    """Writes the run into its card's file, in place of one of that name."""
    card = out.parent.with_suffix(".json")
    runs = json.loads(card.read_text()) if card.exists() else {}
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = [[_rounded(row.get(column)) for column in columns] for row in rows]
    runs[out.name] = {"header": complete(header), **lists, "columns": columns, "rows": cells}
    card.parent.mkdir(parents=True, exist_ok=True)
    whole = card.with_suffix(".json.new")  # a run that is cut off here leaves the last whole file
    whole.write_text(to_json(runs))
    whole.replace(card)


def load(run):
    """A run of a card's file: header, columns, rows by column, and the lists; None if there is none."""
    card = run.parent.with_suffix(".json")
    found = json.loads(card.read_text()).get(run.name) if card.exists() else None
    return found and {**found, "rows": [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]]}


def complete(header):
    return {**header, "date": date.today().isoformat(), "command": command()}


def to_json(runs):
    """One row a line, so that a difference between two runs can be read, and their columns once."""
    return "{\n" + ",\n\n".join(f"{json.dumps(name)}: {_run(run)}" for name, run in runs.items()) + "\n}\n"


def _run(run):
    parts = {key: _wrapped(value) for key, value in run.items()}
    rows = ",\n".join(json.dumps(row, ensure_ascii=False) for row in run["rows"])
    parts["rows"] = f"[\n{rows}\n]"
    return "{" + ",\n".join(f"{json.dumps(key)}: {text}" for key, text in parts.items()) + "}"


def _wrapped(value):
    """JSON of a list or a dictionary, with a new line after some of its commas."""
    inner = json.dumps(value, ensure_ascii=False)
    parts = [inner]
    if isinstance(value, dict):
        parts = [json.dumps({key: item}, ensure_ascii=False)[1:-1] for key, item in value.items()]
    elif isinstance(value, list):
        parts = [json.dumps(item, ensure_ascii=False) for item in value]
    text = ", ".join(part.replace(" ", "\0") for part in parts)
    filled = textwrap.fill(text, 105, break_long_words=False, break_on_hyphens=False).replace("\0", " ")
    return inner[0] + filled + inner[-1]


def _rounded(value):
    """Five digits, as no measurement has more."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


def markdown(header, rows, lists):
    lines = [", ".join(f"{key} {value}" for key, value in header.items()), ""]
    # What is no number and no text (kernels by name) is for the JSON.
    columns = [key for key, value in (rows[0] if rows else {}).items() if not isinstance(value, (dict, list))]
    if rows:
        lines += table_of(columns, rows)
    for name, found in lists.items():
        lines += ["", f"{name.capitalize()}: {len(found) or 'none'}", *(f"- {remark}" for remark in found)]
    return "\n".join(lines) + "\n"


def table(columns, rows):
    """The lines of a Markdown table of strings."""
    return [f"| {' | '.join(line)} |" for line in (columns, ["---"] * len(columns), *rows)]


def table_of(columns, rows):
    """The same of rows that have their cells by name."""
    return table(columns, [[cell(row.get(column)) for column in columns] for row in rows])


def cell(value):
    return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
