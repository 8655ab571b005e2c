"""ScaledArray: construction, trees under JAX's transformations, elements and axes, reductions."""

import copy
import functools
import itertools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.batching import compute, entry
from unitscale.core import ScaledArray, as_scaled

from .arrays import DTYPES, KINDS, assert_close, eps, exact, make, stored


@pytest.mark.parametrize(
    ("data", "scale", "block_shape", "error", "match"),
    [
        (jnp.ones((2, 3)), jnp.ones(2), None, ValueError, "scale must broadcast"),
        (jnp.ones((2, 3)), jnp.ones((4, 2, 3)), None, ValueError, "scale must broadcast"),
        (jnp.ones(1), jnp.ones(3), None, ValueError, "scale must broadcast"),
        *[(jnp.ones(2), s, None, ValueError, "scale must be a number from")
          for s in (-1.0, 0, np.float32(0), np.nan, np.inf, 1e39, 1e-40)],
        *[(jnp.ones(2), s, None, TypeError, "scale must be None, a number or a real array")
          for s in ("x", [2.0], True, 2j, jnp.ones(2, bool), jnp.ones(2, jnp.complex64))],
        (jnp.ones((4, 4)), 2.0, (2, 2), ValueError, "one entry per block"),
        (jnp.ones((4, 4)), None, (2, 2), ValueError, "one entry per block"),
        (jnp.ones((4, 4)), jnp.ones((2, 2)), (4,), ValueError, "block_shape needs one"),
        (jnp.ones((4, 4)), jnp.ones((2, 2)), (2, 0), ValueError, "block_shape needs one positive"),
        (jnp.ones((4, 5)), jnp.ones((2, 2)), (2, 2), ValueError, "one entry per block"),
        *[(x, 2.0, None, TypeError, "data must be a floating array")
          for x in (jnp.arange(3), True, 1, jnp.ones(2, jnp.complex64))],
        (ScaledArray(jnp.ones(2)), 2.0, None, TypeError, "use rebalance"),
    ],
)  # fmt: skip
def test_wrong_arguments(data, scale, block_shape, error, match: str) -> None:
    with pytest.raises(error, match=rf"unitscale\.ScaledArray: .*{match}"):
        ScaledArray(data, scale, block_shape=block_shape)


def test_is_immutable() -> None:
    x = ScaledArray(jnp.ones(2), 2.0)
    for name in ("data", "scale", "_scale", "name"):
        with pytest.raises(AttributeError, match=f"{name} cannot be set"):
            setattr(x, name, 1)
    with pytest.raises(AttributeError, match="cannot be deleted"):
        del x.data


@pytest.mark.parametrize(
    ("kind", "scale_bytes", "text"),
    [
        ("none", 0, "scale=None"),
        ("one", 4, "scale=1"),
        ("tensor", 4, "scale=8"),
        ("channel", 24, "scale=float32[1, 6]"),
        ("row", 16, "scale=float32[4, 1]"),
        ("e8m0", 4, "scale=float8_e8m0fnu[4, 1]"),
        ("block", 24, "scale=float32[2, 3], block_shape=(2, 2)"),
    ],
)
def test_facts(kind: str, scale_bytes: int, text: str) -> None:
    for dtype in DTYPES:
        x = make(kind, dtype)
        assert (x.shape, x.ndim, x.size, len(x)) == ((4, 6), 2, 24, 4)
        assert (x.dtype, x.sharding) == (jnp.dtype(dtype), x.data.sharding)
        assert x.nbytes == 24 * x.dtype.itemsize + scale_bytes
        np.testing.assert_array_equal(np.asarray(x.value).astype(np.float64), exact(x))
        assert x.value.dtype == (x.dtype if kind == "none" else jnp.float32)
        assert repr(x) == str(x) == f"ScaledArray({dtype}[4,6], {text})"


def test_facts_while_tracing_and_of_placeholders() -> None:
    x = make("tensor", "float32")
    seen = []
    jax.jit(lambda x: seen.append((repr(x), hasattr(x, "sharding"))) or x)(x)
    assert seen == [("ScaledArray(float32[4,6], scale=float32[])", False)]
    assert repr(jax.eval_shape(lambda: x)) == seen[0][0]
    assert repr(jax.tree.map(lambda _: None, x)) == "ScaledArray(NoneType[], scale=None)"
    # What is made like it may go to another device if it may.
    placed = jax.device_put(x, jax.devices()[0])
    assert [jnp.zeros_like(y).committed for y in (x, placed)] == [False, True]


