"""The table of whole models, see `bench.tables`."""

from bench import report, table_parts

# What a user gets who asks for nothing: the norms alone, and what takes the neighbours in.
DEFAULTS = ("jaxnorm-default-norm", "jaxnorm-default")


def steps(*runs):
    """What the norms are of a whole step of a model, and what jaxnorm changes of it, in percent: gains first."""
    lines = []
    for results in runs:
        programs = {}
        for row in results["rows"]:
            name = row["program"] + (", separate products" if results["header"].get("products") == "separate" else "")
            programs.setdefault((row["model"], name), {})[row["norms"]] = row
        lines += [step(*names, variants) for names, variants in programs.items()]
    lines.sort(key=lambda line: line[0], reverse=True)
    columns = ["program", "XLA ms", "norms %", "the norms", "with their neighbours", "scatter %"]
    headers = [line for results in runs for line in table_parts.about(results["header"])]
    return [*headers, *report.table(columns, [cells for _, cells in lines])]


def step(model, program, variants):
    """(the best change in percent, the cells of the line) of one program of a model.

    Both columns of changes are of paired runs: what a program takes longer than the one without norms beside it.
    """
    xla = variants["jnp"]
    whole = xla["ms"] * 1e3
    changes = {
        norms: 100 * (xla["norms us"] - variants[norms]["norms us"]) / whole for norms in DEFAULTS if norms in variants
    }
    cells = [f"{xla['ms']:.2f}", f"{100 * xla['norms us'] / whole:.1f}"]
    cells += [faster(changes.get(norms)) for norms in DEFAULTS]
    return max(changes.values()), [f"{model}, {program}", *cells, f"±{xla['± us'] / whole * 100:.1f}"]


def faster(percent):
    """A change in words; a loss is bold."""
    if percent is None:
        return "-"
    if abs(percent) < 0.05:
        return "as fast"
    return f"{percent:.1f} % faster" if percent >= 0 else f"**{-percent:.1f} % slower**"
