"""Layers of both Flax APIs behind one interface, so that a statement about a layer is written once."""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ADDS, KINDS, NORMS, bits, draw, draw_gate, draw_residual, draw_up, draw_x
from coverage import cover
from hlo import compiled_text, count_native_calls
from native import is_platform_with_kernels, native_calls
from quantizing import QUANTIZED

import jaxnorm
from jaxnorm import Quantization

# Rows with a vectorised part and a rest; three axes, as norms of several axes and of axes in the middle need.
DIMS = (4, 6, 37)
WIDE = (4, 6, 128)  # of one group of 128 and of two of 64
NAMES, INT8 = {"rms": "RMSNorm", "layer": "LayerNorm"}, Quantization("int8")


class Row(NamedTuple):
    """A class of both APIs, and the function of its inputs, and of its parameters and options by name."""

    name: str
    function: Callable[..., Any]
    draws: tuple[Callable[..., Any], ...]
    dims: Any = DIMS
    kind: str = ""  # in the names of its native calls
    flaxs: str | None = None  # Flax's class with the same parameters
    needed: Mapping[str, Any] = MappingProxyType({})  # fields, and options of the function
    beside: Mapping[str, Any] = MappingProxyType({})  # fields alone


def _random(mean, std):
    return lambda key, shape, dtype: mean + std * jax.random.normal(key, shape, dtype)


def _heads(name, count, axis):
    def drawn(dims, dtype="float32"):
        heads = draw(name, (*dims[:2], count, dims[2]), dtype)
        return heads.swapaxes(1, 2) if axis == -3 else heads

    return drawn


def _rotary(**needed):
    axis = needed.get("heads_axis", -2)
    draws = (_heads("q", 4, axis), _heads("k", 2, axis), lambda dims, dtype=None: jnp.arange(dims[1]))

    def function(q, k, positions, **options):
        return jaxnorm.qk_norm_rotary(q, k, positions=positions, **options)

    return Row("QKNormRotary", function, draws, (3, 6, 16), needed=needed)


def _quantized(kind, draws):
    def function(x, residual=None, **options):
        return QUANTIZED[kind](x, residual=residual, **options)

    return Row(f"Quantized{NAMES[kind]}", function, draws, WIDE, kind, NAMES[kind], {"quantization": INT8})


def _activation(of=draw_x, dims=(4, 6, 60), **needed):
    return Row("GatedActivation", jaxnorm.gated_activation, (of,), dims, needed=needed)


INSTANCE = functools.partial(jaxnorm.group_norm, group_size=1)
SUMS = {"jaxnorm_segment_sum": 1}  # the native call of a lookup's gradient
GATE, SUM, OF_60, OF_GROUPS = (draw_x, draw_gate), (draw_x, draw_residual), (4, 6, 60), (3, 4, 5, 12)
ROWS = {
    **{kind: Row(NAMES[kind], NORMS[kind], (draw_x,), DIMS, kind, NAMES[kind]) for kind in KINDS},
    **{f"add {kind}": Row(f"Add{NAMES[kind]}", ADDS[kind], SUM, DIMS, kind, NAMES[kind]) for kind in KINDS},
    **{f"quantized {kind}": _quantized(kind, (draw_x,)) for kind in KINDS},
    **{f"quantized sum {kind}": _quantized(kind, SUM) for kind in KINDS},
    "gated": Row("GatedRMSNorm", jaxnorm.gated_rms_norm, GATE, OF_60, "gated_rms", "RMSNorm", {"gate_first": True}),
    "group": Row("GroupNorm", jaxnorm.group_norm, (draw_x,), OF_GROUPS, "group", "GroupNorm", {"num_groups": 4}),
    # Of so few elements as an instance has here, a fast variance has lost digits that these tests look at.
    "instance": Row(
        "InstanceNorm", INSTANCE, (draw_x,), OF_GROUPS, "group", "InstanceNorm", beside={"use_fast_variance": False}
    ),
    "rotary": _rotary(),
    "rotary of heads first": _rotary(heads_axis=-3),
    "activation": _activation(),
    "activation of a stack": _activation(dims=(4, 2, 60), axis=-2),
    "activation of a pair": _activation(lambda dims, dtype="float32": (draw_gate(dims, dtype), draw_up(dims, dtype))),
}


class Api(NamedTuple):
    """`flax` and `ours` are the two modules that hold the classes. Parameters are a dict of arrays."""

    flax: Any
    ours: Any
    build: Callable[..., Any]  # of a class, inputs, fields and keywords of a call that makes parameters


