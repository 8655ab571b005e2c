"""Losses: the value is the ordinary one, the gradient is unit scaled."""

import dataclasses
import math
from functools import partial, reduce
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax

from .. import rules
from ..core import (
    TENSOR_AXES,
    axes_size,
    batch_size_override,
    custom_vjp,
    dithered,
    narrow,
    num_batch_shards,
    scale_bwd,
    widen,
)
from ._operands import ArrayLike, scale_argument, shape_error, unpack

Reduction = Literal["mean", "sum", "none"]
_AT_ONCE = 32


def wide_logits(logits: jax.Array, mult: float, scale: jax.Array | None) -> jax.Array:
    """What the softmax is of: logits times their multiplier and scale, in float32."""
    z = widen(logits) * mult
    return z if scale is None else z * scale


def label_logits(
    logits: jax.Array, labels: jax.Array, mult: float, scale: jax.Array | None
) -> jax.Array:
    """`wide_logits` of the right classes alone; NaN for a label that is no class."""

    def of_labels(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, labels[..., None], axis=-1)

    if scale is not None and scale.ndim and scale.shape[-1] > 1:
        scale = of_labels(jnp.broadcast_to(scale, logits.shape))
    logits = widen(logits) if logits.dtype.itemsize == 1 else logits  # which may have no NaN
    return wide_logits(of_labels(logits), mult, scale)[..., 0]


class Normalizer(NamedTuple):
    """What makes probabilities of logits: p = exp(z - largest - log_total)."""

    largest: jax.Array
    log_total: jax.Array


def has_divided_classes(z: jax.Array) -> bool:
    """Whether devices are known to divide the classes, of which parts would be sent around."""
    return axes_size(TENSOR_AXES) > 1 or jax.typeof(z).sharding.spec[-1] is not None


def normalizer(z: jax.Array) -> Normalizer:
    """Two numbers for each token, from which its loss and its gradient are made.

    So that the gradient reads the logits once more and no exponential is written in between.
    """
    if has_divided_classes(z):
        return in_two_passes(z)
    # XLA's CPU backend has no vectors in a reduction of its own; two simple ones are faster there.
    return lax.platform_dependent(z, cpu=in_two_passes, default=in_one_pass)


def in_two_passes(z: jax.Array) -> Normalizer:
    """`normalizer`, the largest of each row and then the sum."""
    largest = jnp.max(z, axis=-1)
    largest = jnp.where(jnp.isfinite(largest), largest, 0)
    return Normalizer(largest, jnp.log(jnp.sum(jnp.exp(z - largest[..., None]), axis=-1)))


def in_one_pass(z: jax.Array) -> Normalizer:
    """`normalizer`, both together: a sum that has met a larger logit is made smaller by it.

    Of two parts of a row, with largest a and b and sums s and t of exponentials of what is above
    them, the sum is s + t exp(b - a) where a is the larger one: Milakov, Gimelshein, "Online
    normalizer calculation for softmax", 2018, arXiv 1805.02867, algorithm 3. So the logits, which
    no cache holds, are read once. `_AT_ONCE` of them come in together: each takes an exponential,
    and a second one only all of them.
    """
    least = jnp.finfo(z.dtype).min  # above minus infinity, so that no difference of two is NaN
    more = [(0, 0)] * (z.ndim - 1) + [(0, -z.shape[-1] % _AT_ONCE)]
    few = jnp.split(jnp.pad(z, more, constant_values=-jnp.inf), _AT_ONCE, axis=-1)
    largest = reduce(jnp.maximum, few, least)
    total = sum(jnp.exp(x - largest) for x in few)

    def join(one: Any, other: Any) -> Any:
        (a, s), (b, t) = one, other
        largest, left = jnp.maximum(a, b), a >= b
        smaller = jnp.exp(jnp.minimum(a, b) - largest)
        return largest, jnp.where(left, s, t) + jnp.where(left, t, s) * smaller

    nothing = least.astype(z.dtype), jnp.zeros((), z.dtype)
    largest, total = lax.reduce((largest, total), nothing, join, (z.ndim - 1,))
    log_total = jnp.where(largest == jnp.inf, jnp.inf, jnp.log(total))
    is_one = jnp.isfinite(largest) & (total != 0)  # of no logits that can be, there is none
    return Normalizer(jnp.where(is_one, largest, 0), log_total)


