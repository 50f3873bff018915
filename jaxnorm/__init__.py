"""CPU and CUDA kernels for JAX, forward and backward; where none exists, XLA computes the same formula.

RMSNorm and LayerNorm: alone, with a residual add, between two blocks, with a gate, or with an 8-bit result. GroupNorm.
Gated activations, also with an 8-bit result. Rotary embedding with the norms of queries and keys. Softmax, log-softmax
and cross-entropy, also of a linear layer. `sample` draws the next token, `embedding` looks up rows of a table,
`segment_sum` adds rows up. `quantize`, `quantized_dot` and `float8_linear` are quantisation and 8-bit matrix products.

An argument has one meaning, one default and one place in all functions, and arrays come first. The list has them in
order; a function's own docstring says what differs there.

- `x`: floating-point array of rank 1 or more; a row is its last axis, or `axis`.
- `logits`: floating-point array of rank 1 or more, with the classes along `axis`.
- `key=None`: a key of `jax.random`, which gives each row one uniform number.
- `q`: queries, floating-point array (..., tokens, heads, head size).
- `k`: keys, as q with any number of heads.
- `qkv`: queries, keys and values in one array, as one product makes them.
- `table`: floating-point array (rows, columns) in which rows are looked up.
- `ids`: integers of any shape, the row numbers; negative ones count from the end.
- `data`: array of rank 1 or more; its rows, along the first axis, are added up.
- `segment_ids`: integers, the segment of each row of data.
- `num_segments=None`: number of segments; None is the largest of segment_ids plus 1, if they are not traced.
- `kernel`: floating-point array (inputs, outputs), or a `Quantized` one, by which x is multiplied.
- `gate_first`: whether the gate multiplies x before the norm, not after. Models differ, so there is no default.
- `quantization`: a `Quantization`: dtype, what shares a scale, and how scales are made.
- `heads`: number of heads of the queries.
- `kv_heads`: number of heads of the keys, and of the values.
- `residual=None`: the array to which x is added, of x's shape, of any floating-point dtype.
- `gate`: floating-point array of x's shape; its activation multiplies x or the norm of x.
- `labels`: integers, the numbers of classes, in the shape of the losses.
- `post_scale=None`: scale of the first of two norms.
- `scale=None`: factor with the shape of the normalised axes, or with axes before them that broadcast against x's.
- `bias=None`: summand, shaped as scale; of products, with one element for each output.
- `q_scale=None`: scale of the norm of queries, of shape (head size,) or (heads, head size).
- `k_scale=None`: scale of the norm of keys, likewise.
- `positions=None`: integers or floats that broadcast against the axes of tokens; None counts 0, 1, ... along the last
  of these. Pass them to decode, and in a `jax.shard_map` that splits the tokens.
- `branch_scale=None`: factor of what is added to residual, as in LayerScale or adaLN-Zero: of the shape of the
  normalised axes, or of x's rank, with leading axes of length 1 or x's, as (batch, 1, D).
- `cos=None`: a table in place of positions: one element for each pair on the last axis, and leading axes that broadcast
  against the tokens. Models of the hubs pass rotary_dim elements, each twice: the first half is read, or with
  `interleaved` every second element.
- `sin=None`: the table beside cos.
- `theta=10000.0`: base of the frequencies: pair i has theta ** (-2 i / rotary_dim).
- `frequencies=None`: array (rotary_dim / 2,) in place of theta's, as for Llama 3's scaling.
- `rotary_dim=None`: how many elements of each head are rotated, an even number; None is all.
- `interleaved=False`: True pairs elements (2 i, 2 i + 1), as RoFormer; False pairs (i, i + rotary_dim / 2), as Llama.
- `normalize=True`: True or "rms" is RMSNorm, "layer" LayerNorm, False no norm.
- `activation="silu"`: that of the gate or of the result, by its name or as a function of `jax.nn`.
- `num_groups=None`: number of groups of channels.
- `group_size=None`: how many neighbouring channels are normalised together; it divides their number.
- `static_scale=None`: the scale with granularity "tensor", a scalar; the others compute theirs and take None.
- `smooth_scale=None`: factor that makes a result easier to quantise, with the shape of the normalised axes.
- `epsilon=1e-06`: non-negative Python number added to the mean square, or to the variance.
- `scale_offset=0.0`: Python number added to scale; 1.0 is Gemma's convention. Ignored without scale.
- `axis=-1`: the axis or axes of a row. Kernels serve trailing axes, the formula any.
- `channel_axis=-1`: the axis of channels.
- `heads_axis=-2`: the axis of heads, -2 or -3.
- `temperature=1.0`: divides logits before the draw; 0 takes the largest. This and the next three are numbers, or arrays
  that broadcast to the leading axes of logits, with a number for each row.
- `top_k=None`: keeps so many of the largest logits; of equals at the border, the first. None, 0 and -1 keep all.
- `top_p=None`: keeps, of these, the fewest most probable columns whose probabilities add up to it, of equals at the
  border the first. 1 or more keeps all, 0 or less the most probable column.
- `min_p=None`: keeps, of these, columns at least so many times as probable as the most probable one; above 1 only that.
- `where=None`: array of booleans that broadcasts to the shape of x or logits: which elements count. For losses it may
  broadcast to labels' shape, and says which rows count; one that fits both is an error.
- `uniform=None`: numbers in [0, 1), one for each row, in place of a key.
- `row_weights=None`: floating-point array of labels' shape that multiplies the losses.
- `reduction="mean"`: "mean", "sum" or "none".
- `rows_per_chunk=None`: about how many rows a chunk has on each device. None: all if their logits take at most 4 GiB;
  else at least 256, and as many as have 512 MiB of logits or, of half the rows at most, as many bytes as the kernel's
  gradient in float32.
- `label_smoothing=0.0`: share of the label's probability, from 0 to 1, that is spread over all classes.
- `z_loss=0.0`: non-negative factor of logsumexp², which keeps logsumexp near 0 (PaLM has 1e-4).
- `logit_scale=1.0`: finite number that multiplies logits first, as 1 / temperature or 1 / sqrt(head size).
- `soft_cap=None`: positive bound of |logit|, by tanh, as Gemma 2's 30.
- `ignore_index=None`: a label whose rows have the loss 0 and no gradient, whatever they hold; -100 in the model hubs.
- `causal=False`: for x (..., queries, keys): query t has the keys 0 to t. No mask is made, and no later key is read. It
  goes with `where`, and needs axis=-1.
- `offset=0`: number of keys before the first query, as in a cache, for each example or for all; at most 2³⁰.
- `window=None`: a query has at most so many keys, the last ones. Kernels read no others.
- `multiply_before_cast=True`: False rounds the normalised row before scale multiplies it, as Llama and T5 in the model
  hubs do: to the result's dtype, or to x's if that is narrower. XLA then multiplies the kernel's result.
- `out_dtype=None`: dtype of the result, of 16, 32 or 64 bits; None is x's, or bfloat16 for a `Quantized`.
- `dtype=None`: of a lookup, the result's, to which rows are rounded once; None is table's. Of a layer, the one it
  computes in.
- `recipe=Float8Recipe()`: how the operands of a product and of its gradients are rounded.
- `pad_to=None`: positive int; pads y's last axis with zeros to a multiple of it, as blocked matrix products want. The
  backward does not read the padding. It needs axis=-1.
- `straight_through=False`: True gives a quantised result the derivative of the unquantised one, by convention, through
  a carrier of x's shape and dtype. smooth_scale and static_scale have gradients of zero.
- `with_unquantized=False`: whether to return y too, the result before it is quantised.
- `return_logsumexp=False`: whether to return log(sum(exp(logits))) too, 0 for a row that does not count. With losses
  that are reduced this costs one more product.
- `return_log_prob=False`: whether to return the log-probability of what is drawn too.
- `out_sharding=None`: sharding of a lookup's result over an Explicit mesh, as for `jax.numpy.take`: needed where
  table's and ids' leave it open.
- `return_table=False`: whether a lookup returns table too, for a head that is tied to it.
- `indices_are_sorted=False`: promises that segment_ids ascend, which saves a sort on GPUs.
- `axis_name=None`: axes of a surrounding `jax.shard_map` or `jax.vmap` that split rows evenly, a name or a tuple.
  Results are those of whole rows, by one exchange each way. XLA's code runs, except for the loss of logits.
- `implementation=None`: "native" is the CPU or CUDA kernel, "xla" XLA's code for the formula, None what
  `jaxnorm.implementation` says, or else the kernel where it exists and is not slower.

Errors are raised while tracing. ValueError: a shape, axis, sharding, name or number does not fit. TypeError: a dtype
does not fit, an argument is no array, or an option is traced. RuntimeError: "native" without a kernel for the call.
"""

