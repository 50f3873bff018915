"""Laws 7 and 9: programs that are written here and read elsewhere: for other platforms, by later builds and processes.

Those in `tests/artefacts.zip` are of older builds, and run in every later one.
"""

import itertools
import json
import os
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bad_calls import of_x
from cases import KINDS, NORMS as FUNCTIONS, assert_close, assert_near, bits, draw, draw_x, operands
from coverage import cover, over
from exporting import OF_NO_ROW, PLATFORMS, WAYS, artefacts, exported, exported_of_no_row, function_of, programs_of
from hlo import count_native_calls
from internals import partition
from jax import export
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from meshes import mesh_of, placed
from native import is_built, native_calls
from op import rows
from ops.products import assert_norms_close
from table import ADDED, EACH, EACH_OF_ALL, EVERY, GATED, NORMS, OPS, PER_HEAD
from transformations import loss_of

import jaxnorm

pytestmark = pytest.mark.jax_version
exact_products = pytest.mark.usefixtures("exact_products")


def value_and_gradients(op):
    return jax.value_and_grad(op.loss(), op.all)


def assert_same(op, actual, expected):
    if op.is_product and jax.default_backend() == "gpu":
        # An exported program has no kernels of products, and XLA divides less exactly as it rounds.
        assert_norms_close(actual, expected, 2.0**-5)
    elif op in (*NORMS, *PER_HEAD):
        assert_near(actual, expected, atol=1e-5)
    else:
        assert_close(actual, expected)


def of_rows(op, rows):
    return op.draw(op.small._replace(dims=(rows, *op.small.dims[1:])))


@exact_products
@over([op for op in EVERY if op in (*EACH_OF_ALL, *NORMS)], count=lambda op: [1, 5, 600])
def test_an_exported_program_runs_for_any_number_of_rows(op, count):
    program = export.deserialize(exported(op, value_and_gradients(op)).serialize())
    args = of_rows(op, count)
    assert_same(op, program.call(*args), jax.jit(value_and_gradients(op))(*args))


@pytest.mark.parametrize("op", EVERY, ids=str)
def test_a_program_for_every_platform_holds_the_native_calls_of_each(op):
    calls = count_native_calls(exported(op, value_and_gradients(op)).mlir_module())
    assert calls == op.exported_calls()


@exact_products
@pytest.mark.parametrize("op", EVERY, ids=str)
def test_an_exported_result(op):
    program = export.deserialize(exported(op, op.run(op.function)).serialize())
    args = of_rows(op, 5)
    assert count_native_calls(program.mlir_module()) == op.exported_calls(bwd=0)
    if op.is_product:
        assert_same(op, program.call(*args), jax.jit(op.run(op.function))(*args))
    else:
        assert bits(program.call(*args)) == bits(jax.jit(op.run(op.function))(*args))


@pytest.mark.parametrize("name", ["add_rms_norm", "qk_norm_rotary", "qkv_norm_rotary", "rms_norm_quantized"])
def test_results_of_an_exported_program_have_their_types(name):
    x, function = draw_x((2, 3, 4, 32)), jax.jit(partial(of_x(name)))
    program = export.deserialize(export.export(function, platforms=PLATFORMS)(x).serialize())
    assert jax.tree.structure(program.call(x)) == jax.tree.structure(function(x))


# On CUDA, rows so long have a workspace whose shape holds the unknown number of rows.
@pytest.mark.parametrize("op", NORMS, ids=str)
def test_a_program_for_any_number_of_long_rows(op):
    long = rows(2, 262_144)
    program = exported(op, value_and_gradients(op), long)
    assert_same(op, program.call(*op.draw(long)), jax.jit(value_and_gradients(op))(*op.draw(long)))


@exact_products
@pytest.mark.parametrize("op", EACH_OF_ALL, ids=str)
def test_an_exported_program_has_a_gradient(op):
    program = exported(op, op.loss()).serialize(vjp_order=1)
    gradient, args = jax.grad(export.deserialize(program).call, op.all), of_rows(op, 5)
    assert_same(op, gradient(*args), jax.jit(op.gradient())(*args))


@exact_products
@over(EACH_OF_ALL, symbols=lambda op: ["batch, length"])
def test_a_program_for_several_dimensions_of_unknown_size(op, symbols):
    program = exported(op, op.run(op.function), symbols=symbols)
    args = op.draw(op.small._replace(dims=(3, 5, *op.small.dims[1:])))
    assert_same(op, *(jax.tree.map(jnp.float32, f(*args)) for f in (program.call, op.run(op.function))))


