"""`bench sharding`: what devices with parts of rows and groups exchange."""

import pytest

from bench import sharded_tables, sharding
from bench.__main__ import parse

pytestmark = [pytest.mark.any_code, pytest.mark.several]

GROUPS = 8 * 32  # of all images


@pytest.mark.parametrize("split", [sharding.CLASSES, sharding.POSITIONS], ids=lambda split: split.op)
def test_what_parts_exchange(devices, split):
    row = sharding.split_cell(split, "float32", devices, parse(["sharding", "--mib", "1", "--turns", "1"]))
    rows, size = row["M"], 2**20 * len(devices) // 4
    assert rows * row["N"] == size
    expected = {"softmax": {"all-reduce": 8 * rows}, "group_norm": {"all-gather": 8 * GROUPS * len(devices)}}
    assert row["MiB exchanged"] == sharded_tables.in_mib(expected[split.op])
    assert row["x XLA"] > 0
