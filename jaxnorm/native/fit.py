"""Whether kernels that were built can be loaded and run: their file is whole, and fits GPU, driver and toolkit."""

import os
import re
import struct

# A driver reads kernels that were compressed for size from this version of CUDA on.
LEAST_DRIVER = (12, 4)

_Version = tuple[int, int]
# As CMake writes it: machine code, PTX or both; "a" is for that GPU alone, "f" for its family.
_CODE = re.compile(r"(\d+)(\d)([af]?)(?:-(real|virtual))?")


def why_not(*, architectures: str, toolkit: str, capability: str, driver: int) -> str | None:
    """Why kernels that were compiled for `architectures`, spaces between them, do not run, and the remedy.

    `capability` is the GPU's compute capability, as in "9.0", and `driver` what CUDA says of the driver, as 12040 for
    12.4; 0 is unknown, and assumed to do.
    """
    gpu = _version(capability)
    built = _version(toolkit)
    known = (driver // 1000, driver % 1000 // 10) if driver else None
    if known is not None and (known < LEAST_DRIVER or known[0] < built[0]):
        least = max(LEAST_DRIVER, (built[0], 0))
        return (
            f"the driver is of CUDA {_text(known)}, and the kernels, built with CUDA {_text(built)}, want one of "
            f"{_text(least)} or newer; update the driver, or build jaxnorm with an older CUDA toolkit"
        )
    codes = [_CODE.fullmatch(name) for name in architectures.split()]
    if not all(codes) or any(_has_machine_code(code, gpu) for code in codes if code):
        return None  # CMake's other names, as "native", are not known here
    flag = f"JAXNORM_CUDA_ARCHITECTURES={gpu[0]}{gpu[1]}"
    if not any(_has_ptx(code, gpu) for code in codes if code):
        return (
            f"the kernels were built for {architectures.replace(' ', ', ')}, and the GPU is of compute capability "
            f"{capability}; build jaxnorm for it, as with {flag} pip install ."
        )
    if known is not None and known < built:
        return (
            f"the kernels have PTX alone for a GPU of compute capability {capability}, which a driver of CUDA "
            f"{_text(built)} or newer compiles, and this one is of {_text(known)}; update the driver, or build jaxnorm "
            f"for that GPU, as with {flag} pip install ."
        )
    return None


def _has_machine_code(code: re.Match[str], gpu: _Version) -> bool:
    """Whether it runs as it is: code of a GPU does on that, and on later ones of the same major version."""
    own, (_, _, suffix, kind) = (int(code[1]), int(code[2])), code.groups()
    return kind != "virtual" and (own == gpu if suffix == "a" else own[0] == gpu[0] and own <= gpu)


def _has_ptx(code: re.Match[str], gpu: _Version) -> bool:
    """Whether a driver can compile it: PTX for a GPU does for all later ones."""
    own, (_, _, suffix, kind) = (int(code[1]), int(code[2])), code.groups()
    fits = own == gpu if suffix == "a" else own <= gpu and (not suffix or own[0] == gpu[0])
    return kind != "real" and fits


def _version(text: str) -> _Version:
    major, minor, *_ = map(int, text.split("."))
    return major, minor


def _text(version: _Version) -> str:
    return ".".join(map(str, version))


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