def token_losses(of_labels: jax.Array, norm: Normalizer) -> jax.Array:
    """The cross entropy of each token, of `label_logits`."""
    return norm.log_total + norm.largest - of_labels


def _classes(z: jax.Array, dtype: Any) -> jax.Array:
    """The class of every logit."""
    return lax.broadcasted_iota(dtype, z.shape, z.ndim - 1)


def without_padding(z: jax.Array, vocab: int) -> jax.Array:
    """Logits whose columns beyond the classes have probability 0.

    They are finite, so that no difference is NaN.
    """
    least, columns = jnp.finfo(z.dtype).min, z.shape[-1]
    if columns == vocab:
        return z
    if has_divided_classes(z):
        return jnp.where(_classes(z, jnp.int32) < vocab, z, least)
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
    """The gradients of each token's loss by its logits, in float32, times a factor.

    Those of a token add up to 0, by which all logits together stay where they are. Rounded to the
    nearest of 8 bits they do not: the label's errs in the same direction for most tokens, and the
    others lose a third of a percent, as below the middle between two numbers there are more than
    above. All logits then move together for thousands of steps, until 16 bits do not tell them
    apart; so all gradients are dithered.

    Args:
        z: logits, of `wide_logits`.
        labels: columns of the right classes.
        norm: of ``z``.
        where: the tokens that count.
        scale: of the logits.
        factor: static.
        cotangent: a scalar or one number per token; None for 1.
        mantissa_bits: of the 8-bit format that gradients are rounded to; None if they are not.
    """
    hits = labels[..., None] == _classes(z, labels.dtype)
    grad = jnp.exp(z - norm.largest[..., None] - norm.log_total[..., None])
    grad = grad - hits.astype(z.dtype)
    grad = grad if factor == 1 else grad * factor
    if cotangent is not None:
        grad = grad * (cotangent[..., None] if cotangent.ndim else cotangent)
    if scale is not None:
        grad = grad * scale
    if mantissa_bits is not None:
        grad = dithered(grad, mantissa_bits)
    return grad if where is None else jnp.where(where[..., None], grad, 0.0)


def reduce_losses(losses: jax.Array, where: jax.Array | None, reduction: Reduction) -> jax.Array:
    """The losses of tokens as `softmax_cross_entropy` returns them."""
    if reduction == "none":
        return losses if where is None else jnp.where(where, losses, 0.0)
    if reduction == "sum":
        return jnp.sum(losses, where=where)
    if where is None:
        return jnp.mean(losses) if losses.size else jnp.sum(losses)
    return jnp.sum(losses, where=where) / jnp.maximum(jnp.sum(where), 1)


def summed(reduction: Reduction) -> Reduction:
    """How losses are reduced first: a mean under `batch_size` is a sum over its own number."""
    return "sum" if reduction == "mean" and batch_size_override() is not None else reduction


def over_count(loss: jax.Array, reduction: Reduction, count: int | jax.Array) -> jax.Array:
    """Divides the sum of `summed` by its number of terms; its backward then has N/count for 1."""
    if summed(reduction) == reduction:
        return loss
    return scale_bwd(loss, float(batch_size_override() or 1)) / jnp.maximum(count, 1)


@partial(custom_vjp, nondiff_argnums=(4, 5, 6))
def _cross_entropy(logits, labels, where, scale, mult, factor, reduction):
    z = wide_logits(logits, mult, scale)
    losses = token_losses(label_logits(logits, labels, mult, scale), normalizer(z))
    return reduce_losses(losses, where, reduction)


