"""The same norms by other packages, where they are installed, on the same arrays.

Each has the formula of `jaxnorm` with its default options: weights in x's dtype, the product rounded once. Forward is
without gradients, backward is autograd's from what its own forward kept. What a package cannot do it leaves out.
"""

import importlib.metadata

from bench.programs import EPSILON

# The package of each, for its version.
PACKAGES = {"torch eager": "torch", "torch.compile": "torch", "Liger": "liger-kernel", "quack": "quack-kernels"}


class Finished:
    """Results in torch's memory, which `jax.block_until_ready` can wait for."""

    def __init__(self, results):
        self.results = results

    def block_until_ready(self):
        import torch

        torch.cuda.synchronize()
        return self


def norm_of(name, kind):
    """A function of x and the weights, or an error that says why there is none."""
    return {"torch eager": _eager, "torch.compile": _compiled, "Liger": _liger, "quack": _quack}[name](kind)


def _eager(kind):
    import torch

    norm = {"rms": torch.nn.functional.rms_norm, "layer": torch.nn.functional.layer_norm}[kind]
    return lambda x, *weights: norm(x, x.shape[-1:], *weights, eps=EPSILON)


def _compiled(kind):
    import torch
    from torch._functorch import config

    config.donated_buffer = False  # the backward is called many times
    torch._dynamo.reset()  # each shape is compiled for itself, and there is a limit on shapes
    return torch.compile(_eager(kind), dynamic=False)


def _liger(kind):
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    if kind == "layer":
        return lambda x, scale, bias: LigerLayerNormFunction.apply(x, scale, bias, EPSILON)
    # "gemma" rounds once, as jaxnorm does; False: the gradient may not overwrite dy.
    return lambda x, scale: LigerRMSNormFunction.apply(x, scale, EPSILON, 0.0, "gemma", False)


def _quack(kind):
    from quack.rmsnorm import layernorm_fwd, rmsnorm

    if kind == "layer":  # it takes float32 weights only, and has no gradient
        return lambda x, *weights: layernorm_fwd(x, *(weight.float() for weight in weights), eps=EPSILON)
    return lambda x, scale: rmsnorm(x, scale, eps=EPSILON)


def calls(name, kind, sets, directions=("forward", "backward")):
    """By direction, a function for `bench.timing` and its argument sets, of torch tensors in JAX's memory."""
    import torch

    norm = norm_of(name, kind)
    tensors = [[torch.from_dlpack(array) for array in (x, *weights, dy)] for x, weights, dy in sets]

    def forward(x, *weights):
        with torch.no_grad():
            return Finished(norm(x, *weights))

    def backward(y, leaves, dy):
        return Finished(torch.autograd.grad(y, leaves, dy, retain_graph=True))

    for direction in directions:
        if direction == "forward":
            yield direction, forward, [arrays[:-1] for arrays in tensors]
        else:
            leaves = [[array.detach().requires_grad_() for array in arrays[:-1]] for arrays in tensors]
            pairs = zip(leaves, tensors, strict=True)
            yield direction, backward, [(norm(*inputs), inputs, arrays[-1]) for inputs, arrays in pairs]


def versions(names):
    """The version of each package that is asked for; "not installed" is one as well."""
    found = {}
    for package in dict.fromkeys(PACKAGES[name] for name in names):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found
