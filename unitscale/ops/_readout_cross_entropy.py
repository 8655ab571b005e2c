"""The readout and its cross entropy in one, over chunks of tokens: logits are never whole."""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import rules
from ..core import (
    TENSOR_AXES,
    axes_size,
    bounded_product,
    custom_vjp,
    format_of,
    global_batch_size,
    narrow,
    num_batch_shards,
    widen,
)
from ..quant import Contraction, MatmulConfig, Multiplier, QuantState, watched
from ..rules import Constraint
from ._loss import (
    Reduction,
    check_labels,
    classes_of,
    label_logits,
    normalizer,
    over_count,
    reduce_losses,
    summed,
    token_gradients,
    token_losses,
    wide_logits,
    without_padding,
)
from ._operands import ArrayLike, output_dtype, scale_argument, shape_error, unpack_uniform
from ._token_chunks import joined, over_chunks, parted, token_axes

OP = "readout_cross_entropy"
# Logits that a chunk may have: 2,048 tokens of 50,257 classes, 512 MiB in float32. Every chunk adds
# to the whole gradient of the kernel, so that smaller ones cost time: on an H200 with half as many
# tokens that product waits for memory.
MOST_LOGITS = 2**27


@dataclasses.dataclass(frozen=True)
class _Statics:
    """What a program is traced for."""

    x_dtype: Any
    spec: Contraction
    factors: tuple[float, float, float]
    config: MatmulConfig | None
    out_dtype: Any
    mult: float
    factor: float  # of each token's gradient by its logits
    reduction: Reduction
    vocab: int
    chunks: int
    logits_dtype: Any  # of the operands of logits; None: the formats of config
    axes: tuple[str, ...]  # of a mesh, that divide the tokens


class _Rows(NamedTuple):
    """What there is one of for each token."""

    x: jax.Array
    labels: Any  # no cotangent of theirs is an array
    where: jax.Array | None
    scale: jax.Array | None
    weight: jax.Array | None = None  # cotangent of a token's loss


class _Shared(NamedTuple):
    """What all tokens share."""

    kernel: jax.Array
    state: QuantState | None
    x_scale: jax.Array | None  # where it is one for all tokens
    scale: jax.Array | None  # of the kernel


def _chunk(
    times: Multiplier, shared: _Shared, rows: _Rows, how: _Statics
) -> tuple[jax.Array, Callable[[jax.Array | None], tuple[Any, ...]]]:
    """The losses of a chunk, and what makes gradients of the cotangents of these losses."""
    y, part = times(rows.x)
    x_scale = shared.x_scale if rows.scale is None else rows.scale
    scale, rest = bounded_product(x_scale, shared.scale)
    if not isinstance(rest, int):
        y = narrow(widen(y) * rest, y.dtype)
    z = without_padding(wide_logits(y, how.mult, scale), how.vocab)
    norm = normalizer(z)
    losses = token_losses(label_logits(y, rows.labels, how.mult, scale), norm)

    def gradients(weight: jax.Array | None) -> tuple[Any, ...]:
        factor, bits = how.mult * how.factor, _mantissa_bits(how.config)
        dz = token_gradients(z, rows.labels, norm, rows.where, scale, factor, weight, bits)
        dy = narrow(dz, y.dtype)
        if not isinstance(rest, int):
            dy = narrow(widen(dy) * rest, y.dtype)
        return times.gradients(part, dy)

    return losses, gradients


def _mantissa_bits(config: MatmulConfig | None) -> int | None:
    """Those of the format that gradients of logits are rounded to; None if it is none of 8 bits."""
    bits = None if config is None else format_of(config.cotangent).mantissa_bits
    return bits if bits is not None and bits < format_of("bfloat16").mantissa_bits else None


def _multiplier(shared: _Shared, how: _Statics) -> Multiplier:
    # Each device has all that its tokens are multiplied by, where tokens are divided.
    columns = TENSOR_AXES if axes_size(TENSOR_AXES) > 1 else ()
    places = {"y": (), "z": columns} if axes_size(how.axes) > 1 else None
    return Multiplier(
        shared.kernel,
        how.spec,
        how.factors,
        how.config,
        how.out_dtype,
        how.chunks,
        shared.state,
        places,
        how.logits_dtype,
    )


def _losses(rows: _Rows, shared: _Shared, how: _Statics) -> jax.Array:
    times = _multiplier(shared, how)

    def body(rows: _Rows) -> tuple[None, jax.Array]:
        losses, _ = _chunk(times, shared, rows, how)
        return None, losses

    return over_chunks(body, rows, how.chunks, how.axes)[1]


