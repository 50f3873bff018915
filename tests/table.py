"""The table: a row for each op, from its file in `ops/`. Each law in `laws/` is tested for each row, by what it says.

A new op is a new row: what it computes and by which formula, its operands and sizes, what its backward gives and needs.
"""

from ops.added_norm import ADDED, PADDED
from ops.branch_scale import SCALED
from ops.gated_activation import GATED_ACTIVATIONS
from ops.gated_activation_quantized import QUANTIZED_ACTIVATIONS
from ops.gated_norm import GATED, GROUPED
from ops.group_norm import GROUP_NORMS
from ops.norm import ALL as NORMS, PER_HEAD
from ops.products import EACH_PRODUCT, PRODUCTS
from ops.quantized_norm import GATED_QUANTIZED, QUANTIZED, QUANTIZED_SUMS
from ops.rotary import QKV_ROTARY as QKV_ROTARY, ROTARY
from ops.sandwich_norm import SANDWICH
from ops.softmax import CROSS_ENTROPY, SOFTMAX

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
# With the products, whose weights are matrices, of which a result has the columns.
EVERY, EACH_OF_ALL = (*OPS, *PRODUCTS), (*EACH, *EACH_PRODUCT)