@pytest.mark.parametrize("kind", KINDS)
def test_leaves(kind: str) -> None:
    x = make(kind, "float16")
    leaves, structure = jax.tree.flatten(x)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(x)]
    assert paths == ([".data"] if kind == "none" else [".data", ".scale"])
    for placeholder in (None, 0, 1, "sharding"):
        filled = jax.tree.unflatten(structure, [placeholder] * len(leaves))
        assert jax.tree.structure(filled, is_leaf=lambda x: x is None) == structure
    if kind != "none":
        other = ScaledArray(x.data, x.scale * 2, block_shape=x.block_shape)
        assert jax.tree.structure(other) == structure


def test_transformations() -> None:
    given = {kind: make(kind, "float16") for kind in KINDS}
    here = jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]), given)

    def program(x):
        y = jax.lax.scan(lambda x, _: (x, None), x, None, length=2)[0]
        return jax.checkpoint(lambda x: x)(jax.lax.cond(True, lambda x: x, lambda x: x, y))

    traced = jax.jit(program, out_shardings=here)(given)
    for kind, x in given.items():
        for y in (
            traced[kind],
            jax.tree.map(lambda a: a, x),
            copy.copy(x),
            copy.deepcopy(x),
            pickle.loads(pickle.dumps(x)),
            jax.device_put(x),
            x.block_until_ready(),
        ):
            assert (repr(y), y.block_shape) == (repr(x), x.block_shape)
            np.testing.assert_array_equal(exact(y), exact(x))


def test_vmap_over_a_stack() -> None:
    """vmap and scan stack data and scale: there is one scale per item."""
    double, table, expected = jax.vmap(lambda x: x.map_data(lambda d: d * 2)), {}, {}
    functions = {  # the function, and what it does to the values
        "stack": (lambda x: x.value, lambda v: v),
        "vmap": (jax.vmap(lambda x: x.value), lambda v: v),
        "doubled by vmap": (lambda x: double(x).value, lambda v: 2 * v),
        "map": (lambda x: jax.lax.map(lambda x: x.value, x), lambda v: v),
        "doubled": (lambda x: (x * 2.0).value, lambda v: 2 * v),
        "item": (lambda x: x[2].value, lambda v: v[2]),
        "last": (lambda x: x[-1].value, lambda v: v[2]),
        "sum": (lambda x: x.sum(0).value, lambda v: v.sum(0)),
    }
    for kind in KINDS:
        x = make(kind, "float32")
        stacked = jax.tree.map(lambda a: stored(np.stack([a, a, 2 * np.float32(a)]), a.dtype), x)
        factor = np.array([1, 1, 4 if len(jax.tree.leaves(x)) == 2 else 2])
        for name, (f, reference) in functions.items():
            table[kind, name] = f, stacked
            expected[kind, name] = reference(factor[:, None, None] * exact(x))
    for name, got in compute(table).items():
        with entry(name):
            # Three terms of one sign.
            rtol = 3 * 2.0**-23 if name[1] == "sum" else 0
            np.testing.assert_allclose(got, expected[name], rtol=rtol)


def test_scales_of_a_batch_go_with_its_items() -> None:
    """Scales belong to items and not to elements, also in a square batch of vectors."""
    scales = jnp.asarray([[1.0, 4.0], [2.0, 8.0]])
    x = jax.vmap(ScaledArray)(jnp.ones((2, 2)), scales[0])
    assert x.scale.shape == (2, 1)
    np.testing.assert_array_equal(x.value, [[1, 1], [4, 4]])
    twice = jax.vmap(jax.vmap(ScaledArray))(jnp.ones((2, 2, 2)), scales)
    np.testing.assert_array_equal(twice.value, np.repeat(scales[..., None], 2, 2))
    np.testing.assert_array_equal(jax.vmap(ScaledArray)(jnp.ones(2), scales[0]).value, [1, 4])
    scan = jax.lax.scan(lambda c, d: (c * 2, ScaledArray(d, c)), jnp.float32(1), jnp.ones((3, 3)))
    np.testing.assert_array_equal(scan[1].value, np.repeat([[1], [2], [4]], 3, 1))
    x = jax.vmap(lambda d, s: ScaledArray(d, s, block_shape=(2,)))(jnp.ones((2, 4)), scales)
    assert x.block_shape == (1, 2)
    np.testing.assert_array_equal((-x).value, [[-1, -1, -4, -4], [-2, -2, -8, -8]])


