"""Reading compiled and lowered programs."""

import re
from collections import Counter

# As HLO, StableHLO and StableHLO's generic form spell a custom call's target.
_TARGET = re.compile(r'(?:custom_call_target="|custom_call @|call_target_name = ")(jaxnorm_\w+)')


def count_native_calls(text: str) -> dict[str, int]:
    """How often each of the package's FFI targets stands in a program's text, HLO or StableHLO."""
    return dict(Counter(_TARGET.findall(text)))


def compiled_text(function, *args, **jit_options) -> str:
    """The optimised HLO that XLA runs for ``function(*args)``."""
    import jax

    return jax.jit(function, **jit_options).lower(*args).compile().as_text()
