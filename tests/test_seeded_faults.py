"""Faults that are seeded in the package and in its CUDA kernels, one at a time: a test finds each of them.

The package had each of its own once; the kernels run in the emulator.
"""

import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import emulated
import pytest

import jaxnorm

PACKAGE, SOURCES = Path(jaxnorm.__file__).parent, emulated.ROOT / "src"


class Fault(NamedTuple):
    of: str  # a commit, which mended it, or an op
    file: str
    tests: str  # pytest's arguments
    right: str
    wrong: str

    def seed(self, root):
        file = root / self.file
        file.write_text(file.read_text().replace(self.right, self.wrong))


def faults(text):
    """By name. Each is a line with that, one of the file and the tests, and what is right and wrong, as in a patch."""
    found = re.findall(r"(\w+): (.+)\n(\S+) (.+)\n((?:-.*\n)+)((?:\+.*\n)+)", text)
    return {name: Fault(of, file, tests, *map(code, parts)) for of, name, file, tests, *parts in found}


def code(lines):
    return re.sub(r"(?m)^. ?", "", lines).removesuffix("\n")


IN_PYTHON = faults("""
8978cde: scales of examples, not of their rows
ops/float8_linear/op.py tests/ops/float8_linear.py -k examples_of_quantized
- jnp.broadcast_to(array, (*rows, array.shape[-1]))
+ jnp.broadcast_to(array, (rows[0], *array.shape[1:]))
4fffaeb: a product that XLA for CPUs has not for examples
ops/products.py tests/ops/linear_cross_entropy.py -k mapped_operands_of_16
- dot(a.astype(np.float32), b.astype(np.float32))
+ dot(a, b)
e964c43: weights written out as a factor is
primitive/rules.py tests/ops/branch_scale.py -k kept_as_it_came
- if (name == self.op.factor) is of_factor]
+ if not of_factor]
6913620: a mask of one column for all shards
ops/cross_entropy/api.py tests/laws/test_masks.py -k mask_of_one_column
- if shards is None:  # of rows
+ if True:  # of rows
fc7aa47: gradients of half types summed over devices
native/compat.py tests/laws/test_meshes.py -k test_gradients_of_a_product
- return [aval.mat.varying != all_axes and aval.dtype in (jnp.bfloat16, jnp.float16) for aval in types]
+ return [False for aval in types if all_axes is not None]
a23a5a0: a variance that means do not move
ops/norm/merge.py tests/laws/test_axis_name.py -k 'test_second_derivative and layer'
- variance_dot + 2 * (of_shard[0] - mean) * mean_dot
+ variance_dot
3fd80ce: a forgotten sum over devices
ops/cross_entropy/api.py tests/ops/cross_entropy.py -k classes_over_devices
- counts if shards is None else shards.sum(counts)
+ counts
809cff9: numbers of columns that are not split
ops/mask.py tests/laws/test_mesh_programs.py -k numbers_of_columns
- out_sharding = sharding if any(sharding.spec) else None
+ out_sharding = None
809cff9: a result split twice by one axis
ops/float8_linear/call.py tests/ops/products_meshes.py -k one_axis_for_rows_and_outputs
- (of_x is None and of_kernel is None) or len(set(names)) < len(names)
+ of_x is None and of_kernel is None
48b8775: scales in their order
ops/products.py tests/ops/quantized_dot.py -k float32_does_not_hold
- y * jnp.minimum(rows, columns) * jnp.maximum(rows, columns)
+ y * rows * columns
5255872: the slope that JAX makes of an activation
ops/activation.py tests/ops/gated_activation.py -k one_rule
- _primitive.bind(v, formula=self)
+ self.plain(v)
ac80d16: an offset of 64 bits that wraps
ops/softmax/checks.py tests/ops/softmax.py -k an_offset_of_numpy
- np.clip(value, least, min(_MOST_OFFSET, int(np.iinfo(value.dtype).max)))
+ value
a8d2f6a: NaN as a constant
ops/mask.py tests/laws/test_extremes.py -k test_no_alarm_elsewhere
- jnp.sqrt(jnp.where(is_nan, -1.0, other))
+ jnp.where(is_nan, jnp.full(is_nan.shape, jnp.nan), other)
bc4c0fb: a NaN that a maximum loses
ops/quantize/rounding.py tests/ops/quantize.py -k nan_where_a_value_is
- lax.platform_dependent(v, cpu=with_nan, default=of_numbers)
+ of_numbers(v)
89d102a: an infinity that a closed gate lets through
ops/activation.py tests/ops/gated_activation.py -k closed_gate
- _where_positive(d * _where_positive(2 * v, v), v)
+ d * (2 * jnp.maximum(v, 0))
9f1618d: a normalised x that is not rounded
ops/norm/formula.py tests/ops/norm.py -k wide_result
- rounded(x_hat.astype(norm.x_hat_dtype or norm.out_dtype))
+ rounded(x_hat.astype(norm.out_dtype))
e1fd350: a slope of 0 times infinity
ops/activation.py tests/ops/gated_activation.py -k slopes_at_huge_gates
- near = jnp.where(v > 64, 64, jnp.where(v < -64, -64, v))
+ near = v
a41ddac: sums of integers that int32 does not hold
ops/quantized_dot/formula.py tests/ops/quantized_dot.py -k int32_does_not_hold
- if not isinstance(depth, int) or depth <= columns:
+ if columns:
e55c214: an exact gelu that loses digits
ops/activation.py tests/ops/gated_activation.py -k exact_gelu_keeps_its_digits
- jnp.where(is_near, series, share)
+ share
b7f3e3c: contexts that are not in the key of jit
flax/linen_layers.py tests/flax/test_contexts.py -k traced_in_each_context
- _changes((*_changes.value, key))
+ _changes(_changes.value)
""")
IN_KERNELS = faults("""
float8_linear: an index by columns for rows
ops/float8_linear/cuda/transpose.cu tests/ops/float8_linear_native.py -k test_bytes
- tile[(at + 4 * k + i) * kPitch + word] = columns[i]
+ tile[word * kPitch + at + 4 * k + i] = columns[i]
float8_linear: no wait for a tile
ops/float8_linear/cuda/round_tiles.cuh tests/ops/float8_linear_native.py -k test_columns
-   __syncthreads();
-
-   // Sixteen rows
+   // Sixteen rows
group_norm: a merge of moments in another order
ops/group_norm/cuda/group_merge.cu tests/ops/group_norm.py -k test_accuracy
- JoinMoments(a.count, b.count)(a.moments, b.moments)
+ JoinMoments(a.count, b.count)(b.moments, a.moments)
group_norm: no wait for the threads of the other rows
ops/group_norm/cuda/group_tile.cuh tests/ops/group_norm.py -k test_accuracy
-     __syncthreads();
-     if (thread < half) {
+     if (thread < half) {
gated_activation: no wait for the largest of the other warps
ops/shared/cuda/quantize_row.cuh tests/laws/test_bits.py -k 'fused_sizes and packed'
-   __syncthreads();
-   for (int warp = 0;
+   for (int warp = 0;
sandwich_norm: the first row's statistics for all
ops/sandwich_norm/cuda/sandwich_norm.cuh tests/laws/test_bits.py -k 'fused_rows and sandwich'
- MeanSquare::warp_part<Tile>(x[r], group, cols)
+ MeanSquare::warp_part<Tile>(x[0], group, cols)
qk_norm_rotary: a value that is stale
ops/qk_norm_rotary/cuda/rotary.cuh tests/laws/test_accuracy.py -k 'results_of_every_size and rotary'
-   b = fmaf(b, cos, a * sin);
-   a = turned;
+   a = turned;
+   b = fmaf(b, cos, a * sin);
cross_entropy: the label at a vector's first column
ops/cross_entropy/cuda/cross_entropy_grad.cu tests/ops/cross_entropy.py -k wherever_the_label
- own >= 0 && own < N
+ own > 0 && own < N
softmax: hidden columns in the sum
ops/softmax/cuda/softmax_grad.cuh tests/laws/test_masks.py -k 'hidden and softmax'
- if (!counted[i]) dy[i] = second[i] = 0;
+ ;
softmax: what is outside a window is not written
ops/softmax/cuda/softmax_grad.cuh tests/laws/test_masks.py -k 'hidden and softmax'
- if constexpr (Mask::kHasWindow) p.fill_outside<T>(columns, row);
+
norm: a rest that is left out
ops/norm/cuda/shard_statistics.cu tests/laws/test_meshes.py -k 'sharded_feature_axis and layer-'
- remaining > 0; remaining -= step
+ remaining >= step; remaining -= step
norm: a partial sum less
cuda/engine/partials.cu tests/laws/test_accuracy.py -k 'gradients_of_every_size and rms and not rotary'
- row + i * height < rows ?
+ row + i * height < rows - 1 ?
norm: scales of a head by columns
ops/norm/cuda/add.cu tests/laws/test_bits.py -k 'fused and scaled'
- rows.of_row(row) * cols.value
+ rows.of_row(column) * cols.value
""")


