"""The fuzzers: the same few examples each time, and with `--full` others for some time."""

import fuzz
import fuzz_mesh
import pytest
from coverage import in_full

pytestmark = pytest.mark.any_code

FEW = 7
MESH = pytest.param(fuzz_mesh, marks=pytest.mark.several)
fuzzers = pytest.mark.parametrize("fuzzer", [fuzz, MESH], ids=["programs", "meshes"])


@fuzzers
@pytest.mark.parametrize("first", [0, *in_full(1000)])
def test_random_programs(fuzzer, first, pytestconfig):
    limit = {"seconds": pytestconfig.getoption("--seconds")} if first else {"examples": FEW}
    failures = list(filter(None, fuzzer.fuzz(first, **limit)))
    assert not failures, "\n".join(failures)


@fuzzers
def test_an_example_is_its_seed(fuzzer):
    assert [str(fuzzer.draw(seed)) for seed in range(30)] == [str(fuzzer.draw(seed)) for seed in range(30)]


# Else the fuzzers would be of no use.
@pytest.mark.parametrize("seed", [0, 1])
def test_a_wrong_result_is_found(seed, monkeypatch):
    def broken(example):
        function = example.op.differentiable
        return example.program(lambda *args, **options: tuple(1.1 * y for y in function(*args, **options)))

    monkeypatch.setattr(fuzz, "_reference", broken)
    (failure,) = fuzz.fuzz(seed, examples=1)
    assert "times the error allowed" in failure
    assert f"--first {seed} --examples 1" in failure


@pytest.mark.several
@pytest.mark.parametrize("seed", [0, 1])
def test_a_wrong_part_is_found(seed, monkeypatch):
    right = fuzz_mesh._on_mesh

    def broken(*args, **given):
        # Results may be 0 throughout, as is the loss of one row that is ignored.
        return [1.1 * result + (result == 0) for result in right(*args, **given)]

    monkeypatch.setattr(fuzz_mesh, "_on_mesh", broken)
    (failure,) = fuzz_mesh.fuzz(seed, examples=1)
    assert "times the error allowed" in failure
    assert f"--first {seed} --examples 1" in failure