import importlib.metadata
import importlib.util
import pkgutil
from types import ModuleType
from typing import TYPE_CHECKING

# Python started in a clone's root finds this source directory before the installed package. The native modules are
# in the installed one, so its directory is searched too.
__path__ = pkgutil.extend_path(__path__, __name__)

from jaxnorm import checkpoint_policies, reports
from jaxnorm.inspect.explain import explain
from jaxnorm.inspect.tune import tune
from jaxnorm.inspect.tuned import Tuned
from jaxnorm.ops import misuse
from jaxnorm.ops.cross_entropy.api import linear_cross_entropy, softmax_cross_entropy_with_integer_labels
from jaxnorm.ops.embedding.api import embedding, segment_sum
from jaxnorm.ops.float8_linear.api import Float8Recipe, float8_dot_general, float8_linear
from jaxnorm.ops.gated_activation.api import gated_activation, gated_activation_quantized
from jaxnorm.ops.group_norm.api import group_norm
from jaxnorm.ops.norm.api import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from jaxnorm.ops.norm.gated import gated_rms_norm
from jaxnorm.ops.norm.gated_quantized import gated_rms_norm_quantized
from jaxnorm.ops.norm.quantized import layer_norm_quantized, rms_norm_quantized
from jaxnorm.ops.options import implementation
from jaxnorm.ops.qk_norm_rotary.api import qk_norm_rotary, qkv_norm_rotary
from jaxnorm.ops.quantize.api import quantize, quantize_kernel
from jaxnorm.ops.quantized_dot.api import quantized_dot
from jaxnorm.ops.sample.api import sample
from jaxnorm.ops.sandwich_norm.api import rms_norm_add_rms_norm
from jaxnorm.ops.softmax.api import log_softmax, softmax
from jaxnorm.quantization import Quantization, Quantized
from jaxnorm.replacement import compare_layers, float8_linears, quantize_linears, replace_layers, restore_layers
from jaxnorm.results import QK, QKV, AddedNorm, QuantizedNorm, RowStatistics

