"""The tables of what `examples/train_gemma.py` measured, see `bench.tables` and `bench.trainers`."""

from bench import report, table_parts, trainers

COLUMNS = ("tokens/s", "ms", "± ms", "state GiB", "temp GiB", "peak GiB", "trace s", "compile s", "last loss")
ALT = "Loss curves, tokens a second, memory and time to compile of a model like Gemma 3, with and without jaxnorm"


def ways(*runs):
    """A line for each way of each run, the change in tokens a second, and the largest difference of the losses."""
    columns = ["devices", "way", *COLUMNS, "faster %", "losses apart"]
    lines = []
    for results in runs:
        first, *others = results["rows"]
        changes = {first["way"]: ["-", "-"]}
        for row in others:
            speed = 100 * (row["tokens/s"] / first["tokens/s"] - 1)
            changes[row["way"]] = [f"{speed:.1f}", f"{trainers.gap(first, row)[0]:.1e}"]
        for row in results["rows"]:
            cells = [f"{row['tokens/s']:.0f}", *(report.cell(row[column]) for column in COLUMNS[1:])]
            lines.append([str(row["devices"]), row["way"], *cells, *changes[row["way"]]])
    headers = [line for results in runs for line in table_parts.about(results["header"], described(results["header"]))]
    return [*headers, *report.table(columns, lines)]


def drawn(*runs):
    """The same, and the picture of these runs."""
    return [*ways(*runs), "", f"![{ALT}]({trainers.PICTURE.name})"]


def described(header):
    return (
        f"{header['model']}; {header['batch']}, activations of {header['dtype']}, attention by {header['attention']}."
    )


def headline(*runs):
    """The picture, and for each run what jaxnorm changes."""
    lines = [f"![{ALT}]({trainers.PICTURE})"]
    for results in runs:
        first, *others = results["rows"]
        ported = next(row for row in others if row["way"] == "jaxnorm")
        lines += [f"- {results['header']['device']}: {trainers.change(first, ported)}."]
    return lines
