"""Law 12: only differences of logits count, in losses, softmax, log_softmax and gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import DTYPES, draw
from coverage import cover
from ops.softmax import ROUNDING, ROUNDINGS, exact_log_softmax, exact_softmax, gradients_of_log_softmax
from oracle import f64, round_to, spacing
from tolerances import DX, FLOAT32, forward_errors, gradient_error

import jaxnorm
from jaxnorm.ops.cross_entropy import formula

pytestmark = pytest.mark.usefixtures("exact_products")

cross_entropy, IMPLEMENTATIONS = jaxnorm.softmax_cross_entropy_with_integer_labels, ("native", "xla")
implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def gradient_of_softmax(dy, y, _):
    """It reads y, which may be rounded up where the exact one is rounded down: next to 1 that is all of a gradient."""
    return y * (dy - (dy * y).sum(-1, keepdims=True))


SHARES = {
    "softmax": (jaxnorm.softmax, exact_softmax, gradient_of_softmax),
    "log_softmax": (
        jaxnorm.log_softmax,
        exact_log_softmax,
        lambda dy, _, z: gradients_of_log_softmax((dy,), z)["x"][0],
    ),
}
SCALES = [1.0, 0.5, -2.0]
LOSS = 1e-6  # relative to the terms of a loss, or to 1
# In plain jnp p - 1 is rounded as p is, next to 1.
OF_ONE = {"native": 0.0, "xla": 2.0**-23}
# What is added to a row, and the unit of its logits, so that the sums are exact.
OFFSETS = {
    f"{dtype} {offset:+.0f}": (dtype, offset, unit)
    for dtype, offset, unit in (
        *(("float32", offset, 2.0**-10) for offset in (1e3, 1e4, -1e4)),
        ("bfloat16", 1e3, 4.0),
        ("float16", -1e3, 0.5),
    )
}
ROWS, COLS, VISIBLE = 6, 200, 190
# The first label is the largest logit's, the second the least one's.
OPTIONS = {"none": {}, "smoothing": {"label_smoothing": 0.1}, "where": {"where": np.arange(COLS) < VISIBLE}}
OPTIONS |= {"ignored": {"ignore_index": -1}}
OPTIONS |= {"all": {"label_smoothing": 0.1, "where": np.arange(COLS) < VISIBLE, "ignore_index": -1}}


def centred(x, scale=1.0):
    """The differences to the row's largest, of logits that are scaled, in float64."""
    x = f64(x)
    return (x - (x.max(-1, keepdims=True) if scale > 0 else x.min(-1, keepdims=True))) * float(np.float32(scale))


def logits(unit, offset):
    """Multiples of the unit, of up to 20, and the same with the offset."""
    x = np.clip(np.rint(4 * np.asarray(draw("x", (ROWS, COLS))) / unit) * unit, -20, 20)
    return x, x + offset


def exact_losses(z, labels, *, label_smoothing=0.0):
    """Losses, the size of their terms, gradients and what rounding exponents moves these by, for differences z."""
    share = np.exp(z)
    total = share.sum(-1, keepdims=True)
    share /= total
    one_hot = np.arange(z.shape[-1]) == labels[:, None]
    at_label, mean = (z * one_hot).sum(-1), z.mean(-1)
    losses = np.log(total)[:, 0] - (1 - label_smoothing) * at_label - label_smoothing * mean
    terms, moved = np.log(total)[:, 0] - at_label - label_smoothing * mean, -ROUNDING * (ROUNDINGS + 1) * z
    slack = share * (moved + (share * moved).sum(-1, keepdims=True))
    return losses, terms, share - (1 - label_smoothing) * one_hot - label_smoothing / z.shape[-1], slack


def assert_law(actual, exact, slack):
    """Law 1 for the gradient of each row, less what rounding an exponent moves it by."""
    actual = np.asarray(actual)
    for row, (a, e, s) in enumerate(zip(actual, exact, slack, strict=True)):
        size, rounding = np.linalg.norm(e), np.linalg.norm(f64(round_to(e, actual.dtype)) - e)
        limit = max(DX[actual.dtype.name] * size, rounding + DX["float32"] * size) + np.linalg.norm(s)
        error = np.linalg.norm(f64(a) - e)
        assert error <= limit, f"row {row}: {error:.3g}, at most {limit:.3g}"


def assert_losses(actual, exact, terms):
    np.testing.assert_array_less(np.abs(f64(actual) - exact), LOSS * np.maximum(1, terms))


@pytest.mark.on_emulator
@cover(name=list(SHARES), offset=OFFSETS, scale=SCALES, implementation=IMPLEMENTATIONS)
def test_shares(name, offset, scale, implementation):
    function, exact, gradient = SHARES[name]
    dtype, offset, unit = offset
    x, moved = logits(unit, offset)
    z, dy = centred(x, scale), draw("dy", x.shape, dtype)
    run = partial(function, logit_scale=scale, implementation=implementation)
    y, dx = jax.jit(lambda x: (run(x), jax.vjp(run, x)[1](dy)[0]))(jnp.asarray(moved, dtype))
    forward = exact(z, out_dtype=dtype)
    assert forward_errors(y, forward) == []
    # The formula's reads y as it was rounded or, where XLA leaves that out, as it was.
    read = [y] if implementation == "native" else [y, forward.exact]
    assert min(gradient_error(dx, scale * gradient(f64(dy), f64(of), z), DX) for of in read) <= 1


