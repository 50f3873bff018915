"""`jaxnorm.tune`: what it tries, what it chooses, and what it leaves as it was."""

import contextlib
import functools
import json
import operator
import re
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from internals import ffi, reasons, tuning, turns
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxnorm
from jaxnorm import nnx as jaxnorm_nnx

pytestmark = [pytest.mark.jax_version, pytest.mark.needs("kernels")]

X, SCALE, LABELS = jnp.ones((4, 8)), jnp.ones(8), jnp.zeros(4, "int32")
TYPES = jax.ShapeDtypeStruct((4, 8), "float32"), jax.ShapeDtypeStruct((8,), "float32")
RMS, LAYER = "rms_norm", "layer_norm"
WAYS = FORWARD, BACKWARD = "forward", "backward"
IN_WORDS = ("8 min", "6 min", "4 min", "120 s")
compiled = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, _, **more: compiled.append(event) if event.endswith("backend_compile_duration") else None
)


def norms(x, scale=SCALE):
    return jaxnorm.layer_norm(jaxnorm.rms_norm(x, scale), scale)


def gradient_of(function):
    def loss(*args):
        return jnp.sin(function(*args)).sum()

    return jax.grad(loss)


STEP = jax.jit(gradient_of(norms))


@pytest.fixture
def times(monkeypatch):
    """The times of what is measured, in place of a clock: 1 ms, less what a test says by function and direction."""
    gains = {}

    def measured(runs):
        of_runs = []
        for run in runs:
            chosen = [(name, way) for name, ways in run.choices.items() for way in ways]
            seconds = 1e-3 - sum(gains.get(one, 0) for one in chosen)
            of_runs.append(turns.Times(0.99 * seconds, seconds, 1.01 * seconds))
        return of_runs

    monkeypatch.setattr(turns, "in_turns", measured)
    monkeypatch.setattr(tuning, "_cache", {})
    return gains


def tried(tuned):
    return {(trial.function, trial.direction, trial.implementation): trial.outcome for trial in tuned.trials}


def unread(x):
    jax.grad(lambda x: jaxnorm.rms_norm(x).sum())(x)
    return jaxnorm.layer_norm(x)


def rounded(x):
    quantization = jaxnorm.Quantization("int8")
    return jaxnorm.rms_norm_quantized(x, quantization=quantization, straight_through=True).quantized.dequantize()


def of_each_way(name):
    return [(name, way, "xla") for way in WAYS]


NORMS = [*of_each_way(RMS), *of_each_way(LAYER)]
TO_NATIVE = (RMS, BACKWARD, "native")
OF_LOSS, OF_LOOKUP = "linear_cross_entropy", "embedding"
# A function of x, and what is tried.
TUNINGS = {
    "under jit": (jax.jit(gradient_of(norms)), NORMS),
    "faster": (gradient_of(norms), NORMS),
    # Of 1 %, where a quarter of the turns take 1 % longer or less.
    "within the scatter": (norms, NORMS[::2]),
    "left to XLA": (gradient_of(jaxnorm.rms_norm), [NORMS[0], TO_NATIVE]),
    # Of two calls of a function the default rules give one a kernel: all may have one, or none.
    "a mixed default": (
        gradient_of(lambda x: jaxnorm.rms_norm(x)[:, :4] + jaxnorm.rms_norm(x[:, :4])),
        [*of_each_way(RMS), TO_NATIVE],
    ),
    "what a context leaves": (gradient_of(norms), [NORMS[2]]),
    # What asks for a result that nobody uses changes nothing.
    "the same program": (unread, [*of_each_way(RMS), NORMS[2]]),
    "what calls others": (
        gradient_of(lambda x: jaxnorm.linear_cross_entropy(x, SCALE[:, None] * SCALE, LABELS)),
        of_each_way(OF_LOSS),
    ),
    "a lookup": (
        gradient_of(lambda x: jaxnorm.embedding(x, LABELS)),
        [(OF_LOOKUP, FORWARD, "native"), (OF_LOOKUP, BACKWARD, "xla")],
    ),
    "rounding": (gradient_of(rounded), of_each_way("rms_norm_quantized")),
}
# A lookup is XLA's gather whatever is chosen.
SAME = {"the same program": of_each_way(RMS), "a lookup": [(OF_LOOKUP, FORWARD, "native")]}
GAINS = {(RMS, BACKWARD): 1e-4, (LAYER, FORWARD): 3e-4, (RMS, FORWARD): -2e-4}
# What is faster by how much, what is chosen then, and the time of that.
CHOSEN = {
    "faster": (GAINS, {LAYER: {FORWARD: "xla"}, RMS: {BACKWARD: "xla"}}, 6e-4),
    "within the scatter": ({(RMS, FORWARD): 1e-5}, {}, 1e-3),
    "left to XLA": ({(RMS, BACKWARD): 1e-4}, {RMS: {BACKWARD: "native"}}, 9e-4),
}
# Programs that are compiled, and how many at most.
PROGRAMS = {"faster": (5, 6), "under jit": (5, 6), "a mixed default": (4, 6)}
AROUND = {"what a context leaves": {RMS: "xla", LAYER: {BACKWARD: "native"}}}


