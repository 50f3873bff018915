"""How variables of a `flax.linen` model get quantised kernels of its linear layers."""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import flax.traverse_util
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxnorm.inspect.explain import of_arrays
from jaxnorm.integrations import replacing
from jaxnorm.integrations.flax import linen_linear
from jaxnorm.integrations.flax.linen_linear import LAYERS, Change, product, summed_axes, using_quantized
from jaxnorm.integrations.flax.linen_replace import check_variables
from jaxnorm.integrations.flax.served import linen
from jaxnorm.integrations.replacing import of_rows
from jaxnorm.ops.misuse import explained
from jaxnorm.ops.quantize.api import quantize
from jaxnorm.quantization import Quantization, Quantized
from jaxnorm.reports import Path, Report

# Their layers have kernels that are made of the parameters at each call.
NORMALISING = (linen.WeightNorm, linen.SpectralNorm)


@explained
def quantize_linears(
    module: Any,
    variables: Any,
    *args: Any,
    kernels: Quantization | DTypeLike,
    only: replacing.Only | None = None,
    **kwargs: Any,
) -> tuple[Any, Report]:
    """Quantises the kernels of linear layers of a trained `flax.linen` model, and returns new variables.

        variables, report = jaxnorm.linen.quantize_linears(model, variables, tokens, kernels=jnp.int8)
        with jaxnorm.linen.using_quantized():
            logits = model.apply(variables, tokens)

    For each `flax.linen.Dense` or `DenseGeneral`, "values" (*out, *in) and "scales", with a 1 for each axis of in,
    replace the "kernel" (*in, *out), in an `nn.Partitioned` if it was in one. The model is traced with args, not run.
    Layers that this call does not reach, other layers, and those with their own product stay.

    Args:
      module: the model.
      variables: what its `apply` takes; to load a quantised checkpoint, what `jax.eval_shape` makes of `init`.
      *args: of `module.apply(variables, *args, **kwargs)`. Arrays may be `jax.ShapeDtypeStruct`s.
      **kwargs: likewise.
      kernels: a `Quantization` to float8_e4m3fn, float8_e5m2, int8 or int4 with granularity "token", or its dtype.
      only: a function of path and layer, true for those to quantise. None is all.

    Returns:
      The new variables and a `jaxnorm.reports.Report`.

    Raises:
      TypeError: module is not of flax.linen, variables lack "params", kernels is no `Quantization`, only no function.
      ValueError: the call has no layer that is quantised, or a granularity is not "token".
    """
    if not isinstance(module, linen.Module):
        raise TypeError(
            f"quantize_linears: module must be of flax.linen, got {type(module).__name__}; models of flax.nnx go to "
            f"jaxnorm.quantize_linears."
        )
    check_variables("quantize_linears", variables)
    kernels = of_rows("quantize_linears", "kernels", kernels)
    replacing.check_only("quantize_linears", only)
    params = flax.traverse_util.flatten_dict(variables["params"], keep_empty_nodes=True)  # type: ignore[no-untyped-call]
    report, chosen = _chosen(module, variables, params, kernels, only, args, kwargs)
    report.check_found("quantize_linears", "linear layer to quantise", module, "; pass what it is called with.")
    for path, axes in chosen.items():
        params |= {(*path, name): array for name, array in _variables(params.pop((*path, "kernel")), axes, kernels)}
    return _with_params(variables, params), report


