"""The norms of `jaxnorm.nnx` and `jaxnorm.linen` against those of Flax that they stand in for."""

import inspect
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import DTYPES, KINDS, bits, draw, draw_x
from coverage import cover
from flax_apis import APIS, SERVED_BY_FLAX, SERVED_BY_KERNELS, assert_close, assert_gradients_close
from hlo import compiled_text, count_native_calls
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh_of
from native import native_calls

pytestmark = pytest.mark.jax_version

# Rows with a vectorised part and a rest; three axes, as norms of several axes and of axes in the middle need.
DIMS = (4, 6, 37)
# A gradient has its primal's dtype: that is x's and the parameters', and one result of a dtype of its own.
GRADIENT_DTYPES = [*product(DTYPES, [None], ["float32", "bfloat16"]), ("float32", "bfloat16", "float32")]


def results(api, kind, x, fields, **call):
    """What Flax's norm gives and what ours does."""
    return [jax.jit(lambda p, x: apply(p, x, **call))(p, x) for apply, p in api.both(kind, x, **fields)]  # noqa: B023


def results_rounded_once(api, kind, x, fields):
    """The same, Flax's in float32 but for a last rounding: on a GPU it rounds every step to a half type."""
    flaxs, ours = results(api, kind, x, fields)
    (apply, p), _ = api.both(kind, x, **fields)
    operands = jax.tree.map(lambda a: a.astype(flaxs.dtype) if api.rounds_operands else a, (p, x))
    (apply, _), _ = api.both(kind, x, **fields | {"dtype": jnp.float32})
    return jax.jit(apply)(*jax.tree.map(jnp.float32, operands)).astype(flaxs.dtype), ours


# Every dtype of x with every dtype asked of the result, and with parameters that are half as well.
@cover(kind=KINDS, api=APIS, x_dtype=DTYPES, dtype=[None, *DTYPES], param_dtype=["float32", "bfloat16"])
def test_result_for_every_dtype(api, kind, x_dtype, dtype, param_dtype):
    fields = {"dtype": dtype, "param_dtype": param_dtype}
    flaxs, ours = results_rounded_once(api, kind, draw_x(DIMS, x_dtype), fields)
    assert_close(ours, flaxs)


@cover(kind=KINDS, api=APIS, fields=SERVED_BY_KERNELS)
def test_result_of_a_kernel(api, kind, fields):
    flaxs, ours = results_rounded_once(api, kind, draw_x(DIMS), fields)
    assert_close(ours, flaxs)


@cover(kind=KINDS, api=APIS, fields=SERVED_BY_KERNELS)
def test_a_kernel_serves(api, kind, fields):
    x = draw_x(DIMS)
    _, (apply, parameters) = api.both(kind, x, **fields)
    assert count_native_calls(compiled_text(apply, parameters, x)) == native_calls(kind, fwd=1)


@cover(kind=KINDS, api=APIS, fields=SERVED_BY_FLAX)
def test_other_axes_are_flaxs_result(api, kind, fields):
    flaxs, ours = results(api, kind, draw_x(DIMS), fields)
    assert bits(ours) == bits(flaxs)


@cover(kind=KINDS, api=APIS, dims=[DIMS, DIMS[-1:]])
def test_mask_is_flaxs_result(api, kind, dims):
    mask = draw("mask", dims) > 0
    flaxs, ours = results(api, kind, draw_x(DIMS), {}, mask=mask)
    assert bits(ours) == bits(flaxs)


@cover(kind=KINDS, api=APIS)
def test_axis_name_is_flaxs_result(api, kind):
    x = draw_x(DIMS)
    norms = api.both(kind, x, axis_name="shard")
    flaxs, ours = (jax.vmap(lambda x: apply(p, x), axis_name="shard")(x) for apply, p in norms)  # noqa: B023
    # Ours has the exact variance, and so not Flax's bits.
    np.testing.assert_allclose(ours, flaxs, rtol=2e-5, atol=2e-5)


