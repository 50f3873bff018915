"""What is particular to `pad_to`: y's last axis is padded with zeros, which the backward does not read."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from cases import assert_close, bits, draw
from coverage import over
from formulas import padded
from hlo import compiled_text, count_native_calls
from op import Size, rows
from table import PADDED

ops = pytest.mark.parametrize("op", PADDED, ids=str)
SIZE = rows(5, 100, pad_to=64)


def y_and_gradients(op, **options):
    def function(cotangents, *args):
        results, pullback = jax.vjp(partial(op.function, **options), *args)
        return results, pullback(cotangents)

    return jax.jit(function)


# dy's rows may lie on other boundaries than the plain norm's, and sums over rows are then added in another order.
@pytest.mark.on_emulator
@over(PADDED, dtypes=lambda op: op.dtypes, size=lambda op: op.sizes)
def test_gradients_of_weights_are_those_of_the_plain_norm(op, dtypes, size):
    args = op.draw(size, dtypes)
    cotangents = op.cotangents(args, **size.options)
    plain = cotangents[0][..., : size.dims[-1]], cotangents[1]
    _, gradients = y_and_gradients(op, **size.options)(cotangents, *args)
    assert_close(gradients[2:], y_and_gradients(op)(plain, *args)[1][2:])


@ops
def test_what_is_padded_does_not_reach_the_gradient(op):
    args = op.draw(SIZE)
    dy, dsum = op.cotangents(args, pad_to=64)
    run = y_and_gradients(op, pad_to=64)
    assert bits(run((dy.at[:, 100:].set(jnp.nan), dsum), *args)[1]) == bits(run((dy, dsum), *args)[1])


# Many rows, arrays beyond the caches, whose results may go past them; and what is not finite.
@over(PADDED, size=lambda op: [rows(4099, 24, pad_to=32), rows(2048, 4000, pad_to=4096), rows(2048, 4096, pad_to=4097)])
def test_large_arrays(op, size):
    x, *others = op.draw(size)
    args = x.at[3, 5].set(jnp.inf), *others
    assert bits(jax.jit(partial(op.function, **size.options))(*args)) == bits(op.unfused(*args, **size.options))


@ops
def test_weights_for_each_head(op):
    args = op.draw(Size((5, 4, 100), (4, 100)))
    assert bits(op.function(*args, pad_to=64)[0]) == bits(padded(op.function(*args)[0], 64))


@ops
def test_the_formula(op):
    args = op.draw(SIZE)
    cotangents = op.cotangents(args, pad_to=64)
    actual, expected = (y_and_gradients(op, pad_to=64, implementation=i)(cotangents, *args) for i in (None, "jnp"))
    assert_close(actual, expected)


@ops
def test_no_pass_pads(op):
    """y comes padded from the native call, and dy goes into one as it is."""
    text = compiled_text(y_and_gradients(op, pad_to=64), (draw("a", (5, 128)), draw("b", (5, 100))), *op.draw(SIZE))
    assert count_native_calls(text) == op.calls(fwd=1, bwd=1)
    assert " pad(" not in text
