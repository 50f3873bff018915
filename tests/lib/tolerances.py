"""How far from the exact value a result may lie. These numbers are promises of the package: they are never widened."""

import math

import numpy as np
from oracle import Forward, f64, round_to, spacing

# Error of a float32 result relative to it: about four roundings.
FLOAT32 = 5e-7
# Half types: the share of elements that must be what rounding the exact value once gives.
CORRECTLY_ROUNDED = 0.995
# Relative L2 error of dx: float32 arithmetic, or one rounding of each element.
DX = {"float32": 1e-6, "bfloat16": 2e-3, "float16": 3e-4}
# Relative L2 error of the sums over rows.
DSCALE = {"float32": 5e-6, "bfloat16": 2e-3, "float16": 3e-4}


def forward_errors(y, oracle: Forward) -> list[str]:
    """What is wrong with ``y``; nothing if it keeps law 1."""
    y = np.asarray(y)
    if y.dtype != oracle.rounded.dtype or y.shape != oracle.rounded.shape:
        return [f"{y.dtype}{y.shape} instead of {oracle.rounded.dtype}{oracle.rounded.shape}"]
    if y.dtype == np.float32:
        return _above("relative error", np.abs(f64(y) - oracle.exact), FLOAT32 * oracle.terms + oracle.slack)
    # Where a bias cancels x_hat, or LayerNorm's mean x, the float32 error exceeds the half type's spacing.
    limit = spacing(oracle.exact, y.dtype) + FLOAT32 * oracle.terms + oracle.slack
    errors = _above("units in the last place", np.abs(f64(y) - f64(oracle.rounded)), limit)
    correct = np.mean(y == oracle.rounded) if y.size else 1.0
    if correct < CORRECTLY_ROUNDED:
        errors.append(f"{correct:.4%} of {y.size} elements are correctly rounded, expected {CORRECTLY_ROUNDED:.1%}")
    return errors


def _above(what, error, limit):
    worst = np.max(error / np.maximum(limit, np.finfo(np.float32).tiny), initial=0.0)
    return [] if worst <= 1 else [f"{what}: {worst:.3g} times the limit"]


def gradient_error(actual, exact, law: dict[str, float], size=None) -> float:
    """The relative L2 error as a multiple of the law's limit: at most 1.

    ``size`` is what the error is measured against, if not the exact value. A handful of half-precision numbers can lie
    further from the exact values than the law's average, however they were made: no result is asked to be better than
    the exact values rounded once.
    """
    actual, size = np.asarray(actual), np.linalg.norm(exact if size is None else size)
    limit = law[actual.dtype.name] * size
    if actual.dtype != np.float32:
        limit = max(limit, np.linalg.norm(f64(round_to(exact, actual.dtype)) - exact) + law["float32"] * size)
    error = np.linalg.norm(f64(actual) - exact)
    return float(error / limit) if error else 0.0


def result_errors(op, results, args, **options) -> list[str]:
    """Law 1's complaints about the results of a call of an op."""
    pairs = zip(results, op.exact_results(*args, **options), strict=False)
    return [complaint for result, exact in pairs for complaint in forward_errors(result, exact)]


def gradient_errors(op, gradients, cotangents, args, **options) -> dict[str, float]:
    """The errors of gradients as multiples of law 1's limits, where they are above."""
    exact = op.exact_gradients(cotangents, *args, **options)
    cols = math.prod(args[0].shape[args[0].ndim - np.size(options.get("axis", -1)) :])
    above = {}
    for name, argument, gradient in zip(op.operands, args, gradients, strict=True):
        if argument is not None and name in exact:
            value, terms = exact[name]
            law = DSCALE if name in op.weights else DX
            error = gradient_error(gradient, value, law, terms if cols <= 2 else None)
            above |= {} if error <= 1 else {name: error}
    return above