@pytest.mark.parametrize("name", TUNINGS)
def test_what_it_tries_and_keeps(times, monkeypatch, name):
    def slower(_, spec, rows):
        return "XLA is faster" if (rows.way, rows.cols) == (BACKWARD, 8) and not spec.native_in(rows.way) else None

    function, trials = TUNINGS[name]
    gains, kept, seconds = CHOSEN.get(name, ({}, {}, 1e-3))
    times |= gains
    if name in ("left to XLA", "a mixed default"):
        monkeypatch.setattr(reasons, "slower", slower)
    compiled.clear()
    with jaxnorm.implementation(AROUND.get(name)):
        tuned = jaxnorm.tune(function, X)
    outcomes = dict.fromkeys(trials, "not faster")
    outcomes |= dict.fromkeys(SAME.get(name, ()), "the same program")
    outcomes |= {(function, way, how): "chosen" for function, ways in kept.items() for way, how in ways.items()}
    assert (list(tried(tuned).items()), dict(tuned)) == (list(outcomes.items()), kept)
    assert len(compiled) == tuned.compilations <= tuned.at_most
    assert PROGRAMS.get(name) in (None, (tuned.compilations, tuned.at_most))
    assert f"{tuned.compilations} programs compiled, of {tuned.at_most} at most" in str(tuned)
    assert (tuned.default_seconds, tuned.seconds) == pytest.approx((1e-3, seconds))


# Each is faster than what was there before it, and together they are not.
def test_what_is_not_faster_once_more_is_dropped(times, monkeypatch):
    measured, calls = turns.in_turns, []

    def first_time(runs):
        calls.append(runs)
        return measured(runs)[:: -1 if len(calls) == 3 else 1]

    monkeypatch.setattr(turns, "in_turns", first_time)
    times[RMS, FORWARD] = 1e-4
    tuned = jaxnorm.tune(norms, X, SCALE)
    assert (dict(tuned), tuned.seconds) == ({}, pytest.approx(9e-4))
    assert "beside the default, and is dropped" in str(tuned)


@pytest.fixture
def tuned(times):
    times[RMS, BACKWARD] = 1e-4
    return jaxnorm.tune(STEP, X, SCALE)


def test_it_is_a_choice_that_implementation_takes(tuned):
    with jaxnorm.implementation(tuned):
        runs = {(norm.name, norm.direction): norm.on("cpu") for norm in jaxnorm.explain(STEP, X, SCALE)}
        compiled.clear()
        STEP(X, SCALE)
    assert [one for one, run in runs.items() if run.implementation == "xla"] == [(RMS, BACKWARD)]
    assert runs[RMS, BACKWARD].why.endswith("jaxnorm.implementation({'rms_norm': {'backward': 'xla'}})")
    assert compiled == []  # but by tune


