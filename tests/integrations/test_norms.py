"""The norms of `jaxnorm.nnx` and `jaxnorm.linen`: the functions' results and, where Flax has such a norm, Flax's."""

import inspect
from functools import partial
from itertools import product

import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import DTYPES, KINDS, PAIRS, bits, draw, draw_smooth, draw_x
from coverage import cover
from flax_apis import ROWS, as_tuple, assert_calls, assert_close, assert_gradients_close, assert_same, each, of
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from meshes import mesh_of
from native import native_calls
from quantizing import GRANULARITIES, TO, static_scale_of

import jaxnorm
from jaxnorm import Quantization, Quantized

pytestmark = pytest.mark.jax_version

PLAIN, ADD, GROUPS = of(*KINDS), of(*(f"add {kind}" for kind in KINDS)), of("group", "instance")
QUANTIZED, SUMS = (of(*(f"{name} {kind}" for kind in KINDS)) for name in ("quantized", "quantized sum"))
OF_FLAX = PLAIN | ADD | GROUPS
GRADIENT_DTYPES = [*product(DTYPES, [None], ["float32", "bfloat16"]), ("float32", "bfloat16", "float32")]


@cover(layer=OF_FLAX | SUMS | of("gated"), dtypes=PAIRS, dtype=[None, *DTYPES], param_dtype=["float32", "bfloat16"])
def test_results_of_every_dtype(layer, dtypes, dtype, param_dtype):
    inputs, fields = layer.draw(*dtypes), {"dtype": dtype, "param_dtype": param_dtype}
    apply, parameters = layer.build(inputs, **fields)
    y = jax.jit(apply)(parameters, *inputs)
    assert_same(y, layer.expected(inputs, parameters, dtype))
    # Of a half type, a sum and its norm of another half type are not rounded once.
    if layer.is_flaxs and (dtype is None or len(inputs) == 1):
        assert_is_flaxs(y, layer.flaxs_result(inputs, **fields))


@cover(layer=OF_FLAX | QUANTIZED | SUMS | of("gated"), dtype=DTYPES)
def test_a_dtype_by_its_name(layer, dtype):
    inputs, programs = layer.draw("bfloat16", "bfloat16"), []
    for spelt in (dtype, getattr(jnp, dtype), jnp.dtype(dtype)):
        apply, parameters = layer.build(inputs, dtype=spelt)
        programs.append(str(jax.make_jaxpr(apply)(parameters, *inputs)))
    assert len(set(programs)) == 1


def assert_is_flaxs(y, flaxs):
    if isinstance(y, tuple):
        assert_same(y[1], flaxs[1])
        y, flaxs = y[0], flaxs[0]
    assert_close(y, flaxs)


# Fields of Flax's norms of rows, and what the function is told for them.
SERVED = {
    "none": ({}, {}),
    "no scale": ({"use_scale": False}, {}),
    "another variance": ({"use_fast_variance": False}, {}),
    "epsilon": ({"epsilon": 0.1}, {"epsilon": 0.1}),  # large enough to be seen in the result
    "half parameters": ({"param_dtype": jnp.float16}, {}),
    "an axis by number": ({"reduction_axes": 2, "feature_axes": (-1,)}, {}),
    "two axes": ({"reduction_axes": (-1, -2), "feature_axes": (1, 2)}, {"axis": (-2, -1)}),
    "groups of devices without an axis": ({"axis_index_groups": [[0, 1]]}, {}),
}
HEADS = {"a scale for each head": ({"reduction_axes": -1, "feature_axes": (1, 2)}, {"features": (1, 2)})}
# The like of norms of groups.
OF_GROUPS = {
    **{name: SERVED[name] for name in SERVED if name not in ("none", "an axis by number", "two axes")},
    "size of groups": ({"num_groups": None, "group_size": 6}, {"num_groups": None, "group_size": 6}),
    "one group": ({"num_groups": 1}, {"num_groups": 1}),
    "no weights": ({"use_scale": False, "use_bias": False}, {}),
    "all axes by number": ({"reduction_axes": (1, -2, 3)}, {}),
}
OF_INSTANCES = {str(fields): (fields, {}) for fields in ({}, {"feature_axes": (3,)}, {"use_bias": False})}
FAMILIES = [
    *((PLAIN | ADD, SERVED | HEADS), (SUMS, SERVED)),
    (of("gated"), {name: SERVED[name] for name in ("no scale", "epsilon", "half parameters", "an axis by number")}),
    *((of("group"), OF_GROUPS), (of("instance"), OF_INSTANCES)),
]


