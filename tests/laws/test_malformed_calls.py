"""A native call whose buffers or attributes do not fit together says so; none reads or writes past a buffer."""

import re

import jax
import jax.numpy as jnp
import pytest
from calls import call
from coverage import over
from native import are_cuda_kernels
from native_calls import malformed, native_calls_of
from table import EACH, OPS, ROTARY

pytestmark = [pytest.mark.kernels, pytest.mark.any_code, pytest.mark.on_emulator]

SAID = "is missing|too few|expected|different dtypes|rows are of|no row|there (are|is)|not there|is not|wanted"


def run(native):
    return call(native.target, native.results, native.operands, native.attributes)


def calls_of(op):
    """Of the results alone, of which no gradient keeps the statistics, and of results and gradients."""
    args = op.draw(op.small)
    return [
        *native_calls_of(op.run(op.function), *args),
        *native_calls_of(jax.value_and_grad(op.loss(), op.all), *args),
    ]


def goes_unseen(wrong, calls):
    """What XLA's GPU runtime does not report, a call without results; and one of these, its workspace aside."""
    return are_cuda_kernels() and (not wrong.results or any(has_results_of(right, wrong) for right in calls))


def has_results_of(right, wrong):
    others = right.results[:-1] if is_workspace(right.results[-1]) else right.results
    more = wrong.results[len(others) :]
    return right._replace(results=(*others, *more)) == wrong and len(more) <= 1 and all(map(is_workspace, more))


def is_workspace(result):
    return (len(result.shape), result.dtype) == (1, jnp.float32)


@over(OPS, default=(*EACH, ROTARY[-1]))
def test_a_malformed_call(op):
    calls = calls_of(op)
    assert {native.target for native in calls} == {op.forward, op.backward}
    well_formed = {repr(native) for native in calls}
    for native in calls:
        run(native)
    passed = []
    for right, (what, wrong) in [(c, each) for c in calls for each in malformed(c)]:
        if repr(wrong) in well_formed:
            continue
        try:
            run(wrong)
            if not goes_unseen(wrong, calls):
                passed.append(f"{right.target}, {what}: is accepted")
        except jax.errors.JaxRuntimeError as error:
            if not re.search(f"{right.target}: .*({SAID})", str(error)):
                passed.append(f"{right.target}, {what}: {error}")
    assert not passed, "\n".join(passed)
