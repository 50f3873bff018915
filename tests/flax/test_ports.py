"""The ports of public models in `examples/ports`: each gives what the model gave, on one kernel each way for a norm."""

import importlib
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from native import native_calls

PORTS = Path(__file__).parents[2] / "examples/ports"
sys.path.insert(0, str(PORTS))  # as for a program that is run there

from compare import compare, difference, results  # noqa: E402

pytestmark = [pytest.mark.jax_version, pytest.mark.usefixtures("exact_products")]

# The norms in a gradient.
NORMS = {"flax_gemma": {"rms": (6 + 1, 6 + 1)}, "hf_llama": {"rms": (2 + 1, 2 + 1)}, "hf_t5": {"rms": (2 + 1, 2 + 1)}}

each_model = pytest.mark.parametrize("name", NORMS)


def test_every_port_is_here():
    assert {path.stem for path in PORTS.glob("*.py")} - {"compare"} == NORMS.keys()


@each_model
def test_float32(name):
    """Some ten roundings of float32 on the way through a model."""
    compared = compare(importlib.import_module(name).port())
    assert compared.output < 2e-6
    assert compared.gradient < 1e-5
    calls = {}
    for kind, (fwd, bwd) in NORMS[name].items():
        calls |= native_calls(kind, fwd=fwd, bwd=bwd)
    assert {f"jaxnorm_{target}": count for target, count in compared.calls.items()} == calls


@each_model
def test_bfloat16_is_as_close_to_float32_as_it_was(name):
    """But for what XLA does not round within its own fusions: by chance a little closer, or not quite."""
    port, wide = importlib.import_module(name).port(jnp.bfloat16), importlib.import_module(name).port().before
    operands = port.parameters, port.inputs
    expected = jax.jit(results(wide))(*jax.tree.map(widened, operands))
    before, after = (jax.jit(results(model))(*operands) for model in (port.before, port.after))
    assert [a.dtype for a in jax.tree.leaves(after)] == [b.dtype for b in jax.tree.leaves(before)]
    for exact, *rounded in zip(expected, before, after, strict=True):
        errors = [difference(exact, jax.tree.map(widened, tree)) for tree in rounded]
        assert errors[1] < 2 * errors[0]


def widened(array):
    return array.astype(jnp.float32) if array.dtype == jnp.bfloat16 else array
