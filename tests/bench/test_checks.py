"""The check before each cell of `bench gpu` and `bench cpu`: it passes what is right and sees what is wrong."""

import jax
import jax.numpy as jnp
import pytest

from bench import norms, ops, programs, shapes

FEW = {norms.HEADS: (2, shapes.HEADS, 32), norms.GROUPED: (40, 2 * norms.GROUP), norms.PADDED: (40, 200)}
FEW |= dict.fromkeys(("qk_norm_rotary", "qkv_norm_rotary"), (2, 5, 12, 16)) | {"group_norm": (2, 3, 4, 64)}


def check(kind, dtype, spoil=lambda i, leaf: leaf):
    """`spoil` changes the result of that number."""

    def spoilt(results):
        leaves, tree = jax.tree.flatten(results)
        return tree.unflatten(map(spoil, range(len(leaves)), leaves))

    return programs.check(ops.KINDS[kind], shapes.Shape("few", FEW.get(kind, (40, 256))), dtype, "native", spoilt)


@pytest.mark.kernels
@pytest.mark.parametrize("kind", ops.KINDS)
def test_the_check_passes_what_is_right(kind):
    assert check(kind, "bfloat16") < 1


def slightly_wrong(leaf):
    """Eight bits: the value before each, in magnitude if it is a float8."""
    if leaf.dtype.itemsize > 1:
        return leaf * 1.00001
    return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(leaf, jnp.int8) - 1, leaf.dtype)


@pytest.mark.parametrize("kind", ops.KINDS)
def test_the_check_sees_what_is_wrong(kind):
    seen = []
    assert check(kind, "float32", lambda i, leaf: seen.append(i) or leaf) < 1
    for wrong in seen:
        assert (
            not check(kind, "float32", lambda i, leaf, wrong=wrong: slightly_wrong(leaf) if i == wrong else leaf) <= 1
        )


def test_the_check_sees_what_is_not_zero_behind_a_row():
    assert check(norms.PADDED, "float32", lambda i, y: y if i else y.at[30, -1].add(0.001)) > 1


@pytest.mark.parametrize("kind", ["rms_quantized", "rms_quantized, int8"])
def test_the_check_sees_one_value_of_eight_bits_that_is_no_neighbour(kind):
    def two_away(i, leaf):
        if leaf.dtype.itemsize > 1:
            return leaf
        codes = jax.lax.bitcast_convert_type(leaf, jnp.int8)
        return jax.lax.bitcast_convert_type(codes.at[3, 5].add(jnp.where(codes[3, 5] > 0, -2, 2)), leaf.dtype)

    assert check(kind, "float32", two_away) > 1


def test_what_cancels_in_float32_may_be_no_neighbour():
    expected = jnp.array([57344.0, 0.0117, 1.0], jnp.float8_e5m2)
    codes = jax.lax.bitcast_convert_type(expected, jnp.int8)

    def moved(*steps):
        return jax.lax.bitcast_convert_type(codes - jnp.array(steps, jnp.int8), jnp.float8_e5m2)

    assert [programs.steps_apart(moved(*steps), expected) for steps in [(0, 13, 0), (0, 0, 13), (2, 0, 0)]] == [
        0,
        13,
        2,
    ]


def test_no_other_zero_is_taken_for_what_cancels():
    for dtype in (jnp.int8, jnp.float8_e4m3fn):
        assert programs.steps_apart(jnp.array([100, 2], dtype), jnp.array([100, 0], dtype)) >= 2
