"""`QKNormRotary` of both Flax APIs: its parameters, and the function's results."""

import flax
import jax
import jax.numpy as jnp
import pytest
from cases import bits, draw
from coverage import cover
from flax_apis import apart

import jaxnorm
import jaxnorm.linen
import jaxnorm.nnx

pytestmark = pytest.mark.jax_version

H, K, D = 4, 2, 16
POSITIONS = jnp.arange(6)
# Options of the function, which are fields too.
OPTIONS = {
    "none": {},
    "Gemma's offset": {"scale_offset": 1.0, "theta": 1e6},
    "a part, interleaved": {"rotary_dim": 8, "interleaved": True, "normalize": "layer"},
    "heads before tokens": {"axis_of_heads": -3, "epsilon": 0.1},
    "the formula": {"implementation": "jnp"},
}


def draw_inputs(options, dtype="float32"):
    q, k = (draw(name, (3, 6, count, D), dtype) for name, count in (("q", H), ("k", K)))
    return tuple(x.swapaxes(1, 2) for x in (q, k)) if options.get("axis_of_heads") == -3 else (q, k)


def random_scale(key, shape, dtype):
    return 1 + 0.3 * jax.random.normal(key, shape, dtype)


def build(api, inputs, *, per_head=False, **fields):
    """A function of parameters and inputs, and the parameters."""
    if api == "linen":
        module = jaxnorm.linen.QKNormRotary(per_head=per_head, **fields)
        variables = module.init(jax.random.key(0), *inputs)
        return lambda p, *args, **tables: module.apply({"params": p}, *args, **tables), variables.get("params", {})
    heads = {"heads": (H, K)} if per_head else {}
    return apart(jaxnorm.nnx.QKNormRotary(D, rngs=flax.nnx.Rngs(0), **heads, **fields))


@cover(api=["nnx", "linen"], options=OPTIONS, per_head=[False, True])
def test_results_are_the_functions(api, options, per_head):
    inputs = draw_inputs(options)
    apply, parameters = build(api, inputs, per_head=per_head, scale_init=random_scale, **options)
    function = lambda p, *args: jaxnorm.qk_norm_rotary(*args, **p, positions=POSITIONS, **options)  # noqa: E731
    expected = jax.jit(function)(parameters, *inputs)
    assert {name: p.shape for name, p in parameters.items()} == {
        "q_scale": (H, D) if per_head else (D,),
        "k_scale": (K, D) if per_head else (D,),
    }
    assert bits(jax.jit(apply)(parameters, *inputs, POSITIONS)) == bits(expected)


@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_the_arrays_of_a_call(api):
    inputs = draw_inputs({})
    apply, parameters = build(api, inputs)
    angles = POSITIONS[:, None] * jnp.asarray([1.0, 0.5, 0.25, 0.125, 0.1, 0.05, 0.02, 0.01])
    by_tables = apply(parameters, *inputs, cos=jnp.cos(angles), sin=jnp.sin(angles))
    by_frequencies = apply(parameters, *inputs, frequencies=angles[1])
    for a, b in zip(by_tables, by_frequencies, strict=True):
        assert jnp.allclose(a, b, atol=1e-5)


@cover(api=["nnx", "linen"], fields=[{"use_scale": False}, {"normalize": False}])
def test_without_parameters(api, fields):
    inputs = draw_inputs({})
    apply, parameters = build(api, inputs, **fields)
    normalize = fields.get("normalize", True)
    assert not parameters
    assert bits(apply({}, *inputs)) == bits(jaxnorm.qk_norm_rotary(*inputs, normalize=normalize))


@cover(api=["nnx", "linen"], dtype=[None, "bfloat16"], given=["float32", "bfloat16", "float16"])
def test_dtypes(api, dtype, given):
    inputs = draw_inputs({}, given)
    apply, parameters = build(api, inputs, dtype=dtype, param_dtype="float16")
    assert [p.dtype for p in parameters.values()] == ["float16"] * 2
    assert [y.dtype for y in apply(parameters, *inputs)] == [dtype or given] * 2


@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_an_offset_makes_the_default_scales_zeros(api):
    _, parameters = build(api, draw_inputs({}), scale_offset=1.0)
    assert all((p == 0).all() for p in parameters.values())
    _, parameters = build(api, draw_inputs({}))
    assert all((p == 1).all() for p in parameters.values())


@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_it_is_rounded_once(api):
    def call():
        apply, parameters = build(api, draw_inputs({}), multiply_before_cast=False)
        apply(parameters, *draw_inputs({}))

    with pytest.raises(ValueError, match=r"^QKNormRotary: multiply_before_cast=False, expected True: a rotary"):
        call()
