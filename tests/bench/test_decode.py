"""Decoding with quantised weights at toy sizes: the programs compute what they say, and the table has them."""

import argparse
import json
import math

import jax
import numpy as np
import pytest

from bench import decode, models
from jaxnorm import Quantized

pytestmark = [pytest.mark.any_code, pytest.mark.long]

SPEC = models.small(models.LLAMA_8B)


@pytest.fixture(scope="module")
def params():
    return models.serving(models.init(SPEC))


@pytest.mark.parametrize("name", decode.NAMES)
def test_a_token_is_near_to_bfloat16s(name, params):
    form, step = decode.FORMS[name], models.decode_step(SPEC, decode.NORMS)
    quantised = decode.quantised(form, params)
    matrices = jax.tree.leaves(quantised, is_leaf=lambda leaf: isinstance(leaf, Quantized))
    assert sum(isinstance(leaf, Quantized) for leaf in matrices) == 4 * SPEC.layers
    _, logits = jax.jit(decode.with_products(form, step))(models.full_cache(SPEC), quantised)
    _, expected = jax.jit(step)(models.full_cache(SPEC), params)
    error = np.linalg.norm(np.float64(logits) - np.float64(expected)) / np.linalg.norm(np.float64(expected))
    assert 0 < error < 0.1


def test_the_table_has_each_form_beside_bfloat16(tmp_path, capsys):
    parser = argparse.ArgumentParser()
    decode.add_arguments(parser)
    options = ["--small", "--turns", "2", "--batches", "1", "4", "--out", str(tmp_path / "table")]
    decode.main(parser.parse_args(options))
    rows = json.loads((tmp_path / "table.json").read_text())["rows"]
    forms = ["bfloat16", *decode.NAMES]
    assert [(row["model"], row["program"], row["products"]) for row in rows] == [
        (f"Llama 3 8B-like, decode {batch}", program, form)
        for batch in (1, 4)
        for program in ("token", "loop")
        for form in forms
    ]
    assert all(row["x bf16"] == 1 for row in rows if row["products"] == "bfloat16")
    # Queries, keys and values, their result, gate and up, down; and a scale of 4 bytes for each output.
    of_layer = {(64, 128), (64, 64), (64, 2 * 96), (96, 64)}
    numbers, outputs = (SPEC.layers * sum(map(of, of_layer)) for of in (math.prod, lambda dims: dims[1]))
    others = 2 * (64 * SPEC.classes + SPEC.layers * 2 * SPEC.groups * SPEC.tokens * SPEC.head_size)
    of_one = {row["products"]: row["read MiB"] * 2**20 for row in rows if row["model"].endswith("decode 1")}
    assert of_one["bfloat16"] == pytest.approx(2 * numbers + others, rel=1e-4)
    assert of_one["int8"] == pytest.approx(numbers + 4 * outputs + others, rel=1e-4)
    assert "| int8 weights |" in capsys.readouterr().out


def test_too_few_turns():
    with pytest.raises(SystemExit, match="--turns 1: must be at least 2"):
        decode.main(argparse.Namespace(turns=1))
