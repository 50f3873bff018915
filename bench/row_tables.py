"""The tables of softmax and cross-entropy, see `bench.tables`."""

from bench import table_parts


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
