"""Programs that were exported where kernels wanted another workspace: the same results, or an error that says so."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import bits
from coverage import over
from internals import ffi
from table import EACH, OPS

pytestmark = pytest.mark.cuda

SIZES = {
    "larger": lambda floats: 2 * floats + 3,
    "less by one": lambda floats: floats - 1,
    "half": lambda floats: floats // 2,
    "a twentieth": lambda floats: floats // 20,
}


def sizes(op):
    """Few rows and many, and long ones."""
    return [*op.many[:1], *op.lengths[-1:], *[size for size in op.sizes if size.dims[0] == 600][:1]]


@over(OPS, default=EACH, floats=lambda op: SIZES, dtypes=lambda op: op.dtypes, size=sizes)
def test_another_size(op, floats, dtypes, size, monkeypatch):
    args = op.draw(size, dtypes)
    cotangents = op.cotangents(args, **size.options)
    expected = jax.device_get(jax.jit(op.everything(size))(args, cotangents))
    wanted, changed = ffi.workspace, []

    def workspace(*call, **needs):
        found = [(floats(count),) for (count,) in wanted(*call, **needs)]
        changed.extend(found)
        return found

    monkeypatch.setattr(ffi, "workspace", workspace)
    try:
        actual = jax.device_get(jax.jit(op.everything(size))(args, cotangents))
    except jax.errors.JaxRuntimeError as error:
        actual = str(error)
    if isinstance(actual, str):
        assert "export it again" in actual
        assert floats is not SIZES["larger"]
    elif floats is SIZES["larger"] or not changed:
        assert bits(actual) == bits(expected)
    else:
        for a, e in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
            # Sums of another order, rounded once.
            eps = float(jnp.finfo(e.dtype).eps) if jnp.issubdtype(e.dtype, jnp.floating) else 0.0
            a, e = np.float32(a), np.float32(e)
            np.testing.assert_allclose(a, e, rtol=max(1e-4, eps), atol=1e-5 * max(1.0, np.abs(e).max(initial=0)))
