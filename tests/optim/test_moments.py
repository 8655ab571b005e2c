"""State in 16 and 8 bits: error, range and special values of one array."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale.core import ScaledArray, format_of
from unitscale.optim import Moment, SquareRoot
from unitscale.optim._storage import inspect, is_stored, load, moment_of, store

NARROW = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3", "float16"]
WIDE = ["bfloat16", "float32"]


def sample(seed: int = 0, spread: float = 2.0, shape=(24, 40)) -> np.ndarray:
    """Magnitudes over `spread` powers of two below 1, both signs."""
    rng = np.random.default_rng(seed)
    return (2.0 ** -rng.uniform(0, spread, shape) * rng.choice([-1, 1], shape)).astype(np.float32)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def both(x, dtype, root=False, block=None, key=None):
    """What is stored, and what is read of it."""
    out = store(Moment(dtype, root, block), x, key)
    return out, load(out)


def stored(x, *args, **kwargs):
    return both(np.asarray(x, np.float32), *args, **kwargs)[0]


def read(x, *args, **kwargs):
    return np.asarray(both(np.asarray(x, np.float32), *args, **kwargs)[1])


@pytest.mark.parametrize("size", [1.0, 3e-7, 2e9])
@pytest.mark.parametrize("dtype", NARROW + WIDE)
def test_error_is_half_the_distance_of_neighbours(dtype: str, size: float) -> None:
    x = sample() * np.float32(size)
    out, value = both(x, dtype)
    assert isinstance(out, ScaledArray)
    assert out.dtype == format_of(dtype).dtype
    np.testing.assert_allclose(value, x, rtol=format_of(dtype).eps / 2)


@pytest.mark.parametrize("size", [1.0, 3e-7, 2e9])
@pytest.mark.parametrize("dtype", NARROW + WIDE)
def test_the_square_of_a_rounded_root_has_twice_its_error(dtype: str, size: float) -> None:
    x = np.abs(sample()) * np.float32(size)
    out, value = both(x, dtype, True)
    assert isinstance(out, SquareRoot)
    half = format_of(dtype).eps / 2
    np.testing.assert_allclose(value, x, rtol=(1 + half) ** 2 - 1 + 1e-6)
    np.testing.assert_allclose(np.sqrt(value), np.sqrt(x), rtol=half + 1e-6)


@pytest.mark.parametrize("dtype", NARROW)
def test_the_largest_entry_never_saturates_and_uses_the_top_of_the_range(dtype: str) -> None:
    for exponent in np.linspace(-30, 30, 41):
        for root in (False, True):
            x = np.float32(2.0**exponent) * np.ones(3, np.float32)
            out = stored(x, dtype, root)
            data = np.asarray((out.root if root else out).data).astype(np.float64)
            top = 2.0 ** np.floor(np.log2(format_of(dtype).max))
            assert (data <= top).all()
            assert (data >= top / 2).all()


def test_the_root_covers_2_to_the_34_in_8_bits() -> None:
    x = np.float32(2.0) ** np.arange(0, -34, -1, dtype=np.float32)
    plain, root = read(x, "float8_e5m2"), read(x, "float8_e4m3fn", True)
    np.testing.assert_allclose(np.log2(root), np.log2(x), atol=1.2)  # subnormal at the end
    np.testing.assert_allclose(root[:28], x[:28], rtol=0.13)
    assert not plain[-1]


@pytest.mark.parametrize("key", [None, 0])
def test_a_second_moment_never_rounds_to_zero(key) -> None:
    key = None if key is None else jax.random.key(key)
    x = np.array([1.0, 1e-12, 1e-25, 0.0], np.float32)
    value = read(x, "float8_e4m3fn", True, key=key)
    assert (value[:3] >= x[:3] * (1 - 2**-3)).all()
    assert value[3] == 0


@pytest.mark.parametrize("dtype", NARROW + WIDE)
@pytest.mark.parametrize("root", [False, True])
def test_zeros_stay_zeros_and_signs_stay(dtype: str, root: bool) -> None:
    np.testing.assert_array_equal(read(np.zeros((3, 2)), dtype, root), np.zeros((3, 2)))
    assert float(read(0, dtype, root)) == 0
    x = sample()
    np.testing.assert_array_equal(np.sign(read(x, dtype, root)), np.sign(x))


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("root", [False, True])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_seen(dtype: str, root: bool, bad: float) -> None:
    x = sample()
    x[3, 5] = bad
    assert np.isnan(read(x, dtype, root)).all()
    blocks = np.isnan(read(x, dtype, root, 8))
    assert blocks[3, :8].all()
    assert blocks.sum() == 8


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("root", [False, True])
def test_storing_what_was_stored_changes_nothing(dtype: str, root: bool) -> None:
    for seed in range(20):  # among them largest entries that round up to a power of two
        once = read(sample(seed, 30, (8, 8)), dtype, root)
        twice = read(once, dtype, root)
        np.testing.assert_array_equal(twice, once)


@pytest.mark.parametrize("columns", [8, 13, 16])
def test_blocks_have_scales_of_their_own(columns: int) -> None:
    x = sample(shape=(4, columns)) * np.repeat([1.0, 1e-20], [8, columns - 8]).astype(np.float32)
    out, value = both(x, "float8_e4m3fn", False, 8)
    assert out.block_shape == (1, 8)
    assert out.scale.shape == (4, -(-columns // 8))
    np.testing.assert_allclose(value, x, rtol=2**-4)
    if columns > 8:
        assert not read(x, "float8_e4m3fn")[:, 8:].any()
    assert moment_of(out) == Moment("float8_e4m3fn", False, 8)
    assert moment_of(stored(x, "float16", True, 8)) == Moment("float16", True, 8)


@pytest.mark.parametrize("root", [False, True])
def test_stochastic_rounding_is_unbiased(root: bool) -> None:
    """The root in its own space: the mean of many roundings is the root itself."""
    n = 4096
    x = np.full(n, 0.3, np.float32)
    x[0] = 1.0
    out = stored(x, "float8_e4m3fn", root, key=jax.random.key(0))
    y = np.asarray((out.root if root else out).value)[1:]
    true = 0.3**0.5 if root else 0.3
    assert len(np.unique(y)) == 2
    step = np.ptp(y)
    assert abs(y.mean() - true) < 5 * step / 2 / n**0.5


def test_errors() -> None:
    for bad in ("E4M3", "float4_e2m1fn", "float6_e2m3fn", "float8_e8m0fnu", "float64"):
        with pytest.raises(ValueError, match=r"Moment: dtype must be a float8, float16, bfloat16"):
            Moment(bad)
    with pytest.raises(ValueError, match="expected a floating-point format"):
        Moment("int8")
    for bad in (0, -1, 1.5):
        with pytest.raises(ValueError, match="block must be a positive number of entries"):
            Moment("float16", block=bad)
    with pytest.raises(ValueError, match=r"state must hold ScaledArrays.*scalify the grad"):
        load(SquareRoot(jnp.ones(3)))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("root", [False, True], ids=["plain", "root"])
@pytest.mark.parametrize("dtype", NARROW)
def test_items_of_a_stack_are_stored_each_as_if_alone(dtype: str, root: bool) -> None:
    sizes = np.float32([1, 2.0**20, 2.0**-20])[:, None, None]
    x = np.abs(sample(3, 4.0, (3, 4, 5))) * sizes

    @jax.jit
    def run(x):
        stack = store(Moment(dtype, root, stack_axes=1), x, None)
        alone = [load(store(Moment(dtype, root), item, None)) for item in x]
        return stack, load(stack), jnp.stack(alone)

    stack, value, alone = run(x)
    assert moment_of(stack) == Moment(dtype, root, stack_axes=1)
    np.testing.assert_array_equal(value, alone)


LARGE = (512, 1024)


@functools.partial(jax.jit, static_argnums=(2, 3))
def again(x, before, dtype, root=False):
    """What is stored of a large array after something else was."""
    before, seen = inspect(before)
    assert is_stored(before)
    assert seen is not None
    out = store(Moment(dtype, root), x, None, seen)
    return out, load(out)


def first(dtype: str, root: bool = False):
    return stored(np.zeros(LARGE), dtype, root)


def with_outlier(x: np.ndarray, size: float) -> np.ndarray:
    """One entry in a row and in a column that no sample has."""
    x = x.copy()
    x[3, 5] = size
    return x


@pytest.mark.parametrize("root", [False, True], ids=["plain", "root"])
@pytest.mark.parametrize("size", [1.0, 3e-7, 2e9])
@pytest.mark.parametrize("dtype", NARROW)
def test_a_large_array_is_as_exact_in_the_first_step_and_the_next(dtype, size, root) -> None:
    x = np.float32(size) * np.abs(sample(0, 2.0, LARGE))
    eps = format_of(dtype).eps / 2
    within = (1 + eps) ** 2 - 1 + 1e-6 if root else eps
    one, value = again(x, first(dtype, root), dtype, root)
    np.testing.assert_allclose(value, x, rtol=within)
    two, value = again(x[::-1] * 2, one, dtype, root)
    np.testing.assert_allclose(value, x[::-1] * 2, rtol=within)
    assert jax.tree.structure(one) == jax.tree.structure(two)


@pytest.mark.parametrize("root", [False, True], ids=["plain", "root"])
@pytest.mark.parametrize("dtype", NARROW)
def test_what_no_sample_has_saturates_at_most_for_some_steps(dtype: str, root: bool) -> None:
    """2^12 times what is seen, 2^6 in the root; formats of five bits of exponent have room."""
    x = with_outlier(np.full(LARGE, 1.0, np.float32), 2.0**12 if root else 2.0**9)
    out, value = again(x, first(dtype, root), dtype, root)
    assert np.isfinite(value).all()
    steps = 0
    while float(value[3, 5]) != x[3, 5]:
        assert float(value[3, 5]) < x[3, 5]
        out, value = again(x, out, dtype, root)
        steps += 1
        assert steps < 6
    assert (steps == 0) == (format_of(dtype).exponent_bits == 5)
    rest = np.asarray(value)[x == 1.0]
    np.testing.assert_array_equal(rest, 1.0)


@pytest.mark.parametrize("root", [False, True], ids=["plain", "root"])
@pytest.mark.parametrize("dtype", NARROW)
def test_a_small_block_among_zeros_that_no_sample_has_is_found(dtype: str, root: bool) -> None:
    for size in (1e-3, 1e-7):
        x = with_outlier(np.zeros(LARGE, np.float32), size)
        out, value = again(x, first(dtype, root), dtype, root)
        for _ in range(4):
            out, value = again(x, out, dtype, root)
        np.testing.assert_allclose(value, x, rtol=format_of(dtype).eps * (1.1 if root else 0.5))
    zeros, value = again(np.zeros(LARGE, np.float32), out, dtype, root)
    np.testing.assert_array_equal(value, np.zeros(LARGE))
    assert np.isfinite((zeros.root if root else zeros).scale)


@pytest.mark.parametrize("root", [False, True], ids=["plain", "root"])
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_an_entry_of_a_large_array_that_is_not_finite_is_seen(
    dtype: str, bad: float, root: bool
) -> None:
    start = first(dtype, root)
    _, value = again(with_outlier(np.ones(LARGE, np.float32), bad), start, dtype, root)
    assert np.isnan(value[3, 5])
    sampled = np.ones(LARGE, np.float32)
    sampled[0, 0] = bad
    out, value = again(sampled, start, dtype, root)
    assert np.isnan(value).all()
    assert np.isnan(again(np.ones(LARGE, np.float32), out, dtype, root)[1]).all() or dtype in (
        "float16",
        "float8_e5m2",
    )


def test_items_of_a_large_stack_have_scales_of_their_own() -> None:
    sizes = np.float32([1, 2.0**20, 2.0**-20])[:, None, None]
    x = sizes * np.abs(sample(0, 2.0, (3, 128, 256)))
    moment = Moment("float8_e4m3fn", stack_axes=1)
    before = store(moment, jnp.zeros_like(x), None)

    @jax.jit
    def run(x, before):
        out = store(moment, x, None, inspect(before)[1])
        return out, load(out), load(store(moment, x, None, inspect(out)[1]))

    out, once, twice = run(x, before)
    assert out.scale.shape == (3, 1, 1)
    for value in (once, twice):
        np.testing.assert_allclose(value, x, rtol=2**-4)
