"""Reading compiled and lowered programs."""

import math
import re
from collections import Counter

# As HLO, StableHLO and StableHLO's generic form spell a custom call's target.
_TARGET = re.compile(r'(?:custom_call_target="|custom_call @|call_target_name = ")(jaxnorm_\w+)')
# "%name = shape all-reduce(", where a shape is a tuple's if several arrays go together.
_COLLECTIVE = re.compile(
    r"= (\(.*?\)|\S+) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\("
)
_SHAPE = re.compile(r"\b([a-z]+)(\d+)\w*\[([\d,]*)\]")


def count_native_calls(text: str) -> dict[str, int]:
    """How often each of the package's FFI targets stands in a program's text, HLO or StableHLO."""
    return dict(Counter(_TARGET.findall(text)))


def results_of(text: str, target: str) -> int:
    """How many arrays the one call of a target in an optimised HLO gives, a workspace among them."""
    (shape,) = re.findall(rf'= (\(.*?\)|\S+) custom-call\(.*custom_call_target="{target}"', text)
    return len(_SHAPE.findall(shape))


def collectives(text: str) -> dict[str, int]:
    """What the devices of an optimised HLO exchange: the bytes of the results of each kind of collective on one."""
    exchanged: Counter[str] = Counter()
    for shape, kind, start in _COLLECTIVE.findall(text):
        arrays = _SHAPE.findall(shape)
        # The start of an asynchronous one has its operands before its results.
        results = arrays[len(arrays) // 2 :] if start else arrays
        for _, bits, dims in results:
            exchanged[kind] += int(bits) // 8 * math.prod(int(n) for n in dims.split(",") if n)
    return dict(exchanged)


def compiled_text(function, *args, **jit_options) -> str:
    """The optimised HLO that XLA runs for ``function(*args)``."""
    import jax

    return jax.jit(function, **jit_options).lower(*args).compile().as_text()


def lowered_calls(function, target, *args) -> list[str]:
    """The text of each call of one target in StableHLO, attributes and result types included."""
    import jax

    return [line for line in jax.jit(function).lower(*args).as_text().splitlines() if f"@{target}(" in line]
