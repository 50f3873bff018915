"""The table of what `python -m bench sharding --trainer` measured, see `bench.sharded_steps` and `bench.tables`."""

from bench import report, table_parts


def compared(rows):
    """The rows, with what each is beside one device, and beside XLA's code on the same mesh; None without these."""
    alone = {(row["model"], row["way"]): row for row in rows if row["devices"] == 1}
    by_xla = {(row["model"], row["axes"], row["mesh"]): row for row in rows if row["way"] == "jnp"}
    return [
        {
            **row,
            **beside_one_device(row, alone.get((row["model"], row["way"]))),
            "MiB exchanged": in_mib(row["collectives"]),
            "more than jnp": beside_xla(row, by_xla.get((row["model"], row["axes"], row["mesh"]))),
        }
        for row in rows
    ]


def beside_one_device(row, one):
    pairs = list(zip(row["losses"], one["losses"], strict=False)) if one else []
    return {
        "scaling": one and row["ktokens/s"] / row["devices"] / one["ktokens/s"],
        "last loss": row["losses"][-1] if row["losses"] else None,
        "losses apart": f"{max(abs(a / b - 1) for a, b in pairs):.1e}" if pairs else None,
    }


def beside_xla(row, xla):
    if xla is None:
        return None
    kinds = dict.fromkeys([*xla["collectives"], *row["collectives"]])
    more = {kind: row["collectives"].get(kind, 0) - xla["collectives"].get(kind, 0) for kind in kinds}
    return in_mib({kind: size for kind, size in more.items() if size}, "+")


def in_mib(sizes, sign=""):
    return ", ".join(f"{kind} {size / 2**20:{sign}.4g}" for kind, size in sorted(sizes.items())) or "nothing"


def steps(*runs):
    """A line for each way of each mesh, of all runs; a later run's in place of an earlier one's."""
    keys = ("model", "axes", "mesh", "way")
    rows = compared(list({tuple(row[key] for key in keys): row for run in runs for row in run["rows"]}.values()))
    # To compile takes as long as what XLA has tried before lets it.
    columns = [key for key in rows[0] if not isinstance(rows[0][key], (dict, list)) and key != "compile s"]
    headers = [line for run in runs for line in table_parts.about(run["header"], described(run["header"]))]
    return [*headers, *report.table_of(columns, rows)]


def described(header):
    return f"{header['model']}; {header['batch']}, attention by {header['attention']}."
