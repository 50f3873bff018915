"""The fuzzer: the same few examples each time, and with `--full` others for some time."""

import fuzz
import pytest
from coverage import in_full

pytestmark = pytest.mark.any_code

FEW = 14


@pytest.mark.parametrize("first", [0, *in_full(1000)])
def test_random_programs(first, pytestconfig):
    limit = {"seconds": pytestconfig.getoption("--seconds")} if first else {"examples": FEW}
    failures = list(filter(None, fuzz.fuzz(first, **limit)))
    assert not failures, "\n".join(failures)


def test_an_example_is_its_seed():
    assert [str(fuzz.draw(seed)) for seed in range(60)] == [str(fuzz.draw(seed)) for seed in range(60)]


def seeds(is_of_several):
    return [seed for seed in range(20) if fuzz.draw(seed).is_of_several == is_of_several][:2]


# Else the fuzzer would be of no use.
@pytest.mark.parametrize("is_of_several", [False, pytest.param(True, marks=pytest.mark.needs("several"))])
def test_a_wrong_result_is_found(is_of_several, monkeypatch):
    right = fuzz.Example.on_mesh

    def broken(*args, **given):
        # Results may be 0 throughout, as is the loss of one row that is ignored.
        return [(1.1 * r + (r == 0)).astype(r.dtype) for r in right(*args, **given)]

    monkeypatch.setattr(fuzz.Example, "on_mesh", broken)
    for seed in seeds(is_of_several):
        (failure,) = fuzz.fuzz(seed, examples=1)
        assert "times the error allowed" in failure or "is no neighbour" in failure
        assert f"--first {seed} --examples 1" in failure