def _cross_entropy_fwd(logits, labels, where, scale, mult, factor, reduction):
    loss = _cross_entropy(logits, labels, where, scale, mult, factor, reduction)
    return loss, (logits, labels, where, scale)


def _cross_entropy_bwd(mult, factor, reduction, residuals, cotangent):
    logits, labels, where, scale = residuals
    z = wide_logits(logits, mult, scale)
    # The 1/N of a mean is kept out: every token's gradient has unit scale, whatever the batch.
    grad = token_gradients(z, labels, normalizer(z), where, scale, mult * factor, cotangent)
    zero = None if scale is None else jnp.zeros_like(scale)
    return narrow(grad, logits.dtype), None, None, zero


_cross_entropy.defvjp(_cross_entropy_fwd, _cross_entropy_bwd)


def check_labels(
    op: str, labels: Any, where: Any, reduction: str
) -> tuple[jax.Array, jax.Array | None]:
    """Returns labels and the tokens that count as arrays, or raises; shapes are not looked at."""
    if reduction not in get_args(Reduction):
        raise ValueError(
            f"unitscale.ops.{op}: reduction must be 'mean', 'sum' or 'none'; got {reduction!r}"
        )
    labels = jnp.asarray(labels)
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"unitscale.ops.{op}: labels must be integers; got dtype {labels.dtype}")
    where = None if where is None else jnp.asarray(where)
    if where is not None and where.dtype != bool:
        raise TypeError(
            f"unitscale.ops.{op}: where must be boolean; got dtype {where.dtype}. "
            "Compare first, for example weights > 0."
        )
    return labels, where


def classes_of(labels: jax.Array, vocab: int, columns: int | None = None) -> jax.Array:
    """Labels as indices of columns, negative ones from the end; what is no class is no column.

    Args:
        labels: integers.
        vocab: number of classes.
        columns: number of columns, of which the first are the classes; None for no others.
    """
    # Small types cannot hold every class, and the gradient compares labels with classes.
    labels = labels.astype(jnp.promote_types(labels.dtype, jnp.int32))
    labels = jnp.where(labels < 0, labels + vocab, labels)
    beyond = vocab if columns is None else columns
    return jnp.where((labels < 0) | (labels >= vocab), beyond, labels)


def softmax_cross_entropy(
    logits: ArrayLike,
    labels: jax.Array,
    *,
    mult: float = 1.0,
    where: jax.Array | None = None,
    reduction: Reduction = "mean",
) -> jax.Array:
    """Returns the cross entropy of integer labels under softmax(mult * logits).

    Scaling:
        The value is the ordinary loss, in float32. dlogits = factor * (softmax - onehot) * mult
        for every token that counts, with factor = V / ((V - 1)^1/2 * mult); the 1/N of the mean is
        kept out of the backward, so that gradients do not shrink with the batch, on many devices
        that of the whole batch (`unitscale.batch_over`); a loss over several batches is one of
        `unitscale.batch_size`. See `rules.softmax_cross_entropy`.

    Args:
        logits: (..., V), floating array or ScaledArray, whose scale is folded in.
        labels: (...), integers in [0, V), of any integer type; a negative one counts from the
            end, as an index does. The loss of what is no class is NaN.
        mult: static multiplier of the logits (inverse temperature).
        where: (...), boolean: the tokens that count; None for all. If none counts, the mean is 0.
        reduction: "mean" over the tokens that count, "sum", or "none" (one loss per token).

    Returns:
        float32 scalar (float64 of float64 operands), or (...) for reduction "none".

    Raises:
        TypeError: if logits are not floating or labels not integers or where not boolean.
        ValueError: if the shapes do not fit or the reduction is unknown.

    Example:
        >>> print(softmax_cross_entropy(jnp.zeros((2, 4)), jnp.array([0, 3])).round(4))
        1.3863

    References:
        Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv 2303.11257, scaled ops
        (softmax_cross_entropy).
    """
    op = "softmax_cross_entropy"
    data, scale = unpack(op, "logits", logits)
    labels, where = check_labels(op, labels, where, reduction)
    if (
        data.ndim < 1
        or data.shape[:-1] != labels.shape
        or (where is not None and where.shape != labels.shape)
    ):
        raise shape_error(
            op,
            "logits must be (..., V) and labels, where (...)",
            "Labels are class indices, not one-hot rows.",
            logits=data.shape,
            labels=labels.shape,
            **({} if where is None else {"where": where.shape}),
        )
    labels = classes_of(labels, data.shape[-1])
    (factor,) = rules.softmax_cross_entropy(data.shape[-1], mult=mult).bwd
    # Of a part of the batch: the mean over parts divides by their number, which is kept out too.
    first = summed(reduction)
    factor *= num_batch_shards(data, labels) if first == "mean" else 1
    loss = _cross_entropy(data, labels, where, scale_argument(scale), float(mult), factor, first)
    return over_count(loss, reduction, labels.size if where is None else jnp.sum(where))


