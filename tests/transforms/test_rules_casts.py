"""Casts, complex numbers and Fourier transforms."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from unitscale import ScaledArray
from unitscale.transforms import scalify

from .law import law
from .table import CASTS, FFT

test_value_and_gradient = law([*CASTS, *FFT])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_casts_saturate_and_keep_the_scale(dtype: str) -> None:
    x = ScaledArray(jnp.asarray([1.0, -1e30]), jnp.float32(2.0))
    result = scalify(lambda a: a.astype(dtype))(x)
    assert result.dtype == dtype
    assert float(result.scale) == 2.0
    assert np.isfinite(np.asarray(result.data, np.float32)).all()


def test_integers_and_bools_have_no_scale() -> None:
    x = ScaledArray(jnp.asarray([1.0, 0.0]), jnp.float32(4.0))
    np.testing.assert_array_equal(scalify(lambda a: a.astype(jnp.int32))(x), [4, 0])
    np.testing.assert_array_equal(scalify(lambda a: a.astype(bool))(x), [True, False])