@pytest.mark.parametrize("name", (FAULTS := IN_PYTHON | IN_KERNELS))
def test_what_is_changed_stands_there_once(name):
    root, fault = PACKAGE if name in IN_PYTHON else SOURCES, FAULTS[name]
    assert (root / fault.file).read_text().count(fault.right) == 1


def check(fault, expected, *options, **environment):
    """Runs the tests in a process of their own."""
    command = (sys.executable, *options, "-m", "pytest", "--full", "-q", "-p", "no:cacheprovider", "-p", "no:xdist")
    command, environment = (*command, *shlex.split(fault.tests)), os.environ | environment
    given = {"cwd": emulated.ROOT, "env": environment, "text": True, "errors": "replace"}
    done = subprocess.run(command, **given, capture_output=True, check=False)
    assert done.returncode == expected, done.stdout + done.stderr


@pytest.mark.needs("request")
@pytest.mark.parametrize("name", IN_PYTHON)
def test_a_test_finds(name, tmp_path):
    fault, copy = IN_PYTHON[name], tmp_path / "jaxnorm"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for library in PACKAGE.glob("*.so"):
        (copy / library.name).symlink_to(library.resolve())
    # -P: neither the current folder nor what is installed comes before the copy. The key of a compiled program does not
    # say how a mesh splits its calls.
    how = {"PYTHONPATH": str(tmp_path), "JAX_ENABLE_COMPILATION_CACHE": "false"}
    check(fault, pytest.ExitCode.OK, "-P", **how)
    fault.seed(copy)
    check(fault, pytest.ExitCode.TESTS_FAILED, "-P", **how)


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """Of an op and a fault, or none, the module; what does not change is compiled once."""
    root = tmp_path_factory.mktemp("tree")
    emulated.copy(root)

    @functools.cache
    def build(op, fault=None):
        text = fault and (root / "src" / fault.file).read_text()
        if fault:
            fault.seed(root / "src")
        try:
            (module,) = emulated.build(root, root / "build" / op, op)
        finally:
            if fault:
                (root / "src" / fault.file).write_text(text)
        return shutil.copy(module, root / f"{op}{'_faulty' * bool(fault)}{module.suffix}")

    return build


@pytest.mark.needs("request")
@pytest.mark.needs("emulated")
@pytest.mark.xdist_group("emulated")
@pytest.mark.parametrize("name", IN_KERNELS)
def test_laws_find(name, build):
    fault = IN_KERNELS[name]
    for seeded, expected in ((None, pytest.ExitCode.OK), (fault, pytest.ExitCode.TESTS_FAILED)):
        # What glibc hands out is full of huge numbers, so that a result that is not written shows.
        given = {"JAXNORM_EMULATE": str(build(fault.of, seeded)), "JAX_PLATFORMS": "cpu", "MALLOC_PERTURB_": "128"}
        check(fault, expected, **given)
