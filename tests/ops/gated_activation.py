"""Gated activations: their rows, three forms, dtypes, derivatives, meshes that split columns."""

from dataclasses import replace
from functools import partial

import bad_calls
import formulas
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ALIKE, ALONE, DTYPES, assert_close, bits, draw, draw_gate, draw_up
from coverage import cover
from hlo import collectives, compiled_text, count_native_calls
from jax import export
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from meshes import mesh_of, on_mesh, placed
from op import Op, rows, weighted
from oracle import ACTIVATIONS as FORMULAS, Forward, f64, round_to
from tolerances import FLOAT32

import jaxnorm

ACTIVATIONS = ("silu", "gelu", "gelu_exact", "relu2", "sigmoid")
# Of an exponent's argument, of its power, of a factor and of their product.
ROUNDING = 4 * 2.0**-24
SMALLEST = 2.0**-126  # kernels take a smaller sigmoid for 0


def exact(activation, gate, up):
    v, up, dtype = f64(gate), f64(up), gate.dtype
    a, _, exponent = FORMULAS[activation](v)
    y = a * up
    slack = np.abs(up) * (np.abs(a * exponent) * ROUNDING + np.maximum(np.abs(v), 1) * SMALLEST)
    return Forward(y, round_to(y, dtype), np.abs(y), slack)


def exact_gradients(activation, cotangents, gate, up):
    a, slope, _ = FORMULAS[activation](f64(gate))
    dy = f64(cotangents[0])
    return {"gate": (dy * f64(up) * slope, None), "up": (dy * a, None)}


def as_norm(of_two):
    return lambda x, *weights: weighted(of_two(jnp.sin(x), 1.5 + jnp.cos(x)), *weights)


def halves(x):
    return jnp.split(x, 2, -1)


def gated_activation(activation):
    def function(gate, up, **options):
        return (jaxnorm.gated_activation((gate, up), activation=activation, **options),)

    return Op(
        name=f"gated by {activation}",
        public="gated_activation",
        kind="elements",
        operands=("gate", "up"),
        arrays=2,
        dtypes=ALIKE,
        has_out_dtype=False,
        function=function,
        formula=lambda gate, up: (formulas.activated(activation, gate, up),),
        as_norm=lambda f: as_norm(lambda *args: f(*args)[0]),
        exact=partial(exact, activation),
        exact_gradients=partial(exact_gradients, activation),
        small=rows(6, 10),
        # No whole vector, whole ones with and without a rest; several blocks of threads.
        sizes=(*(rows(7, cols) for cols in (1, 24, 100, 1021, 4096, 14_336)), rows(3, 40_001), rows(3, 5, 64)),
        backward_sizes=(rows(600, 1000),),
        lengths=tuple(rows(9, cols) for cols in (1, 31, 128, 1021, 4096)),
        gradients=("dx", "dup"),
        keeps_operands_alone=True,
        statistics=0,
        numbers=("axis",),
        bad_calls=bad_calls.GATED_ACTIVATION,
        without_kernel=bad_calls.ACTIVATION_WITHOUT_KERNEL,
    )


def packed_activation(activation):
    """x has both side by side; sizes are those of the result."""

    def function(x, **options):
        return (jaxnorm.gated_activation(x, activation=activation, **options),)

    def exact_gradients_of_both(cotangents, x):
        found = exact_gradients(activation, cotangents, *halves(x))
        return {"x": (np.concatenate([found["gate"][0], found["up"][0]], -1), None)}

    return replace(
        gated_activation(activation),
        name=f"packed and gated by {activation}",
        operands=("x",),
        arrays=1,
        shapes={"x": lambda shape: (*shape[:-1], 2 * shape[-1])},
        dtypes=ALONE,
        function=function,
        formula=lambda x: (formulas.activated(activation, *halves(x)),),
        as_norm=lambda f: as_norm(lambda *args: f(jnp.concatenate(args, -1))[0]),
        exact=lambda x: exact(activation, *halves(x)),
        exact_gradients=exact_gradients_of_both,
        gradients=("dx",),
        kept=("x",),
    )


GATED_ACTIVATIONS = (
    *(gated_activation(activation) for activation in ACTIVATIONS),
    *(packed_activation(activation) for activation in ACTIVATIONS),
)

OP = GATED_ACTIVATIONS[0]
DIMS = (8, 4, 64)


def pair(dtype="float32", dims=DIMS):
    return draw_gate(dims, dtype), draw_up(dims, dtype)


# By the name of a form: what it takes of a pair, its axis, and the pair that its gradient stands for.
FORMS = {
    "two arrays": (lambda pair: pair, -1, lambda x: x),
    "side by side": (lambda pair: jnp.concatenate(pair, -1), -1, lambda x: tuple(jnp.split(x, 2, -1))),
    "stacked": (lambda pair: jnp.stack(pair, -2), -2, lambda x: (x[..., 0, :], x[..., 1, :])),
}


