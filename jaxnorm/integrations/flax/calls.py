"""How a module of either API of Flax, its own class or Flax's, calls the functions of this package."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict, Unpack, get_args, overload

import jax
import jax.numpy as jnp

from jaxnorm.integrations.flax import served
from jaxnorm.integrations.flax.served import linen, nnx
from jaxnorm.native import ffi
from jaxnorm.ops import checks
from jaxnorm.ops.activation import FORMULAS, check_activation
from jaxnorm.ops.embedding.api import embedding
from jaxnorm.ops.float8_linear import api as float8
from jaxnorm.ops.float8_linear.api import Float8Recipe
from jaxnorm.ops.group_norm.api import group_norm
from jaxnorm.ops.group_norm.formula import Activation
from jaxnorm.ops.norm.api import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from jaxnorm.ops.norm.checks import check_branch_scale
from jaxnorm.ops.norm.gated import gated_rms_norm
from jaxnorm.ops.norm.quantized import layer_norm_quantized, rms_norm_quantized
from jaxnorm.ops.qk_norm_rotary.api import qk_norm_rotary
from jaxnorm.primitive.addend import add
from jaxnorm.primitive.weights import of_rank
from jaxnorm.quantization import Quantized
from jaxnorm.results import QK, AddedNorm

Parameters = tuple[jax.Array | None, jax.Array | None]  # scale and bias, which an RMSNorm has not


class Functions(NamedTuple):
    """The functions of this package that compute one norm of Flax."""

    norm: Callable[..., Any]
    add: Callable[..., Any]
    quantized: Callable[..., Any]


RMS = Functions(rms_norm, add_rms_norm, rms_norm_quantized)
LAYER = Functions(layer_norm, add_layer_norm, layer_norm_quantized)


class OfSum(TypedDict, total=False):
    """For type checkers: what a call of a norm of a sum may be told besides, as `jaxnorm.add_rms_norm` may."""

    branch_scale: jax.Array | None


class Scales(TypedDict, total=False):
    """For type checkers: the keywords in the call of a quantised norm."""

    static_scale: Any
    smooth_scale: jax.Array | None
    mask: None


class Tables(TypedDict, total=False):
    """For type checkers: the keywords in the call of a rotary embedding."""

    cos: jax.Array | None
    sin: jax.Array | None
    frequencies: jax.Array | None


def fused(
    norm: Callable[..., Any], module: Any, rows: tuple[jax.Array, ...], mask: jax.Array | None, outside: bool = False
) -> Any:
    """`norm` of x, or of x and an addend, called as `module` says, maybe from `outside` of the module's own call.

    None, with no parameter made yet, where Flax's own code computes it.
    """
    *_, normalised = rows  # with an addend the sum, which is like it
    there = parameters_there(module)
    why = served.why_flax(module, normalised, mask, there, dtypes(module, rows, there))
    axes = served.called_axes(module, normalised, mask, why)
    if axes is None:
        return None
    axis, features = axes
    rows, (scale, bias) = _operands(module, rows, features, there, outside)
    dtype = dtype_of(module, normalised, scale, bias)
    options = {"epsilon": module.epsilon, "axis_name": module.axis_name, **served.options(module)}
    return norm(*rows, scale, bias=bias, axis=axis, out_dtype=dtype, **options)


def add_first(
    norm: Callable[..., Any], rows: tuple[jax.Array, jax.Array], mask: Any, branch_scale: jax.Array | None = None
) -> AddedNorm:
    """The norm of the sum, and the sum, where no kernel computes both."""
    x, addend = rows
    factor = check_branch_scale("a norm of a sum", branch_scale, x, (-1,))
    total = add(x, addend, None if factor is None else of_rank(x.ndim, (-1,), factor))
    return AddedNorm(norm(total, mask=mask), total)


def quantized(
    module: Any, x: Any, residual: Any, mask: object, scales: dict[str, Any]
) -> Quantized | tuple[Quantized, jax.Array]:
    """The quantised norm of x, or that of the sum of x and a residual with the sum, called as `module` says."""
    rows = (jnp.asarray(x),) if residual is None else with_other(module, x, "residual", residual, "added")
    axis = served.function_axes(module, rows[-1], mask, "a quantised norm")
    (x, *addend), (scale, bias) = _operands(module, rows, axis, parameters_there(module))
    result = module._functions.quantized(
        x,
        scale,
        bias=bias,
        quantization=module.quantization,
        residual=next(iter(addend), None),
        straight_through=module.straight_through,
        epsilon=module.epsilon,
        axis=axis,
        axis_name=module.axis_name,
        **scales,
        **served.rounded_once(module, "a quantised norm"),
    )
    return result.quantized if result.residual is None else (result.quantized, result.residual)


class Quantizes:
    """What makes a norm one with a quantised result."""

    @overload
    def __call__(self: Any, x: jax.Array, residual: None = None, **_: Unpack[Scales]) -> Quantized: ...

    @overload
    def __call__(self: Any, x: jax.Array, residual: jax.Array, **_: Unpack[Scales]) -> tuple[Quantized, jax.Array]: ...

    def __call__(
        self: Any,
        x: jax.Array,
        residual: jax.Array | None = None,
        *,
        static_scale: Any = None,
        smooth_scale: jax.Array | None = None,
        mask: None = None,
    ) -> Quantized | tuple[Quantized, jax.Array]:
        scales = {"static_scale": static_scale, "smooth_scale": smooth_scale}
        return quantized(self, x, residual, mask, scales)


def gated(module: Any, x: Any, gate: Any, mask: object) -> jax.Array:
    """The gated norm of x, called as `module` says. Its operands are rounded as those of flax.nnx."""
    x, gate = with_other(module, x, "gate", gate, "multiplied")
    served.last_axis(module, x, mask, "a gated norm")
    scale, _ = parameters_there(module) if isinstance(module, nnx.Module) else made(module, x, (-1,))
    dtype = dtype_of(module, x, gate, scale)
    if isinstance(module, nnx.Module):
        x, gate, scale = (None if array is None else promote(array, dtype) for array in (x, gate, scale))
    return gated_rms_norm(
        x,
        gate,
        scale,
        gate_first=module.gate_first,
        activation=module.activation,
        group_size=module.group_size,
        epsilon=module.epsilon,
        axis_name=module.axis_name,
        out_dtype=dtype,
        **served.rounded_once(module, "a gated norm"),
    )


def with_other(module: object, x: Any, name: str, other: Any, they_are: str) -> tuple[jax.Array, jax.Array]:
    """x and another argument as arrays of one shape, or an error; `they_are` says what is done with both."""
    x = jnp.asarray(x)
    return x, checks.check_like_x(type(module).__name__, name, other, x, they_are)


def grouped(module: Any, x: jax.Array, mask: jax.Array | None, outside: bool = False, **more: Any) -> jax.Array | None:
    """`group_norm` of x, called as `module`, of groups or of single channels, and `more` say; `outside` as of `fused`.

    None, with no parameter made yet, where Flax's own code computes it.
    """
    there = parameters_there(module)
    why = served.why_flax_groups(module, x, mask, there, dtypes(module, (x,), there))
    if not served.is_grouped(module, x, mask, why):
        return None
    axis = served.channel_axis(module, x.ndim)
    (x,), (scale, bias) = _operands(module, (x,), (axis,), there, outside)
    options = served.options(module)
    del options["multiply_before_cast"]
    options |= {"epsilon": module.epsilon, "axis_name": module.axis_name, "activation": _activation(module)}
    if served.is_instance_norm(module):
        options["group_size"] = 1
    elif module.group_size is None:
        options["num_groups"] = module.num_groups
    else:  # a module of flax.nnx knows both
        options["group_size"] = module.group_size
    dtype = dtype_of(module, x, scale, bias)
    return group_norm(x, scale, bias, out_dtype=dtype, channel_axis=axis, **options | more)


def activated(module: Any, y: jax.Array) -> jax.Array:
    """What Flax's code has computed, with the activation that it does not know."""
    name = check_activation(type(module).__name__, _activation(module), (None, *get_args(Activation)))
    if name is None:
        return y
    wide = y.astype(jnp.promote_types(y.dtype, "float32"))
    return FORMULAS[name].of(wide).astype(y.dtype)


