"""The tables of softmax and cross-entropy, see `bench.tables`."""

from bench import report, table_parts


def percent(results):
    """Percent of the copy rate, and how many times as fast as XLA."""
    rows = [row for row in results["rows"] if not table_parts.is_step(row)]
    return table_parts.about(results["header"]) + table_parts.pivot(
        "row length", rows, lambda row: row["N"], lambda row: f"{row['% of copy']:.0f} ({row['x XLA']:.2f})"
    )


def cpu_grid(results):
    """Milliseconds alone, and how many times as fast as XLA, by row length."""
    rows = [row for row in results["rows"] if row["shape"].startswith("grid ") and not table_parts.is_chained(row)]
    return table_parts.about(results["header"]) + table_parts.pivot(
        "row length", rows, lambda row: row["N"], lambda row: f"{row['ms']:.1f} ({row['x XLA']:.1f})"
    )


def losses(results):
    """Microseconds and temporary memory of a loss and its gradient, beside XLA's."""
    rows = [row for row in results["rows"] if row["op"] in ("cross_entropy step", "softmax step, causal")]
    columns = ["result and gradient", "M", "N", "us", "XLA us", "times XLA", "temp MiB", "XLA temp MiB"]
    names = ("us", "XLA us", "x XLA", "temp MiB", "XLA temp MiB")
    lines = [
        [f"{row['op'].replace(' step', '')}, {row['dtype']}", str(row["M"]), str(row["N"])]
        + [f"{row[name]:.{2 if name == 'x XLA' else 0}f}" for name in names]
        for row in rows
    ]
    return table_parts.about(results["header"]) + report.table(columns, lines)
