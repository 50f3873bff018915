"""Programs for every platform, and those in `tests/artefacts`, which an older build wrote. Run, it writes these anew:

    python tests/lib/exporting.py

That gives up what the old ones promise. Do it for a new op, whose archive is then the only one to keep, or where a
contract ends on purpose. Where calls of an op get other operands or results, keep its old program, and the new one
beside it under a name that goes on after the old one's, as `softmax-gradient-with_where.bin`.
"""

import shutil
import sys
import zipfile
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[level]) for level in (2, 1)]
    import bench  # noqa: F401  # it lets the installed jaxnorm come before the clone's

import jax
from jax import export

PLATFORMS = ("cpu", "cuda", "tpu")
ARTEFACTS = Path(__file__).resolve().parents[1] / "artefacts"
WAYS = ("forward", "gradient")


def exported(op, function, size=None, symbols="rows", platforms=PLATFORMS):
    """For any number of rows, or of each of these symbols in place of them."""
    size = size or op.small
    dims = (*export.symbolic_shape(symbols), *size.dims[1:])
    return export.export(jax.jit(function), platforms=platforms)(*op.types(size._replace(dims=dims)))


def archive(op) -> Path:
    """That of a public function's programs, each under the name of a row of the table of ops."""
    return ARTEFACTS / f"{op.public}.zip"


def stem(op, way) -> str:
    return f"{op.name.replace(',', '').replace(' ', '_')}-{way}"


def artefacts(op, way) -> list[bytes]:
    """The row's program, and those since its calls have other operands or results."""
    first = stem(op, way)
    with zipfile.ZipFile(archive(op)) as programs:
        later = sorted(name for name in programs.namelist() if name.startswith(f"{first}-"))
        return [programs.read(name) for name in (f"{first}.bin", *later)]


def function_of(op, way):
    """The results, and for a gradient those of all operands."""
    return op.run(op.function) if way == "forward" else op.gradient()


def main() -> None:
    from internals import run_every_kernel
    from native import is_built
    from table import OPS

    missing = [platform for platform in ("cpu", "gpu") if not is_built(platform)]
    if missing:
        sys.exit(f"no kernels for {' and '.join(missing)} are installed, so no program would hold calls of them")
    shutil.rmtree(ARTEFACTS, ignore_errors=True)
    ARTEFACTS.mkdir()
    run_every_kernel()
    for op in OPS:
        for way in WAYS:
            program = exported(op, function_of(op, way)).serialize()
            with zipfile.ZipFile(archive(op), "a", zipfile.ZIP_DEFLATED) as programs:
                programs.writestr(f"{stem(op, way)}.bin", bytes(program))


if __name__ == "__main__":
    main()
