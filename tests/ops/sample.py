"""The draw of the next token: what is kept, as a sweep of uniform numbers sees it, transformations, and devices."""

from functools import partial

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import DTYPES, assert_near, draw
from coverage import cover
from hlo import collectives, count_native_calls, lowered_calls
from jax.sharding import PartitionSpec as P
from meshes import MANUAL, mesh_for, on_mesh
from native import is_platform_with_kernels
from oracle import f64

import jaxnorm

sample = partial(jaxnorm.sample, return_log_prob=True)
TARGET = "jaxnorm_sample_fwd"
IMPLEMENTATIONS = ("native", *["xla"] * (not emulated.IS_ON))  # the emulator is there for kernels
OFF_BY = 2e-6  # how far from the one that is asked for the top_p or min_p may be that is kept by
BELOW_1 = np.nextafter(np.float32(1), np.float32(0))
NAN, INFINITY = float("nan"), float("inf")


def shares_of(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, where=True):
    """The probabilities of what is kept of one row, in float64."""
    logits = np.where(where, f64(logits), -np.inf)
    e = np.exp((logits - logits.max()) / np.float64(temperature))
    order = np.lexsort((np.arange(e.size), -logits))
    count = top_k if 0 < top_k < e.size else e.size
    if top_p < 1:
        sums = np.cumsum(e[order][:count])
        count = min(count, np.searchsorted(sums, np.float64(top_p) * sums[-1]) + 1)
    kept = np.zeros(e.size, bool)
    kept[order[: 1 if min_p > 1 else count]] = True
    e = np.where(kept & (e >= min(1, np.float64(min_p))), e, 0)
    return e / e.sum()


def nearby(logits, **given):
    """The same where top_p and min_p are a little less, as they are, and a little more."""
    moved = [{name: given[name] + by for name in {"top_p", "min_p"} & given.keys()} for by in (-OFF_BY, 0, OFF_BY)]
    return [shares_of(logits, **given | of) for of in moved]


def drawn(logits, uniform, implementation=None, **given):
    """Ids and logarithms; of one row by each of the uniform numbers."""
    given = {name: a if np.ndim(a) == 0 else jnp.asarray(a) for name, a in given.items()}
    logits = jnp.broadcast_to(logits, (len(uniform), *logits.shape)) if logits.ndim == 1 else logits
    function = partial(sample, uniform=jnp.asarray(uniform), implementation=implementation, **given)
    return jax.device_get(jax.jit(function)(logits))


COLS, KINDS = (1, 2, 7, 50, 301, 4096, 5003), ("random", "ties", "holes", "equal")


def row_of(kind, cols, dtype):
    row = np.asarray(draw(f"row {kind}", (cols,), std=2.0))
    others = {"ties": np.round(row), "holes": np.where(np.arange(cols) % 3 == 1, -np.inf, row), "equal": 0 * row - 7}
    return jnp.asarray(others.get(kind, row), dtype)


FILTERS = {
    "none": {"top_p": 1.0},
    "all but one": {},
    **{f"top_k {k}": {"top_k": k} for k in (1, 7)},
    **{f"top_p {p}": {"top_p": p} for p in (0.0, 1e-30, 0.8, 0.9999)},
    **{f"min_p {q}": {"min_p": q} for q in (0.05, 1.0, 2.0)},
    "top_k and top_p": {"top_k": 20, "top_p": 0.7},
    "every one": {"temperature": 0.7, "top_k": 30, "top_p": 0.95, "min_p": 0.02},
}


# A uniform number in the middle of a column's part of the sum draws it, if that is kept; and how much is kept in all
# is in its logarithm.
@pytest.mark.on_emulator
@cover(cols=COLS, kind=KINDS, filters=FILTERS, dtype=DTYPES, has_where=[False, True], implementation=IMPLEMENTATIONS)
def test_what_is_kept(cols, kind, filters, dtype, has_where, implementation):
    logits = row_of(kind, cols, dtype)
    given = (filters or {"top_k": max(1, cols - 1)}) | ({"where": np.arange(cols) % 5 != 2} if has_where else {})
    is_like = []
    for shares in nearby(logits, **given):
        seen = np.flatnonzero(shares > 5e-6)  # others are lost in rounding
        seen = seen[np.unique(np.linspace(0, seen.size - 1, 64).astype(int))]
        ids, log_probs = drawn(logits, np.float32(np.cumsum(shares)[seen] - shares[seen] / 2), implementation, **given)
        is_like.append(np.array_equal(ids, seen) and np.abs(log_probs - np.log(shares[seen])).max() <= 5e-6)
    assert any(is_like)


