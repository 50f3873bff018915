"""Statements about calls, for tables of them."""

from typing import Any, NamedTuple


class Raises(NamedTuple):
    args: tuple[Any, ...]
    keywords: dict[str, Any]
    error: type[Exception]
    parts: tuple[str, ...]  # what the message must hold in this order


class NoKernel(NamedTuple):
    args: tuple[Any, ...]
    keywords: dict[str, Any]
    reason: str  # in the error where native is asked for by name; by default XLA's code runs


class Call(NamedTuple):
    args: tuple[Any, ...]
    keywords: dict[str, Any]

    def raises(self, error, *parts):
        return Raises(*self, error, parts)

    def has_no_kernel(self, reason):
        return NoKernel(*self, reason)


def call(*args, **keywords):
    return Call(args, keywords)


def named(*rows):
    """The rows by what is said of each."""
    names = [" ".join(map(str, row.parts)) if isinstance(row, Raises) else row.reason for row in rows]
    unique = [f"{name} {n}" if name in names[:n] else name for n, name in enumerate(names)]
    return dict(zip(unique, rows, strict=True))
