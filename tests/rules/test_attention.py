"""Attention: unit output and gradients over the whole sequence."""

import numpy as np
import pytest

from unitscale import rules


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("length", "mult", "rate"), [(16, 1.0, 0.0), (48, 8.0, 0.0), (48, 1.0, 0.3), (32, 24.0, 0.0)]
)
def test_output_and_gradients_are_unit(length, mult, rate, is_causal, assert_unit) -> None:
    head_dim, batch = 256, 4
    factors = rules.dot_product_attention(
        head_dim, length, is_causal=is_causal, mult=mult, dropout_rate=rate, constraint=None
    )
    scale = rules.logit_factor(head_dim, mult)
    mask = np.tril(np.ones((length, length))) if is_causal else np.ones((length, length))

    def trial(rng):
        q, k, v, g = rng.standard_normal((4, batch, length, head_dim))
        keep = (rng.random((batch, length, length)) >= rate) / (1 - rate)
        z = scale * np.einsum("btd,bsd->bts", q, k)
        p = np.exp(z - z.max(-1, keepdims=True)) * mask
        p /= p.sum(-1, keepdims=True)
        dp = np.einsum("btd,bsd->bts", g, v) * keep
        dz = scale * p * (dp - (p * dp).sum(-1, keepdims=True))
        return (
            factors.fwd * (p * keep) @ v,
            factors.bwd[2] * (p * keep).swapaxes(-1, -2) @ g,
            *([] if rate else [factors.bwd[0] * dz @ k, factors.bwd[1] * dz.swapaxes(-1, -2) @ q]),
        )

    # Logits of d-dimensional vectors are normal only up to order mult^2 / d in their spread's
    # spread.
    assert_unit(trial, trials=100, bias=4 * mult**2 / head_dim / head_dim**0.5 + 2 / head_dim)


def test_default_shares_the_output_factor() -> None:
    factors = rules.dot_product_attention(64, 128, is_causal=True)
    assert factors.bwd == (factors.fwd,) * 3


def test_dropout_multiplies_by_its_factor() -> None:
    plain = rules.dot_product_attention(64, 128, is_causal=True)
    dropped = rules.dot_product_attention(64, 128, is_causal=True, dropout_rate=0.36)
    assert dropped.fwd == pytest.approx(0.8 * plain.fwd, rel=1e-15)


def test_wide_heads_average_uniformly() -> None:
    factors = rules.dot_product_attention(10**8, 256, is_causal=False)
    assert factors.fwd == pytest.approx(16, rel=1e-7)
    causal = rules.dot_product_attention(10**8, 256, is_causal=True)
    assert causal.fwd == pytest.approx(np.mean(1 / np.arange(1, 257)) ** -0.5, rel=1e-4)


def test_single_key_has_factors_of_one() -> None:
    for is_causal in (False, True):
        factors = rules.dot_product_attention(64, 1, is_causal=is_causal, constraint=None)
        assert (factors.fwd, *factors.bwd) == pytest.approx((1.0,) * 4, rel=1e-9)


def test_logit_factor() -> None:
    assert rules.logit_factor(64) == 1 / 64
    assert rules.logit_factor(64, 4.0) == 1 / 16


def test_errors() -> None:
    with pytest.raises(ValueError, match="head_dim must be at least 1"):
        rules.dot_product_attention(0, 4, is_causal=True)
    with pytest.raises(ValueError, match="use 'to_output_scale'"):
        rules.dot_product_attention(4, 4, is_causal=True, constraint="to_left_grad_scale")
    with pytest.raises(ValueError, match="rate must be in"):
        rules.dot_product_attention(4, 4, is_causal=True, dropout_rate=1.0)
    with pytest.raises(ValueError, match="logit_factor: mult must be positive"):
        rules.logit_factor(4, 0.0)
