"""Rows whose normalised axes are split: over devices, each of which holds an equal part of them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm import compat


@dataclasses.dataclass(frozen=True)
class Split:
    """What the parts of a row are exchanged over, by all that hold one; hashable, as `Norm` is."""

    names: tuple[Any, ...]  # mesh axes, or those that a vmap named
    groups: tuple[tuple[int, ...], ...] | None = None  # of the positions along the only name; None is all of them

    def mean(self, *parts: jax.Array) -> list[jax.Array]:
        """The mean over the parts of each, in one exchange."""
        stacked = parts[0] if len(parts) == 1 else jnp.stack(parts)
        mean = lax.pmean(stacked, self.names, axis_index_groups=self.groups)
        # Typed as different on each device, as what it is computed with is: so are all results of a primitive.
        mean, _ = compat.match_varying_axes(mean, stacked)
        return [mean] if len(parts) == 1 else list(mean)

    def gather(self, *parts: jax.Array) -> list[jax.Array]:
        """Each of all parts, along a new axis in front, in one exchange."""
        stacked = lax.all_gather(jnp.stack(parts), self.names, axis=1, axis_index_groups=self.groups)
        return list(stacked)

    def max(self, part: jax.Array) -> jax.Array:
        """The greatest part, of float32 and not negative; NaN if there is one.

        Such numbers are ordered as their bits are, with NaN above all others; of floats, not every backend's maximum
        over devices keeps a NaN.
        """
        bits = lax.bitcast_convert_type(part, jnp.int32)
        greatest = lax.pmax(bits, self.names, axis_index_groups=self.groups)
        return lax.bitcast_convert_type(greatest, jnp.float32)

    def sum(self, part: jax.Array) -> jax.Array:
        total: jax.Array = lax.psum(part, self.names, axis_index_groups=self.groups)
        return total
