"""One decision: which code computes a call, and that all who tell of it, or act by it, say the same."""

import json

import jax
import jax.numpy as jnp
import pytest
from bad_calls import of_x
from coverage import over
from hlo import count_native_calls
from internals import ALONE, Platform, Program, calls_in, choose_fastest, decide, functions, report as reports
from table import EVERY, OPS

import jaxnorm
from jaxnorm import info

PLATFORMS, X = ("cpu", "cuda", "tpu"), jnp.ones((8, 64))


def gradient_of(op, **around):
    """The calls of a row's gradient, as its primitives tell of them."""
    with jaxnorm.implementation(around.get("implementation")):
        traced = jax.jit(op.gradient()).trace(*op.types(op.small))
    described = [described for _, described in calls_in(traced.jaxpr)]
    # The operands of a product may be rounded natively.
    return traced, [call.call for call in described if not op.is_product or call.name == op.public]


@over(EVERY, platform=lambda op: PLATFORMS)
def test_a_program_has_the_native_calls_that_are_decided(op, platform):
    traced, calls = gradient_of(op)
    decided = [decide(Platform.here(platform), call).how for call in calls]
    assert calls
    assert set(decided) <= {"native", "xla"}
    lowered = count_native_calls(traced.lower(lowering_platforms=(platform,)).as_text())
    if op.is_product:
        lowered = {name: count for name, count in lowered.items() if name == "jaxnorm_quantized_dot"}
    assert bool(lowered) == ("native" in decided)
    assert sum(lowered.values()) >= decided.count("native")


# A platform's kernels, of which none has to be here; what a program is like; and what is decided of any call, and of
# one that must be native.
DECIDED = {
    "alone": (None, ALONE, ("native", "native")),
    "no kernels here": ("they are not installed", ALONE, ("xla", "error")),
    "split": (None, Program(is_split=True), ("split", "split")),
    "split without Shardy": (None, Program(is_split=True, has_partitioner=False), ("xla", "error")),
    "split, of unknown lengths": (None, Program(is_split=True, has_lengths=False), ("xla", "error")),
    "split in part": (None, Program(is_split=True, is_partly_manual=True), ("split", "split")),
    "split in part, for two platforms": (
        None,
        Program(is_split=True, is_partly_manual=True, platforms=2),
        ("xla", "error"),
    ),
    "exported": (None, Program(is_exported=True), ("native", "native")),
}


@over(OPS, platform=lambda op: PLATFORMS, case=lambda op: DECIDED)
def test_what_is_decided(op, platform, case):
    lacks, program, expected = case
    if platform == "tpu":
        lacks, expected = "kernels are for others", ("xla", "error")
    for implementation, how in zip((None, "native"), expected, strict=True):
        for call in gradient_of(op, implementation=implementation)[1]:
            decision = decide(Platform(platform, lacks), call, program)
            is_linear = call.nowhere() is not None
            assert decision.how == ("xla" if is_linear else how)
            assert (decision.why is None) == (decision.how in ("native", "split"))
            assert decision.why == lacks or lacks is None or is_linear


# XLA's code where it is faster, and where it is asked for, is no error.
@over(EVERY, platform=lambda op: PLATFORMS[:2])
def test_what_is_asked_for_is_decided(op, platform):
    for call in gradient_of(op, implementation={op.public: "xla"})[1]:
        decision = decide(Platform(platform), call)
        assert decision.how == "xla"
        assert decision.stage in ("chosen", "call") or platform not in call.platforms


# By their defaults, with which a caller is served.
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("function", functions())
def test_info_and_explain_tell_the_same(function, platform, monkeypatch, capsys):
    choose_fastest(monkeypatch)
    info.main(["--json", "--op", function, "--shape", "8x64", "--dtype", "float32", "--platform", platform])
    report = json.loads(capsys.readouterr().out)["call"]
    is_native = report["implementation"] == "native" and reports.ALONE not in report.get("slower", {})
    told = [call for call in jaxnorm.explain(of_x(function), X) if (call.name, call.direction) == (function, "forward")]
    by_platform = {runs.platform: runs.implementation == "native" for runs in told[0].runs}
    assert by_platform.get(platform, False) == is_native
