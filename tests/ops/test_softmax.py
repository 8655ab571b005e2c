"""Softmax."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale import ops, rules
from unitscale.core import ScaledArray

from .conformance import (
    DTYPES,
    SCALES,
    TRANSFORMS,
    assert_scales_are_constants,
    assert_unit,
    check,
    normal,
)


def softmax(x, axis=-1, mult=1.0):
    z = mult * x
    z = np.exp(z - z.max(axis, keepdims=True))
    return z / z.sum(axis, keepdims=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis", [-1, 0])
def test_softmax(axis: int, dtype: str) -> None:
    fwd = rules.softmax((4, 3)[axis]).fwd
    check(
        functools.partial(ops.softmax, axis=axis),
        functools.partial(softmax, axis=axis),
        normal("softmax", (4, 3)),
        fwd=fwd,
        bwd=(fwd,),
        dtype=dtype,
        transforms=TRANSFORMS[dtype],
    )


@pytest.mark.parametrize("constraint", ["to_grad_input_scale", "gmean", None])
def test_constraint_and_mult(constraint) -> None:
    factors = rules.softmax(3, mult=0.5, constraint=constraint)
    check(
        functools.partial(ops.softmax, mult=0.5, constraint=constraint),
        functools.partial(softmax, mult=0.5),
        normal("softmax", (4, 3)),
        fwd=factors.fwd,
        bwd=factors.bwd,
    )


@pytest.mark.parametrize("scale", [*SCALES, np.float32([1, 8, 0.5]), np.float32([[1]] * 3 + [[9]])])
def test_scale_is_folded_in(scale) -> None:
    (x,) = normal("softmax", (4, 3))
    fwd = rules.softmax(3).fwd
    check(
        ops.softmax,
        softmax,
        [x],
        fwd=fwd,
        bwd=(fwd,),
        scales=(scale,),
        # A product of 2^12 and data is rounded at 2^12 epsilons of its exponential.
        slack=2**6 if np.max(scale) > 100 else 4,
    )
    y = ops.softmax(ScaledArray(jnp.asarray(x), scale))
    assert y.scale is None
    assert_scales_are_constants(ops.softmax, ScaledArray(jnp.asarray(x), scale))


def test_published_limits() -> None:
    n = 4096
    (x,) = normal("limits", (8, n))
    fwd, bwd = (np.float64(a) for a in factors_of(x))
    np.testing.assert_allclose(fwd, n / (np.e - 1) ** 0.5, rtol=20 / n)
    np.testing.assert_allclose(bwd, n * np.exp(-0.5), rtol=20 / n)


def factors_of(x):
    x = jnp.asarray(x, jnp.float32)
    y, vjp = jax.vjp(lambda x: ops.softmax(x, constraint=None).data, x)
    plain, plain_vjp = jax.vjp(jax.nn.softmax, x)
    ones = jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape)
    (dx,), (plain_dx,) = vjp(ones), plain_vjp(ones)
    return jnp.max(y) / jnp.max(plain), jnp.max(jnp.abs(dx)) / jnp.max(jnp.abs(plain_dx))


def test_unit_variance() -> None:
    def centred(x):
        y = ops.softmax(x, constraint=None).data
        return y - jax.lax.stop_gradient(y.mean())

    assert_unit(centred, (32, 64), bias=1 / 64)


def test_masked_logits() -> None:
    x = jnp.asarray([[0.0, -jnp.inf, 0.0]], jnp.float16)
    y, vjp = jax.vjp(lambda x: ops.softmax(x).data, x)
    fwd = rules.softmax(3).fwd
    np.testing.assert_array_equal(y, [np.float16([fwd / 2, 0, fwd / 2])])
    assert np.isfinite(np.asarray(vjp(y)[0])).all()


ERRORS = [
    (ValueError, lambda x: ops.softmax(x, 2), r"ops\.softmax: axis must be in \[-2, 2\).*got 2"),
    (ValueError, lambda x: ops.softmax(x[0, 0]), r"ops\.softmax: axis must be in \[0, 0\)"),
    (ValueError, lambda x: ops.softmax(x, mult=-1.0), "mult must be positive"),
    (ValueError, lambda x: ops.softmax(x, constraint="gmeen"), "Did you mean 'gmean'"),
    (TypeError, lambda x: ops.softmax(x > 0), r"ops\.softmax: x must be a floating array"),
]


@pytest.mark.parametrize(("error", "call", "match"), ERRORS)
def test_errors(error, call, match) -> None:
    with pytest.raises(error, match=match):
        call(jnp.ones((2, 3)))
