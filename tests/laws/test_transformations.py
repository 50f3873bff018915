"""Law 7: everything that works on the formula works on the ops and gives the same."""

import threading
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import assert_close, bits, draw, operands
from coverage import over
from hlo import compiled_text, count_native_calls
from internals import CASES
from jax.experimental import checkify
from table import (
    ADDED,
    EACH,
    EACH_OF_ALL,
    EACH_PRODUCT,
    EVERY,
    GATED,
    GATED_ACTIVATIONS,
    GATED_QUANTIZED,
    GROUP_NORMS,
    GROUPED,
    NORMS,
    OPS,
    PADDED,
    PER_HEAD,
    QKV_ROTARY,
    QUANTIZED,
    QUANTIZED_SUMS,
    ROTARY,
    SANDWICH,
)
from transformations import OF_EVERY_OPERAND, OF_WEIGHTS, POLICIES, TRANSFORMATIONS, operand_by_operand

import jaxnorm

pytestmark = [pytest.mark.jax_version, pytest.mark.usefixtures("exact_products")]

DIMS, IN_WEIGHTS = (6, 10), "linear_transpose in the weights"
ALL_OTHERS = tuple(name for name in TRANSFORMATIONS if name != IN_WEIGHTS)
# Nothing but the operands is kept, so that a linear function of the weights runs no forward.
OF_GATES = tuple(name for name in TRANSFORMATIONS if name not in ("linear_transpose", "grad of the weights"))
# What is quantised stands still in a second derivative, by convention; of float8_linear forward mode rounds no tangent,
# and examples of rows share the scales of dy's columns.
SECOND, FORWARD = ("hessian", "grad of grad", "grad of jvp"), ("jvp", "linear", "jac", "grad of vmap")
FIRST = [name for name in ALL_OTHERS if not any(of in name for of in SECOND)]
REVERSED = [name for name in FIRST if not any(of in name for of in FORWARD)]
RMS = (NORMS[0], ADDED[0], PER_HEAD[0], PADDED[0])
# Ops as norms of (x, scale, bias), and the transformations that they have rules of their own for. Those of a formula
# that rounds are left out: as programs they may round in another place.
TRANSFORMED = {
    **dict.fromkeys((*NORMS, GROUPED[0], GROUP_NORMS[0]), tuple(TRANSFORMATIONS)),
    # A primitive that gives y and the sum is transposed in a weight for y only, so that has a test of its own below.
    # In its weights the quantised norm is not linear, nor is an activation.
    **dict.fromkeys((*ADDED, *SANDWICH, GROUP_NORMS[1], QUANTIZED[1]), ALL_OTHERS),
    **dict.fromkeys(PER_HEAD, OF_WEIGHTS),
    **dict.fromkeys(PADDED, tuple(name for name in OF_WEIGHTS if name != IN_WEIGHTS)),
    **dict.fromkeys((GATED_ACTIVATIONS[1], GATED_ACTIVATIONS[5]), OF_GATES),
    GATED[1]: ["vjp", "hessian", "vmap over everything"],
    ROTARY[0]: ["vmap of every grad of everything", "grad of scan of checkpoint"],
    QKV_ROTARY[0]: ["vjp", "hessian", "vmap over x", "grad of scan of checkpoint"],
    QUANTIZED[0]: ["grad", "hessian", "vmap over x", "vmap over scale", "scan"],
    # Reverse mode rounds once more than forward mode: of what has both, tests are in ops/products.py.
    **dict.fromkeys(EACH_PRODUCT[:2], FIRST),
    **dict.fromkeys(EACH_PRODUCT[2:], REVERSED),
    GATED_QUANTIZED[0]: ["vjp", "hessian", "vmap over x", "grad of scan of checkpoint"],
}
# RMSNorm's rules are LayerNorm's with a statistic less.
transformations = over([op for op in TRANSFORMED if op not in RMS or op in EACH], name=lambda op: TRANSFORMED[op])
# Where every primitive runs alone; the rules are those of the programs.
alone = over([op for op in TRANSFORMED if op in EACH_OF_ALL], pairs=False, name=lambda op: TRANSFORMED[op])


@cache
def expected(op, name):
    return jax.jit(TRANSFORMATIONS[name].transform(op.norm(op.formula)))(*operands(DIMS))


@transformations
def test_transformed_and_compiled(op, name):
    transform, fwd, bwd = TRANSFORMATIONS[name]
    program = jax.jit(transform(op.norm())).lower(*operands(DIMS)).compile()
    assert_close(program(*operands(DIMS)), expected(op, name))
    counted = {way for way, count in ((op.forward, fwd), (op.backward, bwd)) if count is not None}
    calls = count_native_calls(program.as_text())
    assert {name: count for name, count in calls.items() if name in counted} == op.calls(fwd or 0, bwd or 0)


