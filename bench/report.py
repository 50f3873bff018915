"""How the benchmarks write what they measured: one table, as Markdown and as JSON."""

import json
import shlex
import subprocess
import sys
from datetime import date


def commit():
    """The commit of the tree that is measured, if it is a checkout."""
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return git.stdout.strip()


def write(header, rows, out=None):
    """Prints the table, and writes it to OUT.md and OUT.json if `out` is given."""
    header = {**header, "date": date.today().isoformat(), "command": shlex.join(["python", *sys.argv])}
    table = markdown(header, rows)
    print(table)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.with_suffix(".json").write_text(json.dumps({"header": header, "rows": rows}, indent=1) + "\n")
        out.with_suffix(".md").write_text(table)


def markdown(header, rows):
    columns = list(rows[0])
    lines = [", ".join(f"{key} {value}" for key, value in header.items()), "", f"| {' | '.join(columns)} |"]
    lines.append("|---" * len(columns) + "|")
    for row in rows:
        cells = (f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values())
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
