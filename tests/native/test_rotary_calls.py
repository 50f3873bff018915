"""The handlers of rotary embedding, handed inconsistent buffers, say so; they never read or write past one."""

import numpy as np
import pytest
from calls import BF16, WORKSPACE, call, each_is_refused, struct, without

pytestmark = pytest.mark.kernels

FWD, BWD = "jaxnorm_qk_norm_rotary_fwd", "jaxnorm_qk_norm_rotary_bwd"
PACKED_FWD, PACKED_BWD = "jaxnorm_qkv_norm_rotary_fwd", "jaxnorm_qkv_norm_rotary_bwd"
BATCH, TOKENS, HEADS, KEYS, COLS, PAIRS = 2, 5, 6, 3, 16, 8
Q, K = struct(BATCH, TOKENS, HEADS, COLS), struct(BATCH, TOKENS, KEYS, COLS)
Q_RSTD, K_RSTD = struct(BATCH, TOKENS, HEADS, 1), struct(BATCH, TOKENS, KEYS, 1)
SCALE, SCALES = struct(COLS), struct(HEADS, COLS)
POSITIONS, FREQUENCIES, TABLE = struct(1, TOKENS), struct(PAIRS), struct(BATCH, TOKENS, PAIRS)
STATISTICS = (Q_RSTD, K_RSTD)
BOTH = {
    "norm": "rms",
    "heads_axis": np.int64(-2),
    "rotary_dim": np.int64(COLS),
    "interleaved": False,
    "scale_offset": np.float32(0),
    "has_q_scale": True,
    "has_k_scale": True,
    "has_positions": True,
    "has_frequencies": True,
    "has_cos": False,
    "has_sin": False,
}
FORWARD = {**BOTH, "epsilon": np.float32(1e-6)}
WANTED = {"with_dq": True, "with_dk": True, "with_dq_scale": True, "with_dk_scale": True}
BACKWARD = {**BOTH, **WANTED, "has_q": True, "has_k": True}
TABLES = {"has_positions": False, "has_frequencies": False, "has_cos": True, "has_sin": True}
NO_NORM = {"norm": "none", "has_q_scale": False, "has_k_scale": False}
OPERANDS = (Q, K, SCALES, SCALE, POSITIONS, FREQUENCIES)
GRADIENTS = (Q, K, SCALES, SCALE)

# Of the one array of q, k and v.
QKV, V = struct(BATCH, TOKENS, HEADS + 2 * KEYS, COLS), K
PACKED = without(BOTH, "heads_axis") | {"heads": np.int64(HEADS), "kv_heads": np.int64(KEYS)}
PACKED_FORWARD = {**PACKED, "epsilon": np.float32(1e-6), "with_v": True}
PACKED_WANTED = {"with_dqkv": True, "with_dq_scale": True, "with_dk_scale": True}
PACKED_BACKWARD = {**PACKED, **PACKED_WANTED, "has_qkv": True, "has_dv_out": True}
PACKED_OPERANDS = (QKV, SCALES, SCALE, POSITIONS, FREQUENCIES)
PACKED_GRADIENTS = (QKV, SCALES, SCALE)


def forward(operands=OPERANDS, results=(Q, K, *STATISTICS), **changes):
    return call(FWD, list(results), operands, FORWARD | changes)


def backward(operands=(Q, *OPERANDS, *STATISTICS, K), results=GRADIENTS, extra=None, **changes):
    return call(BWD, [*results, *(WORKSPACE if extra is None else extra)], operands, BACKWARD | changes)


def packed_forward(operands=PACKED_OPERANDS, results=(Q, K, V, *STATISTICS), **changes):
    return call(PACKED_FWD, list(results), operands, PACKED_FORWARD | changes)


def packed_backward(operands=(Q, *PACKED_OPERANDS, *STATISTICS, K, V), results=PACKED_GRADIENTS, **changes):
    return call(PACKED_BWD, [*results, *WORKSPACE], operands, PACKED_BACKWARD | changes)


def replaced(index, by, of=OPERANDS):
    return (*of[:index], by, *of[index + 1 :])


def saved(*operands, statistics=STATISTICS):
    return (Q, *operands, *statistics, K)


def transposed(array):
    return struct(array.shape[0], array.shape[2], array.shape[1], *array.shape[3:], dtype=array.dtype)


