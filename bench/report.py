"""How the benchmarks print what they measured, as a table, and keep it, as JSON."""

import json
import shlex
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

import jax
import jaxlib

CHAINED = "in a chain"  # the last word on a row of several norms in one program


def op_name(kind, direction=""):
    """What a row calls an op: the function, its direction, and the variant: "rms_norm_quantized forward, int8"."""
    op, *variant = kind.split(", ")
    name, quantized, _ = op.partition("_quantized")
    norm = "_norm" if name.endswith(("rms", "layer")) else ""
    return ", ".join([f"{name}{norm}{quantized} {direction}".rstrip(), *variant])


def op_parts(name):
    """(kind, direction) of what `op_name` gives."""
    call, *variant = name.split(", ")
    function, direction = call.split()
    return ", ".join([function.replace("_norm", ""), *variant]), direction


def add_arguments(parser):
    """Of a command that writes results."""
    parser.add_argument("--out", type=Path, help="write OUT.json")
    parser.add_argument("--commit", help="what is measured, where there is no git (default: the checkout's)")


def device(measured=None):
    """The header of a run on JAX's default device: what ran where, and the commit, `measured` if that is given."""
    return {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "commit": measured or commit(),
    }


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


def save(header, rows, out, **lists):
    """Writes OUT.json."""
    out.parent.mkdir(parents=True, exist_ok=True)
    whole = out.with_suffix(".json.new")  # a run that is cut off here leaves the last whole file
    whole.write_text(to_json(complete(header), rows, lists))
    whole.replace(out.with_suffix(".json"))


def load(path):
    """A results file: header, rows, and the lists."""
    return json.loads(Path(path).read_text())


def complete(header):
    return {**header, "date": date.today().isoformat(), "command": command()}


def to_json(header, rows, lists):
    """One row a line, so that a difference between two runs can be read; five digits, as no measurement has more."""
    lines = ",\n".join(json.dumps(_rounded(row)) for row in rows)
    parts = [f'"header": {json.dumps(header)}', f'"rows": [\n{lines}\n]']
    parts += [f"{json.dumps(name)}: {json.dumps(remarks)}" for name, remarks in lists.items()]
    return "{" + ",\n".join(parts) + "}\n"


def _rounded(value):
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


def markdown(header, rows, lists):
    lines = [", ".join(f"{key} {value}" for key, value in header.items()), ""]
    # What is no number and no text (a peer's time each, kernels by name) is for the JSON.
    columns = [key for key, value in (rows[0] if rows else {}).items() if not isinstance(value, (dict, list))]
    if rows:
        lines += table_of(columns, rows)
    for name, remarks in lists.items():
        lines += ["", f"{name.capitalize()}: {len(remarks) or 'none'}", *(f"- {remark}" for remark in remarks)]
    return "\n".join(lines) + "\n"


def table(columns, rows):
    """The lines of a Markdown table of strings."""
    return [f"| {' | '.join(line)} |" for line in (columns, ["---"] * len(columns), *rows)]


def table_of(columns, rows):
    """The same of rows that have their cells by name."""
    return table(columns, [[cell(row.get(column)) for column in columns] for row in rows])


def cell(value):
    return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
