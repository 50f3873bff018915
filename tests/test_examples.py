"""The examples run as they are, on sizes for a CPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from coverage import in_full
from flax import nnx
from hlo import count_native_calls
from native import is_platform_with_kernels
from processes import STRICT

from bench import report

pytestmark = [pytest.mark.any_code, pytest.mark.long]

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name, *args, **environment):
    command = [*STRICT, EXAMPLES / name, *args]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_train_images(tmp_path):
    sizes = ["--batch", "4", "--size", "16", "--channels", "16"]
    out = ["--out", tmp_path / "images.png"]
    # All digits of a GPU's convolutions of float32.
    printed = run("train_images.py", "--steps", "3", *sizes, *out, JAX_DEFAULT_MATMUL_PRECISION="highest")
    assert float(re.search(r"between the curves: (\S+) at step", printed)[1]) < 1e-4
    assert (tmp_path / "images.png").read_bytes().startswith(b"\x89PNG")


# Over 16 seeds, with XLA's optimisations and without, the loss in float8 was from 0.42 % below that in bfloat16 to
# 0.46 % above it.
def test_train_float8(tmp_path):
    text = ["--text", EXAMPLES.parent / "LICENSE", "--png", tmp_path / "float8.png"]
    flags = "--xla_backend_optimization_level=0"
    printed = run("train_float8.py", "--size", "small", "--steps", "20", "--seeds", "1", *text, XLA_FLAGS=flags)
    losses = dict(re.findall(r"^(\w+) +[\d,]+ tokens/s, .* loss (\S+)$", printed, re.MULTILINE))
    wide, narrow = float(losses.pop("bfloat16")), float(losses.pop("float8"))
    assert wide < 0.6 * np.log(256)  # it learns
    change = float(re.search(r"^float8 to bfloat16: .* loss (\S+) % in the mean", printed, re.MULTILINE)[1])
    assert abs(change) < 1.5
    assert change == pytest.approx(100 * (narrow / wide - 1), abs=0.01)
    assert (tmp_path / "float8.png").read_bytes().startswith(b"\x89PNG")


HOW = {"hidden": ["--split-hidden"], "two processes": ["--processes", "2"], **dict(in_full(("rows", [])))}


# On devices that this CPU simulates, by one process and by two. The losses are those of one device.
@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_train_sharded(how):
    printed = run("train_sharded.py", "--steps", "3", *how, JAX_PLATFORMS="cpu")
    assert float(re.search(r"between the curves: (\S+) in 3 steps", printed)[1]) < 1e-5
    assert re.search(r"rms_norm_bwd, \d x rms_norm_fwd", printed)


SMALL_GEMMA = ["train_gemma.py", "--dtype", "float32", "--steps", "3", "--batch", "2", "--tokens", "32"]


# Both ways train alike on two devices that the CPU simulates, and on one.
@pytest.mark.parametrize("devices", ["2", *in_full("1")])
def test_train_gemma(devices, tmp_path):
    flags = "--xla_backend_optimization_level=0"
    more = ["--devices", devices, "--soft-cap", "30", "--out", tmp_path / "gemma/run"]
    printed = run(*SMALL_GEMMA, *more, JAX_PLATFORMS="cpu", XLA_FLAGS=flags)
    for line in (
        "within    blocks.1.attention.query_norm: RMSNorm: replaced, where the function of blocks.1.attention calls it",
        "within    blocks.0.attention: Attention: replaced, where the function of (the model itself) calls it",
        "replaced  (the model itself): Gemma",
    ):
        assert f"{line}\n" in printed
    flax, ported = report.load(tmp_path / "gemma/run")["rows"]
    assert flax["devices"] == ported["devices"] == int(devices)
    assert flax["losses"][0] > 8 > flax["losses"][-1]  # log(4096), and what has been learnt
    np.testing.assert_allclose(flax["losses"], ported["losses"], rtol=1e-5)


def test_every_way_of_train_gemma_has_one_loss_and_one_gradient(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import gemma
    import train_gemma

    layers = 2
    config = gemma.Config(64, layers, 32, 4, 2, 8, 48, soft_cap=5.0, dtype="float32")
    tokens = jax.random.randint(jax.random.key(0), (2, 17), 0, config.vocabulary)
    found, calls = {}, {}
    for name, way in train_gemma.WAYS.items():
        model = gemma.Gemma(config, nnx.Rngs(0))
        if way.port:
            way.port(model)
        definition, params = nnx.split(model)
        # No scale stays zero.
        params = jax.tree.map(lambda array: array + 0.1 * jnp.cos(jnp.arange(array.shape[-1])), params)
        step = jax.jit(jax.value_and_grad(lambda p, way=way, of=definition: way.loss(nnx.merge(of, p), tokens)))
        # All digits of a GPU's products of float32.
        with jax.default_matmul_precision("highest"):
            program = step.lower(params).compile()
        calls[name] = count_native_calls(program.as_text())
        loss, gradients = program(params)
        found[name] = [loss, *jax.tree.leaves(gradients)]
    expected = found["flax"]
    for arrays in found.values():
        for array, exact in zip(arrays, expected, strict=True):
            np.testing.assert_allclose(array, exact, atol=1e-5 * np.abs(exact).max())
    if is_platform_with_kernels():
        assert calls["flax"] == {}
        assert calls["norms"] == {"jaxnorm_rms_norm_fwd": 6 * layers + 1, "jaxnorm_rms_norm_bwd": 6 * layers + 1}


def test_more_devices_than_there_are():
    command = [sys.executable, EXAMPLES / "train_sharded.py", "--data", "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--batch 8: must be a multiple of --data 3" in done.stderr