# The normalised axis of unknown size: no kernel can be planned, the formula still holds.
@pytest.mark.parametrize("op", [*NORMS, *ADDED, GATED[1]], ids=str)
def test_a_program_for_rows_of_unknown_length(op):
    (cols,) = export.symbolic_shape("cols")
    program = export.export(jax.jit(op.gradient()), platforms=PLATFORMS)(*op.types(rows(4, cols)))
    args = op.draw(rows(4, 50))
    assert_same(op, program.call(*args), jax.jit(op.gradient())(*args))


# A weight for each of an unknown number of heads: no kernel finds it, the formula does.
@pytest.mark.parametrize("op", NORMS, ids=str)
def test_a_program_for_heads_before_an_axis_of_unknown_size(op):
    dims = export.symbolic_shape("4, b, 64")
    x, weight = jax.ShapeDtypeStruct(dims, "float32"), jax.ShapeDtypeStruct((4, 1, 64), "float32")
    program = export.export(jax.jit(op.gradient()), platforms=PLATFORMS)(x, weight, weight)
    args = op.draw(op.small._replace(dims=(4, 3, 64), weights=(4, 1, 64)))
    assert count_native_calls(program.mlir_module()) == {}
    assert_same(op, program.call(*args), jax.jit(op.gradient())(*args))


@cover(
    name=["softmax", "log_softmax"],
    mask=[
        *({"window": 3}, {"offset": -2}, {"offset": 2, "window": 3}, {"offset": -2, "window": 2**40}),
        *({"offset": np.array([-2, 1]), "window": 3}, {"offset": np.array([-2, 1])}),
    ],
    implementation=[None, "xla"],
)
def test_a_mask_of_an_unknown_number_of_queries(name, mask, implementation):
    of = jax.jit(partial(getattr(jaxnorm, name), causal=True, implementation=implementation, **mask))
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(jnp.exp(of(x))))))
    x = draw_x((2, 7, 16))
    for function in (of, gradient):
        types = jax.ShapeDtypeStruct(export.symbolic_shape("2, queries, 16"), "float32")
        program = export.export(function, platforms=PLATFORMS)(types)
        np.testing.assert_allclose(program.call(x), function(x), rtol=2e-6, atol=2e-6)


@over(OPS, platform=lambda op: ["cpu", "cuda", "rocm", "tpu"])
def test_native_calls_for_a_platform_that_may_be_absent(op, platform):
    module = {"cpu": "cpu", "cuda": "gpu"}.get(platform)
    traced = jax.jit(value_and_gradients(op)).trace(*op.draw(op.small))
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    has_kernels = module is not None and is_built(module)
    assert count_native_calls(text) == ({op.forward: 1, op.backward: 1} if has_kernels else {})
    assert platform != "tpu" or "custom_call" not in text


@pytest.mark.parametrize("op", EACH, ids=str)
def test_what_must_be_native_names_itself_where_nothing_is(op):
    native = jax.jit(partial(op.function, implementation="native", **op.small.options))
    message = f"^{op.public}: .*'native' cannot be compiled.*kernels for cpu and cuda.*None"
    with pytest.raises(RuntimeError, match=message):
        native.trace(*op.draw(op.small)).lower(lowering_platforms=("tpu",))


@over(OPS, way=lambda op: WAYS, count=lambda op: [1, 37])
def test_a_program_of_an_older_build_gives_what_this_build_computes(op, way, count):
    args = of_rows(op, count)
    expected = jax.jit(function_of(op, way))(*args)
    for program in map(export.deserialize, artefacts(op, way)):
        assert len(count_native_calls(program.mlir_module())) == 1 + (way == "gradient")
        actual = jax.jit(program.call)(*args)
        assert_close(*(jax.tree.map(lambda a: a.astype("float32"), tuple(results)) for results in (actual, expected)))


# The dtype of the first result of such a program, and what it calls.
OF_RESULTS = {
    "embedding": ("float32", "jaxnorm_segment_sum"),
    "segment_sum": ("bfloat16", "jaxnorm_segment_sum"),
    "sample": ("int32", "jaxnorm_sample_fwd"),
    "quantize": ("float32", "jaxnorm_quantize_fwd"),
    "softmax": ("bfloat16", "jaxnorm_softmax_fwd"),
}


def drawn_of_no_row(function, count):
    """Rows with an index, some of which are from the end, and some nowhere; or logits and uniform numbers."""
    if function == "sample":
        return draw("logits", (count, 50), "bfloat16", std=2.0), jnp.linspace(0.03, 0.97, count)
    if function in ("softmax", "quantize"):
        return (draw("x", (count, *((9, 24) if function == "softmax" else (256,))), "bfloat16"),)
    ids = np.random.default_rng(count).integers(-20, 60, count).astype("int32")
    rows = draw("rows", (count, 24), "bfloat16")
    return (draw("table", (50, 24)), ids, rows) if function == "embedding" else (rows, ids)