class TestConversions:
    def test_to_arrays(self) -> None:
        x = make("row", "float16")
        np.testing.assert_allclose(jax.jit(jnp.sin)(x), np.sin(exact(x)), 1e-4)
        np.testing.assert_array_equal(jnp.asarray(x), exact(x))
        np.testing.assert_array_equal(np.asarray(x), exact(x))
        expected = exact(x)
        expected[1] = 7
        np.testing.assert_array_equal(x.at[1].set(7.0), expected)

    def test_to_numbers(self) -> None:
        x = ScaledArray(jnp.asarray(0.5, jnp.float8_e4m3fn), 8.0)
        assert (float(x), bool(x), int(x)) == (4, True, 4)
        assert (f"{x:.2f}", f"{x}") == ("4.00", str(x))
        assert not bool(ScaledArray(jnp.zeros(()), 2.0))
        with pytest.raises(TypeError):
            float(make("row", "float32"))

    def test_astype(self) -> None:
        x = make("row", "float32")
        for dtype in ("float16", "bfloat16", "float8_e5m2"):
            y = x.astype(dtype)
            np.testing.assert_array_equal(y.data, x.data.astype(dtype))
            assert y.dtype == jnp.dtype(dtype)
            np.testing.assert_array_equal(y.scale, x.scale)
        for dtype in ("int32", "bool"):
            y = ScaledArray(jnp.asarray([0.7, 0.0, -1.5]), 4.0).astype(dtype)
            assert isinstance(y, jax.Array)
            np.testing.assert_array_equal(y, np.array([2.8, 0, -6]).astype(dtype))

    def test_float64(self) -> None:
        with jax.enable_x64(True):
            x = ScaledArray(jnp.asarray([1 + 2.0**-40]), 8.0)
            assert (x * x).dtype == x.value.dtype == jnp.float64
            assert float((x + 1.0).value[0]) == 8 * (1 + 2.0**-40) + 1


@pytest.mark.parametrize("kind", ["none", "tensor", "block"])
def test_special_values_do_not_reach_the_scale(kind: str) -> None:
    x = make(kind, "float32")

    @jax.jit
    def results(x, special):
        x = x.map_data(lambda d: jnp.where(d > 1, d, special))
        arithmetic = (x + x, x - x, x * x, x * 0.0, x + 0.0, -x, x**2)
        return *arithmetic, x.sum(), x.mean(0), x @ x.T, x[0]

    for special in (0.0, np.inf, -np.inf, np.nan, 1e-45):
        for y in results(x, special):
            if y.scale is not None:
                scale = np.asarray(y.scale).astype(np.float32)
                assert (np.isfinite(scale) & (scale > 0)).all()


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
    "T": lambda x: x.T,
    "transpose": lambda x: x.transpose(1, 0),
    "transpose tuple": lambda x: x.transpose((1, 0)),
    "swapaxes": lambda x: x.swapaxes(0, -1),
    "squeeze": lambda x: x[:1].squeeze(0),
    "squeeze all": lambda x: x[:1].squeeze(),
}


def test_elements_and_axes() -> None:
    given = {kind: make(kind, "float16") for kind in KINDS}
    pairs = itertools.product(KINDS, REARRANGE)
    table = {(kind, name): (REARRANGE[name], given[kind]) for kind, name in pairs}
    for (kind, name), got in compute(table).items():
        with entry((kind, name)):
            expected = REARRANGE[name](exact(given[kind]))
            assert (got.dtype, got.shape) == (jnp.float16, expected.shape)
            np.testing.assert_array_equal(exact(got), expected)
            if kind in ("none", "one", "tensor"):
                assert np.shape(got.scale) == ()
    for x in (given["row"], given["block"]):
        np.testing.assert_array_equal(np.stack([exact(row) for row in x]), exact(x))
        with pytest.raises(TypeError):
            iter(x[0, 0])
        with pytest.raises(TypeError, match="ScaledArray without dimensions"):
            len(x[0, 0])


def test_transposed_scales_stay_small() -> None:
    for kind in ("channel", "row", "e8m0"):
        x = make(kind, "float32")
        assert (x.T.scale.shape, x.T.scale.dtype) == (x.scale.shape[::-1], x.scale.dtype)
    for layers in (1, 2):  # of one layer too, which `jax.lax.scan` still has to find
        x = as_scaled(jnp.ones((layers, 2, 3)), stack_axes=1)
        assert x.transpose(0, 2, 1).scale.shape == x.swapaxes(1, 2).scale.shape == (layers, 1, 1)
    scale = stored(2.0 ** np.arange(12).reshape(2, 3, 2), "float8_e8m0fnu")
    x = ScaledArray(np.ones((2, 5, 4), np.float32), scale, block_shape=(1, 2, 2))
    stack = jax.tree.map(lambda leaf: leaf[None], x)
    table = {axes: (lambda x, axes=axes: x.transpose(*axes), x) for axes in ((), (1, 2, 0))}
    table["vmap"] = jax.vmap(lambda x: x.T), stack
    table["stack"] = lambda x: x.transpose(0, 3, 2, 1), stack
    found = compute(
        {name: (lambda x, f=f: (f(x), f(x).value), x) for name, (f, x) in table.items()}
    )
    for axes in ((), (1, 2, 0)):
        y, value = found[axes]
        assert y.scale.dtype == scale.dtype
        assert y.block_shape == tuple(np.ones(x.block_shape).transpose(*axes).shape)
        np.testing.assert_array_equal(value, exact(x).transpose(*axes))
    for name in ("vmap", "stack"):
        y, value = found[name]
        assert y.block_shape == (1, 2, 2, 1)
        np.testing.assert_array_equal(value[0], exact(x).T)


