"""Storing an array of weights or moments: error, range and special values."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.batching import compute, entry
from tests.optimizers import scaled
from unitscale import optim
from unitscale.core import ScaledArray, format_of, to_array
from unitscale.optim import Moment, SquareRoot, apply_updates
from unitscale.optim._storage import (
    inspect,
    is_stored,
    load,
    moment_of,
    scale_weight,
    store,
    store_all,
)
from unitscale.quant import Block, quantize

NARROW = ["float8_e4m3fn", "float16", pytest.param("float8_e5m2", marks=pytest.mark.slow)]
WIDE = ["bfloat16", "float32"]


def sample(seed: int = 0, spread: float = 2.0, shape=(24, 40)) -> np.ndarray:
    """Draw magnitudes over `spread` powers of two below 1, with both signs."""
    rng = np.random.default_rng(seed)
    return (2.0 ** -rng.uniform(0, spread, shape) * rng.choice([-1, 1], shape)).astype(np.float32)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def both(x, dtype, root=False, block=None, key=None):
    """Store an array; return what is stored, and the value read back."""
    out = store(Moment(dtype, root, block), x, key)
    return out, load(out)


def stored(x, *args, **kwargs):
    return both(np.asarray(x, np.float32), *args, **kwargs)[0]


def read(x, *args, **kwargs):
    return np.asarray(both(np.asarray(x, np.float32), *args, **kwargs)[1])


each_root = pytest.mark.parametrize("root", [False, True], ids=["plain", "root"])
each_format = pytest.mark.parametrize("dtype", NARROW)


@each_root
@pytest.mark.parametrize("dtype", NARROW + WIDE)
def test_error_is_half_the_distance_of_neighbours(dtype: str, root: bool) -> None:
    """The square of a stored root has twice its error; zeros and signs are kept."""
    half = format_of(dtype).eps / 2
    x = sample() * np.repeat([3e-7, 2e9, 0], 8).astype(np.float32)[:, None]
    moment = Moment(dtype, root, stack_axes=1)
    out = jax.jit(lambda x: store(moment, x))(x)
    assert (out.root if root else out).dtype == format_of(dtype).dtype
    np.testing.assert_allclose(load(out), x, rtol=(1 + half) ** 2 - 1 + 1e-6 if root else half)


@each_root
@each_format
def test_scales_use_the_top_of_the_range_for_each_item_of_a_stack(dtype: str, root: bool) -> None:
    """Items of a single number never saturate, and each item is scaled by itself."""
    x = np.float32(2.0 ** np.linspace(-30, 30, 41))[:, None, None] * np.ones((2, 3), np.float32)
    x[5] *= sample(3, 4.0, (2, 3)) ** 2
    moment = Moment(dtype, root, stack_axes=1)
    stack = jax.jit(lambda x: store(moment, x))(x)
    assert moment_of(stack) == moment
    np.testing.assert_array_equal(load(stack)[5], read(x[5], dtype, root))
    data = np.asarray((stack.root if root else stack).data).astype(np.float64).max((1, 2))
    top = 2.0 ** np.floor(np.log2(format_of(dtype).max))
    assert (data <= top).all()
    assert (data >= top / 2).all()


@each_root
@each_format
def test_an_entry_that_is_not_finite_is_seen(dtype: str, root: bool) -> None:
    for bad in (-np.inf, np.nan):
        x = sample()
        x[3, 5] = bad
        assert np.isnan(read(x, dtype, root)).all()
        blocks = np.isnan(read(x, dtype, root, 8))
        assert blocks[3, :8].all()
        assert blocks.sum() == 8
        start, ones = first(dtype, root), np.ones(LARGE, np.float32)
        _, value = again(with_outlier(ones, bad), start, dtype, root)
        assert np.isnan(value[3, 5])
        sampled = ones.copy()
        sampled[0, 0] = bad
        out, value = again(sampled, start, dtype, root)
        assert np.isnan(value).all()
        if format_of(dtype).exponent_bits < 5:
            assert np.isnan(again(ones, out, dtype, root)[1]).all()


@pytest.mark.parametrize("key", [None, 0])
def test_a_second_moment_never_rounds_to_zero(key) -> None:
    key = None if key is None else jax.random.key(key)
    x = np.array([1.0, 1e-12, 1e-25, 0.0], np.float32)
    value = read(x, "float8_e4m3fn", True, key=key)
    assert (value[:3] >= x[:3] * (1 - 2**-3)).all()
    assert value[3] == 0


@each_root
@each_format
def test_storing_what_was_stored_changes_nothing(dtype: str, root: bool) -> None:
    for seed in range(8):  # among them largest entries that round up to a power of two
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


LARGE = (512, 1024)


@functools.partial(jax.jit, static_argnums=(2, 3))
def again(x, before, dtype, root=False):
    """Store a large array, with the scale of a previous one."""
    own = inspect({(): before})
    assert is_stored(own[()][0])
    assert own[()][1] is not None
    out = store_all(own, {(): x}, None)[()]
    return out, load(out)


def first(dtype: str, root: bool = False):
    return stored(np.zeros(LARGE), dtype, root)


def with_outlier(x: np.ndarray, size: float) -> np.ndarray:
    """Make an array with one large entry in a row and a column without samples."""
    x = x.copy()
    x[3, 5] = size
    return x


@each_root
@pytest.mark.parametrize("size", [3e-7, 2e9])
@each_format
def test_a_large_array_is_as_exact_in_the_first_step_and_the_next(dtype, size, root) -> None:
    x = np.float32(size) * np.abs(sample(0, 2.0, LARGE))
    eps = format_of(dtype).eps / 2
    within = (1 + eps) ** 2 - 1 + 1e-6 if root else eps
    one, value = again(x, first(dtype, root), dtype, root)
    np.testing.assert_allclose(value, x, rtol=within)
    two, value = again(x[::-1] * 2, one, dtype, root)
    np.testing.assert_allclose(value, x[::-1] * 2, rtol=within)
    assert jax.tree.structure(one) == jax.tree.structure(two)


@each_root
@each_format
def test_what_no_sample_has_saturates_at_most_for_some_steps(dtype: str, root: bool) -> None:
    """Unsampled entries may be 2^12 times larger, or 2^6 for roots."""
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


@each_root
@each_format
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


def test_items_of_a_large_stack_have_scales_of_their_own() -> None:
    sizes = np.float32([1, 2.0**20, 2.0**-20])[:, None, None]
    x = sizes * np.abs(sample(0, 2.0, (3, 128, 256)))
    out, once = again(x, stacked(x), "float8_e4m3fn")
    assert out.scale.shape == (3, 1, 1)
    for value in (once, again(x, out, "float8_e4m3fn")[1]):
        np.testing.assert_allclose(value, x, rtol=2**-4)


def stacked(x: np.ndarray) -> ScaledArray:
    moment = Moment("float8_e4m3fn", stack_axes=1)
    return jax.jit(lambda: store(moment, jnp.zeros(x.shape), None))()


# Shapes, and an entry that samples of 16 rows, of columns, or of each item's rows have.
SAMPLED = [((512, 1024), (32, 5)), ((512, 1024), (3, 64)), ((128, 64, 32), (5, 2, 3))]


@pytest.mark.parametrize(("shape", "place"), SAMPLED)
def test_what_a_sample_has_does_not_saturate(shape, place) -> None:
    x = np.ones(shape, np.float32)
    x[place] = 2.0**20
    before = first("float8_e4m3fn") if len(shape) == 2 else stacked(x)
    _, value = again(x, before, "float8_e4m3fn")
    assert value[place] == x[place]


def test_the_value_is_the_square_with_the_sign_of_the_root() -> None:
    stored = SquareRoot(ScaledArray(jnp.asarray([3.0, -0.5, 0.0], jnp.float8_e4m3fn), 2.0))
    np.testing.assert_array_equal(stored.value, [36.0, -1.0, 0.0])
    assert stored.value.dtype == jnp.float32
    assert (stored.shape, stored.nbytes) == ((3,), 3 + 4)


FORMATS = ["float16", "bfloat16", "float32", "float8_e4m3fn"]
RNG = np.random.default_rng(0)
WEIGHTS = RNG.normal(size=(16, 24)).astype(np.float32)


def scale_params(params, dtype="float16"):
    return scaled(optax.sgd(0.1), weights=dtype).scale_params(params)


def rms_of(x) -> float:
    return float(np.sqrt(np.mean(np.square(np.asarray(x, np.float64)))))


def test_parameters_are_near_rms_1_and_round_once() -> None:
    def make(x, dtype):
        params = scale_params({"w": x, "n": jnp.arange(3)}, dtype)
        return params, params["w"].value

    names = list(itertools.product(FORMATS, (1.0, 3e-5, 7e8)))
    table = {n: (functools.partial(make, dtype=n[0]), WEIGHTS * np.float32(n[1])) for n in names}
    for (dtype, size), (params, value) in compute(table).items():
        with entry((dtype, size)):
            w, fmt = params["w"], format_of(dtype)
            assert w.dtype == fmt.dtype
            assert 0.6 < rms_of(w.data) < 1.5
            scale = float(w.scale)
            assert np.frexp(scale)[0] == 0.5
            x = WEIGHTS * np.float32(size)
            half = np.maximum(fmt.eps / 2 * np.abs(x) / scale, fmt.smallest_subnormal / 2)
            assert (np.abs(value - x) / scale <= half).all()
            np.testing.assert_array_equal(params["n"], np.arange(3))


def test_zeros_are_trained_from_the_first_update_on() -> None:
    def train(update, dtype):
        first = apply_updates(scale_params(jnp.zeros(2), dtype), update)
        return first.value, apply_updates(first, jnp.zeros(2)).data

    names = list(itertools.product(("float16", "float8_e4m3fn"), (1e-4, 1e-2, 1.0)))
    table = {n: (functools.partial(train, dtype=n[0]), np.array([n[1], -n[1]])) for n in names}
    for (dtype, size), (value, data) in compute(table).items():
        np.testing.assert_allclose(value, [size, -size], rtol=format_of(dtype).eps / 2)
        assert 0.5 <= rms_of(data) <= 2, (dtype, size)


def test_the_sum_is_rounded_once() -> None:
    update = RNG.normal(size=WEIGHTS.shape).astype(np.float32) / 8

    def add(x, update, dtype):
        w = scale_params(x, dtype)
        return w.value, apply_updates(w, update)

    table = {dtype: (functools.partial(add, dtype=dtype), WEIGHTS, update) for dtype in FORMATS}
    for dtype, (value, out) in compute(table).items():
        exact = (np.asarray(value, np.float64) + update) / float(out.scale)
        fmt = format_of(dtype)
        error = np.abs(np.asarray(out.data).astype(np.float64) - exact)
        bound = np.maximum(fmt.eps / 2 * np.abs(exact), fmt.smallest_subnormal / 2)
        assert (error <= bound * (1 + 1e-3) + 2.0**-24).all(), dtype  # the sum itself is float32
        assert out.dtype == fmt.dtype


@pytest.mark.parametrize(("factor", "moves"), [(0.6, False), (1.9, False), (0.3, True), (5, True)])
def test_a_fresh_scale_when_the_rms_has_left_a_half_to_two(factor: float, moves: bool) -> None:
    data = (np.where(WEIGHTS > 0, 1, -1) * factor).astype(np.float16)
    out = rescaled(data, 4.0)
    np.testing.assert_array_equal(np.float32(out.data) * np.float32(out.scale), 4 * data)
    assert (float(out.scale) != 4.0) == moves
    assert 0.5 <= rms_of(out.data) <= 2


@jax.jit
def rescaled(data, scale):
    """Return the state after an update of zeros."""
    return apply_updates(ScaledArray(data, scale), jnp.zeros(data.shape))


def test_per_channel_and_block_scales_are_kept_apart() -> None:
    size = np.array([1.0, 16.0, 2.0**-6, 1.0], np.float32)
    data = (np.ones((8, 4)) * size).astype(np.float32)
    out = rescaled(data, np.ones(4, np.float32))
    np.testing.assert_array_equal(out.scale.ravel(), size)
    np.testing.assert_array_equal(out.data * size, data)

    def add(blocks):
        out = apply_updates(blocks, jnp.ones((4, 4)))
        return out, out.value - blocks.value

    out, moved = jax.jit(add)(
        ScaledArray(np.ones((4, 4), np.float32), np.float32([[1, 8]]), block_shape=(4, 2))
    )
    assert out.block_shape == (4, 2)
    np.testing.assert_array_equal(moved, 1)


@pytest.mark.parametrize(("dtype", "size"), [("float16", 1e-6), ("float8_e4m3fn", 1e-2)])
def test_small_rows_or_columns_that_are_sampled_clip_no_others(dtype, size) -> None:
    data = np.full((3, 700, 100), 64.0, np.float16)
    assert float(rescaled(data, np.float32(1)).scale) == 64.0
    small = np.s_[::64] if dtype == "float16" else np.s_[:, ::128]
    value = np.random.default_rng(0).standard_normal((4096, 256)).astype(np.float32)
    value[small] *= size
    weight = first = scale_weight(value, dtype)
    for _ in range(3):
        weight = apply_updates(weight, jnp.zeros(value.shape))
    np.testing.assert_array_equal(weight.value, first.value)


def test_small_updates_are_lost_to_nearest_rounding_and_kept_by_stochastic() -> None:
    """Add an eighth of the distance of neighbors: each weight goes up with probability 1/8."""
    n = 2**16
    w, update = ScaledArray(jnp.ones(n, jnp.float16), jnp.float32(1)), jnp.full(n, 2.0**-13)
    np.testing.assert_array_equal(apply_updates(w, update).value, 1.0)
    gained = np.asarray(apply_updates(w, update, key=jax.random.key(0)).value) - 1
    assert {*np.unique(gained)} == {0, 2.0**-10}
    assert abs(gained.mean() * 2**10 - 1 / 8) < 5 * np.sqrt(7 / 64 / n)


def test_plain_parameters_none_and_infinity() -> None:
    params = {"a": np.ones(2, np.float16), "b": np.arange(2), "c": None, "d": np.ones(1)}
    updates = {"a": np.full(2, 2.0**-9), "b": np.ones(2, int), "c": None, "d": None}
    steps = apply_updates({"n": jnp.arange(2)}, {"n": jnp.full(2, -0.0)})  # as SGD returns them
    assert steps["n"].dtype == jnp.int32
    out = jax.jit(apply_updates)(params, updates)
    np.testing.assert_array_equal(out["a"], np.full(2, 1 + 2.0**-9))
    assert out["a"].dtype == jnp.float16
    np.testing.assert_array_equal(out["b"], [1, 2])
    assert out["c"] is None
    np.testing.assert_array_equal(out["d"], 1)

    def add(update, dtype):
        return apply_updates(scale_params(jnp.ones(3), dtype), update).value

    for dtype in ("float16", "float8_e4m3fn"):
        w = jax.jit(add, static_argnums=1)(np.array([np.inf, 0.0, 1.0]), dtype)
        np.testing.assert_array_equal(np.isnan(w), [True, False, False])
    unscaled = ScaledArray(jnp.ones(3, jnp.bfloat16))
    assert apply_updates(unscaled, jnp.ones(3)).scale is None


SIZES = np.float32([1, 2.0**9, 2.0**-9])
STACK = SIZES[:, None, None] * RNG.normal(size=(3, 8, 16)).astype(np.float32)


@pytest.mark.parametrize("dtype", FORMATS)
def test_items_of_a_stack_have_their_own_scales_and_keep_them(dtype: str) -> None:
    """By default all axes but the last two are stacked; updated parameters can be scanned."""
    params = {"w": STACK, "b": STACK[:, 0]}
    axes = {"w": None, "b": 1}
    changed = jax.tree.map(lambda x: x * np.float32(16), params)

    @jax.jit
    def run(params, changed):
        tx = scaled(optax.sgd(0.1), weights=dtype)
        first = tx.scale_params(params, stack_axes=axes)
        updates = jax.tree.map(lambda new, old: new - old.value, changed, first)
        second = apply_updates(first, updates)
        third = apply_updates(second, jax.tree.map(jnp.zeros_like, updates))
        values = [jax.lax.map(lambda w: w.value, p["w"]) for p in (first, third)]
        return first, third, values

    first, third, values = run(params, changed)
    eps = float(jnp.finfo(dtype).eps)
    for tree, value, factor in ((first, values[0], 1), (third, values[1], 16)):
        assert tree["w"].scale.shape == (3, 1, 1)
        assert tree["b"].scale.shape == (3, 1)
        ratio = np.asarray(tree["w"].scale).ravel() / (factor * SIZES)
        assert ((ratio >= 0.5) & (ratio <= 2)).all()
        size = np.maximum(np.abs(STACK), SIZES[:, None, None] * 2.0**-5)
        assert (np.abs(value - factor * STACK) <= 2 * eps * factor * size).all()


TREES = [
    {"w": ScaledArray(jnp.ones((2, 3), dtype), scale), "b": jnp.arange(3.0) * scale}
    for dtype, scale in [("float16", 4.0), ("float32", 2.0**-9), ("float8_e4m3fn", 2.0**20)]
]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (optim.clip_by_global_norm(0.5), optax.clip_by_global_norm(0.5)),
        (optim.ema(0.9), optax.ema(0.9)),
        (optim.ema(0.5, debias=False), optax.ema(0.5, debias=False)),
    ],
    ids=["clips", "ema", "ema without debias"],
)
def test_transformations_are_those_of_optax_on_values(ours, theirs) -> None:
    state, wanted_state = ours.init(TREES[0]), theirs.init(to_array(TREES[0], jnp.float32))
    for tree in TREES:
        updates, state = ours.update(tree, state)
        wanted, wanted_state = theirs.update(to_array(tree, jnp.float32), wanted_state)
        chex.assert_trees_all_close(updates, wanted)
    chex.assert_trees_all_close(state, wanted_state)


def test_an_average_of_parameters() -> None:
    wanted = optax.incremental_update(*(to_array(t, jnp.float32) for t in TREES[:2]), 0.25)
    chex.assert_trees_all_close(optim.incremental_update(*TREES[:2], 0.25), wanted)


def test_numbers_are_parameters_as_in_optax() -> None:
    assert optim.apply_updates([1.0], [0.5]) == [1.5]
    for tx in (optim.skip_nonfinite(optax.sgd(0.5)), scaled(optax.sgd(0.5), weights=None)):
        assert tx.step([1.0], tx.init([1.0]), [1.0])[0] == [0.5]


def test_scales_of_large_channels_and_in_8_bits() -> None:
    channels = ScaledArray(jnp.ones((4096, 64), jnp.float16), jnp.full((1, 64), 2.0))
    moved = apply_updates(channels, jnp.ones((4096, 64)))
    np.testing.assert_array_equal(moved.value, 3.0)
    powers = quantize(jnp.ones((2, 32)), "float8_e4m3fn", Block(32))
    moved = apply_updates(powers, jnp.full((2, 32), 0.5))
    assert moved.scale.dtype == powers.scale.dtype
    np.testing.assert_array_equal(moved.value, 1.5)