def _losses_and_gradients(
    rows: _Rows, shared: _Shared, how: _Statics
) -> tuple[jax.Array, jax.Array, jax.Array, QuantState | None]:
    """Of all tokens: losses and gradients by x; of all together: those by kernel and state."""
    times = _multiplier(shared, how)

    def body(rows: _Rows) -> tuple[Any, Any]:
        losses, gradients = _chunk(times, shared, rows, how)
        dx, *parts = gradients(rows.weight)
        return parts, (losses, dx)

    (dkernel, dstate), (losses, dx) = over_chunks(body, rows, how.chunks, how.axes)
    if dstate is not None:
        dstate = jax.tree.map(jnp.add, dstate, times.shared_gradient)
    return losses, dx, dkernel, dstate


@partial(custom_vjp, nondiff_argnums=(2,))
def _cross_entropy(rows: _Rows, shared: _Shared, how: _Statics) -> jax.Array:
    return reduce_losses(_losses(rows, shared, how), rows.where, how.reduction)


def _fwd(rows: _Rows, shared: _Shared, how: _Statics):
    """Gradients of a sum or mean are made in the forward pass, from the logits that are there.

    The cotangent of the loss is one number, which multiplies them in the end. So there are three
    products, as where logits are whole; to make a chunk's logits again in the backward pass would
    be a fourth. What is kept for it are the gradients themselves: no more than they take anyway.
    One cotangent for each token comes too late for that, and does take four products.
    """
    if how.reduction == "none":
        return _cross_entropy(rows, shared, how), (rows, shared)
    losses, *gradients = _losses_and_gradients(rows, shared, how)
    loss = reduce_losses(losses, rows.where, how.reduction)
    like = jnp.zeros((0,), shared.kernel.dtype)
    return loss, (gradients, rows.scale, shared._replace(kernel=like))


def _bwd(how: _Statics, residuals: Any, cotangent: jax.Array):
    if how.reduction == "none":
        rows, shared = residuals
        row_scale = rows.scale
        rows = rows._replace(weight=cotangent)
        _, dx, dkernel, dstate = _losses_and_gradients(rows, shared, how)
    else:
        (dx, dkernel, dstate), row_scale, shared = residuals
        dx, dkernel = (widen(gradient) * cotangent for gradient in (dx, dkernel))
    row_scale, *scales = jax.tree.map(jnp.zeros_like, (row_scale, shared.x_scale, shared.scale))
    dkernel = narrow(dkernel, shared.kernel.dtype)
    return _Rows(narrow(dx, how.x_dtype), None, None, row_scale), _Shared(dkernel, dstate, *scales)


_cross_entropy.defvjp(_fwd, _bwd)


def _devices(x: jax.Array) -> int:
    """Among how many devices the tokens of x are known to be divided."""
    sharding = jax.typeof(x).sharding
    names = jax.tree.leaves(tuple(sharding.spec[:1])) if x.ndim > 1 else []
    return math.prod(sharding.mesh.shape[name] for name in names) * axes_size(
        token_axes(x.shape[:-1])
    )


