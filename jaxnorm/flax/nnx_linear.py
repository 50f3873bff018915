"""Linear layers of `flax.nnx` with quantised kernels, and how a model gets them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxnorm.flax import calls, nnx_calls, nnx_layers
from jaxnorm.flax.calls import nnx
from jaxnorm.flax.explained import explained
from jaxnorm.flax.quantizations import pair
from jaxnorm.flax.replacement import Only
from jaxnorm.ops.quantize.api import quantize, quantize_kernel
from jaxnorm.ops.quantized_dot.api import quantized_dot
from jaxnorm.quantization import Quantization, Quantized
from jaxnorm.reports import Report

_quantised = jax.jit(quantize_kernel, static_argnames="quantization")


class QuantizedParam(nnx.Variable[Any]):
    """A quantised kernel, or its scales: variables that are not trained, as `nnx.Param` are."""


@explained
class QuantizedLinear(nnx.Linear):
    """A `flax.nnx.Linear` whose kernel is quantised, computed by `jaxnorm.quantized_dot`.

        layer = QuantizedLinear(256, 512, kernels=Quantization(jnp.int8), rngs=rngs)
        y = layer(x)

    In place of the kernel there are `QuantizedParam`s: `values` of shape (out_features, in_features) and `scales` of
    shape (out_features, 1); `kernels` is how they came about, and `quantized` has both. With `inputs` x is quantised
    too, after it is rounded to the dtype of the computation. An x that is a `Quantized` already, as a
    `QuantizedRMSNorm` gives it, is taken as it is. The result has Flax's dtype; that of a `Quantized` is `dtype`, or
    bfloat16 where that is None. The constructor's other arguments are Flax's; `precision` changes nothing. There is no
    `out_sharding` of a call.
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
        nnx_layers.check_own(self, "quantised")
        _set(self, kernels, inputs, _variables(self.kernel, kernels))

    @property
    def quantized(self) -> Quantized:
        """The kernel: its `dequantize()` is the layer's, rounded."""
        return Quantized(self.values[...], self.scales[...], transposed=True)

    def __call__(self, inputs: jax.Array | Quantized, out_sharding: None = None) -> jax.Array:
        if out_sharding is not None:
            raise ValueError(
                f"{type(self).__name__}: got out_sharding={out_sharding}, expected None; reshard the result instead."
            )
        bias = nnx_calls.value(self.bias)
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


nnx_layers.OURS[QuantizedLinear] = "it is quantised already"
QUANTISE = nnx_layers.Change(
    "quantize_linears",
    "quantise",
    "quantised",
    of_linen="its modules are of flax.linen",
    linen_remedy="a linen module has no weights. Call jaxnorm.linen.quantize_linears on it and its variables",
)


def quantize_linears(
    model: Any, kernels: Quantization | DTypeLike, inputs: Quantization | DTypeLike | None, only: Only | None
) -> tuple[Any, Report]:
    """`jaxnorm.quantize_linears`."""
    kernels, inputs = pair("quantize_linears", kernels, inputs)
    report, layers = nnx_layers.chosen(QUANTISE, model, only)

    # Of each kernel once, so that layers which share one share what comes of it. A kernel that no other layer has is
    # freed before the next one is quantised.
    made: dict[int, dict[str, QuantizedParam]] = {}
    for layer in layers:
        shared = id(layer.kernel)
        if shared not in made:
            made[shared] = _variables(layer.kernel, kernels)
        nnx_layers.become(layer, QuantizedLinear)
        _set(layer, kernels, inputs, made[shared])
    return model, report


def _variables(kernel: Any, kernels: Quantization) -> dict[str, QuantizedParam]:
    array = kernel.get_value()
    quantised = functools.partial(_quantised, quantization=kernels)
    # Of a model without values there is only what shapes and dtypes come of it.
    is_abstract = isinstance(array, jax.ShapeDtypeStruct)
    quantized = jax.eval_shape(quantised, array) if is_abstract else quantised(array)
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