@each(FAMILIES)
def test_results_of_a_kernel(layer, case):
    fields, options = case
    inputs = layer.draw()
    apply, parameters = layer.build(inputs, **fields)
    y = jax.jit(apply)(parameters, *inputs)
    assert_same(y, layer.expected(inputs, parameters, **options))
    if layer.is_flaxs:
        assert_is_flaxs(y, layer.flaxs_result(inputs, **fields))
    layer.assert_kernels_serve(apply, parameters, inputs)


ROTARY = of("rotary", "rotary of heads first")
ACTIVATION = of("activation", "activation of a pair", "activation of a stack")
# Options of the functions that Flax has not. In bfloat16 each changes bits where the two halves of a result's dtype
# meet.
OPTIONS = [{"scale_offset": 1.0}, {"multiply_before_cast": False}, {"scale_offset": -0.5, "implementation": "xla"}]
OFFSETS = [{"scale_offset": 1.0}, {"scale_offset": 1.0, "implementation": "xla"}]
SIGMOID = {"activation": jax.nn.sigmoid, "implementation": "xla"}
OPTIONS_OF = [
    (PLAIN | ADD, OPTIONS),
    (QUANTIZED, OFFSETS),
    (of("gated"), [*OFFSETS, {"group_size": 20}, {"gate_first": False}, {"activation": "sigmoid"}]),
    (GROUPS, [*OFFSETS, *({"activation": of} for of in ("silu", "relu", "gelu", jax.nn.silu))]),
    (ROTARY, [{}, *OFFSETS[1:], {"theta": 1e6}, {"rotary_dim": 8, "interleaved": True}, {"normalize": "layer"}]),
    (ROTARY, [{"epsilon": 0.1}, {"use_scale": False}, {"normalize": False}]),
    (ACTIVATION, [{}, {"activation": "gelu"}, SIGMOID]),
]


@each(OPTIONS_OF)
def test_results_of_an_option(layer, case):
    dtype = "bfloat16" if layer in (PLAIN | ADD).values() else "float32"
    inputs = layer.draw(dtype, dtype)
    fields = case if dtype == "float32" else case | {"dtype": dtype, "param_dtype": dtype}
    apply, parameters = layer.build(inputs, **fields)
    options = {name: option for name, option in case.items() if name != "use_scale"}
    assert_same(jax.jit(apply)(parameters, *inputs), layer.expected(inputs, parameters, **options))


@cover(layer=ROTARY, per_head=[False, True])
def test_scales_of_heads(layer, per_head):
    inputs = layer.draw()
    apply, parameters = layer.build(inputs, per_head=per_head)
    heads = {"q_scale": (4,), "k_scale": (2,)} if per_head else {"q_scale": (), "k_scale": ()}
    assert {name: p.shape for name, p in parameters.items()} == {name: (*of, 16) for name, of in heads.items()}
    assert_same(jax.jit(apply)(parameters, *inputs), layer.expected(inputs, parameters))


@cover(layer=of("rotary"))
def test_tables_of_a_call(layer):
    q, k, positions = layer.draw()
    apply, parameters = layer.build((q, k))
    angles = positions[:, None] * jnp.asarray([1.0, 0.5, 0.25, 0.125, 0.1, 0.05, 0.02, 0.01])
    by_tables = apply(parameters, q, k, cos=jnp.cos(angles), sin=jnp.sin(angles))
    by_frequencies = apply(parameters, q, k, frequencies=angles[1])
    for a, b in zip(by_tables, by_frequencies, strict=True):
        assert jnp.allclose(a, b, atol=1e-5)


@cover(layer=of("rotary"), dtype=[None, "bfloat16"], given=DTYPES)
def test_dtypes_of_rotated_heads(layer, dtype, given):
    inputs = layer.draw(given, given)
    apply, parameters = layer.build(inputs, dtype=dtype, param_dtype="float16")
    assert [p.dtype for p in parameters.values()] == ["float16"] * 2
    assert [y.dtype for y in apply(parameters, *inputs)] == [dtype or given] * 2


