"""An op is a folder: the product without its two folders, its line of the build and its import is whole."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# All but those on which others build, norm and quantized_dot.
OPS = ("sandwich_norm", "group_norm", "gated_activation", "softmax", "cross_entropy", "qk_norm_rotary", "float8_linear")
OPS += ("embedding",)
IN_SOURCES = {"embedding": "segment_sum"}  # of which name its folder of src is, where it has another
NAMED_IN = {"jaxnorm/__init__.py", "cmake/ops.cmake"}
LAYERS = re.compile("jaxnorm/(flax/|equinox/|keras|replacement)")  # a layer is of its op, and goes with it

pytestmark = pytest.mark.any_code

PROGRAM = """
import sys, jax, jaxnorm
from jaxnorm import info
print(jaxnorm.__path__[0], *(name for name in sys.modules if sys.argv[1] in name))
assert all(hasattr(jaxnorm, name) for name in jaxnorm.__all__)
print(jax.jit(jax.grad(lambda x: jaxnorm.layer_norm(x).sum()))(jax.numpy.arange(8.0)).shape)
info.main([])
"""


@pytest.mark.parametrize("op", OPS)
def test_the_product_names_an_op_in_few_places(op):
    paths = [path for folder in ("jaxnorm", "src", "cmake") for path in (ROOT / folder).rglob("*.*") if path.is_file()]
    texts = {str(p.relative_to(ROOT)): p.read_text() for p in paths if p.suffix not in (".so", ".pyc")}
    named = re.compile(rf"ops[./]{op}\b|\bjaxnorm_op\({op}\b")
    found = {path for path, text in texts.items() if named.search(text) and f"/ops/{op}/" not in path}
    assert {path for path in found if not LAYERS.match(path)} <= NAMED_IN


@pytest.mark.parametrize("op", ["sandwich_norm", "softmax", "cross_entropy", "embedding"])  # those without layers
def test_what_is_left_is_whole(op, tmp_path):
    of_sources = IN_SOURCES.get(op, op)
    ignored = shutil.ignore_patterns("__pycache__", "*.so", op, of_sources)
    for folder in ("jaxnorm", "cmake", "src"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    for module in filter(None, map(importlib.util.find_spec, ("jaxnorm._cpu", "jaxnorm._cuda"))):
        (tmp_path / "jaxnorm" / Path(module.origin).name).symlink_to(module.origin)
    init, lines = (tmp_path / name for name in sorted(NAMED_IN, reverse=True))
    lines.write_text(re.sub(rf"(?m)^jaxnorm_op\({of_sources}\b.*\n", "", lines.read_text()))
    imports = re.findall(rf"(?m)^from jaxnorm\.ops\.{op}\..* import (.*)\n", init.read_text())
    names = "|".join(", ".join(imports).split(", "))
    init.write_text(re.sub(rf'(?m)^from jaxnorm\.ops\.{op}\..*\n|^ *"({names})",\n', "", init.read_text()))
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", PROGRAM, f"jaxnorm.ops.{op}"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.startswith(f"{tmp_path / 'jaxnorm'}\n(8,)\n"), done.stderr
    assert done.returncode == 0, done.stderr
