"""Embed of `jaxnorm.nnx` and `jaxnorm.linen`: Flax's rows bit for bit, and gradients that are summed in float32."""

import inspect
from functools import partial

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import DTYPES, bits, draw
from coverage import cover
from flax_apis import APIS, SUMS, assert_calls, assert_gradients_close, assert_same, integers, sums
from jax.sharding import AxisType, PartitionSpec as P
from meshes import mesh_of, placed

import jaxnorm

pytestmark = pytest.mark.jax_version

ROWS, FEATURES = 7, 6
# Of each row several, none, those from the end, and what is out of range on both sides.
IDS = jnp.asarray([[0, 3, 3, 6, -1, -7], [1, 7, 100, -8, -100, 3]])
# Of each row more than bfloat16 sums without rounding.
MANY = jnp.tile(jnp.asarray([0, 3, -1, 3, 6, 3, 1, -7]), 64)


def both(api, own=None, rows=ROWS, **fields):
    """Flax's and ours, which has fields of its own, as functions of a table, and the table that both make."""
    fields = {"num_embeddings": rows, "features": FEATURES} | fields
    (flaxs, made), (ours, _) = (
        api.build(of.Embed, (IDS,), fields | more) for of, more in ((api.flax, {}), (api.ours, own or {}))
    )

    def of_table(apply):
        return lambda table, *args, **call: apply({"embedding": table}, *args, **call)

    return of_table(flaxs), of_table(ours), flax.linen.unbox(made)["embedding"]


def gradient(apply, table, ids, **call):
    y, pull_back = jax.vjp(lambda table: apply(table, ids, **call), table)
    (dtable,) = pull_back(integers(y.shape, y.dtype))
    return dtable


def summed(ids, dtype, rows=ROWS):
    """What `gradient` gives."""
    return sums(np.asarray(ids) % rows, integers((*ids.shape, FEATURES)), rows, dtype)


@cover(api=APIS, dtype=[None, *DTYPES], param_dtype=DTYPES, of_ids=["int32", "int8", "int16", "uint8", "uint32"])
def test_rows_have_flaxs_bits(api, dtype, param_dtype, of_ids):
    ids = IDS.astype(of_ids)
    flaxs, ours, table = both(api, dtype=dtype, param_dtype=param_dtype)
    expected = jax.jit(flaxs)(table, ids)
    assert_same(jax.jit(ours)(table, ids), expected)
    assert_same(ours(table, np.asarray(ids)), expected)
    assert jnp.isnan(expected).any()


@cover(api=APIS, dtype=[None, *DTYPES], param_dtype=DTYPES)
def test_gradients_are_summed_in_float32_and_rounded_once(api, dtype, param_dtype):
    flaxs, ours, table = both(api, dtype=dtype, param_dtype=param_dtype)
    assert_same(jax.jit(partial(gradient, ours))(table, MANY), summed(MANY, param_dtype))
    if (dtype or param_dtype) == "bfloat16":
        assert bits(gradient(flaxs, table, MANY)) != bits(summed(MANY, param_dtype))


@cover(api=APIS, implementation=[None, "native", "xla"])
def test_the_implementation_sums_the_gradient(api, implementation):
    _, ours, table = both(api, {"implementation": implementation})
    assert_calls(partial(gradient, ours), (table, MANY), {} if implementation == "xla" else SUMS)


# As in a language model with tied embeddings: the table is looked up, and multiplied by.
@pytest.mark.usefixtures("exact_products")
@cover(api=APIS, dtype=[None, "bfloat16"], param_dtype=["float32", "bfloat16"])
def test_tied_embeddings(api, dtype, param_dtype):
    flaxs, ours, table = both(api, dtype=dtype, param_dtype=param_dtype)

    def tied(embed, table):
        return embed(table, jnp.tanh(embed(table, MANY)), method="attend")

    def formula(table):  # the gradient of its lookup is a sum in float32, too
        rounded = table.astype(dtype or param_dtype)
        return jnp.tanh(table.astype("float32")[MANY].astype(rounded.dtype)) @ rounded.T

    logits = jax.jit(partial(tied, ours))(table)
    assert_same(logits, jax.jit(partial(tied, flaxs))(table))
    weights = draw("dlogits", logits.shape)
    actual, expected = (
        jax.jit(jax.grad(lambda table, of=of: (of(table) * weights).sum()))(table)
        for of in (partial(tied, ours), formula)
    )
    assert_gradients_close(actual, expected, through=dtype)


@cover(api=APIS, dtype=[None, "bfloat16"], param_dtype=["float32", "bfloat16"])
def test_a_single_row_is_broadcast(api, dtype, param_dtype):
    flaxs, ours, table = both(api, rows=1, dtype=dtype, param_dtype=param_dtype)
    assert_same(ours(table, IDS), flaxs(table, IDS))
    assert_same(jax.jit(partial(gradient, ours))(table, MANY), summed(MANY, param_dtype, rows=1))
    for apply in (flaxs, ours):
        with pytest.raises(ValueError, match="broadcast"):
            apply(table, jnp.int32(0))


@cover(api=APIS, implementation=[None, "native"], dtype=["float32", "bool"], rows=[ROWS, 1])
def test_ids_that_are_no_integers_are_flaxs_error(api, implementation, dtype, rows):
    _, ours, table = both(api, {"implementation": implementation}, rows=rows)
    with pytest.raises(ValueError, match=r"Input type must be an integer or unsigned integer\."):
        ours(table, jnp.ones(3, dtype))


def nnx_promoted(arrays, *, dtype, inexact=True):
    return tuple(2 * array.astype("bfloat16") for array in arrays)


def linen_promoted(*arrays, dtype, inexact=True):
    return nnx_promoted(arrays, dtype=dtype)


