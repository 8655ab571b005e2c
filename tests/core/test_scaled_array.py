"""ScaledArray: construction, facts, trees under JAX's transformations, conversions."""

import copy
import pickle

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.batching import compute, entry
from unitscale.core import ScaledArray

from .arrays import DTYPES, KINDS, exact, make

E8M0 = jnp.float8_e8m0fnu


@pytest.mark.parametrize(
    ("data", "kwargs", "error", "message"),
    [
        ((2, 3), {"scale": jnp.ones(2)}, ValueError, r"broadcast.*data \(2, 3\), scale \(2,\)"),
        ((2, 3), {"scale": jnp.ones((4, 2, 3))}, ValueError, "scale must broadcast against data"),
        ((1,), {"scale": jnp.ones(3)}, ValueError, "scale must broadcast against data"),
        ((2,), {"scale": -1.0}, ValueError, "Put sign and zeros into data"),
        ((2,), {"scale": 0}, ValueError, "Put sign and zeros into data"),
        ((2,), {"scale": "x"}, TypeError, "scale must be None, a number or a float array; got str"),
        ((2,), {"scale": [2.0]}, TypeError, "got list"),
        ((4, 4), {"scale": 2.0, "block_shape": (2, 2)}, ValueError, r"scale of shape \(2, 2\)"),
        ((4, 4), {"scale": jnp.ones((2, 2)), "block_shape": (4,)}, ValueError, "per dimension"),
        ((4, 4), {"scale": jnp.ones((2, 2)), "block_shape": (2, 0)}, ValueError, "one positive"),
        ((4, 5), {"scale": jnp.ones((2, 2)), "block_shape": (2, 2)}, ValueError, r"\(2, 3\); got"),
    ],
)
def test_wrong_scales(data: tuple, kwargs: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=rf"unitscale\.ScaledArray: .*{message}"):
        ScaledArray(jnp.ones(data), **kwargs)


@pytest.mark.parametrize("data", [jnp.arange(3), True, 1, jnp.ones(2, jnp.complex64)])
def test_data_must_be_floating(data: object) -> None:
    with pytest.raises(TypeError, match="data must be a floating array; got dtype"):
        ScaledArray(data, 2.0)


def test_data_must_not_be_scaled() -> None:
    with pytest.raises(TypeError, match="data is a ScaledArray already; use rebalance"):
        ScaledArray(ScaledArray(jnp.ones(2)), 2.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_facts(dtype: str, kind: str) -> None:
    x = make(kind, dtype)
    assert (x.shape, x.ndim, x.size, len(x)) == ((4, 6), 2, 24, 4)
    assert x.dtype == jnp.dtype(dtype)
    scale_bytes = {"one": 4, "tensor": 4, "e8m0": 4, "channel": 24, "row": 16, "block": 24}.get(
        kind, 0
    )
    assert x.nbytes == 24 * x.dtype.itemsize + scale_bytes
    np.testing.assert_array_equal(np.asarray(x.value).astype(np.float64), exact(x))
    assert x.value.dtype == (x.dtype if kind == "none" else jnp.float32)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("none", "ScaledArray(float16[4,6], scale=None)"),
        ("one", "ScaledArray(float16[4,6], scale=1)"),
        ("tensor", "ScaledArray(float16[4,6], scale=8)"),
        ("channel", "ScaledArray(float16[4,6], scale=float32[1, 6])"),
        ("e8m0", "ScaledArray(float16[4,6], scale=float8_e8m0fnu[4, 1])"),
        ("block", "ScaledArray(float16[4,6], scale=float32[2, 3], block_shape=(2, 2))"),
    ],
)
def test_repr(kind: str, text: str) -> None:
    assert repr(make(kind, "float16")) == str(make(kind, "float16")) == text


def test_sharding_is_that_of_the_data() -> None:
    x = make("row", "float32")
    assert x.sharding == x.data.sharding
    # What is made like it may go to another device if it may.
    placed = jax.device_put(x, jax.devices()[0])
    assert [jnp.zeros_like(y).committed for y in (x, placed)] == [False, True]
    assert not jax.jit(lambda x: hasattr(x, "sharding"))(x)


