"""Losses: unit gradients."""

import numpy as np
import pytest

from unitscale import rules


@pytest.mark.parametrize("vocab", [2, 10, 1000])
@pytest.mark.parametrize("mult", [0.5, 1.0, 4.0])
def test_cross_entropy_gradient_is_unit_for_uniform_probabilities(vocab, mult) -> None:
    factors = rules.softmax_cross_entropy(vocab, mult=mult)
    gradient = mult * (np.full(vocab, 1 / vocab) - np.eye(vocab)[0])
    assert factors.fwd == 1.0
    assert np.sqrt(np.mean((factors.bwd[0] * gradient) ** 2)) == pytest.approx(1, rel=1e-12)


def test_cross_entropy_gradient_stays_unit_for_small_logits(assert_unit) -> None:
    vocab, spread = 64, 0.1
    factors = rules.softmax_cross_entropy(vocab)

    def trial(rng):
        z = np.exp(spread * rng.standard_normal((500, vocab)))
        return (factors.bwd[0] * (z / z.sum(-1, keepdims=True) - np.eye(vocab)[0]),)

    # p departs from uniform by spread relative to 1 / V, which adds spread^2 / V to a mean square
    # of 1 / V.
    assert_unit(trial, bias=spread**2)


def test_mse_gradient_is_unit(assert_unit) -> None:
    factors = rules.mse_loss()

    def trial(rng):
        pred, target = rng.standard_normal((2, 10000))
        difference = 2 * (pred - target)
        return factors.bwd[0] * difference, factors.bwd[1] * -difference

    assert factors.fwd == 1.0
    assert_unit(trial)


def test_errors() -> None:
    with pytest.raises(ValueError, match="vocab must be at least 2; got 1"):
        rules.softmax_cross_entropy(1)
    with pytest.raises(ValueError, match="mult must be positive and finite; got 0"):
        rules.softmax_cross_entropy(10, mult=0)
