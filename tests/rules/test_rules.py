"""Formulas of the rules, constraints between factors, and errors.

`tests/ops` tests that the factors give results and gradients of unit RMS, except for rules whose op
does more than the rule.
"""

import functools
import gc
import math
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st
from jax.sharding import AxisType, PartitionSpec as P

from tests.refusals import refuses
from unitscale import rules
from unitscale.rules import Factors, constrain
from unitscale.rules._elementwise import correlation_kernel

FREE = {"constraint": None}
FORMULAS = [
    (rules.matmul(4, 16, 64, **FREE), 1 / 4, (1 / 8, 1 / 2)),
    (rules.matmul(4, 16, 64, left_repeats=4, right_repeats=9, **FREE), 1 / 4, (1 / 16, 1 / 6)),
    (rules.dense(16, 64, 4), 1 / 4, (1 / 4, 1 / 2, 1 / 2)),
    (rules.dense(16, 64, 4, **FREE), 1 / 4, (1 / 8, 1 / 2, 1 / 2)),
    (rules.readout(16, 64, 4), 1 / 16, (1 / 8, 1 / 2, 1 / 2)),
    (rules.lora(16, 4, 64, 4)[0], 1 / 4, (1.0, 1 / 2)),
    (rules.lora(16, 4, 64, 4)[1], 1 / 2, (1 / 8, 1 / 2)),
    (rules.conv((2, 2, 4, 16), 1, 64), 1 / 4, (1 / 4, 1 / 8, 1 / 8)),
    (rules.conv((1, 16, 64), 2, 10), 1 / 4, rules.dense(16, 64, 20).bwd),
    # Of 4 * 9 terms 4 * 9 / 4 are not between inputs; a gradient sums 64 / 4 * 9 / 9 of them.
    (
        rules.conv((9, 4, 64), 4, 4, strides=9, input_dilation=4, feature_group_count=4, **FREE),
        1 / 3,
        (1 / 4, 1 / 2, 1 / 4),
    ),
    (rules.embed(64, 16), 1.0, (2.0,)),
    (rules.recurrent_kernel(9), 1.0, (1 / 3,)),
    (rules.grouped_dense(16, 64, 36, 4), 1 / 4, (1 / 4, 1 / 3, 1 / 3)),
    (rules.norm(64, 1024), 1.0, (1.0, 1 / 4, 1 / 4)),
    (rules.mixture(8, 1), 1.0, (1.0, 1.0, 1.0)),
    (rules.router(16, 8, 16, top_k=1), 1 / 4, (1 / 4, 1 / 4)),  # a gate that is constant
    (rules.router(16, 1, 16, top_k=1), 1 / 4, (1 / 4, 1 / 4)),
    (rules.softmax_cross_entropy(2), 1.0, (2.0,)),
    (rules.softmax_cross_entropy(17, mult=2.0), 1.0, (17 / 8,)),
    (rules.mse_loss(), 1.0, (8**-0.5,) * 2),
    (rules.dropout(0.75), 1 / 2, (1 / 2,)),
    (rules.avg_pool((2, 2), (2, 2), **FREE), 2.0, (4.0,)),
    (rules.avg_pool((3, 3)), 3.0, (3.0,)),
    (rules.max_pool((1, 1), (2, 2), **FREE), 1.0, (2.0,)),
    (rules.add(), 0.5**0.5, (0.5**0.5,) * 2),
    (rules.add(left_repeats=4, right_repeats=9, **FREE), 0.5**0.5, (1 / 2, 1 / 3)),
    (rules.weighted_add((3.0, 4.0)), 1 / 5, (1 / 5, 1 / 5)),
    (rules.elementwise(jnp.sign, **FREE), 1.0, (1.0,)),  # without a gradient: the forward factor
    (rules.glu(lambda gate: 0 * gate + 2.0, **FREE), 1 / 2, (1 / 2, 1 / 2)),
]


