"""What the norms cost in a model, and how much of that jaxnorm wins back.

    python -m bench model --out bench/results/h200/model

Each program is compiled with XLA's fusion of the formula ("xla"), with jaxnorm's kernels, and with no norm at all
("none"). In "jaxnorm-default" the kernels take in what stands beside the norms, the residual additions, rotation and
gates, as jaxnorm chooses by default; in a U-Net that is the activation. "jaxnorm-default-norm" has the norms alone,
"jaxnorm" and "jaxnorm-joint" are both with kernels wherever there are some. "jaxnorm-default-loss" has the kernel's
loss beside the default, "jaxnorm-default-linear-loss" `linear_cross_entropy`. "flax" is XLA's code for LayerNorm,
GroupNorm and the lookup of tokens as Flax computes them. jaxnorm rotates and gates in float32 and rounds once, as
"xla-float32" does; "xla" rounds before and within.

Times are wall times of calls in a queue that is waited for once, taken in turns: "ms" is the median over the turns,
"± us" half the range of its middle half. "norms us" is the median of what a turn took longer than the turn without
norms beside it, so that a drifting clock cancels. "won back %" is (xla - jaxnorm) / (xla - none), by that column.

With --lookups the programs are those of two pairs, and "faster %" is the median of old / new - 1 over the turns. The
first pair has jaxnorm's norms and loss, and Flax's lookup of tokens ("jaxnorm-flax-lookup") or `jaxnorm.embedding`
("jaxnorm-lookup"). The second has XLA's loss, and lookup and norms are Flax's ("flax") or what `replace_layers` puts in
their place ("jaxnorm-layers"). Tokens are log-uniform in the vocabulary.
"""

import functools
import statistics
import time
from dataclasses import replace

import jax
import jax.numpy as jnp

from bench import model_norms, models, report, timing, unet

PARTS = {
    "llama": models.LLAMA,
    "llama-packed": models.LLAMA_PACKED,
    "llama-joint": models.LLAMA_JOINT,
    "qwen": models.QWEN,
    "gpt2": models.GPT2,
    "gemma": models.GEMMA,
    "vit": models.VIT,
    "bert": models.BERT,
    "dit": models.DIT,
    "unet": unet.WIDE,
    "unet-narrow": unet.NARROW,
    "decode": models.LLAMA,
    "decode-joint": models.LLAMA_JOINT,
}
LOOKED_UP = ("gpt2", "qwen")  # of which --lookups are
MODULES = {models.Spec: models, unet.Spec: unet}
PROGRAMS = ("forward", "train step")
LOSS_TOLERANCE = 1e-2  # an average over thousands of tokens or tens of images, of 7 or so


def add_arguments(parser):
    report.add_arguments(parser)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--programs", nargs="+", default=PROGRAMS, choices=PROGRAMS, help="of what is not decoded")
    extra = [variant for variant in model_norms.VARIANTS if variant not in ("xla", "none")]
    parser.add_argument("--variants", nargs="+", default=["jaxnorm"], choices=extra, help="beside xla and none")
    parser.add_argument("--lookups", action="store_true", help="pairs that differ in the lookup, in place of variants")
    parser.add_argument("--classes", type=int, help="the vocabulary of the language model")
    parser.add_argument("--layers", type=int, help="of each transformer")
    parser.add_argument("--dtype", default="bfloat16", help="of the activations of each transformer")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32], help="sequences of a decoding step")
    add_turns(parser)


def add_turns(parser):
    """What every command that times models in turns has."""
    parser.add_argument("--turns", type=int, default=15, help="of each program (at least 2)")
    parser.add_argument("--small", action="store_true", help="toy sizes, to try the program")


def compiled(name, function, args, donate=()):
    """The executable; standard error says how long it took, since on a rented machine that is most of the time."""
    start = time.perf_counter()
    executable = jax.jit(function, donate_argnums=donate).lower(*args).compile()
    report.tell(f"compiled {name}", start)
    return executable


def rows_of(model, times, executables):
    """The table: seconds in each turn and executables come by (program, norms)."""
    for (program, norms), taken in times.items():
        costs = {
            of: statistics.median(a - b for a, b in zip(times[program, of], times[program, "none"], strict=True))
            for of in ("xla", norms)
        }
        has_gain = norms.startswith("jaxnorm") and costs["xla"] > 0
        yield {
            "model": model,
            "program": program,
            "norms": norms,
            **timing.columns(taken),
            "norms us": 1e6 * costs[norms],
            "temp MiB": executables[program, norms].memory_analysis().temp_size_in_bytes / 2**20,
            "won back %": 100 * (costs["xla"] - costs[norms]) / costs["xla"] if has_gain else None,
        }


