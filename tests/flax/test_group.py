"""GroupNorm and InstanceNorm of `jaxnorm.nnx` and `jaxnorm.linen` against those of Flax that they stand in for."""

import inspect

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import DTYPES, bits, draw, draw_x
from coverage import cover
from flax_apis import APIS, assert_close, assert_gradients_close
from hlo import compiled_text, count_native_calls
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from meshes import mesh_of, placed
from native import native_calls

import jaxnorm
from jaxnorm import nnx

pytestmark = pytest.mark.jax_version

DIMS = (3, 4, 5, 12)
GROUP, INSTANCE = "GroupNorm", "InstanceNorm"
KINDS = (GROUP, INSTANCE)
# Of so few elements as an instance has here, a fast variance has lost digits that these tests look at.
OTHERS = {GROUP: {"num_groups": 4}, INSTANCE: {"use_fast_variance": False}}
ACTIVATIONS = {None: lambda y: y, "silu": jax.nn.silu, "relu": jax.nn.relu, "gelu": jax.nn.gelu}


def random_weights(kind):
    def init(mean, std):
        return lambda key, shape, dtype: mean + std * jax.random.normal(key, shape, dtype)

    return {"scale_init": init(1, 0.3), "bias_init": init(0, 0.5)} | OTHERS[kind]


def both(api, kind, x, fields, own=None):
    """Flax's norm and ours, which has some fields of its own, each as (apply, parameters)."""
    fields = random_weights(kind) | fields
    flaxs, ours = (getattr(module, kind) for module in (api.flax, api.ours))
    return api.build(flaxs, (x,), fields), api.build(ours, (x,), fields | (own or {}))


def results(api, kind, x, fields, own=None, **call):
    return [jax.jit(lambda p, x: apply(p, x, **call))(p, x) for apply, p in both(api, kind, x, fields, own)]  # noqa: B023


SERVED_BY_KERNELS = {
    "default": (GROUP, {}),
    "size of groups": (GROUP, {"num_groups": None, "group_size": 6}),
    "one group": (GROUP, {"num_groups": 1}),
    "no scale": (GROUP, {"use_scale": False}),
    "no weights": (GROUP, {"use_scale": False, "use_bias": False}),
    "exact variance": (GROUP, {"use_fast_variance": False}),
    "a large epsilon": (GROUP, {"epsilon": 0.1}),
    "half parameters": (GROUP, {"param_dtype": jnp.float16}),
    "all axes by number": (GROUP, {"reduction_axes": (1, -2, 3)}),
    "groups of devices without an axis": (GROUP, {"axis_index_groups": [[0, 1]]}),
    "instances": (INSTANCE, {}),
    "instances by another number": (INSTANCE, {"feature_axes": (3,)}),
    "instances without bias": (INSTANCE, {"use_bias": False}),
}
SERVED_BY_FLAX = {
    "some axes": (GROUP, {"reduction_axes": (2, 3)}),
    "channels that are not last": (INSTANCE, {"feature_axes": 1}),
}


@cover(api=APIS, case=SERVED_BY_KERNELS, activation=list(ACTIVATIONS))
def test_result(api, case, activation):
    kind, fields = case
    flaxs, ours = results(api, kind, draw_x(DIMS), fields, {"activation": activation})
    assert_close(ours, ACTIVATIONS[activation](flaxs))


@cover(api=APIS, case=SERVED_BY_KERNELS)
def test_a_kernel_serves(api, case):
    kind, fields = case
    x = draw_x(DIMS)
    _, (apply, parameters) = both(api, kind, x, fields)
    gradient = jax.grad(lambda *args: jnp.sin(apply(*args)).sum(), argnums=(0, 1))
    assert count_native_calls(compiled_text(gradient, parameters, x)) == native_calls("group", fwd=1, bwd=1)


@cover(api=APIS, kind=KINDS, x_dtype=DTYPES, dtype=[None, *DTYPES], param_dtype=["float32", "bfloat16"])
def test_result_for_every_dtype(api, kind, x_dtype, dtype, param_dtype):
    x = draw_x(DIMS, x_dtype)
    # Flax rounds more often: to float32 first, and then once.
    flaxs, ours = results(api, kind, x, {"dtype": dtype, "param_dtype": param_dtype})
    (apply, p), _ = both(api, kind, x, {"dtype": jnp.float32, "param_dtype": param_dtype})
    operands = jax.tree.map(lambda a: a.astype(flaxs.dtype) if api.rounds_operands else a, (p, x))
    assert_close(ours, jax.jit(apply)(*jax.tree.map(jnp.float32, operands)).astype(flaxs.dtype))


