"""`axis_name`: rows that are split over named axes have the statistics of whole rows, and right gradients."""

import itertools
import re
from functools import partial

import emulated
import jax
import jax.numpy as jnp
import meshes
import numpy as np
import pytest
from cases import DTYPES, KINDS, NORMS, bits, draw_bias, draw_scale, draw_x
from coverage import cover, over
from hlo import collectives
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from meshes import assert_parts_close, exchanged, gradients, mesh_of, part_spec, place, result_spec, results, specs_of
from table import EACH, GATED_ACTIVATIONS, PADDED, QUANTIZED, QUANTIZED_ACTIVATIONS, QUANTIZED_SUMS, ROTARY

import jaxnorm
from jaxnorm import Quantization

pytestmark = pytest.mark.jax_version

# Groups of columns are of one device, and so are a padded row and what is rotated.
WHOLE = (*PADDED, *ROTARY, *GATED_ACTIVATIONS, *QUANTIZED_ACTIVATIONS)
OF_EACH = (*EACH, QUANTIZED[2], QUANTIZED_SUMS[2])
SPLIT = [op for op in OF_EACH if op not in WHOLE and (op.kind != "rms" or "group_size" not in op.small.options)]
vma = over(SPLIT, check_vma=lambda op: {"vma": True, "no vma": False})


def shard(op, mesh, out_specs, check_vma=True):
    specs = specs_of(op, part_spec(op))
    return partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=check_vma)


def of_parts(devices, function, in_specs, out_specs=None, *, axis_name="b", **options):
    """The function of parts of rows, in a `shard_map`."""
    out_specs = in_specs if out_specs is None else out_specs
    named, mesh = partial(function, axis_name=axis_name), mesh_of(devices, AxisType.Auto)
    return jax.shard_map(named, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)


def gradient_of_sines(norm):
    return jax.grad(lambda x: jnp.sin(norm(x)).sum())


@pytest.mark.on_emulator
@vma
def test_forward_in_shard_map(devices, op, check_vma):
    mesh, spec = mesh_of(devices, AxisType.Auto), part_spec(op)
    args = place(op, mesh, spec)
    # The scales of quantised rows are not split.
    out_specs = [P("a") if r.shape[-1] == 1 else spec for r in jax.eval_shape(results(op), *args)]
    function = jax.jit(shard(op, mesh, out_specs, check_vma)(results(op, axis_name="b")))
    assert_parts_close(function(*args), jax.jit(results(op))(*args))
    assert collectives(function.lower(*args).compile().as_text()) == exchanged(op, mesh, spec, with_gradients=False)


# check_vma or not: the weights are the same along a, so their gradients are the sums over it.
@vma
def test_gradients_of_shard_map(devices, op, check_vma):
    mesh, spec = mesh_of(devices, AxisType.Auto), part_spec(op)
    args = place(op, mesh, spec)
    function = jax.jit(gradients(op, shard(op, mesh, result_spec(op, spec), check_vma), axis_name="b"))
    assert_parts_close(function(*args), jax.jit(gradients(op))(*args))
    # Where types do not say that a result is the same for all parts, its cotangent is exchanged as one that is not.
    if check_vma or not op.is_by_row:
        assert collectives(function.lower(*args).compile().as_text()) == exchanged(op, mesh, spec, with_gradients=True)


@pytest.mark.on_emulator
@over(SPLIT)
def test_gradients_in_shard_map(devices, op):
    mesh = mesh_of(devices, AxisType.Auto)
    args, out_specs = place(op, mesh, part_spec(op)), [specs_of(op, part_spec(op))[i] for i in op.all]
    inside = jax.jit(shard(op, mesh, out_specs)(gradients(op, axis_name="b")))
    assert_parts_close(inside(*args), jax.jit(gradients(op))(*args))


@pytest.mark.parametrize("kind", NORMS)
def test_second_derivative(any_devices, kind):
    x, split = draw_x((4, 16)), of_parts(any_devices, NORMS[kind], P("a", "b"))
    actual, expected = (jax.jit(gradient_of_sines(gradient_of_sines(norm)))(x) for norm in (split, NORMS[kind]))
    assert_parts_close(actual, expected)