# As in the model hubs, with activations of bfloat16 and parameters of float32.
@cover(layer=PLAIN | ADD, implementation=[None, "xla"])
def test_a_narrow_x_hat_is_rounded_before_wide_parameters_multiply_it(layer, implementation):
    inputs = layer.draw("bfloat16", "bfloat16")
    apply, parameters = layer.build(inputs, multiply_before_cast=False, implementation=implementation)
    y, options = jax.jit(apply)(parameters, *inputs), {"implementation": implementation}
    assert_same(y, layer.expected(inputs, parameters, multiply_before_cast=False, **options))
    assert bits(y) != bits(layer.expected(inputs, parameters, **options))


@pytest.mark.needs("kernels")
@cover(layer=PLAIN, implementation=[None, "native", "xla"])
def test_the_implementation_is_what_runs(layer, implementation):
    inputs = layer.draw()
    apply, parameters = layer.build(inputs, implementation=implementation)
    calls = {} if implementation == "xla" else native_calls(layer.row.kind, fwd=1)
    assert_calls(apply, (parameters, *inputs), calls)


@cover(layer=QUANTIZED | SUMS, to=TO, granularity=GRANULARITIES.keys())
def test_quantised_results_are_the_functions(layer, to, granularity):
    quantization, inputs = Quantization(to, **GRANULARITIES[granularity]), layer.draw()
    call = {"static_scale": static_scale_of(quantization), "smooth_scale": draw_smooth(inputs[0].shape[-1:])}
    apply, parameters = layer.build(inputs, call, quantization=quantization)
    actual = jax.jit(partial(apply, **call))(parameters, *inputs)
    assert_same(actual, layer.expected(inputs, parameters, quantization=quantization, **call))


def loss_of(apply, dims):
    """Of what is dequantised, or was not quantised, and of the sum if there is one."""

    def loss(*args):
        y, *total = as_tuple(apply(*args))
        y = y.dequantize() if isinstance(y, Quantized) else y
        return (y * draw("dy", dims)).sum() + sum((t * draw("dsum", dims)).sum() for t in total)

    return loss


def gradients_of(norm, inputs):
    apply, parameters = norm
    wrt = tuple(range(1 + len(inputs)))
    return jax.jit(jax.grad(loss_of(apply, inputs[0].shape), wrt))(parameters, *inputs)


# A gradient has its primal's dtype: that is x's and the parameters', and one result of a dtype of its own. A case
# has the inputs' dtypes, the fields, and the dtype to which values are rounded on their way.
DERIVED = [
    (PLAIN | ADD, [((x, x), {"dtype": y, "param_dtype": of}, y) for x, y, of in GRADIENT_DTYPES]),
    (ADD, [(dtypes, {}, dtypes[1]) for dtypes in PAIRS]),
    *((layers, [((), fields, None) for fields, _ in cases.values()]) for layers, cases in FAMILIES[-2:]),
]


@each(DERIVED)
def test_gradients_are_flaxs(layer, case):
    dtypes, fields, through = case
    inputs = layer.draw(*dtypes)
    flaxs, ours = (gradients_of(norm, inputs) for norm in layer.both(inputs, **fields))
    assert_gradients_close(ours, flaxs, through=through)


@cover(layer=QUANTIZED | SUMS, dtype=["float32", "bfloat16"])
def test_a_straight_through_gradient_is_that_of_the_unquantised_module(layer, dtype):
    inputs = layer.draw(dtype, dtype)
    unquantised = ROWS[f"{'add ' if len(inputs) == 2 else ''}{layer.row.kind}"]
    plain = layer._replace(row=unquantised).build(inputs)
    apply, parameters = layer.build(inputs, straight_through=True)
    if dtype == "float32":
        assert_same(gradients_of((apply, parameters), inputs), gradients_of(plain, inputs))
    gradient = jax.grad(loss_of(apply, inputs[0].shape), tuple(range(1 + len(inputs))))
    assert_calls(gradient, (parameters, *inputs), native_calls(layer.row.kind, quantized=1, bwd=1))


