"""Arrays that happen to be zero: in float16 they do not decide where a sum meets."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.batching import compute, entry
from unitscale import ScaledArray, as_scaled, to_array
from unitscale.transforms import scalify

A = as_scaled(jnp.asarray([1.0, 2.0, 3.0]), dtype=jnp.float16)
SAME = ScaledArray(A.data * 2, A.scale / 2)
SMALL = as_scaled(jnp.asarray([1.0, 2.0, 3.0]) * 1e-12, dtype=jnp.float16)
ZERO = ScaledArray(jnp.zeros(3, jnp.float16), jnp.float32(1))

# Of numbers, the same numbers at another scale, small ones, zeros, and a zero without a scale.
PROGRAMS: dict[str, Callable[..., Any]] = {
    "a moment": lambda a, b, y, z, n: 0.9 * z + 0.1 * y,
    "of squares": lambda a, b, y, z, n: 0.9 * z + 0.1 * y * y,
    "difference": lambda a, b, y, z, n: (a - b) + y,
    "product of a difference": lambda a, b, y, z, n: (a - b) * a + y,
    "dot product": lambda a, b, y, z, n: jnp.vdot(a - b, a) + y,
    "maximum": lambda a, b, y, z, n: jnp.maximum(a - b, y),
    "relu": lambda a, b, y, z, n: jax.nn.relu(-a) + y,
    "where zero": lambda a, b, y, z, n: jnp.where(a > 5, a, 0.0) + y,
    "where": lambda a, b, y, z, n: jnp.where(a > 5, a, y),
    "sum": lambda a, b, y, z, n: jnp.sum(jnp.where(a > 5, a, 0.0)) + y,
    "concatenate": lambda a, b, y, z, n: jnp.concatenate([a - b, y, z]),
    "scan": lambda a, b, y, z, n: lax.scan(lambda c, _: (0.9 * c + y, c), z, length=3),
    "scan a difference": lambda a, b, y, z, n: lax.scan(lambda c, _: (c + y, 0), a - b, length=3)[
        0
    ],
    "set": lambda a, b, y, z, n: (a - b).at[1].set(y[1]),
    "add to one": lambda a, b, y, z, n: z.at[1].add(y[1]),
    "cond": lambda a, b, y, z, n: lax.cond(a[0] > 5, lambda: a, lambda: y) + z,
    "a number": lambda a, b, y, z, n: y + n,
}


def test_what_is_added_to_zeros_keeps_its_precision() -> None:
    args = A, SAME, SMALL, ZERO, jnp.zeros(())
    programs = {
        name: (lambda *args, f=f: (f(*map(to_array, args)), to_array(scalify(f)(*args))), *args)
        for name, f in PROGRAMS.items()
    }
    for name, (expected, found) in jax.device_get(compute(programs)).items():
        for e, x in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
            with entry(name):
                np.testing.assert_allclose(x, e, rtol=4 * float(jnp.finfo(jnp.float16).eps))


@pytest.mark.parametrize(
    "scale", [1.0, 2.0**-30, 2.0**30, [[2.0], [4.0]], [[2.0**-30], [2.0**-40]]]
)
def test_zeros_leave_with_a_scale_at_which_they_can_learn(scale: Any) -> None:
    zeros = ScaledArray(jnp.zeros((2, 3), jnp.float16), jnp.asarray(scale, jnp.float32))
    for f in (lambda x: x, lambda x: x * x, lambda x: x - x, jnp.sin, lambda x: x.T @ x):
        result = scalify(f)(zeros)
        np.testing.assert_array_equal(result.data, 0)
        assert np.all(np.asarray(result.scale) == 1)


def test_channels_that_are_zero_give_way_to_others() -> None:
    data = jnp.asarray([[0.0, 0.0], [1.0, 2.0]], jnp.float16)
    x = ScaledArray(data, jnp.asarray([[2.0**30], [1.0]]))
    np.testing.assert_array_equal(scalify(jnp.transpose)(x).value, data.T)