# On a GPU the statistics and the result of a part are kernels, if these take the dtypes.
@pytest.mark.on_emulator
@cover(kind=KINDS, dtypes=[*itertools.product(DTYPES, DTYPES), ("float64", "float32")])
@emulated.wherever
def test_dtypes(devices, kind, dtypes):
    x_dtype, out_dtype = dtypes
    with jax.enable_x64(x_dtype == "float64"):
        args = draw_x((8, 64)).astype(x_dtype), draw_scale((64,), "bfloat16"), draw_bias((64,))
        norm = partial(NORMS[kind], out_dtype=out_dtype, multiply_before_cast=False)
        specs = P("a", "b"), P("b"), P("b")
        actual, expected = jax.jit(of_parts(devices, norm, specs, specs[0]))(*args), norm(*args)
    assert actual.dtype == expected.dtype
    # x_hat, of up to 4, may be rounded to the neighbour before it is multiplied.
    ulp = float(jnp.finfo(out_dtype).eps)
    expected = beside(expected, *args[1:], x_dtype) if jnp.finfo(x_dtype).eps > ulp else [expected]
    actual, *expected = (np.float32(array) for array in (actual, *expected))
    nearest = np.choose(np.argmin([np.abs(actual - other) for other in expected], axis=0), expected)
    np.testing.assert_allclose(actual, nearest, rtol=ulp, atol=4 * ulp + 1e-6)
    assert np.mean(nearest != expected[0]) <= 0.01


def beside(y, scale, bias, dtype):
    """y, and what it is if x_hat, which is rounded to a narrower dtype, goes to either neighbour there."""
    scale, bias = (weight.astype(y.dtype) for weight in (scale, bias))
    x_hat = ((y - bias) / scale).astype(dtype)
    neighbours = (jnp.nextafter(x_hat, jnp.full_like(x_hat, end)) for end in (jnp.inf, -jnp.inf))
    return [y, *(other.astype(y.dtype) * scale + bias for other in neighbours)]


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("implementation", [None, "xla"])
@vma
def test_features_beside_an_axis_of_rows(devices, op, check_vma, implementation, axis_type):
    mesh, specs = mesh_of(devices, axis_type), specs_of(op, P(None, *part_spec(op)[1:]))
    split = {"in_specs": specs, "out_specs": result_spec(op, specs[0]), "axis_names": {"b"}, "check_vma": check_vma}
    args = op.draw(meshes.size_of(op))
    with jax.set_mesh(mesh), jaxnorm.implementation(implementation):
        of_parts = gradients(op, partial(jax.shard_map, mesh=mesh, **split), axis_name="b")
        actual = jax.jit(of_parts)(*place(op, mesh, part_spec(op)))
    assert_parts_close(jax.device_get(actual), jax.device_get(jax.jit(gradients(op))(*args)))


# Where JAX 0.10 linearises the body of a loop, it keeps the rules of primitives alone.
@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("kind", NORMS)
def test_second_derivatives_of_a_loop_beside_an_explicit_axis_of_rows(devices, kind, implementation):
    mesh, spec = mesh_of(devices, AxisType.Explicit), P(None, None, "b")
    x = draw_x((8, 4, 16))

    def second(transform, **given):
        def layer(x, _):
            return x + jax.vmap(partial(NORMS[kind], **given), 1, 1)(x), None

        layers = transform(lambda x: jax.lax.scan(layer, x, length=2)[0])
        gradient = gradient_of_sines(layers)
        return jax.jit(jax.grad(lambda x: jnp.square(gradient(x)).sum()))

    split = partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"b"})
    with jax.set_mesh(mesh), jaxnorm.implementation(implementation):
        actual = second(split, axis_name="b")(jax.device_put(x, NamedSharding(mesh, P("a", None, "b"))))
    assert_parts_close(jax.device_get(actual), jax.device_get(second(lambda function: function)(x)))


# Of parts of rows as of whole ones, not all that the formula computes has a kernel.
WITHOUT_KERNEL = {
    "half types mixed": ((6, 16), (16,), (16,), {"out_dtype": "float16"}, "bfloat16"),
    "heads that are not neighbours": ((2, 3, 5, 8), (2, 1, 5, 8), (8,), {}, "float32"),
    "heads with long rows": ((2, 3, 20_000), (3, 20_000), (20_000,), {}, "float32"),
    "heads of float64": ((4, 2, 8), (2, 8), (8,), {}, "float64"),
}


@pytest.mark.parametrize("name", WITHOUT_KERNEL)
@pytest.mark.parametrize("kind", NORMS)
def test_what_has_no_kernel(devices, kind, name):
    dims, *weights, options, dtype = WITHOUT_KERNEL[name]
    specs = tuple(P(*(None for _ in shape[1:]), "b") for shape in (dims, *weights))
    with jax.enable_x64(dtype == "float64"):
        x, *others = (of(shape) for of, shape in zip((draw_x, draw_scale, draw_bias), (dims, *weights), strict=True))
        args = [x.astype(dtype), *(w.astype("float64" if dtype == "float64" else "float32") for w in others)]

        def results(norm):
            def loss(x, scale, bias):
                return jnp.sin(norm(x, scale, bias).astype(scale.dtype)).sum()

            return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))

        norm = partial(NORMS[kind], **options)
        actual, expected = results(of_parts(devices, norm, specs, specs[0]))(*args), results(norm)(*args)
    tolerance = {"bfloat16": 2e-2, "float32": 1e-4, "float64": 1e-12}[dtype]
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == e.dtype
        a, e = np.float64(a), np.float64(e)
        assert np.linalg.norm(a - e) <= tolerance * np.linalg.norm(e)


