"""Rows of the table for gated activations, of two arrays and of one that has both."""

from functools import partial
from math import erfc, pi

import bad_activation_calls as bad_calls
import formulas
import jax.numpy as jnp
import numpy as np
from gated_rows import ALIKE
from norm_rows import ALONE
from op import Op, rows
from oracle import Forward, f64, gelu, logistic, round_to, silu

import jaxnorm

# Of an exponent's argument, of its power, of a factor and of their product.
ROUNDING = 4 * 2.0**-24
SMALLEST = 2.0**-126  # kernels take a smaller sigmoid for 0


def _sigmoid(v):
    sigmoid, rest = logistic(v)
    return sigmoid, sigmoid * rest, 0


def _relu2(v):
    return np.square(np.maximum(v, 0)), 2 * np.maximum(v, 0), 0


def _gelu_exact(v):
    normal = np.vectorize(erfc, otypes=[float])(-v / np.sqrt(2)) / 2
    return v * normal, normal + v * np.exp(-(v**2) / 2) / np.sqrt(2 * pi), v**2 / 2


# The value and the derivative of each, and the exponent by which it falls.
ACTIVATIONS = {"silu": silu, "gelu": gelu, "gelu_exact": _gelu_exact, "relu2": _relu2, "sigmoid": _sigmoid}


def exact(activation, gate, up):
    v, up, dtype = f64(gate), f64(up), gate.dtype
    a, _, exponent = ACTIVATIONS[activation](v)
    y = a * up
    slack = np.abs(up) * (np.abs(a * exponent) * ROUNDING + np.maximum(np.abs(v), 1) * SMALLEST)
    return Forward(y, round_to(y, dtype), np.abs(y), slack)


def exact_gradients(activation, cotangents, gate, up):
    a, slope, _ = ACTIVATIONS[activation](f64(gate))
    dy = f64(cotangents[0])
    return {"gate": (dy * f64(up) * slope, None), "up": (dy * a, None)}


def as_norm(of_two):
    def function(x, scale=None, bias=None):
        y = of_two(jnp.sin(x), 1.5 + jnp.cos(x))
        y = y if scale is None else y * scale
        return y if bias is None else y + bias

    return function


def halves(x):
    return jnp.split(x, 2, -1)


def gated_activation(activation):
    def function(gate, up, **options):
        return (jaxnorm.gated_activation((gate, up), activation=activation, **options),)

    return Op(
        name=f"gated by {activation}",
        public="gated_activation",
        kind="elements",
        operands=("gate", "up"),
        arrays=2,
        dtypes=ALIKE,
        has_out_dtype=False,
        function=function,
        formula=lambda gate, up: (formulas.activated(activation, gate, up),),
        as_norm=lambda f: as_norm(lambda *args: f(*args)[0]),
        exact=partial(exact, activation),
        exact_gradients=partial(exact_gradients, activation),
        small=rows(6, 10),
        # No whole vector, whole ones with and without a rest; several blocks of threads.
        sizes=(*(rows(7, cols) for cols in (1, 24, 100, 1021, 4096, 14_336)), rows(3, 40_001), rows(3, 5, 64)),
        backward_sizes=(rows(600, 1000),),
        lengths=tuple(rows(9, cols) for cols in (1, 31, 128, 1021, 4096)),
        forward="jaxnorm_gated_activation_fwd",
        backward="jaxnorm_gated_activation_bwd",
        gradients=("dx", "dup"),
        kept=("gate", "up"),
        keeps_operands_alone=True,
        statistics=0,
        numbers=("axis",),
        bad_calls=bad_calls.GATED_ACTIVATION | bad_calls.MISUSE,
        without_kernel=bad_calls.WITHOUT_KERNEL,
    )


def packed_activation(activation):
    """x has both side by side; sizes are those of the result."""

    def function(x, **options):
        return (jaxnorm.gated_activation(x, activation=activation, **options),)

    def exact_gradients_of_both(cotangents, x):
        found = exact_gradients(activation, cotangents, *halves(x))
        return {"x": (np.concatenate([found["gate"][0], found["up"][0]], -1), None)}

    return Op(
        **{
            **vars(gated_activation(activation)),
            "name": f"packed and gated by {activation}",
            "operands": ("x",),
            "arrays": 1,
            "shapes": {"x": lambda shape: (*shape[:-1], 2 * shape[-1])},
            "dtypes": ALONE,
            "function": function,
            "formula": lambda x: (formulas.activated(activation, *halves(x)),),
            "as_norm": lambda f: as_norm(lambda *args: f(jnp.concatenate(args, -1))[0]),
            "exact": lambda x: exact(activation, *halves(x)),
            "exact_gradients": exact_gradients_of_both,
            "gradients": ("dx",),
            "kept": ("x",),
        }
    )
