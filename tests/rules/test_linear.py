"""Products: formulas and unit variance of output and gradients."""

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
    assert rules.conv((3, 3, 4, 8), 2, (5, 7)) == rules.conv((3, 3, 4, 8), 2, 35)
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