@alone
def test_transformed_outside_jit(op, name):
    assert_close(TRANSFORMATIONS[name].transform(op.norm())(*operands(DIMS)), expected(op, name))


@pytest.mark.parametrize("op", ADDED, ids=str)
def test_linear_transpose_in_the_weights(op):
    def of_y(function):
        return TRANSFORMATIONS[IN_WEIGHTS].transform(lambda x, *weights: function(x, jnp.cos(x), *weights)[0])

    assert_close(of_y(op.function)(*operands(DIMS)), of_y(op.formula)(*operands(DIMS)))


WITH_ARRAYS = (
    *(*ADDED, *GATED, *GROUPED, *GATED_ACTIVATIONS, *GROUP_NORMS, *SANDWICH, *ROTARY, *PER_HEAD),
    *(QUANTIZED[1], GATED_QUANTIZED[0]),
)


def names_of(op):
    """Those of each activation are of its first and second derivatives, and large gates leave few digits of a third.
    The cotangent of smooth factors is zero by convention, of which the last two make tangents."""
    if op in GATED:
        return ["grad", "jvp of grad", "jvp of grad of scan", *operand_by_operand(op)]
    if op in (*ROTARY, *QKV_ROTARY):  # whose derivatives are those of norms
        array = "qkv" if op in QKV_ROTARY else "k"
        names = ["results", "jvp of grad", "jvp of grad of scan", "transpose of vjp", f"jvp of {array}"]
        return [*names, "grad of k_scale twice"]
    return [*[*OF_EVERY_OPERAND][: 4 if op.derived else None], *operand_by_operand(op)]


@over([op for op in WITH_ARRAYS if op not in RMS], name=names_of)
def test_of_every_operand(op, name):
    transform, args = OF_EVERY_OPERAND.get(name) or operand_by_operand(op)[name], op.draw(op.small)
    ours, theirs = (transform(op, op.run(function)) for function in (op.differentiable, op.formula))
    assert_close(jax.jit(ours)(*args), jax.jit(theirs)(*args))


def moved(op):
    """Which operands have an axis of examples: each alone, all arrays, every one."""
    every = tuple(range(len(op.operands)))
    return sorted({*((i,) for i in every), every[: op.arrays], every}, key=lambda some: (len(some), some))


def examples_of(op, moved):
    """Three examples of these operands, and the axes of a vmap over them."""
    args = op.draw(op.small)
    stacked = [jnp.stack([a, 2 * a, jnp.sin(a)]) if i in moved else a for i, a in enumerate(args)]
    return stacked, [0 if i in moved else None for i in range(len(args))]


# Of `qk_norm_rotary` more is in a file of its own.
VMAPPED = [op for op in (*EACH, *GROUPED) if op not in ROTARY]


@over([op for op in (*NORMS, *WITH_ARRAYS, *PADDED) if op in VMAPPED], what=lambda op: ["results", "grad"], moved=moved)
def test_vmap(op, what, moved):
    examples, axes = examples_of(op, moved)

    def of(function):
        function = op.run(function) if what == "results" else op.gradient(op.run(function))
        return jax.jit(jax.vmap(function, axes))(*examples)

    assert_close(of(op.differentiable), of(op.formula))


@over(OPS, moved=lambda op: [some for some in moved(op) if max(some) < op.arrays])
def test_rows_by_vmap_are_one_call_each_way(op, moved):
    examples, axes = examples_of(op, moved)
    gradients = jax.vmap(op.gradient(argnums=tuple(range(op.arrays))), axes)
    assert count_native_calls(compiled_text(gradients, *examples)) == op.calls(fwd=1, bwd=1)


@over(EVERY, moved=lambda op: [some for some in moved(op) if max(some) < op.arrays])
def test_examples_of_rows_have_the_bits_of_calls_one_by_one(op, moved):
    examples, axes = examples_of(op, moved)
    function = jax.jit(op.run(op.function))
    one_by_one = [function(*(a[i] if j in moved else a for j, a in enumerate(examples))) for i in range(3)]
    expected = jax.tree.map(lambda *leaves: jnp.stack(leaves), *one_by_one)
    assert bits(jax.jit(jax.vmap(function, axes))(*examples)) == bits(expected)


