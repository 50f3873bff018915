"""Faults that are seeded in the Python package, one at a time, each of which it had once: a test finds each of them."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import jaxnorm

PACKAGE = Path(jaxnorm.__file__).parent
ROOT = Path(__file__).parent.parent


class Fault(NamedTuple):
    mended_by: str  # a commit
    file: str  # of the package
    right: str
    wrong: str
    found_by: str  # pytest's arguments


OPS = "tests/ops/{}.py -k '{}'".format
LAWS = "tests/laws/test_{}.py -k '{}'".format
FAULTS = {
    # Rules of batches.
    "scales of examples, not of their rows": Fault(
        "8978cde",
        "ops/float8_linear/op.py",
        "jnp.broadcast_to(array, (*rows, array.shape[-1]))",
        "jnp.broadcast_to(array, (rows[0], *array.shape[1:]))",
        OPS("float8_linear", "examples_of_quantized"),
    ),
    "a product that XLA for CPUs has not for examples": Fault(
        "4fffaeb",
        "ops/products.py",
        "dot(a.astype(np.float32), b.astype(np.float32))",
        "dot(a, b)",
        OPS("linear_cross_entropy", "mapped_operands_of_16"),
    ),
    "weights written out as a factor is": Fault(
        "e964c43",
        "primitive/rules.py",
        "if (name == self.op.factor) is of_factor]",
        "if not of_factor]",
        OPS("branch_scale", "kept_as_it_came"),
    ),
    # Rules of meshes.
    "a mask of one column for all shards": Fault(
        "6913620",
        "ops/cross_entropy/api.py",
        "if shards is None:  # of rows",
        "if True:  # of rows",
        LAWS("masks", "mask_of_one_column"),
    ),
    "gradients of half types summed over devices": Fault(
        "fc7aa47",
        "native/compat.py",
        "return [aval.mat.varying != all_axes and aval.dtype in (jnp.bfloat16, jnp.float16) for aval in types]",
        "return [False for aval in types if all_axes is not None]",
        LAWS("meshes", "test_gradients_of_a_product"),
    ),
    "a variance that means do not move": Fault(
        "a23a5a0",
        "ops/norm/merge.py",
        "variance_dot + 2 * (of_shard[0] - mean) * mean_dot",
        "variance_dot",
        LAWS("axis_name", "test_second_derivative and layer"),
    ),
    "a forgotten sum over devices": Fault(
        "3fd80ce",
        "ops/cross_entropy/api.py",
        "counts if shards is None else shards.sum(counts)",
        "counts",
        OPS("cross_entropy", "classes_over_devices"),
    ),
    "numbers of columns that are not split": Fault(
        "809cff9",
        "ops/mask.py",
        "out_sharding = sharding if any(sharding.spec) else None",
        "out_sharding = None",
        LAWS("mesh_programs", "numbers_of_columns"),
    ),
    "a result split twice by one axis": Fault(
        "809cff9",
        "ops/float8_linear/call.py",
        "(of_x is None and of_kernel is None) or len(set(names)) < len(names)",
        "of_x is None and of_kernel is None",
        OPS("products_meshes", "one_axis_for_rows_and_outputs"),
    ),
    # Values, derivatives and programs.
    "scales in their order": Fault(
        "48b8775",
        "ops/products.py",
        "y * jnp.minimum(rows, columns) * jnp.maximum(rows, columns)",
        "y * rows * columns",
        OPS("quantized_dot", "float32_does_not_hold"),
    ),
    "the slope that JAX makes of an activation": Fault(
        "5255872",
        "ops/activation.py",
        "_primitive.bind(v, formula=self)",
        "self.plain(v)",
        OPS("gated_activation", "one_rule"),
    ),
    "an offset of 64 bits that wraps": Fault(
        "ac80d16",
        "ops/softmax/checks.py",
        "np.clip(value, least, min(_MOST_OFFSET, int(np.iinfo(value.dtype).max)))",
        "value",
        OPS("softmax", "an_offset_of_numpy"),
    ),
    "NaN as a constant": Fault(
        "a8d2f6a",
        "ops/mask.py",
        "jnp.sqrt(jnp.where(is_nan, -1.0, other))",
        "jnp.where(is_nan, jnp.full(is_nan.shape, jnp.nan), other)",
        LAWS("extremes", "test_no_alarm_elsewhere"),
    ),
    "a NaN that a maximum loses": Fault(
        "bc4c0fb",
        "ops/quantize/rounding.py",
        "lax.platform_dependent(v, cpu=with_nan, default=of_numbers)",
        "of_numbers(v)",
        OPS("quantize", "nan_where_a_value_is"),
    ),
    "an infinity that a closed gate lets through": Fault(
        "89d102a",
        "ops/activation.py",
        "_where_positive(d * _where_positive(2 * v, v), v)",
        "d * (2 * jnp.maximum(v, 0))",
        OPS("gated_activation", "closed_gate"),
    ),
    "a normalised x that is not rounded": Fault(
        "9f1618d",
        "ops/norm/formula.py",
        "rounded(x_hat.astype(norm.x_hat_dtype or norm.out_dtype))",
        "rounded(x_hat.astype(norm.out_dtype))",
        OPS("norm", "wide_result"),
    ),
    "a slope of 0 times infinity": Fault(
        "e1fd350",
        "ops/activation.py",
        "near = jnp.where(v > 64, 64, jnp.where(v < -64, -64, v))",
        "near = v",
        OPS("gated_activation", "slopes_at_huge_gates"),
    ),
    "sums of integers that int32 does not hold": Fault(
        "a41ddac",
        "ops/quantized_dot/formula.py",
        "if not isinstance(depth, int) or depth <= columns:",
        "if columns:",
        OPS("quantized_dot", "int32_does_not_hold"),
    ),
    "an exact gelu that loses digits": Fault(
        "e55c214",
        "ops/activation.py",
        "jnp.where(is_near, series, share)",
        "share",
        OPS("gated_activation", "exact_gelu_keeps_its_digits"),
    ),
    "contexts that are not in the key of jit": Fault(
        "b7f3e3c",
        "flax/linen_layers.py",
        "_changes((*_changes.value, key))",
        "_changes(_changes.value)",
        "tests/flax/test_contexts.py -k traced_in_each_context",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_changed_stands_there_once(name):
    fault = FAULTS[name]
    assert (PACKAGE / fault.file).read_text().count(fault.right) == 1


@pytest.mark.needs("request")
@pytest.mark.parametrize("name", FAULTS)
def test_a_test_finds(name, tmp_path):
    fault = FAULTS[name]
    copy = tmp_path / "jaxnorm"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for library in PACKAGE.glob("*.so"):
        (copy / library.name).symlink_to(library.resolve())
    # Neither the current folder nor what is installed comes before the copy.
    command = (sys.executable, "-P", "-m", "pytest", "--full", "-q", "-p", "no:cacheprovider", "-p", "no:xdist")
    # The key of a compiled program does not say how a mesh splits its calls.
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "JAX_ENABLE_COMPILATION_CACHE": "false"}
    for expected in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        done = subprocess.run(
            (*command, *shlex.split(fault.found_by)),
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == expected, done.stdout + done.stderr
        file = copy / fault.file
        file.write_text(file.read_text().replace(fault.right, fault.wrong))