@dataclasses.dataclass(frozen=True)
class _Subtract:
    def __call__(self, x, y, x_scale, y_scale):
        x = x if x_scale is None else x * x_scale
        return x - (y if y_scale is None else y * y_scale)


@partial(custom_vjp, nondiff_argnums=(2, 3))
def _mean_square(operands, scales, factors, count):
    return jnp.sum(jnp.square(_Subtract()(*map(widen, operands), *scales))) / count


def _mean_square_fwd(operands, scales, factors, count):
    return _mean_square(operands, scales, factors, count), (operands, scales)


def _mean_square_bwd(factors, count, residuals, cotangent):
    operands, scales = residuals
    difference, vjp = jax.vjp(lambda x, y: _Subtract()(x, y, *scales), *map(widen, operands))
    grads = vjp(2 * difference * cotangent)
    rounded = tuple(
        narrow(g * factor, x.dtype) for x, g, factor in zip(operands, grads, factors, strict=True)
    )
    return rounded, jax.tree.map(jnp.zeros_like, scales)


_mean_square.defvjp(_mean_square_fwd, _mean_square_bwd)


def mse_loss(pred: ArrayLike, target: ArrayLike) -> jax.Array:
    """Returns the mean squared error.

    Scaling:
        The value is the ordinary loss, in float32. dpred = 8^-1/2 * 2 * (pred - target), and the
        negative for target; the 1/N of the mean is kept out of the backward, on many devices that
        of the whole batch (`unitscale.batch_over`). See `rules.mse_loss`.

    Args:
        pred: floating array or ScaledArray.
        target: the same shape.

    Returns:
        float32 scalar (float64 of float64 operands).

    Raises:
        TypeError: if an operand is not floating.
        ValueError: if the shapes differ.

    Example:
        >>> print(mse_loss(jnp.array([1.0, 2.0]), jnp.array([1.0, 0.0])))
        2.0

    References:
        Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv 2303.11257, scaled ops.
    """
    (p, p_scale), (t, t_scale) = (
        unpack("mse_loss", "pred", pred),
        unpack("mse_loss", "target", target),
    )
    if p.shape != t.shape:
        raise shape_error(
            "mse_loss",
            "pred and target must have the same shape",
            "Broadcast the target yourself if that is meant.",
            pred=p.shape,
            target=t.shape,
        )
    scales = (scale_argument(p_scale), scale_argument(t_scale))
    count = max(math.prod(p.shape), 1)
    items = batch_size_override()
    kept = num_batch_shards(p, t) if items is None else items / count
    factors = tuple(factor * kept for factor in rules.mse_loss().bwd)
    return _mean_square((p, t), scales, factors, count)
