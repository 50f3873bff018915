"""Calls of the handlers themselves, with any buffers and attributes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from native import are_cuda_kernels, target

F32, F16, BF16 = jnp.float32, jnp.float16, jnp.bfloat16


def struct(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


# What a backward call has behind its results, of any size that suffices.
WORKSPACE = [struct(1 << 16)] if are_cuda_kernels() else []


def call(name, results, inputs, attributes):
    # A side effect, or XLA would drop a call without results. A new function each time, since JAX's cache takes
    # np.int32(1) and True for one.
    handler = jax.ffi.ffi_call(name, results, has_side_effect=True)
    arguments = [np.ones(i.shape, i.dtype) for i in inputs]
    return jax.block_until_ready(jax.jit(lambda *args: handler(*args, **attributes))(*arguments))


def is_refused(name, message):
    """The call within is an error of this target that says so."""
    return pytest.raises(jax.errors.JaxRuntimeError, match=f"{name}.*({message})")


def each_is_refused(name_of_target, make, table):
    """A test of each malformed call of a table: what it changes of a call that `make` makes, and what is said of it."""

    @pytest.mark.parametrize("name", table)
    def test(name):
        changes, message = table[name]
        with is_refused(name_of_target, message):
            make(**changes)

    return test


def each_kind_is_refused(way, make, table):
    """The like of a norm's target, for each kind of a file's tests."""

    @pytest.mark.parametrize("name", table)
    def test(kind, name):
        changes, message = table[name]
        with is_refused(target(kind, way), message):
            make(kind, **changes)

    return test


def without(attributes, missing):
    return {name: value for name, value in attributes.items() if name != missing}


def statistics(kind, like):
    """What a norm of this kind keeps."""
    return [like] * {"rms": 1, "layer": 2}[kind]