@cover(api=APIS, case=SERVED_BY_KERNELS)
def test_gradients(api, case):
    kind, fields = case
    x, dy = draw_x(DIMS), draw("dy", DIMS)

    def gradients(apply, parameters):
        return jax.jit(jax.grad(lambda p, x: (apply(p, x) * dy).sum(), argnums=(0, 1)))(parameters, x)

    flaxs, ours = (gradients(*norm) for norm in both(api, kind, x, fields))
    assert_gradients_close(ours, flaxs)


@cover(api=APIS, case=SERVED_BY_FLAX)
def test_other_axes_are_flaxs_result(api, case):
    kind, fields = case
    x = draw_x((3, 12, 5, 12))
    if kind == INSTANCE:
        fields = {"use_scale": False, "use_bias": False} | fields
    flaxs, ours = results(api, kind, x, fields)
    assert bits(ours) == bits(flaxs)


@cover(api=APIS, kind=KINDS, activation=list(ACTIVATIONS))
def test_a_mask_is_flaxs_result(api, kind, activation):
    mask = draw("mask", DIMS) > 0
    flaxs, ours = results(api, kind, draw_x(DIMS), {}, {"activation": activation}, mask=mask)
    assert_close(ours, ACTIVATIONS[activation](flaxs))


@cover(api=APIS, dims=[(3, 12), (3, 7, 12), (2, 3, 4, 5, 12)])
def test_any_number_of_positions(api, dims):
    flaxs, ours = results(api, GROUP, draw_x(dims), {})
    assert_close(ours, flaxs)


# flax.nnx has an error of its own for it.
def test_an_example_alone_is_flaxs_result():
    flaxs, ours = results(APIS["linen"], GROUP, draw_x((12,)), {})
    assert bits(ours) == bits(flaxs)


@cover(api=APIS, kind=KINDS)
def test_parameters_are_flaxs(api, kind):
    (_, flaxs), (_, ours) = both(api, kind, draw_x(DIMS), {})
    assert jax.tree.structure(ours) == jax.tree.structure(flaxs)
    assert bits(ours) == bits(flaxs)


@cover(api=APIS, kind=KINDS)
def test_the_constructor_is_flaxs(api, kind):
    flaxs, ours = (inspect.signature(getattr(module, kind)).parameters for module in (api.flax, api.ours))
    if api is APIS["linen"]:
        assert set(flaxs) <= set(ours)
        assert set(ours) - set(flaxs) == {"activation", "scale_offset", "implementation"}


def test_groups_by_position():
    rngs = flax.nnx.Rngs(0)
    x = draw_x(DIMS)
    assert nnx.GroupNorm(12, 4, rngs=rngs).num_groups == 4
    assert nnx.GroupNorm(12, None, 4, rngs=rngs).num_groups == 3
    assert jaxnorm.linen.GroupNorm(4).init_with_output(jax.random.key(0), x)[0].shape == DIMS


@cover(api=APIS, kind=KINDS)
def test_scale_offset(api, kind):
    x = draw_x(DIMS)
    own = getattr(api.ours, kind)
    apply, parameters = api.build(own, (x,), OTHERS[kind] | {"scale_offset": 1.0})
    plain, ones = api.build(getattr(api.flax, kind), (x,), OTHERS[kind])
    assert not parameters["scale"].any()
    assert_close(apply(parameters, x), plain(ones, x))


@pytest.mark.needs("several")
@cover(api=APIS, kind=KINDS)
def test_positions_that_are_split(devices, api, kind):
    mesh, x, spec = mesh_of(devices, AxisType.Auto), draw_x((4, 8, 5, 12)), P("a", "b")
    norms = [both(api, kind, x, {"axis_name": name}, {"activation": "silu"})[1] for name in ("b", None)]
    (split, parameters), (whole, _) = norms
    function = jax.shard_map(split, mesh=mesh, in_specs=(P(), spec), out_specs=spec)

    def gradients(f):
        return jax.jit(jax.grad(lambda p, x: jnp.sin(f(p, x)).sum(), argnums=(0, 1)))(parameters, x)

    assert_close(jax.jit(function)(parameters, x), whole(parameters, x))
    assert_gradients_close(gradients(function), gradients(whole))


@pytest.mark.needs("several")
@cover(api=APIS, split=[True, False])
def test_an_explicit_mesh(devices, api, split):
    """Parameters that are split otherwise than channels are Flax's to add to x."""
    x = draw_x((8, 4, 5, 16))
    (_, (apply, parameters)), mesh = both(api, GROUP, x, {}), mesh_of(devices, AxisType.Explicit)
    with jax.set_mesh(mesh):
        (placed_x,) = placed(mesh, [x], [P("a", None, None, "b" if split else None)])
        actual = jax.jit(apply)(parameters, placed_x)
        assert jax.typeof(actual).sharding.spec == jax.typeof(placed_x).sharding.spec
    np.testing.assert_allclose(actual, apply(parameters, x), rtol=1e-5, atol=3e-6)


