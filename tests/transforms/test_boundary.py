"""Arguments become values, and values results."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale import ScaledArray, as_scaled, to_array
from unitscale.transforms import scalify

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
    seen = []

    def look(x: jax.Array, y: jax.Array) -> jax.Array:
        seen.extend([x.dtype, y.dtype])
        return x

    scalify(look)(as_scaled(DATA, dtype=dtype), jnp.asarray(DATA, dtype))
    assert seen == [jnp.float32, dtype]


def test_a_scale_that_does_not_broadcast() -> None:
    good = ScaledArray(DATA, jnp.float32(2.0))
    bad = jax.tree.unflatten(jax.tree.structure(good), [DATA, jnp.ones(3)])
    with pytest.raises(ValueError, match=r"must broadcast against its data; got data \(2, 2\)"):
        scalify(jnp.sin)(bad)


@pytest.mark.parametrize(
    ("dtype", "scale"), [("float16", 512.0), ("bfloat16", 1.0), ("float32", 1.0)]
)
def test_results_are_measured_in_narrow_types_and_at_one_in_others(
    dtype: str, scale: float
) -> None:
    x = ScaledArray(jnp.full((4, 4), 16.0, dtype), jnp.float32(2.0))
    found = scalify(lambda x: (x @ x / 8, x + x, x, x.T, -x))(x)
    assert [float(y.scale) for y in found[2:]] == [2.0] * 3
    np.testing.assert_array_equal(found[0].value, 512.0)
    assert float(found[0].scale) == (512.0 if dtype == "float16" else 1.0)
    assert float(found[1].scale) == (64.0 if dtype == "float16" else 1.0)
