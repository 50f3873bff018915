"""Decoding with quantised weights at Llama 3 8B's width on one GPU, beside bfloat16, in one run.

    python -m bench decode --out bench/results/h100_decode_quantised

The model is `bench model`'s, of a few layers, with jaxnorm's norms, rotation and gates by default in each program. The
products of its layers are `quantized_dot` by default, of weights that were quantised ahead; the embedding and the last
product stay in bfloat16. "int8 weights" and "float8 weights" leave x in bfloat16, "int8" and "float8" quantise it on
the way, with a scale for each sequence.

"token" has dependent calls in a queue, "loop" 20 tokens in one program, in which the weights do not change: a compiler
might widen them before the loop, and "temp MiB", what a program keeps beside parameters and state, would tell. Times
are wall times of a token, taken in turns: "ms" is the median over the turns, "± us" half the range of its middle half,
"x bf16" how many times as fast as bfloat16 of the same turn, by the median, which should not be below 1. "read MiB" is
what each token reads, matrices, keys and values; "x bf16" can be at most what bfloat16 reads, divided by it.
"""

import functools
import statistics
from dataclasses import replace

import jax
import jax.numpy as jnp

import jaxnorm
from bench import model, model_blocks, models, report, timing
from bench.dots import FORMS
from jaxnorm import Quantization, Quantized

NAMES = ("int8 weights", "float8 weights", "int8", "float8")
NORMS = "jaxnorm-default"


def add_arguments(parser):
    report.add_arguments(parser)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(NAMES), metavar="NAME")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 16, 64], help="sequences of a decoding step")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--turns", type=int, default=15, help="of each program (at least 2)")
    parser.add_argument("--small", action="store_true", help="toy sizes, to try the program")


def quantised(form, params):
    """The parameters with the matrices of the layers quantised, outputs first."""
    to = Quantization(jnp.dtype(form.weights))

    def of_leaf(array):
        return jaxnorm.quantize(array.T, to) if array.ndim == 2 else array

    return {**params, "layers": jax.jit(functools.partial(jax.tree.map, of_leaf))(params["layers"])}


def product_of(form):
    """The product of x by a matrix that `quantised` gives, or by one that it leaves."""

    def product(x, matrix):
        if not isinstance(matrix, Quantized):
            return model_blocks.wide_product(x, matrix)
        quantized = jaxnorm.quantize(x, Quantization(jnp.dtype(form.x))) if form.x else x
        return jaxnorm.quantized_dot(quantized, matrix, out_dtype=x.dtype)

    return product


def with_products(form, function):
    """The function of a model with the products of this form; None is bfloat16."""
    if form is None:
        return function

    def of_form(*args):
        with model_blocks.products(product_of(form)):
            return function(*args)

    return of_form


def read_bytes(params, state):
    """Of matrices, but for the embedding, and of the cache; two numbers of 4 bits have a byte."""
    _, _, cache = state
    leaves = [leaf for leaf in jax.tree.leaves([params["layers"], params["head"], cache]) if leaf.ndim > 1]
    return sum(leaf.size * (0.5 if leaf.dtype == jnp.int4 else leaf.dtype.itemsize) for leaf in leaves)


def measure(spec, params, args):
    """The rows of a number of sequences; `params` by the name of a form, "bfloat16" among them."""
    tokens = 2 if args.small else 20
    state = models.full_cache(spec)
    loop = functools.partial(models.decode_loop, length=tokens)
    for mode, make, calls in (("token", models.decode_step, tokens), ("loop", loop, 1)):
        executables = {
            form: model.compiled(
                f"{spec.name}, decode {spec.batch} {mode}, {form}, {NORMS}",
                with_products(FORMS.get(form), make(spec, NORMS)),
                (state, given),
                (0,),
            )
            for form, given in params.items()
        }
        programs = {
            form: lambda state, form=form, run=run: run(state, params[form]) for form, run in executables.items()
        }
        times, state = timing.in_turns(programs, state, (), args.turns, calls)
        temporary = model.temporary_bytes(executables)
        for form, taken in times.items():
            ratios = [of_bf16 / of_form for of_bf16, of_form in zip(times["bfloat16"], taken, strict=True)]
            yield {
                "model": f"{spec.name}, decode {spec.batch}",
                "program": mode,
                "products": form,
                **timing.columns([calls / tokens * seconds for seconds in taken]),
                "x bf16": statistics.median(ratios),
                "read MiB": read_bytes(params[form], state) / 2**20,
                "temp MiB": temporary[form] / 2**20,
            }


def main(args):
    if args.turns < 2:
        raise SystemExit(f"--turns {args.turns}: must be at least 2")
    spec = models.small(models.LLAMA_8B) if args.small else replace(models.LLAMA_8B, layers=args.layers)
    plain = models.serving(models.init(spec))
    params = {"bfloat16": plain, **{form: quantised(FORMS[form], plain) for form in args.forms}}
    rows = []
    for batch in args.batches:
        rows += measure(replace(spec, batch=batch), params, args)
        header = report.device(args.commit) | {"layers": spec.layers, "classes": spec.classes, "tokens": spec.tokens}
        report.write(header, rows, args.out)  # after each: a run that is cut off keeps the others
