"""Law 7's table: what a program may do with a function of (x, scale, bias), and how many native calls that takes."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

ALL = (0, 1, 2)


class Case(NamedTuple):
    transform: Callable  # takes the norm, gives another function of (x, scale, bias)
    # Native calls in the compiled program; None: any number, since the formula has a part in it.
    fwd: int | None
    bwd: int | None


class Policy(NamedTuple):
    policy: Any
    fwd: int  # forward calls in a gradient: one more where the policy drops what the norm's backward needs


def loss_of(norm):
    """Not linear in y, so that every derivative of the norm is seen."""
    return lambda *args: jnp.sin(norm(*args).astype(jnp.float32)).sum()


def _grad(function):
    return jax.grad(loss_of(function), ALL)


def _cosines(args):
    return tuple(jnp.cos(a) for a in args)


def _vjp(norm):
    def function(*args):
        y, pullback = jax.vjp(norm, *args)
        return y, pullback(jnp.cos(args[0]))

    return function


def _jvp(norm):
    return lambda *args: jax.jvp(norm, args, _cosines(args))


def _linearize(norm):
    def function(*args):
        y, tangent = jax.linearize(norm, *args)
        return y, tangent(*_cosines(args)), tangent(*args)

    return function


def _linear_transpose(norm):
    def function(x, *weights):
        _, tangent = jax.linearize(lambda x: norm(x, *weights), x)
        return jax.linear_transpose(tangent, x)(jnp.cos(x))

    return function


def _transpose_in_weights(norm):
    def function(x, scale, bias):
        transposed = jax.linear_transpose(lambda scale: norm(x, scale), scale)
        return transposed(jnp.cos(x)), jax.linear_transpose(lambda bias: norm(x, scale, bias), bias)(jnp.sin(x))

    return function


def _transpose_of_vjp(norm):
    def function(x, scale, bias):
        y, vjp = jax.vjp(norm, x, scale, bias)
        return jax.linear_transpose(vjp, y)((jnp.cos(x), scale, bias))

    return function


def _vmap(in_axes, out_axes=0):
    """Over three examples of the operands that have an axis."""

    def examples(a, axis):
        return a if axis is None else jnp.stack([a, 2 * a, jnp.sin(a)], axis)

    return lambda norm: lambda *args: jax.vmap(norm, in_axes, out_axes)(*map(examples, args, in_axes))


def _scan(norm):
    """A stack of layers: the norm once, in the loop's body."""

    def function(x, scale, bias):
        def layer(carry, scale):
            return carry + norm(carry, scale, bias), carry.mean()

        return lax.scan(layer, x, jnp.stack([scale, 2 * scale, scale + 1]))

    return function


def _grad_of_scan(norm):
    return jax.grad(lambda *args: _scan(norm)(*args)[0].sum(), ALL)


def _while(norm):
    def function(x, *weights):
        def step(state):
            return state[0] + 1, state[1] + norm(state[1], *weights)

        return lax.while_loop(lambda state: state[0] < 3, step, (0, x))[1]

    return function


def _fori(norm):
    return lambda x, scale, bias: lax.fori_loop(0, 3, lambda _, y: y + norm(y, scale, bias), x)


def _cond(norm):
    return lambda x, scale, bias: lax.cond(x[0, 0] > scale[0], lambda: norm(x, scale, bias), lambda: jnp.sin(x))


def _checkpoint(norm):
    return jax.checkpoint(lambda *args: jnp.sin(norm(*args)))


def _custom_jvp(norm):
    """Inside another function's own rule."""
    function = jax.custom_jvp(norm)
    function.defjvps(*(lambda dot, y, *_, i=i: dot * (i + 1) + y for i in range(3)))
    return function


