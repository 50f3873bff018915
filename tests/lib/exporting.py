"""Programs for every platform, and those in `tests/artefacts.zip`, of an older build. Run, it writes these anew:

    python tests/lib/exporting.py

That gives up what the old ones promise. Do it for a new op, whose programs are then the only ones to keep, or where a
contract ends on purpose. Where calls of an op get other operands or results, keep its old program, and the new one
beside it under a name that goes on after the old one's, as `softmax-gradient-with_where.bin`.
"""

import sys
import zipfile
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[level]) for level in (2, 1)]
    import bench  # noqa: F401  # it lets the installed jaxnorm come before the clone's

import jax
import jax.numpy as jnp
from jax import export

import jaxnorm

PLATFORMS, ARTEFACTS = ("cpu", "cuda", "tpu"), Path(__file__).resolve().parents[1] / "artefacts.zip"
WAYS = ("forward", "gradient")


def exported(op, function, size=None, symbols="rows", platforms=PLATFORMS):
    """For any number of rows, or of each of these symbols in place of them."""
    size = size or op.small
    dims = (*export.symbolic_shape(symbols), *size.dims[1:])
    return export.export(jax.jit(function), platforms=platforms)(*op.types(size._replace(dims=dims)))


def _lookup_gradient(table, ids, rows):
    return jax.vjp(lambda table: jaxnorm.embedding(table, ids, dtype=rows.dtype), table)[1](rows)


def _tied_gradient(table, ids, rows):
    lookup = partial(jaxnorm.embedding, ids=ids, dtype=rows.dtype, return_table=True)
    return jax.vjp(lookup, table)[1]((rows, jnp.cos(table)))


def _sample(logits, uniform):
    """With all operands, which differ from row to row."""
    settings = {"temperature": uniform + 0.5, "top_k": (40 * uniform).astype("int32"), "top_p": 1 - uniform / 2}
    where = jnp.arange(50) % 7 != 3
    return jaxnorm.sample(logits, uniform=uniform, **settings, min_p=uniform / 9, where=where, return_log_prob=True)


def _quantize(x):
    q = jaxnorm.quantize(x, jaxnorm.Quantization("float8_e4m3fn", "group", 64, power_of_two=True))
    return q.dequantize(), q.scales


# What has no row in the table, by its function and way: the program's function, and its arguments' shapes and dtypes.
OF_NO_ROW = {
    ("embedding", "gradient"): (_lookup_gradient, {"50, 24": "float32", "rows": "int32", "rows, 24": "bfloat16"}),
    ("embedding", "tied_gradient"): (_tied_gradient, {"50, 24": "float32", "rows": "int32", "rows, 24": "bfloat16"}),
    ("segment_sum", "forward"): (
        partial(jaxnorm.segment_sum, num_segments=9),
        {"rows, 24": "bfloat16", "rows": "int32"},
    ),
    ("quantize", "forward"): (_quantize, {"rows, 256": "bfloat16"}),
    ("softmax", "windowed"): (partial(jaxnorm.softmax, causal=True, offset=3, window=5), {"rows, 9, 24": "bfloat16"}),
    ("sample", "forward"): (_sample, {"rows, 50": "bfloat16", "rows": "float32"}),
}


def exported_of_no_row(function, way):
    """Its program for any number of rows."""
    program, of_args = OF_NO_ROW[function, way]
    scope = export.SymbolicScope()
    args = [jax.ShapeDtypeStruct(export.symbolic_shape(shape, scope=scope), dtype) for shape, dtype in of_args.items()]
    return export.export(jax.jit(program), platforms=PLATFORMS)(*args)


def stem(op, way) -> str:
    """Of a public function's programs, the name of that of a row of the table of ops."""
    return f"{op.name.replace(',', '').replace(' ', '_')}-{way}"


def artefacts(op, way) -> list[bytes]:
    """The row's program, and those since its calls have other operands or results."""
    return programs_of(op.public, stem(op, way))


def programs_of(function, first) -> list[bytes]:
    first = f"{function}/{first}"
    with zipfile.ZipFile(ARTEFACTS) as programs:
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
    ARTEFACTS.unlink(missing_ok=True)
    run_every_kernel()
    jax.config.update("jax_traceback_in_locations_limit", 0)  # programs name no files
    for op in OPS:
        for way in WAYS:
            write(op.public, stem(op, way), exported(op, function_of(op, way)))
    for function, way in OF_NO_ROW:
        write(function, f"{function}-{way}", exported_of_no_row(function, way))


def write(function, name, program) -> None:
    with zipfile.ZipFile(ARTEFACTS, "a", zipfile.ZIP_DEFLATED) as programs:
        programs.writestr(f"{function}/{name}.bin", bytes(program.serialize()))


if __name__ == "__main__":
    main()
