"""Moments of the softmax of normal logits."""

import numpy as np
import pytest

from unitscale.rules._normalization import (
    causal_softmax_moments,
    moments_by_size,
    softmax_moments,
)


def simulate(size: int, spread: float, rows: int) -> np.ndarray:
    z = spread * np.random.default_rng(size).standard_normal((rows, size))
    p = np.exp(z - z.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    square = (p**2).sum(-1)
    return np.stack([square, square - 2 * (p**3).sum(-1) + square**2])


@pytest.mark.parametrize("size", [2, 3, 64, 2000])
@pytest.mark.parametrize("spread", [0.01, 0.3, 1.0, 4.0, 16.0])
def test_agrees_with_simulation(size, spread) -> None:
    rows = 500_000 // (size + 20)
    samples = simulate(size, spread, rows)
    error = samples.std(-1) / rows**0.5
    assert (
        np.abs(np.array(softmax_moments(size, spread)) - samples.mean(-1)) <= 5 * error + 1e-12
    ).all()


def test_two_logits_agree_with_one_dimensional_quadrature() -> None:
    x, w = np.polynomial.hermite_e.hermegauss(200)
    w = w / w.sum()
    p = 1 / (1 + np.exp(-np.sqrt(2) * x))
    square = p**2 + (1 - p) ** 2
    gradient = square - 2 * (p**3 + (1 - p) ** 3) + square**2
    assert softmax_moments(2, 1.0) == pytest.approx((w @ square, w @ gradient), rel=1e-9)


def test_small_spread_tends_to_uniform_and_single_is_one() -> None:
    square, gradient = softmax_moments(50, 1e-6)
    assert square == pytest.approx(1 / 50, rel=1e-9)
    assert gradient == pytest.approx(1 / 50 - 1 / 50**2, rel=1e-9)
    assert softmax_moments(1, 3.0) == pytest.approx((1.0, 0.0), rel=1e-12)


def test_asymptote_continues_the_exact_values() -> None:
    sizes = np.array([2, 64, 4096])
    at, beyond, limit = (moments_by_size(sizes, spread) for spread in (24.0, 24.0001, 1e9))
    np.testing.assert_allclose(at, beyond, rtol=1e-4)
    np.testing.assert_allclose(limit[0], 1, atol=1e-6)


@pytest.mark.parametrize("spread", [0.1, 1.0, 3.0])
def test_causal_average_is_the_mean_over_rows(spread) -> None:
    """Sizes together have the moments that each has alone, on a grid of its own."""
    rows = np.array(moments_by_size(np.arange(1, 701), spread))
    alone = [softmax_moments(size, spread) for size in (1, 2, 65, 700)]
    np.testing.assert_allclose(rows[:, [0, 1, 64, 699]].T, alone, rtol=1e-9, atol=1e-12)
    for length in (1, 2, 64, 65, 700):
        found = causal_softmax_moments(length, spread)
        np.testing.assert_allclose(found, rows[:, :length].mean(1), rtol=1e-5, atol=1e-12)