@pytest.mark.on_emulator
@cover(through=["losses", "linear"], options=OPTIONS, offset=OFFSETS, scale=SCALES, implementation=IMPLEMENTATIONS)
def test_losses(through, options, offset, scale, implementation):
    dtype, offset, unit = offset
    x, moved = logits(unit, offset)
    cols = VISIBLE if "where" in options else COLS
    z = centred(x[:, :cols], scale)
    labels = np.asarray([*z[0:1].argmax(-1), *z[1:2].argmin(-1), 3, 5, 7, 9])
    counts = np.arange(ROWS) != (2 if "ignore_index" in options else -1)
    given = {**options, "logit_scale": scale, "implementation": implementation}
    named = jnp.asarray(np.where(counts, labels, -1))
    if through == "losses":
        run, operand = partial(cross_entropy, labels=named, **given), moved
    else:
        # Rows of the identity, and ones that multiply the offset: products that are the logits, exactly.
        hidden, operand = np.eye(ROWS, ROWS + 1), np.concatenate([x, np.full((1, COLS), offset)])
        hidden[:, ROWS] = 1
        linear = partial(jaxnorm.linear_cross_entropy, labels=named, reduction="none", rows_per_chunk=4, **given)
        run = partial(linear, jnp.asarray(hidden, dtype))
    losses, gradient = jax.jit(lambda a: (run(a), jax.grad(lambda a: run(a).sum())(a)))(jnp.asarray(operand, dtype))
    expected, terms, dz, slack = exact_losses(z, labels, label_smoothing=options.get("label_smoothing", 0.0))
    assert_losses(losses, np.where(counts, expected, 0), terms)
    gradient = gradient[:ROWS]
    assert not gradient[:, cols:].any()
    slack[range(ROWS), labels] += OF_ONE[implementation]
    assert_law(gradient[:, :cols], scale * counts[:, None] * dz, abs(scale) * slack)


@pytest.mark.on_emulator
@implementations
@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_a_confident_label(implementation, offset):
    x = np.full((2, 1000), offset)
    x[:, 7] += 20
    labels = np.asarray([7, 8])
    run = partial(cross_entropy, labels=labels, implementation=implementation)
    losses, dx = jax.jit(lambda x: (run(x), jax.grad(lambda x: run(x).sum())(x)))(jnp.asarray(x, "float32"))
    expected, terms, dz, slack = exact_losses(centred(x), labels)
    np.testing.assert_allclose(dz[0, 7], -2.06e-6, rtol=1e-3)
    assert_losses(losses, expected, terms)
    slack[range(2), labels] += OF_ONE[implementation]
    assert_law(dx, dz, slack)
    assert (np.abs(f64(dx).sum(-1)) <= 1e-7 + OF_ONE[implementation]).all()


