"""Laws 1, 4 and 5 at each length at which one CUDA kernel gives way to another, wherever arrays begin.

A test is one program of an op and its dtypes at all of these lengths, since most of its time is the compilation.
"""

import importlib
import itertools
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ALIKE, ALONE, KINDS, PAIRS, bits, draw
from coverage import in_full
from internals import LONGEST_GATED, LONGEST_PER_HEAD
from jax.sharding import PartitionSpec as P
from op import Op, Size, rows
from ops.added_norm import added, padded
from ops.branch_scale import scaled
from ops.gated_norm import MAMBA, QWEN, VARIANTS, gate, grouped
from ops.group_norm import ACTIVATIONS, group_norm
from ops.norm import norm, per_head
from ops.quantized_norm import gated_quantized, quantized, quantized_sum
from ops.rotary import ROTATED, qkv_rotary, rotary
from ops.sandwich_norm import sandwich
from ops.softmax import cross_entropy, softmax
from oracle import f64, spacing
from quantizing import assert_same
from tolerances import gradient_errors, result_errors

pytestmark = pytest.mark.needs("cuda")


# Numbers of vectors, among them each that some plan has room for: these are multiples of 32 from 256 on, and powers of
# two behind the longest row of one block.
ONE_BLOCK = 4096
VECTORS = [*range(1, 257), *range(288, ONE_BLOCK + 1, 32), *(2**power + 32 for power in range(12, 18))]
# What plans depend on: whose statistics a row has, and whether it has a gate, before them or behind.
KINDS_OF_ROWS = (("rms", ""), ("layer", ""), ("rms", "first"), ("rms", "last"))
CLUSTER = 16  # the largest that a device has
# Rows that are too many for one block to add up their gradients of a weight, and the columns of the longest.
MANY, COLS_OF_MANY = 520, 1300


@cache
def lengths(way, dtype):
    """Of each stretch of lengths with the same kernels the longest of one block, else the shortest; and one less."""
    cuda, vector = importlib.import_module("jaxnorm._cuda"), 16 // jnp.dtype(dtype).itemsize

    def kernels(vectors):
        cols = vectors * vector
        known = [(kind, gate) for kind, gate in KINDS_OF_ROWS if not gate or cols <= LONGEST_GATED]
        plans = [cuda.plan(way, kind, dtype, cols, CLUSTER, gate) for kind, gate in known]
        return [(p["regime"], p["elements_per_thread"], min(p["threads_per_row"], 33), p["registers"]) for p in plans]

    stretches = [list(stretch) for _, stretch in itertools.groupby(VECTORS, kernels)]
    found = [stretch[-1] if stretch[-1] <= ONE_BLOCK else stretch[0] for stretch in stretches]
    return [vectors * vector - rest for vectors in found for rest in (0, 1)]


def where(dims):
    """Of each row something else, and the columns that are labels."""
    return (np.asarray(draw("where", dims)) > -0.3) | (np.arange(dims[-1]) < 4)


