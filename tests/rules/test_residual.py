"""Sums, residual connections, gates and learning rates."""

import math

import jax
import jax.numpy as jnp
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
    with pytest.raises(ValueError, match=r"scheme must .*Did you mean 'running_mean'"):
        rules.residual_taus("running-mean", 4)
    with pytest.raises(ValueError, match="num_branches must be at least 1"):
        rules.residual_taus("fixed", 0)
    with pytest.raises(ValueError, match="tau must be positive and finite; got 0"):
        rules.residual(0)


def test_default_shares_one_factor() -> None:
    factors = rules.add()
    assert (factors.fwd, *factors.bwd) == (math.sqrt(0.5),) * 3


def test_is_unit_and_broadcast_gradients_too(assert_unit) -> None:
    rows, columns = 30, 50
    factors = rules.add(right_repeats=rows, constraint=None)

    def trial(rng):
        x, g = rng.standard_normal((2, 8, rows, columns))
        y = rng.standard_normal((8, 1, columns))
        return factors.fwd * (x + y), factors.bwd[0] * g, factors.bwd[1] * g.sum(1)

    assert_unit(trial, trials=200)


# The means of the factors 2^-1/2 (output), 4^-1/2 (left) and 9^-1/2 (right).
CONSTRAINTS = {
    "to_output_scale": 0.5**0.5,
    "to_left_grad_scale": 1 / 2,
    "to_right_grad_scale": 1 / 3,
    "gmean": (0.5**0.5 / 6) ** (1 / 3),
    "hmean": 3 / (2**0.5 + 2 + 3),
    "amean": (0.5**0.5 + 1 / 2 + 1 / 3) / 3,
}


@pytest.mark.parametrize("constraint", [*CONSTRAINTS, None])
def test_a_constraint_binds_a_broadcast_operand(constraint) -> None:
    factors = rules.add(left_repeats=4, right_repeats=9, constraint=constraint)
    want = (CONSTRAINTS[constraint],) * 3 if constraint else (0.5**0.5, 1 / 2, 1 / 3)
    assert (factors.fwd, *factors.bwd) == pytest.approx(want, rel=1e-15)


weight = st.floats(-100, 100).filter(lambda w: w == 0 or abs(w) > 1e-3)


@given(st.lists(weight, min_size=1, max_size=5).filter(any))
def test_weighted_add_has_unit_weights_and_the_true_derivative(weights) -> None:
    normalized = rules.normalized_weights(tuple(weights))
    assert math.fsum(w**2 for w in normalized) == pytest.approx(1, rel=1e-12)
    factors = rules.weighted_add(weights)
    assert factors.bwd == (factors.fwd,) * len(weights)
    np.testing.assert_allclose(normalized, np.multiply(weights, factors.fwd), rtol=1e-14)


@pytest.mark.parametrize("weights", [(), (0.0, 0.0), (1.0, float("inf")), (float("nan"),)])
def test_weighted_add_rejects_weights_without_a_norm(weights) -> None:
    with pytest.raises(ValueError, match="finite and not all zero"):
        rules.weighted_add(weights)


TANH = rules.elementwise(jnp.tanh).fwd
WIDTH, STEPS, WARM = 256, 40, 20


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


SECOND = float(np.mean(sigmoid(np.random.default_rng(0).standard_normal(1_000_000)) ** 2))


@pytest.mark.parametrize("kind", ["update", "reset", "sum", "repeated"])
def test_the_stationary_state_is_unit(kind, assert_unit) -> None:
    """One wide layer with random kernels, and gates drawn afresh at each step, as derived."""
    weight, period = {
        "update": (rules.gated_update(), 1),
        "reset": (rules.gated_update(reset=True), 1),
        "sum": (rules.gated_sum(), 1),
        "repeated": (rules.gated_update(period=2), 2),
    }[kind]

    def trial(rng):
        kernels = rng.standard_normal((period, WIDTH, WIDTH)) / WIDTH**0.5
        state, kept = np.zeros((4, WIDTH)), []
        for step in range(STEPS):
            x, gate, other = rng.standard_normal((3, 4, WIDTH))
            h = state @ kernels[step % period]
            if kind == "reset":
                h = h * sigmoid(other) / SECOND**0.5
            candidate = TANH * np.tanh((x + h) / 2**0.5)
            taken = sigmoid(other) if kind == "sum" else 1 - sigmoid(gate)
            state = sigmoid(gate) * state + weight * taken * candidate
            if step >= WARM:
                kept.append(state)
        return (np.stack(kept),)

    # Finite width: the square of a state of 256 units, on which every later step depends, is
    # 2 / 256 wide, and the tanh is concave in it.
    # The correlation of candidates that a gate has made a mixture (a 25th smaller) is a normal's in
    # the rule; it makes up a quarter of the variance, and the candidate's argument feeds it back.
    mixture = 2 / 25 / 4 if kind == "reset" else 0.0
    assert_unit(trial, trials=24, bias=2 * 2 / WIDTH + mixture)


