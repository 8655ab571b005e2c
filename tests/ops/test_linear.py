"""matmul, dense and readout: factors, rounding, scales, broadcasting."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.refusals import refuses
from unitscale import ops, rules
from unitscale.core import ScaledArray
from unitscale.quant import Block, Dynamic, MatmulConfig, Unit

from .conformance import (
    SCALES,
    assert_scales_are_constants,
    assert_unit,
    in_every_dtype,
    linear,
    normal,
    pulled,
    rounded,
    under_scales,
)

BATCH, IN, OUT = (2, 3), 5, 4
ROWS = 6


def affine(x, kernel, bias=None, *, factor: float = 1.0):
    """The unscaled layer; the bias divided by the factor that `check` multiplies it with."""
    y = x @ kernel
    return y if bias is None else y + bias / factor


def mean(constraint, *factors: float) -> float:
    a = np.asarray(factors)
    return {
        "to_output_scale": a[0],
        "to_grad_input_scale": a[1],
        "to_left_grad_scale": a[1],
        "to_right_grad_scale": a[-1],
        "gmean": np.prod(a) ** (1 / a.size),
        "hmean": 1 / np.mean(1 / a),
        "amean": np.mean(a),
    }[constraint]


LAYERS = {
    # op, and the factors of the paper: forward, dx before the constraint, dkernel and dbias.
    "dense": (ops.dense, IN**-0.5, OUT**-0.5, ROWS**-0.5),
    "readout": (ops.readout, 1 / IN, OUT**-0.5, ROWS**-0.5),
}


# The reference divides the bias by fwd, and so does its derivative.
BOTH = {
    f"{name}{', bias' * (count > 2)}": linear(
        op,
        functools.partial(affine, factor=fwd),
        normal(name, *((*BATCH, IN), (IN, OUT), (OUT,))[:count]),
        fwd=fwd,
        # The default constraints.
        bwd=(fwd if name == "dense" else dx, weight, weight * fwd)[:count],
        **({"transforms": ("jit",)} if count > 2 else {}),
    )
    for name, (op, fwd, dx, weight) in LAYERS.items()
    for count in (2, 3)
}
test_layer = in_every_dtype(BOTH)


@pytest.mark.parametrize(
    "constraint", ["to_output_scale", "to_grad_input_scale", "gmean", "hmean", "amean", None]
)
@pytest.mark.parametrize("name", LAYERS)
def test_constraint(name: str, constraint) -> None:
    op, fwd, dx, weight = LAYERS[name]
    if constraint is not None:
        fwd = dx = mean(constraint, fwd, dx)
    tried = linear(functools.partial(op, constraint=constraint), affine, fwd=fwd, bwd=(dx, weight))
    tried(args=normal(name, (*BATCH, IN), (IN, OUT)))


SCALED = [
    *((s, s) for s in SCALES),
    (2.0**12, 2.0**-12),
    (None, 8.0),
    (0.25, None),
    (1.0, 4.0),
    # Per row, per output channel: carried.
    (np.array([[[0.5], [1], [2]]], np.float32), np.array([1, 2, 4, 8], np.float32)),
    # Per input channel, on either side: the largest is carried, the rest multiplied in.
    (np.array([1, 2, 2**-12, 2**12, 0.75], np.float32), 2.0),
    (None, np.array([[1], [0], [4], [2**-12], [2**12]], np.float32)),
]


test_scales = under_scales(SCALED, {"dense": BOTH["dense"]})
BIASED = [(*scales, bias) for scales in SCALED[3:6] for bias in (2.0, 0.25)]
test_scales_of_a_bias = under_scales(BIASED, {"dense": BOTH["dense, bias"]})


def test_scale_of_the_output() -> None:
    x, w = jnp.ones((2, 4)), jnp.ones((4, 3))
    assert ops.dense(x, w).scale is None
    assert ops.dense(ScaledArray(x, 4.0), ScaledArray(w, 0.5)).scale == 2
    per_channel = ops.dense(ScaledArray(x, 4.0), ScaledArray(w, jnp.array([[1.0, 2.0, 4.0]])))
    np.testing.assert_array_equal(np.ravel(per_channel.scale), [4, 8, 16])
    per_row = ops.dense(ScaledArray(x, jnp.array([[2.0], [4.0]])), w)
    np.testing.assert_array_equal(per_row.scale, [[2], [4]])
    e8m0 = ScaledArray(w, jnp.asarray(8.0, jnp.float8_e8m0fnu))
    np.testing.assert_array_equal(ops.dense(x, e8m0).value, ops.dense(x, 8 * w).value)
    blocks = ScaledArray(w, jnp.array([[2.0, 4.0]]), block_shape=(4, 2))
    np.testing.assert_array_equal(ops.dense(x, blocks).value[0], [4, 4, 8])
    column = jnp.array([[2.0], [4.0], [1.0], [1.0]])
    assert_scales_are_constants(ops.dense, ScaledArray(x, 4.0), ScaledArray(w, column))


@pytest.mark.parametrize("side", ["left", "right"])
def test_matmul_of_scales_along_the_contraction(side: str) -> None:
    x, y = (np.asarray(a) for a in normal("matmul", (2, 3, 4), (2, 4, 5)))
    along = np.array([1.0, 4.0, 0.5, 2.0], np.float32)
    left = ScaledArray(x, along) if side == "left" else x
    right = ScaledArray(y, along[:, None]) if side == "right" else y
    found = ops.matmul(left, right, constraint=None).value
    factor = rules.matmul(3, 4, 5, constraint=None).fwd
    expected = factor * np.einsum("bmk,k,bkn->bmn", x.astype(float), along, y.astype(float))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_a_scale_along_the_contraction_does_not_overflow_float16() -> None:
    x = ScaledArray(jnp.ones((2, 4), jnp.float16), jnp.array([2.0**14, 2.0**15, 2.0**15, 2.0**14]))
    y = ops.dense(x, jnp.ones((4, 3), jnp.float16))
    assert y.dtype == jnp.float16
    np.testing.assert_array_equal(y.value, (2**15 + 2**16) * 0.5)


BATCHES = [
    ((), ()),
    ((2,), (2,)),
    ((2,), ()),
    ((), (2,)),
    ((1, 3), (2, 1)),
    ((2, 1), (1,)),
    ((1,), (1,)),
]


@pytest.mark.parametrize("batches", BATCHES, ids=str)
@pytest.mark.parametrize("constraint", ["to_output_scale", "to_left_grad_scale", None])
def test_matmul(batches, constraint) -> None:
    m, k, n = 2, 4, 3
    left, right = batches
    size = np.prod(np.broadcast_shapes(left, right))
    fwd = k**-0.5
    dleft = (n * size / np.prod(left)) ** -0.5
    dright = (m * size / np.prod(right)) ** -0.5
    if constraint is not None:
        fwd = dleft = dright = mean(constraint, fwd, dleft, dright)
    args = normal("matmul", (*left, m, k), (*right, k, n))
    op = functools.partial(ops.matmul, constraint=constraint)
    linear(op, np.matmul, args, fwd=fwd, bwd=(dleft, dright))()


@pytest.mark.parametrize("constraint", ["to_right_grad_scale", "gmean", "hmean", "amean"])
def test_matmul_constraints(constraint) -> None:
    fwd = mean(constraint, 4**-0.5, 3**-0.5, 2**-0.5)
    op = functools.partial(ops.matmul, constraint=constraint)
    linear(op, np.matmul, normal("matmul", (2, 4), (4, 3)), fwd=fwd, bwd=(fwd, fwd))()


BATCHED = linear(
    ops.matmul, np.matmul, normal("matmul", (2, 2, 4), (2, 4, 3)), fwd=0.5, bwd=(0.5,) * 2
)
SCALES_OF_ITEMS = np.array([[[2.0]], [[4.0]]], np.float32), np.array([1, 0.5, 2], np.float32)
scaled = functools.partial(BATCHED, scales=SCALES_OF_ITEMS, transforms=("jit",))
test_matmul_transforms = in_every_dtype({"plain": BATCHED, "scaled": scaled})


PROMOTIONS = [
    ("float16", "float16", "float16"),
    ("bfloat16", "float32", "float32"),
    ("float16", "bfloat16", "float32"),
    ("float8_e4m3fn", "float8_e4m3fn", "bfloat16"),
    ("float8_e4m3fn", "float32", "float32"),
    ("float8_e5m2", "float16", "float32"),
]


@pytest.mark.parametrize(("x", "kernel", "expected"), PROMOTIONS)
@pytest.mark.parametrize("op", [ops.dense, ops.matmul], ids=["dense", "matmul"])
def test_dtypes(op, x: str, kernel: str, expected: str) -> None:
    a, b = jnp.full((2, 4), 3.0, x), jnp.full((4, 2), 64.0, kernel)
    y, grads = pulled(op, a, b)
    assert y.dtype.name == expected
    np.testing.assert_array_equal(np.float32(y), 384)
    assert [g.dtype.name for g in grads] == [x, kernel]
    assert all(np.isfinite(np.asarray(g, np.float32)).all() for g in grads)


def test_float16_factor_is_applied_to_the_wide_sum() -> None:
    """4096 products of 16 sum to 65536 > 65504; the factor 1 / 64 brings them back to 1024."""
    x, w = jnp.full((2, 4096), 4.0, jnp.float16), jnp.full((4096, 3), 4.0, jnp.float16)
    y, vjp = jax.vjp(lambda x, w: ops.dense(x, w).data, x, w)
    assert y.dtype == jnp.float16
    np.testing.assert_array_equal(y, 1024)
    # dkernel sums 2 rows, 4 * 40000 * 2 = 320000 > 65504, times 2**-1/2 is still too large ...
    _, dw = vjp(jnp.full_like(y, 40000.0))
    assert np.isinf(np.asarray(dw)).all()
    # ... 4 * 10000 * 2 = 80000 > 65504 is not, after the factor.
    _, dw = vjp(jnp.full_like(y, 10000.0))
    np.testing.assert_array_equal(dw, np.float16(80000 * 2**-0.5))
    # dx sums 3 columns: 4 * 3e4 * 3 = 360000, times 1 / 64 is 5625.
    dx, _ = vjp(jnp.full_like(y, 30000.0))
    np.testing.assert_array_equal(dx, np.float16(5625))


def test_float16_factor_on_a_sum_below_the_smallest_subnormal() -> None:
    """Products of 2**-28 are zero in float16; their sum and its factor are not."""
    x, w = jnp.full((1, 1), 2.0**-14, jnp.float16), jnp.full((1, 16), 2.0**-14, jnp.float16)
    # 16 terms of 2**-28 are 2**-24, the smallest subnormal; no single one is representable.
    (dx,) = jax.vjp(lambda x: ops.dense(x, w, constraint=None).data, x)[1](
        jnp.full((1, 16), 2.0**-12, jnp.float16)
    )
    np.testing.assert_array_equal(dx, np.float16(16 * 2.0**-26 * 16**-0.5))
    # readout's backward factor is larger than its forward one: raised before it is rounded.
    y, vjp = jax.vjp(
        lambda x: ops.readout(x, w[:, :1], constraint=None).data, jnp.ones((1, 1), jnp.float16)
    )
    np.testing.assert_array_equal(vjp(y)[0], np.float16(2.0**-28))
    from_scale = functools.partial(ops.scale, fwd=2.0**10, bwd=1.0)
    np.testing.assert_array_equal(from_scale(jnp.float16(2.0**-20)), np.float16(2.0**-10))


@pytest.mark.parametrize("name", LAYERS)
def test_unit_variance(name: str) -> None:
    op, *_ = LAYERS[name]
    # Readout's output is meant to shrink with width.
    unit = [name == "dense", True, True]
    assert_unit(functools.partial(op, constraint=None), (4, 8, 24), (24, 16), unit=unit)


def test_matmul_unit_variance() -> None:
    assert_unit(
        lambda x, y: ops.matmul(x, y, constraint=None), (3, 1, 8, 16), (4, 16, 12), unit=None
    )


def test_quantized_dense_against_a_manual_product() -> None:
    """The whole layer in float64 NumPy, with only the casts of ml_dtypes."""
    config = MatmulConfig(cotangent="float8_e5m2")
    x, w, b, dy = normal("fp8", (2, 3, 8), (8, 4), (4,), (2, 3, 4))
    x, dy = rounded(x, "bfloat16"), rounded(dy, "bfloat16")
    qx, qw = rounded(x, "float8_e4m3fn"), rounded(np.float32(w), "float8_e4m3fn")
    qdy = rounded(dy, "float8_e5m2")

    def op(x, w, b):
        return ops.dense(x, w, b, config=config).data

    args = jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.float32), jnp.asarray(b, jnp.float32)
    y, vjp = jax.vjp(op, *args)
    dx, dw, db = vjp(jnp.asarray(dy, jnp.bfloat16))
    assert [a.dtype.name for a in (y, dx, dw, db)] == ["bfloat16"] * 2 + ["float32"] * 2
    fwd, weight = 8**-0.5, 6**-0.5
    half = {"rtol": 2**-7, "atol": 2**-7}
    np.testing.assert_allclose(np.float64(y), fwd * (qx @ qw) + b, **half)
    np.testing.assert_allclose(np.float64(dx), fwd * (qdy @ qw.T), **half)
    expected = weight * np.einsum("bti,bto->io", qx, qdy)
    np.testing.assert_allclose(dw, expected, rtol=1e-5, atol=1e-5)
    # The bias's gradient is a sum, not a product: its cotangent is not quantized.
    np.testing.assert_allclose(db, weight * dy.sum((0, 1)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("strategy", [Unit(), Dynamic(), Block()], ids=str)
@pytest.mark.parametrize("scales", [(None, 8.0), (4.0, 0.25), (2.0**-60, 2.0**100)], ids=str)
def test_a_kernels_scale_in_a_quantized_product(dtype: str, strategy, scales) -> None:
    """A factor of all three products, but for float16."""
    config = MatmulConfig(strategy=strategy)
    x, w, dy = (jnp.asarray(a) for a in normal("fp8", (2, 16, 32), (32, 32), (2, 16, 32)))
    x, dy = x.astype(dtype), dy.astype(dtype)
    x_scale, w_scale = (None if s is None else jnp.float32(s) for s in scales)

    def op(x, w, scale):
        return ops.dense(ScaledArray(x, x_scale), ScaledArray(w, scale), config=config)

    def data(scale):
        y, vjp = jax.vjp(lambda x, w: op(x, w, scale).data, x, w)
        return y, *vjp(dy)

    inside = dtype != "float16"
    scale = op(x, w, w_scale).scale
    expected = x_scale if inside else w_scale * (1 if x_scale is None else x_scale)
    np.testing.assert_array_equal(1.0 if scale is None else scale, expected or 1.0)
    factor = np.float64(w_scale if inside else 1)
    for one, other in zip(data(w_scale), data(None), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(np.float64(one), np.float64(other) * factor, rtol=2**-7)


def test_quantized_matmul_and_readout() -> None:
    config = MatmulConfig()
    x, w = normal("fp8", (3, 8), (8, 4))
    expected = rounded(np.float32(x), "float8_e4m3fn") @ rounded(np.float32(w), "float8_e4m3fn")
    x, w = jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32)
    for op, factor in ((ops.matmul, 8**-0.5), (ops.readout, 1 / 8)):
        np.testing.assert_allclose(
            op(x, w, config=config).data, factor * expected, rtol=1e-5, atol=1e-6
        )
    scaled = ScaledArray(x, 2.0**12)
    np.testing.assert_allclose(
        ops.matmul(scaled, w, config=config).value, 2**12 * 8**-0.5 * expected, rtol=1e-5, atol=0.1
    )
    # Operands stored in 8 bits are multiplied as they are, into bfloat16.
    stored = x.astype(jnp.float8_e4m3fn)
    y, vjp = jax.vjp(lambda x: ops.dense(x, w, config=config).data, stored)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float64(y), 8**-0.5 * expected, rtol=2**-7, atol=2**-7)
    assert vjp(y)[0].dtype == jnp.float8_e4m3fn


x, w = jnp.ones((8, 32)), jnp.ones((16, 64))
good = jnp.ones((32, 4))
ERRORS = [
    (ValueError, lambda: ops.dense(x, w), r"kernel must .* x \(8, 32\), kernel \(16, 64\)"),
    (ValueError, lambda: ops.dense(x, good.T), r"Transpose the kernel\?"),
    (ValueError, lambda: ops.readout(x, good[None]), r"ops\.readout: kernel must be"),
    (ValueError, lambda: ops.dense(x, good, jnp.ones(5)), r"bias must be .*; got bias \(5,\)"),
    (TypeError, lambda: ops.dense(x, good, jnp.ones(4, int)), "bias must be a floating array"),
    (TypeError, lambda: ops.dense(x.astype(int), good), r"dense: x must .* int32"),
    (TypeError, lambda: ops.readout(x, good > 0), r"ops\.readout: kernel must be a floating"),
    (ValueError, lambda: ops.dense(jnp.ones(()), good), r"ops\.dense: kernel must be"),
    (ValueError, lambda: ops.dense(x, good, constraint="to_output_scal"), "'to_output_scale'"),
    (ValueError, lambda: ops.dense(x, good, constraint="to_left_grad_scale"), "left_grad_scale"),
    (ValueError, lambda: ops.matmul(x, w), r"ops\.matmul: left must be \(\.\.\., m, k\)"),
    (ValueError, lambda: ops.matmul(x[0], good), r"ops\.matmul: left must be"),
    (
        ValueError,
        lambda: ops.matmul(jnp.ones((2, 1, 1)), jnp.ones((3, 1, 1))),
        "leading dimensions",
    ),
    (ValueError, lambda: ops.matmul(x, good, constraint="to_grad_input_scale"), "grad_input_scale"),
    (TypeError, lambda: ops.matmul(x, good > 0), r"ops\.matmul: right must be a floating"),
]


test_errors = refuses(ERRORS)