REDUCTIONS = ["sum", "mean", "max", "min"]


def test_reductions_of_every_axis_and_type() -> None:
    options = [(None, False), (0, False), (-1, False), ((), False), (0, True), (None, True)]
    rows = [*itertools.product(("none", "row", "block"), ["float32"], options)]
    rows += itertools.product(("none", "channel"), DTYPES, options[1:2])
    table = {
        (name, *row): (lambda x, n=name, o=row[2]: getattr(x, n)(*o), make(*row[:2]))
        for row, name in itertools.product(rows, REDUCTIONS)
    }
    for key, got in compute(table).items():
        name, _, dtype, (axis, keepdims) = key
        with entry(key):
            x = exact(table[key][1])
            assert got.dtype == (jnp.bfloat16 if dtype.startswith("float8") else jnp.dtype(dtype))
            expected = getattr(x, name)(axis=axis, keepdims=keepdims)
            # One rounding, and up to 24 terms with a rounding or two in float32.
            largest = np.abs(x).max(axis=axis, keepdims=keepdims) * (24 if name == "sum" else 1)
            of = np.abs(expected) + 48 * largest * 2.0**-23 / eps(dtype)
            assert_close(got, expected, eps(dtype), of)


def test_reductions_do_not_overflow_and_keep_unit_data() -> None:
    x = ScaledArray(jnp.full(2**14, 16.0, jnp.float16), 1)
    assert (float(x.sum().value), float(x.mean().value)) == (2.0**18, 16)
    data = np.random.default_rng(0).standard_normal((4096, 50))
    total = ScaledArray(jnp.asarray(data, jnp.float16), 1).sum(0)
    # The variance of 50 sums, and a power of two that is up to 2**0.5 off (here 64: exact).
    assert abs(float(np.std(np.asarray(total.data, np.float64))) - 1) < 5 / np.sqrt(2 * 50)
    empty = ScaledArray(jnp.zeros((0, 3)), 2.0)
    np.testing.assert_array_equal(empty.sum(0).value, [0, 0, 0])
    assert empty.sum(1).shape == (0,)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_options_are_those_of_arrays(name: str) -> None:
    """Optax's losses and NumPy's functions pass these options to methods of arrays."""
    x = ScaledArray(jnp.asarray([[1.0, -2.0], [3.0, 0.5]]), 4.0)
    numbers = np.asarray(x.value)
    options = {"axis": 0, "where": numbers > 0}
    options |= {} if name == "mean" else {"initial": 1.0}
    found = getattr(x, name)(**options).value
    np.testing.assert_allclose(found, getattr(numbers, name)(**options))
    assert getattr(np, name)(x).value == getattr(numbers, name)()
    assert getattr(ScaledArray, name).__doc__.startswith(f"Like `jax.Array.{name}`")


@pytest.mark.parametrize("kind", ["none", "tensor", "block"])
def test_methods_without_a_scale_are_those_of_the_value(kind: str) -> None:
    x = make(kind, "float32").map_data(lambda data: data.at[1, 2].set(0.0))

    def method(name, axis, x):
        return getattr(x, name)(axis=axis)

    names = ("all", "any", "argmax", "argmin", "std", "var")
    pairs = [*itertools.product(names, (None, 1))]
    table = {(n, axis): (functools.partial(method, n, axis), x) for n, axis in pairs}
    for (name, axis), got in compute(table).items():
        with entry((name, axis)):
            assert isinstance(got, jax.Array)
            np.testing.assert_allclose(got, getattr(exact(x), name)(axis=axis), rtol=1e-5)
    assert x.tolist() == exact(x).tolist()
    assert x[3, 1].item() == exact(x)[3, 1]


def test_8_bits_are_reduced_in_float32() -> None:
    x = ScaledArray(jnp.full(1000, 1.25, jnp.float8_e4m3fn))
    assert x.sum(where=np.ones(1000, bool)).value == x.sum().value == 1248  # in bfloat16
    assert (x.std(), x.var(), x.mean(where=np.ones(1000, bool)).value) == (0, 0, 1.25)