def test_repr_while_tracing_and_of_placeholders() -> None:
    seen = []
    jax.jit(lambda x: seen.append(repr(x)) or x)(make("tensor", "float32"))
    assert seen == ["ScaledArray(float32[4,6], scale=float32[])"]
    placeholder = jax.tree.map(lambda _: None, make("tensor", "float32"))
    assert repr(placeholder) == "ScaledArray(NoneType[], scale=None)"
    assert "ShapeDtypeStruct" not in repr(jax.eval_shape(lambda x: x, make("row", "float32")))


def test_blocks_need_not_divide_data() -> None:
    scale = jnp.asarray([[1.0, 2.0], [4.0, 8.0]])
    x = ScaledArray(jnp.ones((3, 5)), scale, block_shape=(2, 3))
    expected = np.repeat(np.repeat(np.asarray(scale), 2, 0)[:3], 3, 1)[:, :5]
    np.testing.assert_array_equal(x.value, expected)


class TestExponent:
    @hypothesis.given(st.integers(-126, 127))
    @hypothesis.settings(max_examples=30)
    def test_roundtrip(self, exponent: int) -> None:
        x = ScaledArray.from_exponent(jnp.ones(2, jnp.float16), exponent)
        assert int(x.exponent) == exponent
        assert x.exponent.dtype == jnp.int32
        assert float(x.scale) == 2.0**exponent

    @pytest.mark.parametrize("kind", ["channel", "block", "e8m0"])
    def test_of_many_scales(self, kind: str) -> None:
        x = make(kind, "float32")
        np.testing.assert_array_equal(2.0**x.exponent, np.asarray(x.scale).astype(np.float32))

    def test_blocks(self) -> None:
        x = ScaledArray.from_exponent(jnp.ones(4), np.int8([3, -2]), block_shape=(2,))
        np.testing.assert_array_equal(x.value, [8, 8, 0.25, 0.25])

    def test_must_be_whole(self) -> None:
        with pytest.raises(TypeError, match="exponent must be integers; got dtype float32"):
            ScaledArray.from_exponent(jnp.ones(2), 1.0)


