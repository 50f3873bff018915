"""What quantised layers of `flax.linen` have besides: variables, axes, stacked layers, and kernels that are left.

Layers of several axes are in float8, too, by `dot_general`.
"""

from functools import partial

import flax.linen
import flax.nnx
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import bits, draw_x
from flax_apis import assert_close, scan_of_remat
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from library_models import COLUMNS, DIMS, E4M3, FEATURES, INT4, INT8, LinenMixed as Mixed, expected_report, linen_linear

import jaxnorm
from jaxnorm.linen import quantize_linears, using_quantized

pytestmark = pytest.mark.jax_version

QUANTISED, LEFT = expected_report("linen", "quantised")


@pytest.fixture(scope="module")
def variables():
    return Mixed().init(jax.random.key(0), draw_x(DIMS))


def dense(cls=flax.linen.Dense, features=COLUMNS, x=None, **fields):
    model = linen_linear(features, cls, x, **fields)
    return model.module, {"params": model.parameters}


def called(module, variables, *args, inputs=None, **kwargs):
    with using_quantized(inputs):
        return module.apply(variables, *args, **kwargs)


def quantised(module, variables, kernels=INT8, args=None, **options):
    return quantize_linears(module, variables, *(args or [draw_x(DIMS)]), kernels=kernels, **options)[0]


def test_a_call_says_what_it_computes_so(variables):
    new = quantised(Mixed(), variables, only=lambda path, _: path != ("last",))
    with using_quantized() as report:
        Mixed().apply(new, draw_x(DIMS))
    assert dict(report.replaced) == {path: cls for path, cls in QUANTISED.items() if path != ("last",)}
    left = {path: why for path, _, why in report.left}
    not_quantised = {(name,): "its kernel is not quantised" for name in ("last", "own_dot", "own_class", "complex")}
    assert left == {path: why for path, (_, why) in LEFT.items()} | not_quantised


def test_values_and_scales_are_in_place_of_kernels(variables):
    new = quantised(Mixed(), variables)
    flat, was = (flax.traverse_util.flatten_dict(v["params"]) for v in (new, variables))
    kernels = {(*path, "kernel") for path in QUANTISED}
    made = {(*path, name) for path in QUANTISED for name in ("values", "scales")}
    assert flat.keys() == was.keys() - kernels | made
    assert all(flat[path] is was[path] for path in was.keys() - kernels)
    assert kernels < flax.traverse_util.flatten_dict(variables["params"]).keys()


def test_the_types_of_variables_stay(variables):
    frozen = flax.core.freeze(variables)
    new = quantised(Mixed(), frozen)
    assert isinstance(new, flax.core.FrozenDict)
    assert bits(flax.core.unfreeze(new)) == bits(quantised(Mixed(), variables))


GENERAL = {
    "heads": ({"features": (4, 8)}, (3, 5, 16)),
    "from heads": ({"features": 16, "axis": (-2, -1)}, (3, 5, 4, 8)),
    "to heads from heads": ({"features": (2, 3), "axis": (-2, -1)}, (3, 5, 4, 8)),
    "axes in front": ({"features": 16, "axis": (1, 0)}, (3, 5, 8)),
}


