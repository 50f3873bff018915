"""Norms and Embedding of Keras 3 on jaxnorm's kernels, for its JAX backend: change the import line, keep the model."""

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxnorm.integrations import replacing
from jaxnorm.ops import misuse
from jaxnorm.ops.embedding.api import embedding
from jaxnorm.ops.group_norm.api import group_norm
from jaxnorm.ops.norm.api import layer_norm, rms_norm
from jaxnorm.reports import Report

try:
    import keras
except ModuleNotFoundError as error:
    if error.name == "keras":
        raise ImportError("jaxnorm.keras needs Keras 3: pip install 'keras>=3.15'") from error
    if error.name not in ("tensorflow", "torch", "openvino"):
        raise
    raise ImportError(
        f"jaxnorm.keras: Keras starts on the backend {error.name}, which is not installed; expected jax. Set the "
        f"environment variable KERAS_BACKEND=jax before Keras is imported."
    ) from error

if keras.config.backend() != "jax":
    raise ImportError(
        f"jaxnorm.keras: Keras runs on the backend {keras.config.backend()}, expected jax. Set the environment "
        f"variable KERAS_BACKEND=jax before Keras is imported."
    )

__all__ = ["Embedding", "GroupNormalization", "LayerNormalization", "RMSNormalization", "replace_layers"]

if not TYPE_CHECKING:
    __getattr__ = misuse.no_attribute(__name__)


@keras.saving.register_keras_serializable(package="jaxnorm")
class LayerNormalization(keras.layers.LayerNormalization):
    """`keras.layers.LayerNormalization` with the same config, weights and result dtype, by `jaxnorm.layer_norm`.

        y = (x - mean) * rsqrt(mean((x - mean)²) + epsilon) * gamma + beta

    It computes in float32 and rounds once, to the layer's `compute_dtype`. x is centred first, which keeps the digits
    of rows far from 0; Keras subtracts `mean * rsqrt(...)` from `x * rsqrt(...)`. Kernels serve trailing axes, with x
    and weights of float32, bfloat16 and float16. Keras' own code runs for other axes and dtypes, and for `rms_scaling`.

    Files of weights load either way. Files of models name their classes. Load one saved with Keras' layers by
    `replace_layers(keras.models.load_model(path))`. One saved with these loads where jaxnorm.keras is imported, and
    elsewhere with Keras' layers in their place:

        theirs = {"jaxnorm>LayerNormalization": keras.layers.LayerNormalization}
        model = keras.models.load_model(path, custom_objects=theirs)

    Source: Ba, Kiros and Hinton, Layer Normalization, 2016, https://arxiv.org/abs/1607.06450.
    """

    def call(self, inputs: Any) -> Any:
        axes = _trailing(self, inputs, (self.gamma, self.beta))
        if axes is None:
            return super().call(inputs)
        gamma, beta = _tensor(self.gamma), _tensor(self.beta)
        return layer_norm(inputs, gamma, beta, epsilon=self.epsilon, axis=axes, out_dtype=self.compute_dtype)


@keras.saving.register_keras_serializable(package="jaxnorm")
class RMSNormalization(keras.layers.RMSNormalization):
    """`keras.layers.RMSNormalization` with the same config, weights and result dtype, by `jaxnorm.rms_norm`.

        y = x * rsqrt(mean(x²) + epsilon) * scale

    x and scale are cast to the layer's `compute_dtype` first, as in Keras; then it computes in float32 and rounds once.
    Kernels serve the same calls as for `LayerNormalization`, and files load as there.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019, https://arxiv.org/abs/1910.07467.
    """

    def call(self, x: Any) -> Any:
        axes = _trailing(self, x, (self.scale,))
        if axes is None:
            return super().call(x)
        return rms_norm(x, _tensor(self.scale), epsilon=self.epsilon, axis=axes, out_dtype=x.dtype)


@keras.saving.register_keras_serializable(package="jaxnorm")
class GroupNormalization(keras.layers.GroupNormalization):
    """`keras.layers.GroupNormalization` with the same config, weights and result dtype, by `jaxnorm.group_norm`.

        y = (x - mean) * rsqrt(mean((x - mean)²) + epsilon) * gamma + beta

    Means are over the positions and the channels of a group, for each example. It computes in float32 and rounds once,
    to the layer's `compute_dtype`, for x and weights of float32, bfloat16 and float16 with channels last or `axis=1`.
    Keras' own code runs for the rest. Files load as for `LayerNormalization`.

    Source: Wu and He, Group Normalization, 2018, https://arxiv.org/abs/1803.08494.
    """

    def call(self, inputs: Any) -> Any:
        parameters = (self.gamma, self.beta)
        axis = self.axis % len(inputs.shape)
        if axis not in (1, len(inputs.shape) - 1) or not _is_served(self, inputs, parameters):
            return super().call(inputs)
        gamma, beta = map(_tensor, parameters)
        keywords = {"num_groups": self.groups, "epsilon": self.epsilon, "out_dtype": self.compute_dtype}
        return group_norm(inputs, gamma, beta, channel_axis=axis, **keywords)


