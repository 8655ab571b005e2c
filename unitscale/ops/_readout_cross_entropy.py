"""Readout and cross entropy in one op, computed in chunks of tokens without storing the logits."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .. import rules
from ..core import (
    BATCH_AXES,
    CONTEXT_AXES,
    TENSOR_AXES,
    axes_size,
    bounded_product,
    constrain_sharding,
    custom_vjp,
    exchange_in,
    format_of,
    fsdp_devices,
    global_batch_size,
    narrow,
    num_batch_shards,
    sum_parts,
    widen,
)
from ..quant import Contraction, MatmulConfig, Multiplier, QuantState, warn_if_not_updated
from ..rules import Constraint
from ._loss import (
    Reduction,
    check_labels,
    check_token_shapes,
    divide_by_count,
    first_reduction,
    label_columns,
    normalizer,
    reduce_losses,
    token_gradients,
    token_losses,
    wide_logits,
    without_padding,
)
from ._operands import ArrayLike, output_dtype, scale_argument, shape_error, unpack

_OP = "readout_cross_entropy"
# Logits per chunk: 128 MiB in bfloat16. XLA may keep two chunks in memory at once.
MOST_LOGITS = 2**26
# Least tokens per chunk, with 16-bit and 8-bit gradients of logits. Each chunk reads and writes the
# kernel's gradient in float32, which on an H200 takes longer than the matmul for chunks of less
# than about 850 and 1,600 tokens.
LEAST_TOKENS = 1024, 2048


class _Statics(NamedTuple):
    """Static arguments of `_cross_entropy`."""

    x_dtype: Any
    spec: Contraction
    factors: tuple[float, float, float]
    config: MatmulConfig | None
    out_dtype: Any
    mult: float
    factor: float  # backward factor of the logits
    reduction: Reduction
    vocab: int
    chunks: int
    logits_dtype: Any  # dtype of the operands in the forward matmul; None for config's formats
    axes: tuple[str, ...]  # mesh axes that shard the tokens
    by_class: bool  # whether the devices of these axes have all tokens, and some of the classes


class _Rows(NamedTuple):
    """Arrays with one entry per token."""

    x: jax.Array
    labels: Any  # integers; in a tree of cotangents, None
    where: jax.Array | None
    weight: jax.Array | None = None  # cotangent of each token's loss


class _Shared(NamedTuple):
    """Arrays shared by all tokens."""

    kernel: jax.Array
    state: QuantState | None
    x_scale: jax.Array | None
    scale: jax.Array | None  # of the kernel


def _chunk(
    matmul: Multiplier, shared: _Shared, rows: _Rows, how: _Statics
) -> tuple[jax.Array, Callable[[jax.Array | None], tuple[Any, ...]]]:
    """Return the losses of a chunk, and a function that turns their cotangents into gradients."""
    y, part = matmul(rows.x)
    scale, rest = bounded_product(shared.x_scale, shared.scale)

    def multiply_rest(x: jax.Array) -> jax.Array:
        return x if isinstance(rest, int) else narrow(widen(x) * rest, x.dtype)

    y = multiply_rest(y)
    z = without_padding(wide_logits(y, how.mult, scale), how.vocab, how.by_class)
    norm = normalizer(z, how.by_class)
    losses = token_losses(y, rows.labels, norm, how.mult, scale)

    def gradients(weight: jax.Array | None) -> tuple[Any, ...]:
        own = how.config is not None and how.config.dither  # then the matmul dithers
        factor, bits = how.mult * how.factor, None if own else _mantissa_bits(how.config)
        dz = token_gradients(z, rows.labels, norm, rows.where, scale, factor, weight, bits)
        return matmul.gradients(part, multiply_rest(narrow(dz, y.dtype)))

    return losses, gradients


def _mantissa_bits(config: MatmulConfig | None) -> int | None:
    """Return the mantissa bits of the cotangents' format if it has 8 bits, else None."""
    bits = None if config is None else format_of(config.cotangent).mantissa_bits
    return bits if bits is not None and bits < format_of("bfloat16").mantissa_bits else None


