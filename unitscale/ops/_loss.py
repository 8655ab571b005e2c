"""Losses with ordinary values and unit-scaled gradients."""

import math
from functools import partial, reduce
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .. import rules
from ..core import (
    TENSOR_AXES,
    axes_size,
    batch_size_override,
    check_choice,
    custom_vjp,
    dithered,
    narrow,
    num_batch_shards,
    scale_bwd,
    widen,
)
from ._operands import ArrayLike, scale_argument, shape_error, times, unpack

Reduction = Literal["mean", "sum", "none"]
_SPLITS = 32


class Normalizer(NamedTuple):
    """Normalizer of a softmax: p = exp(z - largest - log_total)."""

    largest: jax.Array
    log_total: jax.Array


def wide_logits(logits: jax.Array, mult: float, scale: jax.Array | None) -> jax.Array:
    """Return the value of the logits times ``mult``, one float32 array."""
    return times(widen(logits) * mult, scale)


def has_sharded_classes(z: jax.Array) -> bool:
    """Return whether the class dimension is sharded over devices, as far as JAX knows."""
    return axes_size(TENSOR_AXES) > 1 or jax.typeof(z).sharding.spec[-1] is not None


def normalizer(z: jax.Array, sharded: bool = False) -> Normalizer:
    """Return the normalizer of each token without writing exponentials to memory."""
    if sharded or has_sharded_classes(z):  # in one pass, devices would have to exchange logits
        return in_two_passes(z)
    # XLA's CPU backend does not vectorize a custom reduction; two simple ones are faster there.
    return lax.platform_dependent(z, cpu=in_two_passes, default=in_one_pass)


def in_two_passes(z: jax.Array) -> Normalizer:
    """Compute the maximum of each row, and then the sum of exponentials."""
    largest = jnp.max(z, axis=-1)
    largest = jnp.where(jnp.isfinite(largest), largest, 0)
    return Normalizer(largest, jnp.log(jnp.sum(jnp.exp(z - largest[..., None]), axis=-1)))


def in_one_pass(z: jax.Array) -> Normalizer:
    """Compute maximum and sum together, reading the logits once (arXiv 1805.02867, algorithm 3).

    Combining `_SPLITS` logits at a time needs only about one exponential per logit.
    """
    least = jnp.finfo(z.dtype).min  # finite: -inf - -inf would be NaN
    more = [(0, 0)] * (z.ndim - 1) + [(0, -z.shape[-1] % _SPLITS)]
    few = jnp.split(jnp.pad(z, more, constant_values=-jnp.inf), _SPLITS, axis=-1)
    largest = reduce(jnp.maximum, few, least)
    total = sum(jnp.exp(x - largest) for x in few)

    def join(one: Any, other: Any) -> Any:
        (a, s), (b, t) = one, other
        largest, left = jnp.maximum(a, b), a >= b
        smaller = jnp.exp(jnp.minimum(a, b) - largest)
        return largest, jnp.where(left, s, t) + jnp.where(left, t, s) * smaller

    nothing = least, jnp.zeros((), z.dtype)
    largest, total = lax.reduce((largest, total), nothing, join, (z.ndim - 1,))
    log_total = jnp.where(largest == jnp.inf, jnp.inf, jnp.log(total))
    is_one = jnp.isfinite(largest) & (total != 0)  # false if all logits are -inf
    return Normalizer(jnp.where(is_one, largest, 0), log_total)


def token_losses(
    logits: jax.Array, labels: jax.Array, norm: Normalizer, mult: float, scale: jax.Array | None
) -> jax.Array:
    """Return the cross entropy of each token; NaN if its label is not a class."""

    def of_labels(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, labels[..., None], axis=-1)

    if scale is not None and scale.ndim and scale.shape[-1] > 1:
        scale = of_labels(jnp.broadcast_to(scale, logits.shape))
    # Widen 8-bit logits, whose format may not have NaN.
    logits = widen(logits) if logits.dtype.itemsize == 1 else logits
    right = wide_logits(of_labels(logits), mult, scale)[..., 0]
    return norm.log_total + norm.largest - right


def without_padding(z: jax.Array, vocab: int, sharded: bool = False) -> jax.Array:
    """Set the logits of padding columns to the least finite number, so that they do not count."""
    least, columns = jnp.finfo(z.dtype).min, z.shape[-1]
    if columns == vocab:
        return z
    if sharded or has_sharded_classes(z):
        return jnp.where(lax.broadcasted_iota(jnp.int32, z.shape, z.ndim - 1) < vocab, z, least)
    return jnp.pad(z[:, :vocab], ((0, 0), (0, columns - vocab)), constant_values=least)


