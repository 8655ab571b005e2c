"""Gates and recurrent cells against NumPy, with the true derivative everywhere."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.refusals import refuses
from unitscale import ops, rules
from unitscale.core import ScaledArray

from .conformance import assert_scales_are_constants, assert_unit, case, in_every_dtype, normal

TANH = rules.elementwise(jnp.tanh).fwd
GLU = rules.glu(jax.nn.sigmoid).fwd
SHAPE = (3, 4)
UPDATE = rules.gated_update()
SUM = rules.gated_sum()


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def update(state, candidate, gate, weight=UPDATE):
    return sigmoid(gate) * state + (1 - sigmoid(gate)) * weight * candidate


def gated_sum(state, candidate, forget, input_gate):
    return sigmoid(forget) * state + sigmoid(input_gate) * SUM * candidate


def gru(state, x, h):
    (x_r, x_z, x_n), (h_r, h_z, h_n) = np.split(x, 3, -1), np.split(h, 3, -1)
    r = GLU * sigmoid((x_r + h_r) / 2**0.5)
    candidate = TANH * np.tanh((x_n + r * h_n) / 2**0.5)
    return update(state, candidate, (x_z + h_z) / 2**0.5, rules.gated_update(reset=True))


def lstm(cell, x, h):
    i, f, g, o = np.split((x + h) / 2**0.5, 4, -1)
    cell = gated_sum(cell, TANH * np.tanh(g), f, i)
    return np.concatenate([cell, GLU * sigmoid(o) * TANH * np.tanh(cell)], -1)


def highway(state, x, h):
    gate, candidate = np.split((x + h) / 2**0.5, 2, -1)
    return update(state, TANH * np.tanh(candidate), gate, rules.gated_update(period=3))


def simple(state, x, h):
    return TANH * np.tanh((x + h) / 2**0.5)


def simple_residual(state, x, h):
    return TANH * np.tanh((x + h + state) / 3**0.5)


def deeper(state, h):
    gate, candidate = np.split(h, 2, -1)
    return update(state, TANH * np.tanh(candidate), gate, rules.gated_update(1.0, period=3))


def _joined(cell, x, h):
    cell, hidden = ops.lstm(cell, x, h)
    return ScaledArray(jnp.concatenate([cell.data, hidden.data], -1), cell.scale)


# op, reference, shapes of the operands, how many more roundings its chain has than one op
CASES = {
    "gated_update": (ops.gated_update, update, (SHAPE,) * 3, 1),
    "gated_sum": (ops.gated_sum, gated_sum, (SHAPE,) * 4, 1),
    "gru": (ops.gru, gru, (SHAPE, (3, 12), (3, 12)), 6),
    "lstm": (_joined, lstm, (SHAPE, (3, 16), (3, 16)), 6),
    "highway": (lambda s, x, h: ops.highway(s, h, x, depth=3), highway, (SHAPE, (3, 8), (3, 8)), 6),
    "simple": (ops.simple_rnn, simple, (SHAPE,) * 3, 3),
    "residual": (
        functools.partial(ops.simple_rnn, residual=True),
        simple_residual,
        (SHAPE,) * 3,
        3,
    ),
    "deeper": (lambda s, h: ops.highway(s, h, depth=3), deeper, (SHAPE, (3, 8)), 6),
}


TRUE = {
    name: case(
        op,
        reference,
        normal(name, *shapes),
        fwd=1.0,
        bwd=(1.0,) * len(shapes),
        slack=slack,
        transforms=("jit", "vmap", "scan", "checkpoint"),
    )
    for name, (op, reference, shapes, slack) in CASES.items()
}
test_value_and_true_gradients = in_every_dtype(TRUE)


@pytest.mark.parametrize("name", ["gated_sum", "gru", "lstm", "highway", "residual"])
def test_scales_are_folded_into_a_state_without_one(name) -> None:
    op, _, args = TRUE[name].args
    scales = (0.25, 4.0, 0.5, 2.0)[: len(args)]
    TRUE[name](scales=scales)
    operands = [
        ScaledArray(jnp.asarray(a, jnp.float32), jnp.float32(s))
        for a, s in zip(args, scales, strict=True)
    ]
    assert jax.jit(lambda *a: op(*a))(*operands).scale is None
    assert_scales_are_constants(op, *operands)


def test_a_gate_that_is_shut_keeps_the_state_and_an_open_one_takes_the_candidate() -> None:
    state, candidate = jnp.float16([1.5, -2.0]), jnp.float16([0.5, 0.25])
    shut, opened = (jnp.full(2, g, jnp.float16) for g in (60.0, -60.0))
    np.testing.assert_array_equal(ops.gated_update(state, candidate, shut).data, state)
    found = ops.gated_update(state, candidate, opened).data
    np.testing.assert_array_equal(found, (candidate.astype(jnp.float32) * UPDATE).astype("float16"))
    # 1 - sigmoid(20) is 0 in float32, its true value 2e-9 is not.
    tiny = ops.gated_update(jnp.zeros(1), jnp.ones(1), jnp.full(1, 20.0))
    assert float(tiny.data[0]) == pytest.approx(UPDATE * np.exp(-20.0), rel=1e-5)


def test_a_simple_network_of_any_activation_is_unit() -> None:
    for f in (jnp.tanh, jnp.sin):
        for residual in (False, True):
            assert_unit(
                lambda *a, f=f, r=residual: ops.simple_rnn(*a, activation=f, residual=r),
                *((64, 64),) * 3,
                unit=(True, False, False, False),
            )


def test_sigmoid_glu_is_unit() -> None:
    assert_unit(lambda *a: ops.sigmoid_glu(*a), (64, 64), (64, 64), unit=(True, True, False))


ERRORS = [
    (ValueError, lambda x: ops.gated_update(x, x, x[:1]), r"gated_update: .*gate \(1, 4\)"),
    (ValueError, lambda x: ops.gated_sum(x, x, x, x, share=3.0), r"share must be in \(0, 1\]"),
    (ValueError, lambda x: ops.gru(x, x, x), r"ops\.gru: x must be \(\.\.\., 3 \* features\)"),
    (ValueError, lambda x: ops.lstm(x, x, x), r"ops\.lstm: x must be \(\.\.\., 4 \* features"),
    (
        ValueError,
        lambda x: ops.simple_rnn(x, x[:1], x),
        r"simple_rnn: x must be \(\.\.\., features",
    ),
    (ValueError, lambda x: ops.highway(x, x), r"ops\.highway: h must be \(\.\.\., 2 \* feat"),
    (TypeError, lambda x: ops.gated_update(x > 0, x, x), "state must be a floating array"),
    (ValueError, lambda x: ops.sigmoid_glu(x, x[:1]), r"ops\.sigmoid_glu: .*same shape"),
]
test_errors = refuses(ERRORS, jnp.ones((2, 4)))


def test_a_simple_network_has_no_residual_by_default() -> None:
    state, x, h = (jnp.asarray(a, jnp.float32) for a in normal("default", *[(2, 8)] * 3))
    np.testing.assert_array_equal(
        ops.simple_rnn(state, x, h).value, ops.simple_rnn(state, x, h, residual=False).value
    )
