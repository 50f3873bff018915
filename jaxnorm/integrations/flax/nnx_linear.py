"""Linear layers of `flax.nnx`, quantised or in float8: how a model gets them, and why others stay."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxnorm.integrations import replacing
from jaxnorm.integrations.flax import calls, nnx_replace
from jaxnorm.integrations.flax.served import nnx
from jaxnorm.integrations.replacing import Only, explained, pair
from jaxnorm.ops.float8_linear.api import DEFAULT, Float8Recipe, check_recipe
from jaxnorm.ops.quantize.api import quantize, quantize_kernel
from jaxnorm.ops.quantized_dot.api import quantized_dot
from jaxnorm.quantization import Quantization, Quantized
from jaxnorm.reports import Report

_quantised = jax.jit(quantize_kernel, static_argnames="quantization")
# What such layers become, and why each is left where it is met.
OURS: dict[type, str] = {}
# Layers of Flax with weights that are left as they are.
OTHERS = (nnx.LinearGeneral, nnx.Einsum, nnx.Conv, nnx.ConvTranspose, nnx.Embed)
FLAXS_OWN = {"dot_general": jax.lax.dot_general, "promote_dtype": nnx.nn.dtypes.promote_dtype}


class Change(NamedTuple):
    """What `function` does to linear layers: it is `done`, as "quantised", to those that it is `to_do` for."""

    function: str
    to_do: str
    done: str
    of_linen: str  # why modules of flax.linen within a model are left
    linen_remedy: str  # where the model itself is one
    remedy: str = ""  # for a LinearGeneral


def chosen(change: Change, model: Any, only: Only | None) -> tuple[Report, list[Any]]:
    """The linear layers of a model that are changed, and the report of them and of those that are left."""
    function = change.function
    replacing.check_only(function, only)
    report, layers = Report(), []
    for path, module in nnx_replace.modules_of(function, model, change.linen_remedy):
        cls = type(module)
        if replacing.find(cls, {nnx.Linear: True}):
            why = why_left(module) or ("only is false of it" if only and not only(path, module) else None)
            if why is None:
                layers.append(module)
        elif (why := _why_class(cls, change)) is None:
            continue
        report.add(path, cls, why)
    report.check_found(function, f"flax.nnx.Linear to {change.to_do}", model)
    return report, layers


def _why_class(cls: type, change: Change) -> str | None:
    """Why a module of a class is left. None if it is no linear layer."""
    if issubclass(cls, nnx.bridge.ToNNX):
        return change.of_linen
    if ours := next((why for base, why in OURS.items() if issubclass(cls, base)), None):
        return ours
    if issubclass(cls, nnx.Linear):
        return "its __call__ is not Flax's"
    remedy = change.remedy if issubclass(cls, nnx.LinearGeneral) else ""
    return f"only flax.nnx.Linear is {change.done}{remedy}" if issubclass(cls, OTHERS) else None


def why_left(module: Any) -> str | None:
    """Why a linear layer stays Flax's. None if it can be changed."""
    why = replacing.why_dtypes(module.kernel.dtype, module.dtype)
    return replacing.why_own(module, FLAXS_OWN) or (why and f"it is of {why}")


def check_own(module: Any, done: str) -> None:
    """An error where the constructor of a layer of ours was given what only Flax's own code computes."""
    if (why := why_left(module)) is not None:
        name = type(module).__name__
        raise TypeError(f"{name}: cannot be {done}: {why}. Leave that out, or take flax.nnx.Linear.")


def become(module: Any, ours: type) -> None:
    """Makes a layer of Flax one of a class of ours."""
    cls: type = type(module)
    object.__setattr__(module, "__class__", ours if cls is nnx.Linear else nnx_replace.with_base(cls, ours))


class QuantizedParam(nnx.Variable[Any]):
    """A quantised kernel or its scales: not trained, unlike an `nnx.Param`."""