def rows_of_twins(spec, times, executables):
    """The table with --lookups."""
    for (program, variant), taken in times.items():
        twin = model_norms.TWINS.get(variant)
        gains = [old / new - 1 for old, new in zip(times[program, twin], taken, strict=True)] if twin else None
        yield {
            "model": spec.name,
            "program": program,
            "classes": spec.classes,
            "tokens": spec.batch * spec.tokens,
            "variant": variant,
            **timing.columns(taken),
            "temp MiB": executables[program, variant].memory_analysis().temp_size_in_bytes / 2**20,
            "against": twin,
            "faster %": gains and 100 * statistics.median(gains),
        }


def check_losses(executables, params, inputs):
    """All variants with norms must give the first one's loss, up to what bfloat16 rounds. A step consumes its state."""
    losses = {
        variant: float(run(jax.tree.map(jnp.copy, params), *inputs)[1]) for (_, variant), run in executables.items()
    }
    first = next(iter(losses))
    for variant, value in losses.items():
        if variant != "none" and not abs(value - losses[first]) < LOSS_TOLERANCE:
            raise SystemExit(f"loss {value} of {variant}, {losses[first]} of {first}")


def measure_training(spec, variants, args):
    """Train step and forward pass."""
    module = MODULES[type(spec)]
    params, inputs = module.init(spec), module.batch(spec)
    for program in args.programs:
        make, donate = {"forward": (models.forward, ()), "train step": (models.train_step, (0,))}[program]
        losses = {norms: functools.partial(module.loss, spec, norms) for norms in variants}
        executables = {
            (program, norms): compiled(f"{spec.name} {program}, {norms}", make(loss), (params, *inputs), donate)
            for norms, loss in losses.items()
        }
        check_losses(executables, params, inputs)
        times, params = timing.in_turns(executables, params, inputs, args.turns, 1 if args.small else 4)
        yield from rows_of_twins(spec, times, executables) if args.lookups else rows_of(spec.name, times, executables)


def measure_decoding(spec, variants, args):
    """One token for each sequence: as a program that is called for every token, and as one with a loop on the device.

    "token" has dependent calls in a queue. On a GPU, XLA records kernels, matrix products and custom calls that allow
    it, as jaxnorm's do, in command buffers (CUDA graphs), and what the host takes to launch those counts. "loop" leaves
    the host out; its time is that of the program divided by its tokens.
    """
    tokens = 2 if args.small else 20
    params = models.serving(spec)
    for batch in args.batches:
        spec = replace(spec, batch=batch)
        name = f"{spec.name}, decode {batch}"
        state = models.full_cache(spec)
        loop = functools.partial(models.decode_loop, length=tokens)
        for mode, make, calls in (("token", models.decode_step, tokens), ("loop", loop, 1)):
            executables = {
                (mode, norms): compiled(f"{name} {mode}, {norms}", make(spec, norms), (state, params), (0,))
                for norms in variants
            }
            times, state = timing.in_turns(executables, state, (params,), args.turns, calls)
            of_a_token = {key: [calls * seconds / tokens for seconds in taken] for key, taken in times.items()}
            yield from rows_of(name, of_a_token, executables)


def spec_of(spec, args):
    """A model as the arguments want it."""
    spec = MODULES[type(spec)].small(spec) if args.small else spec
    if not isinstance(spec, models.Spec):
        return spec
    classes = args.classes if args.classes and spec.language else spec.classes
    spec = replace(spec, classes=classes, dtype=args.dtype, layers=args.layers or spec.layers)
    return replace(spec, attention=attention_of(spec))


def attention_of(spec):
    """cuDNN's on a GPU, but of 197 tokens or of float32, which it does not take."""
    is_taken = spec.tokens % 64 == 0 and spec.dtype != "float32"
    return "cudnn" if jax.default_backend() == "gpu" and is_taken else "xla"


def main(args):
    parts = [part for part in args.parts if part in LOOKED_UP] if args.lookups else args.parts
    rows, specs = [], {part: spec_of(PARTS[part], args) for part in parts}
    header = report.device(args.commit)
    variants = ["xla", *args.variants, "none"]
    if args.lookups:
        variants = [*model_norms.TWINS.values(), *model_norms.TWINS]
    else:
        classes = next((spec.classes for spec in specs.values() if spec.language), None)
        header |= {"dtype": args.dtype, "classes": classes}
    for part, spec in specs.items():
        run = measure_decoding if part.startswith("decode") else measure_training
        rows += run(spec, variants, args)
        report.write(header, rows, args.out)  # after each part: a run that is cut off keeps the others
