"""Whether a library's file is whole: the loader reads beyond the end of one that is not, which ends the process."""

import os
import struct

# Of the header of a file of ELF: its beginning, and where it says where the headers of segments begin, how long each of
# these is and how many there are. Of a segment's: where it says where in the file that begins, and how long it is.
MAGIC, LENGTH, TABLE, ROW = b"\x7fELF\x02\x01", 64, 32, 54
BEGIN, BYTES = 8, 32


def check_whole(path: str) -> None:
    """ImportError where bytes are missing. What is no 64-bit file of ELF is left to the loader."""
    with open(path, "rb") as file:
        header = file.read(LENGTH)
        if len(header) < LENGTH or not header.startswith(MAGIC):
            return
        (first,), (row, rows) = struct.unpack_from("<Q", header, TABLE), struct.unpack_from("<HH", header, ROW)
        file.seek(first)
        table = file.read(row * rows)
    needed = first + row * rows
    for at in range(0, len(table) - row + 1, row or 1):
        begin, length = (struct.unpack_from("<Q", table, at + field)[0] for field in (BEGIN, BYTES))
        needed = max(needed, begin + length)
    if (size := os.path.getsize(path)) < needed:
        raise ImportError(f"{path}: file too short, {size} bytes of {needed}")
