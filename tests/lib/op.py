"""What a row of the table in `table.py` says of an op, and what follows from it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, NamedTuple

import cases
import jax
import jax.numpy as jnp
from native import is_built, is_platform_with_kernels


class Raises(NamedTuple):
    args: tuple[Any, ...]
    keywords: dict[str, Any]
    error: type[Exception]
    parts: tuple[str, ...]  # what the message must hold in this order


class NoKernel(NamedTuple):
    args: tuple[Any, ...]
    keywords: dict[str, Any]
    reason: str  # in the error where native is asked for by name; by default XLA's code runs


class Call(NamedTuple):
    args: tuple[Any, ...]
    keywords: dict[str, Any]

    def raises(self, error, *parts):
        return Raises(*self, error, parts)

    def has_no_kernel(self, reason):
        return NoKernel(*self, reason)


def call(*args, **keywords):
    return Call(args, keywords)


def named(*rows):
    """The rows by what is said of each."""
    names = [" ".join(map(str, row.parts)) if isinstance(row, Raises) else row.reason for row in rows]
    unique = [f"{name} {n}" if name in names[:n] else name for n, name in enumerate(names)]
    return dict(zip(unique, rows, strict=True))


class Size(NamedTuple):
    """The shape of x and of what has its rows, that of scale and bias, and the options that go with them."""

    dims: tuple[int, ...]
    weights: tuple[int, ...]
    options: Mapping[str, Any] = {}

    def __str__(self):
        parts = ["x".join(map(str, self.dims))]
        if len(self.weights) > 1:
            parts.append("of " + "x".join(map(str, self.weights)))
        return " ".join([*parts, *(f"{name} {value}" for name, value in self.options.items())])


def rows(*dims: int, **options: Any) -> Size:
    """Weights for the last axis."""
    return Size(dims, dims[-1:], options)


def weighted(y, scale=None, bias=None):
    """For an op that has no weights, as a norm."""
    y = y if scale is None else y * scale
    return y if bias is None else y + bias


def without_names(function):
    """The function, whose results are a plain tuple, as its formula's are."""
    return wraps(function)(lambda *args, **options: tuple(function(*args, **options)))


COTANGENTS = ("dy", "dsum", "dv")  # of the results