ERRORS = {
    "a mask": (GROUP, {"scale_offset": 1.0}, {"mask": np.ones(DIMS, bool)}, ValueError, "got a mask"),
    "some axes": (GROUP, {"scale_offset": 1.0, "reduction_axes": (2, 3)}, {}, ValueError, "reduction_axes=.2, 3."),
    "two axes of channels": (
        INSTANCE,
        {"scale_offset": 1.0, "feature_axes": (2, 3), "use_scale": False, "use_bias": False},
        {},
        ValueError,
        "feature_axes=.2, 3.",
    ),
    "native with a mask": (
        GROUP,
        {"implementation": "native"},
        {"mask": np.ones(DIMS, bool)},
        RuntimeError,
        "no kernel serves a mask",
    ),
    "native with some axes": (
        GROUP,
        {"implementation": "native", "reduction_axes": (2, 3)},
        {},
        RuntimeError,
        "no kernel serves reduction_axes",
    ),
    "an unknown activation": (GROUP, {"activation": "mish"}, {}, ValueError, "unknown activation 'mish'"),
    "an unknown activation of Flax's result": (
        GROUP,
        {"activation": "mish"},
        {"mask": np.ones(DIMS, bool)},
        ValueError,
        "unknown activation 'mish'",
    ),
}


def built_and_called(api, kind, x, fields, call):
    """Linen calls a norm to make its parameters, and so finds what is wrong."""
    groups = {"num_groups": 4} if kind == GROUP else {}
    apply, parameters = api.build(getattr(api.ours, kind), (x,), groups | fields)
    return apply(parameters, x, **call)


@cover(api=APIS, case=ERRORS)
def test_errors(api, case):
    kind, fields, call, error, message = case
    with pytest.raises(error, match=message):
        built_and_called(api, kind, draw_x(DIMS), fields, call)


@cover(api=APIS, mask=[None, np.ones(DIMS, bool)])
def test_an_activation_of_jax(api, mask):
    flaxs, ours = results(api, GROUP, draw_x(DIMS), {}, {"activation": jax.nn.silu}, mask=mask)
    assert_close(ours, jax.nn.silu(flaxs))


@pytest.mark.parametrize("groups", [{"group_size": 3}, {"num_groups": None}])
def test_the_number_of_groups_is_flaxs_error(groups):
    with pytest.raises(ValueError, match="Either `num_groups` or `group_size` should be specified"):
        jaxnorm.linen.GroupNorm(**groups).init(jax.random.key(0), draw_x(DIMS))
    with pytest.raises(ValueError, match="Either `num_groups` or `group_size` should be specified"):
        nnx.GroupNorm(12, **groups, rngs=flax.nnx.Rngs(0))


class Block(flax.nnx.Module):
    def __init__(self, rngs):
        self.norm = flax.nnx.GroupNorm(12, 4, rngs=rngs)
        self.conv = flax.nnx.Conv(12, 12, (3, 3), rngs=rngs)
        self.instance = flax.nnx.InstanceNorm(12, rngs=rngs)

    def __call__(self, x):
        return x + self.instance(self.conv(jax.nn.silu(self.norm(x))))


def test_replacement_in_an_nnx_model():
    x, model, other = draw_x(DIMS), Block(flax.nnx.Rngs(0)), Block(flax.nnx.Rngs(0))
    state = flax.nnx.to_pure_dict(flax.nnx.state(model))
    report = jaxnorm.replace_norms(model)
    assert dict(report.replaced) == {("norm",): flax.nnx.GroupNorm, ("instance",): flax.nnx.InstanceNorm}
    assert report.left == []
    assert type(model.norm) is nnx.GroupNorm
    assert bits(flax.nnx.to_pure_dict(flax.nnx.state(model))) == bits(state)
    assert_close(model(x), other(x))


class LinenBlock(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x):
        h = jax.nn.silu(flax.linen.GroupNorm(4)(x))
        h = flax.linen.Conv(12, (3, 3))(h)
        h = flax.linen.InstanceNorm(name="instance")(h)
        return x + flax.linen.GroupNorm(4, name="some")(h, mask=x > 0)


def test_replacement_in_a_linen_model():
    x = draw_x(DIMS)
    variables = LinenBlock().init(jax.random.key(0), x)
    with jaxnorm.linen.replace_norms() as report:
        y = LinenBlock().apply(variables, x)
        again = LinenBlock().init(jax.random.key(0), x)
    assert {path for path, _ in report.replaced} == {("GroupNorm_0",), ("instance",)}
    assert [(path, why) for path, _, why in report.left] == [(("some",), "no kernel serves a mask")]
    assert bits(again) == bits(variables)
    assert_close(y, LinenBlock().apply(variables, x))
