"""The keywords that norms share, and the choice of an implementation."""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import jax

from jaxnorm.ops import misuse
from jaxnorm.primitive.fallback import Around

Implementation = Literal["native", "xla"]
IMPLEMENTATIONS: tuple[Any, ...] = (None, "native", "xla")
Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
# What `implementation` takes: of a function, or of one of its directions.
Choices = Mapping[str, Implementation | Mapping[Any, Implementation | None] | None]
VARIABLE = "JAXNORM_IMPLEMENTATION"


class NormOptions(NamedTuple):
    """Keywords as a caller gave them, unchecked; `jaxnorm.rms_norm` and `jaxnorm.add_rms_norm` say what they are."""

    epsilon: Any = 1e-6
    scale_offset: Any = 0.0
    axis: int | Sequence[int] = -1
    multiply_before_cast: Any = True
    out_dtype: Any = None
    axis_name: Any = None
    implementation: Implementation | None = None
    pad_to: Any = None


class Asked(NamedTuple):
    """The implementation of one direction of a call, and what chose it if no argument did."""

    implementation: Implementation | None = None
    how: str = ""

    def native_for(self, function: str) -> str | None:
        """Who asked for a kernel, for an error where there is none; None where that is no error."""
        return f"{function}{self.how}" if self.implementation == "native" else None


class Choice(NamedTuple):
    """The implementation of a call in each of DIRECTIONS."""

    forward: Asked = Asked()
    backward: Asked = Asked()

    @property
    def implementation(self) -> Implementation | None:
        """That of both directions; None also where they differ, which the call's `Spec` says then."""
        chosen = self.forward.implementation
        return chosen if chosen == self.backward.implementation else None

    def of(self, direction: str) -> Asked:
        """That of "backward", or of forward directions."""
        return self.backward if direction == "backward" else self.forward

    def asks(self, function: str) -> dict[str, Any]:
        """The fields of the call's `Spec` that say what it is asked for."""
        asked = self._asdict()
        native = {direction: who for direction in asked if (who := asked[direction].native_for(function))}
        formula = tuple((direction, of.how) for direction, of in asked.items() if of.implementation == "xla")
        ways = {"native_for": next(iter(native.values())), "native_ways": tuple(native)} if native else {}
        return {**ways, "formula_for": formula}


def _default() -> Implementation | None:
    value: Any = os.environ.get(VARIABLE) or None
    if value not in IMPLEMENTATIONS:
        raise ValueError(
            f"{VARIABLE}={value}, expected native or xla; leave it unset for native where it exists."
            f"{misuse.renamed(value)}"
        )
    chosen: Implementation | None = value
    return chosen


# Read once: jit would not trace a function again because the environment has changed.
DEFAULT = _default()


class Context(NamedTuple):
    """The choice for all functions, and for some by name and direction, in alphabetical order."""

    of_all: Implementation | None = None
    by_name: tuple[tuple[tuple[str, str], Implementation | None], ...] = ()

    def asked(self, function: str, direction: str) -> Asked:
        """The implementation of one direction of a function."""
        by_name = dict(self.by_name)
        own = by_name.get((function, direction), self.of_all)
        if own is None:
            return Asked(DEFAULT, f" with {VARIABLE}={DEFAULT}")
        asked: Any = own
        if (function, direction) in by_name:
            is_one = all(by_name.get((function, other), "") == own for other in DIRECTIONS)
            asked = {function: own if is_one else {direction: own}}
        return Asked(own, f" under jaxnorm.implementation({asked!r})")


# A part of the key by which JAX caches what it has traced, local to a thread.
_context = jax.make_user_context(Context())


_heard = Around()


@contextlib.contextmanager
def hearing() -> Iterator[dict[tuple[str, str], None]]:
    """Functions, with directions, that this thread traces within without a choice, in order."""
    free: dict[tuple[str, str], None] = {}
    with _heard.within(free):
        yield free


def choice(function: str, argument: Implementation | None) -> Choice:
    """The choice for a call with this argument: the argument, else the context, else the environment."""
    if argument is not None:
        return Choice(Asked(argument), Asked(argument))
    chosen = around(function)
    for free in _heard.entries:
        free.update({(function, way): None for way in DIRECTIONS if chosen.of(way).implementation is None})
    return chosen


def around(function: str) -> Choice:
    """The choice of the context, else of the environment, for a function."""
    context: Context = _context.value
    return Choice(*(context.asked(function, direction) for direction in DIRECTIONS))


def context() -> Context:
    here: Context = _context.value
    return here


def implementation(name: Implementation | Choices | None) -> contextlib.AbstractContextManager[None]:
    """A context, or a decorator, that chooses the implementation of functions of jaxnorm traced within it.

        >>> with implementation({"layer_norm": "xla", "rms_norm": {"backward": "native"}}):
        ...     y = layer_norm(jnp.ones((2, 8)))

    A name holds for every function, in place of the contexts around it. A mapping holds for the functions that are its
    keys, on top of the contexts around it. Its values are names, for both directions, or mappings from "forward" and
    "backward" to names, where a direction left out stays as it is around. A direction without a kernel runs XLA's code.

    Calls with the argument `implementation` ignore it. Contexts are per thread and act at trace time: a function under
    `jax.jit` is traced again under another context, and what was compiled, exported or linearised before stays as it
    is. Outside all contexts the environment variable `JAXNORM_IMPLEMENTATION`, read once, has the same effect.

    Args:
      name: "native" or "xla", as for `rms_norm`; None undoes surrounding contexts. Or a mapping, from names of public
        functions with the argument `implementation` to these, or to mappings from directions to these.

    Raises:
      ValueError: name, or a function, direction or implementation in the mapping, is unknown.
    """
    return _implementation(checked(name) if isinstance(name, Mapping) else _known(name))


def checked(choices: Choices) -> dict[tuple[str, str], Implementation | None]:
    """What a mapping chooses, by function and direction."""
    chosen: dict[tuple[str, str], Implementation | None] = {}
    for function, value in choices.items():
        if function not in (known := misuse.having("implementation")):
            raise ValueError(f"implementation: no function {function!r}; {misuse.did_you_mean(str(function), known)}")
        by_direction = value if isinstance(value, Mapping) else dict.fromkeys(DIRECTIONS, value)
        for direction, name in by_direction.items():
            if direction not in DIRECTIONS:
                raise ValueError(
                    f"implementation: {function} has no direction {direction!r}; expected 'forward' or 'backward'."
                )
            chosen[function, direction] = _known(name)
    return chosen


def _known(name: Any) -> Implementation | None:
    if isinstance(name, (str, type(None))) and name in IMPLEMENTATIONS:
        return cast(Implementation | None, name)
    raise ValueError(
        f"implementation: unknown implementation {name!r}; expected None, 'native' or 'xla'.{misuse.renamed(name)}"
    )


@contextlib.contextmanager
def _implementation(chosen: Implementation | dict[tuple[str, str], Implementation | None] | None) -> Iterator[None]:
    if isinstance(chosen, dict):
        surrounding = context()
        here = surrounding._replace(by_name=tuple(sorted((dict(surrounding.by_name) | chosen).items())))
    else:
        here = Context(chosen)
    with _context(here):
        yield
