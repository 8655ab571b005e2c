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
