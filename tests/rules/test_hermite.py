"""Correlation kernels: closed forms and direct two-dimensional integration."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale.rules._elementwise import correlation_kernel

RHO = np.asarray([-0.9, -0.3, 0.0, 0.2, 0.7, 0.95])


def kernel_at(f, rho, mult=1.0):
    return np.polynomial.polynomial.polyval(rho, correlation_kernel(f, mult))


def test_relu_has_the_arc_cosine_kernel() -> None:
    # Cho and Saul, 2009, order 1, divided by the variance of relu.
    angle = np.arccos(RHO)
    expected = (np.sin(angle) + (math.pi - angle) * RHO) / (2 * math.pi)
    expected /= 0.5 - 1 / (2 * math.pi)
    # The terms beyond the 24th hold 2e-4 of relu's power.
    assert kernel_at(jax.nn.relu, RHO) == pytest.approx(expected, abs=3e-4)


@pytest.mark.parametrize("mult", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("f", [jax.nn.gelu, jax.nn.silu, jnp.tanh])
def test_smooth_functions_agree_with_a_two_dimensional_integral(f, mult) -> None:
    x, w = np.polynomial.hermite_e.hermegauss(80)
    w = w / w.sum()
    y = np.asarray(f(mult * x), np.float64)
    variance = w @ y**2 - (w @ y) ** 2
    for rho in RHO:
        partner = rho * x[:, None] + math.sqrt(1 - rho**2) * x
        expected = w @ (y[:, None] * np.asarray(f(mult * partner), np.float64)) @ w / variance
        assert kernel_at(f, rho, mult) == pytest.approx(expected, abs=1e-4)


def test_the_first_coefficient_is_the_mean_and_all_together_the_power() -> None:
    kernel = correlation_kernel(jax.nn.relu)
    mean_square, variance = 1 / (2 * math.pi), 0.5 - 1 / (2 * math.pi)
    assert kernel[0] == pytest.approx(mean_square / variance, rel=1e-6)
    assert kernel.sum() == pytest.approx(0.5 / variance, rel=1e-6)


def test_a_linear_function_keeps_the_correlation() -> None:
    assert kernel_at(lambda x: 3 * x, RHO) == pytest.approx(RHO, abs=1e-6)
