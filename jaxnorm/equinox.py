"""Norms, Embedding and linear layers of Equinox on jaxnorm's kernels: change the import line, or a model."""

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxnorm.integrations import replacing
from jaxnorm.integrations.replacing import Only, explained, pair
from jaxnorm.ops import misuse
from jaxnorm.ops.embedding.api import embedding
from jaxnorm.ops.group_norm.api import group_norm
from jaxnorm.ops.norm.api import layer_norm, rms_norm
from jaxnorm.ops.quantize.api import quantize
from jaxnorm.ops.quantized_dot.api import quantized_dot
from jaxnorm.quantization import Quantization, Quantized
from jaxnorm.reports import Path, Report

if importlib.util.find_spec("equinox") is None:
    raise ImportError("jaxnorm.equinox needs Equinox: pip install 'equinox>=0.13'")

import equinox as eqx

__all__ = ["Embedding", "GroupNorm", "LayerNorm", "QuantizedLinear", "RMSNorm", "quantize_linears", "replace_layers"]

if not TYPE_CHECKING:
    __getattr__ = misuse.no_attribute(__name__)

_NO_STATE = object()


class RMSNorm(eqx.nn.RMSNorm):
    """`equinox.nn.RMSNorm` with the same constructor, fields and result dtype, computed by `jaxnorm.rms_norm`.

        y = x * rsqrt(mean(x²) + eps) * weight + bias

    x has the shape of the module. The norm computes in float32 and rounds once, to x's dtype. Under `jax.vmap` over x,
    nested too, it stays one native call each way. Equinox' own code runs for dtypes other than float32, bfloat16 and
    float16 of x or weights.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019, https://arxiv.org/abs/1910.07467.
    """

    def __call__(self, x: Any, state: Any = _NO_STATE, *, key: Any = None) -> Any:
        y = _of_shape(rms_norm, self, x)
        return _with_state(super().__call__(x) if y is None else y, state)


class LayerNorm(eqx.nn.LayerNorm):
    """`equinox.nn.LayerNorm` with the same constructor, fields and result dtype, computed by `jaxnorm.layer_norm`.

        y = (x - mean) * rsqrt(mean((x - mean)²) + eps) * weight + bias

    All else is as for `RMSNorm`.

    Source: Ba, Kiros and Hinton, Layer Normalization, 2016, https://arxiv.org/abs/1607.06450.
    """

    def __call__(self, x: Any, state: Any = _NO_STATE, *, key: Any = None) -> Any:
        y = _of_shape(layer_norm, self, x)
        return _with_state(super().__call__(x) if y is None else y, state)


class GroupNorm(eqx.nn.GroupNorm):
    """`equinox.nn.GroupNorm` with the same constructor, fields and result dtype, computed by `jaxnorm.group_norm`.

        y = (x - mean) * rsqrt(mean((x - mean)²) + eps) * weight + bias

    x has shape (channels, ...); means are over a group of neighbouring channels and all positions. With channels first
    `group_norm` runs its kernel on CPUs, and XLA's code on GPUs. All else is as for `RMSNorm`.

    Source: Wu and He, Group Normalization, 2018, https://arxiv.org/abs/1803.08494.
    """

    def __call__(self, x: Any, state: Any = _NO_STATE, *, key: Any = None) -> Any:
        # Equinox raises errors for shapes that its groups do not divide.
        fits = _is_served(self, x) and x.shape[0] % self.groups == 0
        if not fits or (self.weight is not None and x.shape[:1] != self.weight.shape):
            return _with_state(super().__call__(x), state)
        y = group_norm(x[None], self.weight, self.bias, num_groups=self.groups, epsilon=self.eps, channel_axis=1)
        return _with_state(y[0], state)


class Embedding(eqx.nn.Embedding):
    """`equinox.nn.Embedding` with the same constructor, field and result, computed by `jaxnorm.embedding`.

        x = jax.vmap(Embedding(50_257, 768, key=key))(ids)

    Rows have Equinox' bits. As there, negative indices count from the end, and an index out of range reads the first or
    last row and adds to its gradient. The gradient is summed in float32, in the same order in each run, and rounded
    once. Under `jax.vmap` over x, nested too, it stays one native call. Equinox' own code runs for weights of dtypes
    other than float32, bfloat16 and float16, and for indices that are no array of integers.
    """

    def __call__(self, x: Any, *, key: Any = None) -> jax.Array:
        if not _is_index(x) or _why_never(self) is not None or self.weight.ndim != 2 or not len(self.weight):
            return super().__call__(x)
        rows: jax.Array = embedding(self.weight, _clamped(x, self.weight.shape[0]))
        return rows


