"""Dropout: unit output and gradient on top of inverse scaling."""

import pytest

from unitscale import rules


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9])
def test_is_unit(rate, assert_unit) -> None:
    factors = rules.dropout(rate)

    def trial(rng):
        x, g = rng.standard_normal((2, 10000))
        kept = (rng.random(10000) >= rate) / (1 - rate)
        return factors.fwd * x * kept, factors.bwd[0] * g * kept

    assert_unit(trial)
    assert factors.fwd == factors.bwd[0]


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5, float("nan")])
def test_rejects_rates_outside_the_interval(rate) -> None:
    with pytest.raises(ValueError, match=r"rate must be in \[0, 1\)"):
        rules.dropout(rate)


def test_rejects_an_array_of_rates() -> None:
    with pytest.raises(TypeError, match="rate must be a static real number"):
        rules.dropout([0.1, 0.2])
