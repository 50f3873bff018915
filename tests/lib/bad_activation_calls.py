"""Bad calls of `gated_activation`, and what no kernel serves anywhere."""

import jax
import jax.numpy as jnp
from statements import call

X, PAIRED = jnp.ones((3, 4, 8)), jnp.ones((3, 2, 8))

GATED_ACTIVATION = {
    "an odd last axis": call(jnp.ones((3, 7))).raises(ValueError, "x", r"\(3, 7\)", "even", r"tuple \(gate, up\)"),
    "an axis of three": call(jnp.ones((3, 3, 8)), axis=-2).raises(
        ValueError, "x", r"\(3, 3, 8\)", r"\(..., 2, columns\)", "Leave axis out"
    ),
    "an axis of three from the front": call(X, axis=1).raises(ValueError, "x", r"\(3, 4, 8\)", "axis=1"),
    "the first axis": call(X, axis=0).raises(ValueError, "axis=0", r"\(3, 4, 8\)", "-1", "-2"),
    "axis beyond": call(X, axis=-4).raises(ValueError, "axis=-4", r"\(3, 4, 8\)", "-2"),
    "axis of one that has none before": call(X[0, 0], axis=-2).raises(ValueError, "axis=-2", r"\(8,\)"),
    "axis of a float": call(X, axis=-1.0).raises(TypeError, "axis", "int", "-1.0"),
    "axis of a bool": call(X, axis=True).raises(TypeError, "axis", "int", "True"),
    "axis of two": call(X, axis=(-2, -1)).raises(TypeError, "axis", "int", r"\(-2, -1\)"),
    "one of a tuple": call((X,)).raises(ValueError, "tuple of 1", r"\(gate, up\)"),
    "three of a tuple": call((X, X, X)).raises(ValueError, "tuple of 3", r"\(gate, up\)"),
    "axis of a tuple": call((X, X), axis=-2).raises(ValueError, "axis=-2", r"tuple \(gate, up\)", "leave axis out"),
    "no up": call((X, None)).raises(TypeError, "up", "array", "NoneType"),
    "no gate": call((None, X)).raises(TypeError, "gate", "array", "NoneType"),
    "gate of integers": call((X.astype("int32"), X)).raises(TypeError, "gate", "floating", "int32"),
    "scalar gate": call((jnp.ones(()), jnp.ones(()))).raises(ValueError, "gate", "at least one axis"),
    "up of another shape": call((X, X[:2])).raises(
        ValueError, "up", r"\(2, 4, 8\)", r"\(3, 4, 8\)", r"broadcast_to\(up, gate.shape\)"
    ),
    "up that would broadcast": call((X, X[0])).raises(ValueError, "up", r"\(4, 8\)", r"\(3, 4, 8\)"),
    "unknown activation": call(X, activation="mish").raises(
        ValueError, "activation", "'mish'", "'silu', 'gelu', 'gelu_exact', 'relu2' or 'sigmoid'"
    ),
    "relu, which is no gate here": call(X, activation=jax.nn.relu).raises(ValueError, "activation", "'relu2'"),
    "no activation": call(X, activation=None).raises(ValueError, "activation", "None", "'silu'"),
}
MISUSE = {
    "nothing": call().raises(TypeError, "missing a required argument: 'x'"),
    "two by position": call(X, X).raises(
        TypeError, r"takes 1 positional arguments \(x\) but 2 were given", r"pass a tuple: \w+\(\(gate, up\)\)"
    ),
    "two in a list": call([X, X]).raises(TypeError, "got list", r"pass a tuple: \w+\(\(gate, up\)\)"),
}
WITHOUT_KERNEL = {
    "no columns": call(jnp.ones((3, 0))).has_no_kernel("length 0"),
    "up of another dtype": call((X, X.astype("bfloat16"))).has_no_kernel("gate is float32 and up bfloat16"),
    "no columns of a pair": call(PAIRED[..., :0], axis=-2).has_no_kernel("length 0"),
}
