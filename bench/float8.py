"""A model's training step and forward pass with its products in float8, beside bfloat16, in one run.

    python -m bench float8 --out bench/results/h100_float8

The model is the Llama-like one of `bench model` with jaxnorm's norms, rotation and loss, the 8B one of Llama 3 8B's
widths; parameters and AdamW's state are float32. Every product but the last is computed by one of these ways:

    bf16          of bfloat16
    rows          `float8_linear`
    wide dw       the same, with the kernel's gradient in bfloat16
    tensor        as rows, with one scale for each tensor
    fused         as rows, of what norms and gates have rounded
    fast          as fused, with fast accumulation for all products, as the ways below have it
    plain         one scale for each tensor in jax.numpy, gradients in float8_e5m2, as such code is written by hand
    flax          `flax.linen.fp8_ops.Fp8DirectDotGeneralOp`: one scale for each tensor, from the steps before
    qwix          what `qwix.QtProvider` puts in a product's place, with scales by channel and gradients in float8_e4m3

Times are wall times of calls in a queue that is waited for once, taken in turns: "ms" is the median over the turns,
"± us" half the range of its middle half, "x bf16" bfloat16's time over it. "loss" is that of the first step.
"""

import functools
import statistics
from dataclasses import replace

import jax
import jax.numpy as jnp

import jaxnorm
from bench import model, model_blocks, models, report, timing
from jaxnorm import Float8Recipe

EIGHT_B = replace(models.LLAMA, name="8B width", dim=4096, heads=32, kv_heads=8, hidden=14336, packed=True)
PARTS = {"llama": models.LLAMA_PACKED, "8b": EIGHT_B}
# Of the norms, `bench.model_norms` says which.
VARIANT, ROUNDING, OF_ROUNDED = "jaxnorm-default", "jaxnorm-float8", ("fused", "fast")
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


def by(recipe):
    return functools.partial(jaxnorm.float8_linear, recipe=recipe)


def rounded(array, dtype):
    """The array in float8 with one scale."""
    scale = jnp.max(jnp.abs(array)).astype(jnp.float32) / float(jnp.finfo(dtype).max)
    scale = jnp.where(scale == 0, 1, scale)
    return (array.astype(jnp.float32) / scale).astype(dtype), scale


def scaled_dot(a, b, contracted, dtype):
    (a, a_scale), (b, b_scale) = a, b
    y = jax.lax.dot_general(a, b, (contracted, ((), ())), preferred_element_type=jnp.float32)
    return (y * (a_scale * b_scale)).astype(dtype)


@jax.custom_vjp
def plain(x, matrix):
    return plain_forward(x, matrix)[0]


def plain_forward(x, matrix):
    x_8, matrix_8 = rounded(x, E4M3), rounded(matrix, E4M3)
    y = scaled_dot(x_8, matrix_8, ((x.ndim - 1,), (0,)), x.dtype)
    return y, (x_8, matrix_8, jnp.zeros((), matrix.dtype))


def plain_backward(saved, dy):
    x_8, matrix_8, like = saved
    dy_8, rows = rounded(dy, E5M2), tuple(range(dy.ndim - 1))
    dx = scaled_dot(dy_8, matrix_8, ((dy.ndim - 1,), (1,)), dy.dtype)
    return dx, scaled_dot(x_8, dy_8, (rows, rows), like.dtype)


plain.defvjp(plain_forward, plain_backward)


def flax(state, x, matrix):
    from flax.linen.fp8_ops import Fp8DirectDotGeneralOp

    return Fp8DirectDotGeneralOp().apply(state, x, matrix.astype(x.dtype), (((x.ndim - 1,), (0,)), ((), ())))


def flax_states(loss, args):
    """What Flax's op keeps for each product of the model, in their order: the largest magnitudes of steps before."""
    from flax.linen.fp8_ops import Fp8DirectDotGeneralOp

    products = []

    def counted(x, matrix):
        products.append(matrix)
        return model_blocks.wide_product(x, matrix)

    jax.eval_shape(functools.partial(loss, counted), *args)
    small = jnp.zeros((16, 16), jnp.bfloat16)
    init = functools.partial(Fp8DirectDotGeneralOp().init, jax.random.key(0), small, small, (((1,), (0,)), ((), ())))
    return [init() for _ in products]


