"""Law 7's table: what a program may do with a function of (x, scale, bias), and how many native calls that takes."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

ALL = (0, 1, 2)


class Case(NamedTuple):
    transform: Callable  # takes the norm, gives another function of (x, scale, bias)
    # Native calls in the compiled program; None: any number, since the jnp formula has a part in it.
    fwd: int | None
    bwd: int | None


class Policy(NamedTuple):
    policy: Any
    fwd: int  # forward calls in a gradient: one more where the policy drops what the norm's backward needs


def loss_of(norm):
    """Not linear in y, so that every derivative of the norm is seen."""
    return lambda *args: jnp.sin(norm(*args).astype(jnp.float32)).sum()


def _grad_of(loss):
    return jax.grad(loss, ALL)


def _vjp(norm):
    def function(x, scale, bias):
        y, pullback = jax.vjp(norm, x, scale, bias)
        return y, pullback(jnp.cos(x))

    return function


def _jvp(norm):
    return lambda *args: jax.jvp(norm, args, tuple(jnp.cos(a) for a in args))


def _linearize(norm):
    def function(*args):
        y, tangent = jax.linearize(norm, *args)
        return y, tangent(*(jnp.cos(a) for a in args)), tangent(*args)

    return function


def _linear_transpose(norm):
    def function(x, scale, bias):
        _, tangent = jax.linearize(lambda x: norm(x, scale, bias), x)
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


def _vmap_grad_x(norm):
    return lambda x, scale, bias: jax.vmap(jax.grad(loss_of(norm)), (0, None, None))(x, scale, bias)


def _vmap(in_axes, out_axes=0):
    """Over three examples of the operands that have an axis."""

    def transform(norm):
        def function(*args):
            examples = [
                a if axis is None else jnp.stack([a, 2 * a, jnp.sin(a)], axis)
                for a, axis in zip(args, in_axes, strict=True)
            ]
            return jax.vmap(norm, in_axes, out_axes)(*examples)

        return function

    return transform


def _scan(norm):
    """A stack of layers: the norm once, in the loop's body."""

    def function(x, scale, bias):
        def layer(carry, scale):
            return carry + norm(carry, scale, bias), carry.mean()

        return lax.scan(layer, x, jnp.stack([scale, 2 * scale, scale + 1]))

    return function


def _while(norm):
    def function(x, scale, bias):
        def step(state):
            return state[0] + 1, state[1] + norm(state[1], scale, bias)

        return lax.while_loop(lambda state: state[0] < 3, step, (0, x))[1]

    return function


def _fori(norm):
    return lambda x, scale, bias: lax.fori_loop(0, 3, lambda _, y: y + norm(y, scale, bias), x)


def _cond(norm):
    return lambda x, scale, bias: lax.cond(x[0, 0] > scale[0], lambda: norm(x, scale, bias), lambda: jnp.sin(x))


def _map(norm):
    return lambda x, scale, bias: lax.map(lambda row: norm(row, scale, bias), x)


def _checkpoint(norm):
    return jax.checkpoint(lambda *args: jnp.sin(norm(*args)))


def _remat_scan(norm):
    return _scan(jax.checkpoint(norm))


def _donated(norm):
    return jax.jit(norm, donate_argnums=0)


def _custom_jvp(norm):
    """Inside another function's own rule."""
    function = jax.custom_jvp(norm)
    function.defjvps(*(lambda dot, y, *_, i=i: dot * (i + 1) + y for i in range(3)))
    return function


def _then(outer, inner):
    return lambda norm: outer(inner(norm))


