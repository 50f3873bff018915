"""A native call whose buffers or attributes do not fit together says so; none reads or writes past a buffer."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from coverage import over
from native import are_cuda_kernels
from native_calls import (
    DOT,
    OF_CUDA,
    doubtful,
    errors_of,
    malformed_operands,
    malformed_results,
    native_calls_of,
    native_calls_of_op,
)
from table import ADDED, EACH, GROUP_NORMS, NORMS, QUANTIZED_SUMS, ROTARY, SANDWICH, SOFTMAX

import jaxnorm
from jaxnorm import Quantization

pytestmark = pytest.mark.any_code

SAID = (
    "is missing|too few|expected|different dtypes|rows are of|no row|there (are|is)|not there|is not|wanted|is none of"
    "|is empty|is no (matrix|length)|different shapes|is below|no group can|are not of|is 0"
)


def what_is_wrong(right, what, wrong, or_right, error, calls):
    """What is not as it should be where this call is made in place of a well-formed one, and has this error."""
    it = f"{right.target}, {what}"
    if error:
        return None if re.search(f"{right.target}: .*({SAID})", error) else f"{it}: {error}"
    if or_right:
        differ = [i for i, pair in enumerate(zip(wrong.run(), right.run(), strict=True)) if not are_alike(*pair)]
        return f"{it}: is accepted, and results {differ} are others" if differ else None
    return None if goes_unseen(wrong, calls) else f"{it}: is accepted"


def are_alike(found, expected):
    """Whether they are near each other, if they are no workspaces."""
    if is_workspace(expected) and are_cuda_kernels():
        return True
    return np.allclose(*(np.asarray(array, np.float32) for array in (found, expected)), 2e-2, 2e-2, equal_nan=True)


def goes_unseen(wrong, calls):
    """What XLA's GPU runtime does not report, a call without results; and one of these, its workspace aside."""
    return are_cuda_kernels() and (not wrong.results or any(has_results_of(right, wrong) for right in calls))


def has_results_of(right, wrong):
    others = right.results[:-1] if right.results and is_workspace(right.results[-1]) else right.results
    more = wrong.results[len(others) :]
    return right._replace(results=(*others, *more)) == wrong and len(more) <= 1 and all(map(is_workspace, more))


def is_workspace(result):
    return (len(result.shape), result.dtype) == (1, jnp.float32)


def assert_each_is_refused(calls, changes=""):
    """Each change of each of these calls, or those named so; what differs in its results alone has them changed."""
    seen, each = {repr(native) for native in calls}, []
    for native in calls:
        others = repr(native._replace(results=()))
        found = [(*change, False) for change in (() if others in seen else malformed_operands(native))]
        found += [(*change, False) for change in malformed_results(native)]
        found += [(*change, True) for change in doubtful(native)]
        each += [(native, *change) for change in found if changes in change[0] and repr(change[1]) not in seen]
        seen |= {others, *(repr(changed) for _, changed, _ in found)}
    assert errors_of(calls) == [None] * len(calls)
    errors = errors_of([wrong for _, _, wrong, _ in each])
    told = [what_is_wrong(*change, error, calls) for change, error in zip(each, errors, strict=True)]
    assert not any(told), "\n".join(filter(None, told))


@over((*EACH, NORMS[0], ADDED[0], ROTARY[-1]))
@pytest.mark.needs("kernels")
@pytest.mark.on_emulator
def test_a_malformed_call(op):
    calls = native_calls_of_op(op)
    assert {native.target for native in calls} == {op.forward, op.backward}
    assert_each_is_refused(calls)
    rows, *_ = op.small.dims
    assert errors_of([native.but(extents={rows: 0}) for native in calls]) == [None] * len(calls)  # nothing to do


# Two halves of a float do not go together, where one goes with float32.
@over((*NORMS, *ADDED, GROUP_NORMS[1], *SANDWICH, *SOFTMAX, *QUANTIZED_SUMS[:2]))
@pytest.mark.needs("kernels")
@pytest.mark.on_emulator
def test_a_malformed_call_of_half_types(op):
    assert_each_is_refused(native_calls_of_op(op, "float16"), "of bfloat16")


