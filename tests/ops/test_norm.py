"""Layer norm and RMS norm."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.refusals import refuses
from unitscale import grad, ops
from unitscale.core import ScaledArray

from .conformance import (
    assert_scales_are_constants,
    assert_unit,
    case,
    in_every_dtype,
    normal,
    under_scales,
)

ROWS = 6
WEIGHT = ROWS**-0.5


def layer_norm(x, gain=1.0, bias=0.0, eps=1e-6):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * gain + bias


def rms_norm(x, gain=1.0, eps=1e-6):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * gain


def group_norm(x, gain=1.0, bias=0.0, eps=1e-6):
    grouped = x.reshape(x.shape[0], -1, 2, x.shape[-1] // 2)
    grouped = grouped - grouped.mean((1, 3), keepdims=True)
    y = grouped / np.sqrt((grouped * grouped).mean((1, 3), keepdims=True) + eps)
    return y.reshape(x.shape) * gain + bias


def batch_norm(x, gain=1.0, bias=0.0, eps=1e-5):
    rows = tuple(range(x.ndim - 1))
    x = x - x.mean(rows)
    return x / np.sqrt((x * x).mean(rows) + eps) * gain + bias


GROUP = functools.partial(ops.group_norm, num_groups=2)
STATISTICS = tuple(np.float32([[0.5, -1, 2, 0], [0.25, 1, 4, 2]]))


def standardize(x, gain=1.0, bias=0.0, eps=1e-5):
    mean, var = STATISTICS
    return (x - mean) / np.sqrt(var + eps) * gain + bias


GIVEN = functools.partial(ops.batch_norm, statistics=STATISTICS)
CASES = {
    "group_norm": (GROUP, group_norm, 1),
    "group_norm gain bias": (GROUP, group_norm, 3),
    "batch_norm": (ops.batch_norm, batch_norm, 1),
    "batch_norm gain": (ops.batch_norm, batch_norm, 2),
    "batch_norm gain bias": (ops.batch_norm, batch_norm, 3),
    "statistics": (GIVEN, standardize, 1),
    "statistics gain bias": (GIVEN, standardize, 3),
    "layer_norm": (ops.layer_norm, layer_norm, 1),
    "layer_norm gain": (ops.layer_norm, layer_norm, 2),
    "layer_norm gain bias": (ops.layer_norm, layer_norm, 3),
    "rms_norm": (ops.rms_norm, rms_norm, 1),
    "rms_norm gain": (ops.rms_norm, rms_norm, 2),
}
SHAPES = ((2, 3, 4), (4,), (4,))


NORMS = {
    name: case(
        op,
        reference,
        normal(name, *SHAPES[:operands]),
        fwd=1.0,
        bwd=(1.0, WEIGHT, WEIGHT)[:operands],
        slack=2,
    )
    for name, (op, reference, operands) in CASES.items()
}
test_norm = in_every_dtype(NORMS)


SCALED = [
    (2.0**12, None, None),
    (2.0**-12, 4.0, 8.0),
    (np.float32([[[1], [2], [64]]]), 0.25, None),  # one per row
    (np.float32([1, 2, 4, 2**-10]), np.float32([1, 2, 3, 4]), 2.0),  # one per feature
]


test_scales = under_scales(
    SCALED,
    {
        name: case(
            functools.partial(NORMS[name].args[0], eps=1e-3),
            functools.partial(NORMS[name].args[1], eps=1e-3),
            NORMS[name].args[2],
            **NORMS[name].keywords,
        )
        for name in CASES
        if name.endswith(("gain bias", "rms_norm gain"))
    },
    slack=4,
)


def test_the_scale_is_dropped() -> None:
    x = ScaledArray(jnp.asarray(normal("x", (3, 4))[0]), 2.0**40)
    assert ops.layer_norm(x).scale is None
    # Its square is beyond float32 where the value is normalized, and not where the data is.
    np.testing.assert_allclose(ops.rms_norm(x).data, rms_norm(np.asarray(x.data)), rtol=1e-5)
    assert_scales_are_constants(ops.layer_norm, x)
    assert_scales_are_constants(ops.rms_norm, ScaledArray(x.data, 8.0), ScaledArray(x.data[0], 2.0))


@pytest.mark.parametrize("exponent", [-120, -80])
def test_eps_over_a_tiny_scale_is_not_infinite(exponent: int) -> None:
    """Beside eps such values are nothing: y = x / eps^1/2."""
    data = np.float32([[3.0, 4.0]])
    y, vjp = jax.vjp(lambda d: ops.rms_norm(ScaledArray(d, 2.0**exponent), eps=1e-6).data, data)
    np.testing.assert_allclose(np.float64(y), np.float64(data) * 2.0**exponent * 1e3, rtol=1e-6)
    np.testing.assert_allclose(vjp(jnp.ones_like(y))[0], 2.0**exponent * 1e3, rtol=1e-6)


def test_an_empty_batch() -> None:
    for op, *shape in ((ops.batch_norm, 0, 4), (GROUP, 0, 3, 4), (ops.layer_norm, 0, 4)):
        assert jax.eval_shape(op, jnp.zeros(shape)).shape == tuple(shape)


def test_an_array_of_zeros_has_finite_gradients() -> None:
    zeros, scales = jnp.zeros((2, 4)), (0.0, 2.0**100)
    for x in (zeros, *(ScaledArray(zeros, jnp.float32(s)) for s in scales)):
        for op in (ops.layer_norm, ops.rms_norm, ops.batch_norm, GROUP):
            y, vjp = jax.vjp(lambda x, op=op: op(x).data, x)
            np.testing.assert_array_equal(y, 0)
            assert all(np.isfinite(g).all() for g in jax.tree.leaves(vjp(jnp.ones_like(y))))


@pytest.mark.parametrize("scale", [None, jnp.float32([1, 2, 4, 8])])
def test_dtype_is_that_of_x(scale) -> None:
    x = jnp.ones((2, 4), jnp.float16)
    x = x if scale is None else ScaledArray(x, scale)
    assert ops.layer_norm(x, jnp.ones(4), jnp.ones(4)).dtype == jnp.float16
    assert ops.rms_norm(jnp.ones((2, 4), jnp.float8_e4m3fn)).dtype == jnp.bfloat16


def test_float16_is_computed_wide() -> None:
    x = jnp.asarray([[60000.0, -60000.0], [6e-8, 0.0]], jnp.float16)
    y = np.asarray(ops.rms_norm(x, eps=0.0).data, np.float64)
    np.testing.assert_allclose(y, [[1, -1], [2**0.5, 0]], rtol=2**-11)
    # The gradient of a gain sums 2000 cotangents of 100 > 65504 before the factor 2000^-1/2.
    rows = jnp.ones((2000, 4), jnp.float16)
    _, vjp = jax.vjp(lambda g: ops.rms_norm(rows, g).data, jnp.ones(4, jnp.float16))
    (grad,) = vjp(jnp.full((2000, 4), 100.0, jnp.float16))
    np.testing.assert_allclose(np.float64(grad), 2e5 * 2000**-0.5, rtol=2**-10)


def test_float64_is_computed_in_float64() -> None:
    with jax.enable_x64(True):
        x = jnp.asarray([2.0**-20])
        found = ops.rms_norm(ScaledArray(x, jnp.float32(2.0**12))).data
    np.testing.assert_allclose(found, rms_norm(np.asarray([2.0**-8])), rtol=1e-15)


@pytest.mark.parametrize("scale", [2.0**-40, 2.0**40, 2.0**100])
def test_the_gradient_at_zero_is_that_of_the_value(scale: float) -> None:
    """(I - 1 / n) / eps^1/2 by the value, however large its scale is."""
    x = ScaledArray(jnp.zeros(4), jnp.float32(scale))
    for op, centered in ((ops.layer_norm, 1.0), (ops.rms_norm, 0.0)):
        found = grad(lambda x, op=op: op(x, eps=2.0**-18).data[0])(x)
        np.testing.assert_allclose(found, 512 * (np.eye(4)[0] - centered / 4), rtol=1e-6)


def test_batch_statistics_are_those_of_the_value() -> None:
    (data,) = normal("statistics", (2, 3, 4))
    for scale in (None, 4.0, np.float32([1, 2, 4, 8]), np.float32([[[1], [2], [64]]])):
        x = (
            jnp.asarray(data, jnp.float32)
            if scale is None
            else ScaledArray(jnp.asarray(data, jnp.float32), scale)
        )
        value = data if scale is None else data * scale
        found = ops.batch_statistics(x)
        for got, want in zip(found, (value.mean((0, 1)), value.var((0, 1))), strict=True):
            assert got.dtype == jnp.float32
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    y = ops.batch_norm(x, statistics=found)
    np.testing.assert_allclose(y.value, ops.batch_norm(x).value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "group_norm", "batch_norm"])
def test_unit_variance(name: str) -> None:
    op = CASES[name][0]
    # A row of 64 loses up to two of its degrees of freedom in the gradient.
    rows, width = {"batch_norm": (64, 64), "group_norm": (16, 128)}.get(name, (16, 64))
    shape = (rows, width)
    assert_unit(op, shape, bias=2 / 64)
    assert_unit(
        lambda x, gain: op(x, 1 + gain - jax.lax.stop_gradient(gain)),
        shape,
        shape[1:],
        bias=3 / 64,
    )


x = jnp.ones((2, 4))
ERRORS = [
    (ValueError, lambda: ops.layer_norm(x, x), r"ops\.layer_norm: gain must be \(features,\)"),
    (ValueError, lambda: ops.layer_norm(x, None, x[0, :2]), r"bias must .* got x \(2, 4\)"),
    (ValueError, lambda: ops.rms_norm(x, eps=-1.0), r"ops\.rms_norm: eps must not be negative"),
    (ValueError, lambda: ops.rms_norm(jnp.ones(())), r"rms_norm: x must be"),
    (ValueError, lambda: ops.batch_norm(x[0]), r"batch_norm: x must be \(\.\.\., features\)"),
    (ValueError, lambda: ops.batch_statistics(x[0]), r"batch_statistics: x must be"),
    (
        ValueError,
        lambda: ops.batch_norm(x, statistics=(x[0], x[0, :2])),
        r"variance must be \(features,\).*variance \(2,\)",
    ),
    (
        ValueError,
        lambda: ops.group_norm(x, num_groups=3),
        r"ops\.group_norm: num_groups must divide the features; got 3 groups, x \(2, 4\)",
    ),
    (TypeError, lambda: ops.rms_norm(x > 0), r"ops\.rms_norm: x must be a floating array"),
    (TypeError, lambda: ops.layer_norm(x, x[0] > 0), r"ops\.layer_norm: gain must be a floating"),
]


test_errors = refuses(ERRORS)
