"""Both Flax APIs behind one interface, so that a statement about a norm is written once."""

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np

import jaxnorm.linen
import jaxnorm.nnx

NAMES = {"rms": "RMSNorm", "layer": "LayerNorm"}
ADD_NAMES = {"rms": "AddRMSNorm", "layer": "AddLayerNorm"}
QUANTIZED_NAMES = {"rms": "QuantizedRMSNorm", "layer": "QuantizedLayerNorm"}


def _random_scale(key, shape, dtype):
    return 1 + 0.3 * jax.random.normal(key, shape, dtype)


def _random_bias(key, shape, dtype):
    return 0.5 * jax.random.normal(key, shape, dtype)


def _random(kind):
    return {"scale_init": _random_scale} | ({"bias_init": _random_bias} if kind == "layer" else {})


# Fields of Flax's norms.
SERVED_BY_KERNELS = [
    {},
    {"use_scale": False},
    {"use_fast_variance": False},
    {"epsilon": 0.1},  # large enough to be seen in the result
    {"dtype": jnp.bfloat16},
    {"param_dtype": jnp.float16},
    {"reduction_axes": 2, "feature_axes": (-1,)},
    {"reduction_axes": (-1, -2), "feature_axes": (1, 2)},
    {"reduction_axes": -1, "feature_axes": (1, 2)},  # a scale for each head
    {"axis_index_groups": [[0, 1]]},  # Flax reads it with an axis_name only
]
SERVED_BY_FLAX = [
    {"reduction_axes": 1, "feature_axes": 1},
    {"reduction_axes": (0, 2), "feature_axes": 2},
    {"reduction_axes": (1, 2), "feature_axes": -1},
    {"reduction_axes": -1, "feature_axes": (0, 2)},
    {"reduction_axes": (0, 1), "feature_axes": -1, "use_fast_variance": False},
]


class Api:
    """`flax` and `ours` are the two modules that hold the classes. Parameters are a dict of arrays."""

    def classes(self, kind):
        return getattr(self.flax, NAMES[kind]), getattr(self.ours, NAMES[kind])

    def both(self, kind, x, **fields):
        """Flax's norm and ours, each as `(apply, parameters)` with `apply(parameters, x, **call)`."""
        return tuple(self.build(cls, (x,), _random(kind) | fields) for cls in self.classes(kind))

    def both_added(self, kind, x, residual, **fields):
        """The like with `apply(parameters, x, residual, **call)`, which give (y, x + residual)."""
        flaxs, parameters = self.build(self.classes(kind)[0], (x,), _random(kind) | fields)

        def add_first(parameters, x, residual, **call):
            total = (jnp.float32(x) + jnp.float32(residual)).astype(residual.dtype)
            return flaxs(parameters, total, **call), total

        ours = getattr(self.ours, ADD_NAMES[kind])
        return (add_first, parameters), self.build(ours, (x, residual), _random(kind) | fields)

    def own(self, kind, *inputs, names=NAMES, **fields):
        """Our norm alone, or that of other `names`."""
        return self.build(getattr(self.ours, names[kind]), inputs, _random(kind) | fields)

    def gated(self, variant, inputs, **fields):
        """Our gated norm."""
        return self.build(self.ours.GatedRMSNorm, inputs, variant._asdict() | fields)

    def quantized(self, kind, *inputs, call=None, **fields):
        """Our quantised norm; `call` are keywords of a call that makes its parameters."""
        return self.build(getattr(self.ours, QUANTIZED_NAMES[kind]), inputs, _random(kind) | fields, call or {})


def apart(module):
    """Of nnx: `apply(parameters, *inputs, **call)`, and the parameters."""
    definition, state = flax.nnx.split(module)

    def apply(parameters, *inputs, **call):
        restored = jax.tree.map(lambda a: a, state)
        flax.nnx.replace_by_pure_dict(restored, parameters)
        return flax.nnx.merge(definition, restored)(*inputs, **call)

    return apply, flax.nnx.to_pure_dict(state)


class Nnx(Api):
    flax, ours = flax.nnx, jaxnorm.nnx
    rounds_operands = True  # to the result's dtype, before it computes

    @staticmethod
    def build(cls, inputs, fields, call=None):
        axes = np.atleast_1d(fields.get("feature_axes", -1))
        module = cls(int(np.prod([inputs[0].shape[axis] for axis in axes])), rngs=flax.nnx.Rngs(0), **fields)
        return apart(module)


class Linen(Api):
    flax, ours = flax.linen, jaxnorm.linen
    rounds_operands = False

    @staticmethod
    def build(cls, inputs, fields, call=None):
        # Parameters are made by a call that needs no mapped axis.
        variables = cls(**fields | {"axis_name": None}).init(jax.random.key(0), *inputs, **call or {})

        def apply(parameters, *inputs, **call):
            return cls(**fields).apply({"params": parameters}, *inputs, **call)

        return apply, dict(variables.get("params", {}))


APIS = {"nnx": Nnx(), "linen": Linen()}


def scanned(x, layers, call=lambda x, layer: layer(x) + x):
    """Stacked layers of nnx, one after the other."""
    carry = flax.nnx.Carry
    return flax.nnx.scan(call, in_axes=(carry, 0), out_axes=carry)(x, layers)


def scan_of_remat(branch):
    """Three stacked layers of linen, each of x and what `branch` makes of it."""

    class Layer(flax.linen.Module):
        @flax.linen.compact
        def __call__(self, x, _):
            return x + branch(x), None

    options = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 3}
    return flax.linen.scan(flax.linen.remat(Layer), **options)()


def assert_close(actual, flaxs):
    """Equal dtypes, and values that may differ as two orders of the same float32 arithmetic do.

    That is a few roundings of the largest terms, which are about 5 here; and in a half type one unit in the last
    place, where the difference decides which way the result is rounded.
    """
    assert actual.dtype == flaxs.dtype
    rtol = 0 if actual.dtype == jnp.float32 else float(jnp.finfo(actual.dtype).eps)
    np.testing.assert_allclose(actual.astype(jnp.float32), flaxs.astype(jnp.float32), rtol=rtol, atol=3e-6)


def assert_gradients_close(actual, flaxs, through=None):
    """Leaf by leaf in relative L2 error: some hundred roundings in float32, one of each element in a half type.

    `through` is a dtype that values were rounded to on their way.
    """
    assert jax.tree.structure(actual) == jax.tree.structure(flaxs)
    for ours, theirs in zip(jax.tree.leaves(actual), jax.tree.leaves(flaxs), strict=True):
        assert ours.dtype == theirs.dtype
        limit = max(1e-5, *(float(jnp.finfo(dtype).eps) for dtype in (ours.dtype, through or ours.dtype)))
        ours, theirs = np.float64(ours), np.float64(theirs)
        assert np.linalg.norm(ours - theirs) <= limit * np.linalg.norm(theirs)
