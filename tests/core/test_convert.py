"""Trees into ScaledArrays and back: values, types, structure."""

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale.core import ScaledArray, as_scaled, is_scaled, to_array

FORMATS = ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]


@hypothesis.given(
    hnp.arrays(np.float32, st.integers(1, 6), elements=st.floats(0.25, 4, width=32)),
    st.integers(-60, 60),
)
@hypothesis.settings(max_examples=50)
def test_roundtrip_is_exact_in_the_same_type(x: np.ndarray, exponent: int) -> None:
    x = x * np.float32(2.0**exponent)
    y = as_scaled(jnp.asarray(x))
    np.testing.assert_array_equal(to_array(y), x)
    assert np.frexp(float(y.scale))[0] == 0.5
    rms = np.sqrt(np.mean(np.asarray(y.data, np.float64) ** 2))
    assert 0.75 * (1 - 2.0**-20) <= rms <= 1.5 * (1 + 2.0**-20)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_roundtrip_error_is_that_of_the_format(dtype: str, size: float) -> None:
    x = np.random.default_rng(0).uniform(0.5, 2, 200).astype(np.float32) * np.float32(size)
    y = as_scaled(jnp.asarray(x), dtype=dtype)
    assert y.dtype == jnp.dtype(dtype)
    np.testing.assert_allclose(to_array(y), x, rtol=float(jnp.finfo(dtype).eps) / 2)


def test_a_tree_keeps_its_structure_and_other_leaves() -> None:
    key = jax.random.key(0)
    tree = {
        "w": jnp.ones(2),
        "n": jnp.arange(3),
        "k": key,
        "s": "x",
        "i": 3,
        "f": 2.0,
        "none": None,
    }
    scaled = as_scaled(tree)
    assert {k for k, v in scaled.items() if is_scaled(v)} == {"w", "f"}
    for name in ("n", "k", "s", "i"):
        assert scaled[name] is tree[name]
    back = to_array(scaled)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    assert float(back["f"]) == 2


@pytest.mark.parametrize("leaf", [np.float32(3), np.full(2, 3.0), jnp.full(2, 3.0, jnp.bfloat16)])
def test_numpy_leaves(leaf: object) -> None:
    scaled = as_scaled(leaf)
    assert (float(scaled.scale), np.ravel(scaled.data)[0]) == (4, 0.75)


class TestZeros:
    @pytest.mark.parametrize("x", [jnp.zeros(3), jnp.zeros((0, 2)), 0.0, jnp.zeros(2, jnp.float16)])
    def test_have_scale_1(self, x: object) -> None:
        for scaled in (as_scaled(x), jax.jit(as_scaled)(x), as_scaled(x, dtype=jnp.float16)):
            assert float(scaled.scale) == 1
            np.testing.assert_array_equal(scaled.value, np.zeros_like(x))

    def test_structure_is_that_of_other_values(self) -> None:
        assert jax.tree.structure(as_scaled(jnp.zeros(3))) == jax.tree.structure(
            as_scaled(jnp.ones(3))
        )

    @pytest.mark.parametrize("dtype", [None, "float16"])
    def test_a_zero_bias_learns(self, dtype: str | None) -> None:
        def loss(b):
            return (to_array(b) * jnp.asarray([1.0, -2.0])).sum()

        grad = jax.grad(loss)(as_scaled(jnp.zeros(2), dtype=dtype))
        np.testing.assert_array_equal(grad.data, [1, -2])

    def test_small_numbers_are_not_zeros(self) -> None:
        with jax.enable_x64(True):
            x = as_scaled(jnp.asarray([1e-300]))
            assert float(x.value[0]) == 1e-300


class TestNotFinite:
    VALUES = np.float32([np.inf, -np.inf, np.nan, 3e-20, -2e-20])

    @pytest.mark.parametrize("dtype", [None, "float16", "bfloat16", "float8_e5m2"])
    def test_values_survive_and_do_not_reach_the_scale(self, dtype: str | None) -> None:
        x = as_scaled(jnp.asarray(self.VALUES), dtype=dtype)
        assert float(x.scale) == 2.0**-66
        rtol = 0 if dtype is None else float(jnp.finfo(dtype).eps) / 2
        np.testing.assert_allclose(to_array(x), self.VALUES, rtol=rtol)

    def test_infinity_is_nan_where_there_is_none(self) -> None:
        x = to_array(as_scaled(jnp.asarray(self.VALUES), dtype="e4m3fn"))
        assert np.isnan(x[:3]).all()
        assert np.isfinite(x[3:]).all()

    @pytest.mark.parametrize("special", [np.inf, np.nan])
    def test_alone_they_have_scale_1(self, special: float) -> None:
        assert float(as_scaled(jnp.asarray([special, 0.0])).scale) == 1