@pytest.mark.needs("several")
@cover(kind=KINDS, api=APIS)
def test_axis_index_groups_are_flaxs_result(api, kind, devices):
    half = len(devices) // 2
    groups = (tuple(range(half)), tuple(range(half, 2 * half)))
    x = draw_x((2 * half, *DIMS[1:]))
    mesh = jax.sharding.Mesh(devices, "shard")
    over_devices = partial(jax.shard_map, mesh=mesh, in_specs=P("shard"), out_specs=P("shard"), check_vma=False)
    norms = api.both(kind, x[:1], axis_name="shard", axis_index_groups=groups)
    flaxs, ours = (jax.jit(over_devices(partial(apply, p)))(x) for apply, p in norms)
    assert bits(ours) == bits(flaxs)


@cover(kind=KINDS, api=APIS, dtype=[jnp.int32, jnp.complex64])
def test_dtypes_without_a_kernel_are_flaxs_result(api, kind, dtype):
    flaxs, ours = results(api, kind, jnp.round(draw_x(DIMS)).astype(dtype), {})
    assert ours.dtype == flaxs.dtype
    assert bits(ours) == bits(flaxs)


@cover(kind=KINDS, api=APIS, fields=[{}, {"dtype": jnp.float64}, {"param_dtype": jnp.float64}])
def test_float64_is_flaxs_result(api, kind, fields):
    with jax.enable_x64(True):
        flaxs, ours = results(api, kind, draw_x(DIMS).astype(jnp.float32 if fields else jnp.float64), fields)
        assert ours.dtype == jnp.float64
        assert bits(ours) == bits(flaxs)


# A parameter that is split otherwise than x splits Flax's result.
@cover(kind=KINDS, api=APIS, x_spec=[P("a"), P("a", None, "b")], spec=[P(), P("b")])
def test_shardings_of_an_explicit_mesh_are_flaxs(api, kind, devices, x_spec, spec):
    mesh = mesh_of(devices, AxisType.Explicit)
    norms = api.both(kind, draw_x((8, 6, 32)))
    with jax.set_mesh(mesh):
        x = jax.device_put(draw_x((8, 6, 32)), NamedSharding(mesh, x_spec))
        (flaxs, flaxs_dp), (ours, ours_dp) = (
            (apply(p, x), jax.grad(lambda p: apply(p, x).sum())(p))  # noqa: B023
            for apply, p in ((apply, jax.device_put(p, NamedSharding(mesh, spec))) for apply, p in norms)
        )
        assert jax.typeof(ours) == jax.typeof(flaxs)
        assert jax.tree.map(jax.typeof, ours_dp) == jax.tree.map(jax.typeof, flaxs_dp)
        np.testing.assert_allclose(ours, flaxs, rtol=2e-5, atol=2e-5)


@cover(kind=KINDS, api=APIS)
def test_half_input_is_not_widened_before_the_kernel(api, kind):
    x = draw_x(DIMS, "bfloat16")
    _, (apply, parameters) = api.both(kind, x)
    program = jax.make_jaxpr(apply)(parameters, x)
    assert program.out_avals[0].dtype == jnp.float32
    assert "convert_element_type" not in str(program)


@cover(kind=KINDS, api=APIS, dtypes=GRADIENT_DTYPES)
def test_gradients(api, kind, dtypes):
    x_dtype, dtype, param_dtype = dtypes
    x, weights = draw_x(DIMS, x_dtype), draw("dy", DIMS)
    norms = api.both(kind, x, dtype=dtype, param_dtype=param_dtype)

    def gradients(apply, parameters):
        return jax.jit(jax.grad(lambda p, x: (apply(p, x) * weights).sum(), argnums=(0, 1)))(parameters, x)

    flaxs, ours = (gradients(*norm) for norm in norms)
    assert_gradients_close(ours, flaxs, through=dtype)


@cover(kind=KINDS, api=APIS)
def test_class_and_call_are_flaxs(api, kind):
    flaxs, ours = api.classes(kind)
    assert issubclass(ours, flaxs)
    assert ours.__name__ == flaxs.__name__
    call = [inspect.signature(cls.__call__).parameters for cls in (flaxs, ours)]
    assert [(p.name, p.kind, p.default) for p in call[1].values()] == [
        (p.name, p.kind, p.default) for p in call[0].values()
    ]


@cover(kind=KINDS, api=APIS)
def test_parameters_are_flaxs(api, kind):
    (_, flaxs), (_, ours) = api.both(kind, draw_x(DIMS), param_dtype=jnp.bfloat16)
    assert flaxs.keys() == ours.keys()
    assert bits(ours) == bits(flaxs)
