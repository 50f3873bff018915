"""The keywords that the norms share, and which implementation is chosen."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax

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
# A part of the key by which JAX caches what it has traced, local to a thread.
_context = jax.make_user_context(None)


def choice(argument: Implementation | None) -> Choice:
    """What a call gets whose argument says this: the argument, or else the context, or else the environment."""
    if argument is not None:
        return Choice(argument)
    if (of_context := _context.value) is not None:
        return Choice(of_context, f" under jaxnorm.implementation({of_context!r})")
    return Choice(DEFAULT, f" with {VARIABLE}={DEFAULT}")


def implementation(name: Implementation | None) -> contextlib.AbstractContextManager[None]:
    """A context, or a decorator, in which every function of jaxnorm that is traced has this implementation.

        with jaxnorm.implementation("jnp"):
            y = model(x)

    It holds for calls without the argument `implementation`, in the thread that enters it. It is about tracing: a
    function under `jax.jit` is traced again under another context, and what was compiled, exported or linearised before
    stays as it is. Outside of every context the environment variable `JAXNORM_IMPLEMENTATION`, which is read once, when
    jaxnorm is imported, has the same effect.

    Args:
      name: "native" or "jnp", as for `rms_norm`; None undoes a surrounding context.

    Raises:
      ValueError: name is unknown.
    """
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"implementation: unknown implementation {name!r}; expected None, 'native' or 'jnp'.")
    return _implementation(name)


@contextlib.contextmanager
def _implementation(name: Implementation | None) -> Iterator[None]:
    with _context(name):
        yield
