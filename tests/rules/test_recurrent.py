"""Recurrences: the weights make the state that they assume unit, and depend on what they should."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale import rules

TANH = rules.elementwise(jnp.tanh).fwd
WIDTH, STEPS, WARM = 256, 40, 20


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


SECOND = float(np.mean(sigmoid(np.random.default_rng(0).standard_normal(1_000_000)) ** 2))


@pytest.mark.parametrize("kind", ["update", "reset", "sum", "repeated"])
def test_the_stationary_state_is_unit(kind, assert_unit) -> None:
    """One wide layer with random kernels, and gates drawn afresh at each step, as derived."""
    weight, period = {
        "update": (rules.gated_update(), 1),
        "reset": (rules.gated_update(reset=True), 1),
        "sum": (rules.gated_sum(), 1),
        "repeated": (rules.gated_update(period=2), 2),
    }[kind]

    def trial(rng):
        kernels = rng.standard_normal((period, WIDTH, WIDTH)) / WIDTH**0.5
        state, kept = np.zeros((4, WIDTH)), []
        for step in range(STEPS):
            x, gate, other = rng.standard_normal((3, 4, WIDTH))
            h = state @ kernels[step % period]
            if kind == "reset":
                h = h * sigmoid(other) / SECOND**0.5
            candidate = TANH * np.tanh((x + h) / 2**0.5)
            taken = sigmoid(other) if kind == "sum" else 1 - sigmoid(gate)
            state = sigmoid(gate) * state + weight * taken * candidate
            if step >= WARM:
                kept.append(state)
        return (np.stack(kept),)

    # Finite width: the square of a state of 256 units, on which every later step depends, is
    # 2 / 256 wide, and the tanh is concave in it.
    # The correlation of candidates that a gate has made a mixture (a 25th smaller) is a normal's in
    # the rule; it makes up a quarter of the variance, and the candidate's argument feeds it back.
    mixture = 2 / 25 / 4 if kind == "reset" else 0.0
    assert_unit(trial, trials=24, bias=2 * 2 / WIDTH + mixture)


def test_more_correlation_makes_the_weight_smaller() -> None:
    independent = (1 / SECOND - 1) ** 0.5
    weights = [
        rules.gated_update(1e-6),
        rules.gated_update(0.5, reset=True),
        rules.gated_update(0.5),
        rules.gated_update(1.0),
    ]
    assert weights == sorted(weights, reverse=True)
    assert weights[0] == pytest.approx(independent, rel=2e-3)  # of the sampled moment
    assert rules.gated_update(0.5, period=8) == pytest.approx(weights[0], rel=2.0**-7)


def test_rules_inside_a_trace_are_static_numbers() -> None:
    assert isinstance(rules.gated_update(0.25), float)
    inside = []
    jax.jit(lambda x: inside.append(rules.gated_update(0.3)) or x)(1.0)
    assert inside == [rules.gated_update(0.3)]


def test_recurrent_kernel() -> None:
    assert rules.recurrent_kernel(9) == rules.Factors(1.0, (1 / 3,))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rules.gated_update(0.0), r"rules\.gated_update: share must be positive"),
        (lambda: rules.gated_update(1.5), r"rules\.gated_update: share must be in \(0, 1\]; got"),
        (lambda: rules.gated_update(period=0), r"period must be at least 1"),
        (lambda: rules.gated_sum(2.0), r"rules\.gated_sum: share must be in"),
        (lambda: rules.recurrent_kernel(0), r"steps must be at least 1"),
    ],
)
def test_errors(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call()
