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
    file: str  # of the package, or of src
    found_by: str  # pytest's arguments
    right: str
    wrong: str
    op: str  # the module's, in which a kernel has the fault


# The module in which a kernel of several ops has the fault; else that of its own.
OPS = {"shared": "gated_activation", "engine": "norm"}


def faults(text):
    """By name; each says where it is, which of the tests finds it, and what stands there in the place of what."""
    found = {}
    for name, file, found_by, *sides in re.findall(r"(?m)^(\w.*?):\s(\S+): (.*)\n((?:-.*\n)+)((?:\+.*\n)*)", text):
        right, wrong = ("\n".join(line[1:] for line in side.splitlines()) for side in sides)
        folder = file.split("/")[1]
        found[name] = Fault(file, f"tests/{found_by}", right, wrong, OPS.get(folder, folder))
    return found


# By names; those that the package had end in the commit that mended them.
IN_PYTHON = faults("""\
scales of examples, not of their rows, 8978cde:
primitive/convention.py: ops/float8_linear_native.py -k scales_of_examples
-jnp.broadcast_to(array, (*lengths, array.shape[-1]))
+jnp.broadcast_to(array, (lengths[0], *array.shape[1:]))
examples of kernels as one example: primitive/convention.py: ops/products.py -k test_gradients_of_examples
-self(with_examples(spec), results, front, **params)
+self(spec, results, front, **params)
one scale for all that no product has: ops/float8_linear/op.py: ops/float8_linear.py -k x_of_one_scale
-_factors(x.values, _single(x), *v)
+_factors(x.values, None, *v)
a product that XLA for CPUs has not for examples, 4fffaeb:
ops/products.py: ops/linear_cross_entropy.py -k mapped_operands_of_16
-dot(a.astype(np.float32), b.astype(np.float32))
+dot(a, b)
weights written out as a factor is, e964c43: primitive/rules.py: ops/branch_scale.py -k kept_as_it_came
-if (name == self.op.factor) is of_factor]
+if not of_factor]
a mask of one column for all shards, 6913620: ops/cross_entropy/api.py: laws/test_masks.py -k mask_of_one_column
-if shards is None:  # of rows
+if True:  # of rows
gradients of half types summed over devices, fc7aa47:
native/compat.py: laws/test_meshes.py -k test_gradients_of_a_product
-return [aval.mat.varying != all_axes and aval.dtype in (jnp.bfloat16, jnp.float16) for aval in types]
+return [False for aval in types if all_axes is not None]
a variance that means do not move, a23a5a0:
ops/norm/formula.py: laws/test_axis_name.py -k 'test_second_derivative and layer'
-variance_dot + 2 * (of_shard[0] - mean) * mean_dot
+variance_dot
a forgotten sum over devices, 3fd80ce: ops/cross_entropy/api.py: ops/cross_entropy.py -k classes_over_devices
-counts if shards is None else shards.sum(counts)
+counts
numbers of columns that are not split, 809cff9: ops/mask.py: laws/test_mesh_programs.py -k numbers_of_columns
-out_sharding = sharding if any(sharding.spec) else None
+out_sharding = None
a result split twice by one axis, 809cff9:
ops/float8_linear/api.py: ops/products_meshes.py -k one_axis_for_rows_and_outputs
-(of_x is None and of_kernel is None) or len(set(names)) < len(names)
+of_x is None and of_kernel is None
scales in their order, 48b8775: ops/products.py: ops/quantized_dot.py -k float32_does_not_hold
-y * jnp.minimum(rows, columns) * jnp.maximum(rows, columns)
+y * rows * columns
the slope that JAX makes of an activation, 5255872: ops/activation.py: ops/gated_activation.py -k one_rule
-_ACTIVATION.primitive.bind(v, formula=self)
+[self.plain(v)]
an offset of 64 bits that wraps, ac80d16: ops/softmax/checks.py: ops/softmax.py -k an_offset_of_numpy
-np.clip(value, least, min(_MOST_OFFSET, int(np.iinfo(value.dtype).max)))
+value
NaN as a constant, a8d2f6a: ops/mask.py: laws/test_extremes.py -k test_no_alarm_elsewhere
-jnp.sqrt(jnp.where(is_nan, -1.0, other))
+jnp.where(is_nan, jnp.full(is_nan.shape, jnp.nan), other)
a NaN that a maximum loses, bc4c0fb: ops/quantize/rounding.py: ops/quantize.py -k nan_where_a_value_is
-lax.platform_dependent(v, cpu=with_nan, default=of_numbers)
+of_numbers(v)
an infinity that a closed gate lets through, 89d102a: ops/activation.py: ops/gated_activation.py -k closed_gate
-_where_positive(d * _where_positive(2 * v, v), v)
+d * (2 * jnp.maximum(v, 0))
a normalised x that is not rounded, 9f1618d: ops/norm/formula.py: ops/norm.py -k wide_result
-rounded(x_hat.astype(norm.x_hat_dtype or norm.out_dtype))
+rounded(x_hat.astype(norm.out_dtype))
a slope of 0 times infinity, e1fd350: ops/activation.py: ops/gated_activation.py -k slopes_at_huge_gates
-near = jnp.where(v > 64, 64, jnp.where(v < -64, -64, v))
+near = v
sums of integers that int32 does not hold, a41ddac:
ops/quantized_dot/formula.py: ops/quantized_dot.py -k int32_does_not_hold
-if not isinstance(depth, int) or depth <= columns:
+if columns:
an exact gelu that loses digits, e55c214: ops/activation.py: ops/gated_activation.py -k exact_gelu_keeps_its_digits
-jnp.where(is_near, series, share)
+share
contexts that are not in the key of jit, b7f3e3c:
integrations/flax/linen_replace.py: integrations/test_contexts.py -k traced_in_each_context
-_changes((*_changes.value, key))
+_changes(_changes.value)
ids that are cast before they are compared: ops/embedding/api.py: ops/embedding.py -k ids_of_every_dtype
-is_signed = jnp.issubdtype(numbers.dtype, jnp.signedinteger)
+numbers, is_signed = numbers.astype(np.int32), True
the numbers of all devices' segments on each: ops/embedding/op.py: ops/embedding.py -k 'devices_add and both'
-ids - spec.owned.index() * spec.segments
+ids
parts of sums in a half type: ops/embedding/op.py: ops/embedding.py -k parts_of_devices
-dataclasses.replace(own, out_dtype=np.dtype(np.float32))
+own
a top_p of 0 that keeps nothing: ops/sample/formula.py: ops/sample.py -k 'settings_of_their_own and xla'
-jnp.maximum(1, jnp.sum(
+jnp.maximum(0, jnp.sum(
a top_k that wraps: ops/sample/api.py: ops/sample.py -k numbers_of_other_dtypes
-of.clip(array, max(-_MOST, int(info.min)), min(_MOST, int(info.max)))
+array
""")
IN_KERNELS = faults("""\
an index by columns for rows: ops/float8_linear/cuda/transpose.cu: ops/float8_linear_native.py -k test_bytes
-tile[(at + 4 * k + i) * kPitch + word] = columns[i]
+tile[word * kPitch + at + 4 * k + i] = columns[i]
no wait for a tile: ops/float8_linear/cuda/rounding.cuh: ops/float8_linear_native.py -k test_columns
-  __syncthreads();
-
-  // Sixteen rows
+  // Sixteen rows
a merge of moments in another order:
ops/group_norm/cuda/group_merge.cu: laws/test_accuracy.py -k 'of_every_size and group and not grouped'
-JoinMoments(a.count, b.count)(a.moments, b.moments)
+JoinMoments(a.count, b.count)(b.moments, a.moments)
no wait for the threads of the other rows:
ops/group_norm/cuda/group_tile.cuh: laws/test_accuracy.py -k 'of_every_size and group and not grouped'
-    __syncthreads();
-    if (thread < half) {
+    if (thread < half) {
no wait for the largest of the other warps:
ops/shared/cuda/quantize.cuh: laws/test_bits.py -k 'fused_sizes and packed'
-  __syncthreads();
-  for (int warp = 0;
+  for (int warp = 0;
the first row's statistics for all:
ops/sandwich_norm/cuda/sandwich_norm.cuh: laws/test_bits.py -k 'fused_rows and sandwich'
-MeanSquare::warp_part<Tile>(x[r], group, cols)
+MeanSquare::warp_part<Tile>(x[0], group, cols)
a value that is stale: ops/qk_norm_rotary/cuda/rotary.cuh: laws/test_accuracy.py -k 'results_of_every_size and rotary'
-  b = fmaf(b, cos, a * sin);
-  a = turned;
+  a = turned;
+  b = fmaf(b, cos, a * sin);
the label at a vector's first column:
ops/cross_entropy/cuda/cross_entropy_grad.cu: ops/cross_entropy.py -k wherever_the_label
-own >= 0 && own < N
+own > 0 && own < N
hidden columns in the sum: ops/softmax/cuda/softmax_grad.cuh: laws/test_masks.py -k 'hidden and softmax'
-if (!counted[i]) dy[i] = second[i] = 0;
+;
what is outside a window is not written: ops/softmax/cuda/softmax_grad.cuh: laws/test_masks.py -k 'hidden and softmax'
-if constexpr (Mask::kHasWindow) p.fill_outside<T>(columns, row);
a rest that is left out: ops/norm/cuda/shard.cu: laws/test_meshes.py -k 'sharded_feature_axis and layer-'
-remaining > 0; remaining -= step
+remaining >= step; remaining -= step
a partial sum less: engine/cuda/partials.cu: laws/test_accuracy.py -k 'gradients_of_every_size and rms and not rotary'
-row + i * height < rows ?
+row + i * height < rows - 1 ?
what a chunk has of the next segment is left out:
ops/segment_sum/cuda/segment_sum.cu: ops/embedding.py -k 'sum_rounded_once or ten_thousand'
-add_tails(p, chunks, begins[i], at, 1, col, sum)
+add_tails(p, chunks, begins[i] + 1, at, 1, col, sum)
a sum in the place of what it is added to: ops/segment_sum/cuda/segment_sum.cu: ops/embedding.py -k sum_rounded_once
-sum[k] = onto[k] + sum[k];
+sum[k] += 0.0f;
parts of a long segment before they are there: ops/segment_sum/cuda/segment_sum.cu: ops/embedding.py -k ten_thousand
-sum);
-      __syncthreads();
-      if (warp == 0)
+sum);
+      if (warp == 0)
all of equals at the border: ops/sample/cuda/sample.cu: ops/sample.py -k 'what_is_kept and equal'
-min(part.equals, left_of(equals_until - part.equals))
+part.equals
scales of a head by columns: ops/norm/cuda/add.cu: laws/test_bits.py -k 'fused and scaled'
-rows.of_row(row) * cols.value
+rows.of_row(column) * cols.value
""")


