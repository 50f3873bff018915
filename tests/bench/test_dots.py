"""What `bench dots` measures, but for the clock."""

import jax
import numpy as np
import pytest

from bench import dots

SHAPE = (3, 64, 32)


@pytest.mark.parametrize("name", dots.FORMS)
def test_a_form_is_near_to_bfloat16(name):
    form = dots.FORMS[name]
    arrays = dots.operands(SHAPE, 0)
    ours, xla = (jax.jit(dots.program(form, how))(*dots.quantized(form, *arrays)) for how in (None, "jnp"))
    expected = np.float64(dots.in_bfloat16(form, *arrays))
    assert ours.dtype == xla.dtype == "bfloat16"
    np.testing.assert_array_equal(ours, xla)
    error = np.linalg.norm(np.float64(ours) - expected) / np.linalg.norm(expected)
    assert error < (0.15 if "int4" in form.weights else 0.05)
