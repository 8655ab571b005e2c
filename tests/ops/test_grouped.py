"""Dense layers with a kernel for each group of rows, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.refusals import refuses
from unitscale import ops
from unitscale.core import ScaledArray

from .conformance import assert_scales_are_constants, in_every_dtype, linear, normal, under_scales

SIZES, ROWS, IN, OUT = (3, 0, 2), 6, 4, 3
GROUPS = ops.Groups(jnp.array(SIZES), rows=ROWS, groups=len(SIZES))
OF_ROWS = [0, 0, 0, 2, 2]
FWD = IN**-0.5
BWD = (FWD, (len(SIZES) / ROWS) ** 0.5, (len(SIZES) / ROWS) ** 0.5)


def dense(x, kernel, bias=None):
    """The bias divided by the factor that `check` multiplies it with; the last row has no group."""
    y = np.einsum("ri,rio->ro", x[:5], kernel[OF_ROWS])
    y = y if bias is None else y + bias[OF_ROWS] / FWD
    return np.concatenate([y, np.zeros((1, OUT))])


def op(x, kernel, bias=None):
    return ops.grouped_dense(x, kernel, GROUPS, bias)


SHAPES = ((ROWS, IN), (3, IN, OUT), (3, OUT))
CASES = {
    "kernel": linear(op, dense, normal("kernel", *SHAPES[:2]), fwd=FWD, bwd=BWD[:2], slack=2),
    "bias": linear(
        op, dense, normal("bias", *SHAPES), fwd=FWD, bwd=(*BWD[:2], BWD[2] * FWD), slack=2
    ),
}
test_value_and_gradients = in_every_dtype(CASES)
test_under_scales = under_scales([(2.0**6, 0.25, None), (None, 4.0, None)], {"k": CASES["kernel"]})


def test_values_under_scales() -> None:
    """A scale that differs along an axis of the product goes into the data."""
    x, kernel, bias = normal("values", *SHAPES)
    scales = np.float32([[1], [2], [64], [1], [8], [1]]), 0.5, np.float32([1, 2, 4])
    operands = [
        ScaledArray(jnp.asarray(a, jnp.float32), s)
        for a, s in zip((x, kernel, bias), scales, strict=True)
    ]
    values = [np.asarray(a.value, np.float64) for a in operands]
    np.testing.assert_allclose(op(*operands).value, FWD * dense(*values), rtol=1e-5, atol=1e-4)
    assert_scales_are_constants(op, *operands)


def test_a_group_without_rows_has_no_gradient() -> None:
    x, kernel, bias = (jnp.asarray(a, jnp.float32) for a in normal("empty", *SHAPES))
    grads = jax.grad(lambda *w: jnp.sum(op(x, *w).value ** 2), (0, 1))(kernel, bias)
    for grad in grads:
        assert not np.any(grad[1])
        assert np.all(np.any(grad[::2], axis=-1))


def test_rows_of_groups() -> None:
    np.testing.assert_array_equal(GROUPS.of_rows(ROWS), [*OF_ROWS, 3])


x, kernel = jnp.ones((ROWS, IN)), jnp.ones((3, IN, OUT))
ERRORS = [
    (ValueError, lambda: op(x, kernel[:2]), r"kernel \(3, in, out\), one for each group; got"),
    (ValueError, lambda: op(x[None], kernel), r"grouped_dense: x must be \(rows, in\)"),
    (ValueError, lambda: op(x, kernel, jnp.ones(OUT)), r"bias must be \(3, 3\)"),
    (TypeError, lambda: op(x > 0, kernel), "grouped_dense: x must be a floating array"),
    (
        ValueError,
        lambda: ops.grouped_dense(x, kernel, GROUPS, constraint="gmeen"),
        "constraint must be one of .* got 'gmeen'",
    ),
]
test_errors = refuses(ERRORS)


def test_no_rows() -> None:
    groups = ops.Groups(jnp.zeros(2, jnp.int32), rows=0, groups=2)
    y = ops.grouped_dense(jnp.ones((0, 4)), jnp.ones((2, 4, 3)), groups)
    assert y.shape == (0, 3)
