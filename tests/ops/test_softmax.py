"""Softmax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.refusals import refuses
from unitscale import ops, rules
from unitscale.core import ScaledArray

from .conformance import (
    SCALES,
    assert_scales_are_constants,
    assert_unit,
    case,
    in_every_dtype,
    normal,
)


def softmax(x, axis=-1, mult=1.0):
    z = mult * x
    z = np.exp(z - z.max(axis, keepdims=True))
    return z / z.sum(axis, keepdims=True)


AXES = {
    str(axis): case(
        functools.partial(ops.softmax, axis=axis),
        functools.partial(softmax, axis=axis),
        normal("softmax", (4, 3)),
        fwd=rules.softmax((4, 3)[axis]).fwd,
        bwd=(rules.softmax((4, 3)[axis]).fwd,),
    )
    for axis in (-1, 0)
}
test_softmax = in_every_dtype(AXES)


@pytest.mark.parametrize("constraint", ["to_grad_input_scale", "gmean", None])
def test_constraint_and_mult(constraint) -> None:
    found = rules.softmax(3, mult=0.5, constraint=constraint)
    op = functools.partial(ops.softmax, mult=0.5, constraint=constraint)
    tried = case(op, functools.partial(softmax, mult=0.5), normal("softmax", (4, 3)))
    tried(fwd=found.fwd, bwd=found.bwd)


@pytest.mark.parametrize("scale", [*SCALES, np.float32([1, 8, 0.5]), np.float32([[1]] * 3 + [[9]])])
def test_scale_is_folded_in(scale) -> None:
    # A product of 2^12 and data is rounded at 2^12 epsilons of its exponential.
    AXES["-1"](scales=(scale,), slack=2**6 if np.max(scale) > 100 else 4)
    x = ScaledArray(jnp.asarray(normal("softmax", (4, 3))[0]), scale)
    assert ops.softmax(x).scale is None
    assert_scales_are_constants(ops.softmax, x)


def test_the_last_axis_is_the_default() -> None:
    x = jnp.asarray(normal("softmax", (2, 3, 4))[0])
    np.testing.assert_array_equal(ops.softmax(x).value, ops.softmax(x, axis=-1).value)
    assert not np.allclose(ops.softmax(x).value, ops.softmax(x, axis=1).value)


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


test_errors = refuses(ERRORS, jnp.ones((2, 3)))