@explained
class QuantizedLinear(eqx.Module):
    """An `equinox.nn.Linear` with a quantised weight, computed by `jaxnorm.quantized_dot`.

        layer = QuantizedLinear(linear, jnp.int8)
        y = jax.vmap(layer)(x)

    `values` (out_features, in_features) and `scales` (out_features, 1) replace the weight; `quantized` has both, as a
    kernel. With `inputs` x is quantised at each call too, and has no derivative. The result has Equinox' dtype.
    `values` and `scales` get no gradient, but zeros from `equinox.filter_grad`: keep them from an optimiser with weight
    decay.

    Args:
      linear: the layer to quantise, or a stack of layers that `equinox.filter_vmap` made.
      kernels: a `Quantization` to float8_e4m3fn, float8_e5m2, int8 or int4 with granularity "token", or its dtype.
      inputs: how x is quantised, likewise: float8 with float8 kernels, int8 with int8 and int4 kernels; None: not at
        all.

    Raises:
      TypeError: linear is no `equinox.nn.Linear` that can be quantised, kernels or inputs is no `Quantization`, or
        their dtypes do not go together.
      ValueError: a granularity is not "token".
    """

    values: Any
    scales: Any
    bias: Any
    in_features: int = eqx.field(static=True)
    out_features: int = eqx.field(static=True)
    use_bias: bool = eqx.field(static=True)
    kernels: Quantization = eqx.field(static=True)
    inputs: Quantization | None = eqx.field(static=True)
    weight_dtype: Any = eqx.field(static=True)

    def __init__(
        self, linear: eqx.nn.Linear, kernels: Quantization | DTypeLike, inputs: Quantization | DTypeLike | None = None
    ) -> None:
        self.kernels, self.inputs = pair("QuantizedLinear", kernels, inputs)
        if (why := _why_left(linear)) is not None:
            raise TypeError(
                f"QuantizedLinear: linear must be an equinox.nn.Linear, got a {type(linear).__name__} that cannot be "
                f"quantised: {why}."
            )
        quantized = replacing.quantised(partial(quantize, quantization=self.kernels), linear.weight)
        self.values, self.scales, self.bias = quantized.values, quantized.scales, linear.bias
        self.in_features, self.out_features = int(linear.in_features), int(linear.out_features)
        self.use_bias, self.weight_dtype = linear.use_bias, jnp.dtype(linear.weight.dtype)

    @property
    def quantized(self) -> Quantized:
        """The kernel; its `dequantize()` is the layer's weight transposed, rounded."""
        return Quantized(self.values, self.scales, transposed=True)

    def __call__(self, x: Any, *, key: Any = None) -> jax.Array:
        if jnp.shape(x) != (self.in_features,):
            raise ValueError(
                f"QuantizedLinear: x has shape {jnp.shape(x)}, expected ({self.in_features},): a layer of Equinox "
                f"takes one example. Map it, as jax.vmap(layer)(x)."
            )
        dtype = jnp.result_type(x, self.weight_dtype, *([] if self.bias is None else [self.bias.dtype]))
        x = jnp.asarray(x, dtype)
        quantized = x if self.inputs is None else quantize(x, self.inputs)
        kernel = jax.lax.stop_gradient(self.quantized)
        y: jax.Array = quantized_dot(quantized, kernel, out_dtype=dtype, bias=self.bias)
        return y


# Equinox' layers, and what each of them becomes.
OURS: dict[type, type] = {
    eqx.nn.Embedding: Embedding,
    eqx.nn.GroupNorm: GroupNorm,
    eqx.nn.LayerNorm: LayerNorm,
    eqx.nn.RMSNorm: RMSNorm,
}
# Norms of Equinox without kernels here.
OTHERS = (eqx.nn.BatchNorm, eqx.nn.SpectralNorm, eqx.nn.WeightNorm)
# Layers of Equinox with weights that are not quantised.
OTHER_LAYERS = (eqx.nn.Conv, eqx.nn.ConvTranspose, eqx.nn.Embedding)