def test_formulas() -> None:
    for found, fwd, bwd in FORMULAS:
        assert (found.fwd, *found.bwd) == pytest.approx((fwd, *bwd), rel=1e-6), (fwd, bwd)
    for rule in (rules.dense, rules.readout):
        for constraint in ("to_output_scale", "to_grad_input_scale", "gmean", "hmean", "amean"):
            factors = rule(16, 64, 4, constraint=constraint)
            assert factors.fwd == factors.bwd[0]
            assert factors.bwd[1:] == (0.5, 0.5)  # weights are cut edges
    assert rules.dense(np.int32(4), np.int64(16), 1) == rules.dense(4, 16, 1)
    assert (rules.logit_factor(64), rules.logit_factor(64, 4.0)) == (1 / 64, 1 / 16)
    assert rules.umup_learning_rate("weight", fan_in=64, fan_out=256, depth=4) == 1 / 16


CONSTRAINED = [
    ("to_output_scale", (8.0, 2.0, 4.0), 8.0),
    ("to_grad_input_scale", (8.0, 2.0), 2.0),
    ("to_left_grad_scale", (8.0, 2.0, 4.0), 2.0),
    ("to_right_grad_scale", (8.0, 2.0, 4.0), 4.0),
    ("gmean", (8.0, 2.0, 4.0), 4.0),
    ("hmean", (8.0, 2.0, 4.0), 24 / 7),
    ("amean", (8.0, 2.0, 4.0, 2.0), 4.0),
]


def test_constraints() -> None:
    for constraint, factors, expected in CONSTRAINED:
        found = constrain(constraint, *factors)
        assert found == pytest.approx((expected,) * len(factors), rel=1e-15)
    assert constrain(None, 8.0, 2.0, 4.0) == (8.0, 2.0, 4.0)
    unary = {
        functools.partial(rules.elementwise, jnp.tanh),
        functools.partial(rules.softmax, 64),
        functools.partial(rules.avg_pool, (2, 3), (2, 2)),
        functools.partial(rules.max_pool, (2, 3), (2, 2)),
    }
    for rule in unary:
        ideal = rule(constraint=None)
        assert rule().bwd == (ideal.fwd,)
        assert rule(constraint="to_grad_input_scale").fwd == ideal.bwd[0] != ideal.fwd


EDGES = [
    (jax.nn.gelu, 1.701, 1.481),
    (jax.nn.relu, 1.713, 1.414),
    (jnp.tanh, 1.593, 1.467),
    (jax.nn.sigmoid, 4.802, 4.723),
]


def test_published_constants_and_exact_integrals() -> None:
    for f, fwd, bwd in EDGES:
        factors = rules.elementwise(f, constraint=None)
        # Half a unit of the last published digit, and what simulation left in the published ones.
        assert (factors.fwd, *factors.bwd) == pytest.approx((fwd, bwd), abs=1e-3)
    for mult in (1e-3, 0.1, 7.0, 1000.0):
        factors = rules.elementwise(jax.nn.relu, mult=mult, constraint=None)
        expected = (mult**2 * (0.5 - 1 / (2 * math.pi))) ** -0.5, math.sqrt(2) / mult
        assert (factors.fwd, *factors.bwd) == pytest.approx(expected, rel=1e-6)
    x, w = np.polynomial.hermite_e.hermegauss(150)
    w, s = w / w.sum(), 1 / (1 + np.exp(-x))
    slope = s * (1 - s)
    tables = {
        jax.nn.silu: (x * s, s + x * slope),
        jnp.sin: (np.sin(x), np.cos(x)),
        jnp.exp: (np.exp(x), np.exp(x)),
    }
    for f, (y, dy) in tables.items():
        factors = rules.elementwise(f, constraint=None)
        expected = (w @ (y - w @ y) ** 2) ** -0.5, (w @ dy**2) ** -0.5
        assert (factors.fwd, *factors.bwd) == pytest.approx(expected, rel=1e-6)
    factors = rules.glu(jax.nn.sigmoid, mult=1.5, constraint=None)
    s = 1 / (1 + np.exp(-1.5 * x))
    expected = (w @ s**2) ** -0.5, (w @ (1.5 * s * (1 - s)) ** 2) ** -0.5
    assert (*factors.bwd, factors.fwd) == pytest.approx((*expected, expected[0]), rel=1e-6)


