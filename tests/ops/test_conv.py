"""Convolution, channels last."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.refusals import refuses
from unitscale import ops
from unitscale.core import ScaledArray
from unitscale.quant import MatmulConfig

from .conformance import (
    assert_scales_are_constants,
    assert_unit,
    in_every_dtype,
    linear,
    normal,
    rounded,
    under_scales,
)


def apart(x, gaps):
    """Puts zeros between the positions of ``x``."""
    steps = (slice(None), *(slice(None, None, gap) for gap in gaps), slice(None))
    shape = (1 + (np.array(x.shape[1:-1]) - 1) * gaps, x.shape[-1])
    dilated = np.zeros((x.shape[0], *shape[0], shape[1]))
    dilated[steps] = x
    return dilated


def conv(x, kernel, bias=0.0, *, strides=1, padding="SAME", dilation=1, input_dilation=1, groups=1):
    """One product per tap of the kernel and per group."""
    *window, fan, out = kernel.shape
    rank = len(window)
    x = apart(x, np.broadcast_to(input_dilation, rank))
    strides, dilation = np.broadcast_to(strides, rank), np.broadcast_to(dilation, rank)
    size = np.array(x.shape[1:-1])
    reach = (np.array(window) - 1) * dilation
    mode = {"CIRCULAR": "wrap", "REFLECT": "reflect"}.get(padding, "constant")
    if mode != "constant":
        pads = [(r // 2, r - r // 2) for r in reach]
    elif padding == "SAME":
        total = np.maximum((-(-size // strides) - 1) * strides + reach + 1 - size, 0)
        pads = [(t // 2, t - t // 2) for t in total]
    else:
        pads = {"VALID": [(0, 0)] * rank, "CAUSAL": [(r, 0) for r in reach]}.get(padding, padding)
    x = np.pad(x, [(0, 0), *pads, (0, 0)], mode)
    shape = (np.array(x.shape[1:-1]) - reach - 1) // strides + 1
    y = np.zeros((x.shape[0], *shape, out))
    for tap in np.ndindex(*window):
        start = np.array(tap) * dilation
        ranges = zip(start, start + (shape - 1) * strides + 1, strides, strict=True)
        picked = x[(slice(None), *(slice(*r) for r in ranges))]
        for g in range(groups):
            i, o = slice(g * fan, (g + 1) * fan), slice(g * out // groups, (g + 1) * out // groups)
            y[..., o] += picked[..., i] @ kernel[tap][..., o]
    return y + bias


CASES = {
    # x, kernel, options
    "1d": ((2, 5, 3), (3, 3, 4), {}),
    "1d valid": ((2, 5, 3), (2, 3, 4), {"padding": "VALID"}),
    "1d causal dilated": ((1, 6, 2), (3, 2, 3), {"padding": "CAUSAL", "dilation": 2}),
    "1d strided pairs": ((1, 7, 2), (3, 2, 3), {"padding": ((2, 1),), "strides": 2}),
    "1d circular dilated": ((2, 5, 2), (4, 2, 3), {"padding": "CIRCULAR", "dilation": 2}),
    "2d reflected": ((1, 3, 4, 2), (3, 2, 2, 3), {"padding": "REFLECT", "strides": (2, 1)}),
    "1d depthwise": ((2, 5, 4), (3, 1, 4), {"groups": 4}),
    "2d": ((1, 3, 4, 2), (2, 3, 2, 3), {}),
    "2d all": (
        (1, 4, 5, 4),
        (2, 2, 2, 4),
        {"strides": (2, 1), "dilation": (1, 2), "groups": 2, "padding": "VALID"},
    ),
    "3d": ((1, 2, 3, 2, 2), (2, 1, 2, 2, 2), {}),
    "1d of zeros between": ((2, 5, 2), (3, 2, 3), {"input_dilation": 2, "padding": ((2, 1),)}),
    "2d of zeros between": (
        (1, 3, 4, 4),
        (2, 3, 2, 4),
        {"input_dilation": (2, 3), "padding": "VALID", "strides": (1, 2), "groups": 2},
    ),
    "1d transposed": ((2, 5, 2), (3, 2, 3), {"transposed": 2, "padding": ((2, 1),)}),
    "2d transposed": (
        (1, 3, 4, 2),
        (2, 3, 2, 3),
        {"transposed": (2, 1), "padding": ((1, 0), (2, 2)), "dilation": (1, 2)},
    ),
}


def arguments(name: str):
    x, kernel, options = CASES[name]
    given, options = dict(options), dict(options)
    if "groups" in given:
        given["feature_group_count"] = given.pop("groups")
    op = ops.conv
    if "transposed" in options:
        op = ops.conv_transpose
        options["input_dilation"] = given["strides"] = given.pop("transposed")
        del options["transposed"]
    return x, kernel, functools.partial(op, **given), functools.partial(conv, **options)


def factors(name: str):
    """Roots of the number of terms that each of the three products sums."""
    x, kernel, _, reference = arguments(name)
    options = reference.keywords
    y = reference(np.zeros(x), np.zeros(kernel))
    window = np.prod(kernel[:-2])
    strides, gaps = (
        np.prod(np.broadcast_to(options.get(name, 1), len(x) - 2))
        for name in ("strides", "input_dilation")
    )
    dx = window * kernel[-1] / options.get("groups", 1) / strides
    fan_in, positions = window * kernel[-2] / gaps, np.prod(y.shape[:-1]) / gaps
    return fan_in**-0.5, dx**-0.5, positions**-0.5


@pytest.mark.parametrize("name", CASES)
def test_conv(name: str) -> None:
    x, kernel, op, reference = arguments(name)
    fwd, dx, weight = factors(name)
    op = functools.partial(op, constraint=None)
    linear(op, reference, normal(name, x, kernel), fwd=fwd, bwd=(dx, weight))()


FWD, _, WEIGHT = factors("1d")
# By default the gradient of x is exactly the true one.
ONE = linear(ops.conv, conv, normal("1d", *CASES["1d"][:2]), fwd=FWD, bwd=(FWD, WEIGHT))
test_transforms = in_every_dtype({"1d": ONE})


@pytest.mark.parametrize("constraint", ["to_grad_input_scale", "gmean"])
def test_constraint(constraint) -> None:
    x, kernel, op, reference = arguments("1d valid")
    fwd, dx, weight = factors("1d valid")
    shared = dx if constraint == "to_grad_input_scale" else (fwd * dx) ** 0.5
    op = functools.partial(op, constraint=constraint)
    linear(op, reference, normal("1d", x, kernel), fwd=shared, bwd=(shared, weight))()


SCALED = [
    (2.0**12, 2.0**-12, None),
    (0.5, None, 4.0),
    (np.float32([[[2]], [[8]]]), 2.0, 1),  # one per example
    (np.float32([1, 4, 0.5]), None, None),  # one per input channel
    (None, np.float32([1, 4, 0.5, 2]), 2.0),  # one per output channel
]


BIASED = linear(
    ops.conv,
    lambda x, kernel, bias: conv(x, kernel, bias / FWD),
    normal("scales", *CASES["1d"][:2], (4,)),
    fwd=FWD,
    bwd=(FWD, WEIGHT, WEIGHT * FWD),
)
test_scales_and_bias = under_scales(SCALED, {"1d": BIASED})


def test_scale_and_dtype() -> None:
    x, w = jnp.ones((2, 5, 3), jnp.float16), jnp.ones((3, 3, 4), jnp.float32)
    y = ops.conv(ScaledArray(x, 4.0), ScaledArray(w, 0.5), ScaledArray(jnp.ones(4), 8.0))
    assert y.scale == 2
    assert y.dtype == jnp.float16
    assert ops.conv(ScaledArray(x, jnp.arange(1.0, 4.0)), w).dtype == jnp.float16
    assert ops.conv(x.astype(jnp.float8_e4m3fn), w).dtype == jnp.bfloat16
    assert_scales_are_constants(ops.conv, ScaledArray(x, 4.0), ScaledArray(w, 2.0))


def test_float16_is_summed_wide() -> None:
    """48 products of 2000 sum to 96000 > 65504, times 48^-1/2 they do not."""
    x, w = jnp.full((1, 8, 16), 50.0, jnp.float16), jnp.full((3, 16, 1), 40.0, jnp.float16)
    y = ops.conv(x, w, padding="VALID")
    np.testing.assert_array_equal(y.data, np.float16(96000 * 48**-0.5))


def test_bfloat16_stays_bfloat16() -> None:
    """Operands of all three products; sums are float32, so that only results are rounded."""
    given = normal("bfloat16", (2, 6, 64), (3, 64, 32), (2, 6, 32))

    def pull(x, w, ct):
        y, vjp = jax.vjp(lambda x, w: ops.conv(x, w).data, x, w)
        return y, *vjp(ct)

    x, w, ct = (jnp.asarray(a, jnp.bfloat16) for a in given)
    program = jax.jit(pull).lower(x, w, ct).as_text()
    products = [line for line in program.splitlines() if "stablehlo.convolution" in line]
    assert len(products) == 3
    assert not any("f32>" in line.rpartition(" : ")[2] for line in products)
    wide = jax.jit(pull)(*(a.astype(jnp.float32) for a in (x, w, ct)))
    for found, expected in zip(jax.jit(pull)(x, w, ct), wide, strict=True):
        assert found.dtype == jnp.bfloat16
        # Half an eps for the result, another half for its product with the factor.
        np.testing.assert_allclose(np.asarray(found, np.float32), expected, rtol=2**-7, atol=1e-6)


def test_quantized() -> None:
    x, w = normal("fp8", (1, 6, 4), (3, 4, 2))
    x[0, 0, 0] = 500.0  # saturates
    config = MatmulConfig()

    def op(x, w):
        return ops.conv(x, w, config=config).data

    y, vjp = jax.vjp(op, jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32))
    x[0, 0, 0] = 448.0
    qx, qw = rounded(np.float32(x), "float8_e4m3fn"), rounded(np.float32(w), "float8_e4m3fn")
    np.testing.assert_allclose(y, 12**-0.5 * conv(qx, qw), rtol=1e-5, atol=1e-4)
    # Cotangents are not quantized: dkernel is the exact product with the quantized input.
    (ct,) = normal("ct", y.shape)
    _, dw = vjp(jnp.asarray(ct, jnp.float32))
    padded = np.pad(qx, [(0, 0), (1, 1), (0, 0)])
    expected = np.stack([padded[0, t : t + 6].T @ ct[0] for t in range(3)])
    np.testing.assert_allclose(dw, 6**-0.5 * expected, rtol=1e-5, atol=1e-3)


def test_unit_variance() -> None:
    assert_unit(
        lambda x, w: ops.conv(x, w, padding="VALID", constraint=None),
        (2, 64, 8),
        (3, 8, 16),
        # Each of the two borders misses 2 of 3 taps at one pixel and 1 at the next.
        bias=2 / 64,
    )


@pytest.mark.parametrize(("window", "strides"), [(1, 2), (2, 2), (3, 2), (4, 2), (5, 3)])
def test_unit_variance_transposed(window: int, strides: int) -> None:
    """On average over the outputs, which have different numbers of inputs."""
    assert_unit(
        lambda x, w: ops.conv_transpose(x, w, strides=strides, constraint=None),
        (2, 64, 8),
        (window, 8, 16),
        bias=window / 64,
    )


x, w = jnp.ones((2, 6, 6, 4)), jnp.ones((3, 3, 4, 8))
ERRORS = [
    (ValueError, lambda: ops.conv(x, w[0]), r"ops\.conv: x must .* x \(2, 6, 6, 4\), kernel"),
    (ValueError, lambda: ops.conv(x, w[:, :, :2]), "feature_group_count is 1"),
    (ValueError, lambda: ops.conv(x[0, 0], w[0]), r"ops\.conv: x must be \(batch, \*spatial, in\)"),
    (ValueError, lambda: ops.conv(x, w[..., :1, :6], feature_group_count=4), "got 4 groups"),
    (ValueError, lambda: ops.conv(x, w, strides=(1, 2, 3)), "strides must be"),
    (ValueError, lambda: ops.conv(x, w, dilation=0), "dilation must be a positive integer"),
    (ValueError, lambda: ops.conv(x, w, padding="CAUSAL"), "padding must be 'SAME'.*got 'CAUSAL'"),
    (ValueError, lambda: ops.conv(x, w, padding=((1, 1),)), "padding must be 'SAME'"),
    (
        ValueError,
        lambda: ops.conv(x, w, input_dilation=2),
        "got input_dilation .*transpose",
    ),
    (
        ValueError,
        lambda: ops.conv_transpose(x[0], w[0], padding="CAUSAL"),
        r"conv_transpose: padding must be 'SAME', 'VALID', an integer.*got 'CAUSAL'",
    ),
    (ValueError, lambda: ops.conv_transpose(x, w, strides=(2,)), "conv_transpose: strides must"),
    (ValueError, lambda: ops.conv_transpose(x, w[:, :, :2]), "conv_transpose: x must be"),
    (ValueError, lambda: ops.conv(x, w, jnp.ones(3)), r"conv: bias must .* got bias"),
    (ValueError, lambda: ops.conv(x, w, constraint="to_output"), "to_output_scale"),
    (TypeError, lambda: ops.conv(x > 0, w), r"ops\.conv: x must be a floating array"),
    (TypeError, lambda: ops.conv(x, w.astype(int)), r"ops\.conv: kernel must be a floating array"),
]


test_errors = refuses(ERRORS)


@pytest.mark.parametrize("padding", [1, (1, 1), (1, (1, 1))])
def test_padding_by_integers(padding) -> None:
    x, kernel = jnp.ones((1, 5, 6, 2)), jnp.ones((3, 3, 2, 4))
    expected = ops.conv(x, kernel, padding=((1, 1), (1, 1)))
    np.testing.assert_array_equal(ops.conv(x, kernel, padding=padding).data, expected.data)


def test_a_step_of_one_by_default() -> None:
    x, w = jnp.arange(12.0).reshape(1, 6, 2), jnp.ones((3, 2, 4))
    np.testing.assert_array_equal(ops.conv(x, w).value, ops.conv(x, w, strides=1).value)
