"""Moments of gates, against sampled logits and against the softmax of all."""

import numpy as np
import pytest

from unitscale.rules._normalization import gate_moments, softmax_moments

CASES = [(8, 2, 1.0), (4, 3, 1.5), (2, 1, 1.0), (40, 6, 0.5), (8, 2, 4.0)]


def sampled(experts, top_k, spread, renormalize, rng):
    """Both moments of each of many tokens."""
    logits = -np.sort(-spread * rng.standard_normal((40_000, experts)), axis=-1)
    p = np.exp(logits - logits[:, :1])
    p /= p.sum(-1, keepdims=True)
    gates = p[:, :top_k]
    if renormalize:
        gates = gates / gates.sum(-1, keepdims=True)
        p = gates
    square = (gates**2).sum(-1)
    return square, square - 2 * (gates**3).sum(-1) + (p**2).sum(-1) * square


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("experts", "top_k", "spread"), CASES)
def test_moments_are_those_of_samples(experts, top_k, spread, renormalize) -> None:
    samples = sampled(experts, top_k, spread, renormalize, np.random.default_rng(0))
    for exact, sample in zip(
        gate_moments(experts, top_k, spread, renormalize), samples, strict=True
    ):
        error = sample.std() / len(sample) ** 0.5
        assert abs(exact - sample.mean()) <= 5 * error + 1e-9
        assert error < 0.02 * sample.mean() + 1e-9


def test_gradient_is_that_of_the_softmax() -> None:
    """The second moment, from the Jacobian of the gates."""
    rng = np.random.default_rng(1)
    for renormalize in (True, False):
        logits = -np.sort(-rng.standard_normal((5, 6)), axis=-1)
        p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        gates = p[:, :2]
        if renormalize:
            gates = p = gates / gates.sum(-1, keepdims=True)
        jacobian = gates[:, :, None] * (np.eye(2, p.shape[1]) - p[:, None])
        square = (gates**2).sum(-1)
        formula = square - 2 * (gates**3).sum(-1) + (p**2).sum(-1) * square
        np.testing.assert_allclose((jacobian**2).sum((1, 2)), formula, rtol=1e-12)


@pytest.mark.parametrize("renormalize", [True, False])
def test_all_experts_are_a_softmax(renormalize) -> None:
    assert gate_moments(5, 5, 1.0, renormalize) == softmax_moments(5, 1.0)


def test_one_renormalized_gate_is_constant() -> None:
    assert gate_moments(5, 1, 1.0, True) == (1.0, 0.0)


def test_limits_of_the_spread() -> None:
    """Equal gates where logits hardly differ, one gate where they differ much."""
    small = gate_moments(8, 2, 1e-4, True)
    np.testing.assert_allclose(small, (1 / 2, 1 / 4), rtol=1e-6)
    assert gate_moments(8, 2, 24.0, True).square > 0.9
    assert gate_moments(8, 2, 1e3, True) == gate_moments(8, 2, 24.0, True)
