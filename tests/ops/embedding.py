"""Rows with an index: the lookup and its gradient, sums of segments, ids of every dtype, devices that split an axis."""

import math
from functools import partial

import deviceless
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import DTYPES, assert_near, bits, draw
from coverage import cover
from hlo import collectives, compiled_text, count_native_calls
from internals import embedding_op as op
from jax import export
from jax.experimental import jet
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from meshes import MANUAL, PARTLY_MANUAL, mesh_for, mesh_of, on_mesh
from native import is_platform_with_kernels
from oracle import f64, round_to
from tolerances import DSCALE, gradient_error

import jaxnorm

TARGET = "jaxnorm_segment_sum"
IMPLEMENTATIONS = "native", "xla"
CALL = {TARGET: 1} if is_platform_with_kernels() else {}


def numbers(kind, count, length, dtype="int32"):
    """Of rows: many of a few rows, every row alike, one row only, some from the end and some that no row has."""
    drawn = np.random.default_rng(count + length)
    ids = {
        "log-uniform": lambda: np.exp(drawn.uniform(0, np.log(length), count)) - 1,
        "uniform": lambda: drawn.integers(0, length, count),
        "one": lambda: np.full(count, length // 2),
        "others": lambda: drawn.integers(-2 * length, 2 * length, count),
    }
    return np.asarray(ids[kind]().astype(dtype))


def gradient(table, ids, rows, *of_head, **options):
    """By the rows, or by them and what is made of the table that is returned."""
    lookup = partial(jaxnorm.embedding, ids=ids, dtype=rows.dtype, return_table=bool(of_head), **options)
    return jax.vjp(lookup, table)[1]((rows, *of_head) if of_head else rows)[0]


def exact_sums(ids, rows, length):
    """In float64, with the sums of magnitudes."""
    ids, rows = np.asarray(ids).ravel(), f64(rows).reshape(np.size(ids), rows.shape[-1])
    is_there = (ids >= 0) & (ids < length)
    sums, magnitudes = np.zeros((2, length, rows.shape[-1]))
    np.add.at(sums, ids[is_there], rows[is_there])
    np.add.at(magnitudes, ids[is_there], np.abs(rows[is_there]))
    return sums, magnitudes


def from_the_end(ids, length):
    return np.where(ids < 0, ids + length, ids)


# What the kernels divide: whole vectors and none, chunks of the list and of a row that most positions have, long rows.
SIZES = {"short rows": (50, 7, 700), "vectors": (130, 24, 700), "few positions": (2000, 40, 90)}
SIZES |= {"many chunks": (9, 36, 9000), "long rows": (40, 1100, 130), "one column": (40, 1, 333)}
SIZES |= {"one row": (1, 12, 333), "no position": (40, 12, 0), "no row": (0, 12, 5), "no column": (5, 0, 12)}


def of(*names):
    return {name: SIZES[name] for name in names}


# Of a tied head, what it has for a row that nobody reads stays as it is.
@pytest.mark.on_emulator
@cover(
    size=SIZES,
    kind=["log-uniform", "uniform", "one", "others"],
    dtype=DTYPES,
    of_rows=DTYPES,
    of_head=[None, 1.0, 0.0],
    implementation=IMPLEMENTATIONS,
)
def test_the_gradient_is_the_sum_rounded_once(size, kind, dtype, of_rows, of_head, implementation):
    length, columns, count = size
    ids = numbers(kind, count, max(1, length))
    table, rows = draw("table", (length, columns), dtype), draw("rows", (count, columns), of_rows)
    head = draw("head", table.shape, dtype) * (of_head or 0.0)
    heads = [] if of_head is None else [head]
    actual = jax.jit(partial(gradient, implementation=implementation))(table, ids, rows, *heads)
    assert (actual.shape, actual.dtype) == (table.shape, table.dtype)
    sums, magnitudes = exact_sums(from_the_end(ids, length), rows, length)
    bound = np.linalg.norm(np.abs(f64(head)) + magnitudes)
    assert gradient_error(actual, f64(head) + sums, DSCALE, bound) <= 1
    is_read = np.isin(np.arange(length), from_the_end(ids, length))
    np.testing.assert_array_equal(f64(actual)[~is_read], f64(head)[~is_read])


def tied(table, ids, **options):
    rows, same = jaxnorm.embedding(table, ids, return_table=True, **options)
    return rows + jnp.sum(jnp.cos(same))


def take_tied(table, ids):
    return jnp.take(table, ids, axis=0) + jnp.sum(jnp.cos(table))


@pytest.mark.needs("kernels")
def test_a_head_that_is_not_read():
    args = draw("table", (LENGTH, COLUMNS)), numbers("uniform", 21, LENGTH)

    def rows_alone(table, ids):
        return jaxnorm.embedding(table, ids, return_table=True, implementation="native")[0]

    text = compiled_text(jax.grad(loss(rows_alone)), *args)
    assert count_native_calls(text) == CALL
    assert "output_to_operand_aliasing" not in text
    assert "output_to_operand_aliasing" in compiled_text(jax.grad(loss(partial(tied, implementation="native"))), *args)
    table_alone = jax.grad(lambda table: jnp.sin(jaxnorm.embedding(table, args[1], return_table=True)[1]).sum())
    assert_near(table_alone(args[0]), jnp.cos(args[0]))


# In an optimizer's step, by a head that multiplies in bfloat16: the gradient of the table is one array, and is not
# filled.
@pytest.mark.deviceless
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_of_a_tied_table_is_copied(dtype):
    args = [jax.ShapeDtypeStruct((151936, 2560), dtype), jax.ShapeDtypeStruct((8192,), "int32")]

    def loss(table, ids):
        rows, table = jaxnorm.embedding(table, ids, dtype="bfloat16", return_table=True)
        logits = jax.checkpoint(jnp.matmul)(jnp.sin(rows), table.astype("bfloat16").T)
        return jax.nn.logsumexp(logits[:256].astype("float32"))

    step = deviceless.compiled(
        lambda table, ids: table - 0.1 * jax.grad(loss)(table, ids).astype(table.dtype), *deviceless.types(args)
    )
    lines = deviceless.kernels(step)
    (call,) = [line for line in lines if f'custom_call_target="{TARGET}"' in line]
    assert "output_to_operand_aliasing" in call
    assert [line for line in lines if " copy(" in line or "broadcast" in line] == []


# In a half type a sum of ones stops at 256, where each addition is rounded.
@pytest.mark.on_emulator
@cover(dtype=DTYPES, implementation=IMPLEMENTATIONS)
def test_a_row_that_is_read_ten_thousand_times(dtype, implementation):
    ids = np.append(np.full(10_000, 3), [0, 0, 7]).astype("int32")
    rows = jnp.ones((len(ids), 20), "bfloat16")
    actual = gradient(jnp.zeros((9, 20), dtype), ids, rows, implementation=implementation)
    exact, _ = exact_sums(ids, rows, 9)
    np.testing.assert_array_equal(actual, round_to(exact, actual.dtype))


@cover(
    size=of("short rows", "vectors", "one row", "no row"),
    dtype=DTYPES,
    of_rows=(None, *DTYPES),
    kind=["uniform", "others"],
)
def test_rows_are_those_of_take(size, dtype, of_rows, kind):
    length, columns, count = size
    table, ids = draw("table", (length, columns), dtype), numbers(kind, count, max(1, length)).reshape(-1, 1)
    rows = jaxnorm.embedding(table, ids, dtype=of_rows)
    if length:
        expected = jnp.take(table, ids, axis=0).astype(of_rows or dtype)
    else:
        expected = jnp.full((*ids.shape, columns), jnp.nan, of_rows or dtype)
    np.testing.assert_array_equal(f64(rows), f64(expected))
    assert rows.dtype == expected.dtype


# An id is compared before it is cast to any other dtype.
@pytest.mark.parametrize("length", [1, 5, 200, 70_000])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_ids_of_every_dtype(dtype, length):
    info = np.iinfo(dtype)
    candidates = (0, 1, -1, -length, length - 1, length, 2**32, 2**32 - 1, info.max, info.min)
    ids = np.array([i for i in candidates if info.min <= i <= info.max], dtype)
    with jax.enable_x64(True):
        table = draw("table", (length, 3))
        wrapped = [int(i) + length if i < 0 else int(i) for i in ids]
        is_there = [0 <= i < length for i in wrapped]
        expected = [np.asarray(table)[i] if there else [np.nan] * 3 for i, there in zip(wrapped, is_there, strict=True)]
        sums, _ = exact_sums([int(i) if i < length else -1 for i in ids], np.ones((len(ids), 3), "float32"), length)
        for given in (ids, jnp.asarray(ids)):
            np.testing.assert_array_equal(jaxnorm.embedding(table, given), np.float32(expected))
            np.testing.assert_array_equal(jaxnorm.segment_sum(jnp.ones((len(ids), 3)), given, length), sums)


def test_more_rows_than_int32_numbers():
    table, ids = jax.ShapeDtypeStruct((2**31, 1), "bfloat16"), jax.ShapeDtypeStruct((3,), "int32")
    with pytest.raises(ValueError, match=r"^embedding: table has 2147483648 rows, expected less than 2³¹"):
        jax.eval_shape(jaxnorm.embedding, table, ids)
    with pytest.raises(ValueError, match=r"^segment_sum: num_segments is 2147483648, expected less than 2³¹"):
        jax.eval_shape(lambda ids: jaxnorm.segment_sum(jnp.ones(3), ids, 2**31), ids)


# What is not finite stays in its row, and what no row has is nowhere.
@pytest.mark.on_emulator
@cover(value=[np.nan, np.inf], implementation=IMPLEMENTATIONS)
def test_what_is_not_finite_stays_in_its_row(value, implementation):
    ids = np.array([0, 3, 3, 5, 40, -50], "int32")
    rows = jnp.ones((6, 16)).at[1].set(value).at[4:].set(np.nan)
    actual = np.asarray(gradient(jnp.zeros((7, 16)), ids, rows, implementation=implementation))
    np.testing.assert_array_equal(actual[3], value)
    np.testing.assert_array_equal(np.delete(actual, 3, 0), np.outer([1, 0, 0, 0, 1, 0], np.ones(16)))


DATA = {"one axis": (33,), "two axes": (33, 20), "three axes": (33, 2, 5), "nothing": (0, 4), "no column": (33, 0)}


@pytest.mark.on_emulator
@cover(shape=DATA, dtype=DTYPES, is_sorted=[False, True], implementation=(*IMPLEMENTATIONS, None))
def test_sums_of_segments_are_those_of_jax(shape, dtype, is_sorted, implementation):
    data = draw("data", shape, dtype)
    ids = numbers("others", len(data), 6)
    ids = np.sort(ids) if is_sorted else ids
    options = {"indices_are_sorted": is_sorted}
    ours = partial(jaxnorm.segment_sum, segment_ids=ids, num_segments=9, implementation=implementation, **options)
    actual, pullback = jax.vjp(ours, data)
    wide = jax.ops.segment_sum(data.astype("float32"), np.where(ids < 0, 9, ids), 9, **options)
    assert_near(actual.astype("float32"), wide.astype(dtype).astype("float32"), 2e-5 if dtype == "float32" else 0.02)
    (expected,) = jax.vjp(lambda data: jax.ops.segment_sum(data, np.where(ids < 0, 9, ids), 9), data)[1](actual)
    np.testing.assert_array_equal(pullback(actual)[0], expected)


def test_how_many_segments_there_are():
    ids = jnp.array([0, 4, 4])
    assert jaxnorm.segment_sum(jnp.ones((3, 2)), ids).shape == (5, 2)
    np.testing.assert_array_equal(jaxnorm.segment_sum(ids, ids, 5), jax.ops.segment_sum(ids, ids, 5))


# Wrong sums, and nothing else: neither what is beyond the arrays nor a program that does not end.
@pytest.mark.on_emulator
@pytest.mark.parametrize("count", [5, 333, 5000])
def test_ids_that_are_sorted_by_promise_alone(count):
    data, ids = jnp.ones((count, 20)), numbers("others", count, 100)
    sums = jaxnorm.segment_sum(data, ids, 100, indices_are_sorted=True, implementation="native")
    assert jax.block_until_ready(sums).shape == (100, 20)


@pytest.mark.on_emulator
@cover(kind=["log-uniform", "uniform", "one"], size=of("vectors", "many chunks"), of_rows=DTYPES)
def test_the_gradient_has_the_same_bits_in_each_run(kind, size, of_rows):
    length, columns, count = size
    args = draw("table", (length, columns)), numbers(kind, count, length), draw("rows", (count, columns), of_rows)
    function = jax.jit(partial(gradient, implementation="native"))
    first = bits(function(*args))
    assert all(bits(function(*args)) == first for _ in range(3))


@pytest.mark.needs("gpu")
@pytest.mark.parametrize(("length", "cols", "count"), [(151936, 2560, 8192), (262144, 1152, 8192), (50257, 768, 65536)])
@pytest.mark.parametrize("heads", [0, 1])
def test_language_models_gradients_have_the_same_bits_by_default(length, cols, count, heads):
    args = (
        jnp.zeros((length, cols)),
        numbers("log-uniform", count, length),
        draw("rows", (count, cols), "bfloat16"),
        *[jnp.ones((length, cols))] * heads,
    )
    *_, backward = jaxnorm.explain(gradient, *args)
    assert {runs.platform: runs.implementation for runs in backward.runs}["cuda"] == "native"
    function = jax.jit(gradient)
    assert bits(function(*args)) == bits(function(*args))


LENGTH, COLUMNS = 30, 12
# Which of table and ids have examples.
EXAMPLES = {"ids": (None, 0), "table": (0, None), "both": (0, 0), "both, elsewhere": (2, 1)}


def loss(lookup):
    return lambda table, ids: jnp.sin(jnp.nan_to_num(lookup(table, ids))).sum()


TRANSFORMATIONS = {
    "rows": lambda f: lambda table, ids: jnp.nan_to_num(f(table, ids)),
    "gradient": lambda f: jax.grad(loss(f)),
    "second derivative": lambda f: jax.grad(lambda table, ids: jnp.sum(jax.grad(loss(f))(table, ids) ** 2)),
    "tangent": lambda f: lambda table, ids: jax.jvp(lambda t: loss(f)(t, ids), (table,), (jnp.cos(table),)),
    "remat": lambda f: jax.grad(jax.checkpoint(loss(f))),
    "scan": lambda f: (
        lambda table, ids: jax.grad(
            lambda t: jax.lax.scan(lambda carry, i: (carry + loss(f)(t, i), None), 0.0, ids)[0]
        )(table)
    ),
}


@pytest.mark.any_code
@pytest.mark.on_emulator
@cover(transformation=TRANSFORMATIONS, axes=EXAMPLES, of_head=[False, True], implementation=(*IMPLEMENTATIONS, None))
def test_examples_of_table_and_ids(transformation, axes, of_head, implementation):
    table = draw("table", (LENGTH, COLUMNS) if axes[0] is None else (3, LENGTH, COLUMNS))
    ids = numbers("others", 3 * 21, LENGTH).reshape(*([] if axes[1] is None else [3]), 7, -1)
    args = [
        jnp.asarray(a) if not axis else jnp.moveaxis(jnp.asarray(a), 0, axis)
        for a, axis in zip((table, ids), axes, strict=True)
    ]
    actual, expected = (
        jax.jit(jax.vmap(transformation(lookup), axes))(*args)
        for lookup in (
            partial(tied if of_head else jaxnorm.embedding, implementation=implementation),
            take_tied if of_head else partial(jnp.take, axis=0),
        )
    )
    assert_near(actual, expected)


@pytest.mark.any_code
@pytest.mark.on_emulator
@cover(moving=["data", "ids", "both"], derivative=[0, 1, 2], is_sorted=[False, True], implementation=IMPLEMENTATIONS)
def test_examples_of_segments(moving, derivative, is_sorted, implementation):
    axes = (None if moving == "ids" else 1, None if moving == "data" else 0)
    data = draw("data", (33, COLUMNS) if axes[0] is None else (33, 3, COLUMNS))
    ids = numbers("others", 33 if axes[1] is None else 99, 8).reshape(*([] if axes[1] is None else [3]), 33)
    ids = np.where(ids < 0, 50, ids)
    ids = np.sort(ids) if is_sorted else ids
    ours = partial(jaxnorm.segment_sum, indices_are_sorted=is_sorted, implementation=implementation)

    def of_order(function):
        def value(data, ids):
            return jnp.sin(function(data, ids, num_segments=9)).sum()

        if derivative == 2:
            return jax.grad(lambda data, ids: jnp.sum(jax.grad(value)(data, ids) ** 2))
        return jax.grad(value) if derivative else partial(function, num_segments=9)

    actual, expected = (jax.jit(jax.vmap(of_order(f), axes))(data, ids) for f in (ours, jax.ops.segment_sum))
    assert_near(actual, expected)


# Of tables that a mesh splits, or that int32 does not number together: JAX would sum them in what it gathers.
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_examples_that_no_kernel_takes(monkeypatch, dtype):
    monkeypatch.setattr(op, "MOST", 10)
    tables, ids = jnp.zeros((2, 9, 4), dtype), jnp.zeros((2, 10_000), "int32")
    y, pullback = jax.vjp(lambda tables: jax.vmap(jaxnorm.embedding)(tables, ids), tables)
    np.testing.assert_array_equal(f64(pullback(jnp.ones_like(y))[0][:, 0]), f64(round_to(np.full((2, 4), 1e4), dtype)))
    sums = partial(jaxnorm.segment_sum, num_segments=9)
    calls = [
        *jaxnorm.explain(jax.vmap(sums), ids * 1.0, ids),
        *jaxnorm.explain(jax.vmap(jaxnorm.embedding), tables, ids),
    ]
    assert [call.on("cpu").why for call in calls] == [op.OF_EXAMPLES] * 2


def test_both_are_linear():
    table, ids = draw("table", (LENGTH, COLUMNS)), numbers("uniform", 21, LENGTH)
    rows = draw("rows", (21, COLUMNS))
    (transposed,) = jax.linear_transpose(partial(jaxnorm.embedding, ids=ids), table)(rows)
    assert_near(transposed, jaxnorm.segment_sum(rows, ids, LENGTH))
    (transposed,) = jax.linear_transpose(lambda rows: jaxnorm.segment_sum(rows, ids, LENGTH), rows)(table)
    np.testing.assert_array_equal(transposed, jaxnorm.embedding(table, ids))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_higher_derivatives_along_a_curve(implementation):
    table, ids = draw("table", (LENGTH, COLUMNS)), numbers("others", 21, LENGTH)
    series = [jnp.cos(table), jnp.sin(table)]

    def of(lookup):
        return jet.jet(lambda table: loss(lookup)(table, ids), (table,), (series,))

    actual, expected = map(of, (partial(jaxnorm.embedding, implementation=implementation), partial(jnp.take, axis=0)))
    assert_near(actual, expected, 1e-4)
    rows = draw("rows", (21, COLUMNS))
    (sums, terms) = jet.jet(partial(jaxnorm.segment_sum, segment_ids=ids, num_segments=9), (rows,), ([rows, 2 * rows],))
    assert_near([sums, 2 * sums], list(terms))


@cover(symbols=["b, t", "v, 12"])
def test_a_program_for_any_size(symbols):
    of_table, of_ids = (LENGTH, COLUMNS), (3, 7)
    shapes = (
        (of_table, export.symbolic_shape(symbols)) if symbols == "b, t" else (export.symbolic_shape(symbols), of_ids)
    )
    types = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, ("float32", "int32"), strict=True)]
    function = jax.jit(jax.grad(loss(jaxnorm.embedding)))
    args = draw("table", of_table), numbers("others", 21, LENGTH).reshape(of_ids)
    assert_near(export.export(function)(*types).call(*args), function(*args))