def test_more_correlation_makes_the_weight_smaller() -> None:
    independent = (1 / SECOND - 1) ** 0.5
    weights = [
        rules.gated_update(1e-6),
        rules.gated_update(0.5, reset=True),
        rules.gated_update(0.5),
        rules.gated_update(1.0),
    ]
    assert weights == sorted(weights, reverse=True)
    assert weights[0] == pytest.approx(independent, rel=2e-3)  # of the sampled moment
    assert rules.gated_update(0.5, period=8) == pytest.approx(weights[0], rel=2.0**-7)


def test_rules_inside_a_trace_are_static_numbers() -> None:
    assert isinstance(rules.gated_update(0.25), float)
    inside = []
    jax.jit(lambda x: inside.append(rules.gated_update(0.3)) or x)(1.0)
    assert inside == [rules.gated_update(0.3)]


def test_recurrent_kernel() -> None:
    assert rules.recurrent_kernel(9) == rules.Factors(1.0, (1 / 3,))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rules.gated_update(0.0), r"rules\.gated_update: share must be positive"),
        (lambda: rules.gated_update(1.5), r"rules\.gated_update: share must be in \(0, 1\]; got"),
        (lambda: rules.gated_update(period=0), r"period must be at least 1"),
        (lambda: rules.gated_sum(2.0), r"rules\.gated_sum: share must be in"),
        (lambda: rules.recurrent_kernel(0), r"steps must be at least 1"),
    ],
)
def test_errors_of_recurrent(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call()


FANS = {"fan_in": 64, "fan_out": 256}


@pytest.mark.parametrize(
    ("role", "factor"),
    [("weight", 1 / 8), ("embedding", 1 / 16), ("readout", 1), ("bias", 1), ("norm", 1)],
)
def test_factor_by_role_and_depth(role, factor) -> None:
    assert rules.umup_learning_rate(role, **FANS) == factor
    for depth in (2, 9, 64):
        found = rules.umup_learning_rate(role, **FANS, depth=depth)
        assert found == pytest.approx(factor / math.sqrt(depth), rel=1e-15)


@pytest.mark.parametrize("role", ["weight", "embedding", "readout", "bias", "norm"])
def test_sgd_makes_up_for_the_readouts_constraint(role) -> None:
    """Width 64 after width 256: what a constrained readout divides gradients by."""
    adam, free = (rules.umup_learning_rate(role, **FANS, optimizer=o) for o in ("adam", "sgd"))
    assert adam == free == rules.umup_learning_rate(role, **FANS)
    bound = {"readout_constraint": "to_output_scale"}
    assert rules.umup_learning_rate(role, **FANS, **bound) == adam
    width = {"weight": 64, "readout": 1}.get(role, 256)
    found = rules.umup_learning_rate(role, **FANS, depth=4, optimizer="sgd", **bound)
    assert found == pytest.approx(adam * width / 2, rel=1e-15)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"optimizer": "adamw"}, "optimizer must be .*; got 'adamw'"),
        ({"readout_constraint": "gmean"}, "readout_constraint must be .*; got 'gmean'"),
    ],
)
def test_unknown_settings(settings, match) -> None:
    with pytest.raises(ValueError, match=match):
        rules.umup_learning_rate("weight", **FANS, **settings)


@pytest.mark.parametrize("width", [64, 1024])
def test_an_update_moves_an_output_as_far_at_every_width(width) -> None:
    """Updates of one sign and of unit size, against activations they correlate with."""
    factor = rules.umup_learning_rate("weight", fan_in=width, fan_out=width)
    forward = rules.dense(width, width, 1).fwd
    # The output's change: a sum over the width of (factor * 1) times a unit activation.
    assert forward * width * factor == pytest.approx(1.0, rel=1e-12)
    readout = rules.umup_learning_rate("readout", fan_in=width, fan_out=8)
    assert rules.readout(width, 8, 1).fwd * width * readout == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        (("wieght", 4, 4, 1), ValueError, r"one of weight, .*got 'wieght'.*Did you mean 'weight'"),
        ((None, 4, 4, 1), ValueError, "role must be one of .*got None"),
        (("weight", 0, 4, 1), ValueError, "fan_in must be at least 1; got 0"),
        (("weight", 4, -1, 1), ValueError, "fan_out must be at least 1; got -1"),
        (("weight", 4, 4, 0), ValueError, "depth must be at least 1; got 0"),
        (("weight", 4.5, 4, 1), TypeError, "fan_in must be"),
    ],
)
def test_errors_of_learning_rate(arguments, error, match) -> None:
    role, fan_in, fan_out, depth = arguments
    with pytest.raises(error, match=match):
        rules.umup_learning_rate(role, fan_in=fan_in, fan_out=fan_out, depth=depth)