@pytest.mark.parametrize(
    ("root", "fault"),
    [
        pytest.param(root, fault, id=name)
        for root, faults in ((PACKAGE, IN_PYTHON), (SOURCES, IN_KERNELS))
        for name, fault in faults.items()
    ],
)
def test_what_is_changed_stands_there_once(root, fault):
    assert (root / fault.file).read_text().count(fault.right) == 1


def run(fault, *options, **environment):
    """The exit code of the tests in a process of their own, and what they print."""
    command = (sys.executable, *options, "-m", "pytest", "--full", "-q", "-p", "no:cacheprovider", "-p", "no:xdist")
    done = subprocess.run(
        (*command, *shlex.split(fault.found_by)),
        cwd=emulated.ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def seed(fault, root):
    file = root / fault.file
    file.write_text(file.read_text().replace(fault.right, fault.wrong))


@pytest.mark.needs("request")
@pytest.mark.parametrize("fault", IN_PYTHON.values(), ids=IN_PYTHON)
def test_a_test_finds(fault, tmp_path):
    copy = tmp_path / "jaxnorm"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for library in PACKAGE.glob("*.so"):
        (copy / library.name).symlink_to(library.resolve())
    # The key of a compiled program does not say how a mesh splits its calls.
    given = {"PYTHONPATH": str(tmp_path), "JAX_ENABLE_COMPILATION_CACHE": "false"}
    # -P: neither the current folder nor what is installed comes before the copy.
    code, printed = run(fault, "-P", **given)
    assert code == pytest.ExitCode.OK, printed
    seed(fault, copy)
    code, printed = run(fault, "-P", **given)
    assert code == pytest.ExitCode.TESTS_FAILED, printed


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


def run_emulated(fault, module):
    # What glibc hands out is full of huge numbers, so that a result that is not written shows.
    return run(fault, JAXNORM_EMULATE=str(module), JAX_PLATFORMS="cpu", MALLOC_PERTURB_="128")


@pytest.mark.needs("request")
@pytest.mark.needs("emulated")
@pytest.mark.xdist_group("emulated")
@pytest.mark.parametrize("fault", IN_KERNELS.values(), ids=IN_KERNELS)
def test_laws_find(fault, tree, healthy):
    code, printed = run_emulated(fault, healthy(fault.op))
    assert code == pytest.ExitCode.OK, printed
    file = tree / "src" / fault.file
    text = file.read_text()
    seed(fault, tree / "src")
    try:
        (module,) = emulated.build(tree, tree / "build" / fault.op, fault.op)
    finally:
        file.write_text(text)
    code, printed = run_emulated(fault, module)
    assert code == pytest.ExitCode.TESTS_FAILED, printed
