"""Where the operands of a sum meet."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.batching import compute, entry
from unitscale import as_scaled, to_array
from unitscale.transforms import scalify
from unitscale.transforms._align import align, fill_scale, is_neutral, split
from unitscale.transforms._doubt import DOUBT, Doubt
from unitscale.transforms._interpreter import Interpreter, Settings
from unitscale.transforms._lazy_scale import LazyScale
from unitscale.transforms._values import Value


@pytest.mark.parametrize("number", [1.0, -3.0, 0.1, 1e-30, 1e30])
def test_split_is_exact(number: float) -> None:
    mantissa, exponent = split(number)
    assert mantissa * 2.0**exponent == number
    assert 2**-0.5 <= abs(mantissa) <= 2**0.5


@pytest.mark.parametrize("const", [0.0, np.inf, -np.inf, np.nan])
def test_zero_and_infinities_have_any_scale(const: float) -> None:
    assert is_neutral(Value(jnp.float32(const), const=const))
    assert not is_neutral(Value(jnp.float32(1), const=1.0))


def test_the_drift_decides_where_operands_meet() -> None:
    """Narrow data that is known to be 16 times unit size counts as scale 16; wide data waits."""
    grown = Value(jnp.full(2, 16.0, jnp.float32), LazyScale(0), drift=4.0)
    found = align(
        Interpreter(Settings(lambda p, n: 0.0)), [grown, Value(jnp.ones(2), LazyScale(2))]
    )
    assert (found.scale, found.drift) == (LazyScale(2), 2.0)
    grown = Value(jnp.full(2, 16.0, jnp.float16), LazyScale(0), drift=4.0)
    other = Value(jnp.full(2, 1.0, jnp.float16), LazyScale(2))
    arrays, scale, drift, _, doubt = align(Interpreter(Settings(lambda p, n: 0.0)), [grown, other])
    assert scale == LazyScale(4)
    assert (drift, doubt) == (0.0, DOUBT)
    np.testing.assert_array_equal(arrays[0], 1.0)
    np.testing.assert_array_equal(arrays[1], 0.25)


def test_a_constant_takes_the_scale_of_the_other_if_it_fits() -> None:
    x = Value(jnp.ones(2, jnp.float16), LazyScale(-10))
    one = Value(jnp.float32(1), const=1.0)
    _, scale, _, dtype, _ = align(Interpreter(Settings(lambda p, n: 0.0)), [x, one])
    assert scale == LazyScale(-10)
    assert dtype == jnp.float16
    assert fill_scale(2.0**10, jnp.float16) == LazyScale(-4)
    assert fill_scale(-1e9, jnp.float16).log2 < 0, "a mask need not be exact"


def test_scales_of_two_formulas_meet_at_their_values_unless_both_are_certain() -> None:
    x = Value(jnp.full(2, 1.0), LazyScale.of(jnp.float32(4)))
    y = Value(jnp.full(2, 1.0), LazyScale.of(jnp.float32(8)))
    vague = Value(y.data, y.scale, doubt=Doubt(1.5))
    for pair, place in (((x, y), 8.0), ((x, vague), 1.0)):
        found = align(Interpreter(Settings(lambda p, n: 0.0)), list(pair))
        assert float(found.scale.array()) == place
        assert found.doubt.is_great == (place == 1.0)
        for data, value in zip(found.arrays, (4.0, 8.0), strict=True):
            np.testing.assert_array_equal(data, value / place)


# Programs of a float16 array with a scale and a plain array, each near the size m.
BESIDE: dict[str, Callable[..., Any]] = {
    "sum": lambda x, y, m: x + y,
    "difference of residuals": lambda x, y, m: jnp.mean(((x - y) / m) ** 2),
    "where": lambda x, y, m: jnp.where(y > 0, x, y),
    "maximum": lambda x, y, m: jnp.maximum(x, y),
    "concatenate": lambda x, y, m: jnp.concatenate([x, y]),
    "set": lambda x, y, m: y.at[1].set(x[1]),
    "add to": lambda x, y, m: y.at[1].add(x[1]),
    "add to zeros": lambda x, y, m: (0 * y).at[1].add(x[1]),
    "moment that starts at an array": lambda x, y, m: lax.scan(
        lambda c, a: (0.9 * c + 0.1 * a, c), y[0], x
    ),
    "moment that starts at a number": lambda x, y, m: lax.scan(
        lambda c, a: (c + a, c), jnp.full(3, 2 * min(m, 1e6)), x
    ),
    "cond": lambda x, y, m: (
        lax.cond(x[0, 0] > 9 * m, lambda: x, lambda: y),
        lax.cond(x[0, 0] < 9 * m, lambda: x, lambda: y),
    ),
    "number": lambda x, y, m: x + 2 * m,
    "chosen number": lambda x, y, m: jnp.where(x > 0, x, 2 * min(m, 1e6)),
    "less than a number": lambda x, y, m: 2 * m - x,
}


@pytest.mark.parametrize("size", [1e-9, 1.0, 1e5, 1e11])
def test_what_has_no_scale_is_met_at_its_own_size(size: float) -> None:
    """The array tells it at run time: at scale 1 float16 loses 1e-9, and ends at 65504."""
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(size * rng.normal(size=(2, 3)), jnp.float32) for _ in range(2))
    half = as_scaled(x, dtype=jnp.float16)

    def both(f: Callable[..., Any]) -> Callable[..., Any]:
        def program(x: Any, y: Any) -> Any:
            return f(x, y, size)

        return lambda x, y: (program(to_array(x), y), to_array(scalify(program)(x, y)))

    results = compute({name: (both(f), half, y) for name, f in BESIDE.items()})
    for name, (expected, found) in jax.device_get(results).items():
        for e, a in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
            with entry(name):
                step = float(jnp.finfo(jnp.float16).eps)
                np.testing.assert_allclose(a, e, rtol=0, atol=4 * step * np.max(np.abs(e)))


# Programs of an array near 1 with a scale and a plain array of large numbers: few are chosen.
FEW: dict[str, Callable[..., Any]] = {
    "where": lambda x, y: jnp.where(x < 2, x, y),
    "where, in a sum": lambda x, y: jnp.cumsum(jnp.where(x < 2, x, y)[:3]),
    "minimum": lambda x, y: jnp.minimum(x, y),
    "maximum of negatives": lambda x, y: jnp.maximum(x, -y),
    "clip": lambda x, y: jnp.clip(x, -y, y),
    "clamp": lambda x, y: lax.clamp(-y, x, y),
    "concatenate": lambda x, y: jnp.concatenate([x, y])[:3],
    "stack": lambda x, y: jnp.stack([x, y])[0, :3],
    "set": lambda x, y: y.at[:3].set(x[:3]),
    "where, with a number": lambda x, y: jnp.where(x < 2, x, y[0]),
    "maximum, with a number": lambda x, y: jnp.maximum(x, -y[0]),
}


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("large", [1e4, 1e10, 1e30])
def test_elements_beside_an_array_of_large_numbers_are_kept(large: float, dtype: Any) -> None:
    x = jnp.asarray([0.3, -1.2, 1.7, 3.0], jnp.float32)
    y = jnp.full(4, large) * jnp.asarray([1.0, 1.5, 2.0, 1.0])
    given = as_scaled(x, dtype=dtype)

    def both(f: Callable[..., Any]) -> Callable[..., Any]:
        first = lambda x, y: 3 * f(x, y)[:3]  # noqa: E731
        return lambda x, y: (first(to_array(x), y), to_array(scalify(first)(x, y)))

    results = compute({name: (both(f), given, y) for name, f in FEW.items()})
    for name, (expected, found) in jax.device_get(results).items():
        with entry(name):
            np.testing.assert_allclose(found, expected, rtol=2 * float(jnp.finfo(dtype).eps))


NUMBERS: dict[str, tuple[Callable[..., Any], list[float]]] = {
    "log of a floor": (lambda x: jnp.log(jnp.maximum(x, 1e-30)), [0, 1e4]),
    "log of a clip": (lambda x: jnp.log(jnp.clip(x, 1e-30)), [0, 1e4]),
    "quotient": (lambda x: x / jnp.maximum(x, jnp.finfo(jnp.float32).tiny), [0, 400]),
    "sum": (lambda x: jnp.log(x + 1e-36), [0, 1e3, 2e3]),
    "choice": (lambda x: jnp.log(jnp.where(x > 0, x, 1e-36)), [0, 1e3, 2e3]),
    "gradient": (jax.grad(lambda x: jnp.sum(jnp.sqrt(jnp.maximum(x, 1e-30)))), [0, 1e4]),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_tiny_numbers_are_kept_beside_large_scales(dtype: str) -> None:
    table = {
        name: (lambda x, f=f: (to_array(scalify(f)(as_scaled(x, 2.0**20, dtype=dtype))), f(x)), x)
        for name, (f, numbers) in NUMBERS.items()
        for x in [jnp.asarray(numbers, jnp.float32)]
    }
    for name, (found, expected) in compute(table).items():
        with entry(name):
            np.testing.assert_allclose(np.float32(found), expected, rtol=2**-7)


def test_the_mask_of_float32_is_finite_in_bfloat16() -> None:
    def attention(x: jax.Array) -> jax.Array:
        mask = jnp.array([[True, True], [False, False]])
        return jax.nn.softmax(jnp.where(mask, x, jnp.finfo(jnp.float32).min))

    x = as_scaled(jnp.zeros((2, 2)), dtype=jnp.bfloat16)
    np.testing.assert_array_equal(to_array(scalify(attention)(x)), np.full((2, 2), 0.5))
