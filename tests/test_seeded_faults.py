"""Faults that are seeded in the CUDA kernels, one at a time: the laws find each of them, in the emulator."""

import functools
import os
import shlex
import shutil
import subprocess
import sys
from typing import NamedTuple

import emulated
import pytest


class Fault(NamedTuple):
    op: str
    file: str  # of src
    right: str
    wrong: str
    laws: str  # pytest's arguments


ACCURACY, MASKS = (f"tests/laws/test_{name}.py" for name in ("accuracy", "masks"))
FLOAT8 = "tests/ops/float8_linear_native.py"
FAULTS = {
    "an index by columns for rows": Fault(
        "float8_linear",
        "ops/float8_linear/cuda/transpose.cu",
        "tile[(at + 4 * k + i) * kPitch + word] = columns[i]",
        "tile[word * kPitch + at + 4 * k + i] = columns[i]",
        f"{FLOAT8} -k test_bytes",
    ),
    "no wait for a tile": Fault(
        "float8_linear",
        "ops/float8_linear/cuda/round_tiles.cuh",
        "  __syncthreads();\n\n  // Sixteen rows",
        "  // Sixteen rows",
        f"{FLOAT8} -k test_columns",
    ),
    "a merge of moments in another order": Fault(
        "group_norm",
        "ops/group_norm/cuda/group_merge.cu",
        "JoinMoments(a.count, b.count)(a.moments, b.moments)",
        "JoinMoments(a.count, b.count)(b.moments, a.moments)",
        "tests/ops/group_norm.py -k test_accuracy",
    ),
    "no wait for the threads of the other rows": Fault(
        "group_norm",
        "ops/group_norm/cuda/group_tile.cuh",
        "    __syncthreads();\n    if (thread < half) {",
        "    if (thread < half) {",
        "tests/ops/group_norm.py -k test_accuracy",
    ),
    "no wait for the largest of the other warps": Fault(
        "gated_activation",
        "ops/shared/cuda/quantize_row.cuh",
        "  __syncthreads();\n  for (int warp = 0;",
        "  for (int warp = 0;",
        "tests/laws/test_bits.py -k 'fused_sizes and packed'",
    ),
    "the first row's statistics for all": Fault(
        "sandwich_norm",
        "ops/sandwich_norm/cuda/sandwich_norm.cuh",
        "MeanSquare::warp_part<Tile>(x[r], group, cols)",
        "MeanSquare::warp_part<Tile>(x[0], group, cols)",
        "tests/laws/test_bits.py -k 'fused_rows and sandwich'",
    ),
    "a value that is stale": Fault(
        "qk_norm_rotary",
        "ops/qk_norm_rotary/cuda/rotary.cuh",
        "  b = fmaf(b, cos, a * sin);\n  a = turned;",
        "  a = turned;\n  b = fmaf(b, cos, a * sin);",
        f"{ACCURACY} -k 'results_of_every_size and rotary'",
    ),
    "the label at a vector's first column": Fault(
        "cross_entropy",
        "ops/cross_entropy/cuda/cross_entropy_grad.cu",
        "own >= 0 && own < N",
        "own > 0 && own < N",
        "tests/ops/cross_entropy.py -k wherever_the_label",
    ),
    "hidden columns in the sum": Fault(
        "softmax",
        "ops/softmax/cuda/softmax_grad.cuh",
        "if (!counted[i]) dy[i] = second[i] = 0;",
        ";",
        f"{MASKS} -k 'hidden and softmax'",
    ),
    "what is outside a window is not written": Fault(
        "softmax",
        "ops/softmax/cuda/softmax_grad.cuh",
        "if constexpr (Mask::kHasWindow) p.fill_outside<T>(columns, row);",
        "",
        f"{MASKS} -k 'hidden and softmax'",
    ),
    "a rest that is left out": Fault(
        "norm",
        "ops/norm/cuda/shard_statistics.cu",
        "remaining > 0; remaining -= step",
        "remaining >= step; remaining -= step",
        "tests/laws/test_meshes.py -k 'sharded_feature_axis and layer-'",
    ),
    "a partial sum less": Fault(
        "norm",
        "cuda/engine/partials.cu",
        "row + i * height < rows ?",
        "row + i * height < rows - 1 ?",
        f"{ACCURACY} -k 'gradients_of_every_size and rms and not rotary'",
    ),
    "scales of a head by columns": Fault(
        "norm",
        "ops/norm/cuda/add.cu",
        "rows.of_row(row) * cols.value",
        "rows.of_row(column) * cols.value",
        "tests/laws/test_bits.py -k 'fused and scaled'",
    ),
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of what the module is compiled of."""
    root = tmp_path_factory.mktemp("tree")
    emulated.copy(root)
    return root


@pytest.fixture(scope="module")
def healthy(tree):
    """The module of an op without a fault."""

    @functools.cache
    def build(op):
        (module,) = emulated.build(tree, tree / "build" / op, op)
        return shutil.copy(module, tree / f"{op}{module.suffix}")

    return build


def run_laws(module, laws):
    command = (sys.executable, "-m", "pytest", "--full", "-q", "-p", "no:cacheprovider", "-p", "no:xdist")
    # What glibc hands out is full of huge numbers, so that a result that is not written shows.
    given = {"JAXNORM_EMULATE": str(module), "JAX_PLATFORMS": "cpu", "MALLOC_PERTURB_": "128"}
    command, environment = (*command, *shlex.split(laws)), os.environ | given
    done = subprocess.run(
        command, cwd=emulated.ROOT, env=environment, capture_output=True, text=True, errors="replace", check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_changed_stands_there_once(name):
    fault = FAULTS[name]
    assert (emulated.ROOT / "src" / fault.file).read_text().count(fault.right) == 1


@pytest.mark.needs("request")
@pytest.mark.needs("emulated")
@pytest.mark.xdist_group("emulated")
@pytest.mark.parametrize("name", FAULTS)
def test_laws_find(name, tree, healthy):
    fault = FAULTS[name]
    code, printed = run_laws(healthy(fault.op), fault.laws)
    assert code == pytest.ExitCode.OK, printed
    file = tree / "src" / fault.file
    text = file.read_text()
    file.write_text(text.replace(fault.right, fault.wrong))
    try:
        (module,) = emulated.build(tree, tree / "build" / fault.op, fault.op)
    finally:
        file.write_text(text)
    code, printed = run_laws(module, fault.laws)
    assert code == pytest.ExitCode.TESTS_FAILED, printed
