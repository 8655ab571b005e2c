"""Types of values and of their data."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale.transforms._values import ONE, Scale, Value, data_dtype, fit, plain


def test_only_concrete_floating_scalars_are_constants() -> None:
    assert plain(np.float32(0.5)).const == 0.5
    assert plain(np.int32(3)).const is None
    assert plain(np.ones(2)).const is None
    assert jax.jit(lambda x: jnp.float32(plain(x).const is None))(1.0) == 1.0


@pytest.mark.parametrize("how", [lambda f: f, jax.jit], ids=["eager", "jitted"])
def test_fit_clamps_what_is_finite(how: Callable[[Any], Any]) -> None:
    clamp = how(lambda x: fit(x, jnp.float16))
    numbers = [1e6, -1e6, 3e38, -3e38, 65519.0, 0.0, -0.0, jnp.inf, -jnp.inf, jnp.nan]
    expected = [65504, -65504] * 2 + [65504, 0.0, -0.0, np.inf, -np.inf, np.nan]
    found = clamp(jnp.asarray(numbers))
    np.testing.assert_array_equal(found, np.asarray(expected, np.float16))
    np.testing.assert_array_equal(np.signbit(found[5:7]), [False, True])
    np.testing.assert_array_equal(fit(found, jnp.float32), found)


def test_plain_operands_never_widen() -> None:
    half, plain = Value(jnp.ones(2, jnp.float16), ONE), Value(jnp.ones(2))
    assert data_dtype(half, plain) == jnp.float16
    assert data_dtype(half, Value(jnp.ones(2), ONE)) == jnp.float32


def test_uniform_keeps_the_value() -> None:
    value = Value(jnp.ones((2, 3)), Scale(0, jnp.asarray([[1.0], [8.0]]))).uniform()
    assert value.scale is not None
    assert value.scale.ndim == 0
    np.testing.assert_array_equal(value.numeric(), [[1, 1, 1], [8, 8, 8]])
