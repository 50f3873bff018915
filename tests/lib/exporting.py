"""Programs for every platform, and those in `tests/artefacts`, which an older build wrote."""

import zipfile
from pathlib import Path

import jax
from jax import export

import jaxnorm

PLATFORMS = ("cpu", "cuda", "tpu")
ARTEFACTS = Path(__file__).resolve().parents[1] / "artefacts"
WAYS = ("forward", "gradient")


def exported(op, function, size=None, symbols="rows", platforms=PLATFORMS):
    """For any number of rows, or of each of these symbols in place of them."""
    size = size or op.small
    dims = (*export.symbolic_shape(symbols), *size.dims[1:])
    return export.export(jax.jit(function), platforms=platforms)(*op.types(size._replace(dims=dims)))


def quantized_rms_norm(x):
    return jaxnorm.rms_norm_quantized(x, quantization=jaxnorm.Quantization("int8"))


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
