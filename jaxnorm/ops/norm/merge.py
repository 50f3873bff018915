"""LayerNorm's statistics of whole rows, from the mean and variance of each shard."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from jaxnorm.native import compat
from jaxnorm.primitive import lowering, rules
from jaxnorm.sharding.shards import Shards, check_no_jet


def of_whole_rows(shards: Shards, mean: jax.Array, variance: jax.Array) -> list[jax.Array]:
    """Chan, Golub and LeVeque's merge of the shards: as exact as the sum over all, with one exchange.

    Over axes of a `shard_map`, a primitive whose derivative is by means: JAX cannot transpose a gather beside an
    Explicit axis, and drops a `custom_jvp`'s rule where it linearises the body of a loop.
    """
    check_no_jet([mean, variance])
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return (_primitive.bind if set(shards.names) <= set(manual) else _formula)(mean, variance, shards=shards)


def _formula(mean: jax.Array, variance: jax.Array, *, shards: Shards) -> list[jax.Array]:
    means, variances = shards.gather(mean, variance)
    mean = jnp.mean(means, axis=0)
    return [mean, jnp.mean(variances + lax.square(means - mean), axis=0)]


def _batch(of_shard: Any, axes: Any, *, shards: Shards) -> tuple[Any, Any]:
    return rules.at_front(_primitive.bind(*rules.fold(of_shard, axes), shards=shards))


def _jvp(of_shard: Any, dots: Any, *, shards: Shards) -> tuple[Any, Any]:
    mean, variance = _primitive.bind(*of_shard, shards=shards)
    mean_dot, variance_dot = map(ad.instantiate_zeros, dots)
    return [mean, variance], shards.mean(mean_dot, variance_dot + 2 * (of_shard[0] - mean) * mean_dot)


_primitive = Primitive("jaxnorm_merge")
_primitive.multiple_results = True
_primitive.def_abstract_eval(lambda *of_shard, shards: [a.update(weak_type=False) for a in of_shard])
compat.run_eagerly(_primitive)
lowering.register_formula(_primitive, _formula)
batching.primitive_batchers[_primitive] = _batch
ad.primitive_jvps[_primitive] = _jvp