# None, and what the kernels of masks and those of windows look at.
MASKS = {
    "": lambda *dims: {},
    "where": lambda *dims: {"where": where(dims)},
    "where, causal": lambda *dims: {"where": where(dims), "causal": True, "offset": dims[-1] // 2},
    "where, window": lambda *dims: {
        **MASKS["where, causal"](*dims),
        "offset": dims[-1] - 3,
        "window": dims[-1] // 3 + 1,
    },
}
ROTARY = (2, 16, 24, 64, 80, 96, 100, 101, 128, 192, 256, 320, 511, 512)  # from the least vector to the longest head
# One channel a group, one group, groups that vectors cross, channels that they do not divide; by positions.
GROUPS = ((5, 3), (24, 1), (1, 40), (32, 4), (4, 20), (9, 32))
POSITIONS = (1, 7, 130)


def shapes(op, dtypes, way, mask):
    """Few rows each; of results without a mask as many as law 1 wants, which is of hundreds of elements."""
    dtype = dtypes[op.arrays - 1 if op.has_sum else 0]  # of a sum, which is normalised
    if op.public.endswith("rotary"):
        heads = 4 + 4 * op.public.startswith("qkv")
        return [Size((2, 5, heads, cols), (cols,)) for cols in ROTARY if cols % 2 == 0 or "in part" in op.name]
    if op.public == "group_norm":
        return [rows(3, n, count * size, group_size=size) for n in POSITIONS for count, size in GROUPS if n * size > 1]
    found = lengths(way, dtype)
    if "per head" in op.name:
        return [Size((2, 3, 2, n), (*heads, n)) for n in found if n <= LONGEST_PER_HEAD for heads in ((2,), (3, 1))]
    if "gated" in op.public:
        found = [n for n in found if n <= LONGEST_GATED]
    if "groups of" in op.name:
        found = [n for n in found if n % 32 == 0]
    if "grouped" in op.name:
        return [rows(3, 2 * n, group_size=n) for n in found]
    # Some rows, or one if it is long; of a norm's result a single row may have a kernel of its own.
    is_plain = way == "forward" and op.public in ("rms_norm", "layer_norm")
    some = {n: max(3, 1024 // n) if way == "forward" and not mask else 3 for n in found}
    counts = {n: [1] * (n > 17_000 or (is_plain and n > 1000)) + [some[n]] * (n < 17_000 or mask != "") for n in found}
    # Padding that is no number of vectors' columns.
    more = {"pad_to": 112} if "padded" in op.name else {}
    return [rows(count, n, **more, **MASKS[mask](count, n)) for n in found for count in counts[n]]


def shapes_of_many(op, dtypes):
    """The like with many rows, of whole vectors: the others have the kernels of few."""
    aligned = [n for n in lengths("backward", dtypes[-1]) if n <= COLS_OF_MANY and n % 8 == 0]
    if "per head" not in op.name:
        return [rows(MANY, n) for n in aligned]
    heads = ((MANY // 2, 2), (2,)), ((2, 2, MANY // 4), (2, 1))
    return [Size((*dims, n), (*of, n)) for n in aligned for dims, of in heads]


class Case(NamedTuple):
    op: Op
    dtypes: tuple
    weights: str = "float32"
    absent: str = ""  # an operand
    options: Mapping[str, Any] = {}
    mask: str = ""

    def __str__(self):
        given = f"by {self.weights}" if self.op.weights else ""
        return " ".join(
            filter(None, [f"{self.op},", *self.dtypes, given, self.absent, *map(str, self.options.values()), self.mask])
        )

    def draw(self, size):
        kinds = [self.weights if name != self.absent else None for name in self.op.weights]
        return self.op.draw(size, self.dtypes, kinds)

    def sizes(self, way):
        return shapes(self.op, self.dtypes, way, self.mask)


def each(ops, dtypes, **factors):
    """Their product; of half types, which share their templates, one and with --full both."""
    kinds = [kinds for kinds in dtypes if "float16" not in kinds or in_full(True)]
    for op, each_of, *values in itertools.product(ops, kinds, *factors.values()):
        yield Case(op, each_of, **dict(zip(factors, values, strict=True)))


RMS, LAYER = KINDS
WIDER, NARROWER = {"out_dtype": np.dtype("float32")}, {"out_dtype": np.dtype("bfloat16")}
ROUNDED = {"multiply_before_cast": False}
F32, BF16 = ("float32",), ("bfloat16",)
HALVES = [pair for pair in PAIRS if pair[0] == "bfloat16"]


def split(kind):
    """A norm of rows that are split over devices, of which there is one."""
    op, mesh = norm(kind), jax.make_mesh((1,), ("b",), devices=jax.devices()[:1])

    def function(*args, **options):
        of_part = partial(op.function, axis_name="b", **options)
        return jax.shard_map(of_part, mesh=mesh, in_specs=P(), out_specs=P())(*args)

    return replace(op, name=f"split {kind}", function=function, exact_gradients=None)


def norms(kind, absent, rarely_absent):
    alone, usual = [norm(kind), per_head(kind)], {"absent": [absent]}
    yield from each(alone, ALONE, **usual)
    yield from each(alone, [BF16], weights=["bfloat16"], **usual)
    yield from each(alone[:1], [F32, BF16], absent=[rarely_absent])
    yield from each(alone[:1], [BF16], options=[WIDER])
    yield from each(alone[:1], [F32], options=[NARROWER])
    if kind == RMS:
        yield from each(alone, [BF16], weights=["bfloat16", "float32"], options=[ROUNDED], **usual)
    yield from each([added(kind), scaled(kind), padded(kind)], PAIRS, **usual)
    yield from each([added(kind), scaled(kind)], HALVES, weights=["bfloat16"], **usual)
    yield from each([split(kind)], [BF16, F32], options=[{}, NARROWER, WIDER])


def gates():
    ops = [gate(MAMBA), gate(VARIANTS[3])]  # each order, and each activation
    yield from each([*ops, grouped(MAMBA), grouped(QWEN)], ALIKE)
    yield from each(ops, [BF16 * 2], weights=["bfloat16"])


def rotations():
    for interleaved, partly in itertools.product((False, True), (False, True)):
        options = {"interleaved": interleaved, "partial": partly}
        ops = [of(kind, **options) for of, kind in ((rotary, RMS), (rotary, LAYER), (rotary, False), (qkv_rotary, RMS))]
        # The ops of the table have one of these, and artefacts go by their names.
        named = [replace(op, name=f"{op.name}{' interleaved' * interleaved}{' in part' * partly}") for op in ops]
        yield from each(named[:2], ROTATED)
        yield from each(named[2:3], ROTATED, weights=[None])
        yield from each(named[3:], [BF16 + F32 if partly else F32 * 2])


def groups():
    for (x, y), activation in zip(itertools.product((F32, BF16), (NARROWER, WIDER)), ACTIVATIONS, strict=True):
        yield from each([group_norm(activation)], [x], options=[y])


def quantised(granularity, to):
    for kind, absent in ((RMS, ["bias"]), (LAYER, [""])):
        yield from each([quantized(kind, granularity, to)], ALONE, absent=absent)
        yield from each([quantized_sum(kind, granularity, to)], PAIRS[:4], absent=absent)
    yield from each([gated_quantized(variant, granularity, to) for variant in (QWEN, MAMBA)], ALIKE)


OF_ROWS = ("", "where, causal", "where, window")
LOSSES = [{}, {"label_smoothing": 0.1, "z_loss": 1e-2}, {"logit_scale": 0.5, "soft_cap": 5.0}]
CASES = (
    # RMSNorm has seldom a bias, LayerNorm mostly.
    *norms(RMS, absent="bias", rarely_absent=""),
    *norms(LAYER, absent="", rarely_absent="bias"),
    *each([sandwich()], PAIRS),
    *each([sandwich()], [BF16 * 2], weights=["bfloat16"], options=[{}, ROUNDED]),
    *gates(),
    *each([softmax(), softmax(log=True)], ALONE, mask=OF_ROWS),
    *each([softmax()], [BF16], options=[WIDER], mask=OF_ROWS),
    *each([softmax(log=True)], [F32], options=[NARROWER], mask=OF_ROWS),
    *each([cross_entropy()], ALONE, options=LOSSES, mask=["", "where"]),
    *rotations(),
    *groups(),
    *quantised("token", "int8"),
    *quantised("groups of 32", "float8_e4m3fn"),
    *quantised("tensor", "float8_e5m2"),
)


def over(cases):
    return pytest.mark.parametrize("case", [pytest.param(case, id=str(case)) for case in cases])


def in_places(op, run, inputs):
    """What a function gives, and in the emulator what it gives of arrays that are aligned to an element."""
    yield jax.device_get(run(inputs))
    # Where a kernel goes through arrays by the words of memory that have a result, operands begin anywhere in these.
    for apart in range(1 + op.is_by_row) if emulated.IS_ON else ():
        with emulated.moved(apart):
            yield jax.device_get(run(inputs))
    run.clear_cache()  # some of these programs have many arrays in them


def assert_as_unfused(op, dtypes, results, expected):
    """The same bits; where no kernel gives float32 of half types, which are gated, codes that are neighbours."""
    if op.unfused_dtypes is None or dtypes in op.unfused_dtypes:
        return assert_same(results, expected)
    (found, exact), (scales, of_exact) = zip(results, expected, strict=True)
    dims, steps = exact.shape, 1 if exact.dtype == np.int8 else spacing(f64(exact), exact.dtype)

    def by_column(scales):
        scales = f64(scales).reshape(-1, *scales.shape[-1:])
        return np.repeat(scales, dims[-1] // scales.shape[-1], -1)

    error = np.abs(f64(found) * by_column(scales) - f64(exact) * by_column(of_exact))
    assert (error <= by_column(of_exact) * (steps + 2.0**-7 * np.abs(f64(exact)))).all()


@over(CASES)
def test_results(case):
    op, sizes = case.op, case.sizes("forward")
    inputs, options = [case.draw(size) for size in sizes], [case.options | size.options for size in sizes]

    @jax.jit
    def run(inputs):
        return [op.function(*args, **given) for given, args in zip(options, inputs, strict=True)]

    first, *others = in_places(op, run, inputs)
    for size, given, args, results in zip(sizes, options, inputs, first, strict=True):
        if op.exact:
            assert result_errors(op, results, args, **given) == [], size
        if op.unfused and "per head" not in op.name:
            assert_as_unfused(op, case.dtypes, results, op.unfused(*args, **given))
    assert all(bits(other) == bits(first) for other in others)


def gradients_of(op, given, inputs):
    """Those of all operands, and of the arrays alone."""
    args, cotangents = inputs
    call = partial(op.function, **given)
    _, alone = jax.vjp(lambda *arrays: call(*arrays, *args[op.arrays :]), *args[: op.arrays])
    return jax.vjp(call, *args)[1](cotangents), alone(cotangents)


class Gradients:
    """A case's, at these sizes."""

    def __init__(self, case, sizes):
        op, options = case.op, [case.options | size.options for size in sizes]
        args = [case.draw(size) for size in sizes]
        self.op, self.sizes, self.options = op, sizes, options
        self.inputs = [(each, op.cotangents(each, **given)) for each, given in zip(args, options, strict=True)]
        self.run = jax.jit(lambda inputs: [gradients_of(op, *each) for each in zip(options, inputs, strict=True)])

    def check(self, found, known=None):
        """Law 1, where they have not the bits of what is known to keep it."""
        sizes = zip(self.sizes, self.options, self.inputs, found, known or found, strict=True)
        for size, given, (args, dy), (all_of, alone), others in sizes:
            if known is None or bits(all_of) != bits(others[0]):
                assert gradient_errors(self.op, all_of, dy, args, **given) == {}, size
            assert bits(alone) == bits(all_of[: self.op.arrays]) == bits(others[1]), size


# No weight's dtype and no order of roundings decides on their kernels; those that are two norms' have theirs.
USUAL = [case for case in CASES if case.weights != "bfloat16" and case.options != ROUNDED]
DIFFERENTIABLE = [case for case in USUAL if case.op.exact_gradients and not case.op.unfused_with_gradients]


@over(DIFFERENTIABLE)
def test_gradients(case):
    # Logits have the forward's plans both ways, and a loss is differentiated element by element.
    sizes = case.sizes("forward" if case.op.kind == "logits" else "backward")
    gradients = Gradients(case, sizes[:: 4 if case.op.is_by_row else 1])
    first, *others = in_places(case.op, gradients.run, gradients.inputs)
    gradients.check(first)
    for found in others:
        gradients.check(found, first)


# Where x and its cotangent differ in dtype, few rows have the kernels of many; so have shorter groups than rows.
BY_ROW = ("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm", "gated_rms_norm")
WITH_MANY = [case for case in DIFFERENTIABLE if case.op.public in BY_ROW and len({*case.dtypes}) == 1]


@over([case for case in WITH_MANY if not case.options and "grouped" not in case.op.name])
def test_gradients_of_many_rows(case):
    gradients = Gradients(case, shapes_of_many(case.op, case.dtypes))
    found = jax.device_get(gradients.run(gradients.inputs))
    gradients.check(found)
    # Sums over rows are of one order wherever there are as many rows.
    if emulated.IS_ON:
        with emulated.larger_device():
            assert bits(gradients.run(gradients.inputs)) == bits(found)
