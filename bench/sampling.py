"""What choosing the next token takes, of logits alone and in a loop on the device, beside `jax.numpy`'s code.

    python -m bench sampling --out bench/results/h200/sampling
    python -m bench sampling --loop --out bench/results/h200/sampling-loop

Alone it is the time of all kernels of a call by CUPTI, those of the random numbers too, with rows of logits that are
new to the cache. `jax.numpy` draws by `jax.random.categorical` from what is left: top-p sorts the row and adds up its
probabilities, top-k takes the least of `lax.top_k`, and both sort what `lax.top_k` leaves whole. "x sort" compares with
`jnp.sort` of the rows alone.

With --loop a decoder makes tokens in one program: ms is the wall time of a token, in turns, and "faster %" the median
of old / new - 1 over the turns, against `jax.numpy`'s top-p.
"""

import functools
import statistics
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

import jaxnorm
from bench import models, report, timing

VOCABULARY = 151936
MODES = {
    "argmax": {"temperature": 0.0},
    "plain": {},
    "top-p 0.9": {"top_p": 0.9},
    "top-k 50": {"top_k": 50},
    "top-k 50, top-p 0.9": {"top_k": 50, "top_p": 0.9},
}
LOOPS = ("argmax", "jax.numpy top-p", "jaxnorm top-p")
SEQUENCES = 16, 64
CACHED = 1024  # positions of a sequence in the loop


def add_arguments(parser):
    report.add_arguments(parser)
    parser.add_argument("--loop", action="store_true", help="in a decoder, and not alone")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 16, 64, 256])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--iterations", type=int, default=20, help="calls of each program")
    parser.add_argument("--turns", type=int, default=15, help="of each loop (at least 2)")
    parser.add_argument("--small", action="store_true", help="toy sizes, to try the program")


def by_jax(logits, key, *, temperature=1.0, top_k=None, top_p=None):
    """What one writes in jax.numpy."""
    if temperature == 0:
        return jnp.argmax(logits, -1)
    logits = logits.astype(jnp.float32)
    if top_k is not None:
        logits = jnp.where(logits >= lax.top_k(logits, top_k)[0][..., -1:], logits, -jnp.inf)
    if top_p is not None:
        ordered = jnp.sort(logits, descending=True)
        share = jax.nn.softmax(ordered)
        kept = jnp.sum(jnp.cumsum(share, -1) - share < top_p, -1, keepdims=True)
        logits = jnp.where(logits >= jnp.take_along_axis(ordered, kept - 1, -1), logits, -jnp.inf)
    return jax.random.categorical(key, logits)


def alone(args):
    """A row for each dtype, mode and number of rows."""
    classes = 1000 if args.small else VOCABULARY
    for dtype in args.dtypes:
        for count in args.rows:
            draws = timing.sets_needed(count * classes * jnp.dtype(dtype).itemsize, count * classes * 4)
            sets = [
                ((3 * jax.random.normal(jax.random.key(seed), (count, classes))).astype(dtype), jax.random.key(seed))
                for seed in range(draws)
            ]
            measure = functools.partial(timing.device_time, sets=sets, iterations=args.iterations)
            sort = measure(jax.jit(lambda logits, _: jnp.sort(logits))).seconds
            for mode, options in MODES.items():
                ours, theirs = (
                    measure(jax.jit(functools.partial(function, **options))).seconds
                    for function in (functools.partial(jaxnorm.sample, implementation="native"), by_jax)
                )
                yield {
                    "mode": mode,
                    "dtype": dtype,
                    "rows": count,
                    "classes": classes,
                    "us": 1e6 * ours,
                    "jax.numpy us": 1e6 * theirs,
                    "x jax.numpy": theirs / ours,
                    "x sort": sort / ours,
                }


def chooser(name):
    def choose(logits, position):
        if name == "argmax":
            return models.likeliest(logits, position)
        draw = by_jax if name.startswith("jax.numpy") else jaxnorm.sample
        return draw(logits, jax.random.fold_in(jax.random.key(0), position), top_p=0.9)

    return choose


def in_loops(args):
    """A row for each number of sequences and way to choose; norms are XLA's code."""
    spec = replace(models.small(models.QWEN) if args.small else models.QWEN, tokens=64 if args.small else CACHED)
    spec = spec if args.small else replace(spec, layers=12)
    params, tokens = models.serving(spec), 2 if args.small else 20
    for sequences in (2,) if args.small else SEQUENCES:
        spec = replace(spec, batch=sequences)
        state = models.full_cache(spec)
        loops = {
            name: jax.jit(models.decode_loop(spec, "xla", tokens, chooser(name)), donate_argnums=0) for name in LOOPS
        }
        times, _ = timing.in_turns(loops, state, (params,), args.turns, 1)
        of_a_token = {name: [seconds / tokens for seconds in taken] for name, taken in times.items()}
        for name, taken in of_a_token.items():
            gains = [old / new - 1 for old, new in zip(of_a_token[LOOPS[1]], taken, strict=True)]
            yield {
                "model": f"{spec.name}, {spec.layers} layers",
                "sequences": sequences,
                "choice": name,
                **timing.columns(taken),
                "faster %": None if name == LOOPS[1] else 100 * statistics.median(gains),
            }


def main(args):
    rows = []
    for row in in_loops(args) if args.loop else alone(args):
        rows.append(row)
        if args.out:
            report.save(report.device(args.commit), rows, args.out)
    report.write(report.device(args.commit), rows)