@explained
class QuantizedLinear(nnx.Linear):
    """A `flax.nnx.Linear` with a quantised kernel, computed by `jaxnorm.quantized_dot`.

        layer = QuantizedLinear(256, 512, kernels=Quantization(jnp.int8), rngs=rngs)
        y = layer(x)

    `QuantizedParam`s replace the kernel: `values` of shape (out_features, in_features) and `scales` of shape
    (out_features, 1). `quantized` has both, and `kernels` tells how they were made. x is rounded to the dtype of the
    computation and, with `inputs`, quantised. A `Quantized` x, as from a `QuantizedRMSNorm`, is taken as it is.

    The result has Flax's dtype; for a `Quantized` it is `dtype`, or bfloat16 where that is None. The constructor's
    other arguments are Flax's. `precision` has no effect, and a call takes no `out_sharding`.
    """

    values: QuantizedParam
    scales: QuantizedParam
    kernels: Quantization
    inputs: Quantization | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        kernels: Quantization | DTypeLike,
        inputs: Quantization | DTypeLike | None = None,
        **flax: Any,
    ) -> None:
        kernels, inputs = pair("QuantizedLinear", kernels, inputs)
        super().__init__(in_features, out_features, **flax)
        check_own(self, "quantised")
        _set(self, kernels, inputs, _variables(self.kernel, kernels))

    @property
    def quantized(self) -> Quantized:
        """The kernel; its `dequantize()` is the layer's kernel, rounded."""
        return Quantized(self.values[...], self.scales[...], transposed=True)

    def __call__(self, inputs: jax.Array | Quantized, out_sharding: None = None) -> jax.Array:
        if out_sharding is not None:
            raise ValueError(
                f"{type(self).__name__}: got out_sharding={out_sharding}, expected None; reshard the result instead."
            )
        bias = calls.value(self.bias)
        x, dtype = inputs, self.dtype
        if not isinstance(x, Quantized):
            x = jnp.asarray(x)
            dtype = dtype or jnp.result_type(x.dtype, self.param_dtype, *([] if bias is None else [bias.dtype]))
            x = x.astype(dtype)
            if self.inputs is not None:
                x = quantize(x, self.inputs)
        out_dtype = calls.linear_dtype(self.preferred_element_type, dtype, bias)
        y: jax.Array = quantized_dot(x, self.quantized, out_dtype=out_dtype, bias=bias)
        return y


OURS[QuantizedLinear] = "it is quantised already"
QUANTISE = Change(
    "quantize_linears",
    "quantise",
    "quantised",
    of_linen="its modules are of flax.linen",
    linen_remedy="a linen module has no weights. Call jaxnorm.linen.quantize_linears on it and its variables",
)


def quantize_linears(
    model: Any, kernels: Quantization | DTypeLike, inputs: Quantization | DTypeLike | None, only: Only | None
) -> tuple[Any, Report]:
    kernels, inputs = pair("quantize_linears", kernels, inputs)
    report, layers = chosen(QUANTISE, model, only)

    # Of each kernel once, so that layers which share one share what comes of it. A kernel that no other layer has is
    # freed before the next one is quantised.
    made: dict[int, dict[str, QuantizedParam]] = {}
    for layer in layers:
        shared = id(layer.kernel)
        if shared not in made:
            made[shared] = _variables(layer.kernel, kernels)
        become(layer, QuantizedLinear)
        _set(layer, kernels, inputs, made[shared])
    return model, report


def _variables(kernel: Any, kernels: Quantization) -> dict[str, QuantizedParam]:
    quantized = replacing.quantised(functools.partial(_quantised, quantization=kernels), kernel.get_value())
    return {
        "values": _variable(quantized.values, kernel, named=True),
        "scales": _variable(quantized.scales, kernel, named=False),
    }