@dataclass(frozen=True, eq=False, kw_only=True)
class Op:
    name: str
    public: str  # the public function, with whose name its errors begin
    kind: str  # whose statistics: "rms" or "layer"; or "logits"
    operands: tuple[str, ...]
    arrays: int  # so many operands, the first ones, have x's rows; the others are weights
    # Of arrays that have not x's shape, and of weights that have not the others': theirs, by x's or by the others'.
    shapes: Mapping[str, Callable[[tuple], tuple]] = field(default_factory=dict)
    dtypes: tuple[tuple[str, ...], ...]  # of the arrays
    has_out_dtype: bool = True  # whether one may ask for the dtype of the result
    has_pairs: bool = False  # whether a row has an even number of elements
    # Whether a row goes over positions, too, the axes between the first of x and the last; else these are rows' own.
    has_positions: bool = False

    function: Callable  # of the operands and options: a tuple of results
    derived: Callable | None = None  # what is differentiated, where the results have no gradient
    formula: Callable  # what is differentiated, in plain jnp
    # Takes such a function, gives one of (x, scale, bias) that is linear in each weight.
    as_norm: Callable = lambda function: lambda *args: function(*args)[0]
    # In a loss, of all results in float32, if there are several; the first of two is as long as the second, or padded.
    product: Callable = lambda y, total: y[..., : total.shape[-1]] * jnp.cos(total)

    exact: Callable | None = None  # y in float64, an `oracle.Forward`, or a list of these, one for each result
    exact_gradients: Callable | None = None  # by the names of operands, for cotangents of the results
    unfused: Callable | None = None  # law 5: the same results by simpler ops
    has_unfused_gradients: bool = False  # and the same gradients of the arrays
    unfused_with_gradients: Callable | None = None  # by another function that JAX differentiates
    gradient_dtypes: tuple[tuple[str, ...], ...] | None = None  # for these gradients, if only some

    small: Size  # for programs: quick to compile
    sizes: tuple[Size, ...]  # for accuracy and law 5: every path of the kernels
    unfused_sizes: tuple[Size, ...] | None = None  # for law 5, if only some
    unfused_dtypes: tuple[tuple[str, ...], ...] | None = None  # the same
    options: tuple[Mapping[str, Any], ...] = ()  # what the public function may be told, beside sizes' options
    backward_sizes: tuple[Size, ...] = ()  # for gradients, beside these
    lengths: tuple[Size, ...] = ()  # for bits: a few rows for every kernel
    many: tuple[Size, ...] = ()  # for bits: as many rows as have other kernels than few rows

    forward: str = ""  # the native calls, if not of the public name
    backward: str = ""
    gradients: tuple[str, ...] = ()  # what the backward call gives for each operand, if not d and its name
    kept: tuple[str, ...] = ()  # the operands that live until the backward, if not all; "residual" for the sum
    kept_beside: Callable[..., list[int]] = lambda *args: []  # the sizes of float32 arrays beside these
    statistics: int  # float32 numbers that live for each row
    normalised: Callable = lambda x: x  # what of x has them
    keeps_operands_alone: bool = False  # whether the backward reads nothing that the forward gave
    labels: bool = False  # whether an int32 lives for each row, too
    is_product: bool = False  # whether its kernels are those of products: for GPUs, and no small size
    keeps_parts: bool = False  # whether the forward call of a GPU keeps something in a workspace
    values: int = 0  # float32 numbers for each row that the forward call writes in place of the results
    # Float32 numbers for each row that devices with parts of it exchange, forward and beside these backward; None: the
    # statistics each way.
    exchanged: tuple[int, int] | None = None
    has_row_scale: bool = False  # whether the result has a scale for each row, from its maximum

    numbers: tuple[str, ...] = ("epsilon", "scale_offset")  # what the public function wants to know while tracing
    bad_calls: Mapping[str, Raises] = field(default_factory=dict)  # of the public function
    without_kernel: Mapping[str, NoKernel] = field(default_factory=dict)

    def __post_init__(self):
        derived = {
            "forward": f"jaxnorm_{self.public}_fwd",
            "backward": f"jaxnorm_{self.public}_bwd",
            "gradients": tuple(f"d{name}" for name in self.operands),
            "kept": self.operands,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, getattr(self, name) or value)
        object.__setattr__(self, "function", without_names(self.function))

    def __str__(self):
        return self.name

    @property
    def differentiable(self) -> Callable:
        return self.derived or self.function

    @property
    def has_sum(self) -> bool:
        """Whether there are as many results as arrays, of two of these also a sum."""
        return self.kind != "elements"

    @property
    def is_by_row(self) -> bool:
        """Whether the result has one number for each row."""
        return bool(self.values)

    @property
    def keeps_statistics(self) -> bool:
        """Whether statistics are kept, and no results in their place."""
        return bool(self.statistics) and not self.is_by_row

    @property
    def weights(self) -> tuple[str, ...]:
        return self.operands[self.arrays :]

    def draw(self, size: Size, dtypes=None, weight_dtypes="float32") -> tuple:
        """Random operands; a dtype of None is one that is absent."""
        if isinstance(weight_dtypes, str):
            weight_dtypes = [weight_dtypes] * len(self.weights)
        kinds = [*(dtypes or ["float32"] * self.arrays), *weight_dtypes[: len(self.weights)]]
        drawn = zip(self.operands, self.shapes_at(size), kinds, strict=True)
        return tuple(dtype and getattr(cases, f"draw_{name}")(shape, dtype) for name, shape, dtype in drawn)

    def shapes_at(self, size: Size) -> list[tuple]:
        dims = [*[size.dims] * self.arrays, *[size.weights] * len(self.weights)]
        same = {name: lambda shape: shape for name in self.operands}
        return [(same | self.shapes)[name](shape) for name, shape in zip(self.operands, dims, strict=True)]

    def types(self, size: Size, dtype="float32") -> tuple:
        return tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in self.shapes_at(size))

    def exact_results(self, *args, **options) -> list:
        """The first results in float64, or all."""
        found = self.exact(*args, **options)
        return found if isinstance(found, list) else [found]

    def cotangents(self, args, **options) -> tuple:
        results = jax.eval_shape(partial(self.differentiable, **options), *args)
        return tuple(cases.draw(name, r.shape, r.dtype) for name, r in zip(COTANGENTS, results, strict=False))

    def run(self, function: Callable | None = None, **options) -> Callable:
        """What is differentiated, or its formula, as a function of the operands at the small size or with options."""
        return partial(function or self.differentiable, **(options or self.small.options))

    def norm(self, function: Callable | None = None) -> Callable:
        """The like as a function of (x, scale, bias) and of x's shape."""
        return self.as_norm(self.run(function))

    def loss(self, function: Callable | None = None) -> Callable:
        """Of the operands, and not linear in any result, so that every derivative is seen."""
        function = function or self.run()

        def loss(*args):
            y, *total = function(*args)
            y = jnp.sin(y.astype(jnp.float32))
            if not total:
                return y.sum()
            return self.product(y, *(other.astype(jnp.float32) for other in total)).sum() + y.sum()

        return loss

    def everything(self, size: Size) -> Callable:
        """A function of the operands and cotangents: results, and the gradients of all operands."""

        def function(args, cotangents):
            results = self.function(*args, **size.options)
            _, pullback = jax.vjp(lambda *args: self.differentiable(*args, **size.options), *args)
            return results, pullback(cotangents)

        return function

    @property
    def all(self) -> tuple[int, ...]:
        """The operands that have a gradient."""
        return tuple(i for i, gradient in enumerate(self.gradients) if gradient)

    def gradient(self, function: Callable | None = None, argnums=None) -> Callable:
        return jax.grad(self.loss(function), self.all if argnums is None else argnums)

    def calls(self, fwd: int = 0, bwd: int = 0) -> dict[str, int]:
        """What `count_native_calls` must give here: the counts named, nothing where there are no kernels."""
        counts = {self.forward: fwd, self.backward: bwd}
        is_native = is_platform_with_kernels() and not self.is_product
        return {name: count for name, count in counts.items() if count} if is_native else {}

    def exported_calls(self, bwd: int = 1) -> dict[str, int]:
        """The like in a program for every platform."""
        each = (is_built("cpu") + is_built("gpu")) * (not self.is_product)
        counts = {self.forward: each, self.backward: each * bwd}
        return {name: count for name, count in counts.items() if count}