def test_factors_of_functions_are_numbers_in_every_transformation() -> None:
    def f(x):
        return jnp.where(x > 0, x, 0.1 * x)

    def apply(x):
        # A fresh function every call, so that nothing comes from the cache.
        return x * rules.elementwise(lambda x: f(x), mult=3.0).fwd

    expected, ones = rules.elementwise(f, mult=3.0).fwd, jnp.ones(3)
    for run in (
        lambda: jax.jit(apply)(1.0),
        lambda: jax.jit(jax.vmap(jax.grad(apply)))(ones),
        lambda: jax.lax.scan(lambda c, x: (c, apply(x)), 0.0, ones)[1],
        lambda: jax.jit(jax.checkpoint(apply))(1.0),
    ):
        np.testing.assert_allclose(run(), expected, rtol=1e-6)
    inside = []
    jax.jit(lambda x: inside.append(rules.gated_update(0.3)) or x)(1.0)
    assert inside == [rules.gated_update(0.3)]


def test_inside_of_shard_map_over_some_axes() -> None:
    devices = jax.devices()[:4]
    mesh = jax.make_mesh((2, 2), ("data", "expert"), (AxisType.Auto,) * 2, devices=devices)

    def numbers() -> list[float]:
        # Another function in each trace, which nothing remembers; each call evaluates it.
        simulated = rules.simulate(lambda x: jnp.sin(x) ** 3, [jnp.zeros(8)], seeds=2)
        one = rules.elementwise(lambda x: jnp.sin(x) ** 3)
        return [one.fwd, simulated.factors.fwd, correlation_kernel(lambda x: jnp.sin(x) ** 3)[1]]

    traced = jax.shard_map(
        lambda x: x[:, None] * jnp.asarray(numbers()),
        in_specs=P("data"),
        out_specs=P("data"),
        axis_names={"data"},
    )
    with jax.set_mesh(mesh):
        found = jax.jit(traced)(jnp.ones(4))
    np.testing.assert_allclose(found, [numbers()] * 4, rtol=1e-6)


@pytest.mark.slow
def test_functions_are_evaluated_once_and_not_kept() -> None:
    calls, held = [], []

    def f(x):
        calls.append(None)
        return jnp.sin(x)

    rules.elementwise(f)
    first = len(calls)
    rules.elementwise(f, constraint=None)
    rules.glu(f)
    assert len(calls) == first
    rules.elementwise(f, mult=2.0)
    assert len(calls) > first
    array = np.full(3, 2.0)
    held.append(weakref.ref(array))
    rules.elementwise(lambda x, a=array: jnp.tanh(a[0] * x))
    del array
    gc.collect()
    assert held[0]() is None


def test_functions_that_cannot_be_cached() -> None:
    class Unhashable:
        __hash__ = None

        def __call__(self, x):
            return jax.lax.cond(x > 0, lambda x: x, jnp.zeros_like, x)

    class WithoutWeakReferences:
        __slots__ = ()

        def __call__(self, x):
            return 2 * x

    assert rules.elementwise(Unhashable()).fwd == pytest.approx(1.7129, abs=1e-4)
    assert rules.elementwise(WithoutWeakReferences()).fwd == pytest.approx(0.5, rel=1e-6)