def test_calls_as_they_should_be():
    assert len(forward()) == 4
    assert len(forward(results=[Q, K])) == 2
    assert len(forward(results=[Q, K, Q_RSTD, Q_RSTD, K_RSTD, K_RSTD], norm="layer")) == 6
    assert len(forward((*OPERANDS[:4], TABLE, TABLE), **TABLES)) == 4
    assert len(forward((Q, K, POSITIONS, FREQUENCIES), [Q, K], **NO_NORM)) == 2
    heads_first = [transposed(array) for array in (Q, K)]
    assert len(forward((*heads_first, *OPERANDS[2:]), heads_first, heads_axis=np.int64(-3))) == 2
    assert len(backward()) == 4 + len(WORKSPACE)
    assert len(backward((Q, POSITIONS, FREQUENCIES, K), [Q, K], has_q=False, has_k=False, **without_scales())) >= 2
    assert len(backward(results=[SCALE], with_dq=False, with_dk=False, with_dq_scale=False)) == 1 + len(WORKSPACE)


def test_packed_calls_as_they_should_be():
    assert len(packed_forward()) == 5
    assert len(packed_forward(results=[Q, K], with_v=False)) == 2
    assert len(packed_forward(results=[Q, K, V, Q_RSTD, Q_RSTD, K_RSTD, K_RSTD], norm="layer")) == 7
    assert len(packed_forward((*PACKED_OPERANDS[:3], TABLE, TABLE), **TABLES)) == 5
    assert len(packed_forward((QKV, POSITIONS, FREQUENCIES), [Q, K, V], **NO_NORM)) == 3
    assert len(packed_backward()) == 3 + len(WORKSPACE)
    assert len(packed_backward((Q, *PACKED_OPERANDS, *STATISTICS, K), has_dv_out=False)) == 3 + len(WORKSPACE)
    assert len(packed_backward(results=[SCALE], with_dqkv=False, with_dq_scale=False)) == 1 + len(WORKSPACE)
    no_norm = {"has_qkv": False, **without_scales()}
    assert len(packed_backward((Q, POSITIONS, FREQUENCIES, K, V), [QKV], **no_norm)) >= 1


def without_scales():
    return {**NO_NORM, "with_dq_scale": False, "with_dk_scale": False}


MALFORMED_FORWARD = {
    "another norm": ({"norm": "batch"}, "norm is none of"),
    "a head's elements as heads": ({"heads_axis": np.int64(-1)}, "axis of heads"),
    "no such axis": ({"heads_axis": np.int64(-5)}, "axis of heads"),
    "other axes of heads": ({"heads_axis": np.int64(-3)}, "k is"),
    "k of fewer tokens": ({"operands": replaced(1, struct(BATCH, TOKENS - 1, KEYS, COLS))}, "k is"),
    "k of another rank": ({"operands": replaced(1, struct(TOKENS, KEYS, COLS))}, "one rank"),
    "k of another dtype": ({"operands": replaced(1, struct(*K.shape, dtype=BF16))}, "k is BF16"),
    "long heads": (
        {
            "operands": (*[struct(BATCH, TOKENS, n, 520) for n in (HEADS, KEYS)], *[struct(520)] * 2, *OPERANDS[4:]),
            "results": [struct(BATCH, TOKENS, n, 520) for n in (HEADS, KEYS)],
        },
        "at most 512",
    ),
    "odd rotary_dim": ({"rotary_dim": np.int64(7)}, "rotary_dim is 7"),
    "no rotary_dim": ({"rotary_dim": np.int64(0)}, "rotary_dim is 0"),
    "long rotary_dim": ({"rotary_dim": np.int64(COLS + 2)}, "rotary_dim is 18"),
    "scale of k's heads": ({"operands": replaced(2, struct(KEYS, COLS))}, "q_scale"),
    "scale without a norm": ({"norm": "none"}, "there is a scale and no norm"),
    "positions for each head": ({"operands": replaced(4, struct(BATCH, TOKENS, HEADS))}, "positions"),
    "positions of other tokens": ({"operands": replaced(4, struct(1, TOKENS - 1))}, "positions"),
    "positions and tables": ({"has_cos": True, "has_sin": True}, "or there are both"),
    "one table": ({**TABLES, "has_sin": False}, "neither positions"),
    "whole tables": ({"operands": (*OPERANDS[:4], *[struct(BATCH, TOKENS, COLS)] * 2), **TABLES}, "cos"),
    "tables that differ": (
        {"operands": (*OPERANDS[:4], TABLE, struct(1, TOKENS, PAIRS)), **TABLES},
        "different shapes",
    ),
    "result of another dtype": ({"results": [struct(*Q.shape, dtype=BF16), K]}, "q_out is BF16"),
    "k_out without a head": ({"results": [Q, struct(BATCH, TOKENS, KEYS - 1, COLS)]}, "k_out"),
    "statistics without a norm": (
        {"operands": (Q, K, POSITIONS, FREQUENCIES), "norm": "none", "has_q_scale": False, "has_k_scale": False},
        "results",
    ),
    "scalars": ({"operands": (struct(),) * 6, "results": [struct()] * 2}, "axes"),
}
MALFORMED_BACKWARD = {
    "no q": ({"operands": saved(*OPERANDS[1:]), "has_q": False}, "q or k is missing"),
    "q of another dtype": ({"operands": saved(*replaced(0, struct(*Q.shape, dtype=BF16)))}, "q is BF16"),
    "half rstd": ({"operands": saved(*OPERANDS, statistics=(struct(*Q_RSTD.shape, dtype=BF16), K_RSTD))}, "q_rstd"),
    "dk_out of q's heads": ({"operands": (Q, *OPERANDS, *STATISTICS, Q)}, "k is"),
    "gradient of no scale": (
        {"operands": saved(Q, K, SCALE, POSITIONS, FREQUENCIES), "has_q_scale": False},
        "there is no scale",
    ),
    "dq of another dtype": ({"results": replaced(0, struct(*Q.shape, dtype=BF16), GRADIENTS)}, "dq is BF16"),
    "dq_scale of one head": ({"results": replaced(2, SCALE, GRADIENTS)}, "dq_scale"),
    "long dk_scale": ({"results": replaced(3, struct(COLS + 1), GRADIENTS)}, "dk_scale"),
}

