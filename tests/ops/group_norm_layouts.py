"""What only GroupNorm has: channels on any axis, weights for each example, groups, and positions that are split.

Of channels before all positions groups are rows of the kernels of LayerNorm, and XLA does the rest.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import DTYPES, assert_near, bits, draw, draw_bias, draw_scale, draw_x, with_gradients
from coverage import cover
from hlo import collectives, compiled_text, count_native_calls
from jax import export
from jax.sharding import AxisType, PartitionSpec as P
from meshes import mesh_of, on_mesh, placed
from tolerances import gradient_errors, result_errors

import jaxnorm
from ops.group_norm import GROUP_NORMS

pytestmark = pytest.mark.jax_version

EXAMPLES, CHANNELS = 4, 12
DIMS, AXIS_TYPES = (EXAMPLES, 6, 5, CHANNELS), {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
norm = partial(jaxnorm.group_norm, num_groups=3, activation="silu")


def operands(of_examples=False, dims=DIMS):
    weights = (dims[0], dims[-1])[not of_examples :]
    return draw_x(dims), draw_scale(weights), draw_bias(weights)


def value_and_gradients(function):
    return jax.jit(jax.value_and_grad(lambda *args: jnp.sin(function(*args)).sum(), (0, 1, 2)))


@cover(axis=[1, 2, -2, -3], of_examples=[False, True])
def test_channels_of_any_axis(axis, of_examples):
    def moved(x, *weights):
        return jnp.moveaxis(norm(jnp.moveaxis(x, -1, axis), *weights, channel_axis=axis), axis, -1)

    args = operands(of_examples)
    assert_near(value_and_gradients(moved)(*args), value_and_gradients(norm)(*args))


@pytest.mark.parametrize("of_examples", [False, True])
def test_weights_of_examples_are_calls_one_by_one(of_examples):
    x, _, _ = operands()
    scale, bias = operands(True)[1], operands(of_examples)[2]

    def one_by_one(x, scale, bias):
        axes = (0, 0, 0 if of_examples else None)
        return jax.vmap(lambda x, *weights: norm(x[None], *weights)[0], axes)(x, scale, bias)

    assert_near(value_and_gradients(norm)(x, scale, bias), value_and_gradients(one_by_one)(x, scale, bias))


@pytest.mark.parametrize("groups", [{"num_groups": 4}, {"group_size": 3}])
def test_number_and_size_of_groups(groups):
    x = draw_x(DIMS)
    parts = [jaxnorm.group_norm(part, num_groups=1) for part in jnp.split(x, 4, -1)]
    assert_near(jaxnorm.group_norm(x, **groups), jnp.concatenate(parts, -1), atol=2e-6)


def test_it_is_not_linear_in_weights_with_an_activation():
    x, scale, _ = operands()
    with pytest.raises(NotImplementedError, match="group_norm is linear in none of its operands"):
        jax.linear_transpose(lambda scale: norm(x, scale), scale)(x)


@pytest.mark.parametrize("of_examples", [False, True])
def test_positions_of_a_vmap(of_examples):
    x, *weights = operands(of_examples)

    def in_parts(x, *weights):
        parts = jnp.stack(jnp.split(x, 2, 1))
        each = jax.vmap(partial(norm, axis_name="part"), (0, None, None), axis_name="part")(parts, *weights)
        return jnp.concatenate(list(each), 1)

    assert_near(value_and_gradients(in_parts)(x, *weights), value_and_gradients(norm)(x, *weights))


# The gradient of weights of an example is a sum over its positions, which are on one device.
@cover(axis_type=AXIS_TYPES)
def test_weights_of_examples_stay_where_examples_are(devices, axis_type):
    mesh, args = mesh_of(devices, axis_type), operands(True, (8, 6, 5, CHANNELS))
    specs = P("a", None, None, None), P("a", None), P("a", None)

    def gradients(*args):
        y, pullback = jax.vjp(norm, *args)
        return pullback(jnp.cos(args[0]).astype(y.dtype))

    actual, text = on_mesh(mesh, gradients, args, specs)
    assert collectives(text) == {}
    assert_near(jax.device_get(actual), jax.device_get(jax.jit(gradients)(*args)))


# On an Auto mesh XLA may split the one group that there is.
@pytest.mark.parametrize("spec", [P("a", None, None, "b"), P("a", "b"), P(None, "a", None, "b")], ids=str)
def test_one_group_that_is_split_is_not_gathered(devices, spec):
    dims = (8, 8, 5, 16)
    mesh, (x, *weights) = mesh_of(devices, AxisType.Auto), operands(dims=dims)
    function = partial(jaxnorm.group_norm, num_groups=1, activation="silu")
    actual, text = on_mesh(mesh, function, (x, *weights), (spec, P(*spec[3:]), P(*spec[3:])))
    assert_near(jax.device_get(actual), jax.device_get(function(x, *weights)))
    # Statistics of groups, which are fewer than elements.
    assert sum(collectives(text).values()) <= 8 * dims[0] * len(devices)


def test_a_group_that_an_explicit_mesh_splits(devices):
    mesh = mesh_of(devices, AxisType.Explicit)
    with jax.set_mesh(mesh):
        (x,) = placed(mesh, [draw("x", (8, 4, 16))], [P("a", None, "b")])
        parts = mesh.shape["b"]
        assert jaxnorm.group_norm(x, num_groups=parts).shape == x.shape
        with pytest.raises(ValueError, match=rf"split over {parts} devices of an Explicit mesh.*1 groups"):
            jaxnorm.group_norm(x, num_groups=1)


@pytest.mark.parametrize("groups", [{"num_groups": 3}, {"group_size": 4}], ids=str)
@pytest.mark.parametrize("of_examples", [False, True])
def test_no_channels(of_examples, groups):
    args = operands(of_examples, (EXAMPLES, 6, 0))
    _, gradients = value_and_gradients(partial(jaxnorm.group_norm, **groups))(*args)
    assert [g.shape for g in gradients] == [a.shape for a in args]


# Kernels follow weights along few runs of axes.
def test_weights_of_every_other_vmap():
    count = 10
    moving = [i % 2 == 0 for i in range(count)]

    def of_examples(function):
        for moves in reversed(moving):
            function = jax.vmap(function, (0, 0 if moves else None, None))
        return value_and_gradients(function)

    dims = [2 if i in (0, count - 1) else 1 + i % 2 for i in range(count)]
    x, scale, bias = draw_x((*dims, 2, 3, 4)), draw_scale((*dims[::2], 4)), draw_bias((4,))
    whole = scale.reshape(*(n if moves else 1 for n, moves in zip(dims, moving, strict=True)), 1, 4)

    def one_by_one(x, scale, bias):
        scale = jnp.broadcast_to(scale.reshape(whole.shape), (*dims, 2, 4)).reshape(-1, 4)
        return jaxnorm.group_norm(x.reshape(-1, 3, 4), scale, bias, num_groups=2)

    norm = partial(jaxnorm.group_norm, num_groups=2)
    assert_near(of_examples(norm)(x, scale, bias), value_and_gradients(one_by_one)(x, scale, bias))


# Channels before all positions: groups are rows of LayerNorm's kernels, and XLA does the rest.
first = partial(norm, channel_axis=1, implementation="native")


def operands_first(of_examples=False, dims=DIMS):
    x, *weights = operands(of_examples, dims)
    return jnp.moveaxis(x, -1, 1), *weights


@pytest.mark.needs("kernels")
@pytest.mark.parametrize("of_examples", [False, True])
def test_channels_first_are_a_call_of_layer_norm_each_way(of_examples):
    calls = count_native_calls(compiled_text(value_and_gradients(first), *operands_first(of_examples)))
    assert calls == {"jaxnorm_layer_norm_fwd": 1, "jaxnorm_layer_norm_bwd": 1}


OPTIONS = [
    *({"group_size": 6}, {"group_size": 6, "scale_offset": 1.0}, {"group_size": 1, "epsilon": 1.0}),
    *({"group_size": None}, {"group_size": 6, "out_dtype": np.dtype("float32")}),
]


@pytest.mark.needs("kernels")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_channels_first_are_rounded_once(dtype):
    x, *weights = operands_first()
    wide = jax.jit(partial(first, out_dtype="float32"))(x.astype(dtype), *weights)
    assert bits(jax.jit(first)(x.astype(dtype), *weights)) == bits(wide.astype(dtype))


@pytest.mark.needs("kernels")
@cover(of_examples=[False, True], axes=[(0, None, None), (None, 0, 0), (1, 0, None)])
def test_a_vmap_of_channels_first(of_examples, axes):
    args = operands_first(of_examples)
    stacked = [a if axis is None else jnp.stack([a, jnp.flip(a, -1)], axis) for a, axis in zip(args, axes, strict=True)]
    examples = [[a if at is None else jnp.take(a, i, at) for a, at in zip(stacked, axes, strict=True)] for i in (0, 1)]
    one_by_one = [value_and_gradients(first)(*example) for example in examples]
    expected = jax.tree.map(lambda *leaves: jnp.stack(leaves), *one_by_one)
    assert_near(jax.jit(jax.vmap(value_and_gradients(first), axes))(*stacked), expected)


# What devices exchange is no more than XLA makes them with the formula, but for the statistics of parts of a group,
# which are gathered in one exchange in place of two sums.
@pytest.mark.needs("kernels")
@cover(
    spec=[P("a"), P(None, "a"), P("a", "b"), P(None, None, "a"), P("b", None, "a")],
    axis_type=AXIS_TYPES,
    with_gradients=[False, True],
)
def test_devices_exchange_no_more_for_channels_first(devices, spec, axis_type, with_gradients):
    mesh, dims = mesh_of(devices, axis_type), (8, 8, 5, 16)
    args, specs = operands_first(dims=dims), (spec, P(*spec[1:2]), P(*spec[1:2]))

    def of(implementation):
        function = partial(first, num_groups=8, implementation=implementation)
        return value_and_gradients(function) if with_gradients else jax.jit(function)

    (actual, text), (_, of_formula) = (on_mesh(mesh, of(how), args, specs) for how in ("native", "xla"))
    gathered = 8 * args[0].shape[0] * 8 * len(devices) if len(spec) == 3 else 0
    assert sum(collectives(text).values()) <= sum(collectives(of_formula).values()) + gathered
    assert_near(jax.device_get(actual), jax.device_get(of("xla")(*args)), atol=1e-4)


@pytest.mark.needs("kernels")
def test_explain_tells_where_channels_before_positions_are_native():
    x, *weights = operands_first()
    function = jax.grad(lambda x: norm(x, *weights, channel_axis=1).sum())
    for call in jaxnorm.explain(function, jnp.tile(x, (9, 1, 1, 1))):
        assert (call.name, call.on("cpu").implementation) == ("group_norm", "native")


@pytest.mark.needs("kernels")
def test_channels_first_in_a_program_for_several_platforms():
    function = value_and_gradients(partial(norm, channel_axis=1))
    x, *weights = operands_first(dims=(64, *DIMS[1:]))
    (examples,) = export.symbolic_shape("examples")
    types = [jax.ShapeDtypeStruct((examples, *x.shape[1:]), x.dtype), *weights]
    program = export.deserialize(export.export(function, platforms=("cpu", "cuda", "tpu"))(*types).serialize())
    assert_near(program.call(x, *weights), function(x, *weights))


@pytest.mark.needs("kernels")
@cover(op=GROUP_NORMS, dtype=DTYPES, options=OPTIONS, has_weights=[True, False])
def test_channels_first_keep_law_1(op, dtype, options, has_weights):
    x, *weights = (array.astype(dtype) for array in operands(dims=(3, 7, 9, 24)))
    args = x, *(weights if has_weights else (None, None))

    def of_first(x, *weights):
        x = jnp.moveaxis(x, -1, 1)
        results = op.function(x, *weights, channel_axis=1, implementation="native", **options)
        return [jnp.moveaxis(y, 1, -1) for y in results]

    dy = draw("dy", x.shape, options.get("out_dtype", dtype))
    results, gradients = jax.jit(with_gradients(of_first))([dy], *args)
    assert result_errors(op, results, args, **options) == []
    assert gradient_errors(op, gradients, (dy,), args, **options) == {}
