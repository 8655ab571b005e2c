"""Softmax: unit spread and gradient, limits."""

import math

import numpy as np
import pytest

from unitscale import rules


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