@pytest.mark.needs("kernels")
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}, {case.example}")
def test_each_case_of_vmap_is_what_its_example_says(case):
    def loss(x, scale):
        return jnp.sin(jaxnorm.rms_norm(x, scale)).sum()

    names = {"y": jaxnorm.rms_norm, "dx": jax.grad(loss, 0), "dscale": jax.grad(loss, 1)}
    text, of_one_row, _ = case.example.partition(" of one row")
    function, axes = eval(text, names | {"vmap": lambda *given: given})
    x, scale = draw("x", (3, 1 if of_one_row else 4, 64)), draw("scale", (3, 64))
    args = [array if axis == 0 else array[0] for array, axis in zip((x, scale), axes, strict=True)]
    examples = [function(*(a[i] if axis == 0 else a for a, axis in zip(args, axes, strict=True))) for i in range(3)]
    program = jax.jit(jax.vmap(function, axes))
    assert_close(program(*args), jnp.stack(examples))
    target = f"jaxnorm_rms_norm_{'fwd' if function is jaxnorm.rms_norm else 'bwd'}"
    assert count_native_calls(program.lower(*args).as_text()).get(target, 0) == case.calls


def test_every_policy_is_in_the_table():
    # JAX 0.11 has the classes of policies there too; a policy is what makes or is one, in lower case.
    assert set(POLICIES) == {name for name in vars(jax.checkpoint_policies) if name.islower()}


# Counted as lowered: XLA's CPU compiler may merge what a policy recomputes, as there is no memory to be saved there.
@over([*NORMS, *ADDED, *GROUPED, GROUP_NORMS[1], *QUANTIZED[:2]], name=lambda op: list(POLICIES))
def test_gradient_under_a_checkpoint_policy(op, name):
    policy, fwd = POLICIES[name]
    lowered = jax.jit(op.gradient(jax.checkpoint(op.run(), policy=policy))).lower(*op.draw(op.small))
    assert count_native_calls(lowered.as_text()) == op.calls(fwd=fwd, bwd=1)
    assert_close(lowered.compile()(*op.draw(op.small)), jax.jit(op.gradient())(*op.draw(op.small)))


@pytest.mark.parametrize("op", [*ADDED, *QUANTIZED_SUMS[:2]], ids=str)
def test_grad_of_scan_over_a_stream(op):
    def gradient(function):
        def stack(x, residual, scale, *others):
            def layer(stream, scale):
                y, residual = function(*stream, scale, *others)
                return (jnp.tanh(y), residual), None

            y, residual = jax.lax.scan(layer, (x, residual), jnp.stack([scale, 2 * scale, scale + 1]))[0]
            return (y * jnp.sin(residual)).sum()

        return jax.jit(jax.grad(stack, (0, 1, 2, 3)))

    args = op.draw(op.small)
    if op in ADDED:
        assert_close(gradient(op.function)(*args), gradient(op.formula)(*args))
    text = gradient(op.differentiable).lower(*args).compile().as_text()
    assert count_native_calls(text) == op.calls(fwd=1, bwd=1)


def test_donated_memory_may_hold_the_gradient():
    (op,) = NORMS[1:]
    step = jax.jit(lambda *args: args[0] - jax.grad(op.loss())(*args), donate_argnums=0)
    expected = op.draw(op.small)[0] - jax.grad(op.loss(op.run(op.formula)))(*op.draw(op.small))
    assert_close(step(*op.draw(op.small)), expected)


@over([*ADDED, *SANDWICH, *QUANTIZED_SUMS], dtype=lambda op: ["bfloat16"])
def test_a_donated_residual_becomes_the_sum(op, dtype):
    args, function = op.draw(op.small, (dtype, "float32")), op.run(op.function)
    expected = bits(jax.jit(function)(*args))
    compiled = jax.jit(function, donate_argnums=1).lower(*args).compile()
    rows, cols = op.small.dims
    assert f"f32[{rows},{cols}]{{1,0}} copy(" not in compiled.as_text()
    assert bits(compiled(*args)) == expected


# Where no result is like x, it cannot be donated.
@over(EACH_OF_ALL, donated=lambda op: [False] if op.is_by_row or op.operands[0] in op.shapes else [False, True])
def test_compiled_ahead_of_time(op, donated):
    function = op.run(op.function)
    expected = bits(jax.jit(function)(*op.draw(op.small)))
    compiled = jax.jit(function, donate_argnums=(0,) * donated).lower(*op.draw(op.small)).compile()
    assert bits(compiled(*op.draw(op.small))) == expected