def test_correlation_kernels() -> None:
    x, w = np.polynomial.hermite_e.hermegauss(80)
    w = w / w.sum()
    for f, mult in ((jax.nn.gelu, 1.0), (jax.nn.silu, 2.0), (jnp.tanh, 0.5)):
        y = np.asarray(f(mult * x), np.float64)
        for rho in (-0.9, -0.3, 0.0, 0.2, 0.7, 0.95, 1.0):
            partner = rho * x[:, None] + math.sqrt(1 - rho**2) * x
            both = w @ (y[:, None] * np.asarray(f(mult * partner), np.float64)) @ w
            found = np.polynomial.polynomial.polyval(rho, correlation_kernel(f, mult))
            assert found == pytest.approx(both / (w @ y**2 - (w @ y) ** 2), abs=1e-4)


def test_maxima() -> None:
    # Moments of the maximum of many from its distribution Phi^n, integrated on a grid.
    x = np.linspace(2, 9, 70001)
    below = np.exp(10**6 * np.log1p([-math.erfc(v / math.sqrt(2)) / 2 for v in x]))
    mass, middle = np.diff(below), (x[1:] + x[:-1]) / 2
    for n, variance, rel in (
        # Exact: Jones, "Exact values for the moments of normal order statistics", 1948.
        (1, 1.0, 1e-7),
        (2, 1 - 1 / math.pi, 1e-7),
        (3, 1 + math.sqrt(3) / (2 * math.pi) - 9 / (4 * math.pi), 1e-7),
        (10, 0.3443438233, 1e-7),  # Teichroew, 1956, table of products
        (10**6, mass @ (middle - mass @ middle) ** 2, 1e-5),
    ):
        assert rules.max_pool((n,)).fwd == pytest.approx(variance**-0.5, rel=rel)


def contributions(taus: tuple[float, ...]) -> np.ndarray:
    """Return the shares of embedding and branches in the variance of the final sum."""
    shares = np.array([1.0])
    for tau in taus:
        weights = rules.residual(tau)
        shares = np.append(shares * weights.skip**2, weights.branch**2)
    return shares


@given(st.floats(1e-3, 1e3))
def test_residual_weights_have_unit_norm_and_ratio_tau(tau) -> None:
    weights = rules.residual(tau)
    assert math.hypot(weights.branch, weights.skip) == pytest.approx(1, rel=1e-14)
    assert weights.branch / weights.skip == pytest.approx(tau, rel=1e-14)