def run(form, **options):
    """The result and the gradient, as of a pair."""
    pack, axis, pair_of = FORMS[form]

    def of_pair(pair, dy):
        function = partial(jaxnorm.gated_activation, axis=axis, implementation="native", **options)
        y, pullback = jax.vjp(function, pack(pair))
        return y, pair_of(pullback(dy)[0])

    return jax.jit(of_pair)


@pytest.mark.on_emulator
@pytest.mark.needs("kernels")
@cover(form=list(FORMS)[1:], dtype=DTYPES, activation=ACTIVATIONS)
def test_forms_have_the_same_bits(form, dtype, activation):
    dy = draw("dy", DIMS, dtype)
    actual, expected = (run(f, activation=activation)(pair(dtype), dy) for f in (form, "two arrays"))
    assert bits(actual) == bits(expected)


@pytest.mark.parametrize(
    ("form", "axis", "dims"),
    [
        *(("stacked", axis, (3, 5)) for axis in (-2, 1, np.int64(1))),
        *(("side by side", axis, (3, 5)) for axis in (-1, 1)),
        ("stacked", -2, (64,)),
    ],
)
def test_an_axis_by_any_name(form, axis, dims):
    pack, *_ = FORMS[form]
    y = jaxnorm.gated_activation(pack(pair(dims=dims)), axis=axis)
    np.testing.assert_array_equal(y, jaxnorm.gated_activation(pair(dims=dims)))


# As jax.numpy promotes them; each gradient has the dtype of its own.
@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "float16"), ("float16", "bfloat16")])
def test_two_dtypes(dtypes):
    x = pair()[0].astype(dtypes[0]), pair()[1].astype(dtypes[1])
    y, pullback = jax.vjp(jaxnorm.gated_activation, x)
    assert (y.dtype, [gradient.dtype for gradient in pullback(y)[0]]) == ("float32", list(dtypes))


# Of relu's slope nothing is left where a gate is closed.
@pytest.mark.on_emulator
@cover(value=[np.inf, -np.inf, np.nan], implementation=["native", "xla"])
def test_no_infinity_passes_a_closed_gate(value, implementation):
    function = partial(jaxnorm.gated_activation, activation="relu2", implementation=implementation)
    gate, up = -jnp.ones((3, 40)), draw_up((3, 40))
    _, pullback = jax.vjp(function, (gate, up))
    dgate, _ = pullback(jnp.full_like(up, value))[0]
    np.testing.assert_array_equal(dgate, jnp.zeros_like(gate))


@pytest.mark.parametrize("implementation", ["native", "xla"])
def test_it_is_linear_in_what_the_gate_lets_through(implementation):
    gate, up = pair()
    function = jax.jit(lambda up: jaxnorm.gated_activation((gate, up), implementation=implementation))
    transposed = jax.linear_transpose(function, up)
    assert_close(transposed(function(up))[0], function(function(up)))


# Of a batch that XLA may not know; and of columns, by the formula, if the halves are known to be alike.
@pytest.mark.parametrize("symbols", ["rows, 2*64", "rows, 2*cols"])
def test_a_program_for_any_size(symbols):
    shape = export.symbolic_shape(symbols)
    program = export.export(jax.jit(jaxnorm.gated_activation))(jax.ShapeDtypeStruct(shape, "float32"))
    x = jnp.concatenate(pair(), -1).reshape(-1, 128)
    assert_close(program.call(x), jaxnorm.gated_activation(x))


def test_an_unknown_number_of_columns_may_be_odd():
    shape = export.symbolic_shape("rows, cols")
    with pytest.raises(ValueError, match=r"^gated_activation: x has shape \(rows, cols\), expected .* even"):
        jax.eval_shape(jaxnorm.gated_activation, jax.ShapeDtypeStruct(shape, "float32"))


def gradients(axis, x, dy):
    y, pullback = jax.vjp(partial(jaxnorm.gated_activation, axis=axis), x)
    return y, *jax.tree.leaves(pullback(dy))


AXIS_TYPES = AxisType.Auto, AxisType.Explicit


@pytest.mark.parametrize("axis_type", AXIS_TYPES)
@pytest.mark.parametrize("form", ["two arrays", "stacked"])
def test_split_columns_stay_where_they_are(devices, axis_type, form):
    pack, axis, _ = FORMS[form]
    x, dy, mesh = pack(pair()), draw("dy", DIMS), mesh_of(devices, axis_type)
    function = partial(gradients, axis)
    columns = P("a", *[None] * (1 + (form == "stacked")), "b")
    leaves, tree = jax.tree.flatten(x)
    of_leaves = lambda dy, *leaves: function(jax.tree.unflatten(tree, leaves), dy)  # noqa: E731
    actual, text = on_mesh(mesh, of_leaves, (dy, *leaves), (P("a", None, "b"), *[columns] * len(leaves)))
    assert (bits(actual), collectives(text)) == (bits(jax.jit(function)(x, dy)), {})
    assert count_native_calls(text) == OP.calls(fwd=1, bwd=1)
    assert actual[0].sharding.is_equivalent_to(NamedSharding(mesh, P("a", None, "b")), dy.ndim)


