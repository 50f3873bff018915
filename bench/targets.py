"""What a cell should reach, and the list of those that do not."""

# Percent of the rate of a copy in the same run, large arrays.
PERCENT_OF_COPY = {"forward": 97, "backward": 95}
# A cell is as fast as XLA within what two runs differ by.
TIMES_XLA = 0.95


def shortfalls(row):
    """What a row of the results misses, in words; [] if nothing."""
    words = []
    error, percent, xla, peer = (row.get(key) for key in ("error / tolerance", "% of copy", "x XLA", "x best peer"))
    wanted = PERCENT_OF_COPY.get(row["op"].split()[-1])
    if error is not None and not error <= 1:  # NaN is wrong as well
        words.append(f"WRONG, {error:.2g} times the tolerance")
    if percent is not None and wanted and percent < wanted:
        words.append(f"{percent:.1f} % of copy, wants {wanted}")
    if xla is not None and xla < TIMES_XLA:
        words.append(f"{xla:.2f} x XLA")
    if peer is not None and peer < 1:
        words.append(f"{peer:.2f} x {row['best peer']}")
    return words


def missing(rows):
    """One line for each row that misses something."""
    return [
        f"{row['op']}, {row['dtype']}, {row['shape']} ({row['M']}x{row['N']}): {'; '.join(words)}"
        for row in rows
        if (words := shortfalls(row))
    ]