@pytest.mark.parametrize("done", ["quantised", "quantised with its inputs", "in float8"])
@pytest.mark.parametrize("name", GENERAL)
def test_a_layer_of_several_axes_is_a_product_of_matrices(name, done):
    fields, dims = GENERAL[name]
    x = draw_x(dims)
    layer, variables = dense(flax.linen.DenseGeneral, x=x, **fields)
    kernel, bias = (variables["params"][name] for name in ("kernel", "bias"))
    axes = sorted(fields.get("axis", (-1,)))  # as Flax takes them
    rows = jnp.moveaxis(x, axes, range(-len(axes), 0))
    rows = rows.reshape(*rows.shape[: -len(axes)], -1)
    matrix = kernel.reshape(rows.shape[-1], -1)
    if done == "in float8":
        expected = jaxnorm.float8_linear(rows, matrix) + bias.ravel()
        y = layer.clone(dot_general=jaxnorm.float8_dot_general).apply(variables, x)
    else:
        inputs = INT8 if done == "quantised with its inputs" else None
        rows = jaxnorm.quantize(rows, INT8) if inputs else rows
        kernel_8 = jaxnorm.quantize_kernel(matrix, INT8)
        expected = jaxnorm.quantized_dot(rows, kernel_8, out_dtype=jnp.float32, bias=bias.ravel())
        new = quantised(layer, variables, args=[x])
        shapes = ((*bias.shape, *kernel.shape[: len(axes)]), (*bias.shape, *[1] * len(axes)))
        assert (new["params"]["values"].shape, new["params"]["scales"].shape) == shapes
        y = called(layer, new, x, inputs=inputs)
    assert_close(y, expected.reshape(*expected.shape[:-1], *bias.shape))


class Layer(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x, _=None):
        general = flax.linen.DenseGeneral(FEATURES, axis=(-2, -1), use_bias=False)
        x = jnp.sin(flax.linen.Dense(FEATURES, use_bias=False)(x))
        return jnp.sin(general(x.reshape(*x.shape[:-1], 2, -1))), None


# As many layers as there are features, so that no axis is told by its length.
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_layers_that_a_scan_of_remat_stacks(axis):
    options = {"variable_axes": {"params": axis}, "split_rngs": {"params": True}, "length": FEATURES}
    model, x = flax.linen.scan(flax.linen.remat(Layer), **options)(), draw_x(DIMS)
    layers = [Layer().init(jax.random.key(seed), x) for seed in range(FEATURES)]
    new = quantised(model, jax.tree.map(lambda *leaves: jnp.stack(leaves, axis), *layers), args=(x, None))

    expected = [quantised(Layer(), layer) for layer in layers]
    assert bits(new) == bits(jax.tree.map(lambda *leaves: jnp.stack(leaves, axis), *expected))
    y = x
    for layer in expected:
        y, _ = called(Layer(), layer, y)
    assert_close(jax.jit(partial(called, model))(new, x, None)[0], y)


def test_layers_that_vmap_stacks():
    mapped = flax.linen.vmap(flax.linen.Dense, variable_axes={"params": 1}, split_rngs={"params": True})
    x = draw_x(DIMS)
    model, single = mapped(COLUMNS, use_bias=False), flax.linen.Dense(COLUMNS, use_bias=False)
    variables = model.init(jax.random.key(0), x)
    kernels = variables["params"]["kernel"]
    assert kernels.shape == (FEATURES, DIMS[0], COLUMNS)
    new = quantised(model, variables)
    assert [new["params"][name].shape for name in ("values", "scales")] == [(32, 3, 16), (32, 3, 1)]
    for row, kernel, y in zip(x, jnp.moveaxis(kernels, 1, 0), called(model, new, x), strict=True):
        assert_close(y, called(single, quantised(single, {"params": {"kernel": kernel}}, args=[row]), row))


def test_examples_of_models_that_jax_maps():
    layer, x = flax.linen.Dense(COLUMNS), draw_x(DIMS)
    variables = jax.vmap(lambda key: layer.init(key, x))(jax.random.split(jax.random.key(0), 2))
    new = jax.jit(jax.vmap(lambda variables: quantised(layer, variables)))(variables)
    for example, y in enumerate(jax.vmap(lambda v: called(layer, v, x))(new)):
        one = jax.tree.map(lambda leaf, example=example: leaf[example], variables)
        assert_close(y, called(layer, quantised(layer, one), x))


