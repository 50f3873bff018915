"""An exported program outlives the build that wrote it: those in `tests/artefacts` run in every later one."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from cases import assert_close, draw_x
from coverage import over
from exporting import WAYS, artefacts, function_of
from hlo import count_native_calls
from internals import text
from jax import export
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from meshes import mesh_of, placed
from table import OPS

import jaxnorm

pytestmark = pytest.mark.jax_version


def read(op, way):
    return [export.deserialize(program) for program in artefacts(op, way)]


@over(OPS, way=lambda op: WAYS, count=lambda op: [1, 37])
def test_a_program_of_an_older_build_gives_what_this_build_computes(op, way, count):
    args = op.draw(op.small._replace(dims=(count, *op.small.dims[1:])))
    expected = jax.jit(function_of(op, way))(*args)
    for program in read(op, way):
        actual = jax.jit(program.call)(*args)
        assert_close(*(jax.tree.map(lambda a: a.astype("float32"), tuple(results)) for results in (actual, expected)))


@over(OPS, way=lambda op: WAYS)
def test_it_holds_native_calls(op, way):
    kinds = 1 if way == "forward" else 2
    for program in read(op, way):
        assert len(count_native_calls(program.mlir_module())) == kinds


# What a call over a mesh is of, as texts of older builds have it: the names and the fields that specs had then.
ROW = {"axes": [-1], "epsilon": 1e-6, "native_for": None, "scale_offset": -0.0, "shards": None}
ROW |= {"compute_dtype": {"dtype": "float32"}, "out_dtype": {"dtype": "float32"}}
GATE = {"activation": "silu", "gate_first": True}
TO_INT8 = {"dtype": {"dtype": "int8"}, "granularity": "token", "group_size": None, "max_scale": None}
TO_INT8 |= {"power_of_two": False, "scales_dtype": {"dtype": "float32"}, "scales_layout": "row"}
QUANTIZED = {"quantization": {"Quantization": TO_INT8}, "straight_through": False}
PLAIN = {"kind": "rms", "multiply_before_cast": True, "pad_to": 1, "with_unquantized": False, "x_hat_dtype": None}
FORMER = {
    "GatedNorm": (ROW | GATE, lambda x: jaxnorm.gated_rms_norm(x, x, gate_first=True)),
    "QuantizedNorm": (
        ROW | PLAIN | QUANTIZED,
        partial(jaxnorm.rms_norm_quantized, quantization=jaxnorm.Quantization("int8")),
    ),
    "GatedNormQuantized": (
        ROW | GATE | QUANTIZED | {"grouped": False},
        lambda x: jaxnorm.gated_rms_norm_quantized(x, x, gate_first=True, quantization=jaxnorm.Quantization("int8")),
    ),
}


@pytest.mark.parametrize("name", FORMER)
def test_a_spec_of_an_older_build_is_read(name):
    fields, function = FORMER[name]
    (spec,) = text.decode(json.dumps([text.VERSION, {name: fields}]).encode())
    assert repr(spec) in str(jax.make_jaxpr(function)(jnp.ones((4, 64))))


# Names of primitives had their directions in full.
@pytest.mark.several
def test_a_call_of_before_that_xla_splits(devices, monkeypatch):
    encode = text.encode

    def former(platform, name, *call):
        return encode(platform, name.replace("_fwd", "_forward").replace("_bwd", "_backward"), *call)

    monkeypatch.setattr(text, "encode", former)
    x = draw_x((8, 64))
    step = jax.jit(jax.value_and_grad(lambda x: jnp.sin(jaxnorm.layer_norm(x, implementation="native")).sum()))
    expected = step(x)
    assert_close(step(placed(mesh_of(devices, AxisType.Auto), [x], [P("a")])[0]), expected)
