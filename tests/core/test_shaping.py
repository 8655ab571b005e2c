"""Indexing, updates and rearrangement: the same elements as NumPy's, exactly."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.batching import compute, entry
from unitscale.core import ScaledArray

from .arrays import DTYPES, KINDS, assert_close, exact, make, stored

REARRANGE = {
    "int": lambda x: x[1],
    "slice": lambda x: x[1:3, ::2],
    "ellipsis": lambda x: x[..., -1],
    "newaxis": lambda x: x[:, None],
    "array": lambda x: x[np.array([0, 2, 2])],
    "mask": lambda x: x[np.array([True, False, True, True])],
    "element": lambda x: x[2, 3],
    "reshape": lambda x: x.reshape(2, 12),
    "reshape tuple": lambda x: x.reshape((3, -1)),
    "ravel": lambda x: x.ravel(),
    "flatten": lambda x: x.flatten(),
    "T": lambda x: x.T,
    "transpose": lambda x: x.transpose(1, 0),
    "transpose tuple": lambda x: x.transpose((1, 0)),
    "swapaxes": lambda x: x.swapaxes(0, -1),
    "mT": lambda x: x.mT,
    "squeeze": lambda x: x[:1].squeeze(0),
    "squeeze all": lambda x: x[:1].squeeze(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_elements(kind: str) -> None:
    x = make(kind, "float16")
    for name, got in compute({name: (fn, x) for name, fn in REARRANGE.items()}).items():
        with entry(name):
            expected = exact(x).T if name == "mT" else REARRANGE[name](exact(x))
            assert got.dtype == jnp.float16
            assert got.shape == expected.shape
            np.testing.assert_array_equal(exact(got), expected)
            if kind in ("none", "one", "zero", "tensor"):
                assert np.shape(got.scale) == ()


@pytest.mark.parametrize("kind", ["channel", "row", "e8m0"])
def test_transposed_scales_stay_small(kind: str) -> None:
    x = make(kind, "float32")
    assert x.T.scale.shape == x.scale.shape[::-1]
    assert x.T.scale.dtype == x.scale.dtype


def test_transposed_blocks_stay_blocks() -> None:
    scale = stored(2.0 ** np.arange(12).reshape(2, 3, 2), "float8_e8m0fnu")
    x = ScaledArray(jnp.ones((2, 5, 4)), scale, block_shape=(1, 2, 2))
    for axes in ((), (1, 2, 0), ((2, 0, -2),), (None,)):
        y = x.transpose(*axes)
        assert y.scale.dtype == scale.dtype
        assert y.block_shape == tuple(np.ones(x.block_shape).transpose(*axes).shape)
        np.testing.assert_array_equal(y.value, np.asarray(x.value).transpose(*axes))
    stack = jax.tree.map(lambda leaf: leaf[None], x)
    for y in (jax.vmap(lambda x: x.T)(stack), stack.transpose(0, 3, 2, 1)):
        assert y.block_shape == (1, 2, 2, 1)
        np.testing.assert_array_equal(y.value[0], x.value.T)
    one = ScaledArray(jnp.ones((1, 4)), jnp.ones((1, 1)), block_shape=(1, 4))
    assert one.T.block_shape == (4, 1)


def test_iteration_ends() -> None:
    x = make("row", "float32")
    rows = list(x)
    assert len(rows) == len(x) == 4
    np.testing.assert_array_equal(np.stack([exact(r) for r in rows]), exact(x))
    with pytest.raises(TypeError):
        iter(x[0, 0])


class TestAt:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_set_and_add(self, dtype: str) -> None:
        values = np.float32([1, 2, 4, 1, 2, 4])
        results = compute(
            {
                (name, kind): (lambda x, n=name: getattr(x.at[1], n)(values), make(kind, dtype))
                for name, kind in itertools.product(["set", "add"], KINDS)
            }
        )
        resolution = float(jnp.finfo(dtype).eps)
        smallest = float(jnp.finfo(dtype).smallest_subnormal) * 8
        for (name, kind), got in results.items():
            with entry((name, kind)):
                expected = exact(make(kind, dtype))
                expected[1] = values + (expected[1] if name == "add" else 0)
                assert got.dtype == jnp.dtype(dtype)
                assert_close(got, expected, resolution, np.abs(expected) + smallest / resolution)
                np.testing.assert_array_equal(exact(got)[[0, 2, 3]], expected[[0, 2, 3]])

    def test_scale_stays(self) -> None:
        x = make("channel", "float16")
        np.testing.assert_array_equal(x.at[0].set(1.0).scale, x.scale)
        y = make("block", "float32").at[0, 0].set(3.0)
        assert y.block_shape == (2, 2)
        assert exact(y)[0, 0] == 3

    def test_scaled_values(self) -> None:
        x, y = make("tensor", "float32"), make("row", "float32", 2)
        expected = exact(x)
        expected[:2] = exact(y)[:2]
        np.testing.assert_array_equal(exact(x.at[:2].set(y[:2])), expected)

    def test_zeros_take_the_scale_of_the_first_update(self) -> None:
        x = ScaledArray(jnp.ones(3, jnp.float16), 0)
        y = x.at[1].set(ScaledArray(jnp.float16(0.5), 2.0**30))
        assert float(y.scale) == 2.0**30
        np.testing.assert_array_equal(y.value, [0, 2.0**29, 0])

    def test_repeated_indices_add_up(self) -> None:
        x = ScaledArray(jnp.zeros(2), 2.0).at[jnp.array([0, 0, 1])].add(1.0)
        np.testing.assert_array_equal(x.value, [2, 1])

    def test_multiply_and_get(self) -> None:
        x = make("row", "float32")
        expected = exact(x)
        expected[2] *= 3
        np.testing.assert_allclose(exact(x.at[2].multiply(3.0)), expected, rtol=2.0**-23)
        np.testing.assert_array_equal(exact(x.at[2].get()), exact(x)[2])

    def test_8_bit_data_saturates(self) -> None:
        x = ScaledArray(jnp.ones(2, jnp.float8_e4m3fn), 2.0).at[0].set(1e6)
        np.testing.assert_array_equal(x.value, [896, 2])

    def test_is_differentiable(self) -> None:
        x = ScaledArray(jnp.ones(3), 4.0)
        dx, dv = jax.grad(lambda x, v: x.at[1].set(v).value.sum(), (0, 1))(x, jnp.float32(2))
        np.testing.assert_array_equal(dx.data, [4, 0, 4])
        assert float(dv) == 1

    @pytest.mark.parametrize("values", [None, "x", 1j])
    def test_other_values_are_refused(self, values: object) -> None:
        with pytest.raises(TypeError, match=r"at\[\.\.\.\]\.multiply: expected a real array"):
            ScaledArray(jnp.ones(2)).at[0].multiply(values)
        with pytest.raises(TypeError, match=r"at\[\.\.\.\]\.set: expected a real array"):
            ScaledArray(jnp.ones(2)).at[0].set(values)