LONG = (3000, 20_011, 151_936, 262_144)
ENDS = [*({"top_k": k} for k in (1, 50, 1000)), *({"top_p": p} for p in (0.1, 0.5, 0.9, 0.99))]
ENDS += [*({"min_p": q} for q in (0.001, 0.1, 0.9)), {"top_k": 1000, "top_p": 0.9}]


# Of a row that falls the last column that is kept is that of the greatest uniform number.
@pytest.mark.on_emulator
@cover(cols=LONG, filters=ENDS, dtype=DTYPES, temperature=[0.5, 1.0, 3.0], implementation=IMPLEMENTATIONS)
def test_where_what_is_kept_of_a_long_row_ends(cols, filters, dtype, temperature, implementation):
    logits = jnp.asarray(-np.sort(-np.asarray(draw("long row", (cols,)))), dtype)
    given = {"temperature": temperature} | filters
    ((last,), (log_prob,)) = drawn(logits, [BELOW_1], implementation, **given)
    ends = [np.flatnonzero(shares)[-1] for shares in nearby(logits, **given)]
    assert min(ends) <= last <= max(ends)
    e = np.exp((f64(logits) - f64(logits).max()) / temperature)
    np.testing.assert_allclose(log_prob, np.log(e[last] / e[: last + 1].sum()), rtol=0, atol=1e-5)


# With settings of its own a row is as one by itself, whatever the others are.
@pytest.mark.on_emulator
@cover(cols=[1, 33, 1000, 3001], dtype=DTYPES, implementation=IMPLEMENTATIONS)
def test_rows_with_settings_of_their_own(cols, dtype, implementation):
    count, of = 40, np.random.default_rng(cols)
    logits, uniform = draw("rows", (count, cols), dtype, std=3.0), np.float32(np.linspace(0.01, 0.98, count))
    settings = {
        "temperature": np.float32(of.choice([0, 0.3, 1, 2.5], count)),
        "top_k": np.int32(of.choice([-1, 0, 1, 5, cols - 1, cols, cols + 1, 2**31 - 1], count)),
        "top_p": np.float32(of.choice([-1, 0, 0.3, 0.9, 1, 1.5], count)),
        "min_p": np.float32(of.choice([0, 0.01, 0.3, 1, 7], count)),
    }
    ids, log_probs = drawn(logits, uniform, implementation, **settings)
    for row in range(count):
        own = {name: values[row].item() for name, values in settings.items()}
        if own["temperature"] == 0:
            assert (ids[row], log_probs[row]) == (np.argmax(f64(logits[row])), 0)
            continue
        shares = shares_of(logits[row], **own)
        ends = np.append(0, np.cumsum(shares))
        assert ends[ids[row]] - OFF_BY <= uniform[row] <= ends[ids[row] + 1] + OFF_BY
        np.testing.assert_allclose(log_probs[row], np.log(shares[ids[row]]), rtol=0, atol=5e-6)
    some = slice(7, 22)
    alone = drawn(logits[some], uniform[some], implementation, **{name: a[some] for name, a in settings.items()})
    np.testing.assert_array_equal(alone, (ids[some], log_probs[some]))


@pytest.mark.on_emulator
@cover(cols=[1, 40, 3000], dtype=DTYPES, temperature=[0, "array"], implementation=(*IMPLEMENTATIONS, None))
def test_the_largest_at_temperature_0(cols, dtype, temperature, implementation):
    logits = jnp.round(draw("rows", (6, cols), dtype)).at[0].set(-0.0).at[0, -1].set(0.0).at[1].set(-6e4)
    given = {"temperature": np.zeros(6, "float32") if temperature else 0, "top_p": 0.1, "top_k": 3, "min_p": 0.5}
    ids, log_probs = drawn(logits, np.full(6, BELOW_1), implementation, **given)
    np.testing.assert_array_equal(ids, np.argmax(f64(logits), -1))
    np.testing.assert_array_equal(log_probs, 0)


