"""A JAX of another version, or in which a private name is gone: jaxnorm works without kernels, and says so."""

import ast
import inspect
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from formulas import norm as formula
from internals import compat, private

import jaxnorm

# One worker runs the program for all of them.
pytestmark = [pytest.mark.jax_version, pytest.mark.xdist_group("unknown jax")]

# jaxnorm, imported in this process once more, without each name that is given in turn, or as if JAX were that version.
PROGRAM = """
import contextlib, json, operator, sys, warnings
import numpy as np
import jax, jax.export, jax.extend.core, jax.numpy as jnp

# Which JAX would refuse for a second class of the name.
jax.export.register_pytree_node_serialization = lambda *_, **__: None
jax.export.register_namedtuple_serialization = lambda *_, **__: None

@contextlib.contextmanager
def without(module, name=None):
    if module == "version":
        there = jax.__version__, jax.__version_info__
        jax.__version__, jax.__version_info__ = name, tuple(map(int, name.split(".")))
        yield
        jax.__version__, jax.__version_info__ = there
        return
    if name is None:
        there, sys.modules[module] = sys.modules[module], None
        yield
        sys.modules[module] = there
        return
    owner, _, name = f"{module}.{name}".rpartition(".")
    owner = operator.attrgetter(owner.removeprefix("jax."))(jax)
    there = vars(owner)[name]
    delattr(owner, name)
    yield
    setattr(owner, name, there)

def use():
    import jaxnorm
    from jaxnorm import info
    x = jnp.arange(12.0).reshape(3, 4)
    try:
        jaxnorm.rms_norm(x, implementation="native")
    except RuntimeError as error:
        native = str(error)
    quantized = jaxnorm.rms_norm_quantized(x, quantization=jaxnorm.Quantization("int8")).quantized
    return {
        "y": np.asarray(jax.jit(jaxnorm.rms_norm)(x)).tolist(),
        "gradient": np.asarray(jax.grad(lambda x: (jaxnorm.layer_norm(x) ** 3).sum())(x)).tolist(),
        "rows": np.asarray(jax.vmap(lambda x: jaxnorm.rms_norm(x, axis_name="i"), 1, 1, axis_name="i")(x)).shape,
        "values": str(quantized.values.dtype),
        "native": native,
        "loaded": {name: module["loaded"] for name, module in info.native_modules().items()},
    }

found = {}
for gone in json.load(sys.stdin):
    module, *names = gone
    for name in [name for name in sys.modules if name.split(".")[0] == "jaxnorm"]:
        del sys.modules[name]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with contextlib.ExitStack() as stack:
            for name in names or [None]:
                stack.enter_context(without(module, name))
            import jaxnorm
        found[" ".join(gone)] = {**use(), "told": [str(warning.message) for warning in told]}
json.dump(found, sys.stdout)
"""


def there(module, names):
    """Those of them that this JAX has."""
    owner = private.module(module)
    return [name for name in names.split("|") if private._is_there(owner, name)]


GONE = [
    *(["version", version] for version in ("0.9.2", "0.13.0")),
    *([module] for module in ("jax._src.checkify", "jax._src.custom_partitioning_sharding_rule")),
    *([module, *there(module, names)] for module, several in private.NAMES.items() for names in several),
]


def each(test):
    """For each name; they are tried in a process of half a minute."""
    return pytest.mark.long(pytest.mark.parametrize("gone", [" ".join(gone) for gone in GONE])(test))


@pytest.fixture(scope="module")
def found():
    path = str(Path(jaxnorm.__file__).parents[1])
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {path!r})\n{PROGRAM}"]
    run = subprocess.run(command, input=json.dumps(GONE), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@each
def test_all_else_works(gone, found):
    report, x = found[gone], np.arange(12, dtype=np.float32).reshape(3, 4)
    np.testing.assert_allclose(report["y"], formula("rms")(x), rtol=1e-6)
    assert np.isfinite(report["gradient"]).all()
    assert (report["rows"], report["values"]) == ([3, 4], "int8")
    assert report["loaded"] == {"cpu": False, "cuda": False}


@each
def test_one_warning_and_the_error_name_it_and_the_remedy(gone, found):
    report, name = found[gone], gone.split(" ")[-1]
    (told,) = report["told"]
    for said in (told, report["native"]):
        assert name in said
        assert "install a newer jaxnorm" in said
    assert told.startswith("jaxnorm has no kernels")
    assert report["native"].startswith("rms_norm: ")


# By version and what JAXNORM_UNTESTED_JAX is: kernels on an FFI that is older than theirs would be the end of the whole
# backend, whatever is asked for.
VERSIONS = {"0.9.2": {"": False, "1": False}, "0.10.0": {"": True}, "0.12.5": {"": True}}
VERSIONS |= {"0.13.0": {"": False, "0": False, "1": True}, "1.0.0": {"": False}}


@pytest.mark.parametrize(
    ("version", "anyway", "known"), [(v, anyway, known) for v in VERSIONS for anyway, known in VERSIONS[v].items()]
)
def test_versions(monkeypatch, version, anyway, known):
    monkeypatch.setattr(private.jax, "__version_info__", tuple(map(int, version.split("."))))
    monkeypatch.setenv("JAXNORM_UNTESTED_JAX", anyway)
    why = private.untested()
    assert why is None if known else "tested with 0.10 to 0.12" in why


def test_the_known_versions_are_the_required_ones():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (least, least_minor), (most, most_minor) = private.OLDEST, private.NEWEST
    assert f"jax>={least}.{least_minor},<{most}.{most_minor + 1}" in project["dependencies"]


def test_this_jax_is_known():
    assert (private.missing(), compat.UNKNOWN) == (None, None)


def test_every_private_name_in_use_is_looked_up():
    tree = ast.parse(inspect.getsource(compat))
    modules = {
        node.targets[0].id: node.value.args[0].value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("private.module(")
    }
    chains = [ast.unparse(node).partition(".") for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    used = {f"{modules[name]}.{rest}" for name, _, rest in chains if name in modules}
    known = {f"{module}.{name}" for module, names in private.NAMES.items() for name in names}
    unknown = [u for u in used if not any(f"{k}.".startswith(f"{u}.") or u.startswith(f"{k}.") for k in known)]
    assert unknown == ["jax._src.interpreters.mlir.lower_fun"]  # which is public
