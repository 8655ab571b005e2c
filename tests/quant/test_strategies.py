"""Strategies."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale.core import ScaledArray
from unitscale.quant import Unit, quantize


def test_unit_is_a_value() -> None:
    assert Unit() == Unit()
    assert hash(Unit()) == hash(Unit())
    with pytest.raises((dataclasses.FrozenInstanceError, TypeError)):
        Unit().scale = 2


def test_unit_takes_no_statistics() -> None:
    """Whatever the values, the scale stays; the program contains no reduction."""
    x = jnp.asarray([1e-3, 0.3, 1e3])
    assert quantize(x, "e4m3fn", Unit()).scale == 1
    assert quantize(ScaledArray(x, 8.0), "e4m3fn", Unit()).scale == 8
    jaxpr = str(jax.make_jaxpr(lambda x: quantize(x, "e4m3fn", Unit()).data)(x))
    assert "reduce" not in jaxpr
    np.testing.assert_array_equal(
        # A thousandth rounds up to the smallest subnormal number.
        np.asarray(quantize(x, "e4m3fn").data, np.float32),
        [2.0**-9, 0.3125, 448],
    )
