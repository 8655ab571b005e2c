"""Losses: ordinary values, unit-scaled gradients."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.refusals import refuses
from unitscale import ops
from unitscale.core import ScaledArray, dithered, format_of
from unitscale.ops._loss import (
    in_one_pass,
    in_two_passes,
    normalizer,
    token_gradients,
    wide_logits,
)

from .conformance import (
    SCALES,
    assert_scales_are_constants,
    case,
    check,
    in_every_dtype,
    normal,
    pulled,
    under_scales,
)

VOCAB = 5
LABELS = np.array([[0, 3, 1], [4, 4, 2]])
TOKENS = LABELS.size
WHERE = np.array([[True, False, True], [False, False, True]])
FACTOR = VOCAB / (VOCAB - 1) ** 0.5


def cross_entropy(logits, mult=1.0, where=None, reduction="mean"):
    z = mult * logits
    z = z - z.max(-1, keepdims=True)
    picked = np.take_along_axis(z, LABELS[..., None], -1)[..., 0]
    losses = np.log(np.exp(z).sum(-1)) - picked
    where = np.ones(LABELS.shape, bool) if where is None else where
    if reduction == "none":
        return np.where(where, losses, 0)
    total = losses[where].sum()
    return total if reduction == "sum" else total / where.sum()


def loss(logits, **kwargs):
    return ops.softmax_cross_entropy(logits, LABELS, **kwargs)


def logits(*shape):
    return normal("logits", shape or (2, 3, VOCAB))


# The 1/N of the mean is kept out of the backward.
MEAN = case(loss, cross_entropy, logits(), fwd=1.0, bwd=(FACTOR * TOKENS,))
SQUARE = case(
    ops.mse_loss,
    lambda p, t: np.mean((p - t) ** 2),
    normal("mse", (3, 4), (3, 4)),
    fwd=1.0,
    bwd=(12 * 8**-0.5, 12 * 8**-0.5),
)
test_means = in_every_dtype({"cross_entropy": MEAN, "mse": SQUARE})


@pytest.mark.parametrize("where", [None, WHERE], ids=["all", "where"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("mult", [1.0, 0.25])
def test_reductions(mult: float, reduction, where) -> None:
    counted = TOKENS if where is None else where.sum()
    kwargs = {"mult": mult, "where": where, "reduction": reduction}
    # The factor undoes mult: the gradient of unit scale is the same for every temperature.
    bwd = FACTOR / mult * (counted if reduction == "mean" else 1)
    op, reference = (functools.partial(f, **kwargs) for f in (loss, cross_entropy))
    check(op, reference, logits(), fwd=1.0, bwd=(bwd,))


@pytest.mark.parametrize("scale", [*SCALES, np.float32([[[1], [2], [0.5]]]), np.float32([3] * 5)])
def test_scale_is_folded_in(scale) -> None:
    MEAN(scales=(scale,), slack=4)
    assert_scales_are_constants(loss, ScaledArray(jnp.asarray(logits()[0]), scale))


def test_value_is_float32_and_gradient_is_that_of_the_logits() -> None:
    x = jnp.zeros((2, 3, VOCAB), jnp.bfloat16)
    value, grad = jax.jit(jax.value_and_grad(loss))(x)
    assert value.dtype == jnp.float32
    assert value.shape == ()
    np.testing.assert_allclose(value, np.log(VOCAB), rtol=1e-6)
    assert grad.dtype == jnp.bfloat16


def test_gradient_is_unit_for_small_logits() -> None:
    """As at initialisation: the RMS over all tokens is 1, whatever their number."""
    for tokens in (1, 64):
        labels = jnp.arange(tokens) % 16
        grad = jax.jit(jax.grad(ops.softmax_cross_entropy))(jnp.zeros((tokens, 16)), labels)
        np.testing.assert_allclose(np.mean(np.square(grad)), 1.0, rtol=1e-5)


def test_small_gradients_survive_float16() -> None:
    """A probability of 3e-8 is below float16's subnormals / 2, times the factor 224 it is not."""
    vocab = 50000
    z = jnp.zeros((1, vocab), jnp.float16).at[0, 0].set(6.5)
    grad = np.asarray(jax.jit(jax.grad(ops.softmax_cross_entropy))(z, jnp.array([0])))
    p = 1 / (np.exp(6.5) + vocab - 1)
    np.testing.assert_allclose(np.float64(grad[0, 1]), p * vocab / (vocab - 1) ** 0.5, rtol=2**-10)