_OVER_X, _OVER_SCALE = _vmap((0, None, None)), _vmap((None, 0, None))
TRANSFORMATIONS = {
    "call": Case(lambda norm: norm, 1, 0),
    "grad": Case(_grad, 1, 1),
    "value_and_grad": Case(lambda norm: jax.value_and_grad(loss_of(norm), ALL), 1, 1),
    "grad of x": Case(lambda norm: jax.grad(loss_of(norm)), 1, 1),
    "grad of the weights": Case(lambda norm: jax.grad(loss_of(norm), (1, 2)), 1, 1),
    "vjp": Case(_vjp, 1, 1),
    "jvp": Case(_jvp, 1, 0),
    "linearize": Case(_linearize, 1, 0),
    "linear_transpose": Case(_linear_transpose, 1, 1),
    "linear_transpose in the weights": Case(_transpose_in_weights, None, None),
    "linear_transpose of vjp": Case(_transpose_of_vjp, None, None),
    "jacrev": Case(lambda norm: jax.jacrev(norm, ALL), None, None),
    "jacfwd": Case(lambda norm: jax.jacfwd(norm, ALL), None, None),
    "hessian": Case(lambda norm: jax.hessian(loss_of(norm), ALL), None, None),
    "hessian-vector product": Case(lambda norm: _jvp(_grad(norm)), None, None),
    "grad of grad": Case(lambda norm: jax.grad(loss_of(jax.grad(loss_of(norm)))), None, None),
    "grad of grad of the weights": Case(lambda norm: _grad(jax.grad(loss_of(norm), 1)), None, None),
    "grad of jvp": Case(lambda norm: _grad(lambda *args: _jvp(norm)(*args)[1]), None, None),
    "vmap over x": Case(_OVER_X, 1, 0),
    "vmap over x's middle axis": Case(_vmap((1, None, None), 1), 1, 0),
    "vmap over x's last axis": Case(_vmap((2, None, None), -1), 1, 0),
    "vmap over scale": Case(_OVER_SCALE, None, 0),
    "vmap over bias": Case(_vmap((None, None, 0)), None, 0),
    "vmap over x and scale": Case(_vmap((0, 1, None), 2), None, 0),
    "vmap over everything": Case(_vmap((1, 0, 1), 1), None, 0),
    "vmap of vmap": Case(lambda norm: _OVER_X(jax.vmap(norm, (0, None, None))), 1, 0),
    "vmap of grad": Case(lambda norm: jax.vmap(jax.grad(loss_of(norm)), (0, None, None)), 1, 1),
    "vmap of every grad": Case(lambda norm: _OVER_X(_grad(norm)), 1, None),
    "vmap of every grad of everything": Case(lambda norm: _vmap((0, 0, 0))(_grad(norm)), None, None),
    "grad of vmap": Case(lambda norm: _grad(_vmap((1, None, None))(norm)), 1, 1),
    "grad of vmap over scale": Case(lambda norm: _grad(_OVER_SCALE(norm)), None, None),
    "vmap of jvp": Case(lambda norm: _OVER_X(_jvp(norm)), 1, 0),
    "vmap of hessian": Case(lambda norm: _OVER_X(jax.hessian(loss_of(norm))), None, None),
    "scan": Case(_scan, 1, 0),
    "grad of scan": Case(_grad_of_scan, 1, 1),
    "grad of scan of checkpoint": Case(lambda norm: _grad_of_scan(jax.checkpoint(norm)), None, 1),
    "while_loop": Case(_while, 1, 0),
    "jvp of while_loop": Case(lambda norm: _jvp(_while(norm)), 1, 0),
    "fori_loop": Case(_fori, 1, 0),
    "grad of fori_loop": Case(lambda norm: _grad(_fori(norm)), 1, 1),
    "cond": Case(_cond, 1, 0),
    "grad of cond": Case(lambda norm: _grad(_cond(norm)), 1, 1),
    "map over rows": Case(lambda norm: lambda x, *weights: lax.map(lambda row: norm(row, *weights), x), 1, 0),
    "checkpoint": Case(_checkpoint, 1, 0),
    "grad of checkpoint": Case(lambda norm: _grad(_checkpoint(norm)), None, 1),
    "donation": Case(lambda norm: jax.jit(norm, donate_argnums=0), 1, 0),
    "custom_jvp": Case(lambda norm: _grad(_custom_jvp(norm)), None, 0),
}