def replace_layers(model: Any) -> tuple[Any, Report]:
    """Makes a model with jaxnorm's norms and Embedding in place of Equinox', at any depth.

        model, report = jaxnorm.equinox.replace_layers(model)

    Each `equinox.nn.RMSNorm`, `LayerNorm`, `GroupNorm` and `Embedding`, in stacked layers too, becomes one of
    `jaxnorm.equinox` with the same fields, so paths of `equinox.tree_at` and saved leaves stay valid; results agree
    within rounding. Modules are frozen: the given model stays as it is.

    Other norms, subclasses, layers whose epsilon or dtypes no kernel serves, and layers whose weights are no arrays, as
    where `equinox.nn.Shared` ties them, stay as they are.

    Args:
      model: a module, or a list, dict or other pytree of modules.

    Returns:
      The new model and a `jaxnorm.reports.Report`: `replaced` has (path, class) of each layer that was replaced, `left`
      has (path, class, why) of each that was not.

    Raises:
      TypeError: there is no module of Equinox in model.
    """

    def why(_: Path, module: Any) -> str | None:
        return _why_never(module) if type(module) in OURS else _why_class(module)

    def is_meant(module: Any) -> bool:
        return type(module) in OURS or _why_class(module) is not None

    return _replaced("replace_layers", model, is_meant, why, _become)


@misuse.explained
def quantize_linears(
    model: Any,
    kernels: Quantization | DTypeLike,
    inputs: Quantization | DTypeLike | None = None,
    *,
    only: Only | None = None,
) -> tuple[Any, Report]:
    """Makes a copy of a trained model with its linear layers quantised, at any depth.

        model, report = jaxnorm.equinox.quantize_linears(model, Quantization(jnp.int8), Quantization(jnp.int8))
        print(report)

    Each `equinox.nn.Linear`, in stacked layers too, becomes a `QuantizedLinear`; the given model stays as it is. Other
    layers, subclasses, layers of "scalar" features, and those whose weight is no array or is tied are not quantised.

    Args:
      model: a module, or a list, dict or other pytree of modules; to load a quantised checkpoint, what
        `equinox.filter_eval_shape` makes of it.
      kernels: as for `QuantizedLinear`.
      inputs: as for `QuantizedLinear`.
      only: a function of path and layer, true for those to quantise. None is all.

    Returns:
      The new model and a `jaxnorm.reports.Report`.

    Raises:
      TypeError: there is no module of Equinox in model, kernels or inputs is no `Quantization`, their dtypes do not go
        together, or only is no function.
      ValueError: there is no layer that is quantised, or a granularity is not "token".
    """
    kernels, inputs = pair("quantize_linears", kernels, inputs)
    replacing.check_only("quantize_linears", only)

    def is_tie(node: Any) -> bool:
        return isinstance(node, eqx.nn.Shared)

    ties = list(filter(is_tie, jax.tree.leaves(model, is_leaf=is_tie)))

    def why(path: Path, module: Any) -> str | None:
        chosen = type(module) is not eqx.nn.Linear or only is None or only(path, module)
        if (reason := _why_left(module)) or not chosen:
            return reason or "only is false of it"
        return "its weight is that of other layers too" if any(_is_read(tie, module) for tie in ties) else None

    def is_layer(module: Any) -> bool:
        return isinstance(module, (eqx.nn.Linear, QuantizedLinear, *OTHER_LAYERS))

    new, report = _replaced("quantize_linears", model, is_layer, why, lambda of: QuantizedLinear(of, kernels, inputs))
    report.check_found("quantize_linears", "equinox.nn.Linear to quantise", model)
    return new, report


def _replaced(
    function: str,
    model: Any,
    is_meant: Callable[[Any], bool],
    why: Callable[[Path, Any], str | None],
    new: Callable[[Any], Any],
) -> tuple[Any, Report]:
    """A model in which each module that `is_meant` is `new`, or left where there is a reason `why`; and the report."""
    report, modules = Report(), []

    def replaced(path: Path, node: Any) -> Any:
        if isinstance(node, eqx.Module):
            modules.append(node)
            if is_meant(node):
                reason = why(path, node)
                report.add(path, type(node), reason)
                if reason is None:
                    return new(node)
        children, structure = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda child: child is not node)
        if jax.tree_util.treedef_is_leaf(structure):
            return node
        return jax.tree.unflatten(structure, [replaced((*path, *map(_step, keys)), child) for keys, child in children])

    result = replaced((), model)
    if not modules:
        got, remedy = replacing.no_model(model, ())
        expected = "a module of equinox, or a list, dict or other pytree of such"
        raise TypeError(f"{function}: model must be {expected}, got {got}: {remedy}.")
    return result, report


