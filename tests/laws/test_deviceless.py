"""Law 6 in programs for a GPU, compiled where there is none: a native call each way, and nothing beside it."""

import functools
import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import with_gradients
from deviceless import compiled, kernels, mesh, optimised, topology, types
from hlo import collectives, count_native_calls, results_of
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from op import Size
from quantizing import to
from table import ADDED, NORMS, OPS

import jaxnorm
from bench import float8, model_norms, models

pytestmark = pytest.mark.deviceless


@pytest.mark.parametrize("op", OPS, ids=str)
def test_one_call_each_way(op):
    for function, calls in ((op.gradient(), {op.forward: 1, op.backward: 1}), (op.run(op.function), {op.forward: 1})):
        assert count_native_calls(compiled(function, *types(op.types(op.small))).as_text()) == calls


@pytest.mark.parametrize("op", ADDED, ids=str)
def test_no_copy_beside_a_sum(op):
    size = op.small._replace(dims=(1024, 1024), weights=(1024,))
    x, residual, *weights = types(op.types(size, "bfloat16"))
    # A donated buffer goes to the first result that fits it.
    program = compiled(lambda *args: op.function(*args)[::-1], x, residual, *weights, donate_argnums=1)
    assert [line for line in kernels(program) if " copy(" in line] == []
    assert program.memory_analysis().temp_size_in_bytes < x.size


@pytest.mark.parametrize("op", ADDED, ids=str)
def test_a_sum_that_nobody_reads(op):
    args = types(op.types(large(op)))
    with_sum, without = (compiled(op.function, *args), compiled(lambda *args: op.function(*args)[0], *args))
    assert [results_of(program.as_text(), op.forward) for program in (with_sum, without)] == [2, 1]
    assert without.memory_analysis().temp_size_in_bytes <= 4 * args[0].size / 16


def large(op):
    """The small size, rows 16 times as long and 8192 times as many, or positions: little is what has a number a row."""
    rows, *between, cols = op.small.dims
    dims = (rows, 8192, *between, 16 * cols) if op.has_positions else (8192 * rows, *between, 16 * cols)
    lengths = {name: 16 * length for name, length in op.small.options.items()}  # of groups, of what is padded
    return Size(dims, (*op.small.weights[:-1], 16 * op.small.weights[-1]), lengths)


# Beside operands and results there are statistics and what gradients of weights are summed from, and where the program
# dequantises the values of 8 bits: nothing that is a copy of x, in any dtype.
@pytest.mark.parametrize("op", OPS, ids=str)
def test_temporary_memory(op):
    size = large(op)
    function, args = op.run(**size.options), types(op.types(size))
    cotangents = types(jax.eval_shape(function, *args))
    values = math.prod(size.dims) if op.public.endswith("_quantized") else 0
    for program in (compiled(function, *args), compiled(with_gradients(function), cotangents, *args)):
        assert count_native_calls(program.as_text())[op.forward] == 1
        assert program.memory_analysis().temp_size_in_bytes <= values + 4 * args[0].size / 16


ROWS, CLASSES = 16384, 131072


def loss_program(loss):
    """Of hidden states of 1024, a kernel and labels: the loss, and the gradients of the former two."""
    x, kernel = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((ROWS, 1024), (1024, CLASSES)))
    return compiled(jax.value_and_grad(loss, (0, 1)), *types((x, kernel, jax.ShapeDtypeStruct((ROWS,), jnp.int32))))


def test_the_gradient_of_logits_takes_their_place():
    losses = jaxnorm.softmax_cross_entropy_with_integer_labels
    program = loss_program(lambda x, kernel, labels: losses(x @ kernel, labels).mean())
    assert program.memory_analysis().temp_size_in_bytes < 2 * ROWS * CLASSES + 2**20


@pytest.mark.parametrize("function", [jaxnorm.softmax, jaxnorm.log_softmax])
def test_a_window_makes_no_mask(function):
    def step(x, offset):
        return jax.grad(lambda x: jnp.sin(function(x, causal=True, offset=offset, window=64)).sum())(x)

    program = compiled(step, *types((jnp.ones((4, 8, 256, 512), jnp.bfloat16), jnp.ones(4, jnp.int32))))
    name = f"jaxnorm_{function.__name__}"
    assert count_native_calls(program.as_text()) == {f"{name}_fwd": 1, f"{name}_bwd": 1}
    assert not [line for line in kernels(program) if "pred[4,8,256,512]" in line]


# A chunk whose logits take as much as the gradient of the kernel in float32, that gradient, and little else.
def test_no_more_logits_than_a_chunk():
    program = loss_program(functools.partial(jaxnorm.linear_cross_entropy, rows_per_chunk=2048))
    assert program.memory_analysis().temp_size_in_bytes < 2 * 4 * 1024 * CLASSES + 2**26