# What treats weights or leading axes in a way of its own.
OF_WEIGHTS = (
    *("grad of the weights", "vjp", "linearize", "linear_transpose in the weights", "linear_transpose of vjp"),
    *("hessian", "vmap over scale", "vmap over x and scale", "vmap over everything", "vmap of grad"),
    *("vmap of every grad", "vmap of every grad of everything", "grad of vmap over scale"),
    *("grad of scan", "grad of scan of checkpoint", "map over rows"),
)


def _grad_of_grad(op, function):
    gradient = op.gradient(function)
    return jax.grad(lambda *args: sum(jnp.sin(g).sum() for g in gradient(*args)), op.all)


def _transposed(op, function):
    def transposed(*args):
        results, vjp = jax.vjp(function, *args)
        return jax.linear_transpose(vjp, results)(_cosines(args))

    return transposed


def _in_scan(function):
    """The body of a loop, which JAX linearises in another way."""
    return lambda *args: jax.tree.map(lambda y: y[-1], lax.scan(lambda *_: (None, function(*args)), None, None, 2)[1])


# Of all operands of an op; each takes the op, and what it computes or the formula.
OF_EVERY_OPERAND = {
    "results": lambda op, function: function,
    "grad": lambda op, function: op.gradient(function),
    "hessian": lambda op, function: jax.hessian(op.loss(function), op.all),
    "grad of grad": _grad_of_grad,
    "jvp of grad": lambda op, function: _jvp(op.gradient(function)),
    "jvp of grad of scan": lambda op, function: _jvp(op.gradient(_in_scan(function))),
    "transpose of vjp": _transposed,
}


def operand_by_operand(op) -> dict[str, Callable]:
    """The like of one operand, while the others stand still."""

    def jvp_of(i, op, function):
        def tangent(*args):
            alone = lambda a: function(*args[:i], a, *args[i + 1 :])  # noqa: E731
            return jax.jvp(alone, (args[i],), (jnp.cos(args[i]),))

        return tangent

    def twice(i, op, function):
        gradient = op.gradient(function, argnums=i)
        return jax.grad(lambda *args: jnp.sin(gradient(*args)).sum(), op.all)

    ways = {"jvp of {}": jvp_of, "grad of {} twice": twice}
    return {way.format(op.operands[i]): partial(ways[way], i) for way in ways for i in op.all}


_P = jax.checkpoint_policies
_OFFLOAD = {"offload_src": "device", "offload_dst": "pinned_host"}
_NAMES = {"names_which_can_be_saved": ["other"], "names_which_can_be_offloaded": []}
# Every one that jax.checkpoint_policies has.
POLICIES = {
    "everything_saveable": Policy(_P.everything_saveable, 1),
    "nothing_saveable": Policy(_P.nothing_saveable, 2),
    "dots_saveable": Policy(_P.dots_saveable, 2),
    "checkpoint_dots": Policy(_P.checkpoint_dots, 2),
    "dots_with_no_batch_dims_saveable": Policy(_P.dots_with_no_batch_dims_saveable, 2),
    "checkpoint_dots_with_no_batch_dims": Policy(_P.checkpoint_dots_with_no_batch_dims, 2),
    "offload_dot_with_no_batch_dims": Policy(_P.offload_dot_with_no_batch_dims(**_OFFLOAD), 2),
    "save_anything_except_these_names": Policy(_P.save_anything_except_these_names("other"), 1),
    "save_any_names_but_these": Policy(_P.save_any_names_but_these("other"), 1),
    "save_only_these_names": Policy(_P.save_only_these_names("other"), 2),
    "save_from_both_policies": Policy(_P.save_from_both_policies(_P.dots_saveable, _P.everything_saveable), 1),
    "save_and_offload_only_these_names": Policy(_P.save_and_offload_only_these_names(**_NAMES, **_OFFLOAD), 2),
}
