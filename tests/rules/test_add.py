"""Sums: unit outputs, true derivatives, broadcast operands."""

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from unitscale import rules


def test_default_shares_one_factor() -> None:
    factors = rules.add()
    assert (factors.fwd, *factors.bwd) == (math.sqrt(0.5),) * 3


def test_is_unit_and_broadcast_gradients_too(assert_unit) -> None:
    rows, columns = 30, 50
    factors = rules.add(right_repeats=rows, constraint=None)

    def trial(rng):
        x, g = rng.standard_normal((2, 8, rows, columns))
        y = rng.standard_normal((8, 1, columns))
        return factors.fwd * (x + y), factors.bwd[0] * g, factors.bwd[1] * g.sum(1)

    assert_unit(trial, trials=200)


# The means of the factors 2^-1/2 (output), 4^-1/2 (left) and 9^-1/2 (right).
CONSTRAINTS = {
    "to_output_scale": 0.5**0.5,
    "to_left_grad_scale": 1 / 2,
    "to_right_grad_scale": 1 / 3,
    "gmean": (0.5**0.5 / 6) ** (1 / 3),
    "hmean": 3 / (2**0.5 + 2 + 3),
    "amean": (0.5**0.5 + 1 / 2 + 1 / 3) / 3,
}


@pytest.mark.parametrize("constraint", [*CONSTRAINTS, None])
def test_a_constraint_binds_a_broadcast_operand(constraint) -> None:
    factors = rules.add(left_repeats=4, right_repeats=9, constraint=constraint)
    want = (CONSTRAINTS[constraint],) * 3 if constraint else (0.5**0.5, 1 / 2, 1 / 3)
    assert (factors.fwd, *factors.bwd) == pytest.approx(want, rel=1e-15)


weight = st.floats(-100, 100).filter(lambda w: w == 0 or abs(w) > 1e-3)


@given(st.lists(weight, min_size=1, max_size=5).filter(any))
def test_weighted_add_has_unit_weights_and_the_true_derivative(weights) -> None:
    normalized = rules.normalized_weights(tuple(weights))
    assert math.fsum(w**2 for w in normalized) == pytest.approx(1, rel=1e-12)
    factors = rules.weighted_add(weights)
    assert factors.bwd == (factors.fwd,) * len(weights)
    np.testing.assert_allclose(normalized, np.multiply(weights, factors.fwd), rtol=1e-14)


@pytest.mark.parametrize("weights", [(), (0.0, 0.0), (1.0, float("inf")), (float("nan"),)])
def test_weighted_add_rejects_weights_without_a_norm(weights) -> None:
    with pytest.raises(ValueError, match="finite and not all zero"):
        rules.weighted_add(weights)