@pytest.mark.parametrize(
    ("normalise", "call"), [(flax.linen.WeightNorm, {}), (flax.linen.SpectralNorm, {"update_stats": False})]
)
def test_a_kernel_that_is_made_at_each_call_is_left(normalise, call):
    class Model(flax.linen.Module):
        @flax.linen.compact
        def __call__(self, x):
            normalised = normalise(flax.linen.Dense(FEATURES))
            return normalised(flax.linen.Dense(FEATURES)(x), **call)

    x, model = draw_x(DIMS), Model()
    variables = model.init(jax.random.key(0), x)
    new, report = quantize_linears(model, variables, x, kernels=INT8)
    assert report.replaced == [(("Dense_1",), flax.linen.Dense)]
    assert report.left == [(("Dense_0",), flax.linen.Dense, "its kernel is made of parameters by the model")]
    expected = model.apply(variables, x)
    assert jnp.abs(called(model, new, x) - expected).max() < 0.02 * jnp.abs(expected).max()


def test_kernels_that_jax_maps_are_left():
    class Mapped(flax.linen.Module):
        @flax.linen.compact
        def __call__(self, x):
            layer = flax.linen.Dense(FEATURES, use_bias=False, parent=None)
            kernel = self.param("kernel", flax.linen.initializers.ones, (2, FEATURES, FEATURES))
            return jax.vmap(lambda kernel: layer.apply({"params": {"kernel": kernel}}, x))(kernel)

    variables = Mapped().init(jax.random.key(0), draw_x(DIMS))
    with pytest.raises(ValueError, match=r"its kernel is made of parameters by the model$"):
        quantised(Mapped(), variables)


def test_two_layers_with_the_kernel_of_one():
    class Twice(flax.linen.Module):
        @flax.linen.compact
        def __call__(self, x):
            layer = flax.linen.Dense(FEATURES)
            return layer(jnp.sin(layer(x)))

    x = draw_x(DIMS)
    variables = Twice().init(jax.random.key(0), x)
    new, report = quantize_linears(Twice(), variables, x, kernels=INT8)
    assert report.replaced == [(("Dense_0",), flax.linen.Dense)]
    layer, parameters = flax.linen.Dense(FEATURES), {"params": new["params"]["Dense_0"]}
    assert_close(called(Twice(), new, x), called(layer, parameters, jnp.sin(called(layer, parameters, x))))


def test_a_call_that_needs_more_than_an_x():
    class Model(flax.linen.Module):
        @flax.linen.compact
        def encode(self, x, train):
            x = flax.linen.Dropout(0.5)(flax.linen.Dense(FEATURES)(x), deterministic=not train)
            return flax.linen.BatchNorm(use_running_average=not train)(x)

    x = jax.ShapeDtypeStruct(DIMS, jnp.float32)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = Model().init(keys, draw_x(DIMS), train=True, method="encode")
    options = {"train": True, "mutable": ["batch_stats"], "rngs": keys, "method": "encode"}
    new, report = quantize_linears(Model(), variables, x, kernels=INT8, **options)
    assert report.replaced == [(("Dense_0",), flax.linen.Dense)]
    assert new["batch_stats"] is variables["batch_stats"]


@pytest.mark.parametrize("kernels", [INT8, E4M3], ids=["int8", "float8"])
def test_bytes_of_flax_serialization(kernels, variables):
    new = quantised(Mixed(), variables, kernels)
    data = flax.serialization.to_bytes(new)
    assert bits(flax.serialization.from_bytes(jax.tree.map(jnp.zeros_like, new), data)) == bits(new)


def mesh():
    return Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ("a", "b"))


@pytest.mark.parametrize("names", [("a", "b"), ("a",), (None, "b")])
@pytest.mark.parametrize("partitioned", [flax.linen.with_partitioning, flax.linen.with_logical_partitioning])
def test_names_of_mesh_axes_go_with_their_axes(partitioned, names):
    init = partitioned(flax.linen.initializers.lecun_normal(), names)
    layer, variables = dense(kernel_init=init)
    new = quantised(layer, variables)["params"]
    of_inputs, of_outputs = (*names, None)[:2]
    assert (new["values"].names, new["scales"].names) == ((of_outputs, of_inputs), (of_outputs, None))
    assert type(new["values"]) is type(variables["params"]["kernel"])
    shapes = jax.eval_shape(layer.init, jax.random.key(0), draw_x(DIMS))
    with jax.set_mesh(mesh()):
        assert jax.tree.structure(quantised(layer, shapes)) == jax.tree.structure({"params": new})
    plain = quantised(layer, {"params": flax.linen.meta.unbox(variables["params"])})
    assert bits(called(layer, {"params": new}, draw_x(DIMS))) == bits(called(layer, plain, draw_x(DIMS)))