BAD = [
    *(("logits", value) for value in (NAN, INFINITY, -INFINITY)),
    *(("temperature", value) for value in (-1.0, NAN, INFINITY, -INFINITY)),
    *(("uniform", value) for value in (-0.1, 1.0, NAN)),
    *(("where", False), ("top_k", -2), ("top_p", NAN), ("min_p", -0.1), ("min_p", NAN)),
]


# And from the rows beside it something is: what is hidden does not count.
@pytest.mark.on_emulator
@cover(bad=BAD, cols=[5, 2000], temperature=[0.0, 1.0], implementation=IMPLEMENTATIONS)
def test_a_row_from_which_nothing_is_drawn(bad, cols, temperature, implementation):
    given = {"temperature": temperature, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "uniform": 0.5}
    given = {name: np.full(3, value, "int32" if name == "top_k" else "float32") for name, value in given.items()}
    given |= {"where": np.ones((3, cols), bool), "logits": np.array(draw("rows", (3, cols)))}
    given["where"][:, 1], given["logits"][:, 1] = False, NAN
    name, value = bad
    given[name][(1, 2) if name == "logits" and value != -INFINITY else 1] = value
    ids, log_probs = drawn(jnp.asarray(given.pop("logits")), given.pop("uniform"), implementation, **given)
    assert (ids < 0).tolist() == np.isnan(log_probs).tolist() == [False, True, False]
    assert ids[1] == -1


# They are one function, but where a sum's last bit decides: a uniform number within 1e-7 of one of a thousand borders.
@cover(filters=[{}, {"top_k": 50}, {"top_p": 0.95}])
def test_kernel_and_formula_differ_at_borders_alone(filters):
    logits, uniform = draw("row", (1000,)), np.asarray(jax.random.uniform(jax.random.key(3), (50_000,)))
    native, formula = (drawn(logits, uniform, how, **filters)[0] for how in ("native", "xla"))
    place = np.cumsum(shares_of(logits, **filters) > 0)
    assert (native != formula).mean() <= 4e-4
    assert (np.abs(place[native] - place[formula]) <= 1).all()


@cover(way=["rows", "vmap", "auto", "explicit", MANUAL], implementation=IMPLEMENTATIONS)
def test_a_million_draws_are_as_often_as_they_are_likely(devices, way, implementation):
    logits, count, key, filters = draw("row", (50,)), 10**6, jax.random.key(1), {"temperature": 1.3, "top_p": 0.97}
    of = partial(jaxnorm.sample, implementation=implementation, **filters)
    rows = jnp.broadcast_to(logits, (count, 50))
    if way == "rows":
        ids = jax.jit(of)(rows, key)
    elif way == "vmap":
        ids = jax.jit(jax.vmap(of, (None, 0)))(logits, jax.random.split(key, count))
    else:
        mesh = mesh_for(way, devices)
        split = lambda x, u: of(x, uniform=u)  # noqa: E731
        split = jax.shard_map(split, mesh=mesh, in_specs=P("a"), out_specs=P("a")) if way == MANUAL else split
        ids, _ = on_mesh(mesh, split, (rows, jax.random.uniform(key, (count,))), (P("a"), P("a")))
    shares, seen = shares_of(logits, **filters), np.bincount(jax.device_get(ids), minlength=50)
    expected, degrees = count * shares[shares > 0], np.sum(shares > 0) - 1
    chi_square = ((seen[shares > 0] - expected) ** 2 / expected).sum()
    assert seen[shares == 0].sum() == 0
    assert abs(chi_square - degrees) < 5 * np.sqrt(2 * degrees)


def test_one_uniform_number_of_the_key_for_each_row():
    of, logits, key = jaxnorm.sample, draw("rows", (3, 4, 50)), jax.random.key(7)
    expected = of(logits, uniform=jax.random.uniform(key, (3, 4)))
    assert (expected.shape, expected.dtype, of(logits[0, 0], key).shape) == ((3, 4), "int32", ())
    for same in (key, jax.random.PRNGKey(7)):
        np.testing.assert_array_equal(of(logits, same), expected)
    keys = jax.random.split(key, 3)
    np.testing.assert_array_equal(jax.vmap(of)(logits, keys), [of(*row) for row in zip(logits, keys, strict=True)])


