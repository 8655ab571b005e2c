"""Factors, constraints between them, and checks of arguments."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

from unitscale import rules
from unitscale.rules import Factors, constrain


def test_is_frozen_hashable_and_compares_by_value() -> None:
    factors = Factors(0.5, (0.25, 1))
    assert factors == Factors(np.float32(0.5), [0.25, 1.0])
    assert hash(factors) == hash(Factors(0.5, (0.25, 1.0)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        factors.fwd = 1.0


def test_holds_python_floats() -> None:
    factors = Factors(np.float64(0.5), (np.float32(0.25), 1))
    assert [type(factor) for factor in (factors.fwd, *factors.bwd)] == [float] * 3


@pytest.mark.parametrize("bad", [0.0, -1.0, float("inf"), float("nan")])
def test_rejects_factors_that_are_not_positive_and_finite(bad: float) -> None:
    with pytest.raises(ValueError, match="positive and finite"):
        Factors(bad, (1.0,))
    with pytest.raises(ValueError, match="positive and finite"):
        Factors(1.0, (1.0, bad))


@pytest.mark.parametrize(
    ("constraint", "factors", "expected"),
    [
        ("to_output_scale", (8.0, 2.0), 8.0),
        ("to_grad_input_scale", (8.0, 2.0), 2.0),
        ("gmean", (8.0, 2.0), 4.0),
        ("hmean", (8.0, 2.0), 3.2),
        ("amean", (8.0, 2.0), 5.0),
        ("to_output_scale", (8.0, 2.0, 4.0), 8.0),
        ("to_left_grad_scale", (8.0, 2.0, 4.0), 2.0),
        ("to_right_grad_scale", (8.0, 2.0, 4.0), 4.0),
        ("gmean", (8.0, 2.0, 4.0), 4.0),
        ("hmean", (8.0, 2.0, 4.0), 24 / 7),
        ("amean", (8.0, 2.0, 4.0), 14 / 3),
        ("amean", (8.0, 2.0, 4.0, 2.0), 4.0),
    ],
)
def test_table(constraint, factors, expected) -> None:
    assert constrain(constraint, *factors) == pytest.approx((expected,) * len(factors), rel=1e-15)


def test_none_changes_nothing() -> None:
    assert constrain(None, 8.0, 2.0, 4.0) == (8.0, 2.0, 4.0)


@given(
    st.sampled_from(["gmean", "hmean", "amean"]),
    st.lists(st.floats(1e-6, 1e6), min_size=2, max_size=4),
)
def test_means_lie_between_the_factors_and_are_shared(constraint, factors) -> None:
    shared = constrain(constraint, *factors)
    assert len(shared) == len(factors)
    assert len(set(shared)) == 1
    assert min(factors) * (1 - 1e-12) <= shared[0] <= max(factors) * (1 + 1e-12)


def test_unknown_name_lists_the_set_and_suggests_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"constraint must be one of .*got 'to_output'") as caught:
        constrain("to_output", 1.0, 1.0)
    assert "Did you mean 'to_output_scale'?" in str(caught.value)
    for name in ("to_left_grad_scale", "hmean", "None"):
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("constraint", "operands", "hint"),
    [
        ("to_grad_input_scale", 2, "use 'to_left_grad_scale' or 'to_right_grad_scale'"),
        ("to_left_grad_scale", 1, "use 'to_grad_input_scale'"),
        ("to_right_grad_scale", 1, "use 'to_grad_input_scale'"),
        ("to_right_grad_scale", 3, "use 'to_output_scale'"),
    ],
)
def test_name_for_another_number_of_operands_says_which_to_use(constraint, operands, hint) -> None:
    with pytest.raises(ValueError, match=hint):
        constrain(constraint, 1.0, *(1.0,) * operands)


def test_accepts_numpy_integers_and_floats() -> None:
    assert rules.dense(np.int32(4), np.int64(16), 1) == rules.dense(4, 16, 1)
    assert rules.residual(np.float32(0.5)) == rules.residual(0.5)


def test_traced_sizes_and_numbers_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"dense: batch must be a static integer.*Take sizes from"):
        jax.jit(lambda n: rules.dense(4, 4, n).fwd)(3)
    with pytest.raises(TypeError, match="residual: tau must be a static real number"):
        jax.jit(lambda tau: rules.residual(tau).skip)(jnp.float32(0.5))


@pytest.mark.parametrize("bad", [0, -1.0, float("inf"), float("nan")])
def test_numbers_must_be_positive_and_finite(bad) -> None:
    with pytest.raises(ValueError, match="residual: tau must be positive and finite"):
        rules.residual(bad)
