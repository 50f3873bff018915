"""A differential fuzzer: calls under transformations nested at random and split over a mesh, against the formula.

An example is its seed. It is a call with dtypes, a shape, options and absent operands; up to three transformations of
it; and a mesh, of one device or of several, with the mesh axes that split each axis of each operand and result: XLA
splits the program, or in part a `shard_map`. Results may lie as far from the formula in float64 as the laws say, and as
the formula's own results on one device, in the same dtypes and the same program, do.

    python tests/fuzz.py --seconds 1200 --first 100000     # a long run
    python tests/fuzz.py --first 1234 --examples 1         # one example again
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    # One CPU stands for several. XLA for GPUs leaves out roundings between operations, so that a formula in half types
    # is not what is written.
    flags = "--xla_force_host_platform_device_count=8 --xla_allow_excess_precision=false"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA warns of what it gathers
    os.environ.setdefault("NPROC", "32")  # as in conftest.py
    os.environ["XLA_FLAGS"] = f"{flags} {os.environ.get('XLA_FLAGS', '')}".strip()
    sys.path[:0] = [str(path) for path in (Path(__file__).parents[1], Path(__file__).parent / "lib")]
    import bench  # noqa: F401  # it lets the installed jaxnorm come before the clone's

import jax
import jax.numpy as jnp
import numpy as np
from hlo import count_native_calls
from internals import run_every_kernel
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from random_calls import Call, Draw, draw_call
from tolerances import DSCALE, DX

# How axes of the mesh are had: all by XLA, all in types, or some by a `shard_map`, around the gradient or in it.
MODES = ("auto", "auto", "explicit", "shard_map of grad", "grad of shard_map")
NAMES = ("a", "b", "c")
# A program of several derivatives loses more digits than a norm. What it is compared with says how many, but for
# chance.
SLACK = 4
# Of what is quantised, how far a value may lie from its neighbour, float8_e5m2 having the fewest digits; and for how
# many of a row's maximum; and how many values may be their neighbours where statistics differ by a rounding.
STEP, STEP_OF_LARGEST, FEW = 0.26, 0.01, 2e-3


def _loss(function: Callable) -> Callable:
    """Not linear in any result, so that every derivative is seen; summed up in float32 or float64."""
    return lambda *args: sum(jnp.sin(r).astype(jnp.promote_types(r.dtype, "float32")).sum() for r in function(*args))


def _grad(function, rng):
    """By all operands, or by one."""
    picked = int(rng.integers(-99, 99))

    def transformed(*args):
        return jax.grad(_loss(function), (picked % len(args),) if picked >= 0 else tuple(range(len(args))))(*args)

    return transformed


def _vjp(function, rng, cotangent=lambda x, result: jnp.cos(result)):
    def transformed(x, *others):
        results, pullback = jax.vjp(function, x, *others)
        return results, pullback(tuple(cotangent(x, result) for result in results))

    return transformed


def _vjp_by_x(function, rng):
    """By cotangents that are the same where a result is rounded to another value."""
    return _vjp(function, rng, lambda x, result: jnp.cos(x[..., : result.shape[-1]]).astype(result.dtype))


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
    return lambda x, *args: lax.cond(x.ravel()[0] > 0, lambda: function(x, *args), lambda: function(-x, *args))


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


DERIVATIVES = (_grad, _grad, _vjp, _jvp, _linearize)
OTHERS = (_vmap, _vmap, _scan, _fori, _cond, _map, _checkpoint, _jit, _custom_vjp)
# Of arrays that have their splits in types: without axes and loops of their own.
IN_TYPES = (_vjp, _vjp, _grad, _grad, _jvp, _checkpoint, _jit)


def arrays(function: Callable) -> Callable:
    """The function with a flat tuple of results."""
    return lambda *args: tuple(jax.tree.leaves(function(*args)))


class Example(NamedTuple):
    seed: int
    call: Call
    transformations: tuple[Callable, ...]  # the innermost first
    within: tuple[Callable, ...]  # those before, in a `shard_map`
    mode: str
    sizes: tuple[int, ...]  # of the mesh's axes
    is_reversed: bool  # whether the mesh has the devices in reverse order
    manual: tuple[str, ...]  # the mesh axes of a `shard_map`
    specs: tuple[P, ...]  # of the operands
    result_specs: tuple[P | None, ...]  # of the call's results and their cotangents; None is XLA's choice

    def __str__(self) -> str:
        names = [t.__name__[1:] for t in reversed(self.transformations)]
        names += ["shard_map over " + ", ".join(self.manual)] * bool(self.manual)
        names += [t.__name__[1:] for t in self.within]
        mesh = "x".join(map(str, self.sizes)) + " reversed" * self.is_reversed
        specs = ", ".join(f"{name} {spec}" for name, spec in zip(self.call.operands, self.specs, strict=True))
        split = f"\n  {self.mode}, {specs}; results {', '.join(map(str, self.result_specs))}" * self.is_of_several
        again = f"python tests/fuzz.py --first {self.seed} --examples 1"
        return f"{' of '.join(names) or 'call'} of {self.call}, mesh {mesh}{split}: {again}"

    @property
    def is_of_several(self) -> bool:
        return int(np.prod(self.sizes)) > 1

    def program(self, function: Callable, shard: Callable = lambda f: f) -> Callable:
        """The transformed function of the call's operands."""
        return self._transformed(shard(self._transformed(function, self.within)), self.transformations)

    def _transformed(self, function: Callable, transformations: Sequence[Callable]) -> Callable:
        moving = [i for i, name in enumerate(self.call.operands) if name in self.call.moving]

        def transformed(*operands):
            def of_moving(*args):
                given = dict(zip(moving, args, strict=True))
                return function(*(given.get(i, operand) for i, operand in enumerate(operands)))

            rng, program = np.random.default_rng(self.seed), arrays(of_moving)
            for transform in transformations:
                program = arrays(transform(program, rng))
            return program(*(operands[i] for i in moving))

        return transformed

    def on_mesh(self, implementation: str | None = None) -> list[np.ndarray]:
        """What the devices of the mesh make of it."""
        devices = np.asarray(jax.devices()[: np.prod(self.sizes)][:: -1 if self.is_reversed else 1])
        names, is_auto = NAMES[: len(self.sizes)], self.mode == "auto"
        kind = AxisType.Explicit if self.mode == "explicit" else AxisType.Auto
        mesh = Mesh(devices.reshape(self.sizes), names, axis_types=(kind,) * len(names))

        def split(arrays: Sequence[jax.Array], specs: Sequence[P | None]) -> tuple[jax.Array, ...]:
            pairs = zip(arrays, specs, strict=True)
            return tuple(a if spec is None else lax.with_sharding_constraint(a, spec) for a, spec in pairs)

        def function(*args):
            results = self.call.function(*args, implementation=implementation)
            return split(results, self.result_specs) if is_auto else results

        def program(*args):
            shard = partial(self._shard, mesh=mesh) if self.manual else lambda f: f
            return self.program(function, shard)(*(split(args, self.specs) if is_auto else args))

        with jax.set_mesh(mesh):
            # What a split does not divide comes whole and is split within the program.
            specs = [P()] * len(self.specs) if is_auto else self.specs
            pairs = zip(self.call.operands.values(), specs, strict=True)
            return _run([jax.device_put(array, NamedSharding(mesh, spec)) for array, spec in pairs], program)

    def _shard(self, function: Callable, mesh: Mesh) -> Callable:
        """A `shard_map` over examples, of which each device has some if they divide."""
        call = self.call
        count = int(np.prod([mesh.shape[name] for name in self.manual]))
        lengths = {call.operands[name].shape[0] for name in call.by_example}
        over = P(self.manual) if lengths and all(n and n % count == 0 for n in lengths) else P()
        of_operands = {name: over if name in call.by_example else P() for name in call.operands}
        of_gradients = [of_operands[name] for name in call.operands if name in call.moving] * bool(self.within)
        specs = {"in_specs": (*of_operands.values(),), "out_specs": (*[over] * len(self.result_specs), *of_gradients)}
        return jax.shard_map(function, mesh=mesh, **specs, axis_names={*self.manual})


