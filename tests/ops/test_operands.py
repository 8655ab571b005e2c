"""Taking operands apart."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale import ops
from unitscale.core import ScaledArray
from unitscale.ops._operands import (
    output_dtype,
    scale_argument,
    shape_error,
    unpack,
)

from .conformance import normal

DATA = jnp.asarray([[1.0, -2.0, 3.0], [4.0, 5.0, -6.0]], jnp.float16)


def test_plain_arrays_have_no_scale() -> None:
    for x in (DATA, np.asarray(DATA), ScaledArray(DATA)):
        data, scale = unpack("op", "x", x)
        np.testing.assert_array_equal(data, DATA)
        assert scale is None
    data, scale = unpack("op", "x", [1.0, 2.0])
    np.testing.assert_array_equal(data, [1, 2])


def test_blocks_become_one_scale_per_element() -> None:
    x = ScaledArray(DATA, jnp.array([[2.0, 4.0]]), block_shape=(2, 2))
    data, scale = unpack("op", "x", x)
    np.testing.assert_array_equal(jnp.broadcast_to(scale, data.shape), [[2, 2, 4]] * 2)


UNIFORM = [
    # scale, axes, shape of the scale that is left
    (8.0, (-1,), ()),
    ([[8.0]], (0, 1), ()),
    ([[2.0], [4.0]], (-1,), (2, 1)),
    ([1.0, 2.0, 4.0], (0,), (1, 3)),
    ([1.0, 2.0, 4.0], (-1,), ()),
    ([1.0, 2.0, 4.0], (0, -1), ()),
    ([[2.0], [4.0]], (0,), ()),
    ([[2.0, 1.0, 0.5], [4.0, 8.0, 0.0]], (1,), (2, 1)),
    ([0.0, 0.0, 0.0], (-1,), ()),
    ([2.0**60, 2.0**-60, 1.0], (-1,), ()),
]


@pytest.mark.parametrize(("scale", "axes", "shape"), UNIFORM, ids=range(len(UNIFORM)))
def test_uniform_keeps_the_value(scale, axes, shape) -> None:
    scale = np.asarray(scale, np.float32)
    data, left = unpack("op", "x", ScaledArray(DATA, scale), axes)
    assert jnp.shape(left) == shape
    # The data never grows, so that it stays in range whatever the scale.
    assert (np.abs(data) <= np.abs(np.float32(DATA))).all()
    expected = np.float64(DATA) * np.float64(scale)
    np.testing.assert_allclose(np.float64(data) * np.float64(left), expected, rtol=1e-6)


def test_uniform_keeps_narrow_data_where_it_can() -> None:
    rows = ScaledArray(DATA, jnp.array([[2.0], [4.0]]))
    assert unpack("op", "x", rows, (-1,))[0].dtype == jnp.float16
    assert unpack("op", "x", rows, (0,))[0].dtype == jnp.float32


def test_uniform_gradient_is_in_data_space() -> None:
    scale = jnp.array([1.0, 2.0, 4.0])

    def value(data, scale):
        data, left = unpack("op", "x", ScaledArray(data, scale), (-1,))
        return jnp.sum(data * left)

    grad, of_scale = jax.grad(value, (0, 1))(DATA, scale)
    np.testing.assert_array_equal(grad, [[1, 2, 4]] * 2)
    np.testing.assert_array_equal(of_scale, 0)


def test_output_dtype() -> None:
    half, byte = jnp.float16, jnp.float8_e4m3fn
    assert output_dtype(jnp.ones(2, half)) == half
    assert output_dtype(ScaledArray(jnp.ones(2, half), 2.0), jnp.ones(2, half)) == half
    assert output_dtype(jnp.ones(2, byte)) == jnp.bfloat16
    assert output_dtype(jnp.ones(2, half), jnp.ones(2, jnp.bfloat16)) == jnp.float32


def test_scale_argument() -> None:
    assert scale_argument(None) is None
    assert scale_argument(jnp.float32(2)) == 2
    assert scale_argument(jnp.asarray(2, jnp.float8_e8m0fnu)).dtype == jnp.float32


@pytest.mark.parametrize(
    ("x", "got"),
    [(DATA > 0, "bool"), (np.arange(2), "int"), (None, "NoneType"), ("x", "str")],
)
def test_not_floating(x, got) -> None:
    with pytest.raises(TypeError, match=rf"unitscale\.ops\.op: name must be a floating.*got {got}"):
        unpack("op", "name", x)


def test_shape_error_names_the_shapes() -> None:
    error = shape_error("op", "x must fit y", "Transpose?", x=(1, 2), y=(3,))
    assert str(error) == "unitscale.ops.op: x must fit y; got x (1, 2), y (3,). Transpose?"
    assert isinstance(error, ValueError)


PRODUCTS = {
    "dense": (ops.dense, (3, 4), (4, 2)),
    "dense with bias": (lambda x, w: ops.dense(x, w, jnp.zeros(2)), (3, 4), (4, 2)),
    "readout": (ops.readout, (3, 4), (4, 2)),
    "matmul": (ops.matmul, (2, 3, 4), (4, 5)),
    "conv": (ops.conv, (1, 5, 4), (3, 4, 2)),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_scales_of_products_stay_in_range(name: str, dtype: str) -> None:
    """2^100 * 2^100 and 2^-100 * 2^-100 are out of float32's range; the values are not."""
    op, *shapes = PRODUCTS[name]
    x, w = (jnp.asarray(a, dtype) for a in normal(name, *shapes))
    x = x.at[0].set(0)  # and zeros stay zeros
    plain = np.asarray(op(x, w).value, np.float64)
    for powers in ((100, 100), (-100, -100), (100, -100)):
        total = sum(powers)
        shift = -50 * np.sign(total)
        scaled = (
            ScaledArray(a * 2.0 ** float(shift), jnp.float32(2.0**p))
            for a, p in zip((x, w), powers, strict=True)
        )
        y = jax.jit(op)(*scaled)
        assert float(y.scale) == 2.0 ** min(max(total, -126), 127)
        np.testing.assert_array_equal(
            np.asarray(y.value, np.float64), plain * 2.0 ** (total + 2 * shift), err_msg=str(powers)
        )
