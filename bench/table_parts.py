"""What the tables of results have in common, see `bench.tables`."""

from bench import report

# In the order of the tables; a run may have fewer, or others, which come last.
KINDS = ("rms", "layer", "add_rms", "add_layer", "gated_rms", "rms_quantized", "layer_quantized")
OPS = [report.op_name(kind, way) for way in ("forward", "backward", "step") for kind in KINDS]
DTYPES = ["float32", "bfloat16", "float16"]


def about(header, *more):
    """What ran where, and the empty line that Markdown wants before a table."""
    device = next((header[key] for key in ("gpu", "cpu", "device") if key in header), "unknown device")
    cores = f", {header['cores']} cores" if "cores" in header else ""
    run = f"{device}{cores}, JAX {header['jax']}, {header['date']}, commit {header['commit']}: `{header['command']}`."
    return [" ".join([run, *more]), ""]


def is_step(row):
    return report.op_parts(row["op"])[1] == "step"


def is_chained(row):
    return row["op"].endswith(f", {report.CHAINED}")


def pivot(corner, rows, column_of, cell):
    """A line for each op and dtype, a column for each length or shape."""
    columns = list(dict.fromkeys(map(column_of, sorted(rows, key=lambda row: (row["N"], row["M"])))))
    cells = {(row["op"], row["dtype"], column_of(row)): cell(row) for row in rows}
    lines = [
        [f"{code(op)}, {dtype}", *(cells.get((op, dtype, column), "-") for column in columns)]
        for op, dtype in sorted({(row["op"], row["dtype"]) for row in rows}, key=position)
    ]
    return report.table([corner, *map(str, columns)], lines)


def position(key):
    """Where (op, dtype) stands: plain ops before those that say more after a comma."""
    (op, _, more), dtype = key[0].partition(", "), key[1]
    places = (known.index(name) if name in known else len(known) for name, known in ((op, OPS), (dtype, DTYPES)))
    return more, *places, op, dtype


def code(op):
    """The function's name as code: `rms_norm` forward."""
    name, _, rest = op.partition(" ")
    return f"`{name}` {rest}".strip()


def whole(results):
    """Every column as it is."""
    rows = results["rows"]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return about(results["header"]) + report.table_of(columns, rows)
