"""The keywords that the norms share."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

Implementation = Literal["native", "jnp"]


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
