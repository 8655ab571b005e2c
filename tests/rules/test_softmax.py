"""Softmax: exact moments of softmax and of gates, limits, and unit variance in mixtures."""

import math

import numpy as np
import pytest

from unitscale import rules
from unitscale.rules._softmax import (
    causal_softmax_moments,
    gate_moments,
    moments_by_size,
    softmax_moments,
)


def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize(("size", "mult"), [(2, 1.0), (16, 0.1), (64, 3.0), (8, 20.0)])
def test_output_and_gradient_are_unit(size, mult, assert_unit) -> None:
    factors = rules.softmax(size, mult=mult, constraint=None)

    def trial(rng):
        z, g = rng.standard_normal((2, 100_000 // size, size))
        p = softmax(mult * z)
        dx = mult * p * (g - (p * g).sum(-1, keepdims=True))
        return factors.fwd * (p - 1 / size), factors.bwd[0] * dx

    assert_unit(trial, trials=40)


def test_limits_of_softmax() -> None:
    size = 10**7
    for mult in (0.25, 1.0):
        factors = rules.softmax(size, mult=mult, constraint=None)
        # Corrections are of relative order e^(4 m^2) / n: 5e-6 here.
        expected = size / math.sqrt(math.expm1(mult**2)), size * math.exp(-(mult**2) / 2) / mult
        assert (factors.fwd, *factors.bwd) == pytest.approx(expected, rel=1e-4)
    assert rules.softmax(10, mult=1e6).fwd == pytest.approx(10 / 3, rel=1e-4)
    # Where the formula changes.
    below, above = (rules.softmax(64, mult=mult).fwd * mult for mult in (0.9999e-3, 1.0001e-3))
    assert below == pytest.approx(above, rel=2e-6)
    for constraint in (None, "to_output_scale", "gmean"):
        assert rules.softmax(1, constraint=constraint) == rules.Factors(1.0, (1.0,))


@pytest.mark.parametrize("size", [3, 64, 2000])
@pytest.mark.parametrize("spread", [0.01, 1.0, 16.0])
def test_moments_are_those_of_samples(size, spread) -> None:
    rows = 500_000 // (size + 20)
    p = softmax(spread * np.random.default_rng(size).standard_normal((rows, size)))
    square = (p**2).sum(-1)
    samples = np.stack([square, square - 2 * (p**3).sum(-1) + square**2])
    off = np.abs(np.array(softmax_moments(size, spread)) - samples.mean(-1))
    assert (off <= 5 * samples.std(-1) / rows**0.5 + 1e-12).all()


def test_exact_moments_and_their_limits() -> None:
    x, w = np.polynomial.hermite_e.hermegauss(200)
    w, p = w / w.sum(), 1 / (1 + np.exp(-np.sqrt(2) * x))
    square = p**2 + (1 - p) ** 2
    gradient = square - 2 * (p**3 + (1 - p) ** 3) + square**2
    assert softmax_moments(2, 1.0) == pytest.approx((w @ square, w @ gradient), rel=1e-9)
    assert softmax_moments(50, 1e-6) == pytest.approx((1 / 50, 1 / 50 - 1 / 50**2), rel=1e-9)
    assert softmax_moments(1, 3.0) == pytest.approx((1.0, 0.0), rel=1e-12)
    sizes = np.array([2, 64, 4096])
    at, beyond, limit = (moments_by_size(sizes, spread) for spread in (24.0, 24.0001, 1e9))
    np.testing.assert_allclose(at, beyond, rtol=1e-4)
    np.testing.assert_allclose(limit[0], 1, atol=1e-6)


@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_causal_average_is_the_mean_over_rows(spread) -> None:
    """Sizes together have the moments that each has alone, on a grid of its own."""
    rows = np.array(moments_by_size(np.arange(1, 701), spread))
    alone = [softmax_moments(size, spread) for size in (1, 2, 65, 700)]
    np.testing.assert_allclose(rows[:, [0, 1, 64, 699]].T, alone, rtol=1e-9, atol=1e-12)
    for length in (1, 65, 700):
        found = causal_softmax_moments(length, spread)
        np.testing.assert_allclose(found, rows[:, :length].mean(1), rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(
    ("experts", "top_k", "spread"), [(8, 2, 1.0), (4, 3, 1.5), (2, 1, 1.0), (40, 6, 0.5)]
)
def test_moments_of_gates_are_those_of_samples(experts, top_k, spread, renormalize) -> None:
    rng = np.random.default_rng(0)
    p = softmax(-np.sort(-spread * rng.standard_normal((40_000, experts)), axis=-1))
    gates = p[:, :top_k]
    if renormalize:
        gates = p = gates / gates.sum(-1, keepdims=True)
    square = (gates**2).sum(-1)
    # The second moment is that of the Jacobian of the gates.
    few = slice(0, 5)
    jacobian = gates[few, :, None] * (np.eye(top_k, p.shape[1]) - p[few, None])
    gradient = square - 2 * (gates**3).sum(-1) + (p**2).sum(-1) * square
    np.testing.assert_allclose((jacobian**2).sum((1, 2)), gradient[few], rtol=1e-12)
    exact = gate_moments(experts, top_k, spread, renormalize)
    for moment, sample in zip(exact, (square, gradient), strict=True):
        error = sample.std() / len(sample) ** 0.5
        assert abs(moment - sample.mean()) <= 5 * error + 1e-9
        assert error < 0.02 * sample.mean() + 1e-9


def test_limits_of_gates() -> None:
    """Equal gates where logits hardly differ, one gate where they differ much."""
    np.testing.assert_allclose(gate_moments(8, 2, 1e-4, True), (1 / 2, 1 / 4), rtol=1e-6)
    assert gate_moments(8, 2, 24.0, True).square > 0.9
    assert gate_moments(8, 2, 1e3, True) == gate_moments(8, 2, 24.0, True)
    assert gate_moments(5, 1, 1.0, True) == (1.0, 0.0)
    for renormalize in (True, False):
        assert gate_moments(5, 5, 1.0, renormalize) == softmax_moments(5, 1.0)
    for experts, top_k in ((8, 2), (5, 5), (3, 1)):
        factors = rules.mixture(experts, top_k)
        # The factor on gradients inside is divided out of the gradient of the token.
        assert factors.bwd[0] * factors.bwd[2] == pytest.approx(factors.fwd)
        assert factors.bwd[1] == factors.fwd


TOKENS, IN, OUT = 96, 24, 32


@pytest.mark.parametrize(
    ("experts", "top_k", "mult", "renormalize"),
    [(8, 2, 1.0, True), (8, 1, 1.0, False), (6, 3, 2.0, False)],
)
def test_mixture_and_router_are_unit(experts, top_k, mult, renormalize, assert_unit) -> None:
    options = {"mult": mult, "renormalize": renormalize}
    mixture = rules.mixture(experts, top_k, **options)
    router = rules.router(IN, experts, TOKENS, top_k=top_k, out_features=OUT, **options)

    def trial(rng):
        x, kernel = rng.standard_normal((TOKENS, IN)), rng.standard_normal((IN, experts))
        logits = router.fwd * x @ kernel
        chosen = np.argsort(-logits, axis=-1)[:, :top_k]
        mask = np.zeros_like(logits)
        np.put_along_axis(mask, chosen, 1.0, axis=-1)
        p = softmax(np.where(mask > 0, mult * logits, -np.inf) if renormalize else mult * logits)
        gates = p * mask
        outputs = rng.standard_normal((TOKENS, experts, OUT))
        y = mixture.fwd * np.einsum("te,teo->to", gates, outputs)
        dy = rng.standard_normal((TOKENS, OUT))
        chosen_gates = np.take_along_axis(gates, chosen, -1)
        by_output = mixture.bwd[0] * chosen_gates[..., None] * dy[:, None]
        dgates = mixture.bwd[1] * np.einsum("teo,to->te", outputs, dy) * mask
        dlogits = mult * p * (dgates - (p * dgates).sum(-1, keepdims=True))
        dkernel = router.bwd[1] * x.T @ dlogits
        copies = mixture.bwd[2] * rng.standard_normal((TOKENS, top_k, IN)).sum(1)
        return logits, y, by_output, dkernel, copies

    assert_unit(trial, trials=250)
    assert router.bwd[0] == router.fwd
