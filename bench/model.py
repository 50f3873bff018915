"""What the norms cost in a model, and how much of that jaxnorm wins back.

    python -m bench model --out bench/results/h200_model

Each program is compiled with XLA's fusion of the jnp formula ("jnp"), with jaxnorm's kernels, and with no norm at all
("none"). In "jaxnorm-add" the kernels add to the residual stream as well, as `add_rms_norm` does: each layer hands on
what it gives, and the stream that it is to be added to. In the Gemma-like model, which normalises what it adds, that is
`rms_norm_add_rms_norm`; in a U-Net it is the activation that the kernels take in. In the DiT-like model every example
has scales and shifts of its own. "jaxnorm-tuned" has what `jaxnorm.tune` finds for a program; "jaxnorm-default-loss"
has the kernel's loss beside the default, "jaxnorm-default-linear-loss" `linear_cross_entropy`. "flax" is XLA's code for
LayerNorm and GroupNorm as Flax computes them. "jnp-float32" is XLA's where rotation and gates are computed in float32
and rounded once, as jaxnorm does; "jnp" rounds before and within.

Times are wall times of calls in a queue that is waited for once, taken in turns: "ms" is the median over the turns,
"± us" half the range of its middle half. "norms us" is the median of what a turn took longer than the turn without
norms beside it, so that a drifting clock cancels. "won back %" is (jnp - jaxnorm) / (jnp - none), by that column, and
"ceiling %" what it would be if norms that add nothing took as long as their bytes do at the copy rate; see
`norm_bytes`.
"""

import functools
import statistics
import time
from dataclasses import replace

import jax

import jaxnorm
from bench import model_norms, models, report, timing, unet

PARTS = {
    "llama": models.LLAMA,
    "llama-gqa": models.LLAMA_GROUPED,
    "llama-packed": models.LLAMA_PACKED,
    "llama-joint": models.LLAMA_JOINT,
    "qwen": models.QWEN,
    "llama-8b": models.LLAMA_8B,
    "gemma": models.GEMMA,
    "vit": models.VIT,
    "bert": models.BERT,
    "dit": models.DIT,
    "unet": unet.WIDE,
    "unet-narrow": unet.NARROW,
    "decode": models.LLAMA,
    "decode-joint": models.LLAMA_JOINT,
}
MODULES = {models.Spec: models, unet.Spec: unet}
PROGRAMS = ("forward", "train step")
LOSS_TOLERANCE = 1e-2  # an average over thousands of tokens or tens of images, of 7 or so
SEPARATE_PRODUCTS = {"xla_gpu_dot_merger_threshold_mb": 0}


def add_arguments(parser):
    report.add_arguments(parser)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--programs", nargs="+", default=PROGRAMS, choices=PROGRAMS, help="of what is not decoded")
    extra = [variant for variant in model_norms.VARIANTS if variant not in ("jnp", "none")]
    parser.add_argument("--variants", nargs="+", default=["jaxnorm"], choices=extra, help="beside jnp and none")
    parser.add_argument(
        "--attention", choices=["xla", "cudnn"], help="(default: cudnn on a GPU where it takes the sequence)"
    )
    parser.add_argument("--classes", type=int, help="the vocabulary of the language model")
    parser.add_argument("--layers", type=int, help="of each transformer")
    parser.add_argument("--no-rotary", action="store_true", help="no rotation between the norms of q, k and attention")
    parser.add_argument("--scan", action="store_true", help="over stacked layers, which are unrolled otherwise")
    parser.add_argument("--remat", choices=["none", "full"], default="none")
    parser.add_argument(
        "--separate-products",
        action="store_true",
        help="XLA does not merge products of one array, as of queries and keys, whose results kernels need copied",
    )
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32], help="sequences of a decoding step")
    parser.add_argument("--copy-gbs", type=float, default=4250, help="what a copy reaches here, for the floor")
    parser.add_argument("--turns", type=int, default=15, help="of each program (at least 2)")
    parser.add_argument("--small", action="store_true", help="toy sizes, to try the program")


