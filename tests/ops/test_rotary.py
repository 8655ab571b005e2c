"""Rotary position embedding."""

import functools

import jax.numpy as jnp
import numpy as np

from tests.refusals import refuses
from unitscale import ops
from unitscale.core import ScaledArray

from .conformance import (
    assert_scales_are_constants,
    assert_unit,
    in_every_dtype,
    linear,
    normal,
    under_scales,
)

POSITIONS = np.array([0, 1, 700])


def rotary(x, positions=POSITIONS, base=10000.0):
    """Each pair of features as a complex number, turned."""
    half = x.shape[-1] // 2
    z = x[..., :half] + 1j * x[..., half:]
    angles = np.asarray(positions)[..., None] * base ** (-np.arange(half) / half)
    z = z * np.exp(1j * angles)[..., None, :]
    return np.concatenate([z.real, z.imag], -1)


def op(x):
    return ops.rotary(x, POSITIONS)


# An angle of up to 700 radians is known to 2^-15 in float32.
SLACK = {"float32": 64, "float16": 2, "bfloat16": 1}


ROTARY = linear(op, rotary, normal("rotary", (3, 2, 4)), fwd=1.0, bwd=(1.0,), slack=SLACK)
test_rotary = in_every_dtype({"rotary": ROTARY})


SCALED = [2.0**12, 2.0**-12, np.float32([[[1]], [[2]], [[4]]]), np.float32([1, 2, 8, 0.5])]


test_scales = under_scales([(s,) for s in SCALED], {"rotary": ROTARY})


def test_positions_broadcast_with_the_batch() -> None:
    (x,) = normal("rotary", (2, 3, 1, 4))
    positions = np.array([[0, 1, 2], [5, 6, 7]])
    for p in (positions, positions[:1], positions[0]):
        y = ops.rotary(jnp.asarray(x, jnp.float32), p, base=100.0)
        np.testing.assert_allclose(y.data, rotary(x, p, base=100.0), rtol=1e-5, atol=1e-5)


def test_scale_and_dtype() -> None:
    x = ScaledArray(jnp.ones((3, 2, 4), jnp.float16), 8.0)
    assert op(x).scale == 8
    assert op(x).dtype == jnp.float16
    assert op(ScaledArray(x.data, jnp.arange(1.0, 5.0))).dtype == jnp.float16
    assert op(x.data.astype(jnp.float8_e5m2)).dtype == jnp.bfloat16
    assert_scales_are_constants(op, x, *())


def test_products_depend_on_the_distance_alone() -> None:
    q, k = (jnp.asarray(a, jnp.float32) for a in normal("qk", (1, 1, 8), (1, 1, 8)))

    def score(i, j):
        return jnp.sum(ops.rotary(q, jnp.array([i])).data * ops.rotary(k, jnp.array([j])).data)

    np.testing.assert_allclose(score(3, 1), score(42, 40), rtol=1e-4)


def test_unit_variance() -> None:
    assert_unit(functools.partial(ops.rotary, positions=np.arange(8)), (8, 4, 16))


x = jnp.ones((2, 3, 1, 4))
ERRORS = [
    (ValueError, lambda: ops.rotary(x[..., :3], POSITIONS), "even d"),
    (ValueError, lambda: ops.rotary(x[0, 0], POSITIONS), r"ops\.rotary: x must be"),
    (ValueError, lambda: ops.rotary(x, np.arange(4)), "positions must broadcast"),
    (ValueError, lambda: ops.rotary(x, np.zeros((1, 1, 3))), "positions must broadcast"),
    (TypeError, lambda: ops.rotary(x > 0, POSITIONS), r"ops\.rotary: x must be a floating array"),
]


test_errors = refuses(ERRORS)
