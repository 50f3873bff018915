"""Rows with sharded axes: each device holds an equal shard of every row, and exchanges what is about the whole row."""

import dataclasses
from collections.abc import Hashable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm.native import compat, jet


@dataclasses.dataclass(frozen=True)
class Shards:
    """The axes over which the shards of a row exchange something; hashable, so that a primitive carries it."""

    names: tuple[Hashable, ...]  # mesh axes, or those that a vmap named
    groups: tuple[tuple[int, ...], ...] | None = None  # of the positions along the only name; None is all of them

    def mean(self, *shards: jax.Array) -> list[jax.Array]:
        """The mean of each array over the shards, in one exchange."""
        check_no_jet(shards)
        stacked = shards[0] if len(shards) == 1 else jnp.stack(shards)
        mean = lax.pmean(stacked, self.names, axis_index_groups=self.groups)
        # Typed as different on each device, as what it is computed with is: so are all results of a primitive.
        mean, _ = compat.match_varying_axes(mean, stacked)
        return [mean] if len(shards) == 1 else list(mean)

    def gather(self, *shards: jax.Array) -> list[jax.Array]:
        """Each array from all shards, along a new axis in front, in one exchange."""
        check_no_jet(shards)
        # Along an axis that is there: beside one that is new, JAX mistakes which axes an Explicit mesh shards.
        stacked = jnp.expand_dims(jnp.stack(shards), 1)
        return list(lax.all_gather(stacked, self.names, axis=1, tiled=True, axis_index_groups=self.groups))

    def max(self, shard: jax.Array) -> jax.Array:
        """The greatest over the shards, for float32 that is not negative; NaN if there is one.

        Such numbers are ordered as their bits are, with NaN above all others; of floats, not every backend's maximum
        over devices keeps a NaN.
        """
        bits = lax.bitcast_convert_type(shard, jnp.int32)
        greatest = lax.pmax(bits, self.names, axis_index_groups=self.groups)
        return lax.bitcast_convert_type(greatest, jnp.float32)

    def top(self, shard: jax.Array) -> jax.Array:
        """The greatest over the shards, for what is only subtracted: it has no derivative, and NaN may be lost."""
        check_no_jet([shard])
        greatest: jax.Array = lax.pmax(lax.stop_gradient(shard), self.names, axis_index_groups=self.groups)
        return greatest

    def sum(self, shard: jax.Array) -> jax.Array:
        total: jax.Array = lax.psum(shard, self.names, axis_index_groups=self.groups)
        return total

    def add(self, shard: jax.Array) -> jax.Array:
        """The sum over the shards, typed as different on each device."""
        check_no_jet([shard])
        total, _ = compat.match_varying_axes(self.sum(shard), shard)
        return total

    def index(self) -> jax.Array:
        """Which of the shards this one is."""
        position = lax.axis_index(self.names)
        if self.groups is None:
            return position
        order = np.zeros(sum(map(len, self.groups)), np.int32)
        for group in self.groups:
            order[list(group)] = range(len(group))
        return jnp.asarray(order)[position]


def check_no_jet(shards: Iterable[jax.Array]) -> None:
    if any(map(jet.has_terms, shards)):
        raise NotImplementedError(
            "jaxnorm: axis_name is not supported under jax.experimental.jet, which has no rules for what devices "
            "exchange; nest jax.jvp instead, or leave axis_name out and let XLA split the rows."
        )