def norm_bytes(spec, backward, fused=False):
    """The bytes that the norms of a training step, or of its forward pass, must move: a floor of what they cost.

    As calls of their own, norms read x and write y, backward read x and dy and write dx: 2 arrays forward and 3
    backward, on top of what the model without norms moves. One or two float32 a row are written and read again. What
    the weights and their gradients take is too little to count.

    A compiler that fuses every norm with its neighbours needs less; `fused` counts that. The residual stream is written
    by the addition before the norm anyway, so that only y is left to write: 1 array. Backward, the sum of the gradient
    that arrives and the one that goes on takes dy and writes the result in any case, so that only x is left to read: 1
    array. Where norms come after the sum, y is the stream, and x is written for the backward alone. Rotation reads and
    writes queries and keys anyway: 0 arrays forward, and 1, x, backward. So does the addition with what a sandwich norm
    reads, but backward two gradients are written where there was one: 2 arrays.

    No fusion goes as far: the sums over a row must be complete before its first element is written. Memory that is
    read soon after it was written may come from the cache, so that single norms can fall below the floor.
    """
    rows, size = spec.batch * spec.tokens, 2
    heads = spec.layers * spec.language * (spec.heads + spec.groups)
    # Rows of each kind, their length, and the arrays of each way.
    ahead = backward if spec.after_sum else 1
    stream = (2 * spec.layers + 1) * rows, spec.dim, (ahead, 1) if fused else (2, 3)
    sandwich = 2 * spec.layers * spec.sandwich * rows, spec.dim, (0, 2) if fused else (2, 3)
    head = heads * rows, spec.head_size, (0, 1) if fused and spec.rotary else (2, 3)
    passes = 1 + (backward and spec.remat == "full")
    row_statistics = 4 * {"rms": 1, "layer": 2}[spec.norm]
    return sum(
        count * (size * length * (passes * ahead + backward * back) + 2 * backward * row_statistics)
        for count, length, (ahead, back) in (stream, sandwich, head)
    )


def floor_text(spec, copy_gbs):
    """What the header says of `norm_bytes`: milliseconds of norms as calls of their own, and as fused as can be."""
    texts = []
    for program, backward in (("train step", True), ("forward", False)):
        apart, fused = (norm_bytes(spec, backward, fused) / copy_gbs / 1e6 for fused in (False, True))
        texts.append(f"{program} {apart:.2f} ms ({fused:.2f} if fused with all neighbours)")
    return "; ".join(texts)


def compiled(name, function, args, donate=(), options=None):
    """The executable; standard error says how long it took, since on a rented machine that is most of the time."""
    variant, start = name.rpartition(", ")[2], time.perf_counter()
    choice = model_norms.tuned(variant, jax.jit(function, donate_argnums=donate), args)
    with jaxnorm.implementation(choice):
        lowered = jax.jit(function, donate_argnums=donate).lower(*args)
    executable = lowered.compile(compiler_options=options)
    report.tell(f"compiled {name}", start)
    return executable


def rows_of(model, times, temporary, floor=None):
    """The table: seconds in each turn and temporary bytes come by (program, norms); `floor` is what the norms take."""
    for (program, norms), taken in times.items():
        costs = {
            of: statistics.median(a - b for a, b in zip(times[program, of], times[program, "none"], strict=True))
            for of in ("jnp", norms)
        }

        def won_back(cost, of=costs["jnp"]):
            return 100 * (of - cost) / of if of > 0 else None  # nothing to win

        yield {
            "model": model,
            "program": program,
            "norms": norms,
            **timing.columns(taken),
            "norms us": 1e6 * costs[norms],
            "temp MiB": temporary[program, norms] / 2**20,
            "won back %": won_back(costs[norms]) if norms.startswith("jaxnorm") else None,
            "ceiling %": won_back(floor) if norms == "jaxnorm" and floor is not None else None,
        }


def temporary_bytes(executables):
    return {key: executable.memory_analysis().temp_size_in_bytes for key, executable in executables.items()}


def check_losses(executables, params, inputs):
    """All norms but none must give the same loss, up to what bfloat16 rounds."""
    losses = {norms: float(run(params, *inputs)[1]) for (_, norms), run in executables.items()}
    for norms, value in losses.items():
        if norms.startswith("jaxnorm") and not abs(value - losses["jnp"]) < LOSS_TOLERANCE:
            raise SystemExit(f"loss {value} with {norms} norms, {losses['jnp']} with jnp's")


