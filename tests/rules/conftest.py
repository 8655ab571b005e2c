"""The Monte Carlo check of the rule tests.

A rule states that an array has RMS 1. Independent trials give estimates of its mean square; the
tolerance is five standard errors of their mean.
"""

import zlib
from collections.abc import Callable, Sequence

import numpy as np
import pytest

Trial = Callable[[np.random.Generator], Sequence[np.ndarray]]


@pytest.fixture
def assert_unit(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Make a check that all arrays of a trial have mean square 1."""

    def check(trial: Trial, *, trials: int = 64, bias: float = 0.0) -> None:
        rng = np.random.default_rng(zlib.crc32(request.node.name.encode()))
        squares = np.array([[np.mean(a**2) for a in trial(rng)] for _ in range(trials)])
        error = squares.std(0, ddof=1) / np.sqrt(trials)
        assert (error < 0.02).all(), f"too few samples to tell: standard errors {error}"
        off = np.abs(squares.mean(0) - 1)
        assert (off <= 5 * error + bias + 1e-12).all(), (squares.mean(0), error)

    return check
