"""The draw of the next token: what is kept, as a sweep of uniform numbers sees it, transformations, and devices."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import DTYPES, draw
from coverage import cover
from hlo import compiled_text, count_native_calls, lowered_calls
from jax.sharding import AxisType, PartitionSpec as P
from meshes import MANUAL, mesh_for, mesh_of, on_mesh
from native import is_platform_with_kernels
from oracle import f64

import jaxnorm

sample = jaxnorm.sample
IMPLEMENTATIONS = "native", "xla"
TARGET = "jaxnorm_sample_fwd"
OFF_BY = 2e-6  # how far from the one that is asked for the top_p or min_p may be that is kept by
BELOW_1 = np.nextafter(np.float32(1), np.float32(0))
# A row's own number of each kind, in the order of the row.
OWN = ("temperature", "top_k", "top_p", "min_p")


def shares_of(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, where=True, one_more=0):
    """The probabilities of what is kept of one row, with so many columns more than top_p says."""
    logits = np.where(where, f64(logits), -np.inf)
    e = np.exp((logits - logits.max()) / np.float64(temperature))
    order = np.lexsort((np.arange(e.size), -logits))
    count = top_k if 0 < top_k < e.size else e.size
    sums = np.cumsum(e[order])
    if top_p < 1:
        count = np.clip(np.searchsorted(sums[:count], np.float64(top_p) * sums[count - 1]) + 1 + one_more, 1, count)
    kept = np.zeros(e.size, bool)
    kept[order[: 1 if min_p > 1 else count]] = True
    e = np.where(kept & (e >= min(1, np.float64(min_p))), e, 0)
    return e / e.sum()


def drawn(logits, uniform, implementation=None, **options):
    """Ids and logarithms, of one row for all uniform numbers if logits are that."""
    options = {name: a if np.ndim(a) == 0 else jnp.asarray(a) for name, a in options.items()}
    logits = jnp.broadcast_to(logits, (len(uniform), *logits.shape)) if logits.ndim == 1 else logits
    function = partial(sample, uniform=jnp.asarray(uniform), return_log_prob=True, implementation=implementation)
    return jax.device_get(jax.jit(partial(function, **options))(logits))


def sweep(shares, most=64):
    """Columns whose share is not lost in rounding, and a uniform number in the middle of each of their intervals."""
    seen = np.flatnonzero(shares > 5e-6)
    seen = seen[np.unique(np.linspace(0, seen.size - 1, most).astype(int))]
    ends = np.cumsum(shares)
    return seen, np.float32(ends[seen] - shares[seen] / 2)


def row_of(kind, cols, dtype):
    logits = np.asarray(draw(f"row {kind}", (cols,), std=2.0))
    logits = np.round(logits) if kind == "ties" else logits
    if kind == "holes":
        logits = np.where(np.arange(cols) % 3 == 1, -np.inf, logits)
    elif kind == "equal":
        logits = np.full(cols, -7.0)
    return jnp.asarray(logits, dtype)


ROWS = ("random", "ties", "holes", "equal")
FILTERS = {
    "none": {},
    "top_k": {"top_k": 7},
    "top_k 1": {"top_k": 1},
    "all but one": {"top_k": -2},  # of the columns
    "top_p": {"top_p": 0.8},
    "top_p 0": {"top_p": 0.0},
    "top_p of little": {"top_p": 1e-30},
    "top_p of nearly all": {"top_p": 0.9999},
    "min_p": {"min_p": 0.05},
    "min_p 1": {"min_p": 1.0},
    "min_p 2": {"min_p": 2.0},
    "top_k and top_p": {"top_k": 20, "top_p": 0.7},
    "all": {"temperature": 0.7, "top_k": 30, "top_p": 0.95, "min_p": 0.02},
}


@pytest.mark.on_emulator
@cover(
    cols=[1, 2, 7, 50, 301, 4096, 5003],
    kind=ROWS,
    filters=FILTERS,
    dtype=DTYPES,
    has_where=[False, True],
    implementation=IMPLEMENTATIONS,
)
def test_what_is_kept_is_that_of_numpy(cols, kind, filters, dtype, has_where, implementation):
    logits = row_of(kind, cols, dtype)
    filters = {name: max(1, cols - 1) if value == -2 else value for name, value in filters.items()}
    where = (np.arange(cols) % 5 != 2) if has_where else np.ones(cols, bool)
    given = filters | ({"where": where} if has_where else {})
    # On a border of top_p the column that ends the list may be in or not.
    near = [
        shares_of(logits, **given | {"top_p": p}) for p in filters.get("top_p", 1.0) + np.array([-1, 0, 1]) * OFF_BY
    ]
    for shares in near:
        seen, uniform = sweep(shares)
        ids, log_probs = drawn(logits, uniform, implementation, **given)
        if np.array_equal(ids, seen):
            np.testing.assert_allclose(log_probs, np.log(shares[seen]), rtol=0, atol=5e-6)
            return
    pytest.fail(f"{ids} of {seen}")


# Of a row that falls the last column that is kept is that of the greatest uniform number.
@pytest.mark.on_emulator
@cover(
    cols=[3000, 20_011, 151_936, 262_144],
    filters=[
        *({"top_k": k} for k in (1, 50, 1000)),
        *({"top_p": p} for p in (0.1, 0.5, 0.9, 0.99)),
        *({"min_p": q} for q in (0.001, 0.1, 0.9)),
        {"top_k": 1000, "top_p": 0.9},
    ],
    dtype=DTYPES,
    temperature=[0.5, 1.0, 3.0],
    implementation=IMPLEMENTATIONS,
)
def test_where_what_is_kept_of_a_long_row_ends(cols, filters, dtype, temperature, implementation):
    logits = jnp.asarray(-np.sort(-np.asarray(draw("long row", (cols,)))), dtype)
    given = {"temperature": temperature} | filters
    ((last,), (log_prob,)) = drawn(logits, [BELOW_1], implementation, **given)
    ends = [
        np.flatnonzero(shares_of(logits, **given | {name: filters[name] + by for name in {*filters} - {"top_k"}}))[-1]
        for by in (-OFF_BY, OFF_BY)
    ]
    assert ends[0] <= last <= ends[1] or ends[1] <= last <= ends[0]
    assert "top_k" not in filters or "top_p" in filters or last == filters["top_k"] - 1
    e = np.exp((f64(logits) - f64(logits).max()) / temperature)
    np.testing.assert_allclose(log_prob, np.log(e[last] / e[: last + 1].sum()), rtol=0, atol=1e-5)


def rows_of_settings(count, cols):
    """Settings of each row its own, with those at borders among them."""
    of = np.random.default_rng(cols)
    return {
        "temperature": np.float32(of.choice([0, 0.3, 1, 2.5], count)),
        "top_k": np.int32(of.choice([-1, 0, 1, 5, cols - 1, cols, cols + 1, 2**31 - 1], count)),
        "top_p": np.float32(of.choice([-1, 0, 0.3, 0.9, 1, 1.5], count)),
        "min_p": np.float32(of.choice([0, 0.01, 0.3, 1, 7], count)),
    }


# However the rows are given: with settings of their own a row is as one by itself.
@pytest.mark.on_emulator
@cover(cols=[1, 33, 1000, 3001], dtype=DTYPES, implementation=IMPLEMENTATIONS)
def test_rows_with_settings_of_their_own(cols, dtype, implementation):
    count = 40
    logits, uniform = draw("rows", (count, cols), dtype, std=3.0), np.float32(np.linspace(0.01, 0.98, count))
    settings = rows_of_settings(count, cols)
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
@cover(cols=[1, 40, 3000], dtype=DTYPES, temperature=[0, "array"], implementation=IMPLEMENTATIONS)
def test_the_largest_at_temperature_0(cols, dtype, temperature, implementation):
    logits = jnp.round(draw("rows", (6, cols), dtype)).at[0].set(-0.0).at[0, -1].set(0.0).at[1].set(-3e38)
    given = {"temperature": np.zeros(6, "float32") if temperature else 0, "top_p": 0.1, "top_k": 3, "min_p": 0.5}
    ids, log_probs = drawn(logits, np.full(6, BELOW_1), implementation, **given)
    np.testing.assert_array_equal(ids, np.argmax(f64(logits).clip(-3e38), -1))
    np.testing.assert_array_equal(log_probs, 0)


NAN, INFINITY = float("nan"), float("inf")
# What a row has that makes nothing of it.
BAD = {
    "NaN": {"logits": NAN},
    "infinity": {"logits": INFINITY},
    "nothing": {"logits": -INFINITY},
    "hidden": {"where": False},
    **{f"temperature {t}": {"temperature": t} for t in (-1.0, NAN, INFINITY, -INFINITY)},
    "top_k": {"top_k": -2},
    "top_p": {"top_p": NAN},
    **{f"min_p {q}": {"min_p": q} for q in (-0.1, NAN)},
    **{f"uniform {u}": {"uniform": u} for u in (-0.1, 1.0, NAN)},
}


@pytest.mark.on_emulator
@cover(bad=BAD, cols=[5, 2000], temperature=[0.0, 1.0], implementation=IMPLEMENTATIONS)
def test_a_row_from_which_nothing_is_drawn(bad, cols, temperature, implementation):
    logits, where = draw("rows", (3, cols)), jnp.ones((3, cols), bool).at[:, 1].set(False)
    logits = (
        logits.at[:, 1]
        .set(NAN)
        .at[1, 2 if bad.get("logits") != -INFINITY else slice(None)]
        .set(bad.get("logits", -INFINITY))
    )
    where = where.at[1].set(bad.get("where", where[1]))
    given = {"temperature": temperature, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "uniform": 0.5}
    given = {name: np.asarray([value, bad.get(name, value), value]) for name, value in given.items()}
    given |= {name: np.float32(given[name]) for name in given if name != "top_k"} | {"top_k": np.int32(given["top_k"])}
    ids, log_probs = drawn(logits, given.pop("uniform"), implementation, where=where, **given)
    assert (ids[1], bool(np.isnan(log_probs[1]))) == (-1, True)
    assert (ids[[0, 2]] >= 0).all()
    assert np.isfinite(log_probs[[0, 2]]).all()


# Both are one function of logits and uniform numbers: they differ where the last bit of a sum decides, which is where a
# uniform number lies within about 1e-7 of one of a thousand borders, and then by the next column that is kept.
@pytest.mark.parametrize("filters", [{}, {"top_k": 50}, {"top_p": 0.95}])
def test_kernel_and_formula_differ_at_borders_alone(filters):
    rows, cols = 50_000, 1000
    logits = draw("row", (cols,))
    uniform = np.asarray(jax.random.uniform(jax.random.key(3), (rows,)))
    native, formula = (drawn(logits, uniform, how, **filters)[0] for how in IMPLEMENTATIONS)
    differs = native != formula
    assert differs.mean() <= 4e-4
    place = np.cumsum(shares_of(logits, **filters) > 0)
    assert (np.abs(place[native] - place[formula]) <= 1).all()


def chi_square(ids, shares):
    """In standard deviations from what is expected of draws from these."""
    expected = ids.size * shares
    seen = np.bincount(ids.ravel(), minlength=shares.size)
    assert (seen[shares == 0] == 0).all()
    is_kept = shares > 0
    degrees = is_kept.sum() - 1
    return (((seen - expected)[is_kept] ** 2 / expected[is_kept]).sum() - degrees) / np.sqrt(2 * degrees)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("way", ["rows", "vmap", "auto", "explicit", MANUAL])
def test_a_million_draws_are_as_often_as_they_are_likely(devices, way, implementation):
    logits, count, filters = draw("row", (50,)), 10**6, {"temperature": 1.3, "top_p": 0.97}
    of = partial(sample, implementation=implementation, **filters)
    if way == "rows":
        ids = jax.jit(of)(jnp.broadcast_to(logits, (count, 50)), jax.random.key(1))
    elif way == "vmap":
        ids = jax.jit(jax.vmap(of, (None, 0)))(logits, jax.random.split(jax.random.key(1), count))
    else:
        mesh, rows = mesh_for(way, devices), jnp.broadcast_to(logits, (count, 50))
        split = lambda logits, uniform: of(logits, uniform=uniform)  # noqa: E731
        if way == MANUAL:
            split = jax.shard_map(split, mesh=mesh, in_specs=(P("a"), P("a")), out_specs=P("a"))
        uniform = jax.random.uniform(jax.random.key(1), (count,))
        ids, _ = on_mesh(mesh, split, (rows, uniform), (P("a"), P("a")))
    assert abs(chi_square(np.asarray(jax.device_get(ids)), shares_of(logits, **filters))) < 5


def test_one_uniform_number_of_the_key_for_each_row():
    logits, key = draw("rows", (3, 4, 50)), jax.random.key(7)
    expected = sample(logits, uniform=jax.random.uniform(key, (3, 4)))
    assert (expected.shape, expected.dtype) == ((3, 4), "int32")
    np.testing.assert_array_equal(sample(logits, key), expected)
    np.testing.assert_array_equal(sample(logits, jax.random.PRNGKey(7)), expected)
    keys = jax.random.split(key, 3)
    np.testing.assert_array_equal(
        jax.vmap(sample)(logits, keys), [sample(a, k) for a, k in zip(logits, keys, strict=True)]
    )
    assert sample(logits[0, 0], key).shape == ()


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


def both(implementation, given):
    return sample(**given, return_log_prob=True, implementation=implementation)


def each(given, moving, **others):
    """The results of each row by itself, where only these differ."""
    rows = len(given["logits"])
    of = [{name: a[i] if name in moving else a[0] for name, a in given.items()} for i in range(rows)]
    return [np.stack(parts) for parts in zip(*(jax.device_get(both("xla", row)) for row in of), strict=True)]


@pytest.mark.on_emulator
@cover(moving=[(name,) for name in operands()] + [tuple(operands())], implementation=IMPLEMENTATIONS)
def test_examples(moving, implementation):
    given = operands()
    args = {name: a if name in moving else a[0] for name, a in given.items()}
    axes = {name: 0 if name in moving else None for name in given}
    ids, log_probs = jax.jit(jax.vmap(partial(both, implementation), (axes,)))(args)
    expected, expected_log_probs = each(given, moving)
    np.testing.assert_array_equal(ids, expected)
    np.testing.assert_allclose(log_probs, expected_log_probs, atol=2e-6)


# As a program decodes: each step's key, settings that are traced, and a loop that ends at an id.
@pytest.mark.on_emulator
@cover(loop=["scan", "while"], implementation=IMPLEMENTATIONS)
def test_in_loops(loop, implementation):
    given = operands()
    table, keys = draw("table", (40, 40), std=2.0), jax.random.split(jax.random.key(0), 8)
    settings = {name: given[name][0] for name in ("temperature", "top_k", "top_p")}

    def next_of(id, key, **how):
        return sample(table[id], key, **settings, **how)

    def step(id, key):
        id = next_of(id, key, implementation=implementation)
        return id, id

    if loop == "scan":
        _, ids = jax.jit(lambda: jax.lax.scan(step, jnp.int32(3), keys))()
    else:

        def body(carry):
            i, ids = carry
            return i + 1, ids.at[i].set(step(jnp.where(i == 0, 3, ids[i - 1]), keys[i])[0])

        _, ids = jax.jit(lambda: jax.lax.while_loop(lambda c: c[0] < 8, body, (0, jnp.zeros(8, "int32"))))()
    expected = [3]
    for key in keys:
        expected.append(int(next_of(expected[-1], key, implementation="xla")))
    np.testing.assert_array_equal(ids, expected[1:])


def log_softmax_of_kept(logits, temperature, ids, is_kept):
    """The logarithm of the probability in jax.numpy, with what is kept as a constant."""
    log_shares = jax.nn.log_softmax(jnp.where(is_kept, logits, -jnp.inf) / temperature[:, None], where=is_kept)
    return jnp.take_along_axis(log_shares, ids[:, None], -1)[:, 0]


@cover(filters=FILTERS, implementation=IMPLEMENTATIONS, way=["grad", "jvp"])
def test_the_derivative_of_log_probabilities(filters, implementation, way):
    given = operands()
    filters = {name: 39 if value == -2 else value for name, value in filters.items() if name != "temperature"}
    logits, temperature = given["logits"], given["temperature"]

    def log_probs(logits, temperature):
        return sample(
            logits,
            uniform=given["uniform"],
            temperature=temperature,
            **filters,
            return_log_prob=True,
            implementation=implementation,
        )[1]

    kept = [shares_of(row, temperature=t, **filters) > 0 for row, t in zip(logits, temperature, strict=True)]
    ids = sample(logits, uniform=given["uniform"], temperature=temperature, **filters)
    expected_of = partial(log_softmax_of_kept, ids=ids, is_kept=np.stack(kept))
    if way == "grad":
        actual, expected = (
            jax.jit(jax.grad(lambda *a, f=f: jnp.sin(f(*a)).sum(), (0, 1)))(logits, temperature)
            for f in (log_probs, expected_of)
        )
    else:
        dots = jnp.cos(logits), jnp.ones_like(temperature)
        actual, expected = (jax.jit(partial(jax.jvp, f))((logits, temperature), dots) for f in (log_probs, expected_of))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), actual, expected)


# No derivative of ids, nor of a row from which nothing or one column alone can be drawn.
def test_where_there_is_no_derivative():
    logits = draw("rows", (4, 20)).at[1, 3].set(NAN)
    given = {"uniform": jnp.full(4, 0.5), "temperature": jnp.float32([1, 1, 0, 1]), "top_k": jnp.int32([5, 5, 5, 1])}

    def loss(logits, given):
        ids, log_probs = sample(logits, **given, return_log_prob=True)
        return jnp.where(ids < 0, 0, log_probs).sum() + ids.sum()

    d_logits, d_given = jax.grad(loss, (0, 1), allow_int=True)(logits, given)
    assert np.asarray(d_logits).any(-1).tolist() == [True, False, False, False]
    assert np.asarray(d_given["temperature"] != 0).tolist() == [True, False, False, False]
    assert (np.asarray(d_given["uniform"]) == 0).all()
    (ids, _), (ids_dot, _) = jax.jvp(lambda x: sample(x, uniform=0.5, return_log_prob=True), (logits,), (logits,))
    assert (ids.dtype, ids_dot.dtype) == ("int32", jax.dtypes.float0)


@pytest.mark.needs("kernels")
@cover(
    mode=["auto", "explicit"], split=[P("a"), P(("a", "b")), P(None, "b"), P("a", "b")], implementation=[None, "xla"]
)
def test_over_a_mesh(devices, mode, split, implementation):
    given = operands(rows=8)
    of_rows = P(*split[:1])
    specs = [split if a.ndim == 2 else of_rows for a in given.values()]

    def function(*args):
        return both(implementation, dict(zip(given, args, strict=True)))

    mesh = mesh_for(mode, devices)
    (ids, log_probs), text = on_mesh(mesh, function, list(given.values()), specs)
    expected, expected_log_probs = jax.device_get(jax.jit(function)(*given.values()))
    np.testing.assert_array_equal(jax.device_get(ids), expected)
    np.testing.assert_allclose(jax.device_get(log_probs), expected_log_probs, atol=2e-6)
    by_kernel = implementation is None and (mode == "auto" or len(split) == 1 or mesh.shape["b"] == 1)
    assert count_native_calls(text) == ({TARGET: 1} if by_kernel and is_platform_with_kernels() else {})


@pytest.mark.needs("kernels")
def test_no_kernel_of_rows_that_an_explicit_mesh_splits(devices):
    mesh = mesh_of(devices, AxisType.Explicit)
    if mesh.shape["b"] == 1:
        pytest.skip("one device")
    with pytest.raises(RuntimeError, match=r"^sample: .*'native' .*the last axis of logits is split over devices"):
        on_mesh(mesh, partial(sample, uniform=0.5, implementation="native"), [jnp.ones((4, 8))], [P(None, "b")])


@pytest.mark.needs("kernels")
def test_a_filter_that_keeps_all_is_left_out():
    x, u = jnp.ones((2, 8)), jnp.zeros(2)
    for off in ({}, {"top_k": 0}, {"top_k": -1}, {"top_k": 8}, {"top_p": 1}, {"top_p": 2.5}, {"min_p": 0}):
        (call,) = lowered_calls(lambda x, u, off=off: sample(x, uniform=u, **off), TARGET, x, u)
        assert "has_" in call
        assert "= true" not in call


# None becomes another number in the 32 bits of a kernel.
def test_numbers_of_other_dtypes():
    logits = draw("rows", (3, 30))
    of = partial(sample, logits, uniform=0.999)
    largest, all_of = np.asarray(of(top_k=1)), np.asarray(of())
    for k in (np.array(2**32 + 1), np.array(2**63 - 1), np.array(2**32 - 1, "uint32"), np.array(-1, "int8"), 2**40):
        np.testing.assert_array_equal(of(top_k=k), all_of)
    np.testing.assert_array_equal(of(top_k=np.array(-(2**40))), -1)
    np.testing.assert_array_equal(of(top_k=np.uint8(1)), largest)
    just_below = np.nextafter(1.0, 0)  # which float32 has not
    np.testing.assert_array_equal(
        sample(logits, uniform=np.full(3, just_below)), sample(logits, uniform=np.full(3, BELOW_1))
    )
    np.testing.assert_array_equal(sample(logits, uniform=np.ones(3)), -1)


def test_float64():
    with jax.enable_x64(True):
        logits = draw("rows", (4, 30), "float64")
        uniform = np.linspace(0, 0.99, 4)
        ids, log_probs = drawn(logits, uniform, top_p=0.7)
        assert log_probs.dtype == "float64"
        shares = np.stack([shares_of(row, top_p=0.7) for row in np.asarray(logits)])
        np.testing.assert_array_equal(ids, [np.argmax(np.cumsum(s) > u) for s, u in zip(shares, uniform, strict=True)])
        np.testing.assert_allclose(log_probs, np.log(shares[np.arange(4), ids]), rtol=1e-12)
    assert sample(logits.astype("float32")[:, :0], uniform=0.5).tolist() == [-1] * 4
