"""The public functions of x alone, and what they share with the others."""

from collections.abc import Sequence
from typing import Any, Literal

import jax

from jaxnorm import compat, ffi, heads, layouts, primitives, reference, validation

Implementation = Literal["native", "jnp"]


def rms_norm(
    x: Any,
    scale: Any = None,
    bias: Any = None,
    *,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    axis: int | Sequence[int] = -1,
    multiply_before_cast: bool = True,
    out_dtype: Any = None,
    axis_name: Any = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Divides x by its root mean square over `axis`.

        y = x * rsqrt(mean(x², axis) + epsilon) * (scale + scale_offset) + bias

    All of it is computed in float32 (in float64 where x, a weight or the result is float64) and rounded once, at the
    end. It may be transformed in every way that the formula may be, differentiated any number of times included; a
    gradient has the shape and the dtype of what it is the gradient of.

    Over trailing axes, scale and bias may have more axes before the normalised ones, which broadcast against x's: for x
    of shape (batch, sequence, heads, D) there may be a scale for each head, (heads, D), as of queries and keys. Kernels
    serve such weights where the axes along which they differ are neighbours in x, and rows of up to 8192 elements. A
    vmapped weight is one of these: an ensemble is one native call.

    Args:
      x: floating-point array of rank 1 or more.
      scale: factor with the shape of the normalised axes, in x's order, or with axes before them, as above; None is a
        factor of 1.
      bias: summand, as scale; None is 0.
      epsilon: non-negative Python number added to the mean square.
      scale_offset: Python number added to scale; 1.0 is Gemma's convention. Ignored without scale.
      axis: the axis, or the set of axes, to normalise over. Kernels serve trailing axes, the jnp formula any.
      multiply_before_cast: False rounds x * rsqrt(...) to the result's dtype before it is multiplied by scale, as the
        Llama and T5 of the model hubs do.
      out_dtype: dtype of the result; None is x's.
      axis_name: None, or a mesh axis of a surrounding `jax.shard_map`, or a tuple of them, or the name of the axis of a
        `jax.vmap`: rows are split over it evenly. x, scale, bias and the result are one part; the statistics are of
        whole rows, by one exchange of them each way. Runs in jax.numpy.
      implementation: "native" is the CPU or CUDA kernel, "jnp" the formula in jax.numpy, None the kernel where it
        exists. `python -m jaxnorm.info` tells which. Under vmap over scale or bias alone, and not x, the formula runs.

    Returns:
      An array of x's shape.

    Raises:
      ValueError: an axis is out of range or repeated, a weight has another shape than the normalised axes or has
        axes before them that do not broadcast against x's, a weight is sharded unlike x over an Explicit mesh, a name
        in axis_name is not bound or there twice, epsilon is negative, epsilon or scale_offset is not finite, or
        implementation is unknown.
      TypeError: an array or out_dtype is not floating-point of 16, 32 or 64 bits, axis is not made of ints, or epsilon,
        scale_offset or multiply_before_cast is traced.
      RuntimeError: implementation="native" and there is no kernel for this call; the message says why.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019, https://arxiv.org/abs/1910.07467.
    """
    (y,) = compute(
        "rms_norm",
        x,
        None,
        scale,
        bias,
        epsilon,
        scale_offset,
        axis,
        multiply_before_cast,
        out_dtype,
        axis_name,
        implementation,
    )
    return y


def layer_norm(
    x: Any,
    scale: Any = None,
    bias: Any = None,
    *,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    axis: int | Sequence[int] = -1,
    multiply_before_cast: bool = True,
    out_dtype: Any = None,
    axis_name: Any = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Shifts x to mean 0 and scales it to variance 1 over `axis`.

        y = (x - mean) * rsqrt(mean((x - mean)², axis) + epsilon) * (scale + scale_offset) + bias,  mean = mean(x, axis)

    The variance is the mean of squared deviations as written, never E[x²] - mean², so that rows far from 0 keep their
    precision. Arguments, dtypes, result and errors are those of `rms_norm`.

    Args:
      x: floating-point array of rank 1 or more.
      scale: factor with the shape of the normalised axes, in x's order, or with axes before them; None is a factor
        of 1.
      bias: summand, as scale; None is 0.
      epsilon: non-negative Python number added to the variance.
      scale_offset: Python number added to scale. Ignored without scale.
      axis: the axis, or the set of axes, to normalise over. Kernels serve trailing axes, the jnp formula any.
      multiply_before_cast: False rounds (x - mean) * rsqrt(...) to the result's dtype before it is multiplied by scale.
      out_dtype: dtype of the result; None is x's.
      axis_name: None, or the axes of a mesh over which rows are split, as for `rms_norm`.
      implementation: None, "native" or "jnp", as for `rms_norm`.

    Returns:
      An array of x's shape.

    Raises:
      ValueError, TypeError, RuntimeError: as `rms_norm` does.

    Source: Ba, Kiros and Hinton, Layer Normalization, 2016, https://arxiv.org/abs/1607.06450.
    """
    (y,) = compute(
        "layer_norm",
        x,
        None,
        scale,
        bias,
        epsilon,
        scale_offset,
        axis,
        multiply_before_cast,
        out_dtype,
        axis_name,
        implementation,
    )
    return y


def compute(
    op: Literal["rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm"],
    x: Any,
    residual: Any,
    scale: Any,
    bias: Any,
    epsilon: Any,
    scale_offset: Any,
    axis: int | Sequence[int],
    multiply_before_cast: bool,
    out_dtype: Any,
    axis_name: Any,
    implementation: Implementation | None,
    pad_to: Any = None,
) -> tuple[jax.Array, ...]:
    """The result of one of the public functions: y, and the sum where it adds a residual."""
    norm, (x, residual, scale, bias) = prepare(
        op,
        x,
        residual,
        scale,
        bias,
        epsilon,
        scale_offset,
        axis,
        multiply_before_cast,
        out_dtype,
        axis_name,
        implementation,
        pad_to,
    )
    if implementation == "jnp" or not has_primitive(op, norm, x, residual, (scale, bias)):
        return reference.apply(norm, x, residual, scale, bias)
    return primitives.apply(norm, x, residual, scale, bias)


def has_primitive(op: str, norm: reference.Norm, x: jax.Array, *others: Any) -> bool:
    """Whether this norm is the primitive's, which is a kernel where there is one and keeps little for a gradient."""
    if norm.split is None:
        return has_kernel(op, norm, x, *others)
    if norm.native_for:
        raise no_kernel(op, "axis_name is given, and what is exchanged over devices is exchanged by jax.numpy")
    # A primitive that exchanges parts would not know what to do with the axis of a vmap.
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return set(norm.split.names) <= set(manual) and norm.axes == tuple(range(-len(norm.axes), 0))


def prepare(
    op: str,
    x: Any,
    residual: Any,
    scale: Any,
    bias: Any,
    epsilon: Any,
    scale_offset: Any,
    axis: int | Sequence[int],
    multiply_before_cast: bool,
    out_dtype: Any,
    axis_name: Any,
    implementation: Implementation | None,
    pad_to: Any = None,
) -> tuple[reference.Norm, tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array | None]]:
    """The checked arguments of a public function: what is static, and (x, residual, scale, bias)."""
    validation.check_implementation(op, implementation)
    x = validation.check_x(op, x)
    if residual is not None or op.startswith("add_"):
        residual = validation.check_residual(op, residual, x)
    axes = validation.check_axes(op, axis, x.ndim)
    scale = validation.check_weight(op, "scale", scale, x, axes)
    bias = validation.check_weight(op, "bias", bias, x, axes)
    out_dtype = validation.check_out_dtype(op, out_dtype, x)
    dtypes = [out_dtype, *(operand.dtype for operand in (x, residual, scale, bias) if operand is not None)]
    norm = reference.Norm(
        kind="rms" if "rms_norm" in op else "layer",
        axes=axes,
        epsilon=validation.check_epsilon(op, epsilon),
        # A sum with -0 is the weight itself, one of -0 too, and kernels may leave it out.
        scale_offset=validation.check_number(op, "scale_offset", scale_offset) or -0.0,
        multiply_before_cast=validation.check_flag(op, "multiply_before_cast", multiply_before_cast),
        compute_dtype=layouts.wide_dtype(dtypes),
        out_dtype=out_dtype,
        native_for=op if implementation == "native" else None,
        pad_to=validation.check_pad_to(op, pad_to, axes, axis_name),
        split=validation.check_axis_name(op, axis_name),
    )
    return norm, (x, residual, scale, bias)