@pytest.mark.parametrize("count", [1, 37])
@pytest.mark.parametrize(("function", "way"), OF_NO_ROW)
def test_a_program_of_no_row_of_an_older_build(function, way, count):
    args = drawn_of_no_row(function, count)
    expected = jax.jit(OF_NO_ROW[function, way][0])(*args)
    dtype, target = OF_RESULTS[function]
    assert expected[0].dtype == dtype
    for program in map(export.deserialize, programs_of(function, f"{function}-{way}")):
        assert count_native_calls(program.mlir_module()) == {target: 2}
        assert_close(*(jax.tree.map(jnp.float32, results) for results in (jax.jit(program.call)(*args), expected)))


@pytest.mark.parametrize(("function", "way"), OF_NO_ROW)
def test_a_program_of_no_row_holds_the_calls_of_each_platform(function, way):
    text = exported_of_no_row(function, way).mlir_module()
    assert count_native_calls(text) == {OF_RESULTS[function][1]: is_built("cpu") + is_built("gpu")}


# What a call over a mesh is of, as texts of older builds have it: the names and the fields that specs had then.
ROW = {"axes": [-1], "epsilon": 1e-6, "native_for": None, "scale_offset": -0.0, "shards": None}
ROW |= {"compute_dtype": {"dtype": "float32"}, "out_dtype": {"dtype": "float32"}}
INT8, GATE = jaxnorm.Quantization("int8"), {"activation": "silu", "gate_first": True}
TO_INT8 = {"dtype": {"dtype": "int8"}, "granularity": "token", "group_size": None, "max_scale": None}
TO_INT8 |= {"power_of_two": False, "scales_dtype": {"dtype": "float32"}, "scales_layout": "row"}
OF_QUANTIZED = {"quantization": {"Quantization": TO_INT8}, "straight_through": False}
PLAIN = {"kind": "rms", "multiply_before_cast": True, "pad_to": 1, "with_unquantized": False, "x_hat_dtype": None}
FORMER = {
    "GatedNorm": (ROW | GATE, lambda x: jaxnorm.gated_rms_norm(x, x, gate_first=True)),
    "QuantizedNorm": (ROW | PLAIN | OF_QUANTIZED, partial(jaxnorm.rms_norm_quantized, quantization=INT8)),
    "GatedNormQuantized": (
        ROW | GATE | OF_QUANTIZED | {"grouped": False},
        lambda x: jaxnorm.gated_rms_norm_quantized(x, x, gate_first=True, quantization=INT8),
    ),
    "QuantizedDot": (
        {"out_dtype": {"dtype": "float32"}, "implementation": "jnp"},
        lambda x: jaxnorm.quantized_dot(x, jaxnorm.quantize_kernel(x.T, INT8), implementation="xla"),
    ),
}


@pytest.mark.parametrize("name", FORMER)
def test_a_spec_of_an_older_build_is_read(name):
    fields, function = FORMER[name]
    (spec,) = partition.decode(json.dumps([partition.VERSION, {name: fields}]).encode())
    assert repr(spec) in str(jax.make_jaxpr(function)(jnp.ones((4, 64))))


# Names of primitives had their directions in full.
def test_a_call_of_before_that_xla_splits(devices, monkeypatch):
    encode = partition.encode

    def former(platform, name, *call):
        return encode(platform, name.replace("_fwd", "_forward").replace("_bwd", "_backward"), *call)

    monkeypatch.setattr(partition, "encode", former)
    x = draw_x((8, 64))
    step = jax.jit(jax.value_and_grad(loss_of(partial(jaxnorm.layer_norm, implementation="native"))))
    expected = step(x)
    assert_close(step(placed(mesh_of(devices, AxisType.Auto), [x], [P("a")])[0]), expected)


# What outlives its process: compiled programs in JAX's cache, and exported ones for several devices.
DIMS = (8, 4, 64)