def operands(dtype):
    ids = jnp.asarray(numbers("others", 320, 64).reshape(8, 40))
    return draw("table", (64, 32), dtype), ids, draw("rows", (8, 40, 32), dtype)


WAYS = ("native", 0), ("xla", 0), ("native", 1), ("xla", 1)  # with how many tied heads
# How table, ids and rows are split; of split ids the part of the table, in float32, that devices add up.
SPLITS = {
    "rows of the table": ((P("a"), P(), P()), None),
    "rows of the table, over all": ((P(("a", "b")), P(), P()), None),
    "columns": ((P(None, "b"), P(), P(None, None, "b")), None),
    "both": ((P("a", "b"), P(), P(None, None, "b")), None),
    "ids": ((P(), P("a"), P("a")), P()),
    "ids along two axes": ((P(), P("a", "b"), P("a", "b")), P()),
    "ids and rows of the table": ((P("b"), P("a"), P("a")), P("b")),
    "ids and columns": ((P(None, "b"), P("a"), P("a", None, "b")), P(None, "b")),
    "ids and rows of the table alike": ((P("a"), P("a"), P("a")), P()),
}


@pytest.mark.needs("kernels")
@cover(split=SPLITS, mode=["auto", "explicit"], dtype=["float32", "bfloat16"], way=WAYS)
def test_devices_add_what_they_have(devices, split, mode, dtype, way):
    (of_table, of_ids, of_rows), added = split
    implementation, heads = way
    mesh = mesh_for(mode, devices)
    table, ids, rows = args = operands(dtype)
    out = NamedSharding(mesh, of_table)
    options = {"out_sharding": of_rows} if mode == "explicit" else {}
    function = partial(gradient, implementation=implementation, **options)
    args = (*args, draw("head", table.shape, dtype))[: 3 + heads]
    of_args = of_table, of_ids, of_rows, of_table
    specs = [P(*s, *[None] * (a.ndim - len(s))) for s, a in zip(of_args, args, strict=False)]
    actual, text = on_mesh(mesh, function, args, specs, out_shardings=out)
    exact, _ = exact_sums(from_the_end(np.asarray(ids), 64), rows, 64)
    exact += sum(f64(head) for head in args[3:])
    assert actual.sharding.is_equivalent_to(out, 2)
    assert gradient_error(jax.device_get(actual), exact, DSCALE) <= 1
    if implementation == "native":
        adds = added is not None and not NamedSharding(mesh, of_ids).is_fully_replicated  # a mesh axis may be 1 long
        parts = {"all-reduce": NamedSharding(mesh, added).shard_shape((64, 32))} if adds else {}
        exchanged = {kind: 4 * math.prod(part) for kind, part in parts.items()}
        if adds and heads and of_table == of_ids:  # sums of all rows are on each device, and the head's go with them
            exchanged["all-gather"] = table.size * table.dtype.itemsize
        assert collectives(text) == exchanged
        assert TARGET in count_native_calls(text)