def measure_training(spec, variants, args):
    """Train step and forward pass."""
    module = MODULES[type(spec)]
    params, inputs = module.init(spec), module.batch(spec)
    calls = 1 if args.small else 4
    for program in args.programs:
        make, donate = {"forward": (models.forward, ()), "train step": (models.train_step, (0,))}[program]
        losses = {norms: functools.partial(module.loss, spec, norms) for norms in variants}
        executables = {
            (program, norms): compiled(
                f"{spec.name} {program}, {norms}", make(loss), (params, *inputs), donate, options_of(args)
            )
            for norms, loss in losses.items()
        }
        if program == "forward":
            check_losses(executables, params, inputs)
        times, params = timing.in_turns(executables, params, inputs, args.turns, calls)
        moved = norm_bytes(spec, program == "train step") if module is models else None
        floor = moved and moved / args.copy_gbs / 1e9
        yield from rows_of(spec.name, times, temporary_bytes(executables), floor)


def measure_decoding(spec, variants, args):
    """One token for each sequence: as a program that is called for every token, and as one with a loop on the device.

    "token" has dependent calls in a queue. On a GPU, XLA records kernels, matrix products and custom calls that allow
    it, as jaxnorm's do, in command buffers (CUDA graphs), and what the host takes to launch those counts. "loop" leaves
    the host out; its time is that of the program divided by its tokens.
    """
    tokens = 2 if args.small else 20
    params = models.serving(models.init(replace(spec, scan=False)))
    for batch in args.batches:
        spec = replace(spec, batch=batch, scan=False)
        name = f"{spec.name}, decode {batch}"
        state = models.full_cache(spec)
        loop = functools.partial(models.decode_loop, length=tokens)
        for mode, make, calls in (("token", models.decode_step, tokens), ("loop", loop, 1)):
            executables = {
                (mode, norms): compiled(
                    f"{name} {mode}, {norms}", make(spec, norms), (state, params), (0,), options_of(args)
                )
                for norms in variants
            }
            times, state = timing.in_turns(executables, state, (params,), args.turns, calls)
            of_a_token = {key: [calls * seconds / tokens for seconds in taken] for key, taken in times.items()}
            yield from rows_of(name, of_a_token, temporary_bytes(executables))


def options_of(args):
    """The compiler's."""
    return SEPARATE_PRODUCTS if args.separate_products else {}


def specs_of(args):
    """The model of each part, as the arguments want it."""
    specs = {part: PARTS[part] for part in PARTS if part in args.parts}
    if args.small:
        specs = {part: MODULES[type(spec)].small(spec) for part, spec in specs.items()}
    return {part: transformer(spec, args) if isinstance(spec, models.Spec) else spec for part, spec in specs.items()}


def transformer(spec, args):
    cudnn = jax.default_backend() == "gpu" and spec.tokens % 64 == 0  # which takes no sequence of 197
    return replace(
        spec,
        rotary=not args.no_rotary,
        scan=args.scan,
        remat=args.remat,
        attention=args.attention or ("cudnn" if cudnn else "xla"),
        classes=args.classes if args.classes and spec.language else spec.classes,
        layers=args.layers or spec.layers,
    )


def header_of(specs, args):
    transformers = {part: spec for part, spec in specs.items() if isinstance(spec, models.Spec)}
    trained = [spec for part, spec in transformers.items() if not part.startswith("decode")]
    spec = next(iter(transformers.values()), None)
    of_transformers = spec and {
        "attention": ", ".join(f"{part} {spec.attention}" for part, spec in transformers.items()),
        "layers": "scanned" if args.scan else "unrolled",
        "remat": args.remat,
        "rotary": spec.rotary,
        "classes": spec.classes,
        "copy GB/s": args.copy_gbs,
        **{f"floor of {spec.name} norms:": floor_text(spec, args.copy_gbs) for spec in trained},
    }
    products = "separate" if args.separate_products else "merged by XLA"
    return {**report.device(args.commit), "products": products, **(of_transformers or {})}


def main(args):
    if args.turns < 2:
        raise SystemExit(f"--turns {args.turns}: must be at least 2")
    specs = specs_of(args)
    rows = []
    for part, spec in specs.items():
        run = measure_decoding if part.startswith("decode") else measure_training
        rows += run(spec, ["jnp", *args.variants, "none"], args)
        report.write(header_of(specs, args), rows, args.out)  # after each part: a run that is cut off keeps the others