# Each process runs one of these programs, and says in JSON what came of it.
CACHED = """
import sys
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import jaxnorm

events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name.rpartition("/")[2]))
x, scale, norm = jnp.ones((8, 64)), jnp.ones(64), jaxnorm.layer_norm
if sys.argv[1] != "one device":
    axis_type = AxisType.Explicit if sys.argv[1] == "Explicit" else AxisType.Auto
    mesh = jax.make_mesh((2, jax.device_count() // 2), ("a", "b"), (axis_type,) * 2)
    jax.set_mesh(mesh)
    if sys.argv[1] == "shard_map over one axis":
        norm = jax.shard_map(norm, in_specs=(P("a"), P()), out_specs=P("a"), axis_names={"a"})
    rows, features = sys.argv[2].split()
    x = jax.device_put(x, NamedSharding(mesh, P(eval(rows), eval(features))))
    scale = jax.device_put(scale, NamedSharding(mesh, P(eval(features))))
events.clear()
step = jax.jit(jax.grad(lambda x, scale: norm(x, scale).sum(), (0, 1)))
step(x, scale)
print(json.dumps({"hits": events.count("cache_hits"), "misses": events.count("cache_misses")}))
"""
EXPORTED = """
import sys
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
import jaxnorm

program = jax.export.deserialize(open(sys.argv[1], "rb").read())
args = [arg for _, arg in sorted(np.load(sys.argv[2]).items())]
mesh = jax.make_mesh((program.nr_devices,), ("rows",), (jax.sharding.AxisType.Auto,))
args = [jax.device_put(arg, NamedSharding(mesh, spec)) for arg, spec in zip(args, (P("rows"), P(), P()))]
results = jax.tree.leaves(jax.jit(program.call)(*args))
np.savez(sys.argv[3], *results)
print(json.dumps({"program": jax.jit(program.call).lower(*args).compile().as_text()}))
"""


def loss_and_gradients(norm):
    return jax.value_and_grad(loss_of(norm), (0, 1, 2))


def run(program, *args, **environment):
    command = [sys.executable, "-P", "-c", "import json\n" + program, *map(str, args)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


ROWS, FEATURES = "'a' None", "None 'b'"


@pytest.mark.needs("several")
@pytest.mark.parametrize(
    ("mesh", "spec"),
    [("one device", ROWS), *itertools.product(("Auto", "Explicit", "shard_map over one axis"), (ROWS, FEATURES))],
)
def test_a_second_process_finds_what_the_first_compiled(tmp_path, mesh, spec):
    options = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    assert run(CACHED, mesh, spec, **options) == {"hits": 0, "misses": 1}
    assert run(CACHED, mesh, spec, **options) == {"hits": 1, "misses": 0}


def assert_another_process_gives(tmp_path, program, kind, calls):
    """Of an exported program, in a process that has this package and nothing of this file."""
    paths = [tmp_path / name for name in ("program", "args.npz", "results.npz")]
    paths[0].write_bytes(program.serialize())
    np.savez(paths[1], *operands(DIMS))
    assert count_native_calls(run(EXPORTED, *paths)["program"]) == calls
    actual = [array for _, array in sorted(np.load(paths[2]).items())]
    expected = jax.jit(loss_and_gradients(FUNCTIONS[kind]))(*operands(DIMS))
    assert_near(actual, jax.tree.leaves(expected))


def sharded_by(how, norm, mesh):
    """norm over all devices: split by XLA, or by a shard_map over all axes or one of them."""
    if how in ("Auto", "Explicit"):
        return norm
    axes, spec = (("a", "b"), P(("a", "b"))) if how == "shard_map" else ("a", P("a"))
    return jax.shard_map(norm, mesh=mesh, in_specs=(spec, P(), P()), out_specs=spec, axis_names=set(axes))


# Of a shard_map over one axis, a program for several platforms has the formula.
@pytest.mark.parametrize(
    ("how", "platforms", "is_native"),
    [
        *((how, PLATFORMS, True) for how in ("Auto", "Explicit", "shard_map")),
        ("shard_map over one axis", PLATFORMS, False),
        ("shard_map over one axis", None, True),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_exported_for_several_devices(tmp_path, devices, kind, how, platforms, is_native):
    mesh = mesh_of(devices, AxisType.Explicit if how == "Explicit" else AxisType.Auto)
    with jax.set_mesh(mesh):
        function = jax.jit(loss_and_gradients(sharded_by(how, FUNCTIONS[kind], mesh)))
        args = placed(mesh, operands(DIMS), (P(("a", "b")), P(), P()))
        program = export.export(function, platforms=platforms)(*args)
    assert_another_process_gives(tmp_path, program, kind, native_calls(kind, fwd=1, bwd=1) if is_native else {})


@pytest.mark.parametrize("kind", KINDS)
def test_exported_for_several_devices_and_any_number_of_rows(tmp_path, devices, kind):
    mesh = mesh_of(devices, AxisType.Auto)
    (rows,) = export.symbolic_shape(f"{len(devices)}*rows")
    types = [((rows, *DIMS[1:]), P(("a", "b"))), (DIMS[-1:], P()), (DIMS[-1:], P())]
    args = [jax.ShapeDtypeStruct(dims, jnp.float32, sharding=NamedSharding(mesh, spec)) for dims, spec in types]
    program = export.export(jax.jit(loss_and_gradients(FUNCTIONS[kind])), platforms=PLATFORMS)(*args)
    assert_another_process_gives(tmp_path, program, kind, {})