def _evaluate(
    rows: _Rows, shared: _Shared, how: _Statics, with_gradients: bool
) -> tuple[jax.Array, Any, Any, Any]:
    """Return the losses of all tokens, and the gradients of x, kernel and state."""
    # If tokens are sharded, the kernel is replicated over the devices that shard them.
    columns = how.axes if how.by_class else TENSOR_AXES if axes_size(TENSOR_AXES) > 1 else ()
    matmul = Multiplier(
        shared.kernel,
        how.spec,
        how.factors,
        how.config,
        how.out_dtype,
        how.chunks,
        shared.state,
        {"y": (), "z": columns} if axes_size(how.axes) > 1 else None,
        how.logits_dtype,
    )

    def reshard(tree: Any, axes: tuple[str, ...]) -> Any:
        return jax.tree.map(lambda x: constrain_sharding(x, axes), tree) if how.by_class else tree

    def body(rows: _Rows) -> tuple[Any, Any]:
        rows = reshard(rows, ())
        losses, gradients = _chunk(matmul, shared, rows, how)
        if not with_gradients:
            return (None, None), (losses, None)
        dx, *parts = gradients(rows.weight)
        return tuple(parts), reshard((losses, dx), how.axes)

    if how.by_class:
        with exchange_in(None):  # each device has the gradients of its classes
            found = over_chunks(body, rows, how.chunks, ())
    else:
        found = over_chunks(body, rows, how.chunks, how.axes)
    (dkernel, dstate), (losses, dx) = found
    if dstate is not None:
        dstate = jax.tree.map(jnp.add, dstate, matmul.shared_gradient)
    return losses, dx, dkernel, dstate


@partial(custom_vjp, nondiff_argnums=(2,))
def _cross_entropy(rows: _Rows, shared: _Shared, how: _Statics) -> jax.Array:
    losses, *_ = _evaluate(rows, shared, how, with_gradients=False)
    return reduce_losses(losses, rows.where, how.reduction)


def _fwd(rows: _Rows, shared: _Shared, how: _Statics):
    """Compute the gradients of a sum or mean in the forward pass, while a chunk's logits exist."""
    # With reduction "none" the cotangents are not known yet: the backward pass recomputes logits.
    if how.reduction == "none":
        return _cross_entropy(rows, shared, how), (rows, shared)
    losses, *gradients = _evaluate(rows, shared, how, with_gradients=True)
    loss = reduce_losses(losses, rows.where, how.reduction)
    like = jnp.zeros((0,), shared.kernel.dtype)
    return loss, (gradients, shared._replace(kernel=like))


def _bwd(how: _Statics, residuals: Any, cotangent: jax.Array):
    if how.reduction == "none":
        rows, shared = residuals
        rows = rows._replace(weight=cotangent)
        _, dx, dkernel, dstate = _evaluate(rows, shared, how, with_gradients=True)
    else:
        (dx, dkernel, dstate), shared = residuals
        dx, dkernel = (widen(gradient) * cotangent for gradient in (dx, dkernel))
    dkernel = narrow(dkernel, shared.kernel.dtype)
    return _Rows(narrow(dx, how.x_dtype), None, None), _Shared(dkernel, dstate, None, None)