def _variable(array: Any, kernel: Any, *, named: bool) -> QuantizedParam:
    """A variable with the kernel's names of mesh axes, where it has such; that of inputs is `named` or left out."""
    sharding = kernel.get_metadata("out_sharding", None)
    spec = getattr(sharding, "spec", sharding)  # of a NamedSharding, or names
    metadata: dict[str, Any] = {}
    if spec is not None:
        names = (*spec, *[None] * (kernel.ndim - len(spec)))
        metadata["out_sharding"] = (*names[:-2], names[-1], names[-2] if named else None)
        if (mesh := kernel.get_metadata("mesh", None)) is not None:
            metadata["mesh"] = mesh
    # The array lies already where the kernel makes it lie.
    return QuantizedParam(array, eager_sharding=False, **metadata)


def _set(module: Any, kernels: Quantization, inputs: Quantization | None, variables: dict[str, QuantizedParam]) -> None:
    """Makes a linear layer that has a kernel one that has `variables` in its place."""
    module.param_dtype = module.kernel.dtype  # on which the dtype of the result depends
    del module.kernel
    module.values, module.scales = variables["values"], variables["scales"]
    module.kernels, module.inputs = kernels, inputs


@explained
class Float8Linear(nnx.Linear):
    """A `flax.nnx.Linear` that computes in float8, forward and backward, by `jaxnorm.float8_linear`; it has no state.

        layer = Float8Linear(256, 512, dtype=jnp.bfloat16, rngs=rngs)
        y = layer(x)  # float8_linear(x, layer.kernel, bias=layer.bias, recipe=layer.recipe, out_dtype=jnp.bfloat16)

    `jaxnorm.float8_linears` puts them into a model. Parameters, their names, metadata and checkpoints are Flax's.
    `recipe` tells how the function rounds, and what it keeps for the derivative.

    x is rounded to `dtype` first, as in Flax. The kernel is not: it is rounded once, from its own dtype, which its
    gradient has too. The bias is added in float32 before the result is rounded, and its gradient is summed in float32.

    A `Quantized` x of float8_e4m3fn, as from a `QuantizedRMSNorm`, is taken as it is; if that has
    `straight_through=True`, the gradient flows on. The result has Flax's dtype; for a `Quantized` it is `dtype`, or
    bfloat16 where that is None.

    The constructor's other arguments are Flax's. A `precision` of "highest" multiplies the rounded values in float32;
    others have no effect.

    Raises:
      TypeError: recipe is no `Float8Recipe`, `dot_general` or `promote_dtype` is not Flax's, or a dtype is not float32,
        bfloat16 or float16. For a call, those of `float8_linear`.
    """

    recipe: Float8Recipe

    def __init__(self, in_features: int, out_features: int, *, recipe: Float8Recipe = DEFAULT, **flax: Any) -> None:
        recipe = check_recipe("Float8Linear", recipe)
        super().__init__(in_features, out_features, **flax)
        check_own(self, "computed in float8")
        self.recipe = recipe

    def __call__(self, inputs: jax.Array | Quantized, out_sharding: Any = None) -> jax.Array:
        kernel, bias = self.kernel[...], calls.value(self.bias)
        return calls.float8_linear(self, self.recipe, inputs, kernel, bias, out_sharding)


OURS[Float8Linear] = "it is computed in float8 already"
COMPUTE_IN_FLOAT8 = Change(
    "float8_linears",
    "compute in float8",
    "computed in float8",
    of_linen="its modules are of flax.linen: call it within jaxnorm.linen.using_float8()",
    linen_remedy="a linen module has no layers until it is called. Call it within jaxnorm.linen.using_float8()",
    remedy=": give this one dot_general=recipe.dot_general",
)


def float8_linears(model: Any, recipe: Float8Recipe, only: Only | None) -> tuple[Any, Report]:
    recipe = check_recipe("float8_linears", recipe)
    report, layers = chosen(COMPUTE_IN_FLOAT8, model, only)
    for layer in layers:
        become(layer, Float8Linear)
        layer.recipe = recipe
    return model, report
