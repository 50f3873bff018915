"""What a cell should reach, and the list of those that do not."""

from bench import report

# Percent of the rate of a copy in the same run, large arrays.
PERCENT_OF_COPY = {"forward": 97, "backward": 95}
PERCENT_OF_COPY_QUANTIZED = 95
PERCENT_OF_COPY_GATED = 95
PERCENT_OF_COPY_PER_HEAD = 95
# A cell is as fast as XLA within what two runs differ by.
TIMES_XLA = 0.95
# Of the grid, to float8_e4m3fn with a scale a token: there XLA reached half of a copy's rate, and less.
TIMES_XLA_QUANTIZED = 2


def is_quantized(row):
    return row["op"].split()[0].endswith("norm_quantized")


def percent_of_copy(row):
    """None where nothing is wanted."""
    kind, direction = report.op_parts(row["op"])
    if is_quantized(row):
        return PERCENT_OF_COPY_QUANTIZED
    if direction not in PERCENT_OF_COPY or not kind.startswith(("rms", "layer", "add_", "gated_rms")):
        return None
    if kind.startswith("gated_"):
        return PERCENT_OF_COPY_GATED
    return PERCENT_OF_COPY_PER_HEAD if kind.endswith("a scale a head") else PERCENT_OF_COPY[direction]


def times_xla(row):
    is_plain = ", " not in row["op"]
    return TIMES_XLA_QUANTIZED if is_quantized(row) and is_plain and row["shape"].startswith("grid ") else TIMES_XLA


def in_words(rows):
    """What rows of the grid should reach."""
    wanted = {(report.op_parts(row["op"])[1], percent_of_copy(row)) for row in rows if not is_quantized(row)}
    percents = ", ".join(f"{way} {percent} %" for way in PERCENT_OF_COPY for of, percent in sorted(wanted) if of == way)
    unquantized = f"{percents} of the copy, {TIMES_XLA} of XLA's speed"
    quantized = (
        f"{PERCENT_OF_COPY_QUANTIZED} % of the copy, {TIMES_XLA_QUANTIZED} times XLA's speed "
        f"({TIMES_XLA} of it where a variant is named)"
    )
    found = [words for words, kind in ((unquantized, False), (quantized, True)) if kind in map(is_quantized, rows)]
    return f"{', quantised '.join(found)}, or the fastest other package's"


def shortfalls(row):
    """What a row of the results misses, in words; [] if nothing."""
    words = []
    error, percent, xla, peer = (row.get(key) for key in ("error / tolerance", "% of copy", "x XLA", "x best peer"))
    wanted = percent_of_copy(row)
    if error is not None and not error <= 1:  # NaN is wrong as well
        words.append(f"WRONG, {error:.2g} times the tolerance")
    if percent is not None and wanted and percent < wanted:
        words.append(f"{percent:.1f} % of copy, wants {wanted}")
    if xla is not None and xla < times_xla(row):
        words.append(f"{xla:.2f} x XLA")
    if peer is not None and peer < 1:
        words.append(f"{peer:.2f} x {row['best peer']}")
    return words


def below(header, rows):
    """What stands below the table of a run of single ops: one line for each row that misses something."""
    if "cpu" in header:
        slower = [row for row in rows if row["x XLA"] < 1]
        return {"slower": [f"{row['op']} {row['dtype']} {row['shape']}: {row['x XLA']:.2f} x XLA" for row in slower]}
    return {"missing": missing(rows)} if "gpu" in header else {}


def missing(rows):
    return [
        f"{row['op']}, {row['dtype']}, {row['shape']} ({row['M']}x{row['N']}): {'; '.join(words)}"
        for row in rows
        if (words := shortfalls(row))
    ]