# However many devices there are, a part of 257 ones for each row of ids would lose one of them in bfloat16.
@pytest.mark.needs("kernels")
@cover(mode=["auto", "explicit", MANUAL], implementation=IMPLEMENTATIONS)
def test_parts_of_devices_are_not_rounded(devices, mode, implementation):
    mesh = mesh_for(mode, devices)
    rows = jnp.ones((8, 257, 4), "bfloat16").at[4:].set(-1).at[4:, 0].set(0)
    args = jnp.zeros((3, 4), "bfloat16"), jnp.ones((8, 257), "int32"), rows
    options = {"out_sharding": P("a")} if mode == "explicit" else {}
    function = partial(gradient, implementation=implementation, **options)
    if mode == MANUAL:
        function = jax.shard_map(function, mesh=mesh, in_specs=(P(), P("a"), P("a")), out_specs=P())
    actual, _ = on_mesh(mesh, function, args, (P(), P("a"), P("a")))
    np.testing.assert_array_equal(f64(jax.device_get(actual)), np.outer([0, 4, 0], np.ones(4)))


@pytest.mark.needs("kernels")
@cover(mode=[MANUAL, PARTLY_MANUAL], dtype=["float32", "bfloat16"], way=WAYS)
def test_a_table_that_all_devices_of_a_shard_map_have(devices, mode, dtype, way):
    mesh, (implementation, heads) = mesh_for(mode, devices), way
    args, manual = operands(dtype), {"a"} if mode == PARTLY_MANUAL else {"a", "b"}
    args = (*args, draw("heads", (64 * mesh.shape["a"], 32), dtype))[: 3 + heads]  # of each device its own
    function = partial(gradient, implementation=implementation)
    specs = {"in_specs": (P(), P("a"), P("a"), P("a"))[: 3 + heads], "out_specs": P()}
    split = jax.shard_map(function, mesh=mesh, **specs, axis_names=manual)
    actual = jax.jit(split)(*args)
    exact, _ = exact_sums(from_the_end(np.asarray(args[1]), 64), args[2], 64)
    exact += sum(f64(head).reshape(-1, 64, 32).sum(0) for head in args[3:])
    assert gradient_error(actual, exact, DSCALE) <= 1


