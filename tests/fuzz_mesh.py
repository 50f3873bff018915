"""A differential fuzzer of meshes: calls whose operands are sharded at random, against one device.

An example is its seed. It is a call with a mesh, and for each axis of each operand, cotangent and result the mesh axes
that split it, or none; XLA splits the call, or in part a `shard_map`. Values and gradients may lie as far from those in
float64 as the laws say, and as those of one device by the same implementation do; NaN and infinities lie where they do.

    python tests/fuzz_mesh.py --seconds 1200 --first 100000     # a long run
    python tests/fuzz_mesh.py --first 1234 --examples 1         # one example again
"""

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    # One CPU stands for several. XLA for GPUs leaves out roundings between operations, so that a formula in half types
    # is not what is written.
    flags = "--xla_force_host_platform_device_count=8 --xla_allow_excess_precision=false"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA warns of what it gathers
    os.environ["XLA_FLAGS"] = f"{flags} {os.environ.get('XLA_FLAGS', '')}".strip()
    sys.path[:0] = [str(path) for path in (Path(__file__).parents[1], Path(__file__).parent / "lib")]
    import bench  # noqa: F401  # it lets the installed jaxnorm come before the clone's

import fuzzing
import jax
import jax.numpy as jnp
import numpy as np
from fuzzing import error, law_of, picker
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from mesh_calls import Call, draw_call

from jaxnorm.native import compat

# How axes of the mesh are had: all by XLA, all in types, or some by a `shard_map`, around the gradient or in it.
MODES = ("auto", "auto", "explicit", "shard_map of grad", "grad of shard_map")
NAMES = ("a", "b", "c")
# Of what is quantised, how far a value may lie from its neighbour, float8_e5m2 having the fewest digits; and for how
# many of a row's maximum; and how many values may be their neighbours where statistics differ by a rounding.
STEP, STEP_OF_LARGEST, FEW = 0.26, 0.01, 2e-3


class Example(NamedTuple):
    seed: int
    call: Call
    mode: str
    sizes: tuple[int, ...]  # of the mesh's axes
    is_reversed: bool  # whether the mesh has the devices in reverse order
    manual: tuple[str, ...]  # the mesh axes of a `shard_map`
    specs: tuple[P, ...]  # of the operands
    result_specs: tuple[P | None, ...]  # of the results and their cotangents; None is XLA's choice

    def __str__(self) -> str:
        mesh = "x".join(map(str, self.sizes)) + " reversed" * self.is_reversed
        over = f" over {', '.join(self.manual)}" if self.manual else ""
        specs = ", ".join(f"{name} {spec}" for name, spec in zip(self.call.operands, self.specs, strict=True))
        results = ", ".join(map(str, self.result_specs))
        return (
            f"{self.call}\n  {self.mode}{over}, mesh {mesh}: {specs}; results {results}: "
            f"python tests/fuzz_mesh.py --first {self.seed} --examples 1"
        )

    def mesh(self) -> Mesh:
        count = int(np.prod(self.sizes))
        devices = np.asarray(jax.devices()[:count][:: -1 if self.is_reversed else 1])
        kind = AxisType.Explicit if self.mode == "explicit" else AxisType.Auto
        names = NAMES[: len(self.sizes)]
        return Mesh(devices.reshape(self.sizes), names, axis_types=(kind,) * len(names))


def draw(seed: int) -> Example:
    rng = np.random.default_rng([seed])
    pick = picker(rng)
    call = draw_call(rng, pick)
    mode, sizes = pick(MODES), pick(_sizes_of_meshes())
    names = NAMES[: len(sizes)]
    manual: tuple[str, ...] = ()
    if "shard_map" in mode:
        # XLA compiles no sum over an axis of one device there, the formula's neither.
        of_several = [name for name, size in zip(names, sizes, strict=True) if size > 1] or names[:1]
        manual = tuple(rng.permutation(of_several)[: rng.integers(1, len(of_several) + 1)].tolist())
    length = dict(zip(names, sizes, strict=True))
    x, *_ = call.operands.values()
    left = [name for name in names if name not in manual]
    of_x = _spec(rng, x.shape, left)
    # What is split as x is and what is split otherwise. In types the former alone is allowed, or no split.
    share = {"explicit": 0.2}.get(mode, 0.5)
    specs = [of_x]
    for array in [*call.operands.values()][1:]:
        other = P() if mode == "explicit" else _spec(rng, array.shape, left)
        specs.append(other if rng.random() < share else _aligned(x.shape, of_x, array.shape))
    results = jax.eval_shape(partial(call.function, implementation="jnp"), *call.operands.values())
    result_specs = [_spec(rng, r.shape, left) if mode == "auto" and rng.random() < 0.3 else None for r in results]
    if mode != "auto":
        pairs = zip(call.operands.values(), specs, strict=True)
        specs = [_that_divides(array.shape, spec, length) for array, spec in pairs]
    # XLA for GPUs has devices in their own order alone.
    is_reversed = bool(rng.random() < 0.3) and jax.default_backend() == "cpu"
    return Example(seed, call, mode, sizes, is_reversed, manual, tuple(specs), tuple(result_specs))


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
            if n % (np.prod([length[fit] for fit in fits], dtype=int) * length[name]) == 0:
                fits.append(name)
        kept.append(tuple(fits) or None)
    return P(*kept)