def _activation(module: Any) -> Any:
    """None of a module of Flax."""
    return getattr(module, "activation", None)


def parameters_there(module: Any) -> Parameters:
    """scale and bias that the call of a module comes with; of flax.linen, while they are initialised, none."""
    if not isinstance(module, linen.Module):
        return value(module.scale), value(getattr(module, "bias", None))
    scale, bias = (
        linen.meta.unbox(module.get_variable("params", name)) if module.has_variable("params", name) else None
        for name in ("scale", "bias")
    )
    return scale, bias


def value(parameter: Any) -> jax.Array | None:
    """That of a variable of flax.nnx."""
    return None if parameter is None else parameter[...]


def made(module: Any, x: jax.Array, axes: tuple[int, ...]) -> Parameters:
    """scale and bias of a module of flax.linen, of the shape of these axes of x, within the module's call."""
    scale, features = made_scale(module, x, axes), [x.shape[axis] for axis in axes]
    has_bias = getattr(module, "use_bias", False)
    return scale, module.param("bias", module.bias_init, features, module.param_dtype) if has_bias else None


def default_scale_init(key: Any, shape: Any, dtype: Any) -> jax.Array:
    """The default of flax.linen, ones, told from ones that were asked for: with a scale_offset it is zeros."""
    return linen.initializers.ones(key, shape, dtype)


def made_scale(module: Any, x: jax.Array, axes: tuple[int, ...], name: str = "scale") -> jax.Array | None:
    """The parameter of this name of a module of flax.linen, see `made`; None if it has none."""
    if not module.use_scale:
        return None
    scale_init = module.scale_init
    if scale_init is default_scale_init and served.options(module)["scale_offset"]:
        scale_init = linen.initializers.zeros
    parameter: jax.Array = module.param(name, scale_init, [x.shape[axis] for axis in axes], module.param_dtype)
    return parameter


