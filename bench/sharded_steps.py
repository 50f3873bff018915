"""Training steps of decoders over meshes of data and tensor parallel devices, see `bench.sharding`.

The mesh "4x2" splits a batch over 4 devices, and each product, the heads and the vocabulary over 2. Parameters and
AdamW's state are float32 and split over both axes (FSDP): a device gathers what it needs of a layer, in bfloat16 or
as `float8_linear` rounds it. The batch grows with the devices.

    jnp           XLA's code for norms, rotation, gates and loss
    jaxnorm       jaxnorm's default, and its loss of logits, whose classes are split
    linear loss   the same with `linear_cross_entropy`, for which the rows are split over all devices
    float8        as jaxnorm, with every product but the last by `float8_linear`

"ktokens/s" is of all devices, "scaling" that by the devices over one device's. "MiB exchanged" is what a device gets by
the collectives of a step, by kind, "more than jnp" the difference from XLA's code on the same mesh. "losses apart" is
the largest relative distance of the losses of a training from those of one device, of the same batches, which are 8
sequences of 1024 tokens; its programs are compiled as quickly as can be.
"""

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxnorm
from bench import float8, model_blocks, model_norms, models, report, sharded_tables, timing
from bench.collectives import collectives

# Gate and up are products of their own, so that each device has the same columns of both.
TRAINERS = {
    "8b": replace(float8.EIGHT_B, packed=False, scan=True, batch=2, classes=32768),
    "gemma": replace(models.GEMMA, scan=True, batch=4, classes=32768),
}
AXES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
BATCHES = 8  # of a training, one after the other
# XLA's options for what is not timed, by platform.
QUICKLY = {
    "gpu": {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False},  # it is for autotuning to tile
    "cpu": {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True},
}
# How a matrix is split, by its name: into columns or rows of each device, and over "data" too. What else there is, is
# on all devices.
COLUMNS, ROWS = P("data", "tensor"), P(("tensor", "data"), None)
SPLIT = dict.fromkeys(("query", "key", "value", "gate", "up", "embed", "head"), COLUMNS)
SPLIT |= dict.fromkeys(("out", "down"), ROWS)


class Way(NamedTuple):
    variant: str  # of `bench.model_norms`
    product: Callable[[jax.Array, jax.Array], jax.Array] | None = None  # of x and a split matrix


WAYS = {
    "jnp": Way("jnp"),
    "jaxnorm": Way("jaxnorm-default-loss"),
    "linear loss": Way("jaxnorm-default-linear-loss"),
    "float8": Way("jaxnorm-default-loss", jaxnorm.float8_linear),
}


def add_arguments(parser):
    parser.add_argument("--trainer", choices=TRAINERS, help="training steps in place of chains of norms")
    parser.add_argument("--meshes", nargs="+", type=sizes, help="of --trainer, data x tensor (default: 1x1, nx1, ...)")
    parser.add_argument("--axes", nargs="+", default=["auto"], choices=AXES, help="(default: auto)")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--layers", type=int, help="of the trainer's model (default: 8)")
    parser.add_argument("--losses", type=int, help="steps whose losses are compared (default: 100, of a toy 10)")
    parser.add_argument("--small", action="store_true", help="a toy of the trainer, to try the program")


def sizes(text):
    """(data, tensor) of "4x2"."""
    data, tensor = map(int, text.split("x"))
    return data, tensor