def has_kernel(
    op: str,
    norm: reference.Norm,
    x: jax.Array,
    residual: jax.Array | None,
    optional_weights: Sequence[jax.Array | None],
) -> bool:
    """Whether some platform has a kernel for this norm; if it must be native, an error where none is at hand."""
    weights = [weight for weight in optional_weights if weight is not None]
    weight_dtypes = [weight.dtype for weight in weights]
    residual_dtype = None if residual is None else residual.dtype
    reason = ffi.unsupported(norm.axes, x.shape, x.dtype, norm.out_dtype, weight_dtypes, residual_dtype)
    if reason is None:
        reason = heads.unsupported(x.shape, len(norm.axes), heads.lead_of(len(norm.axes), weights), op)
    if any(compat.awaits_reduction(array) for array in (x, *weights)):
        reason = "x or a weight awaits a reduction over an axis of an Explicit mesh"
    if residual is not None and jax.typeof(residual).sharding.spec != jax.typeof(x).sharding.spec:
        reason = "x and residual are sharded differently over an Explicit mesh"
    if not norm.native_for:
        return reason is None
    platform = compat.default_platform()
    if reason is None and not ffi.available(platform):
        reason = ffi.why_not(platform)
    if reason is not None:
        raise no_kernel(op, reason)
    return True


def no_kernel(op: str, reason: str) -> RuntimeError:
    return RuntimeError(
        f"{op}: implementation='native' cannot serve this call: {reason}. "
        "With implementation=None it runs in jax.numpy."
    )
