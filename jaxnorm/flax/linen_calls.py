"""How a norm of `flax.linen` calls the functions of this package, its own class or Flax's."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxnorm.flax import calls
from jaxnorm.flax.calls import linen
from jaxnorm.quantization import Quantized


def default_scale_init(key: Any, shape: Any, dtype: Any) -> jax.Array:
    """Flax's default, ones, told from ones that were asked for: with a scale_offset the default is zeros."""
    return linen.initializers.ones(key, shape, dtype)


def arguments(x: Any, *, mask: jax.Array | None = None) -> tuple[jax.Array, jax.Array | None]:
    """Those of a call of a norm of Flax."""
    return jnp.asarray(x), mask


def why_flax(module: Any, x: jax.Array, mask: jax.Array | None, *addend: jax.Array) -> str | None:
    """Why Flax's own code computes `module(x)`, or the norm of a sum that is like x, of which these are the rest."""
    return calls.why_flax(module, x, mask, given(module), dtypes(module, x, *addend))


def dtypes(module: Any, *rows: jax.Array) -> list[Any]:
    """Those of all that a call reads and writes."""
    return [module.param_dtype, jnp.float32 if module.dtype is None else module.dtype, *(a.dtype for a in rows)]


def fused(
    norm: Callable[..., Any],
    module: Any,
    rows: tuple[jax.Array, ...],
    mask: jax.Array | None,
    parameters_of: Callable[..., Any] | None = None,
) -> Any:
    """`norm` of x, or of x and an addend, called as `module` says.

    None, with no parameter made yet, where Flax's own code computes it. Outside of the module's own call
    `parameters_of` is `there`.
    """
    *_, normalised = rows  # with an addend the sum, which is like it
    axes = calls.called_axes(module, normalised, mask, why_flax(module, normalised, mask, *rows))
    if axes is None:
        return None
    axis, features = axes
    scale, bias = (parameters_of or parameters)(module, normalised, features)
    dtype = linen.dtypes.canonicalize_dtype(normalised, scale, bias, dtype=module.dtype)
    options = {"epsilon": module.epsilon, "axis_name": module.axis_name, **calls.options(module)}
    return norm(*rows, scale, bias=bias, axis=axis, out_dtype=dtype, **options)


def quantized(
    module: Any, x: jax.Array, addend: dict[str, jax.Array], mask: object, scales: dict[str, Any]
) -> Quantized | tuple[Quantized, jax.Array]:
    """The quantised norm of x, or of x and an addend, see `calls.with_addend`, called as `module` says."""
    axis = calls.function_axes(module, x, mask, "a quantised norm")
    scale, bias = parameters(module, x, axis)
    result = module._functions.quantized(
        x,
        scale,
        bias=bias,
        quantization=module.quantization,
        **addend,
        straight_through=module.straight_through,
        epsilon=module.epsilon,
        axis=axis,
        axis_name=module.axis_name,
        **scales,
        **calls.rounded_once(module, "a quantised norm"),
    )
    return calls.quantized_and_sum(result)


def given(module: Any) -> list[jax.Array]:
    """The parameters that the call comes with; while they are initialised, none."""
    names = (name for name in ("scale", "bias") if module.has_variable("params", name))
    return [linen.meta.unbox(module.get_variable("params", name)) for name in names]


def parameters(module: Any, x: jax.Array, axis: tuple[int, ...]) -> tuple[jax.Array | None, jax.Array | None]:
    """The module's scale and bias, of the shape of these axes of x. An RMSNorm has no bias."""
    factor, features = scale(module, x, axis), [x.shape[a] for a in axis]
    has_bias = getattr(module, "use_bias", False)
    bias = module.param("bias", module.bias_init, features, module.param_dtype) if has_bias else None
    return factor, bias


def there(module: Any, *_: Any) -> tuple[jax.Array | None, jax.Array | None]:
    """The scale and bias of a module that has them, read from outside of its call."""
    scale, bias = (linen.meta.unbox(module.get_variable("params", name)) for name in ("scale", "bias"))
    return scale, bias


def scale(module: Any, x: jax.Array, axis: tuple[int, ...], name: str = "scale") -> jax.Array | None:
    """The module's parameter of this name, of the shape of these axes of x; None if it has none."""
    if not module.use_scale:
        return None
    scale_init = module.scale_init
    if scale_init is default_scale_init and calls.options(module)["scale_offset"]:
        scale_init = linen.initializers.zeros
    parameter: jax.Array = module.param(name, scale_init, [x.shape[a] for a in axis], module.param_dtype)
    return parameter