def operands(rows=6, cols=40):
    return {
        "logits": draw("rows", (rows, cols), std=2.0),
        "uniform": jnp.linspace(0.05, 0.9, rows),
        "temperature": jnp.linspace(0.5, 2, rows),
        "top_k": jnp.arange(3, 3 + 5 * rows, 5),
        "top_p": jnp.linspace(0.3, 1, rows),
        "min_p": jnp.linspace(0, 0.2, rows),
        "where": jnp.arange(cols) % 4 != jnp.arange(rows)[:, None] % 4,
    }


@pytest.mark.on_emulator
@cover(moving=[*((name,) for name in operands()), tuple(operands())], implementation=IMPLEMENTATIONS)
def test_examples(moving, implementation):
    args = {name: a if name in moving else a[0] for name, a in operands().items()}
    axes = {name: 0 if name in moving else None for name in args}
    results = jax.jit(jax.vmap(lambda of: sample(**of, implementation=implementation), (axes,)))(args)
    rows = ({name: a[i] if name in moving else a for name, a in args.items()} for i in range(6))
    of_each = [sample(**row, implementation="xla") for row in rows]
    assert_near(results, jax.tree.map(lambda *parts: jnp.stack(parts), *of_each))


@pytest.mark.on_emulator
@cover(loop=["scan", "while"], implementation=IMPLEMENTATIONS)
def test_in_loops(loop, implementation):
    table, keys = draw("table", (40, 40), std=2.0), jax.random.split(jax.random.key(0), 8)

    def following(how, settings, id, key):
        return jaxnorm.sample(table[id], key, **settings, implementation=how)

    def decoded(settings):
        step = partial(following, implementation, settings)
        if loop == "scan":
            return jax.lax.scan(lambda id, key: (step(id, key),) * 2, jnp.int32(3), keys)[1]
        first = jnp.full(9, 3, "int32"), 0
        body = lambda of: (of[0].at[of[1] + 1].set(step(of[0][of[1]], keys[of[1]])), of[1] + 1)  # noqa: E731
        return jax.lax.while_loop(lambda of: of[1] < 8, body, first)[0][1:]

    settings = {name: operands()[name][2] for name in ("temperature", "top_k", "top_p")}
    ids = [3]
    for key in keys:
        ids.append(int(following("xla", settings, ids[-1], key)))
    np.testing.assert_array_equal(jax.jit(decoded)(settings), ids[1:])


@cover(filters=FILTERS, implementation=IMPLEMENTATIONS, way=["grad", "jvp"])
def test_the_derivative_of_log_probabilities(filters, implementation, way):
    logits, uniform, temperature, *_ = operands().values()
    filters = {name: value for name, value in filters.items() if name != "temperature"}
    kept = [shares_of(row, temperature=t, **filters) > 0 for row, t in zip(logits, temperature, strict=True)]
    ours = partial(sample, uniform=uniform, implementation=implementation, **filters)
    ids, _ = ours(logits, temperature=temperature)

    def expected(logits, temperature):
        log_shares = jax.nn.log_softmax(jnp.where(np.stack(kept), logits / temperature[:, None], -1e9))
        return jnp.take_along_axis(log_shares, ids[:, None], -1)[:, 0]

    def transformed(function):
        if way == "grad":
            return jax.grad(lambda *args: jnp.sin(function(*args)).sum(), (0, 1))
        return lambda *args: jax.jvp(function, args, (jnp.cos(args[0]), args[1]))

    actual = transformed(lambda logits, temperature: ours(logits, temperature=temperature)[1])
    assert_near(*(jax.jit(of)(logits, temperature) for of in (actual, transformed(expected))), 1e-4)


