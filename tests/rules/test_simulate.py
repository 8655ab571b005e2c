"""Factors of functions without a rule: recognized or simulated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale import rules


def zeros(*shape):
    return np.zeros(shape, np.float32)


def test_intervals_cover_the_truth_and_shrink_with_seeds() -> None:
    widths = []
    for seeds in (8, 128):
        found = rules.simulate(lambda x: 3 * x, [zeros(64)], seeds=seeds)
        low, high = found.fwd_interval
        # Three deviations where the interval has two: it may miss once in 400.
        middle, half = (low + high) / 2, (high - low) / 2
        assert abs(middle - 1 / 3) < 1.5 * half
        assert low < found.factors.fwd < high
        widths.append(high - low)
    assert widths[1] < widths[0] / 2


def test_a_loss_has_forward_factor_one_and_its_mean_in_the_gradient() -> None:
    found = rules.simulate(lambda x: jnp.mean(x), [zeros(50)])
    assert found.is_loss
    assert found.factors.fwd == 1
    assert found.fwd_interval == (1.0, 1.0)
    assert found.factors.bwd == pytest.approx((50.0,))


def test_arguments_that_are_not_floating_are_used_as_they_are() -> None:
    ids = np.array([1, 1, 1])
    found = rules.simulate(lambda t, i: t[i], [zeros(4, 512), ids])
    # One row of four gets the sum of three cotangents: mean square 3 / 4.
    assert found.factors.bwd == pytest.approx(((4 / 3) ** 0.5,), rel=0.01)


LINEAR, PAIR = [zeros(96, 64), zeros(64, 48)], [zeros(128, 128)] * 2


@pytest.mark.parametrize(
    ("fn", "args", "rule"),
    [
        (jnp.matmul, LINEAR, rules.matmul(96, 64, 48, constraint=None)),
        (jax.nn.softmax, [zeros(256, 128)], rules.softmax(128, constraint=None)),
        (lambda pred, target: jnp.sum((pred - target) ** 2), PAIR, rules.mse_loss()),
    ],
    ids=["matmul", "softmax", "mse_loss"],
)
def test_simulated_factors_are_those_of_the_rules(fn, args, rule) -> None:
    found = rules.simulate(fn, args, seeds=24).factors
    np.testing.assert_allclose([found.fwd, *found.bwd], [rule.fwd, *rule.bwd], rtol=0.01)


def say(x):
    jax.debug.print("{}", x)
    return x


@pytest.mark.parametrize(
    ("fn", "args", "error", "message"),
    [
        (jnp.negative, [np.arange(3)], ValueError, "expected a floating argument; got 1 arguments"),
        (lambda: 1.0, [], ValueError, "expected a floating argument; got 0 arguments"),
        (lambda x: (x, x), [zeros(3)], TypeError, "returns one floating array"),
        (lambda x: jnp.argmax(x), [zeros(3)], TypeError, "returns one floating array"),
        (lambda x: 0 * x + 2, [zeros(3)], ValueError, "its result is constant"),
        (jnp.log, [zeros(3)], ValueError, "its result is not finite"),
        (3, [zeros(3)], TypeError, "expected a function; got int"),
        (jnp.sin, zeros(3), TypeError, "expected a sequence of example arguments; got one array"),
        (lambda x: x if x[0] > 0 else -x, [zeros(3)], TypeError, "needs the values of its"),
        (say, [zeros(3)], ValueError, "expected a function without side effects"),
        (jnp.round, [zeros(9)], ValueError, "the gradient of argument 0 is constant"),
    ],
)
def test_bad_functions(fn, args, error, message) -> None:
    with pytest.raises(error, match=rf"unitscale\.simulate: .*{message}"):
        rules.simulate(fn, args)
    with pytest.raises(ValueError, match="seeds must be at least 2, for an interval; got 1"):
        rules.simulate(fn, args, seeds=1)


A, B = np.zeros((4, 16), np.float32), np.zeros((16, 8), np.float32)


@pytest.mark.parametrize(
    ("fn", "args", "expected"),
    [
        (jnp.matmul, [A, B], rules.matmul(4, 16, 8, constraint=None)),
        (jax.nn.softmax, [A], rules.softmax(16, constraint=None)),
        (jnp.add, [A, A], rules.add(constraint=None)),
        (jax.nn.gelu, [A], rules.elementwise(jax.nn.gelu, constraint=None)),
        (jax.nn.relu, [A], rules.elementwise(jax.nn.relu, constraint=None)),
        (lambda x: jnp.sin(x) + 1, [A], rules.elementwise(jnp.sin, constraint=None)),
        (lambda x: jnp.where(x > 0, x, 0), [A], rules.elementwise(jax.nn.relu, constraint=None)),
        (lambda x: jnp.ones_like(x) - x, [A], rules.elementwise(jnp.negative, constraint=None)),
    ],
)
def test_known(fn, args, expected) -> None:
    found = rules.closed_form(fn, args)
    assert found is not None
    np.testing.assert_allclose([found.fwd, *found.bwd], [expected.fwd, *expected.bwd], rtol=1e-5)


@jax.custom_jvp
def sine(x):
    return jnp.sin(x)


# Only its slope knows the shape.
sine.defjvp(lambda xs, changes: (sine(*xs), changes[0] * jnp.cos(xs[0]) / xs[0].size))


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (jnp.matmul, [np.zeros((2, 3, 4)), np.zeros((4, 2))]),
        (jnp.add, [A, A[:1]]),
        (lambda x: x[::-1], [A]),
        (lambda x: x * np.arange(16.0), [A]),
        (lambda x: jnp.cumsum(x, axis=0), [A]),
        (lambda x: jnp.exp(jnp.exp(x)), [A]),
        (lambda x: x + 1, [np.arange(3)]),
        (lambda x: x / x.size, [A]),
        (lambda x: x / (1 + x.ndim), [A]),
        (lambda x: jnp.sin(x) if x.ndim else jnp.cos(x), [A]),
        (sine, [A]),
        (lambda x: x * (2.0 if x.shape == A.shape else 1.0), [A]),
        (jnp.matmul, [np.ones((4, 16), int), B]),
    ],
)
def test_unknown(fn, args) -> None:
    assert rules.closed_form(fn, args) is None


def test_numbers_from_outside_are_those_of_the_function() -> None:
    outer = jnp.asarray(2.0)
    found = rules.closed_form(lambda x: outer * jax.jit(lambda y: outer * y)(x), [A])
    assert found is not None
    np.testing.assert_allclose([found.fwd, *found.bwd], [0.25, 0.25], rtol=1e-5)