def complaints(example: Example) -> list[str]:
    """Which results of an example are wrong, and how far."""
    call = example.call
    operands = tuple(call.operands.values())
    types = jax.eval_shape(partial(call.function, implementation="jnp"), *operands)
    rng = np.random.default_rng([example.seed, 1])
    cotangents = tuple(jnp.asarray(rng.standard_normal(r.shape), r.dtype) for r in types)
    run = partial(_on_mesh, example, operands=operands, cotangents=cotangents)
    for implementation in _implementations(call, operands, cotangents):
        try:
            ours = run(implementation)
            break
        except Exception as raised:
            if not _is_refused(raised) and not _fails(partial(run, "jnp"), raised):
                raise
    else:
        return []
    one = _fetched(jax.jit(_step(call, implementation))(operands, cotangents))
    exact = one if call.rounds else _exact(call, operands, cotangents)
    given = [a.dtype.name for a in operands if jnp.issubdtype(a.dtype, jnp.floating)]
    found = []
    for i, (a, b, e) in enumerate(zip(ours, one, exact, strict=True)):
        name = f"result {i}" if i < len(types) else f"the gradient of {call.moving[i - len(types)]}"
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            found.append(f"{name} is {a.dtype}{a.shape} instead of {b.dtype}{b.shape}")
        elif not np.array_equal(_not_finite(a), _not_finite(b), equal_nan=True):
            found.append(f"{name}, {a.dtype}{a.shape}, has other infinities or NaN than on one device")
        elif call.rounds and i < len(types):
            found += [f"{name}, {a.dtype}{a.shape}, {why}"] if (why := _steps(a, b)) else []
        elif (times := error(a, b, e, law_of(a.dtype.name, *given))) > 1:
            found.append(f"{name}, {a.dtype}{a.shape}, has {times:.3g} times the error allowed")
    return [f"{why}, by {implementation}" for why in found]


def _not_finite(values: np.ndarray) -> np.ndarray:
    wide = np.float64(values)
    return np.where(np.isfinite(wide), 0, wide)


def _steps(ours: np.ndarray, theirs: np.ndarray) -> str | None:
    """What is wrong with values of which a few may be the neighbours of others."""
    ours, theirs = np.float64(ours), np.float64(theirs)
    largest = np.abs(theirs).max(initial=0)
    away = np.abs(ours - theirs)
    if np.any(away > STEP * np.abs(theirs) + STEP_OF_LARGEST * largest):
        return "has a value that is no neighbour"
    moved = np.count_nonzero(away > 1e-3 * np.abs(theirs) + 1e-6)
    return f"has {moved} neighbours of {away.size} values" if moved > 2 + FEW * away.size else None


def _step(call: Call, implementation: str | None, transform: Callable = lambda f: f) -> Callable:
    """(operands, cotangents) -> the results, and the gradients by what moves."""
    names = list(call.operands)
    function = transform(partial(call.function, implementation=implementation))

    def step(operands: Any, cotangents: Any) -> Any:
        def of_moving(*moving: Any) -> Any:
            values = dict(zip(names, operands, strict=True)) | dict(zip(call.moving, moving, strict=True))
            return function(*values.values())

        moving = [operands[names.index(name)] for name in call.moving]
        results, pullback = jax.vjp(of_moving, *moving)
        return results, pullback(tuple(map(_like, cotangents, results)))

    return step