def token_gradients(
    z: jax.Array,
    labels: jax.Array,
    norm: Normalizer,
    where: jax.Array | None,
    scale: jax.Array | None,
    factor: float,
    cotangent: jax.Array | None,
    mantissa_bits: int | None = None,
) -> jax.Array:
    """Return the gradient of each token's loss with respect to its logits, in float32.

    The gradient of a token sums to 0 over its logits. Rounding it to nearest in 8 bits would bias
    that sum and shift all logits over thousands of steps. With ``mantissa_bits`` it is dithered.
    """
    hits = labels[..., None] == lax.broadcasted_iota(labels.dtype, z.shape, z.ndim - 1)
    grad = jnp.exp(z - norm.largest[..., None] - norm.log_total[..., None])
    grad = times(grad - hits.astype(z.dtype), factor)
    if cotangent is not None:
        grad = grad * (cotangent[..., None] if cotangent.ndim else cotangent)
    grad = times(grad, scale)
    grad = grad if mantissa_bits is None else dithered(grad, mantissa_bits)
    return grad if where is None else jnp.where(where[..., None], grad, 0.0)


def reduce_losses(losses: jax.Array, where: jax.Array | None, reduction: Reduction) -> jax.Array:
    """Reduce the losses of the tokens in ``where``, all if None."""
    if reduction == "none":
        return losses if where is None else jnp.where(where, losses, 0.0)
    if reduction == "sum":
        return jnp.sum(losses, where=where)
    if where is None:
        return jnp.mean(losses) if losses.size else jnp.sum(losses)
    return jnp.sum(losses, where=where) / jnp.maximum(jnp.sum(where), 1)


def first_reduction(reduction: Reduction) -> Reduction:
    """Return "sum" for a mean inside `batch_size`; `divide_by_count` divides it later."""
    return "sum" if reduction == "mean" and batch_size_override() is not None else reduction


def divide_by_count(loss: jax.Array, reduction: Reduction, count: int | jax.Array) -> jax.Array:
    """Divide the sum from `first_reduction` by the count; multiply its gradient by N / count."""
    if first_reduction(reduction) == reduction:
        return loss
    return scale_bwd(loss, float(batch_size_override() or 1)) / jnp.maximum(count, 1)


def check_labels(
    op: str, labels: Any, where: Any, reduction: str
) -> tuple[jax.Array, jax.Array | None]:
    """Return labels and ``where`` as arrays, or raise if their dtypes are wrong."""
    check_choice(f"unitscale.ops.{op}", "reduction", reduction, Reduction)
    labels = jnp.asarray(labels)
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"unitscale.ops.{op}: labels must be integers; got dtype {labels.dtype}")
    where = None if where is None else jnp.asarray(where)
    if where is not None and where.dtype != bool:
        raise TypeError(
            f"unitscale.ops.{op}: where must be boolean; got dtype {where.dtype}. "
            "Pass a comparison, such as weights > 0."
        )
    return labels, where


def check_token_shapes(
    op: str, labels: jax.Array, where: jax.Array | None, **operand: tuple[int, ...]
) -> None:
    """Raise unless labels and ``where`` have the leading dimensions of the operand."""
    ((name, shape),) = operand.items()
    shapes = operand | {"labels": labels.shape} | ({} if where is None else {"where": where.shape})
    if not shape or any(other != shape[:-1] for other in list(shapes.values())[1:]):
        expected = f"{name} must be (..., features) and labels, where (...)"
        raise shape_error(op, expected, "Labels are class indices, not one-hot rows.", **shapes)


def label_columns(labels: jax.Array, vocab: int, columns: int) -> jax.Array:
    """Return labels as column indices. Labels that are not a class become ``columns``."""
    # Small integer types cannot hold every class index.
    labels = labels.astype(jnp.promote_types(labels.dtype, jnp.int32))
    labels = jnp.where(labels < 0, labels + vocab, labels)
    return jnp.where((labels < 0) | (labels >= vocab), columns, labels)


@partial(custom_vjp, nondiff_argnums=(4, 5, 6))
def _cross_entropy(logits, labels, where, scale, mult, factor, reduction):
    return _cross_entropy_fwd(logits, labels, where, scale, mult, factor, reduction)[0]


def _cross_entropy_fwd(logits, labels, where, scale, mult, factor, reduction):
    norm = normalizer(wide_logits(logits, mult, scale))
    losses = token_losses(logits, labels, norm, mult, scale)
    return reduce_losses(losses, where, reduction), (logits, labels, where, scale, norm)


