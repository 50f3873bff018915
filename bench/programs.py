"""What the benchmarks time of an op, for jaxnorm and for XLA's fusion of the formula, and the check before it."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# Relative L2, of y and dx. Eight bits and their scales: what is near the middle of two values may go either way.
TOLERANCE = {"float32": 2e-6, "bfloat16": 4e-3, "float16": 5e-4}
TOLERANCE |= dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "int8"), 5e-3)
SUMS = 5e-6  # of sums over rows, at least
FEW = 33


class Op(NamedTuple):
    """What is measured."""

    function: Callable[..., Any]  # of an implementation: a function of x and the weights
    operands: Callable[..., Any]  # of a shape, a dtype and a seed: x, a tuple of weights, and dy; no dy: no gradient
    moved: Callable[..., dict[str, float]]  # of a shape and the bytes of a number: the bytes by direction
    carries: bool = False  # x is (x, residual) and the result (y, the sum), which may take the residual's buffer
    is_pure: bool = True  # jaxnorm's programs have no kernel of XLA's
    is_kept: bool = False  # XLA's backward is faster from what its forward keeps
    is_last: bool = False  # the result is no input of the same op
    is_rounded: bool = False  # to 8 bits, of what is computed in float32 whatever x is
    fixed: int = 1  # trailing axes that are the same where few rows are checked
    few: int = FEW  # rows that are checked, along each other axis
    orders: bool = False  # a kernel reads rows in an order that XLA's code finds


class Program(NamedTuple):
    """What to time. `carries`: the first of its arguments is donated, and the first of its two results is the next."""

    function: Any
    arguments: tuple[Any, ...]
    carries: bool = False


def nbytes(shape, itemsize, forward, backward=None):
    """The bytes by direction, of so many arrays of a shape that each program reads or writes once."""
    size = math.prod(shape.dims) * itemsize
    arrays = {"forward": forward}
    if backward is not None:
        arrays |= {"backward": backward, "step": forward + backward}
    return {direction: count * size for direction, count in arrays.items()}


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _draw(kind, dtype, dims, seed):
    # JAX's default generator takes longer to compile than everything that is timed.
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), len(dims))
    of_kind = {"x": lambda normal: normal, "weights": lambda normal: 1 + 0.1 * normal, "logits": lambda x: 3 * x}[kind]
    return tuple(of_kind(jax.random.normal(key, of)).astype(dtype) for key, of in zip(keys, dims, strict=True))


def draw(seed, dtype, *dims, kind="x"):
    """Arrays of normal numbers, so that nothing overflows in float16: sums of a million of them are near a thousand."""
    return _draw(kind, jnp.dtype(dtype).name, dims, seed)


@functools.cache
def functions(op, implementation):
    """Each program as one jitted function, so that it is compiled once for all operands of a shape."""
    norm = op.function(implementation)

    def carry(residual, x, weights):
        y, total = norm((x, residual), *weights)
        return total, y  # in this order: JAX gives a donated buffer to the first result that is like it

    # The gradients of x and of a residual are one array, which XLA would copy to give it twice.
    wanted = (lambda dx: jax.tree.leaves(dx)[0]) if op.carries else (lambda dx: dx)
    return jitted(norm, wanted) | {"carry": jax.jit(carry, donate_argnums=0)}


def jitted(norm, wanted_of):
    """The functions of x and weights that make up the programs; wanted_of(dx) is what the backward gives of dx."""

    def forward(x, weights):
        results = norm(x, *weights)
        return tuple(results) if isinstance(results, tuple) else results  # as cotangents are

    def residuals(x, weights):
        return jax.vjp(forward, x, weights)[1]

    def backward(vjp, dy):
        dx, dweights = vjp(dy)
        return wanted_of(dx), [leaf for leaf in jax.tree.leaves(dweights) if leaf.dtype != jax.dtypes.float0]

    def step(x, weights, dy):
        y, vjp = jax.vjp(forward, x, weights)
        return y, backward(vjp, dy)

    def whole_vjp(x, weights, dy):
        return step(x, weights, dy)[1]

    return {f.__name__: jax.jit(f) for f in (forward, residuals, backward, step, whole_vjp)}


def programs(op, implementation, x, weights, dy):
    """The `Program` of each direction.

    jaxnorm's forward writes the sum over the residual, so the residual is donated, as it is dead in a model that runs
    forward only; of one that lives on XLA would make a copy first. XLA's own code writes the sum wherever it is asked
    to, and is not tied to the residual's buffer.

    The backward is timed from its residuals (x, the statistics), as training runs it; XLA's is its whole vjp, the
    fastest of its choices but for logits, which computes the statistics again. "step" is y and all gradients in one
    program for both.
    """
    f = functions(op, implementation)
    by_direction = each_direction(f, implementation == "xla" and not op.is_kept, x, weights, dy)
    if implementation != "xla" and op.carries:
        by_direction["forward"] = Program(f["carry"], (jnp.copy(x[1]), x[0], weights), carries=True)
    return by_direction


def each_direction(f, is_whole, x, weights, dy):
    """The `Program` of each direction, of what `jitted` gives; the backward is the whole vjp or starts within."""
    forward = {"forward": Program(f["forward"], (x, weights))}
    if dy is None:
        return forward
    within = Program(f["whole_vjp"], (x, weights, dy)) if is_whole else None
    backward = within or Program(f["backward"], (f["residuals"](x, weights), dy))
    return forward | {"backward": backward, "step": Program(f["step"], (x, weights, dy))}


def check(op, shape, dtype, implementation="native", spoil=lambda results: results):
    """The largest error of all results of few rows, relative to its tolerance, against the formula in float64.

    Of 8 bits it is the formula in float32. How a row is computed depends on its length and dtypes, not on the number of
    rows. `spoil` changes the results.
    """
    dims = shape.dims
    few = shape._replace(dims=(*(min(n, op.few) for n in dims[: -op.fixed]), *dims[-op.fixed :]))
    x, weights, dy = op.operands(few, dtype, 0)
    actual = spoil(_results(op, implementation, x, weights, dy))
    if op.carries:  # what is normalised is the sum as it is rounded
        x = (x[0] + x[1], jnp.zeros_like(x[1]))
    with jax.enable_x64(True):
        operands = jax.tree.map(lambda array: array if op.is_rounded else _wide(array), (x, weights, dy))
        exact = jax.device_get(_results(op, "xla", *operands))
    sums = len(jax.tree.leaves(exact)) - (0 if dy is None else len(jax.tree.leaves(exact[1][1])))
    errors = []
    for i, (result, expected) in enumerate(zip(*map(jax.tree.leaves, (actual, exact)), strict=True)):
        tolerance = TOLERANCE[result.dtype.name]
        is_sum = i >= sums and result.size < jax.tree.leaves(x)[0].size
        errors.append(relative_error(result, expected) / (max(tolerance, SUMS) if is_sum else tolerance))
        if result.dtype.itemsize == 1:
            errors.append(steps_apart(result, expected) / 1.5)  # none is farther than its neighbour
    return float(np.max(errors))  # NaN if one is


def steps_apart(result, expected):
    """How many values of eight bits a result lies from what is expected, unless sums of float32 all but cancel."""
    result, expected = np.asarray(result), np.asarray(expected)
    error, size = np.abs(np.float64(result) - np.float64(expected)), np.abs(np.float64(expected)).max()
    return (np.abs(_codes(result) - _codes(expected)) * (error > 2.0**-20 * size)).max()


def _codes(values):
    """Consecutive numbers of the neighbouring values of eight bits."""
    codes = np.asarray(values).view(np.int8).astype(int)
    return codes if values.dtype == np.int8 else np.where(codes < 0, -(codes & 0x7F), codes)


def _results(op, implementation, x, weights, dy):
    f = functions(op, implementation)
    return f["forward"](x, weights) if dy is None else f["step"](x, weights, dy)


def _wide(array):
    return array.astype("float64") if array.dtype.name in ("float32", "bfloat16", "float16") else array


def relative_error(actual, expected):
    return float(np.linalg.norm(np.float64(actual) - np.float64(expected)) / np.linalg.norm(np.float64(expected)))
