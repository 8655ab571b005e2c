"""Sums: add, weighted add, residual branches, fan-out, and the gates of recurrent cells."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.batching import compute
from unitscale import ops, rules
from unitscale.core import ScaledArray

from .conformance import (
    case,
    check_all,
    in_every_dtype,
    linear,
    normal,
    pulled,
    scaled,
    under_scales,
)

HALF = 0.5**0.5
TAU = 0.75  # weights 0.6 and 0.8
TANH, GLU = rules.elementwise(jnp.tanh).fwd, rules.glu(jax.nn.sigmoid).fwd
UPDATE, SUM = rules.gated_update(), rules.gated_sum()
PAIR = normal("add", (3, 4), (3, 4))
SHAPE = (3, 4)


def sigmoid(x):
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


def deeper(state, h):
    gate, candidate = np.split(h, 2, -1)
    return update(state, TANH * np.tanh(candidate), gate, rules.gated_update(1.0, period=3))


def joined(cell, x, h):
    cell, hidden = ops.lstm(cell, x, h)
    return ScaledArray(jnp.concatenate([cell.data, hidden.data], -1), cell.scale)


residual_rnn = functools.partial(ops.simple_rnn, residual=True)
# op, reference, shapes of the operands, how many more roundings its chain has than one op
CELLS = {
    "gated_update": (ops.gated_update, update, (SHAPE,) * 3, 1),
    "gated_sum": (ops.gated_sum, gated_sum, (SHAPE,) * 4, 1),
    "gru": (ops.gru, gru, (SHAPE, (3, 12), (3, 12)), 6),
    "lstm": (joined, lstm, (SHAPE, (3, 16), (3, 16)), 6),
    "highway": (lambda s, x, h: ops.highway(s, h, x, depth=3), highway, (SHAPE, (3, 8), (3, 8)), 6),
    "deeper": (lambda s, h: ops.highway(s, h, depth=3), deeper, (SHAPE, (3, 8)), 6),
    "simple": (
        ops.simple_rnn,
        lambda state, x, h: TANH * np.tanh((x + h) / 2**0.5),
        (SHAPE,) * 3,
        3,
    ),
    "simple, residual": (
        residual_rnn,
        lambda state, x, h: TANH * np.tanh((x + h + state) / 3**0.5),
        (SHAPE,) * 3,
        3,
    ),
}
SUMS = {
    "add": linear(ops.add, np.add, PAIR, fwd=HALF, bwd=(HALF, HALF)),
    "weighted_add": linear(
        functools.partial(ops.weighted_add, weights=(3, -4)),
        lambda x, y: 3 * x - 4 * y,
        PAIR,
        fwd=0.2,
        bwd=(0.2, 0.2),
    ),
    # Forward weights 0.6 and 0.8; backward the identity, which is the derivative without them.
    "residual_add": linear(
        functools.partial(ops.residual_add, tau=TAU),
        lambda branch, skip: 0.6 * branch + 0.8 * skip,
        PAIR,
        fwd=1.0,
        bwd=(1 / 0.6, 1 / 0.8),
    ),
}
SPLITS = {
    f"part {i} of residual_split": linear(
        lambda x, i=i: ops.residual_split(x, TAU)[i], lambda x: x, PAIR[:1], fwd=1.0, bwd=(weight,)
    )
    for i, weight in enumerate((0.6, 0.8))
}
RESIDUAL = case(
    lambda x: ops.residual(ops.tanh, x, TAU),
    lambda x: 0.6 * TANH * np.tanh(x) + 0.8 * x,
    PAIR[:1],
    fwd=1.0,
    bwd=(1.0,),
    # Two roundings of the branch, two of the gradients and one of their sum.
    slack=2,
)
FAN_OUT = case(
    lambda x: (lambda q, k, v: q.value * 2.0 + k.value * jnp.sin(v.value))(*ops.fan_out(x, 3)),
    lambda x: x * 2.0 + x * np.sin(x),
    PAIR[:1],
    fwd=1.0,
    bwd=(1.0,),
    slack=4,
)
TRUE = {
    name: case(op, reference, normal(name, *shapes), fwd=1.0, bwd=(1.0,) * len(shapes), slack=slack)
    for name, (op, reference, shapes, slack) in CELLS.items()
}
test_value_and_gradients = in_every_dtype(
    SUMS | SPLITS | TRUE | {"residual": RESIDUAL, "fan_out": FAN_OUT},
    mapped=("add", "residual", "fan_out", "gated_sum", "lstm"),
    wide=("deeper", "simple, residual"),
)
SCALED = [
    (None, 8.0),
    (3.0, 0.7),
    (np.array([1, 2, 4, 8], np.float32), np.array([[16], [1], [0.5]], np.float32)),
]
test_scales_meet = under_scales(SCALED, {k: SUMS[k] for k in ("add", "weighted_add")})
test_scales_of_residuals = under_scales(
    [(8.0, 8.0), (4.0, 2.0**-12)], {"add": SUMS["residual_add"], "residual": RESIDUAL, **SPLITS}
)


def test_scales_are_folded_into_a_state_without_one() -> None:
    scales = (0.25, 4.0, 0.5, 2.0)
    names = ("gated_sum", "gru", "lstm", "highway", "simple, residual")
    under_scales([scales], {name: TRUE[name] for name in names})()
    for name in names:
        op, _, args = TRUE[name].args
        assert jax.eval_shape(op, *scaled(args, scales[: len(args)])).scale is None


# The means of the factors 2^-1/2 (output), 1 and 1 (both gradients).
CONSTRAINTS = {
    "to_output_scale": HALF,
    "to_right_grad_scale": 1.0,
    "gmean": 2 ** (-1 / 6),
    None: None,
}


def test_constraint_and_broadcasts() -> None:
    """Broadcasting changes factors only without a constraint."""
    cases = {
        how: linear(
            functools.partial(ops.add, constraint=how),
            np.add,
            PAIR,
            fwd=shared or HALF,
            bwd=(shared or 1.0,) * 2,
        )
        for how, shared in CONSTRAINTS.items()
    }
    for shapes in (((2, 3, 4), (4,)), ((1, 3, 1), (2, 1, 4)), ((1,), (3, 4))):
        size = np.prod(np.broadcast_shapes(*shapes))
        for how in ("to_output_scale", None):
            bwd = [HALF if how else (np.prod(s) / size) ** 0.5 for s in shapes]
            op = functools.partial(ops.add, constraint=how)
            cases[how, shapes] = linear(op, np.add, normal("add", *shapes), fwd=HALF, bwd=bwd)
    check_all(cases)


NUMBERS = {
    "int": lambda x: ops.add(3, x),
    "float32": lambda x: ops.add(np.float32(3), x),
    "int64": lambda x: ops.add(x, np.int64(3)),
}
test_a_number_is_added_as_it_is = under_scales(
    [(None,), (np.float32([[1], [2], [4]]),)],
    {k: linear(op, lambda x: x + 3, PAIR[:1], fwd=1.0, bwd=(1.0,)) for k, op in NUMBERS.items()},
)


def test_gradients_inside_the_branch_do_not_see_tau() -> None:
    x, w = (np.float32(a) for a in normal("branch", (8, 4), (4, 4)))

    def run(tau, x, w):
        whole = pulled(lambda w: ops.residual(lambda x: ops.dense(x, w), x, tau), w)[1]
        parts = [y.value for y in (*ops.residual_split(x, tau), ops.residual_add(x, x, tau))]
        return whole, pulled(lambda x: ops.residual(ops.tanh, x, tau), x)[1], parts

    # Factors that are arrays, as those of a layer in a scan, are those that are numbers.
    arrays = tuple(np.float32([0.6, 0.8]))
    alone, small, *both = compute(
        {
            "alone": (lambda x, w: pulled(lambda w: ops.dense(x, w), w)[1], x, w),
            "small": (functools.partial(run, 0.01), x, w),
            "numbers": (functools.partial(run, TAU), x, w),
            "arrays": (lambda fs, *a: run(rules.ResidualFactors(*fs), *a), arrays, x, w),
        }
    ).values()
    for inside in (small, *both):
        np.testing.assert_allclose(inside[0][0], alone[0], rtol=1e-6)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), *both)


def test_gradients_of_a_fan_out_are_added_in_order_and_saturate() -> None:
    """Sum three numbers whose result depends on the order, as 2^24 + 1 is 2^24 in float32."""

    @jax.jit
    def gradient(*weights):
        op = lambda x: sum(w * y.data for w, y in zip(weights, ops.fan_out(x, 3), strict=True))  # noqa: E731
        return jax.grad(op)(1.0)

    assert gradient(1.0, 1.0, 2.0**24) == 2**24 + 2
    assert gradient(2.0**24, 1.0, 1.0) == 2**24

    def of_bytes(fan, x):
        y, vjp = jax.vjp(lambda x: [e.data for e in fan(x)], x)
        return vjp([320 * x] * len(y))[0]

    fans = {"split": lambda x: ops.residual_split(x, 1.0), "fan": lambda x: ops.fan_out(x, 3)}
    one = np.ones(1, jnp.float8_e4m3fn)
    table = {name: (functools.partial(of_bytes, fan), one) for name, fan in fans.items()}
    assert [y.item() for y in compute(table).values()] == [448, 448]


def test_a_shut_gate_keeps_the_state_and_an_open_one_takes_the_candidate() -> None:
    state, candidate, gate = np.float16([[1.5, -2], [0.5, 0.25], [60, 60]])
    run = jax.jit(lambda *args: ops.gated_update(*args).data)
    np.testing.assert_array_equal(run(state, candidate, gate), state)
    found = run(state, candidate, -gate)
    np.testing.assert_array_equal(found, np.float16(np.float32(candidate) * np.float32(UPDATE)))
    # 1 - sigmoid(20) is 0 in float32, its true value 2e-9 is not.
    tiny = run(*np.float32([[0], [1], [20]]))
    assert float(tiny[0]) == pytest.approx(UPDATE * np.exp(-20.0), rel=1e-5)