@implementations
@pytest.mark.parametrize("transform", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_a_scale_of_large_logits(implementation, transform):
    x = jnp.asarray([[1e11, -1e11, 3e10]])

    def loss(x):
        return cross_entropy(x, jnp.asarray([1]), logit_scale=0.3, implementation=implementation).sum()

    value, dx = transform(jax.value_and_grad(loss))(x)
    np.testing.assert_allclose(value, 6e10, rtol=1e-6)
    np.testing.assert_allclose(dx, [[0.3, -0.3, 0]], rtol=1e-6)


# Rows at 2**20 to 2**40, whose largest are a few spacings of float32 apart, or any.
@pytest.mark.on_emulator
@cover(scale=[0.3, 0.7, -1.3], implementation=IMPLEMENTATIONS, exponent=[20, 23, 30, 40], sign=[1, -1])
def test_large_logits(scale, implementation, exponent, sign):
    spread = np.asarray(draw("x", (4, 50)))
    base, unit = sign * 1.5 * 2.0**exponent, spacing(np.asarray(1.5 * 2.0**exponent), "float32")
    x = np.stack([*(base + np.rint(spread[:2] * [[3], [40]]) * unit), *(spread[2:] * base)]).astype(np.float32)
    z, labels = centred(x, scale), np.asarray([0, 1, 2, 3])

    def all_of(x):
        given = {"implementation": implementation}
        run = partial(cross_entropy, labels=labels, logit_scale=scale, **given)
        shares = [SHARES[name][0](x, logit_scale=scale, **given) for name in SHARES]
        return shares, run(x), jax.grad(lambda x: run(x).sum())(x)

    (share, log), losses, dx = jax.jit(all_of)(x)
    exact = exact_softmax(z, out_dtype=np.dtype("float32"))
    # One more rounding: of the product with the scale.
    assert forward_errors(share, exact._replace(slack=exact.slack * (ROUNDINGS + 1) / ROUNDINGS)) == []
    assert forward_errors(log, exact_log_softmax(z, out_dtype=np.dtype("float32"))) == []
    expected, terms, dz, slack = exact_losses(z, labels)
    assert_losses(losses, expected, terms)
    slack[range(4), labels] += OF_ONE[implementation]
    assert_law(dx, float(np.float32(scale)) * dz, abs(scale) * slack)


# Where one logit is far above the rest its logarithm is the small sum of the others' shares.
@pytest.mark.on_emulator
@cover(dtype=DTYPES, gap=[5.0, 10.0, 20.0, 40.0, 80.0], top=[0.0, 2.5], implementation=IMPLEMENTATIONS)
def test_log_softmax_near_zero(dtype, gap, top, implementation):
    x = np.full((1, 100), top - gap)
    x[0, 31] = top
    y = jax.jit(partial(jaxnorm.log_softmax, implementation=implementation))(jnp.asarray(x, dtype))[0, 31]
    exact = -np.log1p(99 * np.exp(-gap))
    limit = np.abs(exact) * (FLOAT32 + ROUNDING * ROUNDINGS * gap)
    if dtype == "float32":
        assert abs(float(y) - exact) <= limit
    else:
        rounded = float(round_to(np.asarray(exact), jnp.dtype(dtype)))
        assert abs(float(y) - rounded) <= spacing(np.asarray(exact), dtype) + limit


# Nothing is left to rounding: the only class has the share 1.
@cover(
    implementation=IMPLEMENTATIONS,
    dtype=DTYPES,
    options=[{}, {"logit_scale": 0.3}, {"label_smoothing": 0.1}, {"soft_cap": 30.0}],
    masked=[False, True],
)
def test_a_single_class(implementation, dtype, options, masked):
    x, given = jnp.asarray([[0.1], [3.7], [-1e4], [6e4]], dtype), {"implementation": implementation}
    if masked:
        x, given["where"] = jnp.concatenate([x, 0 * x + 7], -1), np.asarray([True, False])
    logs = jax.jit(partial(jaxnorm.log_softmax, logit_scale=options.get("logit_scale", 1.0), **given))
    np.testing.assert_array_equal(logs(x)[:, 0], 0)
    np.testing.assert_array_equal(jax.vjp(logs, x)[1](draw("dy", x.shape, dtype))[0], 0)
    losses = jax.jit(partial(cross_entropy, labels=jnp.zeros(4, int), **options, **given))
    np.testing.assert_array_equal(losses(x), 0)
    (gradient,) = jax.vjp(losses, x)[1](draw("dy", (4,)))
    # The cotangents of a smoothed label, of the mean and of the logsumexp are 0 together, but for a rounding of each.
    np.testing.assert_allclose(gradient.astype("float32"), 0, atol=2**-23 if "label_smoothing" in options else 0)


def by_the_formula(x, labels, cap):
    spec = formula.CrossEntropy(
        axes=(-1,), scale=1.0, soft_cap=cap, with_total=False, compute_dtype=x.dtype, out_dtype=x.dtype
    )
    labels, one = labels[:, None], jnp.ones((x.shape[0], 1))
    saved = formula.Saved(x, labels, formula.forward(spec, formula.Operands(x, labels))[0][0])
    return formula.backward(spec, formula.Results(one, -one), saved, formula.OnlyX(x.dtype), ()).x


# The slope is 1 / cosh**2, of which 1 - tanh**2 has no digit where tanh is nearly 1.
@pytest.mark.on_emulator
@cover(how=[*IMPLEMENTATIONS, "formula"], largest=[10.0, 60.0, 150.0, 300.0])
def test_the_slope_of_a_soft_cap(how, largest):
    cap, labels = 30.0, jnp.asarray([0, 1, 2, 3])
    x = largest * jnp.tanh(draw("x", (4, 300)))

    def gradient(x):
        run = partial(cross_entropy, labels=labels, soft_cap=cap, implementation=how)
        return jax.grad(lambda x: run(x).sum())(x)

    dx = f64(jax.jit(partial(by_the_formula, labels=labels, cap=cap) if how == "formula" else gradient)(x))
    small = np.exp(-2 * np.abs(f64(x)) / cap)
    z, slope = cap * np.sign(f64(x)) * (1 - small) / (1 + small), 4 * small / (1 + small) ** 2
    _, _, dz, slack = exact_losses(z - z.max(-1, keepdims=True), np.asarray(labels))
    # A rounding of tanh is one of z.
    slack += np.exp(z - z.max(-1, keepdims=True)) * ROUNDING * 8 * cap
    slack[range(4), labels] += OF_ONE["xla"]
    limit = np.abs(slope * dz) * (1e-6 + ROUNDING * ROUNDINGS * 2 * np.abs(f64(x)) / cap) + slope * slack
    normal = np.abs(slope * dz) >= np.finfo(np.float32).tiny
    assert (np.abs(dx - slope * dz) <= limit)[normal].all()