def _chunks(tokens: int, columns: int, chunk_size: int | None, devices: int) -> int:
    """Number of chunks; by default a power of two, which divides most numbers of tokens.

    Each chunk is divided among the devices, and so the sum of its products for the kernel.
    """
    if chunk_size is not None:
        return max(-(-tokens // chunk_size), 1)
    least = -(-tokens * columns // (MOST_LOGITS * devices))
    return min(1 << max(least - 1, 0).bit_length(), max(tokens, 1))


def readout_cross_entropy(
    x: ArrayLike,
    kernel: ArrayLike,
    labels: jax.Array,
    *,
    mult: float = 1.0,
    where: jax.Array | None = None,
    reduction: Reduction = "mean",
    constraint: Constraint = None,
    transposed: bool = False,
    vocab: int | None = None,
    chunk_size: int | None = None,
    config: MatmulConfig | None = None,
    state: QuantState | None = None,
    logits_dtype: Any = None,
) -> jax.Array:
    """Returns the cross entropy of labels under the logits of a readout, which are never whole.

    Scaling:
        ``softmax_cross_entropy(readout(x, kernel), labels)``: its value, its factors and its
        gradients, up to the order of sums. Logits exist for one chunk of tokens at a time, forward
        and backward, so that memory does not grow with tokens times V. A chunk is a product of its
        own: scales from amax, and what `quant.Delayed` sees, are those of a chunk. The kernel is
        quantized once. Where gradients of logits are rounded to 8 bits, they are dithered: rounded
        to the nearest, those of a token would no longer add up to 0, but err in the same direction
        for most tokens, and move all logits together.

    Args:
        x: (..., in), floating array or ScaledArray.
        kernel: (in, V), floating array or ScaledArray.
        labels: (...), integers in [0, V), of any integer type; a negative one counts from the
            end, as an index does. The loss of what is no class is NaN.
        mult: static multiplier of the logits (inverse temperature).
        where: (...), boolean: the tokens that count; None for all. If none counts, the mean is 0.
        reduction: "mean" over the tokens that count, "sum", or "none" (one loss per token, whose
            backward makes the logits again).
        constraint: of `readout`.
        transposed: whether the kernel is (V, in), as a table of embeddings is.
        vocab: number of classes where the kernel has more columns than that: the others are
            padding, without probability or gradient. None for all columns.
        chunk_size: tokens of a chunk; None for as many as have 2^27 logits on each device,
            as far as a mesh of `jax.set_mesh` tells that tokens are divided.
        config: formats of a quantized product; None multiplies the operands as they are.
        state: the scales of a strategy that keeps them, as of `quant.Delayed`.
        logits_dtype: dtype of x and the kernel where logits are computed, such as "bfloat16";
            None for the formats of ``config``. What logits lose to 8 bits the loss shows, however
            long it trains; the two products of the gradients are means over many.

    Returns:
        float32 scalar (float64 of float64 operands), or (...) for reduction "none".

    Raises:
        TypeError: if an operand is not floating, labels are not integers, or where is not boolean.
        ValueError: if the shapes do not fit, an option is unknown, vocab or chunk_size is not one
            that there can be, or a strategy lacks its state.

    Example:
        >>> x, kernel = jnp.ones((2, 16)), jnp.zeros((16, 4))
        >>> print(readout_cross_entropy(x, kernel, jnp.array([0, 3])).round(4))
        1.3863

    References:
        Blake et al., "u-muP", 2024, arXiv 2407.17465, table 2 (output weights); Wijmans et al.,
        "Cut Your Losses in Large-Vocabulary Language Models", 2024, arXiv 2411.09009.
    """
    contracted = 1 if transposed else 0
    (data, scale), (w, w_scale) = (
        unpack_uniform(OP, "x", x, (-1,)),
        unpack_uniform(OP, "kernel", kernel, (contracted,)),
    )
    labels, where = check_labels(OP, labels, where, reduction)
    if w.ndim != 2 or data.ndim < 1 or data.shape[-1] != w.shape[contracted]:
        raise shape_error(
            OP,
            f"kernel must be {'(V, in)' if transposed else '(in, V)'} with in == x.shape[-1]",
            f"Set transposed={not transposed}?"
            if data.shape[-1:] == w.shape[1 - contracted :][:1]
            else "Check the feature sizes.",
            x=data.shape,
            kernel=w.shape,
        )
    if data.shape[:-1] != labels.shape or (where is not None and where.shape != labels.shape):
        raise shape_error(
            OP,
            "x must be (..., in) and labels, where (...)",
            "Labels are class indices, not one-hot rows.",
            x=data.shape,
            labels=labels.shape,
            **({} if where is None else {"where": where.shape}),
        )
    features, columns = w.shape[contracted], w.shape[1 - contracted]
    vocab = columns if vocab is None else vocab
    if not 2 <= vocab <= columns:
        raise ValueError(
            f"unitscale.ops.{OP}: vocab must be at least 2 and at most the columns of the kernel; "
            f"got {vocab}, and kernel {w.shape}"
        )
    if chunk_size is not None and not (isinstance(chunk_size, int) and chunk_size >= 1):
        raise ValueError(
            f"unitscale.ops.{OP}: chunk_size must be a number of tokens from 1 on; got {chunk_size}"
        )
    lead = labels.shape
    tokens = math.prod(lead)
    loss = rules.softmax_cross_entropy(vocab, mult=mult)
    readout = rules.readout(features, vocab, global_batch_size(tokens, data), constraint=constraint)
    data, w = watched((data, w), state)
    scale = scale_argument(scale)
    per_token = None
    if scale is not None and scale.ndim:
        per_token = joined(jnp.broadcast_to(scale, (*lead, 1)), lead)
    rows = _Rows(
        joined(data, lead),
        joined(classes_of(labels, vocab, columns), lead),
        None if where is None else joined(where, lead),
        per_token,
    )
    w_scale = scale_argument(w_scale)
    if w_scale is not None and w_scale.ndim:
        w_scale = w_scale.reshape(1, columns)  # per class
    shared = _Shared(w, state, None if per_token is not None else scale, w_scale)
    how = _Statics(
        data.dtype,
        Contraction("ty", "zy" if transposed else "yz", "tz"),
        (readout.fwd, readout.bwd[0], readout.bwd[1]),
        config,
        jnp.dtype(output_dtype(x, kernel) if config is None else output_dtype(x)),
        float(mult),
        # Of a part of the batch: the mean over parts divides by their number, which is kept out.
        loss.bwd[0] * (num_batch_shards(data, labels) if summed(reduction) == "mean" else 1),
        summed(reduction),
        vocab,
        _chunks(tokens, columns, chunk_size, _devices(data)),
        None if logits_dtype is None else jnp.dtype(logits_dtype),
        token_axes(lead),
    )
    out = _cross_entropy(rows, shared, how)
    if reduction == "none":
        return parted(out, lead)
    return over_count(out, reduction, tokens if where is None else jnp.sum(where))