# No derivative of ids, nor of a row from which nothing or one column alone can be drawn.
def test_where_there_is_no_derivative():
    logits = draw("rows", (4, 20)).at[1, 3].set(NAN)
    given = {"uniform": jnp.full(4, 0.5), "temperature": jnp.float32([1, 1, 0, 1]), "top_k": jnp.int32([5, 5, 5, 1])}

    def loss(logits, given):
        ids, log_probs = sample(logits, **given)
        return jnp.where(ids < 0, 0, log_probs).sum() + ids.sum()

    dlogits, others = jax.grad(loss, (0, 1), allow_int=True)(logits, given)
    assert np.asarray(dlogits).any(-1).tolist() == [True, False, False, False]
    assert (others["temperature"] != 0).tolist() == [True, False, False, False]
    assert not others["uniform"].any()
    _, (ids_dot, _) = jax.jvp(lambda x: sample(x, uniform=0.5), (logits,), (logits,))
    assert ids_dot.dtype == jax.dtypes.float0


@pytest.mark.needs("kernels")
@cover(
    mode=["auto", "explicit"],
    split=[P("a"), P(("a", "b")), P(None, "b"), P("a", "b")],
    implementation=[None, *IMPLEMENTATIONS],
)
def test_over_a_mesh(devices, mode, split, implementation):
    mesh, given = mesh_for(mode, devices), operands(rows=8)
    specs = [split if a.ndim == 2 else P(*split[:1]) for a in given.values()]
    function = lambda *args: sample(**dict(zip(given, args, strict=True)), implementation=implementation)  # noqa: E731
    spread = partial(on_mesh, mesh, function, given.values(), specs)
    is_split = mode == "explicit" and len(split) == 2 and mesh.shape["b"] > 1
    if is_split and implementation == "native":
        with pytest.raises(RuntimeError, match=r"^sample: .*'native' .*the last axis of logits is split over devices"):
            spread()
        return
    results, text = spread()
    assert_near(jax.device_get(results), jax.device_get(sample(**given, implementation="xla")))
    assert len(split) == 2 or not collectives(text)
    has_kernel = implementation != "xla" and not is_split and is_platform_with_kernels()
    assert count_native_calls(text) == ({TARGET: 1} if has_kernel else {})


@pytest.mark.needs("kernels")
@cover(off=[{}, {"top_k": 0}, {"top_k": -1}, {"top_k": 8}, {"top_p": 1}, {"top_p": 2.5}, {"min_p": 0}])
def test_a_filter_that_keeps_all_is_left_out(off):
    (call,) = lowered_calls(lambda x: sample(x, uniform=0.5, **off), TARGET, jnp.ones((2, 8)))
    assert (call.count("has_"), call.count("= true")) == (4, 0)


# None becomes another one in the 32 bits of a kernel.
def test_numbers_of_other_dtypes():
    logits, of = draw("rows", (3, 30)), jaxnorm.sample
    largest, any_one = (np.asarray(of(logits, uniform=0.999, top_k=k)) for k in (1, None))
    for k in (np.array(2**32 + 1), np.array(2**63 - 1), np.uint32(2**32 - 1), np.array(-1, "int8"), 2**40):
        np.testing.assert_array_equal(of(logits, uniform=0.999, top_k=k), any_one)
    np.testing.assert_array_equal(of(logits, uniform=0.999, top_k=np.array(-(2**40))), -1)
    np.testing.assert_array_equal(of(logits, uniform=0.999, top_k=np.array(1, "uint8")), largest)
    just_below, last = float(np.nextafter(1.0, 0)), of(logits, uniform=BELOW_1)
    for uniform, id in ((just_below, last), (np.full(3, just_below), last), (np.ones(3), -1)):
        np.testing.assert_array_equal(of(logits, uniform=uniform), id)


def test_float64_and_rows_of_nothing():
    with jax.enable_x64(True):
        logits, uniform = draw("rows", (4, 30), "float64"), np.linspace(0, 0.99, 4)
        ids, log_probs = drawn(logits, uniform, top_p=0.7)
    shares = np.stack([shares_of(row, top_p=0.7) for row in np.asarray(logits)])
    np.testing.assert_array_equal(ids, [np.argmax(np.cumsum(s) > u) for s, u in zip(shares, uniform, strict=True)])
    np.testing.assert_allclose(log_probs, np.log(shares[np.arange(4), ids]), rtol=1e-12)
    of_rows = partial(jaxnorm.sample, uniform=0, where=jnp.arange(4)[:, None] != 2)
    assert of_rows(jnp.ones((4, 3))).tolist() == [0, 0, -1, 0]
    assert of_rows(jnp.ones((4, 0))).tolist() == [-1] * 4