# What Flax's code computes: fields, and the dtype of x, or whether the call has a mask.
AXES = [
    ({"reduction_axes": 1, "feature_axes": 1}, "float32"),
    ({"reduction_axes": (0, 2), "feature_axes": 2}, "float32"),
    ({"reduction_axes": (1, 2), "feature_axes": -1}, "float32"),
    ({"reduction_axes": -1, "feature_axes": (0, 2)}, "float32"),
    ({"reduction_axes": (0, 1), "feature_axes": -1, "use_fast_variance": False}, "float32"),
]


def promoted(operands, dtype):
    return tuple(None if operand is None else operand.astype(jnp.bfloat16) for operand in operands)


LEFT_TO_FLAX = [
    (PLAIN | ADD, [*AXES, ({}, "mask")]),
    (PLAIN, [({}, "mask of a row"), ({}, "int32"), ({}, "complex64"), ({}, "float64")]),
    (PLAIN, [({"dtype": "float64"}, "float32"), ({"param_dtype": "float64"}, "float32")]),
    ({name: layer for name, layer in PLAIN.items() if layer.is_nnx}, [({"promote_dtype": promoted}, "float32")]),
    (of("group"), [({"reduction_axes": (2, 3)}, "float32"), ({}, "mask")]),
    (of("instance"), [({"feature_axes": 1, "use_scale": False, "use_bias": False}, "float32"), ({}, "mask")]),
]


@each(LEFT_TO_FLAX)
def test_what_no_kernel_serves_is_flaxs_result(layer, case):
    fields, dtype = case
    with jax.enable_x64("float64" in (dtype, *fields.values())):
        inputs = layer.draw()
        call = {"mask": draw("mask", inputs[0].shape[-1:] if "row" in dtype else inputs[0].shape) > 0}
        if "mask" not in dtype:
            call, inputs = {}, tuple((jnp.round(x) if dtype[0] in "ic" else x).astype(dtype) for x in inputs)
        flaxs, ours = (jax.jit(partial(apply, **call))(p, *inputs) for apply, p in layer.both(inputs, **fields))
        assert_same(ours, flaxs)


@cover(layer=GROUPS, activation=["silu", "relu", "gelu", jax.nn.silu])
def test_an_activation_of_flaxs_result(layer, activation):
    inputs = layer.draw()
    mask = draw("mask", inputs[0].shape) > 0
    flaxs, ours = (
        jax.jit(partial(apply, mask=mask))(p, *inputs) for apply, p in layer.both(inputs, {"activation": activation})
    )
    assert_close(ours, (getattr(jax.nn, activation) if isinstance(activation, str) else activation)(flaxs))


# flax.nnx has an error of its own for an example alone.
@each([(of("group"), [(3, 12), (3, 7, 12), (2, 3, 4, 5, 12)]), ({"linen group": of("group")["linen group"]}, [(12,)])])
def test_any_number_of_positions(layer, case):
    inputs = layer.draw(dims=case)
    flaxs, ours = (apply(p, *inputs) for apply, p in layer.both(inputs))
    assert_close(ours, flaxs)


@cover(layer=PLAIN)
def test_axis_name_is_flaxs_result(layer):
    (x,) = layer.draw()
    norms = layer.both((x,), axis_name="shard")
    flaxs, ours = (jax.vmap(lambda x: apply(p, x), axis_name="shard")(x) for apply, p in norms)  # noqa: B023
    # Ours has the exact variance, and so not Flax's bits.
    np.testing.assert_allclose(ours, flaxs, rtol=2e-5, atol=2e-5)


@cover(layer=PLAIN)
def test_axis_index_groups_are_flaxs_result(layer, devices):
    half = len(devices) // 2
    groups = (tuple(range(half)), tuple(range(half, 2 * half)))
    x, mesh = draw_x((2 * half, *layer.row.dims[1:])), jax.sharding.Mesh(devices, "shard")
    over_devices = partial(jax.shard_map, mesh=mesh, in_specs=P("shard"), out_specs=P("shard"), check_vma=False)
    norms = layer.both((x[:1],), axis_name="shard", axis_index_groups=groups)
    flaxs, ours = (jax.jit(over_devices(partial(apply, p)))(x) for apply, p in norms)
    assert_same(ours, flaxs)


