"""How a model of `flax.nnx` gets its own norms back."""

from typing import Any

from jaxnorm.flax import replacement
from jaxnorm.flax.nnx_replace import OURS, class_before, modules_of

FLAXS = {ours: flaxs for flaxs, ours in OURS.items()}
# Which options the constructors of ours set, and Flax's do not.
OF_CONSTRUCTOR = "scale_offset"


def restore_norms(model: Any) -> replacement.Report:
    """Takes the norms that `replace_norms` put into a model out again, in place and at any depth.

        jaxnorm.replace_norms(model, {GemmaNorm: gemma_norm})
        print(jaxnorm.restore_norms(model))

    Each module, a norm or a class of a mapping, gets the class back that it had, and with it results bit for bit, its
    graph definition, and what was compiled for it. Modules and parameters stay the same objects. Copies, and what
    pickle or `nnx.merge` made of a model whose norms were replaced, are restored alike.

    Norms that the model's author made from `jaxnorm.nnx` stay. They are told apart by the options that the constructors
    of `jaxnorm.nnx` set: a norm of Flax that was given a `scale_offset` after it was replaced counts as one of these.

    Args:
      model: a module, or a list, dict or other pytree of modules.

    Returns:
      A `jaxnorm.replacement.Report`: `replaced` has (path, class) of each module that has its own class again, `left`
      has (path, class, why) of each that is jaxnorm's still.

    Raises:
      TypeError: model is of `flax.linen`, whose norms are replaced only within a context, or has no module of flax.nnx.
      ValueError: model is an argument of a transformation of flax.nnx, as `nnx.jit`, which is running.
    """
    remedy = "its norms are replaced within jaxnorm.linen.replace_norms() alone. Call it outside"
    report = replacement.Report(done="restored")
    for path, module in modules_of("restore_norms", model, remedy):
        own = _own_class(module)
        if own is not type(module):
            object.__setattr__(module, "__class__", own)
            report.add(path, own, None)
        elif issubclass(own, tuple(FLAXS)):
            report.add(path, own, "the model's author made it from jaxnorm.nnx")
    return report


def _own_class(module: Any) -> type:
    """The class of a module before any call of `replace_norms`."""
    cls: type = type(module)
    while (before := class_before(cls)) is not None:
        cls = before
    return cls if OF_CONSTRUCTOR in vars(module) else FLAXS.get(cls, cls)
