"""Dropout."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.refusals import refuses
from unitscale import ops
from unitscale.core import ScaledArray

from .conformance import DTYPES, assert_unit, linear, normal, under_scales

KEY = jax.random.key(3)
X = normal("dropout", (4, 5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rate", [0.0, 0.75])
def test_gradient_is_true(rate: float, dtype: str) -> None:
    op = functools.partial(ops.dropout, rate=rate, key=KEY)
    mask, factor = np.asarray(op(jnp.ones((4, 5))).data) != 0, (1 - rate) ** 0.5
    tried = linear(op, lambda x: x * mask / (1 - rate), X, fwd=factor, bwd=(factor,))
    tried(dtype=dtype, transforms=("jit", "checkpoint", "vmap"))


expected = functools.partial(ops.dropout, rate=0.36, deterministic=True)
test_deterministic_is_the_expected_value = under_scales(
    [(None,), (2.0**12,), (2.0**-12,)],
    {"dropout": linear(expected, lambda x: x, X, fwd=0.8, bwd=(0.8,), dtype="float16")},
)


def test_share_of_zeros() -> None:
    n, rate = 40000, 0.3
    zeros = np.mean(np.asarray(ops.dropout(jnp.ones(n), rate, key=KEY).data) == 0)
    assert abs(zeros - rate) < 5 * (rate * (1 - rate) / n) ** 0.5


def test_unit_variance() -> None:
    assert_unit(lambda x: ops.dropout(x, 0.6, key=KEY), (4096,), bias=5 * (1.5 / 4096) ** 0.5)


def test_scale_is_carried_and_dropped_elements_are_zero() -> None:
    x = ScaledArray(jnp.full(8, jnp.inf, jnp.float16), 8.0)
    y = ops.dropout(x, 0.5, key=KEY)
    assert y.scale == 8
    assert y.dtype == jnp.float16
    assert set(np.asarray(y.data).tolist()) == {0.0, np.inf}
    assert ops.dropout(ScaledArray(jnp.ones(2), 8.0), 0.0).scale == 8
    byte = ops.dropout(jnp.full(8, 448.0, jnp.float8_e4m3fn), 0.5, key=KEY)
    assert byte.dtype == jnp.bfloat16
    assert np.isfinite(np.float32(byte.data)).all()


ERRORS = [
    (ValueError, lambda x: ops.dropout(x, 0.5), r"ops\.dropout: key must be a jax\.random key"),
    (ValueError, lambda x: ops.dropout(x, 1.0, key=KEY), r"rate must be in \[0, 1\); got 1.0"),
    (ValueError, lambda x: ops.dropout(x, -0.1, key=KEY), "rate must be in"),
    (TypeError, lambda x: ops.dropout(x > 0, 0.5, key=KEY), r"ops\.dropout: x must be a floating"),
]


test_errors = refuses(ERRORS, jnp.ones(3))