TRANSFORMATIONS = {
    "call": Case(lambda norm: norm, 1, 0),
    "grad": Case(_then(_grad_of, loss_of), 1, 1),
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
    "hessian-vector product": Case(lambda norm: _jvp(jax.grad(loss_of(norm), ALL)), None, None),
    "grad of grad": Case(lambda norm: jax.grad(loss_of(jax.grad(loss_of(norm)))), None, None),
    "grad of grad of the weights": Case(lambda norm: _grad_of(loss_of(jax.grad(loss_of(norm), 1))), None, None),
    "grad of jvp": Case(lambda norm: _grad_of(loss_of(lambda *args: _jvp(norm)(*args)[1])), None, None),
    "vmap over x": Case(_vmap((0, None, None)), 1, 0),
    "vmap over x's middle axis": Case(_vmap((1, None, None), 1), 1, 0),
    "vmap over x's last axis": Case(_vmap((2, None, None), -1), 1, 0),
    "vmap over scale": Case(_vmap((None, 0, None)), None, 0),
    "vmap over bias": Case(_vmap((None, None, 0)), None, 0),
    "vmap over x and scale": Case(_vmap((0, 1, None), 2), None, 0),
    "vmap over everything": Case(_vmap((1, 0, 1), 1), None, 0),
    "vmap of vmap": Case(lambda norm: _vmap((0, None, None))(jax.vmap(norm, (0, None, None))), 1, 0),
    "vmap of grad": Case(_vmap_grad_x, 1, 1),
    "vmap of every grad": Case(lambda norm: _vmap((0, None, None))(_grad_of(loss_of(norm))), 1, None),
    "vmap of every grad of everything": Case(lambda norm: _vmap((0, 0, 0))(_grad_of(loss_of(norm))), None, None),
    "grad of vmap": Case(lambda norm: _grad_of(loss_of(_vmap((1, None, None))(norm))), 1, 1),
    "grad of vmap over scale": Case(lambda norm: _grad_of(loss_of(_vmap((None, 0, None))(norm))), None, None),
    "vmap of jvp": Case(lambda norm: _vmap((0, None, None))(_jvp(norm)), 1, 0),
    "vmap of hessian": Case(lambda norm: _vmap((0, None, None))(jax.hessian(loss_of(norm))), None, None),
    "scan": Case(_scan, 1, 0),
    "grad of scan": Case(lambda norm: _grad_of(lambda *args: _scan(norm)(*args)[0].sum()), 1, 1),
    "grad of scan of checkpoint": Case(lambda norm: _grad_of(lambda *args: _remat_scan(norm)(*args)[0].sum()), None, 1),
    "while_loop": Case(_while, 1, 0),
    "jvp of while_loop": Case(lambda norm: _jvp(_while(norm)), 1, 0),
    "fori_loop": Case(_fori, 1, 0),
    "grad of fori_loop": Case(lambda norm: _grad_of(loss_of(_fori(norm))), 1, 1),
    "cond": Case(_cond, 1, 0),
    "grad of cond": Case(lambda norm: _grad_of(loss_of(_cond(norm))), 1, 1),
    "map over rows": Case(_map, 1, 0),
    "checkpoint": Case(_checkpoint, 1, 0),
    "grad of checkpoint": Case(lambda norm: _grad_of(loss_of(_checkpoint(norm))), None, 1),
    "donation": Case(_donated, 1, 0),
    "custom_jvp": Case(lambda norm: _grad_of(loss_of(_custom_jvp(norm))), None, 0),
}

# What treats weights or leading axes in a way of its own.
OF_WEIGHTS = (
    "grad of the weights",
    "vjp",
    "linearize",
    "linear_transpose in the weights",
    "linear_transpose of vjp",
    "hessian",
    "vmap over scale",
    "vmap over x and scale",
    "vmap over everything",
    "vmap of grad",
    "vmap of every grad",
    "vmap of every grad of everything",
    "grad of vmap over scale",
    "grad of scan",
    "grad of scan of checkpoint",
    "map over rows",
)


def _grad_of_grad(op, function):
    gradient = op.gradient(function)
    return jax.grad(lambda *args: sum(jnp.sin(g).sum() for g in gradient(*args)), op.all)


def _jvp_of_grad(op, function):
    return lambda *args: jax.jvp(op.gradient(function), args, tuple(map(jnp.cos, args)))


def _transpose_of_vjp(op, function):
    def transposed(*args):
        results, vjp = jax.vjp(function, *args)
        return jax.linear_transpose(vjp, results)(tuple(map(jnp.cos, args)))

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
    "jvp of grad": _jvp_of_grad,
    "jvp of grad of scan": lambda op, function: _jvp_of_grad(op, _in_scan(function)),
    "transpose of vjp": _transpose_of_vjp,
}


def operand_by_operand(op) -> dict[str, Callable]:
    """The like of one operand, while the others stand still."""

    def jvp_of(i):
        def transform(op, function):
            def tangent(*args):
                alone = lambda a: function(*args[:i], a, *args[i + 1 :])  # noqa: E731
                return jax.jvp(alone, (args[i],), (jnp.cos(args[i]),))

            return tangent

        return transform

    def twice(i):
        def transform(op, function):
            gradient = op.gradient(function, argnums=i)
            return jax.grad(lambda *args: jnp.sin(gradient(*args)).sum(), op.all)

        return transform

    names = [(i, op.operands[i]) for i in op.all]
    return {f"jvp of {name}": jvp_of(i) for i, name in names} | {f"grad of {name} twice": twice(i) for i, name in names}


_P = jax.checkpoint_policies
_OFFLOAD = {"offload_src": "device", "offload_dst": "pinned_host"}
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
    "save_and_offload_only_these_names": Policy(
        _P.save_and_offload_only_these_names(
            names_which_can_be_saved=["other"], names_which_can_be_offloaded=[], **_OFFLOAD
        ),
        2,
    ),
}