def draw(seed: int) -> Example:
    drawn = Draw(np.random.default_rng([seed]))
    call, rng, pick = draw_call(drawn), drawn.rng, drawn.pick
    mode, sizes = (pick(MODES), pick(_sizes_of_meshes())) if drawn.chance(0.5) else ("auto", (1,))
    names = NAMES[: len(sizes)]
    length = dict(zip(names, sizes, strict=True))
    manual: tuple[str, ...] = ()
    if "shard_map" in mode:
        # XLA compiles no sum over an axis of one device there, the formula's neither.
        of_several = [name for name in names if length[name] > 1] or names[:1]
        manual = tuple(rng.permutation(of_several)[: rng.integers(1, len(of_several) + 1)].tolist())
    x, *others = call.operands.values()
    left = [name for name in names if name not in manual]
    of_x = _spec(rng, x.shape, left)
    # What is split as x is and what is split otherwise. In types the former alone is allowed, or no split.
    share = {"explicit": 0.2}.get(mode, 0.5)
    specs = [of_x]
    for array in others:
        other = P() if mode == "explicit" else _spec(rng, array.shape, left)
        specs.append(other if rng.random() < share else _aligned(x.shape, of_x, array.shape))
    results = jax.eval_shape(partial(call.function, implementation="xla"), *call.operands.values())
    result_specs = [_spec(rng, r.shape, left) if mode == "auto" and rng.random() < 0.3 else None for r in results]
    if mode != "auto":
        specs = [_that_divides(a.shape, spec, length) for a, spec in zip((x, *others), specs, strict=True)]
    gradient = _vjp_by_x if call.meant else _vjp
    within = (gradient,) if mode == "shard_map of grad" else ()
    transformations = _transformations(drawn, mode)
    if call.meant and np.prod(sizes) > 1:
        transformations = () if within else (gradient,)
    # XLA for GPUs has devices in their own order alone.
    is_reversed = drawn.chance(0.3) and jax.default_backend() == "cpu"
    mesh = mode, sizes, is_reversed, manual, tuple(specs), tuple(result_specs)
    return Example(seed, call, transformations, within, *mesh)