_cross_entropy.defvjp(_fwd, _bwd)


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
    """Return the cross entropy of a readout, computed in chunks without storing all logits.

    Scaling: as in `softmax_cross_entropy` of `readout`, up to the order of sums. Amax statistics
    are per chunk. 8-bit gradients of logits are dithered, which keeps their sum per token near 0.

    Args:
        x: (..., in), floating.
        kernel: (in, V), floating.
        labels: (...), integers in [0, V), as for `softmax_cross_entropy`.
        mult: static multiplier of the logits (inverse temperature).
        where: (...), boolean, as for `softmax_cross_entropy`.
        reduction: as for `softmax_cross_entropy`; with "none" the backward pass recomputes the
            logits.
        constraint: as for `readout`.
        transposed: whether the kernel is (V, in), like an embedding table.
        vocab: number of classes, if the last columns of the kernel are padding; None for all.
        chunk_size: tokens per chunk; by default at most about 2^26 logits per chunk and device, but
            at least 1,024 tokens, or 2,048 if ``config`` has 8-bit cotangents.
        config: see `unitscale.ops`.
        state: see `unitscale.ops`.
        logits_dtype: dtype of x and kernel in the forward matmul, such as "bfloat16"; None for the
            formats of ``config``. The loss is lower than with 8-bit operands.

    Example:
        >>> x, kernel = jnp.ones((2, 16)), jnp.zeros((16, 4))
        >>> print(readout_cross_entropy(x, kernel, jnp.array([0, 3])).round(4))
        1.3863

    References:
        Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", 2024, arXiv
        2411.09009.
    """
    contracted = 1 if transposed else 0
    data, scale = unpack(_OP, "x", x, ...)
    w, w_scale = unpack(_OP, "kernel", kernel, (contracted,))
    labels, where = check_labels(_OP, labels, where, reduction)
    if w.ndim != 2 or data.ndim < 1 or data.shape[-1] != w.shape[contracted]:
        raise shape_error(
            _OP,
            f"kernel must be {'(V, in)' if transposed else '(in, V)'} with in == x.shape[-1]",
            f"Set transposed={not transposed}?"
            if data.shape[-1:] == w.shape[1 - contracted :][:1]
            else "",
            x=data.shape,
            kernel=w.shape,
        )
    check_token_shapes(_OP, labels, where, x=data.shape)
    features, columns = w.shape[contracted], w.shape[1 - contracted]
    vocab = columns if vocab is None else vocab
    if not 2 <= vocab <= columns:
        raise ValueError(
            f"unitscale.ops.{_OP}: vocab must be at least 2 and at most the kernel's {columns} "
            f"columns; got {vocab}"
        )
    if chunk_size is not None and not (isinstance(chunk_size, int) and chunk_size >= 1):
        raise ValueError(
            f"unitscale.ops.{_OP}: chunk_size must be a positive integer; got {chunk_size}"
        )
    lead = labels.shape
    tokens = math.prod(lead)
    loss = rules.softmax_cross_entropy(vocab, mult=mult)
    readout = rules.readout(features, vocab, global_batch_size(tokens, data), constraint=constraint)
    data, w = warn_if_not_updated((data, w), state)
    scale, w_scale = scale_argument(scale), scale_argument(w_scale)
    rows = _Rows(
        join_tokens(data, lead),
        join_tokens(label_columns(labels, vocab, columns), lead),
        None if where is None else join_tokens(where, lead),
    )
    if w_scale is not None and w_scale.ndim:
        w_scale = w_scale.reshape(1, columns)  # per class
    first = first_reduction(reduction)
    how = _Statics(
        data.dtype,
        Contraction("ty", "zy" if transposed else "yz", "tz"),
        (readout.fwd, readout.bwd[0], readout.bwd[1]),
        config,
        output_dtype(x, kernel) if config is None else output_dtype(x),
        float(mult),
        loss.bwd[0] * (num_batch_shards(data, labels) if first == "mean" else 1),
        first,
        vocab,
        _num_chunks(tokens, columns, chunk_size, data, config),
        None if logits_dtype is None else jnp.dtype(logits_dtype),
        token_axes(lead),
        # Shard classes if inputs and their gradients are fewer bytes than those of the kernel.
        fsdp_devices() > 1 and columns % axes_size(token_axes(lead)) == 0 and 2 * tokens <= columns,
    )
    out = _cross_entropy(rows, _Shared(w, state, scale, w_scale), how)
    if reduction == "none":
        return split_tokens(out, lead)
    return divide_by_count(out, reduction, tokens if where is None else jnp.sum(where))


