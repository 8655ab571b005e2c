"""Residual weights and their schemes."""

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from unitscale import rules


def contributions(taus: tuple[float, ...]) -> np.ndarray:
    """Return the share of embedding and of every branch in the variance of the final sum."""
    shares = np.array([1.0])
    for tau in taus:
        weights = rules.residual(tau)
        shares = np.append(shares * weights.skip**2, weights.branch**2)
    return shares


@given(st.floats(1e-3, 1e3))
def test_weights_have_unit_norm_and_ratio_tau(tau) -> None:
    weights = rules.residual(tau)
    assert math.hypot(weights.branch, weights.skip) == pytest.approx(1, rel=1e-14)
    assert weights.branch / weights.skip == pytest.approx(tau, rel=1e-14)


def test_sum_is_unit(assert_unit) -> None:
    weights = rules.residual(0.3)

    def trial(rng):
        branch, skip = rng.standard_normal((2, 10000))
        return (weights.branch * branch + weights.skip * skip,)

    assert_unit(trial)


def test_fixed_repeats_tau() -> None:
    assert rules.residual_taus("fixed", 3) == (0.5,) * 3
    assert rules.residual_taus("fixed", 2, tau=2) == (2.0, 2.0)


def test_running_mean_weighs_embedding_and_branches_equally() -> None:
    shares = contributions(rules.residual_taus("running_mean", 12))
    np.testing.assert_allclose(shares, 1 / 13, rtol=1e-12)


@pytest.mark.parametrize(("mult", "ratio"), [(1.0, 1.0), (0.5, 2.0), (3.0, 0.25)])
def test_depth_shares_are_as_documented(mult, ratio) -> None:
    length = 8
    shares = contributions(rules.residual_taus("depth", length, mult=mult, attn_ratio=ratio))
    mlp = 2 * mult**2 / (ratio**2 + 1)
    expected = np.array([length / 2, *[ratio**2 * mlp, mlp] * (length // 2)])
    np.testing.assert_allclose(shares, expected / expected.sum(), rtol=1e-12)
    # The branches together to the embedding are as mult, and attention to MLP as attn_ratio.
    assert shares[1:].sum() / shares[0] == pytest.approx(2 * mult**2, rel=1e-12)
    assert shares[1] / shares[2] == pytest.approx(ratio**2, rel=1e-12)


def test_depth_matches_the_published_formula() -> None:
    length, mult, ratio = 6, 0.75, 1.5
    mlp = 2 / (ratio**2 + 1) * mult**2
    attn = ratio**2 * mlp
    for index, tau in enumerate(rules.residual_taus("depth", length, mult=mult, attn_ratio=ratio)):
        layer = index + 1
        k = (layer - 1) // 2
        if layer % 2:
            square = attn / (length / 2 + k * attn + k * mlp)
        else:
            square = mlp / (length / 2 + (k + 1) * attn + k * mlp)
        assert tau == pytest.approx(math.sqrt(square), rel=1e-14)


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"scheme 'running-mean'.*Did you mean 'running_mean'"):
        rules.residual_taus("running-mean", 4)
    with pytest.raises(ValueError, match="num_branches must be at least 1"):
        rules.residual_taus("fixed", 0)
    with pytest.raises(ValueError, match="tau must be positive and finite; got 0"):
        rules.residual(0)
