"""Laws 7 and 9: programs for other platforms, written here and read anywhere."""

from functools import partial

import exporting
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import assert_close, assert_near, bits, draw_x
from coverage import cover, over
from exporting import PLATFORMS, exported
from hlo import count_native_calls
from jax import export
from native import is_built
from op import rows
from table import ADDED, EACH, GATED, NORMS, OPS, PER_HEAD, QUANTIZED

import jaxnorm
from jaxnorm import Quantized

pytestmark = pytest.mark.jax_version


def value_and_gradients(op):
    return jax.value_and_grad(op.loss(), op.all)


def assert_same(op, actual, expected):
    if op in (*NORMS, *PER_HEAD):
        assert_near(actual, expected, atol=1e-5)
    else:
        assert_close(actual, expected)


def of_rows(op, rows):
    return op.draw(op.small._replace(dims=(rows, *op.small.dims[1:])))


@over(OPS, default=(*EACH, *NORMS), count=lambda op: [1, 5, 600])
def test_an_exported_program_runs_for_any_number_of_rows(op, count):
    program = export.deserialize(exported(op, value_and_gradients(op)).serialize())
    args = of_rows(op, count)
    assert_same(op, program.call(*args), jax.jit(value_and_gradients(op))(*args))


@pytest.mark.parametrize("op", OPS, ids=str)
def test_a_program_for_every_platform_holds_the_native_calls_of_each(op):
    calls = count_native_calls(exported(op, value_and_gradients(op)).mlir_module())
    assert calls == op.exported_calls()


# The result itself, as a program of inference has it.
@pytest.mark.parametrize("op", OPS, ids=str)
def test_an_exported_result(op):
    program = export.deserialize(exported(op, op.run(op.function)).serialize())
    args = of_rows(op, 5)
    assert count_native_calls(program.mlir_module()) == op.exported_calls(bwd=0)
    assert bits(program.call(*args)) == bits(jax.jit(op.run(op.function))(*args))


def test_an_exported_result_that_is_quantised_has_its_type():
    to = QUANTIZED[0]
    function = jax.jit(partial(exporting.quantized_rms_norm))
    program = export.deserialize(export.export(function, platforms=PLATFORMS)(*to.types(to.small)[:1]).serialize())
    assert isinstance(program.call(to.draw(to.small)[0]), Quantized)


# On CUDA, rows so long have a workspace whose shape holds the unknown number of rows.
@pytest.mark.parametrize("op", NORMS, ids=str)
def test_a_program_for_any_number_of_long_rows(op):
    long = rows(2, 262_144)
    program = exported(op, value_and_gradients(op), long)
    assert_same(op, program.call(*op.draw(long)), jax.jit(value_and_gradients(op))(*op.draw(long)))


@pytest.mark.parametrize("op", EACH, ids=str)
def test_an_exported_program_has_a_gradient(op):
    program = exported(op, op.loss()).serialize(vjp_order=1)
    gradient = jax.grad(export.deserialize(program).call, op.all)
    args = of_rows(op, 5)
    assert_same(op, gradient(*args), jax.jit(op.gradient())(*args))


@over(EACH, symbols=lambda op: ["batch, length"])
def test_a_program_for_several_dimensions_of_unknown_size(op, symbols):
    program = exported(op, op.run(op.function), symbols=symbols)
    args = op.draw(op.small._replace(dims=(3, 5, *op.small.dims[1:])))
    assert_same(
        op, jax.tree.map(jnp.float32, program.call(*args)), jax.tree.map(jnp.float32, op.run(op.function)(*args))
    )


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
    implementation=[None, "jnp"],
)
def test_a_mask_of_an_unknown_number_of_queries(name, mask, implementation):
    of = jax.jit(partial(getattr(jaxnorm, name), causal=True, implementation=implementation, **mask))
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(jnp.exp(of(x))))))
    x = draw_x((2, 7, 16))
    for function in (of, gradient):
        types = jax.ShapeDtypeStruct(export.symbolic_shape("2, queries, 16"), "float32")
        program = export.export(function, platforms=PLATFORMS)(types)
        np.testing.assert_allclose(program.call(x), function(x), rtol=2e-6, atol=2e-6)


def lowered_for(op, platform):
    return jax.jit(value_and_gradients(op)).trace(*op.draw(op.small)).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("op", OPS, ids=str)
def test_no_native_call_for_a_tpu(op):
    assert "custom_call" not in lowered_for(op, "tpu")


@over(OPS, platform=lambda op: {"cpu": ("cpu", "cpu"), "cuda": ("cuda", "gpu")})
def test_native_calls_for_a_platform_that_may_be_absent(op, platform):
    name, backend = platform
    calls = {op.forward: 1, op.backward: 1} if is_built(backend) else {}
    assert count_native_calls(lowered_for(op, name)) == calls


@pytest.mark.parametrize("op", EACH, ids=str)
def test_no_native_call_for_rocm(op):
    assert count_native_calls(lowered_for(op, "rocm")) == {}


@pytest.mark.parametrize("op", EACH, ids=str)
def test_what_must_be_native_names_itself_where_nothing_is(op):
    native = jax.jit(partial(op.function, implementation="native", **op.small.options))
    message = f"^{op.public}: .*'native' cannot be compiled.*kernels for cpu and cuda.*None"
    with pytest.raises(RuntimeError, match=message):
        native.trace(*op.draw(op.small)).lower(lowering_platforms=("tpu",))
