"""Rows of the table for gated norms, of whole rows and of groups."""

from dataclasses import replace
from functools import partial

import bad_calls
import formulas
import gating
import jax
import jax.numpy as jnp
from cases import DTYPES
from gating import gated
from op import Op, rows

ALIKE = tuple((dtype, dtype) for dtype in DTYPES)


def by_group(function):
    """The op by a call for each group."""

    def unfused(*args, group_size):
        calls = [
            function(*(a[..., at : at + group_size] for a in args)) for at in range(0, args[0].shape[-1], group_size)
        ]
        return tuple(jnp.concatenate(results, -1) for results in zip(*calls, strict=True))

    return unfused


def gate(variant):
    norm = gated(variant)

    def exact_gradients(cotangents, *args, **options):
        found = gating.exact_gradients(variant, *args, *cotangents, **options)
        return {name: (array, None) for name, array in zip(("x", "gate", "scale"), found, strict=True)}

    def as_norm(f):
        def function(x, scale=None, bias=None):
            return f(x, 1.5 + jnp.cos(x), scale)[0] + (0 if bias is None else bias)

        return function

    return Op(
        name=f"gated {variant}",
        public="gated_rms_norm",
        kind="rms",
        operands=("x", "gate", "scale"),
        arrays=2,
        dtypes=ALIKE,
        function=lambda *args, **options: (norm(*args, **options),),
        formula=lambda *args, **options: (formulas.gated(variant)(*args, **options),),
        as_norm=as_norm,
        exact=partial(gating.exact_forward, variant),
        exact_gradients=exact_gradients,
        small=rows(6, 10),
        # Heads, models' rows, whole vectors with and without a rest, several rows at once, the longest row of a kernel;
        # more rows than one task has, in an odd number.
        sizes=(
            *(rows(7, cols) for cols in (1, 64, 100, 128, 1000, 1024, 4096, 8192, 12_288, 16_384)),
            rows(3, 1367, 128),
        ),
        options=({"scale_offset": 1.0}, {"epsilon": 1.0}),
        # Few rows and many, short ones and long ones.
        backward_sizes=(rows(600, 1000), rows(4099, 128), rows(2000, 256), rows(70, 4096), rows(70, 5120)),
        lengths=tuple(rows(9, cols) for cols in (1, 31, 128, 4096)),
        many=tuple(rows(600, cols) for cols in (128, 256, 2048, 4096, 5120, 8192)),
        forward="jaxnorm_gated_rms_norm_fwd",
        backward="jaxnorm_gated_rms_norm_bwd",
        gradients=("dx", "dgate", "dscale"),
        kept=("x", "gate", "scale"),
        statistics=1,
        required={"gate_first": True},
        bad_calls=bad_calls.GATED | bad_calls.MISUSE["gated_rms_norm"],
        without_kernel=bad_calls.GATED_WITHOUT_KERNEL,
    )


def grouped(variant):
    op = gate(variant)
    # Mamba2's, more groups than rows at once, groups without whole vectors.
    sizes = ((4096, 1024), (512, 64), (1000, 100), (96, 3), (64, 64))
    return replace(
        op,
        name=f"grouped {variant}",
        unfused=by_group(jax.jit(op.function)),
        has_unfused_gradients=True,
        small=rows(6, 10, group_size=5),
        sizes=(*(rows(7, cols, group_size=group) for cols, group in sizes), rows(37, 640, group_size=128)),
        options=(),
        backward_sizes=(rows(65, 4096, group_size=1024),),
        lengths=(rows(9, 640, group_size=128),),
        many=(rows(600, 640, group_size=128),),
    )
