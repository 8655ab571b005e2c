"""Factors of softmax, mixtures and attention, against samples and simulated stacks."""

import math

import jax
import numpy as np
import pytest

from unitscale import rules
from unitscale.rules import AttentionContext


def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def ideal(rule, *args, **options):
    """Return the mean squares, of output and gradients, that the factors are made for."""
    factors = rule(*args, **options, constraint=None)
    return np.array([factors.fwd, *factors.bwd]) ** -2.0


@pytest.mark.parametrize(
    ("size", "mult"), [(3, 16.0), (16, 0.1), (64, 0.01), (64, 3.0), (2000, 1.0)]
)
def test_output_and_gradient_are_unit(size, mult, assert_unit) -> None:
    factors = rules.softmax(size, mult=mult, constraint=None)

    def trial(rng):
        z, g = rng.standard_normal((2, 50_000 // size, size))
        p = softmax(mult * z)
        dx = mult * p * (g - (p * g).sum(-1, keepdims=True))
        return factors.fwd * (p - 1 / size), factors.bwd[0] * dx

    assert_unit(trial, trials=40)


def test_softmax_of_two_and_its_limits() -> None:
    x, w = np.polynomial.hermite_e.hermegauss(200)
    w, p = w / w.sum(), 1 / (1 + np.exp(-np.sqrt(2) * x))
    square = p**2 + (1 - p) ** 2
    gradient = square - 2 * (p**3 + (1 - p) ** 3) + square**2
    expected = w @ square / 2 - 1 / 4, w @ gradient / 2
    assert ideal(rules.softmax, 2) == pytest.approx(expected, rel=1e-9)
    size = 10**7
    for mult in (0.25, 1.0):
        # Corrections are of relative order e^(4 m^2) / n: 5e-6 here.
        expected = math.expm1(mult**2) / size**2, math.exp(mult**2) * (mult / size) ** 2
        assert ideal(rules.softmax, size, mult=mult) == pytest.approx(expected, rel=2e-4)
    assert rules.softmax(10, mult=1e6).fwd == pytest.approx(10 / 3, rel=1e-4)
    # Where the formula changes; above 24, gradients have a probability of 1 / mult.
    below, above = (rules.softmax(64, mult=mult).fwd * mult for mult in (0.9999e-3, 1.0001e-3))
    assert below == pytest.approx(above, rel=2e-6)
    at, beyond, far = (ideal(rules.softmax, 64, mult=mult) for mult in (24.0, 24.001, 96.0))
    assert at == pytest.approx(beyond, rel=1e-4)
    assert far[1] == pytest.approx(4 * at[1], rel=1e-9)
    for constraint in (None, "to_output_scale", "gmean"):
        assert rules.softmax(1, constraint=constraint) == rules.Factors(1.0, (1.0,))


def test_limits_of_gates() -> None:
    """Gates are equal if logits hardly differ, and one gate is 1 if they differ much."""
    assert rules.mixture(8, 2, mult=1e-4).fwd == pytest.approx(2**0.5, rel=1e-6)
    assert 1 < rules.mixture(8, 2, mult=24.0).fwd < 1.06
    assert rules.mixture(8, 2, mult=1e3) == rules.mixture(8, 2, mult=24.0)
    for renormalize in (True, False):
        found = rules.mixture(5, 5, renormalize=renormalize).fwd ** -2
        assert found == pytest.approx(5 * ideal(rules.softmax, 5)[0] + 1 / 5, rel=1e-12)
    for experts, top_k in ((8, 2), (5, 5), (3, 1)):
        factors = rules.mixture(experts, top_k)
        # The factor on gradients inside is divided out of the gradient of the token.
        assert factors.bwd[0] * factors.bwd[2] == pytest.approx(factors.fwd)
        assert factors.bwd[1] == factors.fwd


@pytest.mark.parametrize("mult", [0.4, 12.0])
def test_causal_attention_is_the_mean_over_numbers_of_keys(mult) -> None:
    def squares(length, is_causal):
        rule = rules.dot_product_attention
        return ideal(rule, 16, length, is_causal=is_causal, mult=mult)

    rows = np.stack([squares(n, is_causal=False) for n in range(1, 71)])
    rows[0, 1:3] = 0  # of one key, logits have no gradient
    for length in (2, 65, 70):
        np.testing.assert_allclose(squares(length, True), rows[:length].mean(0), rtol=1e-9)


TOKENS, IN, OUT = 96, 24, 16


@pytest.mark.parametrize(
    ("experts", "top_k", "mult", "renormalize"),
    [(8, 2, 1.0, True), (6, 3, 2.0, False), (4, 3, 1.5, False), (40, 6, 0.5, True)],
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


def test_limits_of_attention() -> None:
    assert not AttentionContext().gated
    factors = rules.dot_product_attention(64, 128, is_causal=True)
    assert factors.bwd == (factors.fwd,) * 3
    dropped = rules.dot_product_attention(64, 128, is_causal=True, dropout_rate=0.36)
    assert dropped.fwd == pytest.approx(0.8 * factors.fwd, rel=1e-15)
    assert rules.dot_product_attention(32, 128, is_causal=True, mean_square=0.25).fwd == 2
    # Wide heads average uniformly, and a single key has factors of one.
    wide = rules.dot_product_attention(10**8, 256, is_causal=False)
    assert wide.fwd == pytest.approx(16, rel=1e-7)
    causal = rules.dot_product_attention(10**8, 256, is_causal=True)
    assert causal.fwd == pytest.approx(np.mean(1 / np.arange(1, 257)) ** -0.5, rel=1e-4)
    for is_causal in (False, True):
        factors = rules.dot_product_attention(64, 1, is_causal=is_causal, constraint=None)
        assert (factors.fwd, *factors.bwd) == pytest.approx((1.0,) * 4, rel=1e-9)


LENGTH, HEADS, HEAD_DIM, LAYERS, TRIALS = 32, 8, 16, 3, 40
CASES = [
    # keys per query with a causal mask (0: no mask), activation, gated, norm placement, tau
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            (0, jax.nn.relu, True, "post", 1.0),
            (0, jax.nn.relu, False, "none", 0.2),
            (0, jax.nn.gelu, False, "pre", 0.5),
            (LENGTH, jax.nn.gelu, True, "pre", 1.0),
            (LENGTH, jax.nn.relu, False, "post", 1.0),
            (LENGTH, jax.nn.gelu, False, "pre", 0.5),
        )
    ),
    (5, jax.nn.gelu, False, "pre", 0.5),
]


def dense(rng, x, features):
    return x @ rng.standard_normal((x.shape[-1], features), np.float32) / x.shape[-1] ** 0.5


def normalize(x):
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True))