def dtype_of(module: Any, *arrays: jax.Array | None) -> Any:
    """The dtype to which Flax promotes these operands of a module, those that are None left out."""
    return linen.dtypes.canonicalize_dtype(*arrays, dtype=module.dtype)


def dtypes(module: Any, rows: tuple[jax.Array, ...], there: Parameters) -> list[Any]:
    """Those of all that a call of a norm reads and writes."""
    if isinstance(module, nnx.Module):
        arrays = (*rows, *(parameter for parameter in there if parameter is not None))
        return [dtype_of(module, rows[-1], *there), *(array.dtype for array in arrays)]
    return [module.param_dtype, jnp.float32 if module.dtype is None else module.dtype, *(x.dtype for x in rows)]


def _operands(
    module: Any, rows: tuple[jax.Array, ...], axes: tuple[int, ...], there: Parameters, outside: bool = False
) -> tuple[tuple[jax.Array, ...], Parameters]:
    """x, or x and an addend, and the parameters, with the shape of these axes: of flax.nnx rounded as Flax does it."""
    if isinstance(module, linen.Module):
        return rows, there if outside else made(module, rows[-1], axes)
    features = tuple(rows[-1].shape[axis] for axis in axes)
    for parameter in there:
        if parameter is not None and parameter.size != math.prod(features):
            raise ValueError(
                f"the norm's parameters are of {parameter.size} features, expected {math.prod(features)}: x has shape "
                f"{rows[-1].shape}, of which the axes {axes} are features. Construct it with that many."
            )
    dtype = dtype_of(module, rows[-1], *there)
    scale, bias = (None if p is None else promote(p, dtype).reshape(features) for p in there)
    return (tuple(promote(x, dtype) for x in rows) if len(rows) == 1 else rows), (scale, bias)


def promote(array: jax.Array, dtype: Any) -> jax.Array:
    """`array` as Flax's promotion to `dtype` rounds it. Mere widening is left to the kernel: fewer bytes to read."""
    return array if jnp.dtype(dtype) in (array.dtype, jnp.float32) else array.astype(dtype)


def rotated(module: Any, arrays: tuple[Any, ...], **tables: Any) -> QK:
    """q and k, normalised and rotated as a `QKNormRotary` says; of its `dtype`, or else of their own.

    `arrays` are q, k, their scales and the positions.
    """
    q, k, q_scale, k_scale, positions = arrays
    q, k = (jnp.asarray(x) if module.dtype is None else jnp.asarray(x, module.dtype) for x in (q, k))
    names = ("theta", "rotary_dim", "interleaved", "normalize", "epsilon", "heads_axis")
    options = {name: getattr(module, name) for name in names} | served.rounded_once(module, "a rotary embedding")
    return qk_norm_rotary(q, k, q_scale, k_scale, positions, **options, **tables)


def looked_up(module: Any, table: jax.Array, ids: Any, out_sharding: Any = None) -> jax.Array | None:
    """The rows of ids that an Embed of Flax gives, or None where Flax's own code computes them."""
    implementation = getattr(module, "implementation", None)
    if (why := served.why_flax_looks_up(module, table, ids)) is not None:
        if implementation == "native" and served.are_integers(ids):
            raise served.not_served(module, why)
        return None
    if module.num_embeddings == 1:  # whose row Flax broadcasts, whatever the ids are
        rows = jnp.broadcast_to(jnp.asarray(table, jnp.float32), (*ids.shape, module.features))
        return rows.astype(table.dtype if module.dtype is None else module.dtype)
    return embedding(table, ids, dtype=module.dtype, out_sharding=out_sharding, implementation=implementation)


def float8_linear(
    module: Any,
    recipe: Float8Recipe,
    inputs: jax.Array | Quantized,
    kernel: jax.Array,
    bias: jax.Array | None,
    out_sharding: Any = None,
) -> jax.Array:
    """The call of a linear layer with these parameters, which are read as they are; the result has Flax's dtype.

    That of a `Quantized` is the module's, or bfloat16 where it has none.
    """
    preferred = getattr(module, "preferred_element_type", None)
    if isinstance(inputs, Quantized):
        x: Any = inputs
        dtype = module.dtype
    else:
        dtype = dtype_of(module, inputs, kernel, bias)
        x = jnp.asarray(inputs)
        if jnp.dtype(dtype) != jnp.float32 or x.dtype not in ffi.DTYPES:  # mere widening takes bytes
            x = x.astype(dtype)
    out_dtype = linear_dtype(preferred, dtype, bias)
    name, precision = type(module).__name__, module.precision
    return float8.linear(name, x, kernel, bias, out_dtype, recipe, None, precision, out_sharding)


def linear_dtype(preferred: Any, dtype: Any, bias: jax.Array | None) -> Any:
    """Of what a linear layer of Flax gives: its product has the preferred dtype, the bias the computation's."""
    if preferred is None or dtype is None or bias is None:
        return preferred or dtype
    return jnp.promote_types(preferred, dtype)