X, SCALE, HEADS = jnp.ones((3, 4, 64)), jnp.ones(64), jnp.ones((2, 5, 6, 16))
INT8, TENSOR = Quantization("int8"), Quantization("int8", "tensor")
NO_GRADIENT = ("a given scale", "a quantised")
MASK = {"causal": True, "window": 3, "where": jnp.ones((3, 1, 64), bool)}
BY_TABLES = {"cos": jnp.ones((5, 4)), "sin": jnp.ones((5, 4)), "rotary_dim": 8}
GIVEN, TWO_AXES = {"quantization": TENSOR, "static_scale": jnp.float32(1)}, {"axis": (-2, -1)}
rotary, packed = jaxnorm.qk_norm_rotary, partial(jaxnorm.qkv_norm_rotary, heads=3, kv_heads=1)
# Functions whose native calls differ from those of the table's small sizes, and their operands.
OF_OPTIONS = {
    **{f"{f.__name__} of a mask": (partial(f, **MASK), X) for f in (jaxnorm.softmax, jaxnorm.log_softmax)},
    "cross-entropy of a mask": (
        lambda x: jaxnorm.softmax_cross_entropy_with_integer_labels(x, jnp.zeros(x.shape[:-1], int), where=x > 0),
        X,
    ),
    "a norm of two axes": (partial(jaxnorm.layer_norm, **TWO_AXES), X, X[0], X[0]),
    "a quantised norm of two axes": (
        lambda *args: jaxnorm.rms_norm_quantized(*args, quantization=INT8, **TWO_AXES).quantized.values,
        *(X, X[0]),
    ),
    "a given scale": (lambda *args: jaxnorm.rms_norm_quantized(*args, **GIVEN).quantized.values, X, SCALE),
    "a given scale of a LayerNorm": (lambda *xs: jaxnorm.layer_norm_quantized(*xs, **GIVEN).quantized.values, X, SCALE),
    "a given scale of a gate": (lambda x: jaxnorm.gated_activation_quantized((x, x), **GIVEN).values, X),
    "a given scale of a gated norm": (
        lambda *args: jaxnorm.gated_rms_norm_quantized(*args, gate_first=True, **GIVEN).values,
        *(X, X, SCALE),
    ),
    "a quantised array": (lambda x: jaxnorm.quantize(x, INT8, axis=(-2, -1)).values, X),
    "a quantised array in groups": (lambda x: jaxnorm.quantize(x, Quantization("int8", "group", 64)).values, X),
    "channels of positions": (partial(jaxnorm.group_norm, num_groups=4), X, SCALE, jnp.ones((3, 64))),
    "tables": (partial(rotary, **BY_TABLES), HEADS, HEADS[:, :, :3], SCALE[:16]),
    "no norm": (partial(rotary, normalize=False), HEADS, HEADS[:, :, :3]),
    "sums of segments": (partial(jaxnorm.segment_sum, segment_ids=jnp.zeros(3, int), num_segments=5), X),
    "sorted segments": (
        lambda x: jaxnorm.segment_sum(x[0], jnp.zeros(4, int), 5, indices_are_sorted=True, implementation="native"),
        X,
    ),
    "a lookup's gradient": (partial(jaxnorm.embedding, ids=jnp.zeros((2, 3), int), implementation="native"), X[0]),
    "a tied lookup's gradient": (
        lambda x: jaxnorm.embedding(x, jnp.zeros(3, int), return_table=True, implementation="native"),
        X[0],
    ),
    "a draw": (lambda x: jaxnorm.sample(x, uniform=0.5, return_log_prob=True)[1], X),
    "a draw by rows' own filters": (
        lambda x, own: jaxnorm.sample(x, uniform=0.5, top_k=own, top_p=own / 9, min_p=own / 9, where=x > 0),
        X,
        jnp.ones(X.shape[:-1], int),
    ),
    "a product and no norm": (partial(packed, normalize=False), HEADS[:, :, :5]),
}


@pytest.mark.needs("kernels")
@pytest.mark.on_emulator
@pytest.mark.parametrize("name", OF_OPTIONS)
def test_a_malformed_call_of_options(name):
    function, *args = OF_OPTIONS[name]
    forward, calls = jax.eval_shape(function, *args), native_calls_of(function, *args)
    if not name.startswith(NO_GRADIENT):
        with_gradients = partial(jax.vjp, function, *args)
        calls += native_calls_of(lambda *cotangents: with_gradients()[1](*cotangents), forward)
    assert_each_is_refused(calls)


@pytest.mark.needs("cuda")
@pytest.mark.parametrize("name", OF_CUDA)
def test_a_malformed_call_of_cuda(name):
    assert_each_is_refused([OF_CUDA[name]])


# Those that are not malformed want cuBLASLt, which only a GPU has.
@pytest.mark.needs("cuda")
def test_a_malformed_call_of_a_product():
    changes = [*malformed_operands(DOT), *malformed_results(DOT)]
    changes = [change for change in changes if not has_results_of(DOT, change[1])]
    errors = errors_of([wrong for _, wrong in changes])
    told = [what_is_wrong(DOT, *change, False, error, [DOT]) for change, error in zip(changes, errors, strict=True)]
    assert not any(told), "\n".join(filter(None, told))
