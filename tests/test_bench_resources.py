"""`python -m bench resources`: what it reads out of cuobjdump's text, and when it calls a kernel worse."""

import pytest

from bench import resources

USAGE = """
 Function _Z4bothv:
  REG:{registers} STACK:{stack} SHARED:64 LOCAL:0 CONSTANT[0]:912 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
ELF = """
.nv.info._Z4bothv
	<0x10>
	Attribute:	EIATTR_MAX_THREADS
	Format:	EIFMT_SVAL
	Value:	0x100 0x1 0x1
"""
SASS = """
		Function : _Z4bothv
	.headerflags	@"EF_CUDA_SM90"
        /*0000*/                   {instruction} ;    /* 0x00000000000079c3 */
"""


@pytest.fixture
def builds(monkeypatch):
    """The texts of a build, by its path."""
    texts = {}

    def add(path, registers=32, stack=0, instruction="S2R R0"):
        usage = USAGE.format(registers=registers, stack=stack)
        texts[path] = {"--dump-resource-usage": usage, "-elf": ELF, "-sass": SASS.format(instruction=instruction)}
        return path

    monkeypatch.setattr(resources, "dump", lambda option, path: texts[path][option])
    return add


def compare(old, new):
    return resources.main(type("Arguments", (), {"old": old, "new": new}))


def test_what_is_read_of_a_kernel(builds):
    (kernel,) = resources.kernels(builds("old", registers=40, stack=8)).values()
    assert kernel[:-1] == (40, 8, 64, 256)
    assert kernel.blocks == 6


@pytest.mark.parametrize(
    ("changed", "is_worse"),
    [
        ({"instruction": "S2UR UR4"}, False),
        ({"registers": 33, "instruction": "S2UR UR4"}, True),  # 6 blocks in place of 8
        ({"registers": 24, "instruction": "S2UR UR4"}, False),
        ({"stack": 8, "instruction": "STL [R1]"}, True),
    ],
)
def test_a_kernel_is_worse_with_fewer_blocks_or_more_spills(builds, changed, is_worse):
    assert compare(builds("old"), builds("new", **changed)) == int(is_worse)


def test_kernels_of_the_same_machine_code_are_the_same(builds, capsys):
    assert compare(builds("old"), builds("new")) == 0
    assert "the same machine code: 1" in capsys.readouterr().out