# On a terminal one line, elsewhere lines that are 10 s apart, of what takes so long.
@pytest.mark.parametrize(
    ("is_terminal", "seconds", "lines"),
    [
        (False, 2, []),
        (False, 4, ["3 of 5 done, about 8 s left"]),
        (False, 120, [f"{done} of 5 done, about {left} left" for done, left in enumerate(IN_WORDS, 1)]),
        (True, 4, ["0 of 5 done", *(f"{done} of 5 done, about {20 - 4 * done} s left" for done in (1, 2, 3, 4))]),
    ],
    ids=["short", "a line", "lines", "terminal"],
)
def test_it_tells_the_time_that_is_left(times, monkeypatch, capsys, is_terminal, seconds, lines):
    measured, clock = turns.in_turns, [0]

    def in_turns(runs):
        clock[0] += seconds
        return measured(runs)

    monkeypatch.setattr(turns, "in_turns", in_turns)
    monkeypatch.setattr(turns, "monotonic", lambda: clock[0])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    jaxnorm.tune(STEP, X, SCALE)
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.rstrip() for line in re.split("[\r\n]", err) if line] == [f"tune: loss: {line}" for line in lines]
    assert (err.count("\n"), err.count("\r")) == ((1, 5) if is_terminal else (len(lines), 0))
    assert err[-1:] == "\n"[: len(lines)]
    jaxnorm.tune(STEP, X, SCALE)
    assert capsys.readouterr().err == ""  # of what is kept


