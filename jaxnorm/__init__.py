"""Kernels for JAX, forward and backward, and the same formulas where there are none.

RMSNorm and LayerNorm, alone, with a residual add, between two blocks, with a gate or with an 8-bit result; GroupNorm;
gated activations, also with an 8-bit result; rotary embedding with the norms of queries and keys; softmax, log-softmax
and cross-entropy, also of a linear layer; `sample`, the draw of the next token; `embedding`, the lookup of rows in a
table, and `segment_sum`; `quantize` and products of 8-bit values, `quantized_dot` and `float8_linear`.

An argument has one meaning, one default and one place in all functions, and arrays come first. These are the arguments
of arrays' functions in order; a function's own docstring says what is its own.

- `x`: floating-point array of rank 1 or more, of which the last axis or `axis` is a row.
- `logits`: floating-point array of rank 1 or more, with the classes along `axis`.
- `key=None`: a key of `jax.random`, of which the uniform numbers of all rows are drawn.
- `q`: queries, floating-point array (..., tokens, heads, head size).
- `k`: keys, as q with any number of heads.
- `qkv`: the one product of queries, keys and values.
- `table`: floating-point array (rows, columns), in which rows are looked up.
- `ids`: integers of any shape, the numbers of rows; a negative one counts from the end.
- `data`: array of rank 1 or more, with the rows that are summed along its first axis.
- `segment_ids`: integers, for each row of data the number of the segment that it belongs to.
- `num_segments=None`: how many segments there are; None is one more than the largest number, which is to be known.
- `kernel`: floating-point array (inputs, outputs), or a `Quantized` of one, by which x is multiplied.
- `gate_first`: whether the gate multiplies x before it is normalised. Models differ, and no default would suit both.
- `quantization`: a `Quantization`: dtype, what shares a scale, and how a scale is made.
- `heads`: how many heads the queries have.
- `kv_heads`: how many heads each of keys and values has.
- `residual=None`: the array to which x is added, of x's shape, of any floating-point dtype.
- `gate`: floating-point array of x's shape, an activation of which multiplies x.
- `labels`: integers, the numbers of classes, of the shape of the losses.
- `post_scale=None`: factor of the first of two norms, as scale.
- `scale=None`: factor with the shape of the normalised axes, or with axes before them that broadcast against x's.
- `bias=None`: summand, as scale, or of products with an element for each output.
- `q_scale=None`: factor of the norm of queries, of the head size, or (heads, head size).
- `k_scale=None`: factor of the norm of keys, likewise.
- `positions=None`: integers or floats that broadcast against the axes of tokens; None counts 0, 1, ... along the last
  of these. In a `jax.shard_map` that splits the tokens, and where tokens are decoded, pass them.
- `branch_scale=None`: factor of what is added to residual, as of LayerScale or adaLN-Zero: of the shape of the
  normalised axes, or of x's rank with axes of length 1 or x's before these, as (batch, 1, D).
- `cos=None`: in place of positions, a table with an element for each pair on the last axis, and before it what
  broadcasts against the tokens. Of a table of rotary_dim elements, as models of the hubs pass it, the first half is
  taken, with `interleaved` every second element: the others are to be the same again.
- `sin=None`: the table beside cos.
- `theta=10000.0`: base of the frequencies, theta ** (-2 i / rotary_dim) of the i-th pair.
- `frequencies=None`: array (rotary_dim / 2,) in place of theta's, as for Llama 3's scaling.
- `rotary_dim=None`: how many elements of each head are rotated, an even number; None is all.
- `interleaved=False`: whether the i-th pair is (2 i, 2 i + 1), as in RoFormer, not (i, i + rotary_dim / 2), as in
  Llama.
- `normalize=True`: True or "rms" is RMSNorm, "layer" LayerNorm, False neither.
- `activation="silu"`: what multiplies or follows, by its name or as a function of jax.nn.
- `num_groups=None`: how many groups the channels make.
- `group_size=None`: how many neighbouring channels are normalised together, a divisor of their number.
- `static_scale=None`: the scale with granularity "tensor", a scalar; None with others, which compute it.
- `smooth_scale=None`: factor with the shape of the normalised axes that makes a result easier to quantise.
- `epsilon=1e-06`: non-negative Python number added to the mean square, or to the variance.
- `scale_offset=0.0`: Python number added to scale; 1.0 is Gemma's convention. Ignored without scale.
- `axis=-1`: the axis, or the set of axes, that is one row. Kernels serve trailing axes, the formula any.
- `channel_axis=-1`: the axis of channels.
- `heads_axis=-2`: the axis of heads, -2 or -3.
- `temperature=1.0`: what logits are divided by before a draw, from 0 on, which takes the largest. This and the next
  three are numbers, or arrays that broadcast to the leading axes of logits, so that each row has its own.
- `top_k=None`: how many columns are kept, the largest, of equals at the border the first; None, 0 and -1 keep all.
- `top_p=None`: of what top_k keeps the fewest most probable columns whose probabilities sum up to this are kept, of
  equals at the border the first: from 1 on all, up to 0 the most probable one.
- `min_p=None`: of what top_p keeps that which is at least so many times as probable as the most probable column; above
  1 that one.
- `where=None`: array of booleans that broadcasts to x's or logits' shape: what counts. Of losses one that broadcasts to
  labels' shape says which rows do, and one that fits both is an error.
- `uniform=None`: numbers in [0, 1), one for each row, in place of a key.
- `row_weights=None`: floating-point array of labels' shape, factors of losses.
- `reduction="mean"`: "mean", "sum" or "none".
- `rows_per_chunk=None`: about how many rows a chunk has, on each device. None: 256 at least, and as many as have 512
  MiB of logits or, of half of the rows, as many bytes of logits as the kernel's gradient has in float32.
- `label_smoothing=0.0`: share from 0 to 1 of the label's probability that all classes divide among them.
- `z_loss=0.0`: non-negative factor of the square of logsumexp, which keeps it near 0 (PaLM has 1e-4).
- `logit_scale=1.0`: finite number that multiplies logits first, as 1 / temperature or 1 / sqrt(head size).
- `soft_cap=None`: positive number that no |logit| exceeds, as Gemma 2's 30.
- `ignore_index=None`: a label whose rows have the loss 0 and no gradient, whatever is there, as -100 of the model hubs.
- `causal=False`: for x (..., queries, keys): query t has the keys 0 to t. No mask is made, and no key beyond is read.
  It goes with `where`, and with axis=-1 only.
- `offset=0`: how many keys there were before the first query, as in a cache, of each example or of all; at most 2³⁰.
- `window=None`: how many keys a query has at most, the last ones. Kernels read no others.
- `multiply_before_cast=True`: False rounds the normalised row before scale multiplies it, as Llama and T5 in the model
  hubs do: to the result's dtype, or to x's if that is narrower. Then XLA multiplies what the kernel gives.
- `out_dtype=None`: dtype of the result, of 16, 32 or 64 bits; None is x's, and bfloat16 of a `Quantized`.
- `dtype=None`: of a lookup that of the result, before which nothing is rounded; None is table's. Of a layer that in
  which it is computed.
- `recipe=Float8Recipe()`: what the operands of a product and its gradients are rounded to.
- `pad_to=None`: positive int, with axis=-1: y's last axis is padded with zeros to a multiple of it, as matrix products
  in blocks want it. The backward does not read what is padded.
- `straight_through=False`: whether a quantised result has a derivative, by convention that of what is quantised, and
  with it a carrier of x's shape and dtype. That of smooth_scale and static_scale is zero.
- `with_unquantized=False`: whether y, what is quantised, is computed, too.
- `return_logsumexp=False`: whether log(sum(exp(logits))) is returned, too, 0 for a row that does not count. If losses
  are reduced, it takes one product more.
- `return_log_prob=False`: whether the logarithm of the probability of what is drawn is returned, too.
- `out_sharding=None`: of a lookup over a mesh with Explicit axes the sharding of the result, as `jax.numpy.take` takes
  it: needed where those of table and ids leave it open.
- `return_table=False`: whether a lookup returns its table, too, for a head that is tied to it.
- `indices_are_sorted=False`: promises that segment_ids ascend, which saves a sort on GPUs.
- `axis_name=None`: the axes of a surrounding `jax.shard_map` or `jax.vmap` over which rows are split evenly, a name or
  a tuple. Results are those of whole rows, by one exchange each way. But for the loss of logits XLA's code runs.
- `implementation=None`: "native" is the CPU or CUDA kernel, "xla" XLA's code for the formula, None what
  `jaxnorm.implementation` says, or else the kernel where it exists and is not slower.

Errors are raised while tracing: ValueError for shapes, axes, shardings, names and numbers that do not fit, TypeError
for dtypes, what is no array, and options that are traced, RuntimeError for "native" without a kernel for the call.
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

# Type checkers see these modules; a program imports one when it first names it, since the library that it is for, named
# here, is optional and takes long.
_LAZY = {"blocks": "flax", "info": "jax", "linen": "flax", "nnx": "flax", "equinox": "equinox", "keras": "keras"}
if TYPE_CHECKING:
    from jaxnorm import blocks as blocks, equinox as equinox, info as info, keras as keras, linen as linen, nnx as nnx
else:

    def __getattr__(name: str) -> ModuleType:
        if name not in _LAZY:
            misuse.no_attribute(__name__)(name)
        return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    """The public names, and no internals; none that needs a library which is not installed, so that each can be had."""
    public = {*__all__, *(name for name, library in _LAZY.items() if importlib.util.find_spec(library))}
    return sorted(public | {name for name in globals() if name[:2] == name[-2:] == "__"})
