"""Linear ops: formulas and unit variance of output and gradients."""

import numpy as np
import pytest

from tests.refusals import refuses
from unitscale import rules

SHAPES = [(8, 16, 32), (64, 48, 4), (1, 100, 100), (100, 2, 50)]


@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
def test_matmul_is_unit(m, k, n, assert_unit) -> None:
    factors = rules.matmul(m, k, n, constraint=None)

    def trial(rng):
        left, right, g = (rng.standard_normal(s) for s in ((20, m, k), (20, k, n), (20, m, n)))
        return (
            factors.fwd * left @ right,
            factors.bwd[0] * g @ right.swapaxes(-1, -2),
            factors.bwd[1] * left.swapaxes(-1, -2) @ g,
        )

    assert_unit(trial)


def test_matmul_counts_broadcast_repeats(assert_unit) -> None:
    batch, m, k, n = 10, 8, 12, 16
    factors = rules.matmul(m, k, n, right_repeats=batch, constraint=None)

    def trial(rng):
        left, g = rng.standard_normal((batch, m, k)), rng.standard_normal((batch, m, n))
        return (factors.bwd[1] * np.einsum("bmk,bmn->kn", left, g),)

    assert_unit(trial, trials=400)
    assert rules.matmul(m, k, n, left_repeats=4, constraint=None).bwd[0] == (4 * n) ** -0.5


@pytest.mark.parametrize(
    ("constraint", "shared"),
    [
        ("to_output_scale", 16**-0.5),
        ("to_left_grad_scale", 64**-0.5),
        ("to_right_grad_scale", 4**-0.5),
        ("gmean", 4096 ** (-1 / 6)),
    ],
)
def test_matmul_shares_one_factor_under_a_constraint(constraint, shared) -> None:
    factors = rules.matmul(4, 16, 64, constraint=constraint)
    assert (factors.fwd, *factors.bwd) == pytest.approx((shared,) * 3, rel=1e-15)


@pytest.mark.parametrize("rule", [rules.dense, rules.readout])
@pytest.mark.parametrize(("batch", "n_in", "n_out"), SHAPES)
def test_dense_and_readout_gradients_are_unit(rule, batch, n_in, n_out, assert_unit) -> None:
    factors = rule(n_in, n_out, batch, constraint=None)
    forward = factors.fwd if rule is rules.dense else factors.fwd * n_in**0.5

    def trial(rng):
        shapes = ((20, batch, n_in), (20, n_in, n_out), (20, batch, n_out))
        x, kernel, g = (rng.standard_normal(s) for s in shapes)
        return (
            forward * x @ kernel,
            factors.bwd[0] * g @ kernel.swapaxes(-1, -2),
            factors.bwd[1] * x.swapaxes(-1, -2) @ g,
            factors.bwd[2] * g.sum(1),
        )

    assert_unit(trial, trials=100)


def test_weights_are_cut_edges_outside_the_constraint() -> None:
    for constraint in ("to_output_scale", "to_grad_input_scale", "gmean", "hmean", "amean"):
        for rule in (rules.dense, rules.readout):
            factors = rule(16, 64, 4, constraint=constraint)
            assert factors.fwd == factors.bwd[0]
            assert factors.bwd[1:] == (0.5, 0.5)


def test_readout_is_unconstrained_by_default() -> None:
    assert rules.readout(16, 64, 4) == rules.Factors(1 / 16, (1 / 8, 0.5, 0.5))


