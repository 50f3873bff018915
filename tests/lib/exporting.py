"""Programs for every platform; those in `tests/artefacts` were written by an older build, and run in every later one.

    python tests/lib/exporting.py

writes them anew. That gives up what the old ones promise: do it for a new op, or where a contract ends on purpose.
"""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[:0] = [str(TESTS.parent), str(TESTS), str(TESTS / "lib")]
    import bench  # noqa: F401  # first: it lets the installed jaxnorm come before the clone's

import jax
from jax import export

import jaxnorm

PLATFORMS = ("cpu", "cuda", "tpu")
ARTEFACTS = TESTS / "artefacts"
WAYS = ("forward", "gradient")


def exported(op, function, size=None, symbols="rows", platforms=PLATFORMS):
    """For any number of rows, or of each of these symbols in place of them."""
    size = size or op.small
    dims = (*export.symbolic_shape(symbols), *size.dims[1:])
    return export.export(jax.jit(function), platforms=platforms)(*op.types(size._replace(dims=dims)))


def quantized_rms_norm(x):
    return jaxnorm.rms_norm_quantized(x, quantization=jaxnorm.Quantization("int8"))


def artefact(op, way) -> Path:
    return ARTEFACTS / f"{op.name.replace(',', '').replace(' ', '_')}-{way}.bin"


def function_of(op, way):
    """The results, and for a gradient those of all operands."""
    return op.run(op.function) if way == "forward" else op.gradient()


def main() -> None:
    from native import is_built
    from ops import OPS

    missing = [platform for platform in ("cpu", "gpu") if not is_built(platform)]
    if missing:
        sys.exit(f"no kernels for {' and '.join(missing)} are installed, so no program would hold calls of them")
    ARTEFACTS.mkdir(exist_ok=True)
    for op in OPS:
        for way in WAYS:
            artefact(op, way).write_bytes(exported(op, function_of(op, way)).serialize())


if __name__ == "__main__":
    main()