def _is_read(tie: eqx.nn.Shared, module: Any) -> bool:
    """Whether an `equinox.nn.Shared` reads what it shares from a module, which must stay as it is then."""
    without = jax.tree.map(lambda node: None if node is module else node, tie.pytree, is_leaf=lambda n: n is module)
    try:
        tie.get(without)
    except Exception:
        return True
    return False


def _step(key: Any) -> Any:
    """The attribute or index that a key of a path stands for."""
    return next(getattr(key, name) for name in ("name", "idx", "key") if hasattr(key, name))


def _become(module: Any) -> Any:
    """A layer of Equinox as ours, with the same fields."""
    ours: Any = object.__new__(OURS[type(module)])
    for name, value in vars(module).items():
        object.__setattr__(ours, name, value)
    return ours


def _why_class(module: Any) -> str | None:
    """Why a module that is none of `OURS` is left. None if it is neither a norm nor an Embedding."""
    return replacing.why_subclass(type(module), OURS, OTHERS)


def _why_never(module: Any) -> str | None:
    """Why no kernel serves any call of a layer of Equinox; None if that depends on the call."""
    weights = {name: array for name in ("weight", "bias") if (array := getattr(module, name, None)) is not None}
    if why := _why_no_arrays(weights):
        return why
    dtypes = [weight.dtype for weight in weights.values()]
    return replacing.why_not_served(*dtypes, epsilon=getattr(module, "eps", 0.0))


def _why_no_arrays(weights: dict[str, Any]) -> str | None:
    """The first weight that is no array, but a `SharedNode` or left by a filter; None if all are arrays."""
    others = {name: type(weight).__name__ for name, weight in weights.items() if not hasattr(weight, "dtype")}
    return next((f"its {name} is no array but a {of}" for name, of in others.items()), None)


def _is_served(module: Any, x: Any) -> bool:
    """Whether a kernel computes `module(x)`, if x has a shape that fits."""
    is_array = isinstance(x, jax.Array) and x.ndim > 0
    return is_array and _why_never(module) is None and replacing.why_dtypes(x.dtype) is None


def _of_shape(norm: Callable[..., jax.Array], module: Any, x: Any) -> jax.Array | None:
    """The norm of an x of the module's shape; None where Equinox' own code computes it, or has an error."""
    if not _is_served(module, x) or x.shape != module.shape:
        return None
    return norm(x, module.weight, bias=module.bias, epsilon=module.eps, axis=tuple(range(-x.ndim, 0)))


def _with_state(y: jax.Array, state: Any) -> Any:
    """The result, and the state of a `StateIndex` beside it where the call was given one."""
    return y if state is _NO_STATE else (y, state)


def _is_index(x: Any) -> bool:
    """Whether x is an integer scalar that is not cast first, as uint32 is."""
    if not isinstance(x, jax.Array) or x.shape or not jnp.issubdtype(x.dtype, jnp.integer):
        return False
    return jnp.issubdtype(x.dtype, jnp.signedinteger) or x.dtype.itemsize < 4


def _clamped(x: jax.Array, length: int) -> jax.Array:
    x = x if x.dtype.itemsize >= 4 else x.astype(jnp.int32)
    return jnp.clip(jnp.where(x < 0, x + length, x), 0, length - 1)


def _why_left(module: Any) -> str | None:
    """Why a linear layer stays as it is; None if it can be quantised."""
    if isinstance(module, QuantizedLinear):
        return "it is quantised already"
    if type(module) is not eqx.nn.Linear:
        return f"only equinox.nn.Linear{' itself' if isinstance(module, eqx.nn.Linear) else ''} is quantised"
    if "scalar" in (module.in_features, module.out_features):
        return "it has scalar features"
    arrays = {"weight": module.weight} | ({} if module.bias is None else {"bias": module.bias})
    if why := _why_no_arrays(arrays):
        return why
    why = replacing.why_dtypes(*(array.dtype for array in arrays.values()))
    return why and f"it is of {why}"
