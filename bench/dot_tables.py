"""The table of products with quantised operands, see `bench.tables`."""

from collections.abc import Callable

from bench import report, table_parts


def products(results):
    """Microseconds, and how many times as fast as bfloat16, by the operands' types."""
    rows = results["rows"]
    forms = list(dict.fromkeys(row["op"].split(", ")[1] for row in rows))
    lines = []
    for shape in dict.fromkeys(row["shape"] for row in rows):
        of_shape = {row["op"].split(", ")[1]: row for row in rows if row["shape"] == shape}
        cells = [f"{row['us']:.0f} ({row['x bf16']:.2f})" for row in map(of_shape.get, forms)]
        lines.append([shape, f"{of_shape[forms[0]]['bf16 us']:.0f}", *cells])
    return table_parts.about(results["header"]) + report.table(["x by weights", "bfloat16", *forms], lines)


def decoding(results):
    """Milliseconds of a token, and how many times as fast as in bfloat16, by what the weights and x are."""
    tokens = {}
    for row in results["rows"]:
        tokens.setdefault((row["model"], row["program"]), {})[row["products"]] = row
    forms = list(dict.fromkeys(row["products"] for row in results["rows"]))[1:]
    lines = [
        [", ".join(key), f"{of['bfloat16']['ms']:.2f}"]
        + [f"{of[form]['ms']:.2f} ({of[form]['x bf16']:.2f})" for form in forms]
        for key, of in tokens.items()
    ]
    return table_parts.about(results["header"]) + report.table(["program", "bfloat16 ms", *forms], lines)


def steps(*runs):
    """Every run as it is."""
    return [line for run in runs for line in [*table_parts.whole(run), ""]]


def by_library(results):
    """Of those that a library makes by default, beside XLA's."""
    rows = [row for row in results["rows"] if abs(row["us"] - row["XLA us"]) > 0.03 * row["us"]]
    columns: tuple[Callable[..., str], ...] = (
        lambda row: row["shape"],
        lambda row: row["op"].split(", ")[1],
        lambda row: f"{row['us']:.0f}",
        lambda row: f"{row['XLA us']:.0f}",
        lambda row: f"{row['XLA us'] / row['us']:.2f}",
    )
    lines = [[column(row) for column in columns] for row in rows]
    return report.table(["x by weights", "form", "us", "XLA us", "times XLA"], lines)
