"""The keywords that the norms share, and which implementation is chosen."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax

from jaxnorm.ops import misuse

Implementation = Literal["native", "jnp"]
IMPLEMENTATIONS = (None, "native", "jnp")
VARIABLE = "JAXNORM_IMPLEMENTATION"


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormOptions:
    """Keywords as a caller gave them, unchecked; `jaxnorm.rms_norm` and `jaxnorm.add_rms_norm` say what they are."""

    epsilon: Any = 1e-6
    scale_offset: Any = 0.0
    axis: int | Sequence[int] = -1
    multiply_before_cast: Any = True
    out_dtype: Any = None
    pad_to: Any = None
    axis_name: Any = None
    implementation: Implementation | None = None


class Choice(NamedTuple):
    """The implementation that a call gets, and how it was chosen if its argument does not say it."""

    implementation: Implementation | None
    how: str = ""

    def native_for(self, function: str) -> str | None:
        """Of whom an error speaks where there is no kernel; None where that is no error."""
        return f"{function}{self.how}" if self.implementation == "native" else None


def _default() -> Implementation | None:
    value: Any = os.environ.get(VARIABLE) or None
    if value not in IMPLEMENTATIONS:
        raise ValueError(f"{VARIABLE}={value}, expected native or jnp; leave it unset for native where it exists.")
    chosen: Implementation | None = value
    return chosen


# Read once: jit would not trace a function again because the environment has changed.
DEFAULT = _default()


class Context(NamedTuple):
    """What is chosen for all functions, and for some of them by name, in the alphabet's order."""

    of_all: Implementation | None = None
    by_name: tuple[tuple[str, Implementation | None], ...] = ()


# A part of the key by which JAX caches what it has traced, local to a thread.
_context = jax.make_user_context(Context())


def choice(function: str, argument: Implementation | None) -> Choice:
    """What a call gets whose argument says this: the argument, or else the context, or else the environment."""
    if argument is not None:
        return Choice(argument)
    of_all, by_name = _context.value
    if (of_function := dict(by_name).get(function, of_all)) is not None:
        asked = {function: of_function} if function in dict(by_name) else of_function
        return Choice(of_function, f" under jaxnorm.implementation({asked!r})")
    return Choice(DEFAULT, f" with {VARIABLE}={DEFAULT}")


def implementation(
    name: Implementation | Mapping[str, Implementation | None] | None,
) -> contextlib.AbstractContextManager[None]:
    """A context, or a decorator, in which functions of jaxnorm that are traced have this implementation.

        with jaxnorm.implementation("jnp"):
            y = model(x)

        with jaxnorm.implementation({"layer_norm": "jnp", "add_layer_norm": "jnp"}):
            y = model(x)

    With a name it is that of every function, with a mapping that of the functions whose names are its keys: a mapping
    goes on top of the contexts around it, a name takes their place. It holds for calls without the argument
    `implementation`, in the thread that enters it. It is about tracing: a function under `jax.jit` is traced again
    under another context, and what was compiled, exported or linearised before stays as it is. Outside of every context
    the environment variable `JAXNORM_IMPLEMENTATION`, which is read once, when jaxnorm is imported, has the same
    effect.

    Args:
      name: "native" or "jnp", as for `rms_norm`; None undoes surrounding contexts. Or a mapping to these from names of
        public functions that have the argument `implementation`.

    Raises:
      ValueError: name, or one in the mapping, is unknown.
    """
    choices = dict(name) if isinstance(name, Mapping) else {"": name}
    for function, chosen in choices.items():
        if function and function not in (known := misuse.having("implementation")):
            raise ValueError(f"implementation: no function {function!r}; {misuse.did_you_mean(str(function), known)}")
        if chosen not in IMPLEMENTATIONS:
            raise ValueError(f"implementation: unknown implementation {chosen!r}; expected None, 'native' or 'jnp'.")
    return _implementation(name)


@contextlib.contextmanager
def _implementation(name: Implementation | Mapping[str, Implementation | None] | None) -> Iterator[None]:
    if isinstance(name, Mapping):
        around: Context = _context.value
        context = around._replace(by_name=tuple(sorted((dict(around.by_name) | dict(name)).items())))
    else:
        context = Context(name)
    with _context(context):
        yield