class TestStackAxes:
    X = np.float32([1, 32, 2.0**-20, 0])[:, None, None] * np.ones((4, 3, 3), np.float32)

    def test_each_item_has_its_scale(self) -> None:
        x = as_scaled(jnp.asarray(self.X), stack_axes=1)
        np.testing.assert_array_equal(x.scale.ravel(), [1, 32, 2.0**-20, 1])
        assert x.scale.shape == (4, 1, 1)
        np.testing.assert_array_equal(x.value, self.X)
        assert as_scaled(x, stack_axes=2).scale.shape == (4, 3, 1)
        assert as_scaled(jnp.asarray(self.X), 2.0, stack_axes=1).scale.shape == (4, 1, 1)
        assert as_scaled(jnp.arange(1.0, 4), stack_axes=1).scale.shape == (3,)

    def test_scan_and_vmap_map_data_and_scale_together(self) -> None:
        x = as_scaled({"w": jnp.asarray(self.X), "b": jnp.asarray(self.X[:, 0])}, stack_axes=1)

        def layer(v, p):
            return (v @ p["w"] + p["b"]).value, (v @ p["w"]).sum().value

        expected, v = [], np.ones(3)
        for w in np.float64(self.X):
            expected.append((v @ w).sum())
            v = v @ w + w[0]
        last, sums = jax.lax.scan(lambda v, p: layer(ScaledArray(v, 1), p), jnp.ones(3), x)
        np.testing.assert_allclose(last, v, rtol=1e-6)
        np.testing.assert_allclose(sums, expected, rtol=1e-6)
        each = jax.vmap(lambda p: (p["w"] @ p["b"]).value)(x)
        np.testing.assert_allclose(each, 3 * self.X[:, 0] ** 2, rtol=1e-6)

    def test_leaves_without_the_axes(self) -> None:
        with pytest.raises(ValueError, match=r"stack_axes=2 axes; got a leaf of shape \(3,"):
            as_scaled(jnp.ones(3), stack_axes=2)


class TestGivenScale:
    def test_data_is_divided(self) -> None:
        x = as_scaled({"w": jnp.asarray([2.0, 6.0])}, 4.0)["w"]
        np.testing.assert_array_equal(x.data, [0.5, 1.5])

    @pytest.mark.parametrize("scale", [1, 1.0])
    def test_one_is_an_array(self, scale: float) -> None:
        assert as_scaled(jnp.ones(2), scale).scale.dtype == jnp.float32

    def test_per_channel(self) -> None:
        x = as_scaled(jnp.ones((2, 3)), jnp.asarray([1.0, 2.0, 4.0]))
        np.testing.assert_array_equal(x.value, np.ones((2, 3)))

    def test_moves_a_scaled_array_and_keeps_its_type(self) -> None:
        x = as_scaled(ScaledArray(jnp.ones(2, jnp.float8_e4m3fn), 8.0), 2.0)
        assert x.dtype == jnp.float8_e4m3fn
        np.testing.assert_array_equal(x.data.astype(jnp.float32), [4, 4])

    @pytest.mark.parametrize("scale", [0, -1.0, np.inf, np.nan, np.float32(0)])
    def test_wrong_numbers(self, scale: float) -> None:
        with pytest.raises(ValueError, match=r"unitscale\.as_scaled: scale must be positive"):
            as_scaled(jnp.ones(2), scale)

    def test_wrong_shape(self) -> None:
        with pytest.raises(ValueError, match="broadcast"):
            as_scaled(jnp.ones((2, 3)), jnp.ones((4, 2, 3)))


def test_scaled_leaves_are_kept_or_cast() -> None:
    x = ScaledArray(jnp.asarray([1000.0]), 2.0)
    assert as_scaled(x) is x
    y = as_scaled(x, dtype="e4m3fn")
    assert (y.dtype, float(y.value[0])) == (jnp.float8_e4m3fn, 896)


def test_to_array_in_a_type() -> None:
    x = to_array([ScaledArray(jnp.ones(2), 2.0), jnp.arange(2)], jnp.float16)
    assert (x[0].dtype, x[1].dtype) == (jnp.float16, jnp.int32)


def test_gradients_flow_through() -> None:
    grad = jax.grad(lambda x: (to_array(as_scaled(x)) * 3).sum())(jnp.ones(2) * 100)
    np.testing.assert_array_equal(grad, [3, 3])


def test_blocks_do_not_reach_over_stack_axes() -> None:
    tiles = ScaledArray(jnp.ones((4, 8)), jnp.ones((2, 4)), block_shape=(2, 2))
    with pytest.raises(ValueError, match=r"blocks of \(2, 2\), stack_axes=1"):
        as_scaled(tiles, stack_axes=1)
    rows = ScaledArray(jnp.ones((4, 8)), jnp.ones((4, 4)), block_shape=(1, 2))
    np.testing.assert_array_equal(as_scaled(rows, stack_axes=1).value, rows.value)
