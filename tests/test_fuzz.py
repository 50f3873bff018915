"""The fuzzer: the same few examples each time, and with `--full` others for some time."""

import fuzz
import pytest
from coverage import in_full

FEW = 7


@pytest.mark.parametrize("first", [0, *in_full(1000)])
def test_random_programs(first, pytestconfig):
    limit = {"seconds": pytestconfig.getoption("--seconds")} if first else {"examples": FEW}
    failures = list(filter(None, fuzz.fuzz(first, **limit)))
    assert not failures, "\n".join(failures)


def test_an_example_is_its_seed():
    assert [str(fuzz.draw(seed)) for seed in range(99)] == [str(fuzz.draw(seed)) for seed in range(99)]


# Else the fuzzer would be of no use.
@pytest.mark.parametrize("seed", [0, 1])
def test_a_wrong_result_is_found(seed, monkeypatch):
    def broken(example):
        function = example.op.differentiable
        return example.program(lambda *args, **options: tuple(1.1 * y for y in function(*args, **options)))

    monkeypatch.setattr(fuzz, "_reference", broken)
    (failure,) = fuzz.fuzz(seed, examples=1)
    assert "times the error allowed" in failure
    assert f"--first {seed} --examples 1" in failure
