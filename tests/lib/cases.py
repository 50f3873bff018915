"""The dtypes, random operands, and comparisons of results."""

import functools
import inspect
import zlib

import jax
import jax.numpy as jnp
import numpy as np

import jaxnorm

KINDS = ("rms", "layer")


def by_position(function):
    """The function with its bias by position, behind scale, where it wants the name."""

    @functools.wraps(function)
    def norm(x, scale=None, bias=None, **options):
        return function(x, scale, bias=bias, **options)

    @functools.wraps(function)
    def of_sum(x, residual, scale=None, bias=None, **options):
        return function(x, residual, scale, bias=bias, **options)

    return of_sum if "residual" in list(inspect.signature(function).parameters)[:2] else norm


NORMS = {"rms": by_position(jaxnorm.rms_norm), "layer": jaxnorm.layer_norm}
ADDS = {"rms": by_position(jaxnorm.add_rms_norm), "layer": jaxnorm.add_layer_norm}
DTYPES = ("float32", "bfloat16", "float16")
ALONE, ALIKE = tuple((dtype,) for dtype in DTYPES), tuple((dtype, dtype) for dtype in DTYPES)
# The dtypes of x and of the residual: the same, a wide stream that takes narrow parts, and the reverse.
PAIRS = (*ALIKE, ("bfloat16", "float32"), ("float16", "float32"), ("float32", "bfloat16"))


def draw(name: str, dims, dtype="float32", mean=0.0, std=1.0):
    """Normal numbers that depend on the arguments only."""
    return array(_draw(name, dims, mean, std), dtype)


def _draw(name: str, dims, mean, std):
    generator = np.random.default_rng(zlib.crc32(f"{name} {dims}".encode()))
    return mean + std * generator.standard_normal(dims, np.float32)


def array(values: np.ndarray, dtype):
    """Rounded by NumPy: for `astype` and `jax.numpy.asarray` JAX compiles a program of each shape."""
    rounded = np.asarray(values).astype(jnp.dtype(dtype))
    is_of_no_mesh = jax.sharding.get_abstract_mesh().empty  # else it is of the mesh that is set
    return jax.device_put(rounded) if is_of_no_mesh else jnp.asarray(rounded)


def draw_x(dims, dtype="float32", name="x", mean=0.5, std=2.0):
    # Off centre, so that a norm that mixes up mean and no mean is found out.
    x = _draw(name, dims, mean, std)
    if dims[-1] < 32:
        # A few numbers may by chance lie close together and far from zero. LayerNorm's mean is then lost in its own
        # rounding: law 2 has such rows, law 1 is about the arithmetic.
        x = np.where(np.arange(dims[-1]) % 2 == 0, 1 + np.abs(x), -1 - np.abs(x))
    return array(x, dtype)


def draw_positions(dims, dtype="float32"):
    return array(np.floor(300 * np.abs(_draw("positions", dims, 0.0, 1.0))), dtype)


def draw_smooth(dims, dtype="float32"):
    return array(np.abs(_draw("smooth", dims, 1.0, 0.4)) + np.float32(0.1), dtype)


def _drawn(name, mean, std):
    return lambda dims, dtype="float32": draw(name, dims, dtype, mean, std)


draw_q = draw_x
draw_qkv = functools.partial(draw_x, name="qkv")
draw_k = functools.partial(draw_x, name="k", mean=-0.4, std=1.5)
draw_residual = _drawn("residual", -0.3, 4.0)
draw_gate = _drawn("gate", 0.5, 4.0)  # beyond where sigmoid is 0 or 1 in a half type
draw_up = _drawn("up", -0.3, 2.0)
draw_kernel = _drawn("kernel", 0.0, 1.0)
draw_scale = _drawn("scale", 1.0, 0.3)
draw_post_scale = _drawn("post_scale", 0.8, 0.2)
draw_q_scale, draw_k_scale = draw_scale, draw_post_scale
draw_bias = _drawn("bias", 0.1, 0.5)
draw_branch_scale = _drawn("branch_scale", 0.5, 0.8)


def away_from_init(parameters, dtype=None):
    """The parameters of a model, none of which is 0 or 1 throughout, so that none can be left out unseen."""
    leaves, structure = jax.tree.flatten(parameters)
    keys = jax.random.split(jax.random.key(2), len(leaves))
    moved = [leaf + 0.1 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(structure, [a.astype(dtype or leaf.dtype) for a, leaf in zip(moved, leaves, strict=True)])


def operands(dims, dtype="float32", axes=1):
    features = dims[len(dims) - axes :]
    return draw_x(dims, dtype), draw_scale(features, dtype), draw_bias(features, dtype)


def axis_of(axes: int):
    return -1 if axes == 1 else tuple(range(-axes, 0))


def with_gradients(function):
    """Of cotangents and operands: the results, and the gradients for these cotangents."""

    def of(cotangents, *args):
        results, pull_back = jax.vjp(function, *args)
        return results, pull_back(cotangents)

    return of


def both_ways(function, cotangents_of=lambda results: results):
    """Of operands: the results, and the gradients for these as cotangents, or for what is made of them."""

    def of(*args):
        results, pull_back = jax.vjp(function, *args)
        return results, pull_back(cotangents_of(results))

    return of


def bits(tree) -> list[bytes]:
    """For comparisons that must be exact, NaN and the sign of zero included."""
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def assert_close(actual, expected):
    """As two float32 programs that round in different places: relative to the largest number where that is above 1."""
    _assert_allclose(actual, expected, lambda e: 1e-5 * max(1.0, float(np.abs(np.float32(e)).max(initial=0))))


def assert_near(actual, expected, atol=2e-5):
    """The like where no large numbers cancel to small ones."""
    _assert_allclose(actual, expected, lambda _: atol)


def _assert_allclose(actual, expected, atol_of):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (e.shape, e.dtype)
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=atol_of(e))