@keras.saving.register_keras_serializable(package="jaxnorm")
class Embedding(keras.layers.Embedding):
    """`keras.layers.Embedding` with the same config, weights, mask and result, by `jaxnorm.embedding`.

    Rows have Keras' bits, NaN where an index is out of range. Negative indices count from the end, and fractions are
    truncated. The table's gradient is summed in float32, in the same order in each run, and rounded once. Keras' own
    code runs for LoRA, quantised tables, and dtypes other than float32, bfloat16 and float16. Files load as for
    `LayerNormalization`.
    """

    def call(self, inputs: Any) -> Any:
        if not isinstance(inputs, jax.Array | np.ndarray) or _why_no_lookup(self) is not None:
            return super().call(inputs)
        ids = _tensor(inputs) if inputs.dtype in ("int32", "int64") else keras.ops.cast(inputs, "int32")
        return embedding(_tensor(self.embeddings), ids, dtype=self.compute_dtype)

    def quantize(self, mode: Any = None, type_check: bool = True, config: Any = None) -> None:
        # Keras quantises no subclasses, as they might compute something else.
        super().quantize(mode, type_check=type_check and type(self) is not Embedding, config=config)


# Keras' layers, and what each of them becomes.
OURS: dict[type, type] = {
    getattr(keras.layers, cls.__name__): cls
    for cls in (Embedding, GroupNormalization, LayerNormalization, RMSNormalization)
}
# Norms of Keras without kernels here, the preprocessing of that name, and an Embedding that also multiplies by its
# table.
OTHERS = tuple(getattr(keras.layers, f"{name}Normalization") for name in ("Batch", "Unit", "Spectral", ""))
OTHERS += (keras.layers.ReversibleEmbedding,)


def replace_layers(model: Any) -> tuple[Any, Report]:
    """Replaces the norms and Embeddings of a Keras model with jaxnorm's, in place and at any depth.

        model, report = jaxnorm.keras.replace_layers(model)

    Each `keras.layers.LayerNormalization`, `RMSNormalization`, `GroupNormalization` and `Embedding` becomes one of
    `jaxnorm.keras`, in functional, sequential and subclassed models, built or not. Layers stay the same objects with
    the same variables; results agree within rounding. A compiled model stays compiled, and its functions for fit,
    evaluate and predict are made again: call this on the outermost model, which has them. A `jax.jit` of your own that
    has run keeps its program. A file saved afterwards names jaxnorm's classes.

    Other norms, subclasses, and layers whose options or dtypes no kernel serves stay as they are.

    Args:
      model: a `keras.Model` or another layer.

    Returns:
      The same model and a `jaxnorm.reports.Report`: `replaced` has (path, class) of each layer that was replaced,
      `left` has (path, class, why) of each that was not.

    Raises:
      TypeError: model is no layer of Keras.
    """
    if not isinstance(model, keras.Layer):
        got, remedy = replacing.no_model(model, ())
        raise TypeError(f"replace_layers: model must be a keras.Model or another layer, got {got}: {remedy}.")
    report, layers = Report(), model._flatten_layers()
    for layer in layers:
        cls = type(layer)
        if cls in OURS:
            why = (_why_no_lookup if cls is keras.layers.Embedding else _why_never)(layer)
        elif (why := replacing.why_subclass(cls, OURS, OTHERS)) is None:
            continue
        if why is None:
            object.__setattr__(layer, "__class__", OURS[cls])
            if cls is keras.layers.Embedding:  # to which its method was bound when it was made
                layer.quantize = partial(_quantize, layer.quantize)
        report.add(tuple((layer.path or layer.name).split("/")), cls, why)
    for layer in layers:
        _make_functions_again(layer)
    return model, report


def _why_never(layer: Any) -> str | None:
    """Why no kernel serves any call of a norm of Keras; None if that depends on the call."""
    dtypes = (layer.compute_dtype, *(variable.dtype for variable in layer.variables))
    if getattr(layer, "rms_scaling", False):
        return "no kernel serves rms_scaling"
    return replacing.why_not_served(*dtypes, epsilon=layer.epsilon)


def _why_no_lookup(layer: Any) -> str | None:
    """Why Keras' own code computes the calls of an Embedding; None if ours does."""
    if layer.quantization_mode is not None:
        return f"its table is quantised to {layer.quantization_mode}"
    if layer.lora_rank:
        return "it has LoRA"
    return replacing.why_not_served(layer.compute_dtype, layer.variable_dtype)


def _quantize(of_keras: Any, mode: Any = None, type_check: bool = True, **options: Any) -> None:
    """The `quantize` of an Embedding that has become one of ours."""
    of_keras(mode, type_check=False, **options)


def _is_served(layer: Any, x: Any, parameters: tuple[Any, ...]) -> bool:
    """Whether kernels have the options and dtypes of a call, whatever its axes."""
    if not isinstance(x, jax.Array) or getattr(layer, "rms_scaling", False):
        return False
    dtypes = (x.dtype, layer.compute_dtype, *(p.dtype for p in parameters if p is not None))
    return replacing.why_not_served(*dtypes, epsilon=layer.epsilon) is None


def _trailing(layer: Any, x: Any, parameters: tuple[Any, ...]) -> tuple[int, ...] | None:
    """The axes that are normalised, where a kernel serves them; None where Keras' own code computes the call.

    Keras gives a weight the axes in the order that it has sorted them to, in which a negative one comes first.
    """
    rank = len(x.shape)
    axes = tuple(range(rank - len(layer.axis), rank))
    trailing = tuple(axis % rank for axis in layer.axis) == axes
    return axes if trailing and _is_served(layer, x, parameters) else None


def _tensor(variable: Any) -> Any:
    """The value of a variable at the call: from a stateless scope, and cast as the layer casts it."""
    return None if variable is None else keras.ops.convert_to_tensor(variable)


def _make_functions_again(layer: Any) -> None:
    """Makes a model trace its steps again, if it has traced them."""
    for step in ("train", "test", "predict"):
        if getattr(layer, f"{step}_function", None) is not None:
            getattr(layer, f"make_{step}_function")(force=True)
