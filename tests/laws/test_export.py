"""Laws 7 and 9: programs for other platforms, written here and read anywhere."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import KINDS, NORMS, formula, operands
from hlo import count_native_calls
from jax import export
from native import is_built, target
from transformations import loss_of

import jaxnorm

PLATFORMS = ("cpu", "cuda", "tpu")

kinds = pytest.mark.parametrize("kind", KINDS)


def value_and_gradients(norm):
    return jax.value_and_grad(loss_of(norm), (0, 1, 2))


def exported(function, platforms):
    """For any number of rows."""
    (rows,) = export.symbolic_shape("rows")
    features = jax.ShapeDtypeStruct((64,), jnp.float32)
    return export.export(jax.jit(function), platforms=platforms)(
        jax.ShapeDtypeStruct((rows, 64), jnp.float32), features, features
    )


def assert_close(actual, expected):
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5), actual, expected)


@pytest.mark.parametrize("rows", [1, 5, 600])
@kinds
def test_an_exported_program_runs_for_any_number_of_rows(kind, rows):
    program = export.deserialize(exported(value_and_gradients(NORMS[kind]), PLATFORMS).serialize())
    args = operands((rows, 64))
    assert_close(program.call(*args), jax.jit(value_and_gradients(formula(kind)))(*args))


# On CUDA, rows so long have a workspace whose shape holds the unknown number of rows.
@kinds
def test_a_program_for_any_number_of_long_rows(kind):
    long = jax.ShapeDtypeStruct((262_144,), jnp.float32)
    (rows,) = export.symbolic_shape("rows")
    x = jax.ShapeDtypeStruct((rows, 262_144), jnp.float32)
    program = export.export(jax.jit(value_and_gradients(NORMS[kind])), platforms=PLATFORMS)(x, long, long)
    args = operands((2, 262_144))
    assert_close(program.call(*args), jax.jit(value_and_gradients(formula(kind)))(*args))


@kinds
def test_an_exported_program_has_a_gradient(kind):
    program = exported(loss_of(NORMS[kind]), PLATFORMS).serialize(vjp_order=1)
    gradient = jax.grad(export.deserialize(program).call, (0, 1, 2))
    args = operands((5, 64))
    assert_close(gradient(*args), jax.grad(loss_of(formula(kind)), (0, 1, 2))(*args))


@kinds
def test_a_program_for_every_platform_holds_the_native_calls_of_each(kind):
    calls = count_native_calls(exported(value_and_gradients(NORMS[kind]), PLATFORMS).mlir_module())
    each = is_built("cpu") + is_built("gpu")
    assert calls == ({target(kind, "fwd"): each, target(kind, "bwd"): each} if each else {})


@kinds
def test_a_program_for_several_dimensions_of_unknown_size(kind):
    batch, length = export.symbolic_shape("batch, length")
    x = jax.ShapeDtypeStruct((batch, length, 64), jnp.bfloat16)
    program = export.export(jax.jit(NORMS[kind]), platforms=PLATFORMS)(x)
    args = operands((3, 5, 64), "bfloat16")[:1]
    np.testing.assert_allclose(np.float32(program.call(*args)), np.float32(formula(kind)(*args)), rtol=1e-2, atol=1e-3)


# The normalised axis of unknown size: no kernel can be planned, the formula still holds.
@kinds
def test_a_program_for_rows_of_unknown_length(kind):
    (cols,) = export.symbolic_shape("cols")
    x = jax.ShapeDtypeStruct((4, cols), jnp.float32)
    program = export.export(jax.jit(jax.grad(loss_of(NORMS[kind]))), platforms=PLATFORMS)(x)
    args = operands((4, 50))[:1]
    assert_close(program.call(*args), jax.grad(loss_of(formula(kind)))(*args))


@kinds
def test_no_native_call_for_a_tpu(kind):
    program = jax.jit(value_and_gradients(NORMS[kind])).trace(*operands((5, 64))).lower(lowering_platforms=("tpu",))
    assert "custom_call" not in program.as_text()


@pytest.mark.parametrize(("platform", "backend"), [("cpu", "cpu"), ("cuda", "gpu")])
@kinds
def test_native_calls_for_a_platform_that_may_be_absent(kind, platform, backend):
    traced = jax.jit(value_and_gradients(NORMS[kind])).trace(*operands((5, 64)))
    calls = count_native_calls(traced.lower(lowering_platforms=(platform,)).as_text())
    assert calls == ({target(kind, "fwd"): 1, target(kind, "bwd"): 1} if is_built(backend) else {})


@kinds
def test_no_native_call_for_rocm(kind):
    traced = jax.jit(value_and_gradients(NORMS[kind])).trace(*operands((5, 64)))
    assert count_native_calls(traced.lower(lowering_platforms=("rocm",)).as_text()) == {}


TWO_ARRAYS = {
    "add_rms_norm": jaxnorm.add_rms_norm,
    "add_layer_norm": jaxnorm.add_layer_norm,
    "gated_rms_norm": partial(jaxnorm.gated_rms_norm, activation="silu", gate_first=True),
    "rms_norm_quantized": lambda x, r, **options: jaxnorm.rms_norm_quantized(
        x, residual=r, quantization=jaxnorm.Quantization("int8"), **options
    ),
}


@pytest.mark.parametrize("name", TWO_ARRAYS)
def test_what_must_be_native_names_itself_where_nothing_is(name):
    native = jax.jit(partial(TWO_ARRAYS[name], implementation="native"))
    x = jnp.ones((4, 8))
    with pytest.raises(RuntimeError, match=f"^{name}: .*'native' cannot be compiled.*kernels for cpu and cuda.*None"):
        native.trace(x, x).lower(lowering_platforms=("tpu",))