def attend(rng, x, keys):
    """Average values with the attention weights of independent projections of unit inputs."""
    q, k, v = (dense(rng, x, x.shape[-1]).reshape(LENGTH, HEADS, HEAD_DIM) for _ in range(3))
    weights = np.exp(np.einsum("thd,shd->hts", q, k) / HEAD_DIM)
    weights *= np.tri(LENGTH) - np.tri(LENGTH, k=-keys) if keys else 1
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hts,shd->thd", weights, v).reshape(x.shape)


def stack(rng, predicted, *, keys, f, fwd, gated, norm_placement, tau):
    """Measure attention averages of a random stack that uses the predicted factors."""
    before = normalize if norm_placement == "pre" else lambda x: x
    after = normalize if norm_placement == "post" else lambda x: x
    x, found = rng.standard_normal((LENGTH, HEADS * HEAD_DIM), np.float32), []
    for mean_square in predicted:
        y = attend(rng, before(x), keys)
        found.append(np.mean(y**2))
        branch = dense(rng, y, x.shape[-1]) / np.sqrt(mean_square)
        x = after((tau * branch + x) / np.hypot(1, tau))
        up = dense(rng, before(x), 2 * x.shape[-1])
        hidden = np.asarray(f(dense(rng, before(x), up.shape[-1]) if gated else up))
        hidden = up * hidden if gated else hidden
        x = after((tau * dense(rng, fwd * hidden, x.shape[-1]) + x) / np.hypot(1, tau))
    return found


def simulate(keys, f, gated, norm_placement, tau):
    """Return the ratios of measured mean squares to predicted ones, and standard errors."""
    predicted = [
        AttentionContext(
            taus_below=(tau, tau) * layer, activation=f, gated=gated, norm_placement=norm_placement
        ).mean_square(HEAD_DIM, LENGTH, is_causal=keys > 0, keys_per_query=keys)
        for layer in range(LAYERS)
    ]
    fwd = (rules.glu if gated else rules.elementwise)(f).fwd
    rng = np.random.default_rng(7)
    options = {"f": f, "fwd": fwd, "gated": gated, "norm_placement": norm_placement, "tau": tau}
    found = np.array([stack(rng, predicted, keys=keys, **options) for _ in range(TRIALS)])
    ratio = found / predicted
    return ratio.mean(0), ratio.std(0, ddof=1) / np.sqrt(TRIALS)


@pytest.mark.parametrize(("keys", "f", "gated", "norm_placement", "tau"), CASES)
def test_predicted_mean_square_is_that_of_a_random_stack(
    keys, f, gated, norm_placement, tau
) -> None:
    ratio, error = simulate(keys, f, gated, norm_placement, tau)
    assert (error < 0.04).all(), f"too few samples to tell: standard errors {error}"
    # Infinite width is assumed; a stack of finite width departs by a few inverse widths a layer.
    finite_width = np.arange(LAYERS) * 4 / (HEADS * HEAD_DIM) + 2 / HEAD_DIM / HEAD_DIM
    assert (np.abs(ratio - 1) <= 5 * error + finite_width).all(), (ratio, error)


@pytest.mark.parametrize(("is_causal", "keys"), [(False, None), (True, None), (True, 40)])
def test_groups_of_positions_stand_for_every_position(is_causal, keys) -> None:
    for length in (1, 7, 100, 1000, 10_000):
        options = {"is_causal": is_causal, "keys_per_query": keys, "mult": 2.0}
        found = AttentionContext().mean_square(32, length, **options)
        factors = rules.dot_product_attention(32, length, **options)
        # Groups of neighbours stand for their middle, which costs little beyond the first 64.
        assert found == pytest.approx(factors.fwd**-2, rel=2e-3)
