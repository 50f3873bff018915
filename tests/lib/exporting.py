"""Programs for every platform, and those in `tests/artefacts`, which an older build wrote."""

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


def artefact(op, way) -> Path:
    return ARTEFACTS / f"{op.name.replace(',', '').replace(' ', '_')}-{way}.bin"


def artefacts(op, way) -> list[Path]:
    """That, and those of the same op since its calls have other operands or results."""
    first = artefact(op, way)
    return [first, *sorted(ARTEFACTS.glob(f"{first.stem}-*.bin"))]


def function_of(op, way):
    """The results, and for a gradient those of all operands."""
    return op.run(op.function) if way == "forward" else op.gradient()
