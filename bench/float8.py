"""A model's training step and forward pass with its products in float8, beside bfloat16, in one run.

    python -m bench float8 --out bench/results/h100/float8

The model is the Llama-like one of `bench model` with jaxnorm's norms, rotation and loss, the 8B one of Llama 3 8B's
widths; parameters and AdamW's state are float32. Every product but the last is computed by one of these ways:

    bf16          of bfloat16
    rows          `float8_linear`
    wide dw       the same, with the kernel's gradient in bfloat16
    fused         as rows, of what norms and gates have rounded
    fast y        as fused, with fast accumulation for y alone
    ahead         as rows, of kernels that are rounded once a step
    plain         of one scale for each array in `jax.numpy`, gradients in float8_e5m2, as one writes it by hand

With --accumulate a training step sums the gradients of so many micro-batches, each as large as the batch is without.

Times are wall times of calls in a queue that is waited for once, taken in turns: "ms" is the median over the turns,
"± us" half the range of its middle half, "x bf16" bfloat16's time over it. "loss" is that of the first step.
"""

import functools
import statistics
from dataclasses import replace

import jax
import jax.numpy as jnp

import jaxnorm
from bench import model, models, report, timing
from jaxnorm import Float8Recipe

EIGHT_B = replace(models.LLAMA, name="8B width", dim=4096, heads=32, kv_heads=8, hidden=14336, packed=True)
PARTS = {"llama": models.LLAMA_PACKED, "8b": EIGHT_B}
# Of the norms, `bench.model_norms` says which.
VARIANT, ROUNDING, OF_ROUNDED = "jaxnorm-default", "jaxnorm-float8", ("fused", "fast y")


def one_scale(array, dtype):
    """The array in float8, and its scale."""
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
    operands = one_scale(x, jnp.float8_e4m3fn), one_scale(matrix, jnp.float8_e4m3fn)
    return scaled_dot(*operands, ((x.ndim - 1,), (0,)), x.dtype), (*operands, jnp.zeros((), matrix.dtype))


def plain_backward(saved, dy):
    x, matrix, like = saved
    gradient, rows = one_scale(dy, jnp.float8_e5m2), tuple(range(dy.ndim - 1))
    dx = scaled_dot(gradient, matrix, ((dy.ndim - 1,), (1,)), dy.dtype)
    return dx, scaled_dot(x, gradient, (rows, rows), like.dtype)


plain.defvjp(plain_forward, plain_backward)
RECIPES = {
    "rows": Float8Recipe(),
    "wide dw": Float8Recipe(weight_gradient="compute"),
    "fused": Float8Recipe(),
    "fast y": Float8Recipe(fast_accumulation=("y",)),
    "ahead": Float8Recipe(),
}
WAYS = {name: functools.partial(jaxnorm.float8_linear, recipe=recipe) for name, recipe in RECIPES.items()}
WAYS |= {"bf16": models.wide_product, "plain": plain}


def add_arguments(parser):
    report.add_arguments(parser)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--programs", nargs="+", default=model.PROGRAMS, choices=model.PROGRAMS)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--layers", type=int, help="of each model")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a training step")
    model.add_turns(parser)


def rounded(params):
    """The parameters with the kernels of layers as `float8_linear` takes them."""
    how = {"quantization": jaxnorm.Quantization(jnp.float8_e4m3fn), "straight_through": True}
    layers = jax.tree.map(lambda p: jaxnorm.quantize_kernel(p, **how) if p.ndim == 2 else p, params["layers"])
    return params | {"layers": layers}


def accumulated(loss, prepare, count):
    """The mean loss of micro-batches, and its gradients; the parameters are prepared once."""

    def value_and_grad(params, *inputs):
        prepared, pull_back = jax.vjp(prepare, params)

        def add(total, part):
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(prepared, *part)), None

        parts = jax.tree.map(lambda array: array.reshape(count, -1, *array.shape[1:]), inputs)
        zeros = jax.tree.map(jnp.zeros_like, (jnp.float32(0), prepared))
        (value, grads), _ = jax.lax.scan(add, zeros, parts)
        return jax.tree.map(lambda total: total / count, (value, *pull_back(grads)))

    return value_and_grad


def training(value_and_grad):
    """A step of AdamW, and what makes its moments."""
    import optax

    optimiser = optax.adamw(models.RATE)

    def step(state, inputs, targets):
        params, moments = state
        value, grads = value_and_grad(params, inputs, targets)
        updates, moments = optimiser.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return step, optimiser.init


def programs_of(spec, program, ways, params, inputs, count=1):
    """The executables by way, and the state that they take."""
    state, executables = params, {}
    trains = program == "train step"
    if trains:
        state = state, jax.jit(training(None)[1])(params)
    for way in ways:
        variant = ROUNDING if way in OF_ROUNDED else VARIANT
        loss = functools.partial(models.loss, replace(spec, product=WAYS[way]), variant)
        prepare = rounded if way == "ahead" else lambda params: params
        whole = lambda params, *inputs, loss=loss, prepare=prepare: loss(prepare(params), *inputs)  # noqa: E731
        gradient = jax.value_and_grad(whole) if count == 1 else accumulated(loss, prepare, count)
        step = training(gradient)[0] if trains else models.forward(whole)
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
    for program in args.programs:
        count = args.accumulate if program == "train step" else 1
        inputs = models.batch(replace(spec, batch=count * spec.batch))
        executables, state = programs_of(spec, program, ways, models.init(spec), inputs, count)
        losses = {way: float(run(state, *inputs)[1]) for way, run in executables.items() if program == "forward"}
        times, _ = timing.in_turns(executables, state, inputs, args.turns, 1 if args.small else 3)
        yield from rows_of(spec, program, times, executables, losses)


def main(args):
    rows = []
    for part in args.parts:
        spec = models.small(PARTS[part]) if args.small else PARTS[part]
        spec = replace(spec, attention=model.attention_of(spec), layers=args.layers or spec.layers)
        for row in measured(spec, args):
            rows.append(row)
            report.write(report.device(args.commit), rows, args.out)
