"""The table: a row for each op. Each law in `laws/` is tested for each row, by what the row says.

A new op is a new row: what it computes and by which formula, its operands and sizes, what its backward gives and needs.
"""

from cases import KINDS
from coverage import in_full
from gated_activation_quantized_rows import quantized_activation
from gated_activation_rows import ACTIVATIONS as OF_GATES
from gated_activation_rows import gated_activation, packed_activation
from gated_quantized_rows import gated_quantized, grouped_quantized
from gated_rows import gate, grouped
from gating import MAMBA, QWEN, VARIANTS
from group_rows import ACTIVATIONS, group_norm
from norm_rows import added, norm, padded, per_head, scaled
from quantized_rows import quantized, quantized_sum
from rotary_rows import qkv_rotary, qkv_rotary_per_head, rotary, rotary_per_head
from sandwich_rows import sandwich
from softmax_rows import cross_entropy, softmax

NORMS = tuple(norm(kind) for kind in KINDS)
PER_HEAD = tuple(per_head(kind) for kind in KINDS)
ADDED = tuple(added(kind) for kind in KINDS)
SCALED = (scaled("layer"), *in_full(scaled("rms")))
PADDED = tuple(padded(kind) for kind in KINDS)
GATED = tuple(gate(variant) for variant in VARIANTS)
GROUPED = tuple(grouped(variant) for variant in (MAMBA, QWEN))
GATED_ACTIVATIONS = (
    *(gated_activation(activation) for activation in OF_GATES),
    *(packed_activation(activation) for activation in ("silu", *in_full(*OF_GATES)[1:])),
)
QUANTIZED_ACTIVATIONS = (
    quantized_activation("silu", "token", "int8", packed=True),
    quantized_activation("gelu_exact", "groups of 64", "float8_e4m3fn"),
)
GROUP_NORMS = tuple(group_norm(activation) for activation in ACTIVATIONS)
SANDWICH = (sandwich(),)
SOFTMAX = (softmax(), softmax(log=True))
CROSS_ENTROPY = (cross_entropy(),)
QKV_ROTARY = (qkv_rotary(True), *in_full(qkv_rotary_per_head("layer", interleaved=True, partial=True)))
ROTARY = (rotary_per_head("layer", interleaved=True, partial=True), *in_full(rotary(True)), *QKV_ROTARY)
QUANTIZED = (
    *(quantized(kind, "token", "int8") for kind in KINDS),
    *(quantized(kind, "groups of 64", "float8_e4m3fn") for kind in KINDS),
)
QUANTIZED_SUMS = (
    *(quantized_sum(kind, "token", "float8_e4m3fn") for kind in KINDS),
    *(quantized_sum(kind, "tensor", "float8_e4m3fn") for kind in KINDS),
    *(quantized_sum(kind, "groups of 128", "float8_e5m2") for kind in KINDS),
)
GATED_QUANTIZED = (
    gated_quantized(QWEN, "token", "int8"),
    gated_quantized(MAMBA, "groups of 64", "float8_e4m3fn"),
    grouped_quantized(MAMBA, "groups of 128", "float8_e5m2"),
)

# One row of each kind of rule, where they do not depend on the norm, the activation or the dtype.
EACH = (
    *(NORMS[1], PER_HEAD[1], ADDED[1], SCALED[0], PADDED[1], GATED[1], GROUPED[0], GROUP_NORMS[1], SANDWICH[0]),
    *(GATED_ACTIVATIONS[1], GATED_ACTIVATIONS[5]),
    *(SOFTMAX[1], CROSS_ENTROPY[0], ROTARY[0]),
    *(QUANTIZED[1], QUANTIZED_SUMS[1], GATED_QUANTIZED[0], QUANTIZED_ACTIVATIONS[0]),
)
OPS = (
    *(*NORMS, *PER_HEAD, *ADDED, *SCALED, *PADDED, *GATED, *GROUPED, *GROUP_NORMS, *SANDWICH),
    *GATED_ACTIVATIONS,
    *(*SOFTMAX, *CROSS_ENTROPY, *ROTARY),
    *(*QUANTIZED, *QUANTIZED_SUMS, *GATED_QUANTIZED, *QUANTIZED_ACTIVATIONS),
)
