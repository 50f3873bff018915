"""Results that a program does not read: its calls do not give them."""

from collections.abc import Callable
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import partial_eval


def drop(primitive: Primitive, without_unread: Callable[..., Any]) -> None:
    """Let calls of primitive leave out results: jit asks before it lowers a program.

    Of which results are read, the types of the operands and the parameters, without_unread gives the parameters of the
    call that takes its place, and which of the results that gives. The rule has one argument more since JAX 0.12.
    """

    def rule(is_read: list[bool], *more: Any) -> tuple[list[bool], Any]:
        *_, equation = more
        if not any(is_read):
            return [False] * len(equation.invars), None
        if not all(is_read):
            types = [operand.aval for operand in equation.invars]
            params, is_given = without_unread(is_read, types, **equation.params)
            results = [result for result, given in zip(equation.outvars, is_given, strict=True) if given]
            equation = equation.replace(params=params, outvars=results)
        return [True] * len(equation.invars), equation

    partial_eval.dce_rules[primitive] = rule
