"""The norms of `jaxnorm.equinox` are Equinox', by kernels."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import bits, draw, draw_bias, draw_scale, draw_x
from coverage import cover
from flax_apis import assert_close, assert_gradients_close
from hlo import compiled_text, count_native_calls
from native import native_calls

import jaxnorm.equinox

pytestmark = pytest.mark.jax_version

DTYPES = ["float32", "bfloat16", "float16"]
# The arguments of a norm, the shape of an example, and the kernel that serves it.
CASES = {
    "rms": ("RMSNorm", (16,), {}, (16,), "rms"),
    "rms without weights": ("RMSNorm", (16,), {"use_weight": False, "use_bias": False}, (16,), "rms"),
    "rms of two axes": ("RMSNorm", ((4, 16),), {"eps": 0.1}, (4, 16), "rms"),
    "layer": ("LayerNorm", (16,), {}, (16,), "layer"),
    "layer without bias": ("LayerNorm", (16,), {"use_bias": False}, (16,), "layer"),
    "layer of two axes": ("LayerNorm", ((4, 16),), {"eps": 0.1}, (4, 16), "layer"),
    "group": ("GroupNorm", (4, 12), {}, (12, 5, 6), "layer"),
    "group without weights": ("GroupNorm", (4, 12), {"channelwise_affine": False}, (12, 5, 6), "layer"),
    "group of channels alone": ("GroupNorm", (3, 12), {"eps": 0.1}, (12,), "group"),
    "one group": ("GroupNorm", (1, 12), {}, (12, 7), "layer"),
    "a group a channel": ("GroupNorm", (12, 12), {}, (12, 3, 3, 3), "layer"),
}


def with_weights(norm, dtype="float32"):
    """The norm with weights that are not its first ones."""
    drawn = {"weight": draw_scale, "bias": draw_bias}
    for name, of in drawn.items():
        if (weight := getattr(norm, name)) is not None:
            norm = eqx.tree_at(lambda norm, name=name: getattr(norm, name), norm, of(weight.shape, dtype))
    return norm


def both(case, dtype="float32"):
    """Equinox' norm and ours."""
    name, arguments, options, *_ = case
    modules = (eqx.nn, jaxnorm.equinox)
    return tuple(with_weights(getattr(module, name)(*arguments, **options), dtype) for module in modules)


def mapped(norm, x):
    """For an x with two axes before those of an example."""
    return jax.vmap(jax.vmap(norm))(x)


def gradients(norm, x):
    arrays, static = eqx.partition(norm, eqx.is_array)
    leaves = jax.tree.leaves(arrays)

    def loss(leaves, x):
        norm = eqx.combine(jax.tree.unflatten(jax.tree.structure(arrays), leaves), static)
        y = mapped(norm, x)
        return (y.astype(jnp.float32) * draw("dy", y.shape)).sum()

    return jax.jit(jax.grad(loss, argnums=(0, 1))), leaves


@cover(case=CASES, dtype=DTYPES, weights=["float32", "bfloat16"])
def test_result(case, dtype, weights):
    equinoxs, ours = both(case, weights)
    x = draw_x((2, 3, *case[3]), dtype)
    assert_close(mapped(ours, x), mapped(equinoxs, x))


@cover(case=CASES, dtype=DTYPES)
def test_gradients(case, dtype):
    x = draw_x((2, 3, *case[3]), dtype)
    (of_theirs, leaves), (of_ours, _) = (gradients(norm, x) for norm in both(case))
    assert_gradients_close(of_ours(leaves, x), of_theirs(leaves, x))


@cover(case=CASES)
def test_a_kernel_serves(case):
    x = draw_x((2, 3, *case[3]))
    gradient, leaves = gradients(both(case)[1], x)
    assert count_native_calls(compiled_text(gradient, leaves, x)) == native_calls(case[4], fwd=1, bwd=1)


def test_groups_far_from_zero_keep_their_digits():
    x = draw("x", (12, 8, 8), mean=1e4)
    centred = np.float64(x) - np.float64(x).reshape(4, -1).mean(axis=1).repeat(3)[:, None, None]
    std = centred.reshape(4, -1).std(axis=1).repeat(3)[:, None, None]
    y = jaxnorm.equinox.GroupNorm(4, 12)(x)
    np.testing.assert_allclose(y, centred / np.sqrt(std**2 + 1e-5), rtol=1e-3, atol=2e-3)


@cover(case=CASES)
def test_fields_are_equinoxs(case):
    equinoxs, ours = both(case)
    assert isinstance(ours, type(equinoxs))
    assert vars(ours).keys() == vars(equinoxs).keys()
    assert [str(path) for path, _ in jax.tree.leaves_with_path(ours)] == [
        str(path) for path, _ in jax.tree.leaves_with_path(equinoxs)
    ]


@cover(case=CASES)
def test_state_passes_through(case):
    norm, x, state = both(case)[1], draw_x(case[3]), object()
    y, passed = norm(x, state, key=None)
    assert passed is state
    assert bits(norm(x, state=state)[0]) == bits(y) == bits(norm(x))


@cover(case=CASES, x=[np.arange(1, 5), np.float64(2.5) * np.arange(1, 5)])
def test_integers_and_numpys_arrays_are_equinoxs_result(case, x):
    equinoxs, ours = both(case)
    x = np.broadcast_to(np.resize(x, case[3][-1]), case[3])
    x = jnp.asarray(x) if x.dtype.kind == "i" else x
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # float64 is truncated
        assert bits(ours(x)) == bits(equinoxs(x))


def test_another_shape_is_equinoxs_error():
    with pytest.raises(ValueError, match=r"must satisfy the invariant `shape == x\.shape`"):
        jaxnorm.equinox.LayerNorm(16)(draw_x((3, 16)))
    with pytest.raises(ValueError, match=r"must satisfy the invariant `shape == x\.shape`"):
        jaxnorm.equinox.RMSNorm(16)(draw_x((3, 16)))


def test_channels_that_groups_do_not_divide_are_equinoxs_error():
    with pytest.raises(TypeError, match="cannot reshape"):
        jaxnorm.equinox.GroupNorm(4, channelwise_affine=False)(draw_x((10, 3)))


@cover(shape=[(0, 12, 5), (2, 12, 0)])
def test_nothing_at_all(shape):
    norm = jaxnorm.equinox.GroupNorm(4, 12)
    assert jax.vmap(norm)(jnp.zeros(shape)).shape == shape
