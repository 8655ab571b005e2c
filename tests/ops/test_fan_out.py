"""One activation for several products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale import ScaledArray, ops


@pytest.mark.parametrize("scale", [None, np.float32(4)])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_each_is_the_input_and_gradients_add_up(dtype: str, scale) -> None:
    x = jnp.asarray([1.0, -2.0, 0.5], dtype)

    def value(data):
        q, k, v = ops.fan_out(data if scale is None else ScaledArray(data, scale), 3)
        return jnp.sum(q.value * 2.0 + k.value * jnp.sin(v.value))

    def plain(data):
        data = data * (1 if scale is None else scale)
        return jnp.sum(data * 2.0 + data * jnp.sin(data))

    found, wanted = (jax.value_and_grad(f)(x) for f in (value, plain))
    assert found[1].dtype == dtype
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(
            np.float64(one), np.float64(other), rtol=8 * float(jnp.finfo(dtype).eps)
        )


def test_each_gradient_is_added_to_those_before_it() -> None:
    """Of three numbers whose sum depends on the order: 2^24 + 1 is 2^24 in float32."""

    def gradient(*weights: float) -> float:
        def value(x):
            return sum(w * y.data for w, y in zip(weights, ops.fan_out(x, 3), strict=True))

        return jax.grad(value)(1.0)

    assert gradient(1.0, 1.0, 2.0**24) == 2**24 + 2
    assert gradient(2.0**24, 1.0, 1.0) == 2**24


def test_errors() -> None:
    with pytest.raises(ValueError, match="count must be at least 1; got 0"):
        ops.fan_out(jnp.ones(2), 0)
    with pytest.raises(TypeError, match=r"fan_out: x must be a floating array.*int32"):
        ops.fan_out(jnp.ones(2, jnp.int32), 2)