def test_no_token_counts() -> None:
    nothing = jnp.zeros(LABELS.shape, bool)
    for reduction in ("mean", "sum", "none"):
        f = functools.partial(loss, where=nothing, reduction=reduction)
        value, (grad,) = pulled(f, jnp.ones((2, 3, VOCAB)))
        np.testing.assert_array_equal(value, 0)
        np.testing.assert_array_equal(grad, 0)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_of_no_token_at_all(reduction: Any) -> None:
    labels = jnp.zeros((0, 3), jnp.int32)

    def whole(x: Any) -> Any:
        return ops.softmax_cross_entropy(x, labels, reduction=reduction).sum()

    def chunked(x: Any, kernel: Any) -> Any:
        return ops.readout_cross_entropy(x, kernel, labels, reduction=reduction).sum()

    x, kernel = jnp.ones((0, 3, VOCAB)), jnp.ones((VOCAB, VOCAB))
    assert jax.value_and_grad(whole)(x)[0] == 0
    value, (_, grad) = jax.value_and_grad(chunked, (0, 1))(x, kernel)
    assert value == 0
    np.testing.assert_array_equal(grad, jnp.zeros_like(kernel))


def test_tokens_that_do_not_count_may_hold_anything() -> None:
    x, labels = jnp.ones((2, VOCAB)).at[1].set(jnp.nan), jnp.array([0, -100])
    where = jnp.array([True, False])
    for reduction in ("mean", "sum"):
        f = functools.partial(ops.softmax_cross_entropy, where=where, reduction=reduction)
        value, grad = jax.jit(jax.value_and_grad(f))(x, labels)
        np.testing.assert_allclose(value, np.log(VOCAB), rtol=1e-6)
        assert np.isfinite(np.asarray(grad)).all()
        np.testing.assert_array_equal(np.asarray(grad)[1], 0)


@pytest.mark.parametrize("scale", [None, 4.0, 0.25])
def test_infinite_logits(scale) -> None:
    """A class masked by -inf has probability and gradient 0; the others share the rest."""
    x = jnp.asarray([[0.0, -jnp.inf, 0.0, -jnp.inf, 0.0]], jnp.float16)
    scaled = x if scale is None else ScaledArray(x, scale)
    value, grad = jax.jit(jax.value_and_grad(ops.softmax_cross_entropy))(scaled, jnp.array([2]))
    np.testing.assert_allclose(value, np.log(3), rtol=1e-6)
    expected = FACTOR * (scale or 1) * np.array([[1 / 3, 0, -2 / 3, 0, 1 / 3]])
    np.testing.assert_allclose(getattr(grad, "data", grad), expected, rtol=2**-10)
    impossible = ops.softmax_cross_entropy(x, jnp.array([1]))
    assert np.isposinf(np.asarray(impossible))


SCALED = [(8.0, 8.0), (2.0**-12, None), (None, 4.0), (np.float32([1, 2, 3, 4]), 1)]


test_mse_scales = under_scales(SCALED, {"mse": SQUARE})


def test_mse_unit_variance() -> None:
    gradients, squares = jax.jit(jax.grad(ops.mse_loss, (0, 1))), []
    for seed in range(16):
        p, t = np.random.default_rng(seed).standard_normal((2, 1024)).astype(np.float32)
        squares.append([np.mean(np.square(g)) for g in gradients(p, t)])
    error = np.std(squares, 0, ddof=1) / 4
    assert (np.abs(np.mean(squares, 0) - 1) <= 5 * error).all()


def test_mse_is_summed_wide() -> None:
    p = jnp.full((100,), 300.0, jnp.float16)
    value, grad = jax.jit(jax.value_and_grad(ops.mse_loss))(p, -p)
    assert value == 600.0**2
    assert value.dtype == jnp.float32
    np.testing.assert_array_equal(grad, np.float16(1200 * 8**-0.5))


x = jnp.ones((2, 3, VOCAB))
ERRORS = [
    (ValueError, lambda: loss(x, reduction="avg"), "reduction must .* got 'avg'"),
    (ValueError, lambda: loss(x[0]), r"got logits \(3, 5\), labels \(2, 3\).*class indices"),
    (ValueError, lambda: loss(x, where=WHERE[0]), r"where \(3,\)"),
    (ValueError, lambda: loss(x[..., :1]), "vocab must be at least 2"),
    (ValueError, lambda: loss(x, mult=0), "mult must be positive"),
    (TypeError, lambda: loss(x, where=WHERE.astype(int)), "where must be boolean; got dtype int32"),
    (TypeError, lambda: ops.softmax_cross_entropy(x, x[..., 0]), "labels must be integers; got"),
    (TypeError, lambda: loss(x > 0), r"softmax_cross_entropy: logits must be a floating array"),
    (ValueError, lambda: ops.mse_loss(x, x[0]), r"mse_loss: pred and target must"),
    (TypeError, lambda: ops.mse_loss(x, x > 0), r"ops\.mse_loss: target must be a floating array"),
]