@cover(layer=GROUPS)
def test_positions_that_are_split(layer, devices):
    mesh, x, spec = mesh_of(devices, AxisType.Auto), draw_x((4, 8, 5, 12)), P("a", "b")
    (split, parameters), (whole, _) = (layer.build((x,), activation="silu", axis_name=name) for name in ("b", None))
    function = jax.shard_map(split, mesh=mesh, in_specs=(P(), spec), out_specs=spec)
    assert_close(jax.jit(function)(parameters, x), whole(parameters, x))
    assert_gradients_close(*(gradients_of((of, parameters), (x,)) for of in (function, whole)))


# A parameter that is split otherwise than x splits Flax's result.
@cover(layer=PLAIN, x_spec=[P("a"), P("a", None, "b")], spec=[P(), P("b")])
def test_shardings_of_an_explicit_mesh_are_flaxs(layer, any_devices, x_spec, spec):
    mesh, x = mesh_of(any_devices, AxisType.Explicit), draw_x((8, 6, 32))
    norms = layer.both((x,))
    with jax.set_mesh(mesh):
        x = jax.device_put(x, NamedSharding(mesh, x_spec))
        (flaxs, flaxs_dp), (ours, ours_dp) = (
            (apply(p, x), jax.grad(lambda p: apply(p, x).sum())(p))  # noqa: B023
            for apply, p in ((apply, jax.device_put(p, NamedSharding(mesh, spec))) for apply, p in norms)
        )
        assert jax.typeof(ours) == jax.typeof(flaxs)
        assert jax.tree.map(jax.typeof, ours_dp) == jax.tree.map(jax.typeof, flaxs_dp)
        np.testing.assert_allclose(ours, flaxs, rtol=2e-5, atol=2e-5)


# Flax's GroupNorm takes no x that is split along channels.
@cover(layer=of("group"), name=[None, "b"])
def test_groups_of_an_explicit_mesh(layer, devices, name):
    mesh, x = mesh_of(devices, AxisType.Explicit), draw_x((8, 4, 5, 16))
    apply, parameters = layer.build((x,))
    with jax.set_mesh(mesh):
        split = jax.device_put(x, NamedSharding(mesh, P("a", None, None, name)))
        actual = jax.jit(apply)(parameters, split)
        assert jax.typeof(actual).sharding.spec == jax.typeof(split).sharding.spec
    np.testing.assert_allclose(actual, apply(parameters, x), rtol=1e-5, atol=3e-6)


@cover(layer=PLAIN)
def test_half_input_is_not_widened_before_the_kernel(layer):
    inputs = layer.draw("bfloat16")
    apply, parameters = layer.build(inputs)
    program = jax.make_jaxpr(apply)(parameters, *inputs)
    assert program.out_avals[0].dtype == jnp.float32
    assert "convert_element_type" not in str(program)


@cover(layer=ADD, dims=[(37,), (4, 1, 37)], mask=[None, True])
def test_what_a_call_says_of_a_sum(layer, dims, mask):
    inputs, gate = layer.draw(), draw("branch_scale", dims)
    mask = mask and jnp.ones(inputs[0].shape, bool)
    apply, parameters = layer.build(inputs)
    y, total = apply(parameters, *inputs, branch_scale=gate, mask=mask)
    expected = layer.expected(inputs, parameters, branch_scale=gate)
    assert_close(total, expected[1])
    assert_close(y, expected[0])


@cover(layer=OF_FLAX | QUANTIZED | of("gated"))
def test_parameters_are_flaxs(layer):
    inputs, fields = layer.draw(), layer._init() | layer.groups | {"param_dtype": jnp.bfloat16}
    _, flaxs = layer.api.build(layer.flaxs_cls, inputs[:1], fields)
    assert_same(layer.build(inputs, param_dtype=jnp.bfloat16)[1], flaxs)


