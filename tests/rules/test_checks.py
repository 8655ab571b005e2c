"""Argument checks shared by the rules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale import rules
from unitscale.rules._factors import check_sizes, positive_number, real_number


def test_accepts_numpy_integers_and_floats() -> None:
    check_sizes("rule", size=np.int32(3))
    assert positive_number("rule", "x", np.float32(0.5)) == 0.5
    assert real_number("rule", "x", -2) == -2.0


def test_traced_sizes_and_numbers_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"dense: batch must be a static integer.*Take sizes from"):
        jax.jit(lambda n: rules.dense(4, 4, n).fwd)(3)
    with pytest.raises(TypeError, match="residual: tau must be a static real number"):
        jax.jit(lambda tau: rules.residual(tau).skip)(jnp.float32(0.5))


@pytest.mark.parametrize("bad", [0, -1.0, float("inf"), float("nan")])
def test_positive_number_names_the_argument(bad) -> None:
    with pytest.raises(ValueError, match="rule: x must be positive and finite"):
        positive_number("rule", "x", bad)
