"""Arguments become values, and values results."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale import ScaledArray, as_scaled, to_array
from unitscale.transforms import scalify
from unitscale.transforms._boundary import from_input, to_output, traced_aval
from unitscale.transforms._doubt import Doubt
from unitscale.transforms._lazy_scale import LazyScale
from unitscale.transforms._settle import leaving
from unitscale.transforms._values import Value

DATA = np.asarray([[1.0, -2.0], [0.5, 0.0]], np.float32)


@pytest.mark.parametrize("scale", [None, 1, jnp.float32(3.0), jnp.ones((2, 1)), jnp.ones((1,))])
def test_identity(scale: Any) -> None:
    x = ScaledArray(DATA, scale)
    np.testing.assert_array_equal(to_array(scalify(lambda a: a)(x)), x.value)


def test_scales_of_results_are_arrays_and_plain_stays_plain() -> None:
    for f in (lambda a: a, lambda a: 0 * a, lambda a: a * 2):
        result = scalify(f)(ScaledArray(DATA, 1))
        assert jax.tree.structure(result) == jax.tree.structure(ScaledArray(DATA, 1))
        np.testing.assert_array_equal(result.value, f(DATA))
    assert not isinstance(scalify(lambda a: a)(ScaledArray(DATA, None)), ScaledArray)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float8_e4m3fn])
def test_programs_are_traced_on_values(dtype: Any) -> None:
    assert traced_aval(as_scaled(DATA, dtype=dtype)).dtype == jnp.float32
    assert traced_aval(DATA) is DATA


def test_a_scale_that_does_not_broadcast() -> None:
    good = ScaledArray(DATA, jnp.float32(2.0))
    bad = jax.tree.unflatten(jax.tree.structure(good), [DATA, jnp.ones(3)])
    with pytest.raises(ValueError, match=r"must broadcast against its data; got data \(2, 2\)"):
        from_input(bad)


def test_certain_results_keep_the_static_scale_others_are_measured_or_at_one() -> None:
    """A product in a narrow type is not certain: its factors may be large in different places."""
    for dtype, scale, certain in (
        (jnp.float16, 128.0, Doubt(0.5)),
        (jnp.bfloat16, 1.0, Doubt(1.0)),
        (jnp.float32, 1.0, Doubt(1.0)),
    ):
        value = Value(jnp.full(4, 64.0, dtype), LazyScale(1), doubt=certain)
        assert float(to_output(leaving(value)).scale) == 2.0
        value = Value(jnp.full(4, 64.0, dtype), LazyScale(1), doubt=Doubt(1.5))
        result = to_output(leaving(value))
        assert float(result.scale) == scale
        np.testing.assert_array_equal(result.value, 128.0)