class Layer(NamedTuple):
    """A row as one of the APIs has it."""

    api: Api
    row: Row

    @property
    def cls(self):
        return getattr(self.api.ours, self.row.name)

    @property
    def flaxs_cls(self):
        return getattr(self.api.flax, self.row.flaxs)

    @property
    def is_nnx(self):
        return self.api is APIS["nnx"]

    @property
    def is_quantized(self):
        return "quantization" in self.row.needed

    @property
    def is_flaxs(self):
        """Whether the result is that of Flax's norm, of x or of a sum."""
        return self.row.flaxs is not None and not self.is_quantized and self.row.name != "GatedRMSNorm"

    @property
    def groups(self):
        """What Flax's norm needs, too."""
        return {name: value for name, value in self.row.needed.items() if name == "num_groups"}

    def draw(self, *dtypes, dims=None):
        """Inputs of these dtypes, each float32 by default."""
        dtypes += ("float32",) * len(self.row.draws)
        return tuple(of(dims or self.row.dims, dtype) for of, dtype in zip(self.row.draws, dtypes, strict=False))

    def _init(self):
        scale = {"scale_init": _random(1, 0.3)} if self.row.name != "GatedActivation" else {}
        return scale | ({"bias_init": _random(0, 0.5)} if self.row.flaxs not in (None, "RMSNorm") else {})

    def build(self, inputs, call=None, **fields):
        """Ours as `apply(parameters, *inputs, **call)`, and its parameters."""
        return self.api.build(self.cls, inputs, self._init() | self.row.needed | self.row.beside | fields, call)

    def flaxs(self, inputs, **fields):
        """The like of Flax's norm, which is of the sum where ours is."""
        fields = self._init() | self.groups | self.row.beside | fields
        flaxs, parameters = self.api.build(self.flaxs_cls, inputs[-1:], fields)

        def add_first(parameters, x, residual, **call):
            total = (jnp.float32(x) + jnp.float32(residual)).astype(residual.dtype)
            return jaxnorm.AddedNorm(flaxs(parameters, total, **call), total)

        return (add_first if len(inputs) == 2 else flaxs), parameters

    def both(self, inputs, own=None, **fields):
        """Flax's and ours, which has fields of its own."""
        return self.flaxs(inputs, **fields), self.build(inputs, **fields, **own or {})

    def operands(self, inputs, parameters, dtype=None):
        """The dtype that is computed, inputs and parameters, as the API rounds them, and widens for no reason."""
        is_gated = self.row.name == "GatedRMSNorm"
        dtype = jnp.dtype(dtype or jnp.result_type(*inputs[0 if is_gated else -1 :], *parameters.values()))
        if self.is_nnx and dtype != jnp.float32:
            parameters = {name: array.astype(dtype) for name, array in parameters.items()}
            inputs = tuple(x.astype(dtype) for x in inputs) if is_gated or len(inputs) == 1 else inputs
        return dtype, inputs, parameters

    def expected(self, inputs, parameters, dtype=None, features=None, **options):
        """What the function gives for the module's parameters, of which nnx's are flat."""
        if self.row.flaxs is not None:
            dtype, inputs, parameters = self.operands(inputs, parameters, dtype)
            axis = options.get("axis", -1) if features is None else features
            shape = [inputs[0].shape[a] for a in np.atleast_1d(axis)]
            parameters = {name: array.reshape(shape) for name, array in parameters.items()}
            options |= {} if self.is_quantized else {"out_dtype": dtype}
        function = functools.partial(self.row.function, **self.row.needed | options)
        return jax.jit(lambda parameters, *inputs: function(*inputs, **parameters))(parameters, *inputs)

    def flaxs_result(self, inputs, dtype=None, **fields):
        """What Flax gives, in float32 but for a last rounding: on a GPU it rounds every step to a half type."""
        apply, parameters = self.flaxs(inputs, dtype=dtype, **fields)
        y, *total = as_tuple(jax.eval_shape(apply, parameters, *inputs))
        _, operands, parameters = self.operands(inputs, parameters, y.dtype)
        apply, _ = self.flaxs(inputs, dtype=jnp.float32, **fields)
        if len(inputs) == 1:
            return jax.jit(apply)(*jax.tree.map(jnp.float32, (parameters, *operands))).astype(y.dtype)
        # Not in one program, where XLA may leave the sum unrounded.
        y_wide, total = apply(jax.tree.map(jnp.float32, parameters), *operands)
        return y_wide.astype(y.dtype), total

    def assert_kernels_serve(self, apply, parameters, inputs):
        """One each way."""
        name = "quantized" if self.is_quantized else "fwd"
        assert_calls(apply, (parameters, *inputs), native_calls(self.row.kind, **{name: 1}))
        if not self.is_quantized:

            def loss(*args):
                return sum(jnp.sin(jnp.float32(y)).sum() for y in as_tuple(apply(*args)))

            gradient = jax.grad(loss, argnums=tuple(range(1 + len(inputs))))
            assert_calls(gradient, (parameters, *inputs), native_calls(self.row.kind, fwd=1, bwd=1))