def _like(cotangent: jax.Array, result: jax.Array) -> jax.Array:
    """A cotangent as the result is split in types, and over as many axes of a `shard_map`."""
    sharding: Any = jax.typeof(result).sharding
    if any(sharding.spec):
        cotangent = jax.sharding.reshard(cotangent, sharding)
    return compat.match_varying_axes(cotangent, result)[0]


def _implementations(call: Call, operands: Any, cotangents: Any) -> tuple[str | None, ...]:
    """Kernels, if they serve the call both ways on one device, and what is chosen where they serve none on a mesh."""
    try:
        jax.jit(_step(call, "native")).lower(operands, cotangents).compile()
    except RuntimeError:
        return (None,)
    return "native", None


def _is_refused(raised: Exception) -> bool:
    """Whether it says that a call, or a product in it, wants other splits, which an Explicit mesh has in its types."""
    of_types = "an Explicit mesh", "dot_general requires contracting dimensions"
    return any(said in str(raised) for said in of_types) and not isinstance(raised, jax.errors.JaxRuntimeError)


def _fails(run: Callable, raised: Exception) -> bool:
    """Whether XLA fails with the formula as it did with the kernels: it has limits of its own in a `shard_map`."""
    if not isinstance(raised, jax.errors.JaxRuntimeError):
        return False
    try:
        run()
    except jax.errors.JaxRuntimeError as of_formula:
        return str(of_formula).splitlines()[0] == str(raised).splitlines()[0]
    return False


def _exact(call: Call, operands: Any, cotangents: Any) -> list[np.ndarray]:
    """The formula's results in float64, on one device."""
    with jax.enable_x64(True):
        wide = jax.tree.map(
            lambda a: a.astype("float64") if jnp.issubdtype(a.dtype, jnp.floating) else a, (operands, cotangents)
        )
        results = jax.eval_shape(partial(call.function, implementation="jnp"), *wide[0])
        dots = tuple(dot.astype(r.dtype) for dot, r in zip(wide[1], results, strict=True))
        return _fetched(jax.jit(_step(call, "jnp"))(wide[0], dots))


def _fetched(tree: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def _on_mesh(example: Example, implementation: str | None, *, operands: Any, cotangents: Any) -> list[np.ndarray]:
    mesh, call = example.mesh(), example.call
    step = _manual_step(example, implementation, mesh) if example.manual else _step(call, implementation)
    # What a split does not divide comes whole and is split within the program.
    specs = [*zip(example.specs, operands, strict=True), *zip(example.result_specs, cotangents, strict=True)]
    whole = [_that_divides(array.shape, spec or P(), dict(mesh.shape)) != (spec or P()) for spec, array in specs]

    def split(arrays: Any, specs: Any) -> tuple:
        places = [None if spec is None else NamedSharding(mesh, spec) for spec in specs]
        pairs = zip(arrays, places, strict=True)
        return tuple(a if place is None else jax.lax.with_sharding_constraint(a, place) for a, place in pairs)

    def program(operands: Any, cotangents: Any) -> Any:
        if example.mode == "auto":
            operands, cotangents = split(operands, example.specs), split(cotangents, example.result_specs)
        results, gradients = step(operands, cotangents)
        return (split(results, example.result_specs) if example.mode == "auto" else results), gradients

    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(array, NamedSharding(mesh, P() if uneven or spec is None else spec))
            for uneven, (spec, array) in zip(whole, specs, strict=True)
        ]
        count = len(operands)
        return _fetched(jax.jit(program)(tuple(placed[:count]), tuple(placed[count:])))


def _manual_step(example: Example, implementation: str | None, mesh: Mesh) -> Callable:
    """The step with the examples of a `shard_map`, of which each device has some if they divide."""
    call = example.call
    count = int(np.prod([mesh.shape[name] for name in example.manual]))
    lengths = {call.operands[name].shape[0] for name in call.by_example}
    over = P(example.manual) if lengths and all(n and n % count == 0 for n in lengths) else P()
    of_operands = tuple(over if name in call.by_example else P() for name in call.operands)
    moving = tuple(of_operands[list(call.operands).index(name)] for name in call.moving)
    shard = partial(jax.shard_map, mesh=mesh, axis_names={*example.manual})
    if example.mode == "grad of shard_map":
        transform = partial(shard, in_specs=of_operands, out_specs=over)
        return _step(call, implementation, transform)
    return shard(_step(call, implementation), in_specs=(of_operands, over), out_specs=(over, moving))


fuzz = partial(fuzzing.fuzz, draw, complaints)


if __name__ == "__main__":
    fuzzing.main(__doc__, fuzz)
