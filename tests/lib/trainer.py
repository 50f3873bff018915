"""A decoder's training step over a mesh of data and tensor parallel devices, whose parameters both axes split (FSDP).

Parameters and AdamW's state are float32; a device gathers what it needs of a layer, in bfloat16. The way is a variant
of `bench.model_norms`, whose loss of logits has its classes split.
"""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxnorm
from bench import float8, model_norms, models

# Gate and up are products of their own, so that each device has the same columns of both.
MODELS = {
    "8b": replace(float8.EIGHT_B, packed=False, layers=2, batch=8, classes=32768),
    "gemma": replace(models.GEMMA, layers=2, batch=8, classes=32768),
}
# How a matrix is split, by its name: into columns or rows of each device, and over "data" too. What else there is, is
# on all devices.
SPLIT = dict.fromkeys(("query", "key", "value", "gate", "up", "embed", "head"), P("data", "tensor"))
SPLIT |= dict.fromkeys(("out", "down"), P(("tensor", "data"), None))


@functools.partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["spec"])
@dataclass(frozen=True)
class Weight:
    """A matrix that a mesh splits, as a model reads one: who needs it as an array gathers it over "data"."""

    array: jax.Array
    spec: P

    def astype(self, dtype):
        # Rounded as it is split, so that what is gathered is small.
        rounded = split(self.array.astype(dtype), self.spec)
        return split(rounded, P(*("tensor" if axes and "tensor" in axes else None for axes in self.spec)))

    def __getitem__(self, tokens):
        """The rows of an embedding, of which each device has some columns at first."""
        out = {"out_sharding": P("data", None, "tensor")} if is_explicit() else {}
        return split(split(self.astype(jnp.bfloat16).at[tokens].get(**out), P("data", None, "tensor")), P("data"))


def is_explicit():
    return AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types


def split(array, spec):
    """The array, split so over the mesh that is set."""
    return (jax.sharding.reshard if is_explicit() else jax.lax.with_sharding_constraint)(array, spec)


def product(x, weight):
    """With a split matrix: by columns the result is split too, by rows it is summed."""
    out = P("data", None, weight.spec[1])
    return split(jnp.matmul(x, weight.astype(x.dtype), out_sharding=out if is_explicit() else None), out)


def split_of(path):
    """How a matrix is split, by the names on the way to it."""
    return next((SPLIT[entry.key] for entry in path if getattr(entry, "key", None) in SPLIT), None)


def lowered(model, mesh, variant):
    """The program of a step, which needs no devices."""
    # Each device attends with its own heads.
    attend, heads = functools.partial(jax.nn.dot_product_attention, is_causal=True), P("data", None, "tensor")
    attend = jax.shard_map(attend, mesh=mesh, in_specs=heads, out_specs=heads, check_vma=False)
    model, optimiser = replace(model, attention=attend, product=product), optax.adamw(models.RATE)

    def loss(params, inputs, targets):
        params = jax.tree_util.tree_map_with_path(
            lambda path, array: Weight(array, spec) if (spec := split_of(path)) else array, params
        )
        x = models.hidden(model, model_norms.norms_of(model, variant), params, inputs)
        losses = jaxnorm.softmax_cross_entropy_with_integer_labels
        if model_norms.VARIANTS[variant].loss == "xla":
            losses = models.losses
            if is_explicit():  # what reads the label's logit has no sharding of its own
                losses = jax.sharding.auto_axes(losses, out_sharding=P("data"))
        return losses(x @ params["head"].astype(x.dtype), targets).mean()

    def step(state, inputs, targets):
        params, moments = state
        value, grads = jax.value_and_grad(loss)(params, inputs, targets)
        updates, moments = optimiser.update(grads, moments, params)
        return (jax.tree.map(jnp.add, params, updates), moments), value

    def sharding(path, _):
        return NamedSharding(mesh, split_of(path) or P())

    params = jax.eval_shape(functools.partial(models.init, model))
    state = params, jax.eval_shape(optimiser.init, params)
    batch = jax.eval_shape(functools.partial(models.batch, model))
    of_state, of_batch = jax.tree_util.tree_map_with_path(sharding, state), NamedSharding(mesh, P("data"))
    types = jax.tree.map(
        lambda array, sharding: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding),
        (state, *batch),
        (of_state, *(of_batch for _ in batch)),
    )
    with jax.set_mesh(mesh):
        jitted = jax.jit(step, donate_argnums=0, out_shardings=(of_state, NamedSharding(mesh, P())))
        return jitted.lower(*types)
