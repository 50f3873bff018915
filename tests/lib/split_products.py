"""Products of float8 in programs that XLA splits, with a formula for the kernel by which each device makes its part."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from internals import ffi, quantized_dot
from jax.experimental.compilation_cache import compilation_cache
from jax.interpreters import mlir


def compile_anew(keeps):
    """Forgets what is compiled, and keeps what will be, as JAX_COMPILATION_CACHE_DIR says, or not."""
    jax.config.update("jax_enable_compilation_cache", keeps)
    compilation_cache.reset_cache()
    jax.clear_caches()


@pytest.fixture
def parts(monkeypatch):
    """The shapes of x and weights in each call of the kernel."""
    called, others, workspace_of = [], ffi.call, ffi.workspace

    def call(platform, target, ctx, values, **options):
        if target != quantized_dot.TARGET:
            return others(platform, target, ctx, values, **options)
        called.append(tuple(aval.shape for aval in ctx.avals_in[:3:2]))

        def formula(x, x_scales, weights, weight_scales, *bias):
            y = jnp.einsum("...k,nk->...n", x.astype(jnp.float32), weights.astype(jnp.float32))
            y = y * x_scales * weight_scales[:, 0]
            return [(y + bias[0].astype(jnp.float32) if bias else y).astype(ctx.avals_out[0].dtype)]

        return mlir.lower_fun(formula)(ctx, *values)

    def workspace(platform, target, *of_call, **needs):
        return () if target == quantized_dot.TARGET else workspace_of(platform, target, *of_call, **needs)

    monkeypatch.setattr(quantized_dot, "_why_not_here", lambda *_, **__: None)
    monkeypatch.setattr(ffi, "call", call)
    monkeypatch.setattr(ffi, "workspace", workspace)
    # A program that was compiled before, in another process too, is split no more.
    keeps = jax.config.jax_enable_compilation_cache
    compile_anew(keeps=False)
    yield called
    compile_anew(keeps=keeps)


def assert_near(actual, expected, dtype):
    """Parts that are added up over two devices are rounded before."""
    step = 1e-5 if dtype == "float32" else 2.0**-7
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    bound = step * np.abs(np.float64(expected)).max()
    np.testing.assert_allclose(np.float64(actual), np.float64(expected), rtol=step, atol=bound)