@pytest.mark.parametrize("kind", KINDS)
class TestTrees:
    def test_flatten_and_unflatten(self, kind: str) -> None:
        x = make(kind, "float16")
        leaves, structure = jax.tree.flatten(x)
        assert len(leaves) == (1 if kind == "none" else 2)
        y = jax.tree.unflatten(structure, leaves)
        assert (repr(y), y.block_shape) == (repr(x), x.block_shape)
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(x)]
        assert paths == [".data", ".scale"][: len(leaves)]

    @pytest.mark.parametrize("placeholder", [None, 0, 1, "sharding"])
    def test_placeholders_keep_the_structure(self, kind: str, placeholder: object) -> None:
        leaves, structure = jax.tree.flatten(make(kind, "float16"))
        filled = jax.tree.unflatten(structure, [placeholder] * len(leaves))
        assert jax.tree.structure(filled, is_leaf=lambda x: x is None) == structure

    def test_output_shardings(self, kind: str) -> None:
        x = make(kind, "float16")
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        shardings = jax.tree.map(lambda _: here, x)
        assert repr(jax.jit(lambda x: x, out_shardings=shardings)(x)) == repr(x)

    def test_jit_scan_and_tree_map(self, kind: str) -> None:
        x = make(kind, "float16")
        for y in (
            jax.jit(lambda x: x)(x),
            jax.lax.scan(lambda x, _: (x, None), x, None, length=2)[0],
            jax.lax.cond(True, lambda x: x, lambda x: x, x),
            jax.tree.map(lambda a: a, x),
            jax.checkpoint(lambda x: x)(x),
            copy.copy(x),
            copy.deepcopy(x),
            pickle.loads(pickle.dumps(x)),
            jax.block_until_ready(x),
            jax.device_put(x),
        ):
            assert (repr(y), y.block_shape) == (repr(x), x.block_shape)
            np.testing.assert_array_equal(exact(y), exact(x))

    def test_grad_in_data_space(self, kind: str) -> None:
        x = make(kind, "float32")
        grad = jax.jit(jax.grad(lambda x: (x.value * x.value).sum()))(x)
        assert jax.tree.structure(grad) == jax.tree.structure(x)
        scale = exact(x) / np.asarray(x.data)
        np.testing.assert_allclose(grad.data, 2 * np.asarray(x.data) * scale**2, rtol=1e-6)
        if kind in ("one", "tensor", "channel", "row", "block"):
            np.testing.assert_array_equal(grad.scale, np.zeros(x.scale.shape))

    def test_vmap_over_a_stack(self, kind: str) -> None:
        """vmap and scan stack data and scale alike: one scale per item."""
        x = make(kind, "float32")
        stacked = jax.tree.map(
            lambda a: jnp.stack([a, a, (2 * a.astype(jnp.float32)).astype(a.dtype)]), x
        )
        data_factor = np.array([1, 1, 4 if len(jax.tree.leaves(x)) == 2 else 2])
        expected = data_factor[:, None, None] * exact(x)
        double = jax.vmap(lambda x: x.map_data(lambda d: d * 2))
        table = {
            "stack": (lambda x: x.value, expected),
            "vmap": (jax.vmap(lambda x: x.value), expected),
            "doubled by vmap": (lambda x: double(x).value, 2 * expected),
            "map": (lambda x: jax.lax.map(lambda x: x.value, x), expected),
            "doubled": (lambda x: (x * 2.0).value, 2 * expected),
            "item": (lambda x: x[2].value, expected[2]),
            "sum": (lambda x: x.sum(0).value, expected.sum(0)),
        }
        for name, got in compute({name: (f, stacked) for name, (f, _) in table.items()}).items():
            with entry(name):
                # Three terms of one sign.
                rtol = 3 * 2.0**-23 if name == "sum" else 0
                np.testing.assert_allclose(got, table[name][1], rtol=rtol)


class TestBatchedScales:
    def test_one_scale_per_item(self) -> None:
        """A square batch of vectors: the scale goes with the batch, not with the elements."""
        data = jnp.asarray([[1.0, 1.0], [1.0, 1.0]])
        x = jax.vmap(lambda d, s: ScaledArray(d, s))(data, jnp.asarray([1.0, 4.0]))
        assert x.scale.shape == (2, 1)
        np.testing.assert_array_equal(x.value, [[1, 1], [4, 4]])

    def test_two_levels(self) -> None:
        scales = jnp.asarray([[1.0, 2.0], [4.0, 8.0]])
        x = jax.vmap(jax.vmap(lambda d, s: ScaledArray(d, s)))(jnp.ones((2, 2, 2)), scales)
        np.testing.assert_array_equal(x.value, np.repeat(scales[..., None], 2, 2))

    def test_vectors_of_scalars(self) -> None:
        x = jax.vmap(lambda d, s: ScaledArray(d, s))(jnp.ones(3), jnp.asarray([1.0, 2.0, 4.0]))
        np.testing.assert_array_equal(x.value, [1, 2, 4])

    def test_scan_outputs(self) -> None:
        _, x = jax.lax.scan(
            lambda c, d: (c * 2, ScaledArray(d, c)), jnp.float32(1), jnp.ones((3, 3))
        )
        np.testing.assert_array_equal(x.value, np.repeat([[1], [2], [4]], 3, 1))

    def test_blocks(self) -> None:
        x = jax.vmap(lambda d, s: ScaledArray(d, s, block_shape=(2,)))(
            jnp.ones((2, 4)), jnp.asarray([[1.0, 2.0], [4.0, 8.0]])
        )
        assert x.block_shape == (1, 2)
        np.testing.assert_array_equal(x.value, [[1, 1, 2, 2], [4, 4, 8, 8]])
        np.testing.assert_array_equal((-x).value, -np.asarray(x.value))


