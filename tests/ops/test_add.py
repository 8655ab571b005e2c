"""Sums of activations: factors, broadcasting, and where scales meet."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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

HALF = 0.5**0.5
PAIR = normal("add", (3, 4), (3, 4))
weighted = functools.partial(ops.weighted_add, weights=(3, -4))
SUMS = {
    "add": linear(ops.add, np.add, PAIR, fwd=HALF, bwd=(HALF, HALF)),
    "weighted_add": linear(weighted, lambda x, y: 3 * x - 4 * y, PAIR, fwd=0.2, bwd=(0.2, 0.2)),
}
test_sums = in_every_dtype(SUMS)


# The means of the factors 2^-1/2 (output), 1 and 1 (both gradients).
CONSTRAINTS = {
    "to_output_scale": HALF,
    "to_left_grad_scale": 1.0,
    "to_right_grad_scale": 1.0,
    "gmean": 2 ** (-1 / 6),
    "hmean": 3 / (2**0.5 + 2),
    "amean": (HALF + 2) / 3,
}


@pytest.mark.parametrize("constraint", [*CONSTRAINTS, None])
def test_constraint(constraint) -> None:
    shared = CONSTRAINTS.get(constraint)
    op = functools.partial(ops.add, constraint=constraint)
    linear(op, np.add, PAIR, fwd=shared or HALF, bwd=(shared or 1.0, shared or 1.0))()


@pytest.mark.parametrize("constraint", ["to_output_scale", None])
@pytest.mark.parametrize(
    "shapes", [((2, 3, 4), (4,)), ((1, 3, 1), (2, 1, 4)), ((), (3, 4)), ((2, 1), (2, 1))], ids=str
)
def test_only_without_constraint_broadcasting_changes_a_factor(shapes, constraint) -> None:
    size = np.prod(np.broadcast_shapes(*shapes))
    repeats = [size / max(np.prod(s), 1) for s in shapes]
    args = normal("add", *(s or (1,) for s in shapes))
    bwd = [HALF if constraint else r**-0.5 for r in repeats]
    linear(functools.partial(ops.add, constraint=constraint), np.add, args, fwd=HALF, bwd=bwd)()


def test_a_broadcast_operand_off_a_cut_edge_has_the_true_gradient() -> None:
    x, weights = normal("mean", (6, 4), (6, 4))

    def total(add, x):
        return (add(x, x.mean(0)) * weights).sum()

    grad = jax.grad(lambda x: total(lambda x, y: ops.add(x, y).data, x))(x)
    np.testing.assert_allclose(grad, HALF * jax.grad(lambda x: total(jnp.add, x))(x), rtol=1e-5)


SCALED = [
    (2.0**12, 2.0**-12),
    (2.0**-12, 2.0**-12),
    (None, 8.0),
    (0.25, None),
    (1, 2.0**-12),
    (3.0, 0.7),
    (np.array([1, 2, 4, 8], np.float32), np.array([[16], [1], [0.5]], np.float32)),
]


test_scales_meet = under_scales(SCALED, SUMS)


def test_scale_of_the_sum() -> None:
    x = jnp.ones(2)
    assert ops.add(x, x).scale is None
    assert ops.add(ScaledArray(x, 8.0), ScaledArray(x, 8.0)).scale == 8  # sqrt(128) = 11.3, rounded
    assert ops.add(ScaledArray(x, 8.0), x).scale == 8
    assert ops.add(ScaledArray(x, 8.0), ScaledArray(x, 6.0)).scale == 8  # sqrt(100)
    assert_scales_are_constants(ops.add, ScaledArray(x, 8.0), ScaledArray(x, 2.0))
    assert_scales_are_constants(ops.weighted_add, ScaledArray(x, 8.0), ScaledArray(x, 2.0))


@pytest.mark.parametrize("scale", [None, 8.0, 2.0**-12, np.float32([[1], [2], [4]])])
@pytest.mark.parametrize(
    "op",
    [
        lambda x: ops.add(3, x),
        lambda x: ops.add(x, 3),
        lambda x: ops.add(np.float32(3), x),
        lambda x: ops.add(x, np.int64(3)),
    ],
    ids=["3+x", "x+3", "float32+x", "x+int64"],
)
def test_a_number_is_added_as_it_is(op, scale) -> None:
    linear(op, lambda x: x + 3, PAIR[:1], fwd=1.0, bwd=(1.0,), scales=(scale,))()
    if isinstance(scale, float):
        assert op(ScaledArray(jnp.ones(2), scale)).scale == scale


def test_dtypes() -> None:
    half, wide = jnp.ones(2, jnp.float16), jnp.ones(2, jnp.float32)
    assert ops.add(half, 2.5).dtype == jnp.float16
    assert ops.add(half, half).dtype == jnp.float16
    y, vjp = jax.vjp(lambda x, y: ops.add(x, y).data, half, wide)
    assert y.dtype == jnp.float32
    assert [g.dtype for g in vjp(y)] == [jnp.float16, jnp.float32]
    byte = jnp.ones(2, jnp.float8_e4m3fn)
    y, vjp = jax.vjp(lambda x: ops.add(x, 1.0).data, byte)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.float32(vjp(jnp.full_like(y, 1e4))[0]), 448)


def test_float16_is_summed_wide() -> None:
    x = jnp.full(2, 40000.0, jnp.float16)
    np.testing.assert_array_equal(ops.add(x, x).data, np.float16(80000 * HALF))
    # 100 cotangents of 1000 sum to more than 65504 before the factor 100^-1/2.
    ones = jnp.ones((100, 2), jnp.float16)
    _, vjp = jax.vjp(lambda b: ops.add(ones, b, constraint=None).data, x)
    (grad,) = vjp(jnp.full((100, 2), 1000.0, jnp.float16))
    np.testing.assert_array_equal(grad, np.float16(1e5 * 0.1))


def test_unit_variance() -> None:
    assert_unit(functools.partial(ops.add, constraint=None), (32, 32), (32, 32))
    assert_unit(functools.partial(ops.add, constraint=None), (16, 64), (64,))
    # The gradients of a weighted sum are the true ones: its weights, whose squares sum to 1.
    weighted = functools.partial(ops.weighted_add, weights=(1, 3))
    assert_unit(weighted, (32, 32), (32, 32), unit=[True, False, False])


x = jnp.ones((2, 3))
ERRORS = [
    (ValueError, lambda: ops.add(x, x.T), r"ops\.add: x and y must broadcast; got x \(2, 3\), y"),
    (TypeError, lambda: ops.add(x, x > 0), r"ops\.add: y must be a floating array.*bool"),
    (TypeError, lambda: ops.add("x", x), r"ops\.add: x must be a floating array.*got str"),
    (ValueError, lambda: ops.add(x, x, constraint="outputs"), "constraint"),
    (ValueError, lambda: ops.add(x, x, constraint="to_grad_input_scale"), "to_grad_input_scale"),
    (ValueError, lambda: ops.weighted_add(x, x, weights=(1,)), "weights must be two.*; got 1"),
    (ValueError, lambda: ops.weighted_add(x, x, weights=(0, 0)), "not all zero"),
    (ValueError, lambda: ops.weighted_add(x, x.T), r"ops\.weighted_add: x and y must broadcast"),
    (TypeError, lambda: ops.weighted_add(x, 1), r"ops\.weighted_add: y must be a floating.*int32"),
]


test_errors = refuses(ERRORS)
