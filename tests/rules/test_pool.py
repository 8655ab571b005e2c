"""Pooling: formulas, and unit variance of output and gradient."""

import math

import numpy as np
import pytest

from unitscale import rules

WINDOWS = [(1, 1), (2, 2), (3, 1), (3, 2), (2, 3), (4, 4)]


def windows(x: np.ndarray, window: int, stride: int) -> np.ndarray:
    """Windows over the last axis, which is cyclic: every entry is in the interior."""
    starts = np.arange(0, x.shape[-1], stride)
    return (starts[:, None] + np.arange(window)) % x.shape[-1]


@pytest.mark.parametrize(("window", "stride"), WINDOWS)
def test_mean_is_unit(window, stride, assert_unit) -> None:
    factors = rules.avg_pool((window,), (stride,), constraint=None)

    def trial(rng):
        x = rng.standard_normal((100, 24))
        index = windows(x, window, stride)
        dx, g = np.zeros_like(x), rng.standard_normal((100, len(index)))
        np.add.at(dx, (slice(None), index), g[..., None] / window)
        return factors.fwd * x[:, index].mean(-1), factors.bwd[0] * dx

    assert_unit(trial)


@pytest.mark.parametrize(("window", "stride"), WINDOWS)
def test_maximum_is_unit(window, stride, assert_unit) -> None:
    factors = rules.max_pool((window,), (stride,), constraint=None)

    def trial(rng):
        x = rng.standard_normal((400, 24))
        index = windows(x, window, stride)
        dx, g = np.zeros_like(x), rng.standard_normal((400, len(index)))
        largest = np.take_along_axis(
            np.broadcast_to(index, (400, *index.shape)), x[:, index].argmax(-1)[..., None], -1
        )
        np.add.at(dx, (np.arange(400)[:, None], largest[..., 0]), g)
        y = x[:, index].max(-1)
        # The factor takes the deviation to 1, not the mean square.
        return factors.fwd * (y - y.mean()), factors.bwd[0] * dx

    assert_unit(trial, bias=2 / 9600)  # of the mean that is taken from the sample


@pytest.mark.parametrize(
    ("n", "variance"),
    [
        # Exact: Jones, "Exact values for the moments of normal order statistics", 1948.
        (1, 1.0),
        (2, 1 - 1 / math.pi),
        (3, 1 + math.sqrt(3) / (2 * math.pi) - 9 / (4 * math.pi)),
        (4, 0.4917152369),  # Teichroew, 1956, table of products
        (10, 0.3443438233),
    ],
)
def test_maximum_of_n(n, variance) -> None:
    assert rules.max_pool((n,)).fwd == pytest.approx(variance**-0.5, rel=1e-7)


def test_maximum_of_many_follows_the_extreme_value_law() -> None:
    """The distribution function of the maximum, Phi^n, integrated on its own grid."""
    n = 10**6
    x = np.linspace(2, 9, 70001)
    below = np.exp(n * np.log1p([-math.erfc(v / math.sqrt(2)) / 2 for v in x]))
    mass, middle = np.diff(below), (x[1:] + x[:-1]) / 2
    mean = mass @ middle
    assert rules.max_pool((1000, 1000)).fwd == pytest.approx(
        (mass @ (middle - mean) ** 2) ** -0.5, rel=1e-5
    )


@pytest.mark.parametrize("rule", [rules.avg_pool, rules.max_pool])
def test_constraint(rule) -> None:
    free = rule((2, 3), (2, 2), constraint=None)
    assert rule((2, 3), (2, 2)).bwd == (free.fwd,)
    assert rule((2, 3), (2, 2), constraint="to_grad_input_scale").fwd == free.bwd[0]
    assert rule((2, 3), (1, 1)) == rule((2, 3))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (((0, 2),), r"window_shape\[0\] must be at least 1"),
        (((2, 2), (0, 1)), r"strides\[0\] must be at least 1"),
        (((2, 2), (1,)), "strides must have one entry for each"),
    ],
)
@pytest.mark.parametrize("rule", [rules.avg_pool, rules.max_pool])
def test_errors(rule, arguments, match) -> None:
    with pytest.raises(ValueError, match=rf"unitscale\.rules\.{rule.__name__}: .*{match}"):
        rule(*arguments)