TOKENS, DEPTH, OUTPUTS = 8192, 4096, 14336
FLOAT8 = to("float8_e4m3fn")


def operands():
    """x, and a kernel that is quantised."""
    x, kernel = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((TOKENS, DEPTH), (DEPTH, OUTPUTS)))
    return types(x), types(jax.eval_shape(lambda w: jaxnorm.quantize_kernel(w, FLOAT8), kernel))


def of_norm(x, kernel):
    return jaxnorm.quantized_dot(jaxnorm.rms_norm_quantized(x, quantization=FLOAT8).quantized, kernel)


def test_one_product_of_float8_and_one_kernel_more():
    x, kernel = operands()
    x = types(jax.eval_shape(lambda x: jaxnorm.quantize(x, FLOAT8), x))
    program = compiled(jaxnorm.quantized_dot, x, kernel)
    product, *others = kernels(program)
    # Its operands are those of the program, whose own types have not been widened.
    assert "%x_values" in product
    assert "%kernel_values" in product
    assert len(others) <= 1
    # No more than the sums in float32.
    assert program.memory_analysis().temp_size_in_bytes <= 4 * TOKENS * OUTPUTS + 2**26


def test_a_product_behind_a_norm():
    program = compiled(of_norm, *operands())
    assert count_native_calls(program.as_text()) == {"jaxnorm_rms_norm_quantized_fwd": 1}
    assert len(kernels(program)) <= 3


# Of rows that are split over devices only the gradients of weights are exchanged; of parts of rows statistics, too.
@pytest.mark.parametrize("spec", [P("x"), P(None, "x")], ids=["rows", "parts of rows"])
@pytest.mark.parametrize("op", NORMS, ids=str)
def test_no_gather_over_devices(op, spec):
    devices, size = mesh(4), op.small._replace(dims=(64, 4096), weights=(4096,))
    x, *weights = op.types(size, "bfloat16")
    weight = P(*spec[1:])
    arrays = [types(array, NamedSharding(devices, s)) for array, s in ((x, spec), *((w, weight) for w in weights))]
    program = compiled(op.gradient(), *arrays, out_shardings=tuple(array.sharding for array in arrays))
    exchanged = collectives(program.as_text())
    if spec == P("x"):
        assert count_native_calls(program.as_text()) == {op.forward: 1, op.backward: 1}
        assert set(exchanged) == {"all-reduce"}
        assert exchanged["all-reduce"] <= 4 * 4096 * len(weights)
    else:
        # Forward at most two statistics of each of the four devices, backward two sums, of float32.
        assert sum(exchanged.values()) <= 4 * 64 * (2 * 4 + 2)


# Tokens are decoded in a loop, in which weights of 8 or 4 bits stay what they are.
@pytest.mark.parametrize("rows", [1, 16, 64])
@pytest.mark.parametrize("dtype", ["int8", "int4", "float8_e4m3fn"])
def test_a_loop_keeps_no_widened_weights(rows, dtype):
    x = jax.ShapeDtypeStruct((rows, 4096), "bfloat16")
    kernel = jax.ShapeDtypeStruct((4096, 4096), "bfloat16")
    weights = jax.eval_shape(lambda kernel: jaxnorm.quantize_kernel(kernel, to(dtype)), kernel)

    def loop(x, weights):
        return jax.lax.fori_loop(0, 8, lambda _, x: jaxnorm.quantized_dot(x, weights), x)

    program = compiled(loop, *types((x, weights)))
    assert program.memory_analysis().temp_size_in_bytes < weights.values.size


# A decoder's training step over a mesh of data and tensor parallel devices, whose parameters both axes split (FSDP).
# Parameters and AdamW's state are float32; a device gathers what it needs of a layer, in bfloat16. The way is a variant
# of `bench.model_norms`, whose loss of logits has its classes split.

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


def lowered_step(model, mesh, variant):
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


@pytest.mark.parametrize(("name", "axis_type"), [("8b", AxisType.Explicit), ("gemma", AxisType.Auto)])
def test_a_training_step_over_devices_exchanges_what_xla_has_it_exchange(name, axis_type):
    devices = np.reshape(topology(4).devices, (2, 2))
    mesh, spec = Mesh(devices, ("data", "tensor"), axis_types=(axis_type,) * 2), MODELS[name]
    ours, of_xla = (
        collectives(optimised(lowered_step(spec, mesh, way)).as_text()) for way in ("jaxnorm-default-loss", "xla")
    )
    assert (ours["all-gather"], ours["reduce-scatter"]) == (of_xla["all-gather"], of_xla["reduce-scatter"])
    # The loss of a row's classes, as docs/sharding.md lists it.
    assert ours["all-reduce"] <= of_xla["all-reduce"] + 20 * spec.batch // 2 * spec.tokens
