"""Run the perceptron block of a language model in 8 bits, and compare it with the same block in bfloat16.

    python examples/fp8_inference.py           # a block of Llama 3 8B, for a GPU that multiplies fp8 matrices
    python examples/fp8_inference.py --small   # for a CPU

One call adds what the layer before gives to the residual stream, normalises the sum and quantises it with one scale a
token. The matrix product that follows takes the 8-bit values as they are. Weights are quantised once, with one scale an
output channel. Neither scale depends on the axis that is summed over, so that they multiply the product's sums, which
are rounded once.
"""

import argparse
import re
import time
from collections import Counter
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm import Quantization, add_rms_norm, quantize, quantized_dot, rms_norm_quantized

FP8 = Quantization(jnp.float8_e4m3fn)
# Tokens in a call, features of the residual stream, features between the block's two products.
LARGE = {"tokens": 8192, "dim": 4096, "hidden": 14336}
SMALL = {"tokens": 256, "dim": 256, "hidden": 768}


def block_bfloat16(stream, x, weights):
    """The residual stream with x added, and what the block gives to be added next."""
    y, stream = add_rms_norm(x, stream, weights["norm"])
    h = gated(product(y, weights["gate_up"]))
    return stream, product(h, weights["down"])


def block_fp8(stream, x, weights):
    """The same with both products in fp8."""
    y, stream = rms_norm_quantized(x, weights["norm"], quantization=FP8, residual=stream)
    h = gated(quantized_dot(y, weights["gate_up"]))
    return stream, quantized_dot(quantize(h, FP8), weights["down"])


def product(x, weight):
    """x @ weight.T in bfloat16. Both have the summed axis last, as fp8 products on Hopper need them."""
    return jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)


def gated(gate_and_up):
    """SwiGLU, https://arxiv.org/abs/2002.05202."""
    gate, up = jnp.split(gate_and_up, 2, axis=-1)
    return jax.nn.silu(gate) * up


def draw(options):
    """A residual stream, what is added to it, and weights, in bfloat16."""
    keys = iter(jax.random.split(jax.random.key(0), 5))

    def normal(mean, std, *shape):
        return (mean + std * jax.random.normal(next(keys), shape)).astype(jnp.bfloat16)

    stream, x = (normal(0, 1, options.tokens, options.dim) for _ in range(2))
    weights = {
        "norm": normal(1, 0.1, options.dim),
        "gate_up": normal(0, options.dim**-0.5, 2 * options.hidden, options.dim),
        "down": normal(0, options.hidden**-0.5, options.dim, options.hidden),
    }
    return stream, x, weights


@dataclass
class Run:
    """What one block gave in its first call, and the median time of the next ones."""

    name: str
    stream: jax.Array
    output: jax.Array
    seconds: float
    weight_bytes: int
    program: str


def measure(name, block, stream, x, weights, calls):
    """Calls the block on its own results, as a stack of layers does. It writes over the stream that it is given."""
    compiled = jax.jit(block, donate_argnums=0).lower(stream, x, weights).compile()
    first = compiled(jnp.copy(stream), x, weights)
    stream, x = (jnp.copy(array) for array in first)
    times = []
    for _ in range(calls + 1):
        jax.block_until_ready((stream, x))
        start = time.perf_counter()
        stream, x = jax.block_until_ready(compiled(stream, x, weights))
        times.append(time.perf_counter() - start)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
    return Run(name, *first, float(np.median(times[1:])), size, compiled.as_text())


def products_of(program):
    """How XLA multiplies matrices in a program: library calls by name, its own code by the operands' dtypes."""
    calls = re.findall(r'custom_call_target="([^"]*(?:matmul|gemm|dot)[^"]*)"', program)
    dtypes = dict(re.findall(r"(%[\w.-]+) = (\w+)\[", program))
    dots = re.findall(r" dot\((%[\w.-]+), (%[\w.-]+)\)", program)
    return Counter(calls) + Counter(f"dot of {dtypes.get(a, '?')} and {dtypes.get(b, '?')}" for a, b in dots)


def report(runs, options):
    bfloat16, fp8 = runs
    print(
        f"{jax.devices()[0].device_kind}, jax {jax.__version__}: {options.tokens} tokens, {options.dim} features,"
        f" {options.hidden} hidden; medians of {options.calls} calls\n"
    )
    print(f"{'block':8}  {'ms':>9}  {'TFLOP/s':>8}  {'weights MiB':>11}  products")
    for run in runs:
        rate = 6 * options.tokens * options.dim * options.hidden / run.seconds / 1e12
        products = ", ".join(f"{count} x {name}" for name, count in products_of(run.program).items())
        print(f"{run.name:8}  {1e3 * run.seconds:9.3f}  {rate:8.2f}  {run.weight_bytes / 2**20:11.1f}  {products}")

    print(f"\nThe fp8 block takes {fp8.seconds / bfloat16.seconds:.2f} times as long.")
    in_fp8 = sum(count for name, count in products_of(fp8.program).items() if re.search("f8|jaxnorm", name))
    if in_fp8:
        print(f"{in_fp8} of its 2 products are in fp8.")
    else:
        print("None of its products is in fp8: for this device XLA converts the 8-bit values to a wider type first.")
    output, expected = (np.float64(run.output) for run in (fp8, bfloat16))
    error = np.linalg.norm(output - expected) / np.linalg.norm(expected)
    same = "the same bits" if (fp8.stream == bfloat16.stream).all() else "DIFFERENT"
    print(f"Its output differs from the bfloat16 block's by {100 * error:.2f} % in L2 norm; their streams are {same}.")


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help=f"sizes for a CPU: {SMALL}")
    for name, default in LARGE.items():
        parser.add_argument(f"--{name}", type=int, help=f"(default: {default})")
    parser.add_argument("--calls", type=int, default=20, help="how many are timed (default: 20)")
    options = parser.parse_args()

    for name, default in (SMALL if options.small else LARGE).items():
        if getattr(options, name) is None:
            setattr(options, name, default)
    for name in ("calls", *LARGE):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: must be at least 1")
    return options


def main():
    options = parse_options()
    stream, x, weights = draw(options)
    bfloat16 = measure("bfloat16", block_bfloat16, stream, x, weights, options.calls)
    weights |= {name: quantize(weights[name], FP8) for name in ("gate_up", "down")}
    fp8 = measure("fp8", block_fp8, stream, x, weights, options.calls)
    report([bfloat16, fp8], options)


if __name__ == "__main__":
    main()