OTHERWISE = [
    *(("side by side", axis_type, P("b", None, "a"), DIMS) for axis_type in AXIS_TYPES),
    *(("stacked", axis_type, P(None, None, "b", "a"), DIMS) for axis_type in AXIS_TYPES),
    ("stacked", AxisType.Explicit, P("a", None, "b"), DIMS),
    ("side by side", AxisType.Auto, P(None, None, "a"), (8, 4, 6)),
]


# Of halves that lie side by side, or of an axis of two that is split, something has to move.
@pytest.mark.parametrize(("form", "axis_type", "spec", "dims"), OTHERWISE)
def test_what_is_split_otherwise_is_right(devices, form, axis_type, spec, dims):
    pack, axis, _ = FORMS[form]
    x, dy, mesh = pack(pair(dims=dims)), draw("dy", dims), mesh_of(devices, axis_type)
    with jax.set_mesh(mesh):
        (x_there,) = placed(mesh, [x], [spec])
        y = jax.jit(partial(jaxnorm.gated_activation, axis=axis))(x_there)
        actual = jax.jit(partial(gradients, axis))(x_there, jax.device_put(dy, y.sharding))
        if axis_type is AxisType.Explicit:
            assert jax.typeof(actual[1]) == jax.typeof(x_there)
    assert bits(jax.device_get(actual)) == bits(jax.jit(partial(gradients, axis))(x, dy))


def test_halves_that_an_explicit_mesh_does_not_divide(devices):
    mesh = mesh_of(devices, AxisType.Explicit)
    with jax.set_mesh(mesh):
        (x,) = placed(mesh, [jnp.ones((2, len(devices)))], [P(None, ("a", "b"))])
        with pytest.raises(ValueError, match=f"split over {len(devices)} devices of an Explicit mesh, .* axis=-2"):
            jaxnorm.gated_activation(x)


def test_one_array_is_read_and_written_once_each_way():
    x, dy = jnp.concatenate(pair(), -1), draw("dy", DIMS)
    text = compiled_text(partial(gradients, -1), x, dy)
    assert count_native_calls(text) == OP.calls(fwd=1, bwd=1)
    assert "concatenate" not in text


# Where the error function is near 1, and what is left of 1 has few digits.
@pytest.mark.needs("kernels")
@pytest.mark.parametrize("implementation", ["xla", "native"])
def test_the_exact_gelu_keeps_its_digits(implementation):
    gate = jnp.linspace(-1.5, 6.0, 100_001)
    function = partial(jaxnorm.gated_activation, activation="gelu_exact", implementation=implementation)
    y = np.asarray(jax.jit(function)((gate, jnp.ones_like(gate))), np.float64)
    expected, *_ = FORMULAS["gelu_exact"](f64(gate))
    assert np.max(np.abs(y - expected) / np.maximum(np.abs(expected), 1e-30)) <= FLOAT32


# Where a slope is 0 or 1, no product on the way to it may be 0 times infinity.
@pytest.mark.on_emulator
@cover(
    activation=["silu", "gelu", "gelu_exact", "sigmoid"],
    dtype=["float32", "bfloat16", "float16"],
    mode=["forward", "reverse"],
    implementation=["native", "xla"],
)
def test_slopes_at_huge_gates(activation, dtype, mode, implementation):
    of = jax.jit(lambda x: jaxnorm.gated_activation(x, activation=activation, axis=-2, implementation=implementation))
    most = np.log10(float(jnp.finfo(dtype).max)) - 0.1
    gate = jnp.asarray(np.outer([1, -1], np.logspace(1.5, most, 512)).ravel(), dtype)
    x, only_gate = jnp.stack([gate, jnp.ones_like(gate)]), jnp.stack([jnp.ones_like(gate), jnp.zeros_like(gate)])
    of_mode = {
        "forward": lambda: jax.jvp(of, (x,), (only_gate,))[1],
        "reverse": lambda: jax.vjp(of, x)[1](jnp.ones_like(gate))[0][0],
    }
    slope = of_mode[mode]()
    expected = np.zeros(gate.shape) if activation == "sigmoid" else np.asarray(gate > 0, float)
    np.testing.assert_allclose(np.asarray(slope, np.float64), expected, atol=1e-6)


@pytest.mark.on_emulator
@cover(activation=ACTIVATIONS, value=[np.nan, np.inf, -np.inf], which=["gate", "up"])
def test_gradients_at_what_is_not_finite_have_one_rule(activation, value, which):
    x = draw("x", (2, 64), std=4.0).at[int(which == "up"), ::3].set(value)
    gradients = [
        jax.grad(lambda x, i=i: jaxnorm.gated_activation(x, activation=activation, axis=-2, implementation=i).sum())(x)
        for i in ("native", "xla")
    ]
    native, formula = (np.where(np.isfinite(g), 0, g) for g in map(np.asarray, gradients))
    np.testing.assert_array_equal(native, formula)
