"""Which linear layers of a model of `flax.nnx` are changed, and why others are left."""

from typing import Any, NamedTuple

import jax

from jaxnorm.flax import calls, nnx_replace, replacement
from jaxnorm.flax.calls import nnx
from jaxnorm.reports import Report

# What such layers become, and why each is left where it is met.
OURS: dict[type, str] = {}
# Layers of Flax with weights that are left as they are.
OTHERS = (nnx.LinearGeneral, nnx.Einsum, nnx.Conv, nnx.ConvTranspose, nnx.Embed)
FLAXS_OWN = {"dot_general": jax.lax.dot_general, "promote_dtype": nnx.nn.dtypes.promote_dtype}


class Change(NamedTuple):
    """What `function` does to linear layers: it is `done`, as "quantised", to those that it is `to_do` for."""

    function: str
    to_do: str
    done: str
    of_linen: str  # why modules of flax.linen within a model are left
    linen_remedy: str  # where the model itself is one
    remedy: str = ""  # for a LinearGeneral


def chosen(change: Change, model: Any, only: replacement.Only | None) -> tuple[Report, list[Any]]:
    """The linear layers of a model that are changed, and the report of them and of those that are left."""
    function = change.function
    replacement.check_only(function, only)
    report, layers = Report(), []
    for path, module in nnx_replace.modules_of(function, model, change.linen_remedy):
        cls = type(module)
        if replacement.find(cls, {nnx.Linear: True}):
            why = why_left(module) or ("only is false of it" if only and not only(path, module) else None)
            if why is None:
                layers.append(module)
        elif (why := _why_class(cls, change)) is None:
            continue
        report.add(path, cls, why)
    report.check_found(function, f"flax.nnx.Linear to {change.to_do}", model)
    return report, layers


def _why_class(cls: type, change: Change) -> str | None:
    """Why a module of a class is left. None if it is no linear layer."""
    if issubclass(cls, nnx.bridge.ToNNX):
        return change.of_linen
    if ours := next((why for base, why in OURS.items() if issubclass(cls, base)), None):
        return ours
    if issubclass(cls, nnx.Linear):
        return "its __call__ is not Flax's"
    remedy = change.remedy if issubclass(cls, nnx.LinearGeneral) else ""
    return f"only flax.nnx.Linear is {change.done}{remedy}" if issubclass(cls, OTHERS) else None


def why_left(module: Any) -> str | None:
    """Why a linear layer stays Flax's. None if it can be changed."""
    dtypes = (module.kernel.dtype, *([module.dtype] if module.dtype else []))
    why = calls.why_dtypes(*dtypes)
    return replacement.why_own(module, FLAXS_OWN) or (why and f"it is of {why}")


def check_own(module: Any, done: str) -> None:
    """An error where the constructor of a layer of ours was given what only Flax's own code computes."""
    if (why := why_left(module)) is not None:
        name = type(module).__name__
        raise TypeError(f"{name}: cannot be {done}: {why}. Leave that out, or take flax.nnx.Linear.")


def become(module: Any, ours: type) -> None:
    """Makes a layer of Flax one of a class of ours."""
    cls: type = type(module)
    object.__setattr__(module, "__class__", ours if cls is nnx.Linear else nnx_replace.with_base(cls, ours))
