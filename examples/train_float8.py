"""Train a decoder like Llama twice: with linear layers in bfloat16, and in float8 by `jaxnorm.float8_linears`.

    python examples/train_float8.py --size small --steps 30         # a toy, for a CPU
    python examples/train_float8.py                                 # 103 M parameters, on one GPU
    python examples/train_float8.py --size 8b --layers 8 --seeds 1  # the widths of Llama 3 8B, for speed alone

A float8 model differs from a bfloat16 one by one line, `to_float8`, which leaves the product that gives the logits as
it is. For each seed both start from the same parameters and read the same batches, of bytes of the Python standard
library's sources. Parameters and AdamW's state are float32, activations bfloat16. Printed are speed, time to compile,
temporary memory, and the loss over the last tenth of the steps, beside what another seed does to it.
"""

from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
from common import LanguageModel, Trainer, hardware, loss_of, parser_of, plot, read_text, report, windows, with_sizes

import jaxnorm
from jaxnorm.nnx import RMSNorm

# A model, and how it is trained: rows of a batch, bytes of a row, steps, and the peak learning rate.
Size = namedtuple("Size", "layers dim hidden heads kv_heads batch tokens steps rate")
SIZES = {
    "small": Size(2, 64, 160, 2, 1, batch=8, tokens=64, steps=2000, rate=4e-3),
    "100m": Size(8, 1024, 2816, 8, 8, batch=16, tokens=1024, steps=2000, rate=6e-4),
    "8b": Size(8, 4096, 14336, 32, 8, batch=4, tokens=2048, steps=30, rate=1e-4),  # Llama 3 8B has 32 layers
}


def to_float8(model):
    return jaxnorm.float8_linears(model, only=lambda path, layer: path != ("head",))


CHANGES = {"bfloat16": None, "float8": to_float8}


def trainer(name, text, size):
    names = ("layers", "dim", "hidden", "heads", "kv_heads")
    sizes = {name: getattr(size, name) for name in names}

    def create(seed):
        return LanguageModel(RMSNorm, **sizes, dtype=jnp.bfloat16, seed=seed, head_norms=False)

    def draw(random):
        return (windows(text, size.batch, size.tokens, random),)

    return Trainer(name, create, draw, loss_of, size.steps, size.rate, change=CHANGES[name])


def compare(wide, narrow):
    """Prints what float8 does to speed and loss, beside what another seed does; a run of each for each seed."""
    speeds = [1 / np.median([run.step_time for run in runs]) for runs in (wide, narrow)]
    ends = np.array([run.end for run in wide])
    change = 100 * (np.array([run.end for run in narrow]) / ends - 1)
    speed = speeds[1] / speeds[0]
    print(f"float8 to bfloat16: speed x {speed:.2f}, loss {change.mean():+.3f} % in the mean (seeds: {len(ends)}).")
    if len(ends) > 1:
        print(
            f"That is {change.min():+.3f} % to {change.max():+.3f} % for single seeds;"
            f" those of bfloat16 are up to {100 * np.ptp(ends) / ends.mean():.3f} % apart."
        )


def parse_options():
    numbers = {"seeds": (3, 1), "layers": (None, 1), "batch": (None, 1), "tokens": (None, 2), "steps": (None, 2)}
    parser = parser_of(__doc__, numbers, "train_float8.png")
    parser.add_argument("--size", choices=SIZES, default="100m", help="(default: 100m)")
    return parser.parse_args()


def main():
    options = parse_options()
    jax.config.update("jax_enable_compilation_cache", False)  # the time to compile is that of no cache
    size = with_sizes(options, SIZES[options.size])
    text = np.frombuffer(read_text(options.text, size.tokens + 1, "**/*.py"), np.uint8)
    trainers = [trainer(name, text, size) for name in CHANGES]
    header = (
        f"{hardware()}, {trainers[0].parameters / 1e6:,.1f} M parameters, {size.batch} x {size.tokens} tokens a step"
    )
    print(f"{header}, {len(text):,} bytes of text")
    seeds = range(options.seed, options.seed + options.seeds)
    wide, narrow = zip(*([of.run(seed)[0] for of in trainers] for seed in seeds), strict=True)
    report([*wide, *narrow], size.batch * size.tokens, "tokens")
    compare(wide, narrow)
    width = max(1, size.steps // 50)
    what = f"training loss, mean of {width} steps, nats per byte"
    plot(options.out, [run for pair in zip(wide, narrow, strict=True) for run in pair], header, what, width)


if __name__ == "__main__":
    main()