test_errors = refuses(ERRORS)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "uint32"])
def test_labels_of_any_integer_type(dtype: str) -> None:
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((3, 300)), jnp.float32)
    labels = jnp.array([0, 1, 127])

    def loss(labels):
        return lambda logits: ops.softmax_cross_entropy(logits, labels)

    (expected, dz), (found, own) = (
        jax.value_and_grad(loss(x))(logits) for x in (labels, labels.astype(dtype))
    )
    assert found == expected
    np.testing.assert_array_equal(own, dz)


def test_a_negative_label_counts_from_the_end() -> None:
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((2, 5)), jnp.float32)
    both = (
        jax.value_and_grad(lambda z, y=y: ops.softmax_cross_entropy(z, y))(logits)
        for y in (jnp.array([-1, 2]), jnp.array([4, 2]))
    )
    for found, expected in zip(*both, strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("cotangent", [None, 0.25])
@pytest.mark.parametrize("bits", [2, 3])
def test_gradients_are_dithered_for_8_bits(bits: int, cotangent: float | None) -> None:
    z = wide_logits(jnp.asarray(logits(2, 3, VOCAB)[0]), 1.0, None)
    labels, norm = jnp.asarray(LABELS), normalizer(z)
    by = None if cotangent is None else jnp.asarray(cotangent)
    exact, found = (token_gradients(z, labels, norm, None, None, 3.0, by, n) for n in (None, bits))
    np.testing.assert_array_equal(found, dithered(exact, bits))
    assert np.all(np.asarray(found) != np.asarray(exact))


@pytest.mark.parametrize("dtype", ["float8_e5m2", "float8_e4m3fn"])
def test_gradients_in_8_bits_leave_all_logits_together_where_they_are(dtype: str) -> None:
    """Those of a token add up to 0; rounded to the nearest, to less than 0 for most tokens."""
    tokens, classes = 2048, 64
    rng = np.random.default_rng(0)
    z = jnp.asarray(2 * rng.standard_normal((tokens, classes)), jnp.float32)
    labels, norm = jnp.asarray(rng.integers(0, classes, tokens)), normalizer(z)

    def drift(bits: int | None) -> float:
        """The mean over tokens of what the gradients of one add up to, in standard errors."""
        gradients = token_gradients(z, labels, norm, None, None, float(classes), None, bits)
        sums = np.asarray(gradients.astype(dtype), np.float64).sum(-1)
        return sums.mean() / (sums.std() / tokens**0.5)

    assert abs(drift(format_of(dtype).mantissa_bits)) < 4
    assert drift(None) < -8


LOWEST = float(np.finfo(np.float32).min)
ROWS_OF_LOGITS = {
    "rising": np.linspace(-90, 90, 1000),
    "falling": np.linspace(90, -90, 1000),
    "beyond the range of exp": [300.0, -300.0, 299.0, 0.0],
    "far below": [-300.0, -301.0, -1e30],
    "padded": [-3.0, -2.0, LOWEST, LOWEST],
    "all alike": [5.0] * 7,
    "one": [-2.5],
    "some that can not be": [1.0, -np.inf, 2.0, -np.inf],
    "none that can be": [-np.inf, -np.inf],
    "infinite": [1.0, np.inf, 2.0],
    "infinite twice": [np.inf, 0.0, np.inf],
    "not a number": [1.0, np.nan, 2.0],
    "not a number, infinite": [np.nan, np.inf],
}


@pytest.mark.parametrize("row", ROWS_OF_LOGITS.values(), ids=ROWS_OF_LOGITS)
def test_the_normalizer_of_one_pass_is_that_of_two(row) -> None:
    """A sum that has met a larger logit is rounded once more: as often as there are such logits."""
    z = jnp.asarray([row, row[::-1]], jnp.float32)
    one, two = (f(z) for f in (jax.jit(in_one_pass), jax.jit(in_two_passes)))
    np.testing.assert_array_equal(one.largest, two.largest)
    eps = np.finfo(np.float32).eps
    np.testing.assert_allclose(one.log_total, two.log_total, rtol=eps, atol=4 * len(row) * eps)