try:
    __version__ = importlib.metadata.version(__name__)
except importlib.metadata.PackageNotFoundError:  # a source tree that was never installed
    __version__ = "unknown"

__all__ = [
    "QK",
    "QKV",
    "AddedNorm",
    "Float8Recipe",
    "Quantization",
    "Quantized",
    "QuantizedNorm",
    "RowStatistics",
    "Tuned",
    "__version__",
    "add_layer_norm",
    "add_rms_norm",
    "checkpoint_policies",
    "compare_layers",
    "embedding",
    "explain",
    "float8_dot_general",
    "float8_linear",
    "float8_linears",
    "gated_activation",
    "gated_activation_quantized",
    "gated_rms_norm",
    "gated_rms_norm_quantized",
    "group_norm",
    "implementation",
    "layer_norm",
    "layer_norm_quantized",
    "linear_cross_entropy",
    "log_softmax",
    "qk_norm_rotary",
    "qkv_norm_rotary",
    "quantize",
    "quantize_kernel",
    "quantize_linears",
    "quantized_dot",
    "replace_layers",
    "reports",
    "restore_layers",
    "rms_norm",
    "rms_norm_add_rms_norm",
    "rms_norm_quantized",
    "sample",
    "segment_sum",
    "softmax",
    "softmax_cross_entropy_with_integer_labels",
    "tune",
]

# Type checkers see these modules. A program imports one when it first names it: its library, named here, is optional
# and slow to import.
_LAZY = {"blocks": "flax", "info": "jax", "linen": "flax", "nnx": "flax", "equinox": "equinox", "keras": "keras"}
if TYPE_CHECKING:
    from jaxnorm import blocks as blocks, equinox as equinox, info as info, keras as keras, linen as linen, nnx as nnx
else:

    def __getattr__(name: str) -> ModuleType:
        if name not in _LAZY:
            misuse.no_attribute(__name__)(name)
        return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    """The public names, without modules whose library is not installed."""
    public = {*__all__, *(name for name, library in _LAZY.items() if importlib.util.find_spec(library))}
    return sorted(public | {name for name in globals() if name[:2] == name[-2:] == "__"})
