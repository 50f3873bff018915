"""Law 10 for classes that are split over devices: a shard that holds nothing finite is a part like any other."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import draw
from coverage import cover
from internals import CROSS_ENTROPY, CrossEntropy, CrossEntropyOperands
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from meshes import placed

import jaxnorm

SHARDS, COLS = 4, 32
PER_SHARD = COLS // SHARDS
AUTO, EXPLICIT, SHARD_MAP, VMAP = "auto", "explicit", "shard_map", "vmap"
# Rows, by what is in them: which shards hold -inf throughout, which are masked, and what one element is.
CONTENTS = {"finite": {}, "one shard of -inf": {"infinite": [3]}, "several of -inf": {"infinite": [0, 2, 3]}}
CONTENTS |= {"that of the label": {"infinite": [1]}, "all of -inf": {"infinite": [0, 1, 2, 3]}}
CONTENTS |= {
    "one masked": {"masked": [0]},
    "several masked": {"masked": [0, 2, 3]},
    "all masked": {"masked": [0, 1, 2, 3]},
}
CONTENTS |= {
    "one of -inf, another masked": {"infinite": [2], "masked": [3]},
    "masked and of -inf": {"infinite": [2], "masked": [2]},
    "of -inf or masked": {"infinite": [0, 1], "masked": [2, 3]},
    "NaN beside -inf": {"infinite": [0, 3], "value": np.nan},
    "NaN that is masked": {"masked": [1], "value": np.nan},
}
CONTENTS |= {"NaN": {"value": np.nan}, "+inf": {"value": np.inf}, "ignored": {}}
NAMES = list(CONTENTS)
LABELS = np.where([name == "ignored" for name in NAMES], -1, PER_SHARD + np.arange(len(NAMES)) % PER_SHARD)
LOSSES = jaxnorm.softmax_cross_entropy_with_integer_labels
SOFTMAX, LOG_SOFTMAX = jaxnorm.softmax, jaxnorm.log_softmax
CASES = {
    "loss": (LOSSES, {"ignore_index": -1}),
    "loss with a soft_cap": (LOSSES, {"ignore_index": -1, "soft_cap": 3.0, "logit_scale": 0.5}),
    "loss with smoothing": (LOSSES, {"ignore_index": -1, "label_smoothing": 0.2}),
    "loss with z_loss": (LOSSES, {"ignore_index": -1, "z_loss": 0.1}),
    "loss with all": (LOSSES, {"ignore_index": -1, "label_smoothing": 0.2, "z_loss": 0.1, "soft_cap": 3.0}),
    "loss of what is negative": (LOSSES, {"ignore_index": -1, "logit_scale": -0.5}),
    "softmax": (SOFTMAX, {}),
    "log_softmax": (LOG_SOFTMAX, {"logit_scale": 0.5}),
}


def inputs(has_mask):
    """Logits, and a mask that leaves most columns or None."""
    x, where = (np.array(draw(name, (len(NAMES), COLS), std=2.0)) for name in ("x", "where"))
    shard, where = np.arange(COLS) // PER_SHARD, where > -2
    for row, content in enumerate(CONTENTS.values()):
        x[row, np.isin(shard, content.get("infinite", []))] = -np.inf
        x[row, PER_SHARD + 5] = content.get("value", x[row, PER_SHARD + 5])
        where[row, PER_SHARD : PER_SHARD + 6] = True
        where[row, np.isin(shard, content.get("masked", []))] = False
    return jnp.asarray(x), jnp.asarray(where) if has_mask else None


def run(function, options, x, where, **axis):
    given = {"where": where, **options, **axis}
    return LOSSES(x, jnp.asarray(LABELS), **given) if function is LOSSES else function(x, **given)


def mesh_over_classes(devices, axis_type=AxisType.Auto):
    classes = min(SHARDS, len(devices))
    return Mesh(np.reshape(devices, (-1, classes)), ("data", "model"), axis_types=(axis_type,) * 2)


def split(mode, mesh, function, options):
    """The function of logits, a mask and labels, as the mode has it."""
    if mode == VMAP:

        def parts(a):
            return None if a is None else jnp.stack(jnp.split(a, SHARDS, -1))

        def of_parts(x, where):
            mapped = jax.vmap(partial(run, function, options, axis_name="model"), axis_name="model")
            y = mapped(parts(x), parts(where))
            return y[0] if function is LOSSES else jnp.concatenate(list(y), -1)

        return of_parts
    if mode == SHARD_MAP:
        spec = P(None, "model")
        return jax.shard_map(
            partial(run, function, options, axis_name="model"),
            mesh=mesh,
            in_specs=(spec, spec),
            out_specs=P() if function is LOSSES else spec,
        )
    return partial(run, function, options)


def result_and_gradient(function):
    def both(x, where, dy):
        y, pullback = jax.vjp(lambda x: function(x, where), x)
        return y, pullback(dy)[0]

    return jax.jit(both)


@cover(case=CASES, mode=[AUTO, EXPLICIT, SHARD_MAP, VMAP], has_mask=[True, False], implementation=[None, "xla"])
def test_shards_of_any_content(devices, case, mode, has_mask, implementation):
    function, options = case[0], {**case[1], "implementation": implementation}
    mesh = mesh_over_classes(devices, AxisType.Explicit if mode == EXPLICIT else AxisType.Auto)
    x, where = inputs(has_mask)
    dy = draw("dy", (len(NAMES),) if function is LOSSES else x.shape)
    expected = jax.device_get(result_and_gradient(partial(run, function, options))(x, where, dy))
    args = x, where, dy
    if mode in (AUTO, EXPLICIT):
        spec = P("data" if mode == AUTO else None, "model")
        args = [None if a is None else jax.device_put(a, NamedSharding(mesh, P(*spec[: a.ndim]))) for a in args]
    with jax.set_mesh(mesh):
        actual = jax.device_get(result_and_gradient(split(mode, mesh, function, options))(*args))
    for name, *rows in zip(NAMES, *actual, *expected, strict=True):
        for a, e in (rows[::2], rows[1::2]):
            np.testing.assert_allclose(a, e, rtol=1e-5, atol=2e-6, err_msg=name)


# What the rows above have to be on one device, in float64.
@pytest.mark.on_emulator
@pytest.mark.parametrize("implementation", ["native", "xla"])
def test_what_rows_are(implementation):
    x, where = inputs(True)
    losses = run(LOSSES, {"ignore_index": -1, "implementation": implementation}, x, where)
    z = np.where(where, np.asarray(x, np.float64), -np.inf)
    with np.errstate(invalid="ignore", divide="ignore"):
        expected = np.log(np.exp(z).sum(-1)) - np.asarray(x, np.float64)[range(len(NAMES)), LABELS]
    of = dict(zip(NAMES, expected, strict=True))
    of |= {"all masked": 0, "ignored": 0, **dict.fromkeys(("all of -inf", "of -inf or masked", "+inf"), np.nan)}
    assert np.isnan([of["NaN"], of["NaN beside -inf"]]).all()
    np.testing.assert_allclose(losses, list(of.values()), rtol=1e-5)


# As exported programs of before call it: without a top, so that all is relative to 0.
@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("soft_cap", [0.0, 3.0])
def test_what_is_relative_to_no_top(devices, implementation, soft_cap):
    f32 = np.dtype(np.float32)
    spec = CrossEntropy(scale=-0.3, soft_cap=soft_cap, with_total=True, compute_dtype=f32, out_dtype=f32)
    x, where, labels = draw("x", (6, COLS)), draw("where", (6, COLS)) > -1, jnp.arange(6)[:, None] * 7 - 1

    def values(x, where):
        found = CROSS_ENTROPY(spec, CrossEntropyOperands(x, labels, where), implementation)
        return [found.log_sum, found.label_logit, found.total], found.top

    def step(x, where):
        (found, top), pullback = jax.vjp(values, x, where)
        assert top is None
        return found, pullback(([jnp.cos(v) for v in found], None))[0]

    mesh = mesh_over_classes(devices)
    split_over = placed(mesh, (x, where), (P(None, "model"),) * 2)
    found, dx = jax.device_get(jax.jit(step)(*split_over))
    z = np.asarray(x, np.float64) * float(np.float32(-0.3))
    z = soft_cap * np.tanh(z / soft_cap) if soft_cap else z
    at = np.arange(COLS) == np.asarray(labels)
    exact = [np.log(np.exp(z).sum(-1, where=where)), (z * at).sum(-1), z.sum(-1, where=where)]
    for a, e in zip(found, exact, strict=True):
        np.testing.assert_allclose(a[:, 0], e, rtol=2e-6, atol=2e-6)
    share = np.where(where, np.exp(z - exact[0][:, None]), 0)
    of_sum, of_label, of_total = (np.cos(e)[:, None] for e in exact)
    slope = np.float32(-0.3) * (1 - np.square(z / soft_cap) if soft_cap else 1)
    np.testing.assert_allclose(dx, slope * (of_sum * share + of_label * at + of_total * where), atol=3e-6)