def meshes_of(args):
    """Those of the arguments, or one device, and all of them with 1, 2 and 4 along "tensor"; of a toy only 2."""
    tensors = (2,) if args.small else (1, 2, 4)
    whole = [(args.devices // tensor, tensor) for tensor in tensors if args.devices % tensor == 0]
    return args.meshes or list(dict.fromkeys([(1, 1), *whole]))


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


def product_of(way):
    """A product with a split matrix: by columns its result is split too, by rows it is summed."""

    def product(x, weight):
        out = P("data", None, weight.spec[1])
        if way.product:
            return split(way.product(x, weight.array), out)
        return split(jnp.matmul(x, weight.astype(x.dtype), out_sharding=out if is_explicit() else None), out)

    return product


def loss_of(way, x, head, targets):
    """The mean loss of a batch, of a head whose classes are split over "tensor"."""
    how = model_norms.VARIANTS[way.variant].loss
    if how == "linear":
        # Whole rows at first, or XLA splits those of the layers too.
        x, targets = (split(split(array, P("data")), P("data", "tensor")) for array in (x, targets))
        return jaxnorm.linear_cross_entropy(x, head.astype(x.dtype), targets)
    losses = {"jnp": models.losses, "native": jaxnorm.softmax_cross_entropy_with_integer_labels}[how]
    if how == "jnp" and is_explicit():  # what reads the label's logit has no sharding of its own
        losses = jax.sharding.auto_axes(losses, out_sharding=P("data"))
    return losses(x @ head.astype(x.dtype), targets).mean()


class Trainer:
    """A model's training over a mesh in one of the ways."""

    def __init__(self, spec, mesh, way):
        import optax

        # Each device attends with its own heads.
        attend = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=spec.attention)
        heads = P("data", None, "tensor")
        attend = jax.shard_map(attend, mesh=mesh, in_specs=heads, out_specs=heads, check_vma=False)
        self.spec, self.mesh, self.way = replace(spec, attention=attend), mesh, WAYS[way]
        self.optimiser = optax.adamw(models.RATE)

    def shardings(self, tree):
        """Of parameters or the optimiser's state: the layers' matrices are stacked."""

        def sharding(path, array):
            stacked = [None] * (array.ndim - 2)
            return NamedSharding(self.mesh, P(*stacked, *spec) if (spec := split_of(path)) else P())

        return jax.tree_util.tree_map_with_path(sharding, tree)

    def state(self, params):
        """Of the parameters of the host."""
        moments = jax.eval_shape(self.optimiser.init, params)
        params = jax.device_put(params, self.shardings(params))
        return params, jax.jit(self.optimiser.init, out_shardings=self.shardings(moments))(params)

    def batch(self, seed):
        return jax.device_put(models.batch(self.spec, seed), NamedSharding(self.mesh, P("data")))

    def loss(self, params, inputs, targets):
        params = jax.tree_util.tree_map_with_path(
            lambda path, array: Weight(array, spec) if (spec := split_of(path)) else array, params
        )
        with model_blocks.products(product_of(self.way)):
            x = models.hidden(self.spec, model_norms.norms_of(self.spec, self.way.variant), params, inputs)
        return loss_of(self.way, x, params["head"], targets)

    def step(self, state, inputs, targets):
        params, moments = state
        value, grads = jax.value_and_grad(self.loss)(params, inputs, targets)
        updates, moments = self.optimiser.update(grads, moments, params)
        return (jax.tree.map(jnp.add, params, updates), moments), value

    def lowered(self):
        """The program of a step, which needs no devices."""
        params = jax.eval_shape(functools.partial(models.init, self.spec))
        state = params, jax.eval_shape(self.optimiser.init, params)
        batch = jax.eval_shape(functools.partial(models.batch, self.spec))
        of_state, of_batch = self.shardings(state), NamedSharding(self.mesh, P("data"))
        types = jax.tree.map(
            lambda array, sharding: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding),
            (state, *batch),
            (of_state, *(of_batch for _ in batch)),
        )
        step = jax.jit(self.step, donate_argnums=0, out_shardings=(of_state, NamedSharding(self.mesh, P())))
        with jax.set_mesh(self.mesh):
            return step.lower(*types)

    def compiled(self, quickly=False):
        return self.lowered().compile(compiler_options=QUICKLY.get(jax.default_backend()) if quickly else None)


def split_of(path):
    """How a matrix is split, by the names on the way to it."""
    return next((SPLIT[entry.key] for entry in path if getattr(entry, "key", None) in SPLIT), None)