@cover(layer=PLAIN | ADD | QUANTIZED | GROUPS | of("gated", "rotary"))
def test_an_offset_makes_the_default_scale_zeros(layer):
    inputs = layer.draw()
    fields, offset = layer.row.needed | layer.row.beside, {"scale_offset": 1.0}
    for own, value in (({}, 1), (offset, 0), (offset | {"scale_init": jax.nn.initializers.ones}, 1)):
        _, parameters = layer.api.build(layer.cls, inputs, fields | own)
        assert all((p == value).all() for name, p in parameters.items() if "scale" in name)
    if layer in GROUPS.values():
        apply, parameters = layer.api.build(layer.cls, inputs, fields | offset)
        plain, ones = layer.api.build(layer.flaxs_cls, inputs, fields)
        assert_close(apply(parameters, *inputs), plain(ones, *inputs))


def test_groups_by_position():
    rngs, (x,) = flax.nnx.Rngs(0), GROUPS["nnx group"].draw()
    assert jaxnorm.nnx.GroupNorm(12, 4, rngs=rngs).num_groups == 4
    assert jaxnorm.nnx.GroupNorm(12, None, 4, rngs=rngs).num_groups == 3
    assert jaxnorm.linen.GroupNorm(4).init_with_output(jax.random.key(0), x)[0].shape == x.shape


# Flax's own code has no offset, and quantises nothing: the formula serves what it expresses.
FORMULAS = [
    (SUMS, [{"reduction_axes": 1, "feature_axes": 1}, {"reduction_axes": (2, 0), "feature_axes": (0, -1)}]),
    (PLAIN, [{"reduction_axes": 1, "feature_axes": 1, "scale_offset": 1.0}]),
]


@each(FORMULAS)
def test_other_axes_by_the_formula(layer, case):
    inputs = layer.draw()
    apply, parameters = layer.build(inputs, **case)
    axis = tuple(sorted(np.atleast_1d(case["reduction_axes"]).tolist()))
    options = {name: option for name, option in case.items() if name == "scale_offset"}
    assert_same(jax.jit(apply)(parameters, *inputs), layer.expected(inputs, parameters, axis=axis, **options))
    assert_calls(apply, (parameters, *inputs), {})


@cover(layer=PLAIN)
def test_float64_with_an_offset_is_the_formulas_result(layer):
    with jax.enable_x64(True):
        inputs = tuple(x.astype("float64") for x in layer.draw())
        apply, parameters = layer.build(inputs, scale_offset=1.0)
        expected = jax.jit(lambda p, x: layer.row.function(x, **p, scale_offset=1.0))(parameters, *inputs)
        assert_same(jax.jit(apply)(parameters, *inputs), expected)
        assert expected.dtype == "float64"


# The constructor's arguments.
POSITIONAL, KEYWORD = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY


def signature(function):
    return inspect.signature(function).parameters.values()


@cover(layer=PLAIN | ADD | QUANTIZED)
def test_flaxs_arguments_come_first_and_ours_by_keyword(layer):
    flaxs, ours = ([(p.name, p.kind) for p in signature(cls.__init__)] for cls in (layer.flaxs_cls, layer.cls))
    first = 2 if layer.is_nnx else flaxs.index(("parent", POSITIONAL))  # nnx: all but self, num_features by name
    assert ours[:first] == flaxs[:first]
    inits = [base.__init__ for base in layer.cls.__mro__ if inspect.isfunction(base.__init__)]
    own = {"quantization", "straight_through"} if layer.is_quantized else set()
    own |= {"scale_offset", "multiply_before_cast", "implementation"}
    assert own <= {p.name for init in inits for p in signature(init) if p.kind == KEYWORD}
    assert issubclass(layer.cls, layer.flaxs_cls)


@cover(layer=PLAIN)
def test_class_and_call_are_flaxs(layer):
    assert layer.cls.__name__ == layer.flaxs_cls.__name__
    ours, flaxs = (
        [(p.name, p.kind, p.default) for p in signature(cls.__call__)][1:] for cls in (layer.cls, layer.flaxs_cls)
    )
    assert ours == flaxs


@cover(layer={name: layer for name, layer in GROUPS.items() if not layer.is_nnx})
def test_fields_are_flaxs_and_ours(layer):
    flaxs, ours = (set(inspect.signature(cls).parameters) for cls in (layer.flaxs_cls, layer.cls))
    assert flaxs <= ours
    assert ours - flaxs == {"activation", "scale_offset", "implementation"}