@pytest.mark.parametrize("op", EVERY, ids=str)
def test_evaluated_for_its_shape_only(op):
    dims = (2**40, *op.small.dims[1:])
    y, *_ = jax.eval_shape(op.run(), *op.types(op.small._replace(dims=dims), "bfloat16"))
    assert y.shape[:-1] == jax.eval_shape(op.normalised, jax.ShapeDtypeStruct(dims, "bfloat16")).shape[:-1]


# 0 / 0, in the result and in the gradient.
@over([*NORMS, *ADDED], what=lambda op: ["value", "gradient"])
def test_checkify_finds_nan(op, what):
    norm = partial(op.function, epsilon=0.0)
    function = {"value": norm, "gradient": op.gradient(norm)}[what]
    checked = jax.jit(checkify.checkify(function, errors=checkify.float_checks))
    args = op.draw(op.small)
    assert checked(*args)[0].get() is None
    zeros = [0 * a for a in args[: op.arrays]]
    assert "nan generated by primitive: jaxnorm_" in checked(*zeros, *args[op.arrays :])[0].get()


@pytest.mark.parametrize("op", [NORMS[0], GROUPED[0]], ids=str)
def test_called_from_several_threads(op):
    gradient = jax.jit(op.gradient())
    inputs = [op.draw(op.small._replace(dims=(n, *op.small.dims[1:]))) for n in (1, 2, 3, 50, 51, 52, 500, 501)]
    results = [None] * len(inputs)

    def work(i):
        for _ in range(5):
            results[i] = gradient(*inputs[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert bits(results) == bits([gradient(*args) for args in inputs])


# A jnp norm converts weak types and NumPy arrays; so must these.
@over(EVERY, convert=lambda op: {"numpy": np.asarray, "jax": jnp.asarray})
def test_arrays_of_numpy(op, convert):
    args, function = op.draw(op.small), op.run(op.function)
    assert bits(function(*map(convert, args))) == bits(function(*args))


@over([op for op in OPS if op.exact], dtypes=lambda op: op.dtypes[1:])
def test_jvp_of_half_types(op, dtypes):
    args = op.draw(op.small, dtypes)
    dots = tuple(jnp.cos(a) for a in args)
    results, tangents = jax.jit(lambda *args: jax.jvp(op.run(op.function), args, dots))(*args)
    wide = [jax.tree.map(lambda a: a.astype("float32"), arrays) for arrays in (args, dots)]
    _, expected = jax.jvp(op.run(op.formula), *wide)
    assert [t.dtype for t in tangents] == [r.dtype for r in results]
    for tangent, exact in zip(tangents, expected, strict=True):
        np.testing.assert_allclose(tangent.astype("float32"), exact, rtol=2e-2, atol=4e-2)


@over([op for op in OPS if op.exact], wide=lambda op: ["all", *(op.operands if op.has_out_dtype else ())])
def test_float64(op, wide):
    out_dtype = {"out_dtype": "float64"} if op.has_out_dtype else {}
    with jax.enable_x64(True):
        drawn = zip(op.operands, op.draw(op.small), strict=True)
        args = [a.astype("float64") / 3 if wide in (name, "all") else a for name, a in drawn]
        results = op.function(*args, **out_dtype, **op.small.options)
        found = op.exact_results(*args, **out_dtype, **op.small.options)
    for result, exact in zip(results, found, strict=False):
        np.testing.assert_allclose(result, exact.exact, rtol=1e-11, atol=1e-14)


# The kernels have no such operand, whatever the dtype of x and of the result.
@over(
    [op for op in OPS if op.exact and op.has_out_dtype and op.operands[1:]],
    wide=lambda op: ["all", *op.operands[1:]],
    dtype=lambda _: ("float32", "bfloat16"),
)
def test_operands_of_float64_beside_a_narrow_x(op, wide, dtype):
    with jax.enable_x64(True):
        x, *others = (a.astype(dtype) for a in op.draw(op.small))
        drawn = zip(op.operands[1:], others, strict=True)
        args = [x, *(a.astype("float64") / 3 if wide in (name, "all") else a for name, a in drawn)]
        results = jax.block_until_ready(op.function(*args, **op.small.options))
        found = op.exact_results(*args, **op.small.options)
        with pytest.raises(RuntimeError, match=r"implementation='native'.* float64"):
            op.function(*args, **op.small.options, implementation="native")
        jax.block_until_ready(op.gradient(op.run(**op.small.options))(*args))
    for result, exact in zip(results, found, strict=False):
        rtol = max(1e-11, float(jnp.finfo(result.dtype).eps))
        np.testing.assert_allclose(np.float64(result), exact.exact, rtol=rtol, atol=1e-2 * rtol)