def _num_chunks(
    tokens: int, columns: int, chunk_size: int | None, x: jax.Array, config: MatmulConfig | None
) -> int:
    """Return the number of chunks; by default a power of two, because it divides most batches."""
    if chunk_size is not None:
        return max(-(-tokens // chunk_size), 1)
    sharding = jax.typeof(x).sharding
    names = jax.tree.leaves(tuple(sharding.spec[:1])) if x.ndim > 1 else []
    explicit = math.prod(sharding.mesh.shape[name] for name in names)
    devices = explicit * axes_size(token_axes(x.shape[:-1]))
    most = max(MOST_LOGITS // columns, LEAST_TOKENS[_mantissa_bits(config) is not None])
    least = -(-tokens // (most * devices))
    return min(1 << max(least - 1, 0).bit_length(), max(tokens, 1))


def token_axes(lead: tuple[int, ...]) -> tuple[str, ...]:
    """Return the mesh axes that shard the result of `join_tokens`."""
    return BATCH_AXES if _sequence_shards(lead) == 1 else (*CONTEXT_AXES, *BATCH_AXES)


def _sequence_shards(lead: tuple[int, ...]) -> int:
    shards = axes_size(CONTEXT_AXES)
    return shards if len(lead) == 2 and lead[1] % shards == 0 else 1


def join_tokens(x: jax.Array, lead: tuple[int, ...]) -> jax.Array:
    """Reshape (*lead, ...) to (tokens, ...), with the tokens of each device next to each other."""
    # XLA cannot keep the sharding of the second of two merged dimensions: move its shards first.
    shards, rest = _sequence_shards(lead), x.shape[len(lead) :]
    if shards > 1:
        x = jnp.swapaxes(x.reshape(lead[0], shards, lead[1] // shards, *rest), 0, 1)
    return constrain_sharding(x.reshape(math.prod(lead), *rest), token_axes(lead))


def split_tokens(x: jax.Array, lead: tuple[int, ...]) -> jax.Array:
    """Invert `join_tokens`."""
    shards, rest = _sequence_shards(lead), x.shape[1:]
    if shards > 1:
        x = jnp.swapaxes(x.reshape(shards, lead[0], lead[1] // shards, *rest), 0, 1)
    return x.reshape(*lead, *rest)


_Body = Callable[[Any], tuple[Any, Any]]


def over_chunks(body: _Body, rows: Any, chunks: int, axes: tuple[str, ...]) -> Any:
    """Apply ``body`` to chunks of rows; sum its first results and concatenate its second ones.

    The first results are the gradient of a weight and statistics; either may be None.

    Each device along the mesh axes ``axes`` keeps its own sum, and devices communicate only once.
    """
    tokens, devices = jax.tree.leaves(rows)[0].shape[0], axes_size(axes)
    if chunks == 1:
        return body(rows)
    if devices == 1 or tokens % devices:
        return _scan_chunks(body, rows, chunks, axis=0)

    def by_device(tree: Any) -> Any:
        return jax.tree.map(lambda x: constrain_sharding(x, axes), tree)

    def each(rows: Any) -> Any:
        with exchange_in(None):  # devices exchange the sum over all chunks
            total, out = jax.vmap(body)(by_device(rows))
        return by_device(total), out

    own = jax.tree.map(lambda x: x.reshape(devices, -1, *x.shape[1:]), rows)
    total, out = _scan_chunks(each, by_device(own), chunks, axis=1)
    gradient, statistics = total
    total = jax.tree.map(sum_parts, gradient), jax.tree.map(lambda x: jnp.sum(x, 0), statistics)
    return total, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), out)


def _scan_chunks(body: _Body, rows: Any, chunks: int, axis: int) -> Any:
    """Scan over chunks of interleaved tokens, so that each chunk has tokens from every device."""
    tokens = jax.tree.leaves(rows)[0].shape[axis]

    def split(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, -tokens % chunks if a == axis else 0) for a in range(x.ndim)])
        x = x.reshape(*x.shape[:axis], -1, chunks, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis + 1, 0)

    def join(x: jax.Array) -> jax.Array:
        x = jnp.moveaxis(x, 0, axis + 1)
        x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
        return lax.slice_in_dim(x, 0, tokens, axis=axis)

    def add(total: Any, rows: Any) -> tuple[Any, Any]:
        parts, out = body(rows)
        return jax.tree.map(jnp.add, total, parts), out

    split_rows = jax.tree.map(split, rows)
    # Start the sum with the first chunk, because zeros of the kernel's size cost memory traffic.
    total, first = body(jax.tree.map(lambda x: x[0], split_rows))
    total, others = lax.scan(add, total, jax.tree.map(lambda x: x[1:], split_rows))
    out = jax.tree.map(lambda x, xs: jnp.concatenate([x[None], xs]), first, others)
    return total, jax.tree.map(join, out)
