"""What tests use of the package beside its public names: every such import stands here."""

# ruff: noqa: F401 (others import what is imported here)

from jaxnorm.inspect import report, tune as tuning, turns
from jaxnorm.inspect.explain import calls_in
from jaxnorm.native import compat, ffi, fit, private
from jaxnorm.ops.cross_entropy.formula import CrossEntropy, Operands as CrossEntropyOperands
from jaxnorm.ops.cross_entropy.op import CROSS_ENTROPY
from jaxnorm.ops.embedding import op as embedding_op
from jaxnorm.ops.float8_linear import kernels as float8_kernels
from jaxnorm.ops.float8_linear.formula import Float8Linear, Rounded, by_columns, by_rows
from jaxnorm.ops.mask import columns
from jaxnorm.ops.norm.gated import LONGEST as LONGEST_GATED
from jaxnorm.ops.quantize.checks import SMALLEST_SCALE
from jaxnorm.ops.quantized_dot import op as quantized_dot
from jaxnorm.primitive import fallback, reasons, weights
from jaxnorm.primitive.batching import CASES
from jaxnorm.primitive.decide import ALONE, Call, Platform, Program, decide
from jaxnorm.primitive.family import Family
from jaxnorm.primitive.registry import functions
from jaxnorm.primitive.weights import LONGEST as LONGEST_PER_HEAD
from jaxnorm.quantization import GROUP_SIZES
from jaxnorm.sharding import partition

_slower, _few, _least = reasons.slower, quantized_dot.FEW, quantized_dot.LEAST
_few_sums, _short_sums = embedding_op.FEW, embedding_op.SHORT


def run_every_kernel():
    """Runs kernels also where XLA's code is faster: the laws are theirs."""
    reasons.slower = lambda op, spec, rows: None
    quantized_dot.FEW = quantized_dot.LEAST = embedding_op.FEW = embedding_op.SHORT = 0


def choose_fastest(monkeypatch):
    """Chooses for the rest of a test as a user's program does."""
    monkeypatch.setattr(reasons, "slower", _slower)
    monkeypatch.setattr(quantized_dot, "FEW", _few)
    monkeypatch.setattr(quantized_dot, "LEAST", _least)
    monkeypatch.setattr(embedding_op, "FEW", _few_sums)
    monkeypatch.setattr(embedding_op, "SHORT", _short_sums)
