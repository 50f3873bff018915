"""cuDNN's norms beside those of `bench gpu --cudnn`, by its Python front end (`pip install nvidia-cudnn-frontend`).

A graph reads and writes the memory of JAX's arrays, on the default stream, where CUPTI sees its kernels. Its forward
writes the statistics as well, from which its backward starts. What it gives is checked against jaxnorm's.
"""

import ctypes
import functools

import cudnn
import jax
import jax.numpy as jnp
import numpy as np

from bench import norms, programs, timing

EPSILON = np.full((1, 1, 1, 1), 1e-6, np.float32)  # jaxnorm's; on the host, by value
DTYPES = {name: getattr(cudnn.data_type, of) for name, of in (("float32", "FLOAT"), ("bfloat16", "BFLOAT16"))}
FORWARD = {"rms": cudnn.pygraph.rmsnorm, "layer": cudnn.pygraph.layernorm}
BACKWARD = {"rms": cudnn.pygraph.rmsnorm_backward, "layer": cudnn.pygraph.layernorm_backward}


@functools.cache
def handle():
    return cudnn.create_handle()


class Norm:
    """One direction: of arrays (rows, cols), statistics (rows, 1) and weights (cols,), each as a graph has them."""

    def __init__(self, dtype, build, operands):
        wide = cudnn.data_type.FLOAT
        self.graph = cudnn.pygraph(
            handle=handle(), io_data_type=DTYPES[dtype], intermediate_data_type=wide, compute_data_type=wide
        )
        self.operands = [self.tensor(array) for array in operands]
        self.results = [result for result in build(self.graph, *self.operands) if result is not None]
        for result in self.results:
            result.set_output(True)
        heuristics = cudnn.heur_mode
        self.graph.build([heuristics.A, heuristics.FALLBACK])
        self.workspace = jnp.zeros(max(1, self.graph.get_workspace_size()), jnp.uint8)

    def tensor(self, array):
        rows, cols = array.shape[:2] if array.ndim > 1 else (1, *array.shape)
        is_value = isinstance(array, np.ndarray)
        dtype = cudnn.data_type.FLOAT if array.dtype == np.float32 else DTYPES[array.dtype.name]
        dims, strides = [rows, cols, 1, 1], [cols, 1, 1, 1]
        return self.graph.tensor(dim=dims, stride=strides, data_type=dtype, is_pass_by_value=is_value)

    def __call__(self, operands, results):
        tensors = [*self.operands, *self.results]
        addresses = map(address, (*operands, *results))
        self.graph.execute(dict(zip(tensors, addresses, strict=True)), address(self.workspace), handle=handle())
        ctypes.CDLL("libcuda.so.1").cuCtxSynchronize()


def address(array):
    return array.ctypes.data if isinstance(array, np.ndarray) else array.unsafe_buffer_pointer()


def times(cell, sets, iterations):
    """The time by direction, of the operands of `bench gpu`."""
    first = operands_of(*sets[0])
    graphs = {
        "forward": Norm(cell.dtype, functools.partial(forward, cell.kind), first["forward"]),
        "backward": Norm(cell.dtype, functools.partial(backward, cell.kind), first["backward"]),
    }
    statistics = [jnp.zeros((cell.shape.rows, 1), jnp.float32) for _ in range(2 if cell.kind == "layer" else 1)]
    found = {}
    for direction, norm in graphs.items():
        by_set = []
        for x, weights, dy in sets:
            like = (x, *statistics) if direction == "forward" else (x, *weights)
            results = [jnp.zeros_like(array) for array in like]
            by_set.append((operands_of(x, weights, dy, statistics)[direction], results))
        jax.block_until_ready(by_set)
        norm(*by_set[0])
        check(cell, direction, sets[0], by_set[0][1][0])
        if direction == "forward":
            statistics = by_set[0][1][1:]
        found[direction] = timing.device_time(norm, by_set, iterations)
    return found


def operands_of(x, weights, dy, statistics=None):
    if statistics is None:
        statistics = [jnp.zeros((x.shape[0], 1), jnp.float32)] * len(weights)
    return {"forward": (x, *weights, EPSILON), "backward": (dy, x, weights[0], *statistics)}


def forward(kind, graph, x, *weights_and_epsilon):
    *weights, epsilon = weights_and_epsilon
    named = dict(zip(("scale", "bias"), weights, strict=False))
    return FORWARD[kind](graph, cudnn.norm_forward_phase.TRAINING, x, **named, epsilon=epsilon)


def backward(kind, graph, dy, x, scale, *statistics):
    named = {"inv_variance": statistics[-1]} | ({"mean": statistics[0]} if kind == "layer" else {"has_dbias": False})
    return BACKWARD[kind](graph, dy, x, scale, **named)


def check(cell, direction, operands, result):
    """The first result, of the first set, is jaxnorm's but for rounding."""
    x, weights, dy = operands
    y, pull_back = jax.vjp(functools.partial(norms.NORMS[cell.kind], implementation="native"), x, *weights)
    expected = y if direction == "forward" else pull_back(dy)[0]
    difference = (result.astype(jnp.float32) - expected.astype(jnp.float32)).ravel()
    error = jnp.linalg.norm(difference) / jnp.linalg.norm(expected.astype(jnp.float32).ravel())
    if not error < 2 * programs.TOLERANCE[cell.dtype]:
        raise RuntimeError(f"cuDNN's {direction} is {error:.2g} from jaxnorm's")
