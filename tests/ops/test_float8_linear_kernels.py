"""The kernels around the products of `float8_linear`: scales, values and transposed bytes, bit for bit NumPy's."""

from functools import partial

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import draw
from coverage import cover
from internals import BY_KERNELS, Float8Linear, transposed
from quantizing import assert_same, by_numpy

from jaxnorm import Quantization

pytestmark = pytest.mark.needs("cuda")

# Of rows that a block keeps, or reads twice, with room for the magnitudes of all columns, or not; and odd ones.
SHAPES = [(1, 16), (48, 64), (3, 5, 7), (257, 33), (2, 4096, 512), (40000, 64), (24, 20480), (24, 40960), (5, 81920)]


def spec_of(power_of_two):
    return Float8Linear(out_dtype=np.dtype("float32"), power_of_two=power_of_two)


def expected(array, axes, fold, power_of_two):
    """Values and scales with what shares a scale behind, of the array by rows and columns."""
    v = np.asarray(array, np.float32) * (1 if fold is None else np.asarray(fold))
    v = v.reshape(-1, v.shape[-1])
    v = v if axes == (-1,) else v.T
    values, scales = by_numpy(v, Quantization("float8_e4m3fn", power_of_two=power_of_two))
    return values, np.where(np.abs(v).max(1, keepdims=True) == 0, np.float32(0), scales)


def array_of(shape, dtype, not_finite):
    x = draw("x", shape).astype(dtype)
    x = x.at[..., -1, :].set(0).at[..., 2].set(0) if shape[0] > 1 else x
    for i, value in enumerate(not_finite):
        x = x.at[..., i, i].set(value)
    return x


each_array = cover(
    shape=SHAPES,
    dtype=["bfloat16", "float32", "float16"],
    folds=[True, False],
    power_of_two=[False, True],
    not_finite=[(), (np.nan, np.inf)],
)
each_matrix = cover(
    shape=[(1, 16), (1024, 96), (100, 1000), (257, 33), (8192, 96), (40000, 64), (20000, 72), (120000, 24)],
    dtype=["bfloat16", "float32", "float16"],
    power_of_two=[False, True],
    not_finite=[(), (np.nan, np.inf)],
    keeps=[True, False],
)


def factors_of(shape, folds):
    return [jnp.exp2(draw("factors", lengths)) if folds else None for lengths in (shape[-1:], (*shape[:-1], 1))]


@each_array
@emulated.wherever
def test_rows(shape, dtype, folds, power_of_two, not_finite):
    x = array_of(shape, dtype, not_finite[: min(shape[-2:])])
    of_columns, _ = factors_of(shape, folds)
    by_rows, none = jax.jit(partial(BY_KERNELS.gradient, spec_of(power_of_two), wants=(True, False)))(
        x, of_columns, None
    )
    values, scales = expected(x, (-1,), of_columns, power_of_two)
    assert_same(by_rows[:2], [values.reshape(shape), scales.reshape(*shape[:-1], 1)])
    assert none is None
    if not folds:
        assert_same(jax.jit(lambda x: BY_KERNELS.rounded(spec_of(power_of_two), x, (-1,)))(x)[:2], by_rows[:2])


@each_matrix
@emulated.wherever
def test_columns(shape, dtype, power_of_two, not_finite, keeps):
    x = array_of(shape, dtype, not_finite[: min(shape[-2:])])
    actual = jax.jit(lambda x: BY_KERNELS.rounded(spec_of(power_of_two), x, (0,), keeps=keeps))(x)
    values, scales = expected(x, (0,), None, power_of_two)
    assert_same([actual.transposed, actual.scales.reshape(-1, 1)], [values, scales])
    if keeps:
        assert_same([actual.values], [values.T])
    else:
        assert actual.values is None


@each_array
@pytest.mark.parametrize("with_rows", [True, False])
@emulated.wherever
def test_a_gradient(shape, dtype, folds, power_of_two, not_finite, with_rows):
    dy = array_of(shape, dtype, not_finite[: min(shape[-2:])])
    of_columns, of_rows = factors_of(shape, folds)
    by_rows, by_columns = jax.jit(partial(BY_KERNELS.gradient, spec_of(power_of_two), wants=(with_rows, True)))(
        dy, of_columns, of_rows
    )
    values, scales = expected(dy, (0,), of_rows, power_of_two)
    assert_same([by_columns.transposed, by_columns.scales.reshape(-1, 1)], [values, scales])
    if with_rows:
        values, scales = expected(dy, (-1,), of_columns, power_of_two)
        assert_same(by_rows[:2], [values.reshape(shape), scales.reshape(*shape[:-1], 1)])
    else:
        assert by_rows is None


@pytest.mark.parametrize("shape", [(1, 1), (16, 16), (128, 256), (100, 1000), (257, 33), (16, 4099), (4096, 48)])
@emulated.wherever
def test_bytes(shape):
    codes = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8).view(jnp.float8_e4m3fn)
    actual = jax.jit(transposed)(codes)
    np.testing.assert_array_equal(np.asarray(actual).view(np.uint8), codes.T.view(np.uint8))
