"""Pooling, channels last."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale import ops, rules
from unitscale.core import ScaledArray

from .conformance import (
    Case,
    assert_scales_are_constants,
    assert_unit,
    case,
    in_every_dtype,
    normal,
    under_scales,
)

POOLS = {"avg": (ops.avg_pool, rules.avg_pool), "max": (ops.max_pool, rules.max_pool)}


def pool(x, window, strides=None, padding="VALID", count_include_pad=True, *, f):
    """Window by window."""
    rank = len(window)
    strides = strides or (1,) * rank
    size = np.array(x.shape[-1 - rank : -1])
    pads = [(0, 0)] * rank
    if padding == "SAME":
        total = np.maximum((-(-size // strides) - 1) * strides + np.array(window) - size, 0)
        pads = [(t // 2, t - t // 2) for t in total]
    elif padding != "VALID":
        pads = padding
    x = np.pad(x, [(0, 0)] * (x.ndim - 1 - rank) + [*pads, (0, 0)], constant_values=np.nan)
    shape = (np.array(x.shape[-1 - rank : -1]) - window) // strides + 1
    y = np.zeros((*x.shape[: -1 - rank], *shape, x.shape[-1]))
    axes = tuple(range(-1 - rank, -1))
    for position in np.ndindex(*shape):
        ranges = (
            slice(p * s, p * s + w) for p, s, w in zip(position, strides, window, strict=True)
        )
        part = x[(..., *ranges, slice(None))]
        if f == "max":
            y[(..., *position, slice(None))] = np.nanmax(part, axes)
        else:
            mean = (np.nansum if count_include_pad else np.nanmean)(part, axes)
            y[(..., *position, slice(None))] = mean / (np.prod(window) if count_include_pad else 1)
    return y


CASES = {
    # x, arguments
    "1d": ((2, 5, 3), ((2,),)),
    "1d strided": ((2, 7, 2), ((3,), (2,))),
    "2d": ((1, 4, 4, 2), ((2, 2), (2, 2))),
    "2d same": ((1, 3, 5, 2), ((2, 3), (2, 1), "SAME")),
    "2d pairs": ((2, 3, 4, 1), ((2, 2), (1, 2), ((1, 0), (1, 1)))),
    "2d without batch": ((4, 5, 2), ((2, 2), (2, 1))),
    "2d two batches": ((2, 1, 4, 3, 2), ((2, 3),)),
    "3d": ((1, 2, 3, 2, 2), ((2, 1, 2),)),
    "whole": ((2, 3, 3, 2), ((3, 3),)),
}


def pools(f: str, x: np.ndarray, *arguments, **options) -> Case:
    """A check of a pool with the factors of its rule."""
    op, rule = POOLS[f]
    factors = rule(*arguments[:2], **options)
    return case(
        lambda x: op(x, *arguments, **options),
        lambda x: pool(x, *arguments, f=f),
        [x],
        fwd=factors.fwd,
        bwd=factors.bwd,
        step=1e-5 if f == "max" else 1.0,
    )


@pytest.mark.parametrize("f", POOLS)
@pytest.mark.parametrize("name", CASES)
def test_pool(name: str, f: str) -> None:
    shape, arguments = CASES[name]
    pools(f, *normal(name, shape), *arguments, constraint=None)()


# By default the gradient is exactly the true one.
SAME = {f: pools(f, *normal("transforms", (2, 3, 4, 2)), (2, 2), (2, 1), "SAME") for f in POOLS}
test_transforms = in_every_dtype(SAME)


@pytest.mark.parametrize("padding", ["SAME", ((1, 1), (0, 2))])
def test_mean_without_padding(padding) -> None:
    pools("avg", *normal("count", (2, 3, 5, 2)), (2, 3), (1, 2), padding, False)()


@pytest.mark.parametrize("padding", [1, (1, 1), (1, (1, 1))])
def test_padding_by_integers(padding) -> None:
    x = jnp.asarray(normal("padding", (1, 4, 5, 2))[0])
    expected = ops.max_pool(x, (2, 2), padding=((1, 1), (1, 1)))
    np.testing.assert_array_equal(ops.max_pool(x, (2, 2), padding=padding).data, expected.data)


def test_windows_of_padding_alone() -> None:
    x = jnp.ones((2, 1))
    y = ops.avg_pool(x, (2,), padding=((2, 0),), count_include_pad=False)
    np.testing.assert_allclose(y.data.ravel(), np.array([0, 1, 1]) * 2**0.5, rtol=1e-6)
    np.testing.assert_array_equal(ops.max_pool(x, (2,), padding=((2, 0),)).data[0], -np.inf)


SCALED = [
    2.0**12,
    np.float32([[[[2]]], [[[8]]]]),  # one per example
    np.float32([1, 4, 0.5]),  # one per channel
    np.float32([[[1], [4], [0.5], [2]]]),  # varies within windows
]


test_scales = under_scales(
    [(s,) for s in SCALED], {f: pools(f, *normal("scales", (2, 3, 4, 3)), (2, 2)) for f in POOLS}
)


@pytest.mark.parametrize("f", POOLS)
def test_scale_and_dtype(f: str) -> None:
    op, _ = POOLS[f]
    x = jnp.ones((2, 4, 4, 3), jnp.float16)
    y = op(ScaledArray(x, 4.0), (2, 2))
    assert (y.scale, y.dtype, y.shape) == (4, jnp.float16, (2, 3, 3, 3))
    assert op(ScaledArray(x, jnp.arange(1.0, 5.0)[:, None]), (2, 2)).dtype == jnp.float16
    assert op(x.astype(jnp.float8_e4m3fn), (2, 2)).dtype == jnp.bfloat16
    assert_scales_are_constants(lambda x: op(x, (2, 2)), ScaledArray(x, 4.0))


def test_float16_is_summed_wide() -> None:
    """The sum of 4 is above 65504, the mean times 2 is not."""
    y = ops.avg_pool(jnp.full((4, 1), 30000.0, jnp.float16), (4,))
    np.testing.assert_array_equal(y.data, 60000)


def test_nan_and_infinity() -> None:
    x = jnp.array([[np.nan], [1.0], [2.0], [np.inf]])
    np.testing.assert_array_equal(
        np.isnan(ops.max_pool(x, (2,)).data.ravel()), [True, False, False]
    )
    assert np.isposinf(ops.avg_pool(x, (2,)).data[-1, 0])


def test_the_first_of_equal_entries_gets_the_gradient() -> None:
    grad = jax.grad(lambda x: ops.max_pool(x, (2,), constraint=None).data.sum())(jnp.ones((2, 1)))
    np.testing.assert_array_equal(grad.ravel(), [1, 0])


# Of windows of 2 at strides of 1, an entry at the border is in one, every other in two.
@pytest.mark.parametrize(("stride", "size", "bias"), [(1, 64, 2 / 64), (2, 64, 0), (3, 60, 0)])
def test_unit_variance(stride: int, size: int, bias: float) -> None:
    assert_unit(
        lambda x: ops.avg_pool(x, (2, 2), (stride, stride), constraint=None),
        (size, size, 2),
        bias=bias,
    )


x = jnp.ones((2, 6, 6, 4))
ERRORS = [
    (ValueError, ((2, 2, 2, 2),), r".* must be \(\.\.\., \*spatial, features\).*x \(2, 6, 6, 4\)"),
    (ValueError, ((),), ".* a spatial dimension for each of window_shape"),
    (ValueError, ((2, 0),), "window_shape must be a positive integer or 2"),
    (ValueError, ((2, 2), (1,)), "strides must be a positive integer or 2"),
    (ValueError, ((2, 2), None, "CAUSAL"), "padding must be 'SAME'.*got 'CAUSAL'"),
    (ValueError, ((2, 2), None, ((1, 1),)), "padding must be 'SAME'"),
]


@pytest.mark.parametrize("op", [ops.avg_pool, ops.max_pool])
@pytest.mark.parametrize(("error", "arguments", "match"), ERRORS)
def test_errors(op, error, arguments, match) -> None:
    with pytest.raises(error, match=rf"ops\.{op.__name__}: {match}"):
        op(x, *arguments)


@pytest.mark.parametrize("op", [ops.avg_pool, ops.max_pool])
def test_integers_are_refused(op) -> None:
    with pytest.raises(TypeError, match="x must be a floating array"):
        op(x.astype(int), (2, 2))
    with pytest.raises(ValueError, match="to_output_scale"):
        op(x, (2, 2), constraint="to_output")