class _Axes(NamedTuple):
    """Those of a kernel, without those of stacked layers."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @classmethod
    def of(cls, axes: tuple[Any, ...], layer: Any, x: Any) -> "_Axes":
        summed = len(summed_axes(layer, x))
        return cls(axes[:summed], axes[summed:])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Kernel(linen.meta.AxisMetadata[Any]):
    """A kernel that knows where it is in the parameters, and which of its axes there it has within `nn.scan`."""

    value: Any
    path: Path = dataclasses.field(metadata={"static": True})
    axes: tuple[int | None, ...] = dataclasses.field(metadata={"static": True})

    def unbox(self) -> Any:
        return self.value

    def replace_boxed(self, val: Any) -> Any:
        return dataclasses.replace(self, value=val)

    def add_axis(self, index: int, params: Any) -> Any:
        return dataclasses.replace(self, axes=(*self.axes[:index], None, *self.axes[index:]))

    def remove_axis(self, index: int, params: Any) -> Any:
        axes = list(self.axes)
        del axes[index]
        return dataclasses.replace(self, axes=tuple(axes))


def _chosen(
    module: Any, variables: Any, params: Any, kernels: Quantization, only: Any, args: Any, kwargs: Any
) -> tuple[Report, dict[Path, _Axes]]:
    """The report, and where the kernels are that it says are quantised."""
    reached: set[Path] = set()
    chosen: dict[Path, _Axes] = {}

    def reach(layer: Any, x: Any) -> jax.Array:
        reached.add(layer.path)
        return compute(layer, x, linen.meta.unbox(_kernel(layer)))

    def choose(layer: Any, x: Any) -> jax.Array:
        kernel = _kernel(layer)
        chosen[kernel.path] = _Axes.of(kernel.axes, layer, x)
        return compute(layer, x, kernel.value)

    def compute(layer: Any, x: Any, kernel: jax.Array) -> jax.Array:
        return product(layer, x, _quantised(kernel, _Axes.of(tuple(range(kernel.ndim)), layer, x), kernels), None)

    def leave_normalised(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        if not isinstance(context.module, NORMALISING):
            return call(*args, **kwargs)
        before = set(reached)
        y = call(*args, **kwargs)
        reached.intersection_update(before)
        return y

    def trace(change: Change, only: Any, params: Any) -> Report:
        def run(params: Any, *args: Any, **kwargs: Any) -> None:
            # Within, those that are quantised already.
            with linen_linear.changed(change, only, object()) as report, using_quantized():
                module.apply(_with_params(variables, params), *args, **kwargs)
            reports.append(report)

        reports: list[Report] = []
        arrays, traceable = of_arrays(run, (params, *args), kwargs)
        jax.eval_shape(traceable, arrays)
        return reports[0]

    with linen.intercept_methods(leave_normalised):
        trace(Change("quantised", LAYERS, reach, _why_never), None, params)
    # Only kernels that are reached, as others may be read by what takes no box.
    marked = {path: _marked(path, leaf) if path[:-1] in reached else leaf for path, leaf in params.items()}
    return trace(Change("quantised", LAYERS, choose, _why_left), only, marked), chosen


def _with_params(variables: Any, params: Any) -> Any:
    """Variables of the same type with these, flattened, as parameters."""
    nested = flax.traverse_util.unflatten_dict(params)  # type: ignore[no-untyped-call]
    return type(variables)({**variables, "params": type(variables["params"])(nested)})


def _marked(path: Path, leaf: Any) -> Any:
    """The leaf, in a box where it is a kernel."""
    if path[-1] != "kernel":
        return leaf
    array = _unboxed(leaf)
    return _Kernel(array, path[:-1], tuple(range(array.ndim)))


def _unboxed(leaf: Any) -> Any:
    """The array, or its shape and dtype, which no constraint of a mesh takes."""
    return leaf.value if isinstance(leaf, linen.Partitioned) else linen.meta.unbox(leaf)


def _kernel(layer: Any) -> Any:
    return layer.get_variable("params", "kernel")


def _why_never(layer: Any, x: Any) -> str | None:
    """Why the kernel of a layer is not quantised, whatever it is. None if that depends on it."""
    batch = getattr(layer, "batch_dims", ())
    has_batch = isinstance(batch, int) or len(batch) > 0
    return linen_linear.why_left(layer, x) or (f"it has batch_dims={batch}" if has_batch else None)


def _why_left(layer: Any, x: Any) -> str | None:
    """Why the kernel of a layer is not quantised. None if it is."""
    if why := _why_never(layer, x):
        return why
    kernel = _kernel(layer)
    if not isinstance(kernel, _Kernel):
        return "its kernel is made of parameters by the model"
    if None in kernel.axes or len(kernel.axes) != kernel.value.ndim:
        return "its kernel is mapped by other means than nn.vmap and nn.scan"
    if layer.dtype is None and kernel.value.dtype != layer.param_dtype:
        return f"its kernel is {kernel.value.dtype}, its param_dtype {jnp.dtype(layer.param_dtype)}: give it a dtype"
    return None


def _variables(leaf: Any, axes: _Axes, kernels: Quantization) -> list[tuple[str, Any]]:
    """What is in place of a kernel, by name, in boxes with its names of mesh axes where it has such."""
    array = _unboxed(leaf)
    quantized = replacing.quantised(partial(_quantised, axes=axes, kernels=kernels), array)
    arrays = {"values": quantized.values, "scales": quantized.scales}
    if not isinstance(leaf, linen.Partitioned):
        return list(arrays.items())
    names = (*leaf.names, *[None] * (array.ndim - len(leaf.names)))
    of_values = [names[axis] for axis in _order(array.ndim, axes)]
    of_scales = [None if axis in _summed_places(axes) else name for axis, name in enumerate(of_values)]
    return [
        (name, leaf.replace(value=array, names=tuple(names)))
        for (name, array), names in zip(arrays.items(), (of_values, of_scales), strict=True)
    ]


@partial(jax.jit, static_argnames=("axes", "kernels"))
def _quantised(kernel: jax.Array, axes: _Axes, kernels: Quantization) -> Quantized:
    """Outputs come before what is summed; axes of stacked layers stay."""
    transposed = kernel.transpose(_order(kernel.ndim, axes))
    result: Quantized = quantize(transposed, kernels, axis=_summed_places(axes))
    return result


def _order(rank: int, axes: _Axes) -> list[int]:
    """Which axis of a kernel is at each place of its values."""
    order = list(range(rank))
    for place, axis in zip(sorted((*axes.inputs, *axes.outputs)), (*axes.outputs, *axes.inputs), strict=True):
        order[place] = axis
    return order


def _summed_places(axes: _Axes) -> list[int]:
    """The axes of values over which a product sums."""
    return sorted((*axes.inputs, *axes.outputs))[len(axes.outputs) :]
