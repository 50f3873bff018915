"""An op that one file adds, out of the package's tree: everything that JAX does with a formula works with it."""

import ctypes
import subprocess
from functools import partial

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import assert_close, bits, draw, draw_x, operands
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from toy.l2_norm import NATIVE, l2_norm
from transformations import TRANSFORMATIONS, loss_of

X = draw_x((8, 3, 40))
pytestmark = [pytest.mark.jax_version, pytest.mark.xdist_group("toy op")]
# As the package's kernels are compiled, for the baseline instruction set. Symbols are hidden, or the table would stand
# for another of the same name. No op calls all functions of the headers.
COMPILE = ["g++", "-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden"]
FLAGS = ["-O2", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra", "-Werror", "-Wno-unused-function"]


@pytest.fixture(scope="module", autouse=True)
def kernels(request, tmp_path_factory):
    """Builds the native part for the CPU, where a test wants it, and registers its handlers as any library's are."""
    wanted = (mark.args for item in request.session.items for mark in item.iter_markers("needs"))
    if ("toys",) in wanted:
        library, tests = tmp_path_factory.mktemp("toy") / "l2_norm.so", emulated.ROOT / "tests"
        includes = ["-I", emulated.ROOT / "src", "-I", tests, "-isystem", jax.ffi.include_dir()]
        source = tests / "toy" / "l2_norm.cc"
        subprocess.run([*COMPILE, *FLAGS, *includes, source, "-o", library], check=True)
        for target in NATIVE.targets:
            handler = getattr(ctypes.cdll.LoadLibrary(library), target.removeprefix("toy_"))
            jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(handler), platform="cpu")


def formula(x, epsilon=1e-6):
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + epsilon)).astype(x.dtype)


def weighted(norm):
    return lambda x, scale=1.0, bias=0.0: norm(x) * scale + bias


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_transformations(name):
    ours, theirs = (jax.jit(TRANSFORMATIONS[name].transform(weighted(norm))) for norm in (l2_norm, formula))
    assert_close(ours(*operands((6, 10))), theirs(*operands((6, 10))))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_formula_is_what_runs_by_name(dtype):
    x = X.astype(dtype)
    assert bits(jax.jit(partial(l2_norm, implementation="xla"))(x)) == bits(jax.jit(formula)(x))


def assert_gradients_are_close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("spec", [P("i"), P(None, None, "i")], ids=str)
def test_sharded(devices, spec, axis_type):
    mesh = jax.make_mesh((len(devices),), ("i",), (axis_type,), devices=devices)
    x = jax.device_put(X, NamedSharding(mesh, spec))
    gradient = jax.jit(jax.grad(loss_of(l2_norm)))(x)
    assert gradient.sharding.is_equivalent_to(x.sharding, x.ndim)
    assert_gradients_are_close(gradient, jax.grad(loss_of(formula))(X))


def test_shard_map():
    mesh = jax.make_mesh((len(jax.devices()),), ("rows",), (AxisType.Auto,))
    mapped = jax.shard_map(l2_norm, mesh=mesh, in_specs=P("rows"), out_specs=P("rows"))
    assert_gradients_are_close(jax.jit(mapped)(X), formula(X))
    assert_gradients_are_close(jax.jit(jax.grad(loss_of(mapped)))(X), jax.grad(loss_of(formula))(X))


def test_between_forward_and_backward_only_x_and_a_number_for_each_row_live():
    x = draw("x", (8, 3, 40), "bfloat16")
    pullback = jax.eval_shape(lambda x: jax.vjp(l2_norm, x)[1], x)
    kept = sorted((leaf.size, leaf.dtype.name) for leaf in jax.tree.leaves(pullback) if leaf.size > 1)
    assert kept == [(8 * 3, "float32"), (8 * 3 * 40, "bfloat16")]


def test_native_by_name_where_there_is_no_kernel():
    with pytest.raises(RuntimeError, match=r"^l2_norm: .*native.*has length 0.*implementation=None"):
        l2_norm(X[..., :0], implementation="native")


def test_errors_are_those_of_every_op():
    with pytest.raises(TypeError, match=r"^l2_norm: x must have a floating-point dtype"):
        l2_norm(jnp.arange(4))


@pytest.mark.needs("toys")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (2, 5, 128), (3, 513), (2, 20_000)], ids=str)
def test_the_kernels_at_each_length(shape, dtype):
    x = draw("x", shape, dtype)
    (y, dx), (expected, dx_expected) = (
        jax.tree.map(lambda a: np.asarray(a, np.float64), (norm(x), jax.grad(loss_of(norm))(x)))
        for norm in (partial(l2_norm, implementation="native"), formula)
    )
    error = 4 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(y, expected, rtol=error, atol=1e-7)
    assert np.linalg.norm(dx - dx_expected) <= error * np.linalg.norm(dx_expected) + 1e-6


@pytest.mark.needs("toys")
def test_a_gradient_is_one_native_call_each_way():
    text = jax.jit(jax.grad(loss_of(partial(l2_norm, implementation="native")))).lower(X).compile().as_text()
    assert [text.count(f'custom_call_target="{target}"') for target in NATIVE.targets] == [1, 1]
