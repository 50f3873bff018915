"""Writes `tests/artefacts` anew: programs that every later build must run.

    python tests/lib/export_artefacts.py

That gives up what the old ones promise. Do it for a new op, whose archive is then the only one to keep, or where a
contract ends on purpose. Where calls of an op get other operands or results, keep its old program, and the new one
beside it under a name that goes on after the old one's, as `softmax-gradient-with_where.bin`.
"""

import shutil
import sys
import zipfile
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def main() -> None:
    sys.path[:0] = [str(TESTS.parent), str(TESTS)]
    import coverage

    coverage.set_tier("full")  # before the table is read: it has more rows there
    from exporting import ARTEFACTS, WAYS, archive, exported, function_of, stem
    from internals import run_every_kernel
    from native import is_built
    from ops import OPS

    import bench  # noqa: F401  # it lets the installed jaxnorm come before the clone's

    missing = [platform for platform in ("cpu", "gpu") if not is_built(platform)]
    if missing:
        sys.exit(f"no kernels for {' and '.join(missing)} are installed, so no program would hold calls of them")
    shutil.rmtree(ARTEFACTS, ignore_errors=True)
    ARTEFACTS.mkdir()
    run_every_kernel()
    for op in OPS:
        for way in WAYS:
            program = exported(op, function_of(op, way)).serialize()
            with zipfile.ZipFile(archive(op), "a", zipfile.ZIP_DEFLATED) as programs:
                programs.writestr(f"{stem(op, way)}.bin", bytes(program))


if __name__ == "__main__":
    main()