def assert_calls(function, args, expected):
    assert count_native_calls(compiled_text(function, *args)) == (expected if is_platform_with_kernels() else {})


def integers(shape, dtype="float32"):
    """Numbers from 5 to 12, of which float32 sums ten thousand without rounding, and bfloat16 fifty."""
    return jnp.asarray(5 + np.arange(np.prod(shape, dtype=int)).reshape(shape) % 8, dtype)


def sums(ids, rows, length, dtype="float32"):
    """Of rows with the same id in [0, length), exact where rows are `integers`, and rounded once."""
    total = np.zeros((length, rows.shape[-1]), "float32")
    np.add.at(total, np.asarray(ids, int), np.asarray(rows, "float32"))
    return jnp.asarray(total).astype(dtype)


def as_tuple(results):
    return results if isinstance(results, tuple) else (results,)


def of(*names):
    """These rows, or all, in both APIs, by name."""
    return {f"{api} {name}": Layer(APIS[api], ROWS[name]) for name in names or ROWS for api in APIS}


def each(families):
    """Parametrises a test with each layer and each of its family's cases, by pairs of layers and cases."""
    params = [param for layers, cases in families for param in cover(layer=layers, case=cases).args[1]]
    return pytest.mark.parametrize(("layer", "case"), params)


def apart(module):
    """Of nnx: `apply(parameters, *inputs, **call)`, of a `method` too, and the parameters."""
    definition, state = flax.nnx.split(module)

    def apply(parameters, *inputs, method="__call__", **call):
        restored = jax.tree.map(lambda a: a, state)
        flax.nnx.replace_by_pure_dict(restored, parameters)
        return getattr(flax.nnx.merge(definition, restored), method)(*inputs, **call)

    return apply, flax.nnx.to_pure_dict(state)


def _build_nnx(cls, inputs, fields, call=None):
    if cls is jaxnorm.nnx.GatedActivation:
        return apart(cls(**fields))
    if "num_embeddings" in fields:
        return apart(cls(**fields, rngs=flax.nnx.Rngs(0)))
    fields = dict(fields)
    if fields.pop("per_head", False):
        fields["heads"] = tuple(x.shape[fields.get("heads_axis", -2)] for x in inputs[:2])
    features = [inputs[0].shape[axis] for axis in np.atleast_1d(fields.get("feature_axes", -1))]
    return apart(cls(int(np.prod(features)), rngs=flax.nnx.Rngs(0), **fields))


def _build_linen(cls, inputs, fields, call=None):
    # Parameters are made by a call that needs no mapped axis.
    without = {"axis_name": None} if "axis_name" in fields else {}
    variables = cls(**fields | without).init(jax.random.key(0), *inputs, **call or {})

    def apply(parameters, *inputs, **call):
        return cls(**fields).apply({"params": parameters}, *inputs, **call)

    return apply, dict(variables.get("params", {}))


APIS = {"nnx": Api(flax.nnx, jaxnorm.nnx, _build_nnx), "linen": Api(flax.linen, jaxnorm.linen, _build_linen)}


def stacked(make):
    """Three layers of nnx that `make` makes of random numbers."""
    return flax.nnx.split_rngs(splits=3)(flax.nnx.vmap(make))(flax.nnx.Rngs(0))


def scanned(x, layers, call=lambda x, layer: layer(x) + x):
    """Stacked layers of nnx, one after the other."""
    carry = flax.nnx.Carry
    return flax.nnx.scan(call, in_axes=(carry, 0), out_axes=carry)(x, layers)


def scan_of_remat(branch, name_of_axis=None):
    """Three stacked layers of linen, each of x and what `branch` makes of it."""

    class Stacked(flax.linen.Module):
        @flax.linen.compact
        def __call__(self, x, _):
            return x + branch(x), None

    options = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 3}
    options["metadata_params"] = {flax.linen.PARTITION_NAME: name_of_axis}
    return flax.linen.scan(flax.linen.remat(Stacked), **options)()


def assert_same(actual, expected):
    """The same bits of the same dtypes."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    assert [a.dtype for a in jax.tree.leaves(actual)] == [e.dtype for e in jax.tree.leaves(expected)]
    assert bits(actual) == bits(expected)


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


def through_checkpoint(directory, saved, target):
    """What Orbax restores, of the shapes of `target`."""
    import orbax.checkpoint

    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory / "checkpoint", saved)
        checkpointer.wait_until_finished()
        return checkpointer.restore(directory / "checkpoint", target)
