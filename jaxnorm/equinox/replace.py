"""How a model of Equinox gets jaxnorm's norms, Embedding and quantised linear layers."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jax.typing import DTypeLike

from jaxnorm.equinox.linear import QuantizedLinear, why_left
from jaxnorm.equinox.norms import Embedding, GroupNorm, LayerNorm, RMSNorm, why_never
from jaxnorm.flax import replacement
from jaxnorm.flax.replacement import Only, pair
from jaxnorm.ops.misuse import explained
from jaxnorm.quantization import Quantization
from jaxnorm.reports import Path, Report

# Equinox' layers, and what each of them becomes.
OURS: dict[type, type] = {
    eqx.nn.Embedding: Embedding,
    eqx.nn.GroupNorm: GroupNorm,
    eqx.nn.LayerNorm: LayerNorm,
    eqx.nn.RMSNorm: RMSNorm,
}
# Norms of Equinox that this package has no kernels for.
OTHERS = (eqx.nn.BatchNorm, eqx.nn.SpectralNorm, eqx.nn.WeightNorm)
# Layers of Equinox with weights that are not quantised.
OTHER_LAYERS = (eqx.nn.Conv, eqx.nn.ConvTranspose, eqx.nn.Embedding)


def replace_layers(model: Any) -> tuple[Any, Report]:
    """A model with jaxnorm's norms and Embedding in place of Equinox', at any depth.

        model, report = jaxnorm.equinox.replace_layers(model)

    Each `equinox.nn.RMSNorm`, `LayerNorm`, `GroupNorm` and `Embedding` becomes one of `jaxnorm.equinox` with the same
    fields, in stacked layers too, so that paths of `equinox.tree_at` and saved leaves stay; results agree within
    rounding. Modules are frozen: the model that was given stays as it is.

    Left are norms of other kinds, subclasses, layers whose weights are no arrays, as those that `equinox.nn.Shared`
    ties to others', and layers whose epsilon or dtypes no kernel serves.

    Args:
      model: a module, or a list, dict or other pytree of modules.

    Returns:
      The new model and a `jaxnorm.reports.Report`: `replaced` has (path, class) of each layer that was replaced,
      `left` has (path, class, why) of each that was not.

    Raises:
      TypeError: there is no module of Equinox in model.
    """

    def why(_: Path, module: Any) -> str | None:
        return why_never(module) if type(module) in OURS else _why_class(module)

    def is_meant(module: Any) -> bool:
        return type(module) in OURS or _why_class(module) is not None

    return _replaced("replace_layers", model, is_meant, why, _become)


@explained
def quantize_linears(
    model: Any,
    kernels: Quantization | DTypeLike,
    inputs: Quantization | DTypeLike | None = None,
    *,
    only: Only | None = None,
) -> tuple[Any, Report]:
    """A trained model with its linear layers quantised, at any depth.

        model, report = jaxnorm.equinox.quantize_linears(model, Quantization(jnp.int8), Quantization(jnp.int8))
        print(report)

    Each `equinox.nn.Linear` becomes a `QuantizedLinear`, in stacked layers too; the model that was given stays as it
    is. Left are other layers, subclasses, layers of "scalar" features, and those whose weight is no array or is tied.

    Args:
      model: a module, or a list, dict or other pytree of modules; to load a quantised checkpoint, what
        `equinox.filter_eval_shape` makes of it.
      kernels: as for `QuantizedLinear`.
      inputs: as for `QuantizedLinear`.
      only: a function of the path and the layer, true of those to quantise. None is all.

    Returns:
      The new model and a `jaxnorm.reports.Report`.

    Raises:
      TypeError: there is no module of Equinox in model, kernels or inputs is no `Quantization`, their dtypes do
        not go together, or only is no function.
      ValueError: there is no layer that is quantised, or a granularity is not "token".
    """
    kernels, inputs = pair("quantize_linears", kernels, inputs)
    replacement.check_only("quantize_linears", only)

    def is_tie(node: Any) -> bool:
        return isinstance(node, eqx.nn.Shared)

    ties = list(filter(is_tie, jax.tree.leaves(model, is_leaf=is_tie)))

    def why(path: Path, module: Any) -> str | None:
        chosen = type(module) is not eqx.nn.Linear or only is None or only(path, module)
        if (reason := why_left(module)) or not chosen:
            return reason or "only is false of it"
        return "its weight is that of other layers too" if any(_is_read(tie, module) for tie in ties) else None

    def is_layer(module: Any) -> bool:
        return isinstance(module, (eqx.nn.Linear, QuantizedLinear, *OTHER_LAYERS))

    new, report = _replaced("quantize_linears", model, is_layer, why, lambda of: QuantizedLinear(of, kernels, inputs))
    report.check_found("quantize_linears", "equinox.nn.Linear to quantise", model)
    return new, report


def _replaced(
    function: str,
    model: Any,
    is_meant: Callable[[Any], bool],
    why: Callable[[Path, Any], str | None],
    new: Callable[[Any], Any],
) -> tuple[Any, Report]:
    """A model in which each module that `is_meant` is `new`, or left where there is a reason `why`; and the report."""
    report, modules = Report(), []

    def replaced(path: Path, node: Any) -> Any:
        if isinstance(node, eqx.Module):
            modules.append(node)
            if is_meant(node):
                reason = why(path, node)
                report.add(path, type(node), reason)
                if reason is None:
                    return new(node)
        children, structure = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda child: child is not node)
        if jax.tree_util.treedef_is_leaf(structure):
            return node
        return jax.tree.unflatten(structure, [replaced((*path, *map(_step, keys)), child) for keys, child in children])

    result = replaced((), model)
    if not modules:
        got, remedy = replacement.no_model(model, ())
        expected = "a module of equinox, or a list, dict or other pytree of such"
        raise TypeError(f"{function}: model must be {expected}, got {got}: {remedy}.")
    return result, report


def _is_read(tie: eqx.nn.Shared, module: Any) -> bool:
    """Whether an `equinox.nn.Shared` takes what it shares out of a module, which would have to be as it was."""
    without = jax.tree.map(lambda node: None if node is module else node, tie.pytree, is_leaf=lambda n: n is module)
    try:
        tie.get(without)
    except Exception:
        return True
    return False


def _step(key: Any) -> Any:
    """The attribute or index that a key of a path stands for."""
    return next(getattr(key, name) for name in ("name", "idx", "key") if hasattr(key, name))


def _become(module: Any) -> Any:
    """A layer of Equinox as ours, with the same fields."""
    ours: Any = object.__new__(OURS[type(module)])
    for name, value in vars(module).items():
        object.__setattr__(ours, name, value)
    return ours


def _why_class(module: Any) -> str | None:
    """Why a module that is none of `OURS` is left. None if it is neither a norm nor an Embedding."""
    return replacement.why_subclass(type(module), OURS, OTHERS)