def test_a_line_ends_where_an_error_ends_what_it_tells_of(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with contextlib.suppress(ZeroDivisionError), turns.Progress("tune", 2) as line:
        line.step()
        raise ZeroDivisionError
    assert capsys.readouterr().err == "\rtune: 0 of 2 done\n"


def test_a_result_is_kept(times):
    first = jaxnorm.tune(jax.jit(norms), X, SCALE)
    compiled.clear()
    assert jaxnorm.tune(jax.jit(norms), X, SCALE) is first
    assert compiled == []
    others = [
        jaxnorm.tune(jax.jit(norms), X[:2], SCALE),
        jaxnorm.tune(jax.jit(norms), X.astype("bfloat16"), SCALE),
        jaxnorm.tune(jax.jit(lambda x, scale: norms(x, scale) + 1), X, SCALE),
    ]
    with jaxnorm.implementation({LAYER: "xla"}):
        others.append(jaxnorm.tune(jax.jit(norms), X, SCALE))
    assert all(other is not first for other in others)


def of_rows(devices):
    """A row for each, and how they are split."""
    mesh = jax.make_mesh((len(devices),), ("i",), (AxisType.Auto,), devices=devices)
    return jnp.ones((len(devices), 8)), NamedSharding(mesh, P("i"))


def test_a_result_is_kept_by_device_and_sharding(times, devices):
    rows, split = of_rows(devices)
    whole = NamedSharding(split.mesh, P())
    placed = [rows, *(jax.device_put(rows, place) for place in (split, whole, devices[1]))]
    results = [jaxnorm.tune(jax.jit(norms), x, SCALE) for x in placed]
    assert (len({id(tuned) for tuned in results}), results[1].where.devices) == (4, len(devices))
    assert "'i'" in results[1].arguments[0]
    assert results[1] != results[0]


NATIVE = functools.partial(jaxnorm.rms_norm, implementation="native")
NOTHING = {
    "no call": (jnp.sin, "no function of jaxnorm is in this program"),
    "an argument": (lambda x: NATIVE(x), "every call has its implementation already: by its argument"),
    "a context": (jaxnorm.implementation("xla")(lambda x: jaxnorm.rms_norm(x)), "every call has its implementation"),
    "a pullback": (jax.vjp(jaxnorm.rms_norm, X)[1], "as the call that it is a derivative of was traced before"),
    "no kernel": (lambda x: jaxnorm.rms_norm(x, axis=0), "not the trailing axes"),
    "no platform": (norms, "XLA's code runs whatever is chosen: there are none for "),
}


@pytest.mark.parametrize("name", NOTHING)
def test_where_there_is_nothing_to_choose(name, monkeypatch):
    function, note = NOTHING[name]
    if name == "no platform":
        monkeypatch.setattr(ffi, "why_nowhere", lambda platform: f"there are none for {platform}")
    compiled.clear()
    tuned = jaxnorm.tune(function, X)
    assert (compiled, dict(tuned), tuned.compilations, tuned.seconds) == ([], {}, 0, None)
    assert note in str(tuned).replace("\n    ", " ")
    assert all(outcome.startswith("left out: RuntimeError: rms_norm under") for outcome in tried(tuned).values())
    assert len(tuned.trials) == (name == "no kernel")


@pytest.mark.parametrize("when", ["traced", "run"])
def test_a_choice_that_fails_is_left_out(times, when, monkeypatch):
    times[LAYER, FORWARD] = 1e-4

    def fails(x, scale):
        if (RMS, FORWARD) in dict(tuning.options.context().by_name):
            if when == "traced":
                raise ZeroDivisionError("here")
            x = jax.pure_callback(lambda x: 1 / 0, x, x)
        return norms(x, scale)

    tuned = jaxnorm.tune(fails, X, SCALE)
    assert dict(tuned) == {LAYER: {FORWARD: "xla"}}
    assert tried(tuned)[RMS, FORWARD, "xla"].startswith("left out: ")


@pytest.mark.parametrize("donated", ["x", ("x", "scale")])
def test_arguments_are_not_consumed(donated):
    @functools.partial(jax.jit, static_argnums=1, static_argnames="power", donate_argnames=donated)
    def step(x, repeats, scale, *, power=1):
        for _ in range(repeats):
            x = x + norms(x, scale) ** power
        return x, scale * 2

    x, scale = jax.random.normal(jax.random.key(0), (64, 32)), jnp.ones(32)
    before = x + 0, scale + 0
    compiled.clear()
    tuned = jaxnorm.tune(step, x, 2, scale, power=3)
    assert len(compiled) == tuned.compilations == 3
    assert [x.is_deleted(), scale.is_deleted()] == [False, False]
    assert all(map(jnp.array_equal, (x, scale), before))
    step(x, 2, scale, power=3)
    assert x.is_deleted()


def test_what_is_not_donated_is_not_copied():
    step = jax.jit(lambda params, x, factor: (x * factor, params["a"] + 1), donate_argnames="params")
    program = turns.Program(step, ({"a": X, "b": SCALE}, X, 2.0), {})
    assert program.donated(program.lowered({})) == [0, 1]
    args, _ = program.arguments([0, 1])
    assert args[1] is X
    assert args[0]["a"] is not X
    plain = turns.Program(lambda x: step({"a": x, "b": x}, x, 1.0), (X,), {})
    assert plain.donated(plain.lowered({})) == []


def test_arguments_that_are_no_arrays(times):
    tuned = jaxnorm.tune(jaxnorm.rms_norm, X, out_dtype="bfloat16", epsilon=1e-5)
    assert list(tried(tuned)) == [(RMS, FORWARD, "xla")]
    assert (tuned.program, tuned.arguments) == (RMS, ("float32[4, 8]",))


# A step of NNX gives its results by changing modules.
def test_a_step_that_changes_its_arguments(times):
    model = jaxnorm_nnx.RMSNorm(8, rngs=nnx.Rngs(0))

    @nnx.jit
    def step(model, x):
        gradient = nnx.grad(lambda model: jnp.sin(model(x)).sum())(model)
        model.scale[...] = model.scale[...] - gradient.scale[...]

    tuned = jaxnorm.tune(step, model, X)
    assert list(tried(tuned).values()) == ["not faster"] * 2
    assert jnp.array_equal(model.scale[...], jnp.ones(8))


IS_A_TYPE, WITHIN = "is a jax.ShapeDtypeStruct", {"a": jax.ShapeDtypeStruct((), "int32")}
NO_FUNCTION = "the first argument must be a function, got .*; pass the function and its arguments apart"
ERRORS = {
    "no function": (lambda: jaxnorm.tune(X), NO_FUNCTION),
    "a type": (lambda: jaxnorm.tune(norms, TYPES[0]), rf"args\[0\] {IS_A_TYPE}, .* pass an"),
    "a type within": (lambda: jaxnorm.tune(norms, X, WITHIN), rf"args\[1\]\['a'\] {IS_A_TYPE}"),
    "traced": (lambda: jax.jit(lambda x: jaxnorm.tune(norms, x))(X), r"args\[0\] is traced, .* outside of jax.jit"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    call, message = ERRORS[name]
    with pytest.raises(TypeError, match=f"^tune: {message}"):
        call()


def test_errors_beside_those_of_arguments(monkeypatch):
    with pytest.raises(ZeroDivisionError):
        jaxnorm.tune(lambda x: jaxnorm.rms_norm(x) / (1 // 0), X)
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    with pytest.raises(RuntimeError, match=r"^tune: there are 4 processes, .* load that file in all"):
        jaxnorm.tune(norms, X, SCALE)


TABLE = """\
function    direction  tried  before  after   outcome
rms_norm    forward    xla    1 ms    1 ms    not faster
rms_norm    backward   xla    1 ms    0.9 ms  chosen
layer_norm  forward    xla    0.9 ms  0.9 ms  not faster
layer_norm  backward   xla    0.9 ms  0.9 ms  not faster
chosen: rms_norm backward xla; 5 programs compiled, of 6 at most
a call takes 0.9 ms, by default 1 ms"""


def test_it_is_a_table(tuned):
    first, _, table = str(tuned).partition("\n")
    assert first.startswith("loss on ")
    assert f"jax {jax.__version__}" in first
    assert (table, repr(tuned)) == (TABLE, str(tuned))


def test_it_is_a_value(tuned, times, monkeypatch):
    def anew(gain):
        times[RMS, BACKWARD] = gain
        monkeypatch.setattr(tuning, "_cache", {})
        return jaxnorm.tune(STEP, X, SCALE)

    again, traced = anew(2e-4), []
    assert again is not tuned
    assert (again, hash(again)) == (tuned, hash(tuned))
    step = jax.jit(lambda x, tuned: traced.append(tuned) or x, static_argnums=1)
    step(X, tuned), step(X, again)
    assert len(traced) == 1
    assert anew(0) != tuned


def tuned_to(*choices):
    return jaxnorm.Tuned(choices, "step", (), (), tuning.Where.of())


def chosen():
    return tuning.options.context()


FIRST = (RMS, FORWARD, "xla"), ("softmax", BACKWARD, "native")
SECOND = ((RMS, FORWARD, "native"),)


# Nested, within itself, among other contexts, and left by an error.
def test_it_is_a_context_as_implementation_makes_one():
    def states(context):
        first, second, found = tuned_to(*FIRST), tuned_to(*SECOND), [chosen()]
        with context(first):
            found.append(chosen())
            with context(second), context(first), jaxnorm.implementation(None):
                found.append(chosen())
                with context(second):
                    found.append(chosen())
            with contextlib.suppress(ZeroDivisionError), context(second), context(second):
                found.append(chosen())
                raise ZeroDivisionError
            found.append(chosen())
        return [*found, chosen()]

    assert states(lambda tuned: tuned) == states(jaxnorm.implementation)
    with (tuned := tuned_to(*FIRST)) as entered:
        assert entered is tuned
    with tuned_to(), jaxnorm.implementation({}):
        assert chosen() == tuning.options.Context()
    with pytest.raises(ValueError, match="no function 'norm'"), tuned_to(("norm", FORWARD, "xla")):
        pass
    assert chosen() == tuning.options.Context()


def test_it_is_a_context_of_its_thread():
    tuned = tuned_to(*FIRST)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(tuned.__enter__).result()
        outside = chosen()
        with tuned:
            inside = chosen()
        assert (outside, thread.submit(chosen).result()) == (tuning.options.Context(), inside)
        thread.submit(tuned.__exit__, None, None, None).result()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "step.json"


def test_a_file(tuned, path):
    tuned.save(path)
    loaded = jaxnorm.Tuned.load(path)
    assert (loaded, hash(loaded), str(loaded)) == (tuned, hash(tuned), str(tuned))
    for args in ((X, SCALE), TYPES):
        assert jaxnorm.Tuned.load(str(path), STEP, *args) == tuned
    with jaxnorm.implementation(loaded):
        assert dict(loaded) == {RMS: {BACKWARD: "xla"}}


def is_short(error, path=""):
    """Whether its message is of five lines at most, but for the file's name."""
    return len(textwrap.wrap(str(error).replace(str(path), ""), 120)) <= 5


NO_FILE = "is no file that jaxnorm.tune's save wrote "
CHANGES = {
    "device": (lambda file: file["where"].update(device="TPU v9"), "is for TPU v9, .* is .*; call jaxnorm.tune here"),
    "jax": (lambda f: f["where"]["versions"][0].__setitem__(1, "0.1"), r"is for .*jax 0\.1, .*here is .*jax 0\.1\d"),
    "function": (lambda file: file["choices"].append(["norm", FORWARD, "xla"]), "no function 'norm'"),
    "call": (lambda file: file["calls"].append("layer_gnorm forward (x: float32[8])"), "no function 'layer_gnorm'"),
    "trial": (lambda file: file["trials"][0].update(function="layer_gnorm"), "no function 'layer_gnorm'"),
    "direction": (lambda file: file["choices"].append([RMS, "sideways", "xla"]), "no direction 'sideways'"),
    "implementation": (lambda file: file["choices"].append([RMS, FORWARD, "cuda"]), "unknown implementation 'cuda'"),
    "calls": (lambda file: file.pop("calls"), f"{NO_FILE}.it has no calls"),
    "format": (lambda file: file.update({"jaxnorm.tune": 2}), f"{NO_FILE}.another format"),
    "field": (lambda file: file.update(surplus=1), f"{NO_FILE}.it has 'surplus'"),
    "four": (lambda file: file["choices"][0].append("xla"), f"{NO_FILE}.choices.0. is .*, expected a list of 3"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_file_of_another_installation(tuned, path, name):
    change, message = CHANGES[name]
    tuned.save(path)
    file = json.loads(path.read_text())
    change(file)
    path.write_text(json.dumps(file))
    with pytest.raises(ValueError, match=f"(?s)^Tuned.load: {path}.*{message}"):
        jaxnorm.Tuned.load(path)


@pytest.mark.parametrize("text", [b"", b"1", b"[" * 100_000, b"\xff", b'"' + b"x" * 9999 + b'"'], ids=lambda _: "")
def test_no_file_of_json(path, text):
    path.write_bytes(text)
    with pytest.raises(ValueError, match=f"^Tuned.load: .* {NO_FILE}") as raised:
        jaxnorm.Tuned.load(path)
    assert is_short(raised.value)


def places(value, path=()):
    """The paths of what a file holds, of a list the first."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, part in inner:
        yield from places(part, (*path, key))


def fits(path, value, new):
    """Whether save might have written this instead."""
    if path[-1:] and path[-1] in ("before", "after", "default_seconds", "seconds"):
        return new is None or isinstance(new, float)
    is_of_any_length = isinstance(value, list) and not isinstance(path[-1], int)
    return isinstance(new, str if isinstance(value, str) else list if is_of_any_length else ())


@pytest.mark.parametrize("new", [[], ["a", "b", "c", "d"], {}, {"rms_norm": 1}, 1.5, True, None, "text"], ids=repr)
def test_a_malformed_file_is_named(tuned, path, new):
    tuned.save(path)
    text, failed = path.read_text(), {}
    for place in places(json.loads(text)):
        *around, last = (0, *place)
        file = [json.loads(text)]
        within = functools.reduce(operator.getitem, around, file)
        before, within[last] = within[last], new
        path.write_text(json.dumps(file[0]))
        try:
            jaxnorm.Tuned.load(path)
        except Exception as error:
            is_said = isinstance(error, ValueError) and re.match(rf"^Tuned.load: {path} {NO_FILE}\(.*\)\.$", str(error))
            if is_said is None and fits(place, before, new) and f"Tuned.load: {path} is for" in str(error):
                continue
            in_python = re.search("unhashable|attribute|unpack|keyword|iterable|subscript|positional", str(error))
            if not is_said or in_python or not is_short(error, path):
                failed[place] = repr(error)
        else:
            if not fits(place, before, new):
                failed[place] = "loaded"
    assert failed == {}


@pytest.mark.parametrize("count", [2, 30])
def test_calls_are_counted_in_a_message(tuned, path, count):
    tuned.save(path)
    calls = [f"rms_norm forward (x: float32[{n},{'8' * 99}])" for n in range(count)]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"calls": calls}))
    with pytest.raises(ValueError, match="is for other calls: only the file has rms_norm forward") as raised:
        jaxnorm.Tuned.load(path, STEP, X, SCALE)
    assert "only the program has layer_norm backward (x: float32[4,8], scale: float32[8]), " in str(raised.value)
    assert ("and 28 more;" in str(raised.value)) == (count == 30)
    assert is_short(raised.value, path)


def test_a_file_for_several_devices(times, path, devices):
    rows, split = of_rows(devices)
    placed = jax.device_put(rows, split)
    tuned = jaxnorm.tune(norms, placed, SCALE)
    tuned.save(path)
    types = jax.ShapeDtypeStruct(rows.shape, rows.dtype, sharding=split), SCALE
    for program in ((), (norms, placed, SCALE), (norms, *types)):
        assert jaxnorm.Tuned.load(path, *program) == tuned
    with pytest.raises(ValueError, match=rf"is for {len(devices)} x .*, and here is (?!\d+ x )"):
        jaxnorm.Tuned.load(path, norms, rows, SCALE)


# Each thread has its contexts; programs are timed one after the other.
def test_threads(times):
    times[RMS, FORWARD] = 1e-4

    def tune(name):
        with jaxnorm.implementation({RMS: name}):
            return dict(jaxnorm.tune(jax.jit(norms), X, SCALE))

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(tune, (None, "xla", "native"))) == [{RMS: {FORWARD: "xla"}}, {}, {}]


# By a clock: every program the same number of turns, and none always after the same one.
def test_turns():
    called = []

    def fake(name, each):
        return SimpleNamespace(most_calls=3, seconds=lambda calls: called.append((name, calls)) or each)

    times = turns.in_turns([fake("a", 1e-3), fake("b", 2e-3)])
    assert [time.median for time in times] == [1e-3, 2e-3]
    assert [times[0].beats(times[1]), times[1].beats(times[0])] == [True, False]
    assert called[:4] == [("a", 1), ("a", 1), ("b", 1), ("b", 1)]
    timed = called[4:]
    assert (timed[:4], len(timed)) == ([("a", 3), ("b", 3), ("b", 3), ("a", 3)], 2 * (1 + turns.TURNS))


def test_quartiles_that_overlap_do_not_beat():
    slow, fast = turns.Times.of([3, 4, 5, 6, 7]), turns.Times.of([1, 2, 3, 4, 5])
    assert (slow.median, fast.median) == (5, 3)
    assert [fast.beats(slow), turns.Times.of([1, 2, 3, 3, 9]).beats(slow)] == [False, True]


# Copies of donated arguments take so much memory at most, but those of one call.
def test_the_copies_of_a_turn(monkeypatch):
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    run = turns.Run(turns.Program(step, (X,), {}), {}, [0])
    assert (run.consumed, run.most_calls) == ([0], turns.MOST_CALLS)
    for most_bytes, most_calls in ((3 * X.nbytes, 3), (1, 1)):
        monkeypatch.setattr(turns, "MOST_BYTES", most_bytes)
        assert run.most_calls == most_calls
    assert run.seconds(2) > 0
    assert not X.is_deleted()