def _cross_entropy_bwd(mult, factor, reduction, residuals, cotangent):
    logits, labels, where, scale, norm = residuals
    # Without the 1/N of a mean, so that gradients are unit scaled for every batch size.
    z = wide_logits(logits, mult, scale)
    grad = token_gradients(z, labels, norm, where, scale, mult * factor, cotangent)
    return narrow(grad, logits.dtype), None, None, None


_cross_entropy.defvjp(_cross_entropy_fwd, _cross_entropy_bwd)


def softmax_cross_entropy(
    logits: ArrayLike,
    labels: jax.Array,
    *,
    mult: float = 1.0,
    where: jax.Array | None = None,
    reduction: Reduction = "mean",
) -> jax.Array:
    """Return the cross entropy of integer labels under softmax(mult * logits).

    Scaling: `rules.softmax_cross_entropy`. The logits are multiplied by their scale. The value is
    the ordinary loss. Gradients omit the 1/N of a mean, where N counts the tokens on all devices
    (`unitscale.batch_over`) or is set by `unitscale.batch_size`; in a sum, plain terms weigh less.

    Args:
        logits: (..., V), floating.
        labels: (...), integers in [0, V). Negative labels count from the end, like indices. A label
            out of range gives a loss of NaN.
        mult: static multiplier of the logits (inverse temperature).
        where: (...), boolean: the tokens to include; None for all. The mean is 0 without any.
        reduction: "mean" over the included tokens, "sum", or "none" (one loss per token).

    Returns:
        Scalar, or (...) for reduction "none"; float32, or float64 for float64 logits.

    Example:
        >>> print(softmax_cross_entropy(jnp.zeros((2, 4)), jnp.array([0, 3])).round(4))
        1.3863
    """
    op = "softmax_cross_entropy"
    data, scale = unpack(op, "logits", logits)
    labels, where = check_labels(op, labels, where, reduction)
    check_token_shapes(op, labels, where, logits=data.shape)
    vocab, first = data.shape[-1], first_reduction(reduction)
    labels = label_columns(labels, vocab, vocab)
    (factor,) = rules.softmax_cross_entropy(vocab, mult=mult).bwd
    # Averaging losses over devices divides gradients by the number of devices: undo it here.
    factor *= num_batch_shards(data, labels) if first == "mean" else 1
    loss = _cross_entropy(data, labels, where, scale_argument(scale), float(mult), factor, first)
    return divide_by_count(loss, reduction, labels.size if where is None else jnp.sum(where))


def _difference(operands, scales):
    x, y = (times(widen(x), scale) for x, scale in zip(operands, scales, strict=True))
    return x - y


@partial(custom_vjp, nondiff_argnums=(2, 3))
def _mean_square(operands, scales, factors, count):
    return jnp.sum(jnp.square(_difference(operands, scales))) / count


def _mean_square_fwd(operands, scales, factors, count):
    return _mean_square(operands, scales, factors, count), (operands, scales)


def _mean_square_bwd(factors, count, residuals, cotangent):
    operands, scales = residuals
    grad = 2 * _difference(operands, scales) * cotangent
    grads = tuple(
        narrow(times(g, scale) * factor, x.dtype)
        for g, x, scale, factor in zip((grad, -grad), operands, scales, factors, strict=True)
    )
    return grads, None


_mean_square.defvjp(_mean_square_fwd, _mean_square_bwd)


def mse_loss(pred: ArrayLike, target: ArrayLike) -> jax.Array:
    """Return the mean squared error.

    Scaling: `rules.mse_loss`. Operands are multiplied by their scales. The value is the ordinary
    loss. Gradients omit the 1/N of the mean, as in `softmax_cross_entropy`. N counts elements here,
    so inside ``unitscale.batch_size(n)`` gradients are n / elements times those outside.
    """
    p, p_scale = unpack("mse_loss", "pred", pred)
    t, t_scale = unpack("mse_loss", "target", target)
    if p.shape != t.shape:
        expected = "pred and target must have the same shape"
        raise shape_error("mse_loss", expected, pred=p.shape, target=t.shape)
    scales = (scale_argument(p_scale), scale_argument(t_scale))
    count = max(math.prod(p.shape), 1)
    items = batch_size_override()
    kept = num_batch_shards(p, t) if items is None else items / count
    factors = tuple(factor * kept for factor in rules.mse_loss().bwd)
    return _mean_square((p, t), scales, factors, count)