MALFORMED_PACKED_FORWARD = {
    "no heads axis": ({"operands": (struct(COLS), *PACKED_OPERANDS[1:])}, "expected an axis of so many"),
    "fewer heads": ({"heads": np.int64(HEADS - 1)}, "qkv is"),
    "more heads of k": ({"kv_heads": np.int64(KEYS + 1)}, "qkv is"),
    "heads below zero": ({"heads": np.int64(-HEADS)}, "are -6 and twice 3"),
    "heads beyond all bounds": ({"kv_heads": np.int64(1 << 62)}, "expected an axis of so many"),
    "long heads": (
        {
            "operands": (struct(*QKV.shape[:-1], 520), *[struct(520)] * 2, *PACKED_OPERANDS[3:]),
            "results": [struct(BATCH, TOKENS, n, 520) for n in (HEADS, KEYS, KEYS)],
        },
        "at most 512",
    ),
    "scale of all heads": ({"operands": replaced(1, struct(HEADS + 2 * KEYS, COLS), PACKED_OPERANDS)}, "q_scale"),
    "k_out of q's heads": ({"results": [Q, Q, V, *STATISTICS]}, "k_out"),
    "v_out of q's heads": ({"results": [Q, K, Q, *STATISTICS]}, "v_out"),
    "v_out of another dtype": ({"results": [Q, K, struct(*V.shape, dtype=BF16), *STATISTICS]}, "v_out is BF16"),
    "v_out that is not wanted": ({"results": [Q, K, V], "with_v": False}, "q_rstd"),
}
MALFORMED_PACKED_BACKWARD = {
    "no qkv": ({"operands": (Q, *PACKED_OPERANDS[1:], *STATISTICS, K, V), "has_qkv": False}, "is missing"),
    "qkv without v": (
        {"operands": (Q, struct(BATCH, TOKENS, HEADS + KEYS, COLS), *PACKED_OPERANDS[1:], *STATISTICS, K, V)},
        "qkv is",
    ),
    "dq_out of all heads": ({"operands": (QKV, *PACKED_OPERANDS, *STATISTICS, K, V)}, "dq_out"),
    "dk_out of q's heads": ({"operands": (Q, *PACKED_OPERANDS, *STATISTICS, Q, V)}, "dk_out"),
    "dv_out of q's heads": ({"operands": (Q, *PACKED_OPERANDS, *STATISTICS, K, Q)}, "dv_out"),
    "dv_out that nobody says there is": ({"has_dv_out": False}, "operands"),
    "dqkv without v": ({"results": (struct(BATCH, TOKENS, HEADS + KEYS, COLS), SCALES, SCALE)}, "dqkv"),
    "dqkv of another dtype": ({"results": (struct(*QKV.shape, dtype=BF16), SCALES, SCALE)}, "dqkv is BF16"),
    "dqkv that is not wanted": ({"with_dqkv": False}, "dq_scale"),
}


test_a_malformed_forward = each_is_refused(FWD, forward, MALFORMED_FORWARD)
test_a_malformed_backward = each_is_refused(BWD, backward, MALFORMED_BACKWARD)
test_a_malformed_packed_forward = each_is_refused(PACKED_FWD, packed_forward, MALFORMED_PACKED_FORWARD)
test_a_malformed_packed_backward = each_is_refused(PACKED_BWD, packed_backward, MALFORMED_PACKED_BACKWARD)