def test_residual_schemes() -> None:
    assert rules.residual_taus("fixed", 2) == (0.5, 0.5)
    assert rules.residual_taus("fixed", 2, tau=2) == (2.0, 2.0)
    shares = contributions(rules.residual_taus("running_mean", 12))
    np.testing.assert_allclose(shares, 1 / 13, rtol=1e-12)
    for mult, ratio in ((1.0, 1.0), (0.5, 2.0), (3.0, 0.25)):
        length = 8
        shares = contributions(rules.residual_taus("depth", length, mult=mult, attn_ratio=ratio))
        mlp = 2 * mult**2 / (ratio**2 + 1)
        expected = np.array([length / 2, *[ratio**2 * mlp, mlp] * (length // 2)])
        np.testing.assert_allclose(shares, expected / expected.sum(), rtol=1e-12)


weight = st.floats(-100, 100).filter(lambda w: w == 0 or abs(w) > 1e-3)


@given(st.lists(weight, min_size=1, max_size=5).filter(any))
def test_weighted_add_has_unit_weights_and_the_true_derivative(weights) -> None:
    normalized = rules.normalized_weights(tuple(weights))
    assert math.fsum(w**2 for w in normalized) == pytest.approx(1, rel=1e-12)
    factors = rules.weighted_add(weights)
    assert factors.bwd == (factors.fwd,) * len(weights)
    np.testing.assert_allclose(normalized, np.multiply(weights, factors.fwd), rtol=1e-14)


TANH, WIDTH, STEPS, WARM = rules.elementwise(jnp.tanh).fwd, 256, 40, 20


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


SECOND = float(np.mean(sigmoid(np.random.default_rng(0).standard_normal(1_000_000)) ** 2))


@pytest.mark.parametrize(
    "kind",
    ["reset", "sum", *(pytest.param(k, marks=pytest.mark.slow) for k in ("update", "repeated"))],
)
def test_the_stationary_state_is_unit(kind, assert_unit) -> None:
    """Simulate a wide layer with random kernels and new gates at each step, as derived."""
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
    weights = [rules.gated_update(1e-6), rules.gated_update(0.5, reset=True)]
    weights += [rules.gated_update(0.5), rules.gated_update(1.0)]
    assert weights == sorted(weights, reverse=True)
    # Independent candidates, up to the sampled moment.
    assert weights[0] == pytest.approx((1 / SECOND - 1) ** 0.5, rel=2e-3)
    assert rules.gated_update(0.5, period=8) == pytest.approx(weights[0], rel=2.0**-7)


@pytest.mark.parametrize(
    ("role", "factor", "width"),
    [
        ("weight", 1 / 8, 64),
        ("embedding", 1 / 16, 256),
        ("readout", 1, 1),
        ("bias", 1, 256),
        ("norm", 1, 256),
    ],
)
def test_learning_rates(role, factor, width) -> None:
    rate = functools.partial(rules.umup_learning_rate, role, fan_in=64, fan_out=256)
    bound = {"readout_constraint": "to_output_scale"}
    assert factor == rate() == rate(optimizer="sgd") == rate(**bound)
    for depth in (2, 9):
        assert rate(depth=depth) == pytest.approx(factor / math.sqrt(depth), rel=1e-15)
    found = rate(depth=4, optimizer="sgd", **bound)
    assert found == pytest.approx(factor * width / 2, rel=1e-15)
    narrows = rate(depth=4, optimizer="muon", fan_in=256, fan_out=64)
    assert rate(optimizer="muon") == (1 if role == "weight" else factor)
    assert narrows == (1 / 4 if role == "weight" else rate(depth=4, fan_out=64))


rate = functools.partial(rules.umup_learning_rate, "weight", fan_in=64, fan_out=256)
ERRORS = [
    (lambda: Factors(0.0, (1.0,)), "positive and finite"),
    (lambda: Factors(1.0, (1.0, float("nan"))), "positive and finite"),
    (lambda: constrain("to_output", 1.0, 1.0), "one of .*None; got 'to_output'.*mean 'to_output_s"),
    (lambda: constrain("to_grad_input_scale", 1.0, 1.0, 1.0), "use 'to_left_grad_.* or 'to_right"),
    (lambda: constrain("to_left_grad_scale", 1.0, 1.0), "use 'to_grad_input_scale'"),
    (lambda: constrain("to_right_grad_scale", 1.0, 1.0, 1.0, 1.0), "use 'to_output_scale'"),
    (lambda: rules.dense(0, 4, 4), "dense: in_features must be at least 1; got 0"),
    (lambda: rules.matmul(4, -1, 4), "matmul: k must be at least 1"),
    (lambda: rules.conv((3,), 1, 1), "kernel_shape must have one entry for each"),
    (lambda: rules.conv((3, 4, 6), 1, 1, feature_group_count=4), "must divide"),
    (lambda: rules.conv((3, 4, 6), 1, 1, strides=(1, 1)), "strides must have one entry for each"),
    (lambda: rules.conv((3, 4, 6), 1, 1, input_dilation=0), r"dilation\[0\] must"),
    (lambda: rules.lora(4, 0, 4, 4), "lora: rank must be"),
    (lambda: rules.embed(10, 0), "embed: tokens must be at least 1"),
    (lambda: rules.grouped_dense(4, 8, 16, 0), "groups must be at least 1"),
    (lambda: rules.norm(64, 100), "size must be a multiple of features"),
    (lambda: rules.recurrent_kernel(0), "steps must be at least 1"),
    (lambda: rules.softmax(0), "axis_size must be at least 1"),
    (lambda: rules.softmax(4, mult=-1.0), "mult must be positive"),
    (lambda: rules.softmax_cross_entropy(1), "vocab must be at least 2; got 1"),
    (lambda: rules.mixture(2, 3), "mixture: top_k must be at most .* got 3 of 2"),
    (lambda: rules.router(4, 8, 0, top_k=2), "router: tokens must be at least 1"),
    (lambda: rules.dot_product_attention(0, 4, is_causal=True), "head_dim must be at least 1"),
    (lambda: rules.dot_product_attention(4, 4, is_causal=True, dropout_rate=1.0), "rate must be"),
    (lambda: rules.dot_product_attention(4, 4, is_causal=True, mean_square=0.0), "mean_square mus"),
    (lambda: rules.logit_factor(4, 0.0), "logit_factor: mult must be positive"),
    (lambda: rules.AttentionContext(taus_below=(0.5,)), "an even number; got 1"),
    (lambda: rules.AttentionContext(norm_placement="sandwich"), "norm_placement .*; got 'sandw"),
    (lambda: rules.AttentionContext(mlp_mult=0.0), "mlp_mult must be"),
    (lambda: rules.elementwise(lambda x: 0 * x + 3.7), "is constant"),
    (lambda: rules.elementwise(jnp.log), "log.* is not finite .*at mult"),
    (lambda: rules.elementwise(jnp.exp, mult=6.5), "grows too fast"),
    (lambda: rules.glu(jnp.zeros_like), "is zero"),
    (lambda: rules.dropout(1.0), r"rate must be in \[0, 1\)"),
    (lambda: rules.dropout(float("nan")), r"rate must be in \[0, 1\)"),
    (lambda: rules.avg_pool((0, 2)), r"window_shape\[0\] must be at least 1"),
    (lambda: rules.max_pool((2, 2), (1,)), "strides must have one entry for each"),
    (lambda: rules.residual(float("inf")), "residual: tau must be positive and finite"),
    (lambda: rules.residual_taus("running-mean", 4), "scheme must .*mean 'running_mean'"),
    (lambda: rules.residual_taus("fixed", 0), "num_branches must be at least 1"),
    (lambda: rules.weighted_add((0.0, 0.0)), "finite and not all zero"),
    (lambda: rules.weighted_add((1.0, float("inf"))), "finite and not all zero"),
    (lambda: rules.gated_update(0.0), "gated_update: share must be positive"),
    (lambda: rules.gated_sum(2.0), r"gated_sum: share must be in \(0, 1\]; got"),
    (lambda: rules.gated_update(period=0), "period must be at least 1"),
    (lambda: rate(fan_out=-1), "fan_out must be at least 1; got -1"),
    (lambda: rate(depth=0), "depth must be at least 1; got 0"),
    (lambda: rate(optimizer="adamw"), "optimizer must be .*; got 'adamw'"),
    (lambda: rate(readout_constraint="gmean"), "readout_constraint must be .*; got 'gmean'"),
    (
        lambda: rules.umup_learning_rate("wieght", fan_in=4, fan_out=4),
        "one of weight, .*mean 'weight'",
    ),
]
TYPES = [
    (lambda: rules.readout(4, 2.5, 4), "out_features must be a static integer"),
    (lambda: jax.jit(lambda n: rules.dense(4, 4, n).fwd)(3), "batch must be a static integer"),
    (lambda: jax.jit(lambda tau: rules.residual(tau).skip)(0.5), "tau must be a static real numb"),
    (lambda: rules.dropout([0.1, 0.2]), "rate must be a static real number"),
    (lambda: rules.elementwise(lambda x: jnp.stack([x, x])), "real scalar"),
    (lambda: rules.elementwise(lambda x: x + 1j), "real scalar"),
]


test_values = refuses([(ValueError, *row) for row in ERRORS])
test_types = refuses([(TypeError, *row) for row in TYPES])