def test_names_of_stacked_layers():
    init = flax.linen.with_partitioning(flax.linen.initializers.lecun_normal(), (None, "b"))
    model = scan_of_remat(lambda x: flax.linen.Dense(FEATURES, kernel_init=init)(x), name_of_axis="layers")
    variables = model.init(jax.random.key(0), draw_x(DIMS), None)
    new = quantised(model, variables, args=(draw_x(DIMS), None))
    layer = new["params"]["Dense_0"]
    assert (layer["values"].names, layer["scales"].names) == (("layers", "b", None), ("layers", "b", None))
    y, _ = called(model, new, draw_x(DIMS), None)
    plain = flax.linen.meta.unbox(new)
    assert bits(y) == bits(called(model, plain, draw_x(DIMS), None)[0])


def test_a_kernel_that_is_split_over_devices():
    layer, variables = dense()
    split = NamedSharding(mesh(), PartitionSpec(None, "b"))
    kernel = jax.device_put(variables["params"]["kernel"], split)
    new = quantised(layer, {"params": {**variables["params"], "kernel": kernel}})
    assert new["params"]["values"].sharding.is_equivalent_to(NamedSharding(mesh(), PartitionSpec("b")), 2)
    program = jax.jit(partial(called, layer)).lower(new, draw_x(DIMS)).compile()
    assert "all-gather(" not in program.as_text()
    assert_close(program(new, draw_x(DIMS)), called(layer, quantised(layer, variables), draw_x(DIMS)))


def test_what_is_left_for_a_reason():
    cast = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), dense()[1])
    given = {
        "it has batch_dims=(0,)": dense(flax.linen.DenseGeneral, batch_dims=(0,)),
        "it has batch_dims=0": dense(flax.linen.DenseGeneral, batch_dims=0),
        "its kernel is bfloat16, its param_dtype float32: give it a dtype": (dense()[0], cast),
    }
    for why, (layer, variables) in given.items():
        with pytest.raises(ValueError, match=r"^quantize_linears: there is no linear layer to quantise in ") as error:
            quantised(layer, variables)
        assert str(error.value).endswith(f":\nleft      (the model itself): {type(layer).__name__}: {why}")
    layer = flax.linen.Dense(COLUMNS, dtype=jnp.bfloat16)
    assert called(layer, quantised(layer, cast), draw_x(DIMS)).dtype == jnp.bfloat16


# A context for each type of inputs, the outer one first.
def test_only_chooses_layers_of_a_context(variables):
    new = quantised(Mixed(), variables, E4M3, only=lambda path, layer: not path[0].startswith("listed"))
    new = quantised(Mixed(), new, INT4)
    with (
        using_quantized(INT8, only=lambda path, layer: path[0].startswith("listed")) as of_int8,
        using_quantized(E4M3) as of_float8,
    ):
        Mixed().apply(new, draw_x(DIMS))
    assert dict(of_int8.replaced).keys() == {("listed_0",), ("listed_1",)}
    assert dict(of_float8.replaced).keys() == QUANTISED.keys() - dict(of_int8.replaced).keys()


def test_errors():
    layer, variables = dense()
    new = quantised(layer, variables)
    with pytest.raises(TypeError, match=r"^using_quantized: inputs .* to float8_e4m3fn, expected int8 for kern"):
        called(layer, new, draw_x(DIMS), inputs=E4M3)
    with pytest.raises(flax.errors.ScopeParamNotFoundError):
        layer.apply(new, draw_x(DIMS))