@pytest.mark.needs("kernels")
@cover(axis_type=[AxisType.Auto, AxisType.Explicit], split=["positions", "columns", "both"], derivative=[0, 1])
def test_segments_over_devices(devices, axis_type, split, derivative):
    along = {"positions": (P("a"), P("a")), "columns": (P(None, "b"), P()), "both": (P("a", "b"), P("a"))}
    data, ids = draw("data", (64, 32)), jnp.asarray(numbers("others", 64, 12))

    def function(data, ids):
        sums = partial(jaxnorm.segment_sum, segment_ids=ids, num_segments=8, implementation="native")
        return jax.grad(lambda data: jnp.sin(sums(data)).sum())(data) if derivative else sums(data)

    of_data, of_ids = along[split]
    specs = P(*of_data, *[None] * (2 - len(of_data))), P(*of_ids, *[None] * (1 - len(of_ids)))
    actual, text = on_mesh(mesh_of(devices, axis_type), function, (data, ids), specs)
    assert_near(jax.device_get(actual), jax.device_get(jax.jit(function)(data, ids)))
    assert "all-gather" not in collectives(text) or derivative


@pytest.mark.needs("memory")
def test_more_elements_than_int32_counts():
    count = 2**20 + 3
    ids, rows = numbers("uniform", count, 1000), jnp.ones((count, 2048), "bfloat16")
    actual = jax.jit(partial(jaxnorm.segment_sum, num_segments=1000, implementation="native"))(rows, ids)
    exact, _ = exact_sums(ids, np.ones((count, 1), "float32"), 1000)
    np.testing.assert_array_equal(actual, np.broadcast_to(round_to(exact, actual.dtype), actual.shape))


def test_examples_of_tables_without_columns():
    tables, ids = jnp.ones((3, 5, 0)), jnp.zeros((3, 4), int)
    of = jax.vmap(lambda table, ids: jax.vjp(lambda table: jaxnorm.embedding(table, ids), table))
    rows, pull_back = jax.jit(of)(tables, ids)
    assert (rows.shape, jax.vmap(lambda pull, dy: pull(dy)[0])(pull_back, rows).shape) == ((3, 4, 0), (3, 5, 0))
