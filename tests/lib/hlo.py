"""Reading compiled and lowered programs."""

import functools
import math
import re
from collections import Counter

# As HLO, StableHLO and StableHLO's generic form spell a custom call's target.
_TARGET = re.compile(r'(?:custom_call_target="|custom_call @|call_target_name = ")(jaxnorm_\w+)')
# "%name = shape all-reduce(", where a shape is a tuple's if several arrays go together.
_COLLECTIVE = re.compile(
    r"= (\(.*?\)|\S+) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\("
)
SHAPE = re.compile(r"\b([a-z]+)(\d+)\w*\[([\d,]*)\]")
# Groups of one device, as of a mesh axis of one, exchange nothing.
_ALONE = re.compile(r"replica_groups=(\{\{\d+\}|\[\d+,1\]<=)")
_NAME = re.compile(r"%([\w.-]+)")
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%(?P<name>[\w.-]+) \(.*?^\}", re.DOTALL | re.MULTILINE)
_CALLED = re.compile(r"\b(?:body|calls|to_apply|\w+_computations?)=(\{[^}]*\}|%[\w.-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


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


def collectives(text: str) -> dict[str, int]:
    """What the devices of an optimised HLO exchange: the bytes of the results of each kind of collective on one.

    What is in a loop counts as often as the loop runs, or once where XLA does not know how often.
    """
    bodies = {match["name"]: match for match in _COMPUTATION.finditer(text)}

    @functools.cache
    def of(name: str) -> Counter[str]:
        exchanged: Counter[str] = Counter()
        for line in bodies[name][0].splitlines():
            for shape, kind, start in () if _ALONE.search(line) else _COLLECTIVE.findall(line):
                exchanged[kind] += _bytes(shape, lists_operands=bool(start) and kind != "all-reduce")
            trips = _TRIPS.search(line)
            for called in _NAME.findall(" ".join(_CALLED.findall(line))):
                for kind, size in of(called).items():
                    exchanged[kind] += size * int(trips[1] if trips else 1)
        return exchanged

    return dict(sum((of(name) for name, match in bodies.items() if match["entry"]), Counter()))


def _bytes(shape: str, *, lists_operands: bool) -> int:
    """Of the results in a shape, before which the start of an asynchronous collective may have its operands."""
    is_nested = shape.startswith("((")  # the operands are a tuple of their own
    arrays = SHAPE.findall(shape.partition(")")[2] if is_nested else shape)
    results = arrays[len(arrays) // 2 :] if lists_operands and not is_nested else arrays
    return sum(int(bits) // 8 * math.prod(int(n) for n in dims.split(",") if n) for _, bits, dims in results)
