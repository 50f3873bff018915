"""Law 5's other side for the quantised norms: what NumPy and ml_dtypes make of the unquantised norm."""

from functools import cache, wraps

import jax
import jax.numpy as jnp
import numpy as np
from cases import ADDS, NORMS, array, axis_of
from native import are_cuda_kernels

import jaxnorm
from jaxnorm import Quantization


def asked_for(function):
    """The function, which gives the result alone, and a tuple where it is asked for the sum or y."""

    def called(*args, **options):
        results = tuple(result for result in function(*args, **options)[:3] if result is not None)
        return results if results[1:] else results[0]

    return wraps(function)(called)


QUANTIZED = {"rms": asked_for(jaxnorm.rms_norm_quantized), "layer": asked_for(jaxnorm.layer_norm_quantized)}
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}
OF_ARRAYS, STATIC_SCALE = {**LARGEST, "int4": 7.0, "float4_e2m1fn": 6.0}, 0.013
# Keywords of Quantization: what shares a scale.
GRANULARITIES = {
    "token": {},
    "tensor": {"granularity": "tensor"},
    "groups of 32": {"granularity": "group", "group_size": 32},
    "groups of 64": {"granularity": "group", "group_size": 64},
    "groups of 128": {"granularity": "group", "group_size": 128},
}
TO = tuple(LARGEST)
E4M3, E5M2, INT8 = ({"dtype": to} for to in TO)
# None is the kernel, where there is one. Of the formula XLA's compiler for GPUs decides how exactly it divides.
IMPLEMENTATIONS = (None,) if are_cuda_kernels() else ("xla", None)


def flushed(v):
    """XLA counts subnormal numbers as zero on a CPU."""
    is_lost = (np.abs(v) < np.finfo(np.float32).tiny) & (jax.default_backend() == "cpu")
    return np.where(is_lost, np.copysign(np.float32(0), v), v)


def scale_of(v, quantization, over):
    """v's scale over these axes, each of length 1 in it."""
    amax = np.abs(v).max(over, keepdims=True, initial=0)
    scale = amax / np.float32(OF_ARRAYS[quantization.dtype.name])
    if quantization.power_of_two:
        fraction, exponent = np.frexp(scale)
        up = np.ldexp(np.float32(1), np.where(fraction == 0.5, exponent - 1, exponent))
        scale = np.where(np.isfinite(scale), up, scale)
    scale = np.maximum(scale, np.float32(2.0**-126))
    scale = np.minimum(scale, np.float32(np.inf if quantization.max_scale is None else quantization.max_scale))
    return np.where(amax == 0, np.float32(1), scale)


@np.errstate(all="ignore")
def by_numpy(y, quantization, smooth=None, static_scale=None, axes=1):
    """Values and scales of y, a float32 result of a norm."""
    v = np.asarray(y)
    if smooth is not None:
        v = flushed(v * np.asarray(smooth, np.float32))
    shape, group = v.shape, quantization.group_size
    if group is not None:
        v = v.reshape(*shape[:-1], shape[-1] // group, group)
    scale = np.float32(static_scale) if static_scale is not None else scale_of(v, quantization, axis_of(axes))
    largest = np.float32(OF_ARRAYS[quantization.dtype.name])
    values = np.clip(v * (np.float32(1) / scale), -largest, largest)
    if jnp.issubdtype(quantization.dtype, jnp.integer):
        values = np.where(np.isnan(values), 0, np.rint(values))
    return values.astype(quantization.dtype).reshape(shape), scale if group is None else scale[..., 0]


def array_by_numpy(array, quantization, axes=-1):
    """Values and scales of an array of which what lies along these axes shares a scale, or all of it."""
    axes = range(-array.ndim, 0) if quantization.granularity == "tensor" else np.atleast_1d(axes)
    last = range(-len(axes), 0)
    v = np.moveaxis(np.asarray(array, np.float32), axes, last)
    values, scales = (np.moveaxis(a, last, axes) for a in by_numpy(v, quantization, axes=len(axes)))
    return values, scales.reshape(()) if quantization.granularity == "tensor" else scales


def assert_same(actual, expected):
    """The same bits; any NaN is like any other."""
    for a, e in zip(actual, expected, strict=True):
        a, e = np.asarray(a), np.asarray(e)
        assert (a.shape, a.dtype) == (e.shape, e.dtype)
        bits, is_nan = f"u{a.dtype.itemsize}", np.isnan(e.astype(np.float32))
        np.testing.assert_array_equal(np.isnan(a.astype(np.float32)), is_nan)
        np.testing.assert_array_equal(np.where(is_nan, 0, a.view(bits)), np.where(is_nan, 0, e.view(bits)))


def static_scale_of(quantization):
    return STATIC_SCALE if quantization.granularity == "tensor" else None


def call(kind, quantization, x, scale=None, bias=None, smooth=None, residual=None, **options):
    """The function under test with its operands in one order, and a static scale where it wants one."""
    given = {"static_scale": static_scale_of(quantization), "smooth_scale": smooth, "residual": residual}
    return QUANTIZED[kind](x, scale, bias=bias, quantization=quantization, **given, **options)


def functions_of(quantized):
    """Of a row: its function of values and scales, and the one that is differentiated: the dequantised result."""

    def function(*args, **options):
        q = quantized(*args, **options)
        return q.values, q.scales

    def derived(*args, **options):
        return (quantized(*args, straight_through=True, **options).dequantize(),)

    return {"function": function, "derived": derived, "exact": None, "exact_gradients": None, "backward_sizes": ()}


@cache
def quantize(kind, quantization, implementation=None, **options):
    """A compiled function of (x, scale, bias, smooth, residual)."""
    return jax.jit(lambda *args: call(kind, quantization, *args, implementation=implementation, **options))


@cache
def plain(kind, implementation, **options):
    """A compiled function of (x, scale, bias) or (x, residual, scale, bias): what is quantised, and the sum."""

    def function(x, *args):
        norm = NORMS[kind] if len(args) == 2 else ADDS[kind]
        return norm(x, *args, out_dtype="float32", implementation=implementation, **options)

    return jax.jit(function)


def assert_exact(kind, to, x, scale=None, bias=None, smooth=None, residual=None, *, implementation, axes=1, **options):
    """Law 5; `to` are the keywords of a Quantization. Returns the result."""
    quantization = Quantization(**to)
    options["axis"] = axis_of(axes)
    result = quantize(kind, quantization, implementation, **options)(x, scale, bias, smooth, residual)
    if residual is None:
        y = plain(kind, implementation, **options)(x, scale, bias)
    elif implementation == "xla":
        # XLA may not round the sum of half types before it is normalised: its excess precision.
        y, total = plain(kind, implementation, **options)(x, residual, scale, bias)
    else:
        total = sum_of(x, residual)
        y = plain(kind, implementation, **options)(total, scale, bias)
    if residual is not None:
        result, new_residual = result
        assert_same([new_residual], [total])
    values, scales = by_numpy(y, quantization, smooth, static_scale_of(quantization), axes)
    assert_same([result.scales, result.values], [scales, values])
    return result


def sum_of(x, residual, branch_scale=1.0):
    wide = np.float64 if "float64" in (x.dtype, residual.dtype) else np.float32
    branch = np.asarray(branch_scale, wide) * np.asarray(x, wide)
    return array(branch + np.asarray(residual, wide), residual.dtype)


def to(dtype, shared="token", **options):
    """How an array is quantised to this dtype, 4 bits too."""
    return Quantization(jnp.dtype(dtype), **GRANULARITIES[shared], **options)
