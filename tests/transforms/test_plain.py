"""What is known of plain arrays: the size of what is scattered into zeros is read before it is."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from unitscale import as_scaled, scalify, to_array

ROWS, COLUMNS = 4, 256
LABELS = jnp.asarray([3, 0, 255, 7])


def _labels(x: Any, n: Any) -> Any:
    return x + jax.grad(lambda z: (n * jnp.take_along_axis(z, LABELS[:, None], -1)).sum())(x)


def _row(x: Any, n: Any) -> Any:
    return x + jnp.zeros_like(x).at[2].add(-n * jnp.arange(1.0, COLUMNS + 1))


def _promised(x: Any, n: Any) -> Any:
    at = jnp.zeros(COLUMNS).at[LABELS].add(n * jnp.ones(ROWS), unique_indices=True)
    return x - at[::-1].reshape(1, COLUMNS)


def _twice(x: Any, n: Any) -> Any:
    return x + jnp.zeros(COLUMNS).at[jnp.zeros(200, int)].add(n * jnp.ones(200))


PROGRAMS: dict[str, Callable[..., Any]] = {
    "gradient of labels' logits": _labels,
    "one row": _row,
    "indices that are promised to differ": _promised,
    "an index that comes back": _twice,
}


@pytest.mark.parametrize("size", [1e-9, 1.0, 1e5])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_size_of_what_is_scattered(name: str, size: float) -> None:
    program = PROGRAMS[name]
    x = size * np.random.default_rng(0).normal(size=(ROWS, COLUMNS)).astype(np.float32)
    half, n = as_scaled(x, dtype=jnp.float16), jnp.float32(2 * size)
    found = to_array(scalify(program)(half, n))
    expected = program(to_array(half), n)
    # The step of the largest element: all of a result share one scale.
    step = 2 * float(jnp.finfo(jnp.float16).eps) * float(jnp.max(jnp.abs(expected)))
    np.testing.assert_allclose(found, expected, rtol=0, atol=step)


def test_a_mask_that_is_scattered_is_one() -> None:
    """Beside the zeros that it stands in, which are not among what is scattered."""

    def program(x: Any, at: Any) -> Any:
        return jax.nn.softmax(x + jnp.zeros(8).at[at].add(-1e9 * jnp.ones(3), unique_indices=True))

    x = as_scaled(np.linspace(-3.0, 3.0, 8, dtype=np.float32), dtype=jnp.float16)
    at = jnp.asarray([1, 4, 6])
    found, expected = to_array(scalify(program)(x, at)), program(to_array(x), at)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-3)


# Arrays of one number that a cast changes, by NumPy's and XLA's rules.
NUMBERS: dict[str, tuple[Callable[[], Any], complex]] = {
    "cut to an integer": (lambda: jnp.full(3, 2.7).astype(jnp.int32), 2),
    "cut below zero": (lambda: jnp.full(3, -2.7).astype(jnp.int32), -2),
    "an integer": (lambda: jnp.full(3, 3.0).astype(jnp.int32), 3),
    "true": (lambda: jnp.full(3, 0.25).astype(bool), 1),
    "the largest byte": (lambda: jnp.full(3, 300.0).astype(jnp.uint8), 255),
    "a negative byte": (lambda: -jnp.full(3, 1.0).astype(jnp.uint8), 255),
    "the least byte": (lambda: -jnp.full(3, -128.0).astype(jnp.int8), -128),
    "8 bits": (lambda: jnp.full(3, 1.06).astype(jnp.float8_e4m3fn).astype(jnp.float32), 1),
    "16 bits": (lambda: jnp.full(3, 1.003).astype(jnp.bfloat16).astype(jnp.float32), 1),
    "infinity": (lambda: jnp.full(3, 1e5).astype(jnp.float16).astype(jnp.float32), jnp.inf),
    "zero": (lambda: jnp.full(3, 1e-9).astype(jnp.float16).astype(jnp.float32), 0),
    "one, complex": (lambda: jnp.ones(3).astype(jnp.complex64), 1),
    "complex": (lambda: jnp.full(3, 2.5).astype(jnp.complex64), 2.5),
    "minus zero, complex": (lambda: -jnp.zeros(3).astype(jnp.complex64), 0),
}
OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "product": lambda x, c: x * c,
    "sum": lambda x, c: x + c,
    "difference": lambda x, c: c - x,
    "ratio": lambda x, c: c / x,
    "product of complex numbers": lambda x, c: jnp.abs(lax.exp(x + 1j) * c),
}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_is_what_a_cast_makes_of_it(name: str, operation: str, dtype: str) -> None:
    (make, number), apply = NUMBERS[name], OPERATIONS[operation]
    x = jnp.array([1.5, -2.0, 3.0])
    found = to_array(scalify(lambda x: apply(x, make()))(as_scaled(x, dtype=dtype)))
    with np.errstate(invalid="ignore"):
        expected = np.asarray(apply(x, np.full(3, number)))
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=1e-6)
