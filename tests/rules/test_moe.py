"""Mixture of experts: every array is unit, whatever the numbers of experts and of the chosen."""

import numpy as np
import pytest

from unitscale import rules

TOKENS, IN, OUT = 96, 24, 32
CASES = [(8, 2, 1.0, True), (4, 4, 1.0, True), (8, 1, 1.0, False), (6, 3, 2.0, False)]


def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize(("experts", "top_k", "mult", "renormalize"), CASES)
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


def test_the_way_out_and_in_of_the_experts_cancel() -> None:
    """What gradients inside are multiplied by, the gradient of the token is divided by."""
    for experts, top_k in ((8, 2), (5, 5), (3, 1)):
        factors = rules.mixture(experts, top_k)
        assert factors.bwd[0] * factors.bwd[2] == pytest.approx(factors.fwd)
        assert factors.bwd[1] == factors.fwd


@pytest.mark.parametrize("skew", [0.0, 1.0])
def test_kernels_are_unit_however_rows_are_divided(skew, assert_unit) -> None:
    groups, rows = 6, 60
    factors = rules.grouped_dense(IN, OUT, rows, groups)
    probability = (1.0 + np.arange(groups)) ** -skew
    probability /= probability.sum()

    def trial(rng):
        group = rng.choice(groups, rows, p=probability)
        x, dy = rng.standard_normal((rows, IN)), rng.standard_normal((rows, OUT))
        kernel = rng.standard_normal((groups, IN, OUT))
        y = factors.fwd * np.einsum("ri,rio->ro", x, kernel[group])
        dkernel, dbias = np.zeros((groups, IN, OUT)), np.zeros((groups, OUT))
        np.add.at(dkernel, group, x[:, :, None] * dy[:, None])
        np.add.at(dbias, group, dy)
        return y, factors.bwd[1] * dkernel, factors.bwd[2] * dbias

    assert_unit(trial, trials=60)
    one = rules.dense(IN, OUT, 1, constraint="gmean")
    grouped = rules.grouped_dense(IN, OUT, rows, groups, constraint="gmean")
    assert (grouped.fwd, grouped.bwd[0]) == (one.fwd, one.bwd[0])


def test_a_constant_gate_leaves_the_router_finite() -> None:
    assert rules.router(4, 1, 16, top_k=1).bwd[1] == 0.25
    assert rules.router(4, 8, 16, top_k=1).bwd[1] == 0.25


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"mixture: top_k must be at most .* got 3 of 2"):
        rules.mixture(2, 3)
    with pytest.raises(ValueError, match="router: mult must be positive"):
        rules.router(4, 8, 16, top_k=2, mult=0.0)
    with pytest.raises(ValueError, match="router: tokens must be at least 1"):
        rules.router(4, 8, 0, top_k=2)
    with pytest.raises(ValueError, match="grouped_dense: groups must be at least 1"):
        rules.grouped_dense(4, 8, 16, 0)
