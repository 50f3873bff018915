"""A differential fuzzer: ops under transformations nested at random, against `implementation="jnp"`.

An example is its seed. It is an op of the table with dtypes, a shape, options and absent weights, and up to three
transformations of it. The kernels' results may lie as far from the formula in float64 as the laws say, and as the
formula's own results, in the same dtypes and the same program, do.

    python tests/fuzz.py --seconds 1200 --first 100000     # a long run
    python tests/fuzz.py --first 1234 --examples 1         # one example again
"""

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    # XLA for GPUs leaves out roundings between operations, so that a formula in half types is not what is written.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_allow_excess_precision=false".strip()
    sys.path[:0] = [str(path) for path in (Path(__file__).parents[1], Path(__file__).parent / "lib")]
    import bench  # noqa: F401  # it lets the installed jaxnorm come before the clone's

import fuzzing
import jax
import jax.numpy as jnp
import numpy as np
from cases import ADDS, NORMS
from fuzzing import arrays, draw_op, draw_size, error, is_quantised, law_of, picker
from hlo import count_native_calls
from jax import lax
from op import Op, Size
from ops.gated_activation import halves
from ops.gated_activation_quantized import plain as activated
from ops.gated_norm import VARIANTS, gated
from quantizing import GRANULARITIES, LARGEST, static_scale_of

from jaxnorm import Quantization


def _loss(function: Callable) -> Callable:
    """Not linear in any result, so that every derivative is seen; summed up in float32 or float64."""
    return lambda *args: sum(jnp.sin(r).astype(jnp.promote_types(r.dtype, "float32")).sum() for r in function(*args))


def _grad(function, rng):
    return lambda *args: jax.grad(_loss(function), tuple(range(len(args))))(*args)


def _grad_of_some(function, rng):
    picked = rng.integers(99)
    return lambda *args: jax.grad(_loss(function), (int(picked) % len(args),))(*args)


def _vjp(function, rng):
    def transformed(*args):
        results, pullback = jax.vjp(function, *args)
        return results, pullback(tuple(map(jnp.cos, results)))

    return transformed


def _jvp(function, rng):
    return lambda *args: jax.jvp(function, args, tuple(map(jnp.cos, args)))


def _linearize(function, rng):
    def transformed(*args):
        results, tangents = jax.linearize(function, *args)
        return results, tangents(*map(jnp.sin, args))

    return transformed


def _vmap(function, rng):
    bits, axis = int(rng.integers(1, 64)), int(rng.integers(2))

    def transformed(*args):
        moving = [bits >> i & 1 for i in range(len(args))]
        moving[0] |= not any(moving)
        axes = [min(axis, a.ndim) if moves else None for moves, a in zip(moving, args, strict=True)]
        examples = [a if at is None else jnp.stack([a, jnp.sin(a)], at) for at, a in zip(axes, args, strict=True)]
        return jax.vmap(function, axes)(*examples)

    return transformed


def _scan(function, rng):
    def transformed(*args):
        def step(first, factor):
            results = function(first, *args[1:])
            return first * factor + jnp.tanh(results[0].mean()).astype(first.dtype), results

        return lax.scan(step, args[0], jnp.asarray([0.5, 1.5], args[0].dtype))

    return transformed


def _fori(function, rng):
    def transformed(*args):
        zeros = tuple(jnp.zeros(r.shape, r.dtype) for r in jax.eval_shape(function, *args))
        return lax.fori_loop(0, 2, lambda i, sums: tuple(map(jnp.add, sums, function(*args))), zeros)

    return transformed


def _cond(function, rng):
    return lambda *args: lax.cond(
        args[0].ravel()[0] > 0, lambda: function(*args), lambda: function(-args[0], *args[1:])
    )


def _map(function, rng):
    return lambda first, *others: lax.map(lambda a: function(a, *others), jnp.stack([first, jnp.cos(first)]))


def _checkpoint(function, rng):
    policies = (None, jax.checkpoint_policies.dots_saveable, jax.checkpoint_policies.everything_saveable)
    return jax.checkpoint(function, policy=policies[rng.integers(3)])


def _jit(function, rng):
    return jax.jit(function)


def _custom_vjp(function, rng):
    """Inside another function's own rule."""

    @jax.custom_vjp
    def transformed(*args):
        return function(*args)

    transformed.defvjp(lambda *args: jax.vjp(function, *args), lambda pullback, dots: pullback(dots))
    return transformed


DERIVATIVES = (_grad, _grad_of_some, _vjp, _jvp, _linearize)
REVERSE_ONLY = (_custom_vjp,)
OTHERS = (_vmap, _vmap, _scan, _fori, _cond, _map, _checkpoint, _jit, _custom_vjp)


class Example(NamedTuple):
    seed: int
    op: Op
    dtypes: tuple[str, ...]
    weights: tuple[str | None, ...]
    size: Size
    transformations: tuple[Callable, ...]  # the innermost first

    def __str__(self) -> str:
        names = " of ".join(t.__name__[1:] for t in reversed(self.transformations)) or "call"
        given = ", ".join(map(str, (*self.dtypes, *self.weights)))
        return f"{names} of {self.op} ({given}) at {self.size}: python tests/fuzz.py --first {self.seed} --examples 1"

    def program(self, function: Callable, **options: Any) -> Callable:
        """The transformed function of the operands that are there."""
        rng = np.random.default_rng(self.seed)
        absent = [kind is None for kind in (*self.dtypes, *self.weights)]

        def call(*args):
            given = iter(args)
            return function(*(None if gone else next(given) for gone in absent), **self.size.options, **options)

        transformed = arrays(call)
        for transform in self.transformations:
            transformed = arrays(transform(transformed, rng))
        return transformed

    def args(self) -> list[jax.Array]:
        return [a for a in self.op.draw(self.size, self.dtypes, self.weights) if a is not None]