@pytest.mark.parametrize("kind", NORMS)
def test_two_mesh_axes(any_devices, kind):
    x, split = draw_x((4, 64)), of_parts(any_devices, NORMS[kind], P(None, ("a", "b")), axis_name=("a", "b"))
    assert_parts_close(jax.jit(split)(x), NORMS[kind](x))


@over([op for op in SPLIT if not op.has_positions])
def test_vmap(op):
    args = op.draw(meshes.size_of(op))
    parts = [jnp.stack(jnp.split(arg, 2, -1)) for arg in args]
    forward = jax.vmap(results(op, axis_name="part"), axis_name="part")(*parts)
    backward = gradients(op, partial(jax.vmap, axis_name="part"), axis_name="part")(*parts)

    def whole(part, expected):
        # The scales of quantised rows are of all parts.
        return part[0] if part.shape[1:] == expected.shape else jnp.concatenate(list(part), -1)

    # What all parts have is as often differentiated, too.
    backward = [g / 2 for g in backward] if op.is_by_row else backward
    for actual, expected in ((forward, results(op)(*args)), (backward, gradients(op)(*args))):
        assert_parts_close(jax.tree.map(whole, actual, expected), expected)


@pytest.mark.parametrize("kind", NORMS)
def test_pmap(devices, kind):
    x = draw_x((4, 16 * len(devices)))
    parts = jnp.stack(jnp.split(x, len(devices), -1))

    named = partial(NORMS[kind], axis_name="part")
    split = jax.pmap(gradient_of_sines(named), axis_name="part", devices=devices)
    assert_parts_close(jnp.concatenate(list(split(parts)), -1), gradient_of_sines(NORMS[kind])(x))


def test_vmap_in_shard_map_over_what_is_not_split(devices):
    def norm(x, axis_name):
        return jax.vmap(partial(jaxnorm.layer_norm, axis_name=axis_name))(x)

    x = draw_x((3, 4, 16))
    assert_parts_close(jax.jit(of_parts(devices, norm, P(None, "a", "b")))(x), jaxnorm.layer_norm(x))


# Law 8. Of floats, not every backend's maximum over devices keeps a NaN.
def test_a_nan_on_one_device_is_in_the_scale_of_its_row(devices):
    x = draw_x((4, 256)).at[1, 3].set(jnp.nan)
    to = Quantization(jnp.float8_e4m3fn)

    def scales(x, **given):
        return jaxnorm.rms_norm_quantized(x, quantization=to, **given).quantized.scales

    assert bits(jnp.isnan(jax.jit(of_parts(devices, scales, P(None, "b"), P()))(x))) == bits(jnp.isnan(scales(x)))


BAD = {
    "not bound": ({"axis_name": "rows"}, ValueError, "no axis 'rows' is bound here.*jax.shard_map"),
    "not bound of two": ({"axis_name": ("part", "rows")}, ValueError, "no axis 'rows' is bound here"),
    "twice": ({"axis_name": ("part", "part")}, ValueError, r"axis_name=\('part', 'part'\) must name .* each once"),
    "empty": ({"axis_name": ()}, ValueError, "at least one axis"),
    "native": ({"axis_name": "part", "implementation": "native"}, RuntimeError, "axis_name is given"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_bad_axis_names(name, case):
    options, error, message = BAD[case]
    with pytest.raises(error, match=f"^{name}: .*{message}"):
        jax.vmap(partial(getattr(jaxnorm, name), **options), axis_name="part")(draw_x((2, 8)))


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (jaxnorm.add_rms_norm, {"pad_to": 8}, "pad_to=8 with axis_name='part'"),
        (jaxnorm.gated_rms_norm, {"group_size": 2, "gate_first": True}, "axis_name='part' with group_size=2"),
    ],
    ids=["padded", "grouped"],
)
def test_what_has_no_part(function, options, message):
    norm = partial(function, axis_name="part", **options)
    with pytest.raises(ValueError, match=re.escape(message)):
        jax.vmap(norm, axis_name="part")(draw_x((2, 4)), draw_x((2, 4)))