@pytest.mark.parametrize(
    ("groups", "stride", "gap"), [(1, 1, 1), (2, 1, 1), (4, 2, 1), (1, 2, 1), (2, 1, 3), (1, 2, 3)]
)
def test_conv_is_unit_without_borders(groups, stride, gap, assert_unit) -> None:
    # Circular padding in one dimension: every position is an interior pixel.
    batch, width, window, n_in, n_out = 3, 24, 4, 8, 16
    shape = (window, n_in // groups, n_out)
    options = {"strides": stride, "input_dilation": gap, "feature_group_count": groups}
    factors = rules.conv(shape, batch, width // stride, constraint=None, **options)
    positions = (np.arange(0, width, stride)[:, None] + np.arange(window)) % width

    def trial(rng):
        x = np.zeros((batch, width, groups, n_in // groups))
        x[:, ::gap] = rng.standard_normal(x[:, ::gap].shape)
        kernel = rng.standard_normal((window, n_in // groups, groups, n_out // groups))
        g = rng.standard_normal((batch, width // stride, groups, n_out // groups))
        patches = x[:, positions]
        dpatches = np.einsum("bpgo,wigo->bpwgi", g, kernel)
        dx = np.zeros_like(x)
        np.add.at(dx, (slice(None), positions), dpatches)
        return (
            factors.fwd * np.einsum("bpwgi,wigo->bpgo", patches, kernel),
            factors.bwd[0] * dx[:, ::gap],
            factors.bwd[1] * np.einsum("bpwgi,bpgo->wigo", patches, g),
            factors.bwd[2] * g.sum((0, 1)),
        )

    assert_unit(trial, trials=400)


def test_conv_accepts_a_spatial_shape_and_is_dense_for_a_window_of_one() -> None:
    assert rules.conv((3, 3, 4, 8), 2, 35) == rules.conv((3, 3, 4, 8), 70, 1)
    assert rules.conv((1, 16, 64), 2, 10) == rules.dense(16, 64, 20)


test_errors_name_the_argument = refuses(
    [
        (ValueError, lambda: rules.dense(0, 4, 4), "dense: in_features must be at least 1; got 0"),
        (ValueError, lambda: rules.matmul(4, -1, 4), "matmul: k must be at least 1"),
        (TypeError, lambda: rules.readout(4, 2.5, 4), "out_features must be a static integer"),
        (ValueError, lambda: rules.conv((3,), 1, 1), r"must be \(\*spatial, in / groups, out\)"),
        (ValueError, lambda: rules.conv((3, 4, 6), 1, 1, feature_group_count=4), "must divide"),
        (ValueError, lambda: rules.conv((3, 4, 6), 1, 1, strides=(1, 1)), "one entry for each"),
        (ValueError, lambda: rules.conv((3, 4, 6), 1, 1, input_dilation=0), r"dilation\[0\] must"),
        (ValueError, lambda: rules.dense(4, 4, 4, constraint="to_left_grad_scale"), "use 'to_gr"),
    ]
)


@pytest.mark.parametrize(("batch", "n_in", "rank", "n_out"), [(8, 16, 4, 32), (64, 48, 8, 4)])
def test_lora_is_unit_and_its_input_gradient_has_the_factor_of_dense(
    batch, n_in, rank, n_out, assert_unit
) -> None:
    down, up = rules.lora(n_in, rank, n_out, batch)

    def trial(rng):
        shapes = ((50, batch, n_in), (50, n_in, rank), (50, rank, n_out), (50, batch, n_out))
        x, a, b, dy = (rng.standard_normal(s) for s in shapes)
        h = down.fwd * x @ a
        dh = up.bwd[0] * dy @ b.swapaxes(-1, -2)
        return (
            h,
            up.fwd * h @ b,
            dh,
            down.bwd[1] * x.swapaxes(-1, -2) @ dh,
            up.bwd[1] * h.swapaxes(-1, -2) @ dy,
        )

    assert_unit(trial, trials=200)
    for constraint in ("to_output_scale", "to_grad_input_scale", "gmean", None):
        down, up = rules.lora(n_in, rank, n_out, batch, constraint=constraint)
        dense = rules.dense(n_in, n_out, batch, constraint=constraint)
        # Beside the dense layer both paths have the same ratio of backward to forward.
        ratio = down.bwd[0] * up.bwd[0] / (down.fwd * up.fwd)
        assert ratio == pytest.approx(dense.bwd[0] / dense.fwd, rel=1e-12)
        assert np.isclose(down.fwd * up.fwd, dense.fwd * rank**-0.5)


test_errors = refuses(
    [
        (ValueError, lambda: rules.lora(4, 0, 4, 4), r"rules\.lora: rank must be"),
        (ValueError, lambda: rules.lora(0, 2, 4, 4), r"in_features must be"),
    ]
)


@pytest.mark.parametrize("skew", [0.0, 1.0])
def test_table_gradient_is_unit(skew, assert_unit) -> None:
    vocab, tokens, features = 50, 200, 16
    factors = rules.embed(vocab, tokens)
    probability = (1.0 + np.arange(vocab)) ** -skew
    probability /= probability.sum()

    def trial(rng):
        ids = rng.choice(vocab, tokens, p=probability)
        table = np.zeros((vocab, features))
        np.add.at(table, ids, rng.standard_normal((tokens, features)))
        return (factors.bwd[0] * table,)

    assert factors.fwd == 1.0
    assert_unit(trial, trials=400)


def test_rejects_an_empty_batch() -> None:
    with pytest.raises(ValueError, match="embed: tokens must be at least 1"):
        rules.embed(10, 0)


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
    """The factor on gradients inside is divided out of the gradient of the token."""
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


def test_errors_of_moe() -> None:
    with pytest.raises(ValueError, match=r"mixture: top_k must be at most .* got 3 of 2"):
        rules.mixture(2, 3)
    with pytest.raises(ValueError, match="router: mult must be positive"):
        rules.router(4, 8, 16, top_k=2, mult=0.0)
    with pytest.raises(ValueError, match="router: tokens must be at least 1"):
        rules.router(4, 8, 0, top_k=2)
    with pytest.raises(ValueError, match="grouped_dense: groups must be at least 1"):
        rules.grouped_dense(4, 8, 16, 0)
