"""Norms, softmax, losses and pooling: unit variance, exact moments, limits."""

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


@pytest.mark.parametrize(
    ("size", "mult"), [(2, 1.0), (16, 0.1), (64, 1.0), (64, 3.0), (500, 2.0), (8, 20.0)]
)
def test_output_and_gradient_are_unit(size, mult, assert_unit) -> None:
    factors = rules.softmax(size, mult=mult, constraint=None)
    rows = 100_000 // size

    def trial(rng):
        z = mult * rng.standard_normal((rows, size))
        g = rng.standard_normal((rows, size))
        p = np.exp(z - z.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        dx = mult * p * (g - (p * g).sum(-1, keepdims=True))
        return factors.fwd * (p - 1 / size), factors.bwd[0] * dx

    assert_unit(trial, trials=40)


@pytest.mark.parametrize("mult", [0.25, 1.0])
def test_large_size_limits(mult) -> None:
    size = 10**7
    factors = rules.softmax(size, mult=mult, constraint=None)
    # Corrections are of relative order e^(4 m^2) / n: 5e-6 here.
    assert factors.fwd == pytest.approx(size / math.sqrt(math.expm1(mult**2)), rel=1e-4)
    assert factors.bwd[0] == pytest.approx(size * math.exp(-(mult**2) / 2) / mult, rel=1e-4)


def test_large_mult_tends_to_one_hot() -> None:
    factors = rules.softmax(10, mult=1e6)
    assert factors.fwd == pytest.approx(10 / 3, rel=1e-4)


def test_forward_is_continuous_where_the_formula_changes() -> None:
    below, above = (rules.softmax(64, mult=mult).fwd * mult for mult in (0.9999e-3, 1.0001e-3))
    assert below == pytest.approx(above, rel=2e-6)


@pytest.mark.parametrize("constraint", [None, "to_output_scale", "to_grad_input_scale", "gmean"])
def test_single_entry_has_factors_of_one(constraint) -> None:
    assert rules.softmax(1, constraint=constraint) == rules.Factors(1.0, (1.0,))


def test_constraint() -> None:
    ideal = rules.softmax(64, constraint=None)
    assert rules.softmax(64).bwd == (ideal.fwd,)
    assert rules.softmax(64, constraint="gmean").fwd == pytest.approx(
        math.sqrt(ideal.fwd * ideal.bwd[0])
    )


def test_errors() -> None:
    with pytest.raises(ValueError, match="softmax: axis_size must be at least 1"):
        rules.softmax(0)
    with pytest.raises(ValueError, match="softmax: mult must be positive"):
        rules.softmax(4, mult=-1.0)


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


def test_errors_of_loss() -> None:
    with pytest.raises(ValueError, match="vocab must be at least 2; got 1"):
        rules.softmax_cross_entropy(1)
    with pytest.raises(ValueError, match="mult must be positive and finite; got 0"):
        rules.softmax_cross_entropy(10, mult=0)


WINDOWS = [(1, 1), (2, 2), (3, 1), (3, 2), (2, 3), (4, 4)]


def windows(x: np.ndarray, window: int, stride: int) -> np.ndarray:
    """Windows over the last axis, which is cyclic: every entry is in the interior."""
    starts = np.arange(0, x.shape[-1], stride)
    return (starts[:, None] + np.arange(window)) % x.shape[-1]


@pytest.mark.parametrize(("window", "stride"), WINDOWS)
def test_mean_is_unit(window, stride, assert_unit) -> None:
    factors = rules.avg_pool((window,), (stride,), constraint=None)

    def trial(rng):
        x = rng.standard_normal((100, 24))
        index = windows(x, window, stride)
        dx, g = np.zeros_like(x), rng.standard_normal((100, len(index)))
        np.add.at(dx, (slice(None), index), g[..., None] / window)
        return factors.fwd * x[:, index].mean(-1), factors.bwd[0] * dx

    assert_unit(trial)


@pytest.mark.parametrize(("window", "stride"), WINDOWS)
def test_maximum_is_unit(window, stride, assert_unit) -> None:
    factors = rules.max_pool((window,), (stride,), constraint=None)

    def trial(rng):
        x = rng.standard_normal((400, 24))
        index = windows(x, window, stride)
        dx, g = np.zeros_like(x), rng.standard_normal((400, len(index)))
        largest = np.take_along_axis(
            np.broadcast_to(index, (400, *index.shape)), x[:, index].argmax(-1)[..., None], -1
        )
        np.add.at(dx, (np.arange(400)[:, None], largest[..., 0]), g)
        y = x[:, index].max(-1)
        # The factor takes the deviation to 1, not the mean square.
        return factors.fwd * (y - y.mean()), factors.bwd[0] * dx

    assert_unit(trial, bias=2 / 9600)  # of the mean that is taken from the sample


@pytest.mark.parametrize(
    ("n", "variance"),
    [
        # Exact: Jones, "Exact values for the moments of normal order statistics", 1948.
        (1, 1.0),
        (2, 1 - 1 / math.pi),
        (3, 1 + math.sqrt(3) / (2 * math.pi) - 9 / (4 * math.pi)),
        (4, 0.4917152369),  # Teichroew, 1956, table of products
        (10, 0.3443438233),
    ],
)
def test_maximum_of_n(n, variance) -> None:
    assert rules.max_pool((n,)).fwd == pytest.approx(variance**-0.5, rel=1e-7)


def test_maximum_of_many_follows_the_extreme_value_law() -> None:
    """The distribution function of the maximum, Phi^n, integrated on its own grid."""
    n = 10**6
    x = np.linspace(2, 9, 70001)
    below = np.exp(n * np.log1p([-math.erfc(v / math.sqrt(2)) / 2 for v in x]))
    mass, middle = np.diff(below), (x[1:] + x[:-1]) / 2
    mean = mass @ middle
    assert rules.max_pool((1000, 1000)).fwd == pytest.approx(
        (mass @ (middle - mean) ** 2) ** -0.5, rel=1e-5
    )


@pytest.mark.parametrize("rule", [rules.avg_pool, rules.max_pool])
def test_constraint_of_pool(rule) -> None:
    free = rule((2, 3), (2, 2), constraint=None)
    assert rule((2, 3), (2, 2)).bwd == (free.fwd,)
    assert rule((2, 3), (2, 2), constraint="to_grad_input_scale").fwd == free.bwd[0]
    assert rule((2, 3), (1, 1)) == rule((2, 3))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (((0, 2),), r"window_shape\[0\] must be at least 1"),
        (((2, 2), (0, 1)), r"strides\[0\] must be at least 1"),
        (((2, 2), (1,)), "strides must have one entry for each"),
    ],
)
@pytest.mark.parametrize("rule", [rules.avg_pool, rules.max_pool])
def test_errors_of_pool(rule, arguments, match) -> None:
    with pytest.raises(ValueError, match=rf"unitscale\.rules\.{rule.__name__}: .*{match}"):
        rule(*arguments)
