"""Reading compiled and lowered programs."""

import re
from collections import Counter

from bench.collectives import SHAPE
from bench.collectives import collectives as collectives

# As HLO, StableHLO and StableHLO's generic form spell a custom call's target.
_TARGET = re.compile(r'(?:custom_call_target="|custom_call @|call_target_name = ")(jaxnorm_\w+)')


def count_native_calls(text: str) -> dict[str, int]:
    """How often each of the package's FFI targets stands in a program's text, HLO or StableHLO."""
    return dict(Counter(_TARGET.findall(text)))


def results_of(text: str, target: str) -> int:
    """How many arrays the one call of a target in an optimised HLO gives, a workspace among them."""
    (shape,) = re.findall(rf'= (\(.*?\)|\S+) custom-call\(.*custom_call_target="{target}"', text)
    return len(SHAPE.findall(shape))


def compiled_text(function, *args, **jit_options) -> str:
    """The optimised HLO that XLA runs for ``function(*args)``."""
    import jax

    return jax.jit(function, **jit_options).lower(*args).compile().as_text()


def lowered_calls(function, target, *args) -> list[str]:
    """The text of each call of one target in StableHLO, attributes and result types included."""
    import jax

    return [line for line in jax.jit(function).lower(*args).as_text().splitlines() if f"@{target}(" in line]
