"""The record of factors: frozen, hashable, validated."""

import dataclasses

import numpy as np
import pytest

from unitscale.rules import Factors


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