def qwix(x, matrix):
    from qwix._src.core import dot_general_qt  # no public name computes one product

    qtypes = dict.fromkeys(("lhs_qtype", "rhs_qtype", "dlhs_grad_qtype", "drhs_grad_qtype"), E4M3)
    config = dot_general_qt.DotGeneralQtConfig(**qtypes)
    return dot_general_qt.dot_general_qt(x, matrix.astype(x.dtype), (((x.ndim - 1,), (0,)), ((), ())), config)


WAYS = {
    "bf16": model_blocks.wide_product,
    "rows": by(Float8Recipe()),
    "wide dw": by(Float8Recipe(weight_gradient="compute")),
    "tensor": by(Float8Recipe(scaling="tensor")),
    "fused": by(Float8Recipe()),
    "fast": by(Float8Recipe(fast_accumulation=("y", "dx", "dw"))),
    "plain": plain,
    "flax": flax,
    "qwix": qwix,
}


def add_arguments(parser):
    report.add_arguments(parser)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--programs", nargs="+", default=["forward", "train step"], choices=["forward", "train step"])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--layers", type=int, help="of each model")
    parser.add_argument("--turns", type=int, default=11, help="of each program (at least 2)")
    parser.add_argument("--small", action="store_true", help="toy sizes, to try the program")


def training(loss, replaces):
    """A step of AdamW: of ((params, what products keep), moments). `replaces`: its gradient replaces what they keep."""
    import optax

    optimiser = optax.adamw(models.RATE)

    def step(state, inputs, targets):
        (params, kept), moments = state
        value, (grads, gradient_of_kept) = jax.value_and_grad(loss)((params, kept), inputs, targets)
        updates, moments = optimiser.update(grads, moments, params)
        kept = gradient_of_kept if replaces else kept
        return ((optax.apply_updates(params, updates), kept), moments), value

    return step, optimiser.init


def loss_by(way, loss):
    def of_state(state, inputs, targets):
        params, kept = state
        product, of_product = WAYS[way], iter(kept)
        by = (lambda *args: flax(next(of_product), *args)) if product is flax else product
        return loss(by, params, inputs, targets)

    return of_state


def programs_of(spec, program, ways, params, inputs):
    """The executables by way, and the state that they take."""

    def loss(variant, product, *args):
        with model_blocks.products(product):
            return models.loss(spec, variant, *args)

    kept = flax_states(functools.partial(loss, VARIANT), (params, *inputs)) if "flax" in ways else []
    state, executables = (params, kept), {}
    trains = program == "train step"
    if trains:
        state = state, jax.jit(training(loss, False)[1])(params)
    for way in ways:
        variant = ROUNDING if way in OF_ROUNDED else VARIANT
        of_state = loss_by(way, functools.partial(loss, variant))
        step = training(of_state, WAYS[way] is flax)[0] if trains else models.forward(of_state)
        name = f"{spec.name} {program} {way}, {variant}"
        executables[way] = model.compiled(name, step, (state, *inputs), (0,) if trains else ())
    return executables, state


def rows_of(spec, program, times, executables, losses):
    for way, taken in times.items():
        yield {
            "model": spec.name,
            "program": program,
            "products": way,
            **timing.columns(taken),
            "x bf16": statistics.median(a / b for a, b in zip(times["bf16"], taken, strict=True)),
            "temp MiB": executables[way].memory_analysis().temp_size_in_bytes / 2**20,
            "loss": losses.get(way),
        }


def measured(spec, args):
    ways = ["bf16", *(way for way in args.ways if way != "bf16")]
    inputs = models.batch(spec)
    for program in args.programs:
        executables, state = programs_of(spec, program, ways, models.init(spec), inputs)
        losses = {}
        if program == "forward":
            losses = {way: float(run(state, *inputs)[1]) for way, run in executables.items()}
        times, _ = timing.in_turns(executables, state, inputs, args.turns, 1 if args.small else 3)
        yield from rows_of(spec, program, times, executables, losses)


def main(args):
    if args.turns < 2:
        raise SystemExit(f"--turns {args.turns}: must be at least 2")
    rows = []
    for part in args.parts:
        spec = models.small(PARTS[part]) if args.small else PARTS[part]
        attention = "cudnn" if jax.default_backend() == "gpu" and spec.tokens % 64 == 0 else "xla"
        spec = replace(spec, attention=attention, layers=args.layers or spec.layers)
        for row in measured(spec, args):
            rows.append(row)
            report.write(report.device(args.commit), rows, args.out)