def main(args):
    if args.turns < 2:
        raise SystemExit(f"--turns {args.turns}: must be at least 2")
    spec, of_losses = specs_of(args)
    params: Any = jax.device_get(models.init(spec))
    rows: list[dict[str, Any]] = []
    for data, tensor in meshes_of(args):
        if data * tensor > args.devices:
            raise SystemExit(
                f"--meshes {data}x{tensor}: there are {args.devices} devices; a CPU stands for 8 with "
                "XLA_FLAGS=--xla_force_host_platform_device_count=8"
            )
        devices = np.reshape(jax.devices()[: data * tensor], (data, tensor))
        for axes in args.axes:
            mesh = Mesh(devices, ("data", "tensor"), axis_types=(AXES[axes],) * 2)
            wide = spec if args.small else replace(spec, batch=spec.batch * mesh.size)
            for row in measured(wide, of_losses, mesh, params, args):
                rows.append({"model": spec.name, "axes": axes, "mesh": f"{data}x{tensor}", **row})
            report.write(header_of(spec, args), sharded_tables.compared(rows), args.out)


def specs_of(args):
    """The model with a device's batch, and with that of the training whose losses are compared."""
    spec = TRAINERS[args.trainer]
    if args.small:
        toy = replace(models.small(spec), batch=8, classes=64, heads=8, kv_heads=4, layers=args.layers or 2)
        return toy, toy
    attention = "cudnn" if jax.default_backend() == "gpu" else "xla"
    spec = replace(spec, attention=attention, layers=args.layers or spec.layers)
    return spec, replace(spec, batch=8, tokens=1024)


def header_of(spec, args):
    model = f"{spec.layers} layers of {spec.dim}, vocabulary of {spec.classes}"
    batch = f"{spec.batch} x {spec.tokens} tokens{'' if args.small else ' a device'}"
    return {**report.device(args.commit), "model": model, "batch": batch, "attention": spec.attention}


def measured(spec, of_losses, mesh, params, args):
    """A row for each way, timed in turns. All ways have the same parameters."""
    trainers = {way: Trainer(spec, mesh, way) for way in args.ways}
    first = next(iter(trainers.values()))
    state, executables, compiling = first.state(params), {}, {}
    for way, trainer in trainers.items():
        start = time.perf_counter()
        executables[way] = trainer.compiled(quickly=args.small)
        compiling[way] = time.perf_counter() - start
        report.tell(f"compiled {way}", start)
    start = time.perf_counter()
    times = timing.in_turns(executables, state, first.batch(0), args.turns, 1 if args.small else 4)[0]
    report.tell("timed", start)
    for way, taken in times.items():
        memory = executables[way].memory_analysis()
        trainer, step = trainers[way], executables[way]
        if spec != of_losses:
            trainer, step = Trainer(of_losses, mesh, way), None
        start = time.perf_counter()
        losses = losses_of(trainer, step, params, steps_of(args))
        report.tell(f"trained {way}", start)
        yield {
            "devices": mesh.size,
            "way": way,
            **timing.columns(taken),
            "ktokens/s": spec.batch * spec.tokens / statistics.median(taken) / 1e3,
            "state GiB": memory.alias_size_in_bytes / 2**30,
            "temp GiB": memory.temp_size_in_bytes / 2**30,
            "compile s": compiling[way],
            "collectives": collectives(executables[way].as_text()),
            "losses": losses,
        }


def steps_of(args):
    return args.losses if args.losses is not None else 10 if args.small else 100


def losses_of(trainer, step, params, count):
    """Of a training on the same batches over every mesh."""
    if not count:
        return []
    state, losses = trainer.state(params), []
    batches = [trainer.batch(1 + seed) for seed in range(BATCHES)]
    step = step or trainer.compiled(quickly=True)
    for number in range(count):
        state, value = step(state, *batches[number % BATCHES])
        # It waits: the devices that one CPU stands for lock up with two steps in flight.
        losses.append(round(float(value), 6))
    return losses