def draw(seed: int) -> Example:
    rng = np.random.default_rng([seed])
    pick = picker(rng)
    op, dtypes, weights = draw_op(pick)
    picked: list[Callable] = []
    for _ in range(pick((1, 2, 2, 3, 3))):
        has_two = sum(t in DERIVATIVES for t in picked) >= 2
        picked.append(pick(OTHERS if has_two or rng.random() < 0.5 else DERIVATIVES))
    # What has a derivative of its own in reverse has none forward.
    picked = [t for i, t in enumerate(picked) if t not in REVERSE_ONLY or not _is_pushed(picked[i + 1 :])]
    return Example(seed, op, dtypes, weights, draw_size(op, rng, pick), tuple(picked))


def _is_pushed(outer: list[Callable]) -> bool:
    """Whether one of these takes a derivative forward, as the second of two does in part."""
    derivatives = [t for t in outer if t in DERIVATIVES]
    return len(derivatives) > 1 or any(t in (_jvp, _linearize) for t in derivatives)


def complaints(example: Example) -> list[str]:
    """Which results of an example are wrong, and how far."""
    args = example.args()
    run = partial(_run, args)
    ours, theirs = run(example.program(example.op.differentiable)), run(_reference(example))
    if is_quantised(example.op):
        exact = [np.asarray(a, np.float64) for a in theirs]
    else:
        with jax.enable_x64(True):
            exact = [np.asarray(a) for a in _run([a.astype("float64") for a in args], _reference(example))]
    found = []
    for i, (a, b, e) in enumerate(zip(ours, theirs, exact, strict=True)):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            found.append(f"result {i} is {a.dtype}{a.shape} instead of {b.dtype}{b.shape}")
        elif (times := error(a, b, e, _law(example, b))) > 1:
            found.append(f"result {i}, {a.dtype}{a.shape}, has {times:.3g} times the error allowed")
    return found


def _run(args: list[Any], program: Callable) -> list[Any]:
    return [np.asarray(a) for a in jax.jit(program)(*args)]


def _reference(example: Example) -> Callable:
    """The formula; of a quantised norm whose kernel runs what it means, as the formula may round to another value."""
    function = example.op.differentiable
    if is_quantised(example.op):
        text = jax.jit(example.program(function)).lower(*example.args()).as_text()
        # Weights with a batch have no kernel.
        if any("quantized" in name for name in count_native_calls(text)):
            return example.program(partial(_dequantized, example.op))
    return example.program(function, implementation="jnp")


def _unquantized(op: Op, name: str, *args: Any, **options: Any) -> Any:
    """The result in float32, with the sum if there is one."""
    if op.kind == "elements":
        return activated(name.rpartition(" ")[2])(*(halves(*args) if len(args) == 1 else args))
    if "gate" in op.operands:
        x, gate, scale = args
        (variant,) = [variant for variant in VARIANTS if name.endswith(f" {variant}")]
        # No kernel gives float32 of half types.
        return gated(variant)(x.astype("float32"), gate.astype("float32"), scale, **options)
    *arrays, scale, bias = args
    norm = ADDS[op.kind] if len(arrays) > 1 else NORMS[op.kind]
    return norm(*arrays, scale, bias=bias, out_dtype="float32", **options)


def _dequantized(op: Op, *args: Any, **options: Any) -> tuple[Any, ...]:
    """What a quantised norm means, by the norm's own kernel: a last bit of difference might round to another value."""
    *of_norm, smooth = args if "smooth" in op.operands else (*args, None)
    of, shared = op.name.split(" to ")
    granularity, to = shared.split(", ")
    quantization = Quantization(to, **GRANULARITIES[granularity])
    y, *total = jax.tree.leaves(_unquantized(op, of, *of_norm, **options))
    v = y if smooth is None else y * lax.stop_gradient(smooth.astype(jnp.float32))
    groups = lax.stop_gradient(v).reshape(*v.shape[:-1], -1, quantization.group_size or v.shape[-1])
    amax, given = jnp.abs(groups).max(-1, keepdims=True), static_scale_of(quantization)
    # By a constant XLA would not divide but multiply by its rounded reciprocal.
    scale = amax / jnp.where(amax == 0, 1, jnp.float32(LARGEST[to])) if given is None else jnp.float32(given)
    values = jnp.clip(groups * (1 / scale), -LARGEST[to], LARGEST[to])
    # Behind a barrier, or XLA for GPUs would leave the rounding out: it allows itself more precision than that.
    values = lax.optimization_barrier(jnp.round(values) if to == "int8" else values.astype(to))
    exact = (values.astype(jnp.float32) * scale).reshape(v.shape)
    carrier = v.astype(args[0].dtype).astype(jnp.float32)  # whose cotangents have x's dtype
    return carrier + lax.stop_gradient(exact - carrier), *total


def _law(example: Example, result: np.ndarray) -> float:
    """The relative error that the laws allow.

    A sum and tangents are, those of weights too. XLA may leave out such a rounding of the formula, which then has no
    error of its own. And what a quantised norm is compared with has as much itself.
    """
    law = law_of(result.dtype.name, *example.dtypes, *example.weights)
    return 2 * law if is_quantised(example.op) else law


fuzz = partial(fuzzing.fuzz, draw, complaints)


if __name__ == "__main__":
    fuzzing.main(__doc__, fuzz)
