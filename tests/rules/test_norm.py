"""Norm layers: unit input, gain and bias gradients."""

import pytest

from unitscale import rules


@pytest.mark.parametrize("centre", [True, False])
def test_gradients_are_unit(centre, assert_unit) -> None:
    rows, features = 40, 200
    factors = rules.norm(features, rows * features)

    def trial(rng):
        x, g = rng.standard_normal((2, rows, features))
        if centre:
            x = x - x.mean(-1, keepdims=True)
        rms = (x**2).mean(-1, keepdims=True) ** 0.5
        y = x / rms
        dx = g - (g.mean(-1, keepdims=True) if centre else 0) - y * (g * y).mean(-1, keepdims=True)
        return (
            factors.fwd * y,
            factors.bwd[0] * dx / rms,
            factors.bwd[1] * (g * y).sum(0),
            factors.bwd[2] * g.sum(0),
        )

    # Two directions of each row carry no gradient: the documented order 1 / features.
    assert_unit(trial, trials=200, bias=3 / features)


def test_size_must_hold_whole_rows() -> None:
    with pytest.raises(ValueError, match="size must be a multiple of features"):
        rules.norm(64, 100)