def _transformations(drawn: Draw, mode: str) -> tuple[Callable, ...]:
    pick = drawn.pick
    if mode != "auto":
        return tuple(pick(IN_TYPES) for _ in range(pick((0, 0, 1) if mode == "shard_map of grad" else (1, 1, 2))))
    picked: list[Callable] = []
    for _ in range(pick((1, 2, 2, 3, 3))):
        has_two = sum(t in DERIVATIVES for t in picked) >= 2
        picked.append(pick(OTHERS if has_two or drawn.chance(0.5) else DERIVATIVES))

    def is_pushed(outer: list[Callable]) -> bool:
        """Whether one of these takes a derivative forward, as the second of two does in part."""
        derivatives = [t for t in outer if t in DERIVATIVES]
        return len(derivatives) > 1 or any(t in (_jvp, _linearize) for t in derivatives)

    # What has a derivative of its own in reverse has none forward.
    return tuple(t for i, t in enumerate(picked) if t is not _custom_vjp or not is_pushed(picked[i + 1 :]))


def _sizes_of_meshes() -> list[tuple[int, ...]]:
    """Of all devices, or of the largest power of two of them that is 8 at most."""
    count = 1 << (min(8, jax.device_count()).bit_length() - 1)
    halves = [(n, count // n) for n in (1, 2, 4, 8) if count % n == 0]
    return [(count,), *halves, *((2, n // 2, m) for n, m in halves if n % 2 == 0)]


def _spec(rng: np.random.Generator, shape: Sequence[int], names: Sequence[str]) -> P:
    """Each mesh axis splits some axis of the array, or none."""
    own: list[list[str]] = [[] for _ in shape]
    for name in rng.permutation(names).tolist():
        axis = int(rng.integers(-1, len(shape)))
        if axis >= 0 and shape[axis] > 1:
            own[axis].append(name)
    return P(*(tuple(axes) or None for axes in own))


def _aligned(x_shape: Sequence[int], spec: P, shape: Sequence[int]) -> P:
    """Split as x along the axes that the array has in common with it: the first ones, or else the last."""
    first = 0 if tuple(x_shape[: len(shape)]) == tuple(shape) else len(x_shape) - len(shape)
    if first < 0:
        return P()
    pairs = zip(x_shape[first:], spec[first:], shape, strict=False)
    return P(*(axes if n == of_x and n > 1 else None for of_x, axes, n in pairs))


def _that_divides(shape: Sequence[int], spec: P, length: dict[str, int]) -> P:
    """Without the axes of a mesh that do not divide the array."""
    kept = []
    for n, axes in zip(shape, spec, strict=False):
        fits: list[str] = []
        for name in axes or ():
            fits += [name] if n % np.prod([length[fit] for fit in (*fits, name)]) == 0 else []
        kept.append(tuple(fits) or None)
    return P(*kept)


def complaints(example: Example) -> list[str]:
    """Which results of an example are wrong, and how far."""
    call = example.call
    operands = list(call.operands.values())
    try:
        ours = example.on_mesh()
    except Exception as raised:
        if _is_refused(example, raised):
            return []
        raise
    theirs = _run(operands, _reference(example))
    if call.meant:
        exact = [np.asarray(a, np.float64) for a in theirs]
    else:
        with jax.enable_x64(True):
            wide = [a.astype("float64") if jnp.issubdtype(a.dtype, jnp.floating) else a for a in operands]
            exact = _run(wide, _reference(example))
    found = []
    for i, (a, b, e) in enumerate(zip(ours, theirs, exact, strict=True)):
        name = f"result {i}, {a.dtype}{a.shape},"
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            found.append(f"{name} should be {b.dtype}{b.shape}")
        elif call.meant and example.is_of_several and i < len(example.result_specs):
            found += [f"{name} has {why}" for why in _steps(a, b)]
        elif (times := error(a, b, e, _law(example, b))) > 1:
            found.append(f"{name} has {times:.3g} times the error allowed")
    return found


def _run(args: Sequence[Any], program: Callable) -> list[np.ndarray]:
    return [np.asarray(a) for a in jax.jit(program)(*args)]


def _reference(example: Example) -> Callable:
    """The formula; of a quantised norm whose kernel runs what it means, as the formula may round to another value."""
    call = example.call
    if call.meant:
        text = jax.jit(example.program(call.function)).lower(*call.operands.values()).as_text()
        # Weights with a batch have no kernel.
        if any("quantized" in name for name in count_native_calls(text)):
            return example.program(call.meant)
    return example.program(partial(call.function, implementation="xla"))


def _law(example: Example, result: np.ndarray) -> float:
    """The relative error that the laws allow.

    A sum and tangents are, those of weights too. XLA may leave out such a rounding of the formula, which then has no
    error of its own. And what a quantised norm is compared with has as much itself.
    """
    given = (a.dtype for a in example.call.operands.values())
    law = law_of(result.dtype.name, *(dtype.name for dtype in given if jnp.issubdtype(dtype, jnp.floating)))
    return 2 * law if example.call.meant else law


def law_of(*dtypes: str) -> float:
    """The relative error that the laws allow where all is rounded to the narrowest of these."""
    return max(law[dtype] for law in (DX, DSCALE) for dtype in dtypes)


def error(ours: np.ndarray, theirs: np.ndarray, exact: np.ndarray, law: float) -> float:
    """The L2 error as a multiple of what is allowed; NaN and infinities lie where both of the others have the same."""
    ours, wide = (a.astype(np.float64) for a in (ours, theirs))
    own, of_formula, known = (np.where(np.isfinite(a), 0, a) for a in (ours, wide, exact))
    agree = (of_formula == known) | np.isnan(of_formula) & np.isnan(known)
    if not np.array_equal(own[agree], known[agree], equal_nan=True):
        return np.inf
    there = agree & np.isfinite(exact)
    ours, wide, exact = ours[there], wide[there], exact[there]
    allowed = SLACK * (law * np.linalg.norm(exact) + np.linalg.norm(wide - exact)) + 1e-6
    return float(np.linalg.norm(ours - exact) / allowed)


def _steps(ours: np.ndarray, theirs: np.ndarray) -> list[str]:
    """What is wrong with values of which a few may be the neighbours of others."""
    ours, theirs = np.float64(ours), np.float64(theirs)
    away, size = np.abs(ours - theirs), np.abs(theirs)
    moved = np.count_nonzero(away > 1e-3 * size + 1e-6)
    is_far = np.any(away > STEP * size + STEP_OF_LARGEST * size.max(initial=0))
    too_many = [f"{moved} neighbours of {size.size} values"] if moved > 2 + FEW * size.size else []
    return ["a value that is no neighbour"] * bool(is_far) + too_many


def _is_refused(example: Example, raised: Exception) -> bool:
    """Whether a call, or a product in it, wants other splits, which an Explicit mesh has in its types; whether there is
    an operand around a `custom_vjp` under jit, of jax.numpy alone too; or whether XLA fails with the formula as it did
    with the kernels: it has limits of its own in a `shard_map`."""
    if not isinstance(raised, jax.errors.JaxRuntimeError):
        around = ["No constant handler for type"] * (_custom_vjp in (*example.transformations, *example.within))
        of_types = (
            "an Explicit mesh",
            "to provide output PartitionSpec for the gather",
            "dot_general requires contracting dimensions",
            *around,
        )
        return any(said in str(raised) for said in of_types)
    try:
        example.on_mesh("xla")
    except jax.errors.JaxRuntimeError as of_formula:
        return str(of_formula).splitlines()[0] == str(raised).splitlines()[0]
    return False


def fuzz(first: int, *, seconds: float = np.inf, examples: float = np.inf) -> Iterator[str]:
    """For each example from a seed on its failure, or nothing, until so many seconds or examples are over."""
    end, seed = time.monotonic() + seconds, first
    while time.monotonic() < end and seed < first + examples:
        example = draw(seed)
        try:
            found = complaints(example)
        except Exception as raised:
            found = [f"{type(raised).__name__}: {raised}"]
        yield f"{example}\n  " + "\n  ".join(found) if found else ""
        if seed % 50 == 49:
            jax.clear_caches()
        seed += 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first example")
    parser.add_argument("--seconds", type=float, default=np.inf)
    parser.add_argument("--examples", type=float, default=np.inf)
    run_every_kernel()
    examples = failures = 0
    for failure in fuzz(**vars(parser.parse_args())):
        examples, failures = examples + 1, failures + bool(failure)
        print(failure, end="\n" * bool(failure), flush=True)
    print(f"{examples} examples, {failures} failures")
    sys.exit(failures > 0)