class TestConversions:
    def test_jnp_functions_take_the_value(self) -> None:
        x = make("row", "float16")
        np.testing.assert_allclose(jax.jit(lambda x: jnp.sin(x.value))(x), np.sin(exact(x)), 1e-4)
        np.testing.assert_array_equal(jnp.asarray(x), exact(x))
        np.testing.assert_array_equal(jax.jit(jnp.asarray)(x), exact(x))
        np.testing.assert_array_equal(jnp.stack([x.value, x.value])[1], exact(x))

    def test_numpy(self) -> None:
        x = make("row", "float16")
        assert np.asarray(x).dtype == np.float32
        np.testing.assert_array_equal(np.asarray(x, np.float64), exact(x))
        np.testing.assert_allclose(np.sin(x), np.sin(exact(x)), 1e-4)

    def test_python_scalars(self) -> None:
        x = ScaledArray(jnp.asarray(0.5, jnp.float8_e4m3fn), 8.0)
        assert (float(x), bool(x), int(x)) == (4, True, 4)
        assert (f"{x:.2f}", f"{x}") == ("4.00", str(x))
        assert not bool(ScaledArray(jnp.zeros(()), 2.0))
        with pytest.raises(TypeError):
            float(make("row", "float32"))

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e5m2"])
    def test_astype_casts_data(self, dtype: str) -> None:
        x = make("row", "float32")
        y = x.astype(dtype)
        assert y.dtype == jnp.dtype(dtype)
        np.testing.assert_array_equal(y.data, x.data.astype(dtype))
        np.testing.assert_array_equal(y.scale, x.scale)

    @pytest.mark.parametrize("dtype", ["int32", "bool"])
    def test_astype_of_other_types_casts_the_value(self, dtype: str) -> None:
        x = ScaledArray(jnp.asarray([0.7, 0.0, -1.5]), 4.0)
        y = x.astype(dtype)
        assert isinstance(y, jax.Array)
        np.testing.assert_array_equal(y, np.array([2.8, 0, -6]).astype(dtype))

    def test_float64(self) -> None:
        with jax.enable_x64(True):
            x = ScaledArray(jnp.asarray([1 + 2.0**-40]), 8.0)
            assert (x * x).dtype == x.value.dtype == jnp.float64
            assert float((x + 1.0).value[0]) == 8 * (1 + 2.0**-40) + 1


@jax.jit
def some_results(x):
    arithmetic = (x + x, x - x, x * x, x * 0.0, x + 0.0, -x, x**2)
    return *arithmetic, x.sum(), x.mean(0), x @ x.T, x[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("special", [0.0, np.inf, -np.inf, np.nan, 1e-45])
def test_special_values_do_not_reach_the_scale(kind: str, special: float) -> None:
    x = make(kind, "float32").map_data(lambda d: jnp.asarray(np.where(d > 1, d, special)))
    for y in some_results(x):
        if y.scale is not None:
            assert np.isfinite(np.asarray(y.scale).astype(np.float32)).all()
            assert (np.asarray(y.scale).astype(np.float32) > 0).all()


def test_is_immutable() -> None:
    x = ScaledArray(jnp.ones(2), 2.0)
    for name in ("data", "scale", "_scale", "name"):
        with pytest.raises(AttributeError, match=rf"{name} cannot be set. Use x.map_data"):
            setattr(x, name, 1)
    with pytest.raises(AttributeError, match="cannot be deleted"):
        del x.data


def test_structure_does_not_depend_on_numbers() -> None:
    structures = {
        jax.tree.structure(ScaledArray(jnp.ones(2), s)) for s in (1, 1.0, 2, jnp.ones(()))
    }
    assert len(structures) == 1


def test_shapes_alone_have_a_repr() -> None:
    abstract = jax.eval_shape(lambda: ScaledArray(jnp.ones(3), jnp.float32(2.0)))
    assert repr(abstract) == "ScaledArray(float32[3], scale=float32[])"