# Fields, and what the error of a kernel that is asked for says.
LEFT = {"promote_dtype": ({}, "promote_dtype"), "dtype": ({"dtype": "complex64"}, "complex64")}
LEFT |= {"integers": ({"dtype": "int32"}, "int32"), "param_dtype": ({"param_dtype": "complex64"}, "complex64")}
LEFT |= {"float64": ({"param_dtype": "float64"}, "float64")}


@cover(api=APIS, case=LEFT)
def test_what_is_left_to_flax(api, case):
    fields, why = case
    if not fields:
        fields = {"promote_dtype": linen_promoted if api is APIS["linen"] else nnx_promoted}
    with jax.enable_x64(why == "float64"):
        flaxs, ours, table = both(api, **fields)
        assert_same(ours(table, IDS), flaxs(table, IDS))
        if why != "int32":  # which Flax does not multiply
            assert_same(ours(table, table, method="attend"), flaxs(table, table, method="attend"))
        with pytest.raises(RuntimeError, match=rf"^Embed: implementation='native', but no kernel serves {why}\."):
            both(api, {"implementation": "native"}, **fields)[1](table, IDS)


PROGRAMS = {
    "vmap": lambda apply, table, ids: gradient(jax.vmap(apply, (None, 0)), table, ids.reshape(8, -1)),
    "tables": lambda apply, table, ids: jax.vmap(partial(gradient, apply), (0, None))(jnp.stack([table] * 2), ids)[1],
    "remat": lambda apply, table, ids: gradient(jax.checkpoint(apply), table, ids),
}


@cover(api=APIS, program=PROGRAMS)
def test_transformations_have_the_same_sums(api, program):
    _, ours, table = both(api, dtype="bfloat16")
    assert_same(program(ours, table, MANY), summed(MANY, "float32"))


# Splits of the table, of ids, and of the result where that is said, for which Flax's own code has a derivative.
SPLITS = [
    *((P(), P(), None), (P(None, "b"), P(), None), (P(), P("a"), P("a", None, None)), (P(), P(), P(None, None, "b"))),
    *((P("a"), P(), P("a", None, "b")), (P("a", "b"), P("a"), P("a", None, None))),
]


@pytest.mark.parametrize(("name", "split"), [*(("nnx", of) for of in SPLITS), *(("linen", of) for of in SPLITS[:2])])
def test_shardings_of_an_explicit_mesh_are_flaxs(name, split, devices):
    of_table, of_ids, out = split
    flaxs, ours, table = both(APIS[name], rows=8)
    mesh, call = mesh_of(devices, AxisType.Explicit), {} if out is None else {"out_sharding": out}
    with jax.set_mesh(mesh):
        table, ids = placed(mesh, (table, jnp.tile(IDS, (4, 1))), (of_table, of_ids))

        def results(embed):
            rows = partial(embed, **call)
            loss = jax.grad(lambda table: jnp.nan_to_num(rows(table, ids)).sum())
            return jax.jit(rows)(table, ids), jax.jit(loss)(table)

        for actual, expected in zip(results(ours), results(flaxs), strict=True):
            assert jax.typeof(actual) == jax.typeof(expected)
            assert_same(actual, expected)


@cover(api=APIS, spec=[P("a"), P(None, "b"), P("a", "b")])
def test_partitioned_parameters(api, spec, devices):
    partitioning = flax.nnx.with_partitioning if api.flax is flax.nnx else flax.linen.with_partitioning
    mesh = mesh_of(devices, AxisType.Auto)
    with jax.set_mesh(mesh):
        init = partitioning(jax.nn.initializers.normal(), tuple(spec))
        flaxs, ours, table = both(api, rows=8, embedding_init=init)
        table, ids = placed(mesh, (table, MANY), (spec, P("a")))
        assert_same(jax.jit(ours)(table, ids), jax.jit(flaxs)(table, ids))
        actual = jax.jit(partial(gradient, ours))(table, ids)
    assert_same(actual, summed(MANY, table.dtype, rows=8))


@cover(api=APIS)
def test_arguments_are_flaxs(api):
    def signature(cls):
        return [(p.name, p.kind, p.default) for p in inspect.signature(cls.__call__).parameters.values()]

    assert issubclass(api.ours.Embed, api.flax.Embed)
    assert signature(api.ours.Embed) == signature(api.flax.Embed)
    assert api.ours.Embed.__name__ == "Embed"  # by which Linen names parameters
    if api.flax is flax.linen:
        flaxs, ours = (set(inspect.signature(of.Embed).parameters) for of in (api.flax, api.ours))
        assert ours - flaxs == {"implementation"}


class Tied(flax.linen.Module):
    """A module that calls its Embed, and one that Flax computes."""

    @flax.linen.compact
    def __call__(self, ids):
        embed = flax.linen.Embed(ROWS, FEATURES, dtype=jnp.bfloat16, name="embed")
        own = flax.linen.Embed(ROWS, FEATURES, promote_dtype=linen_promoted, name="own")
        return embed.attend(embed(inputs=ids) + own(ids))


def test_linen_within_using_layers():
    model = Tied()
    variables = model.init(jax.random.key(0), MANY)

    def run(variables):
        with jaxnorm.linen.using_layers() as report:
            y = model.apply(variables, MANY)
        assert report.replaced == [(("embed",), flax.linen.Embed)]
        assert report.left == [(("own",), flax.linen.Embed, "no kernel serves promote_dtype")]
        return y

    assert_same(jax.jit(run)(variables), jax.jit(lambda variables: model.apply(variables, MANY))(variables))
    assert_calls(jax.grad(lambda v: run(v).astype("float32").sum()), (variables,), SUMS)
