"""Losses that share an encoder, their gradients in true proportion.

Unit scaling multiplies the gradient of each loss by a constant of its own: by the factors of its
cross entropy, of its readout, and of the look-up of the encoder's outputs that it reads. Where
losses are summed, the constants have to be made equal, or the sum's gradient points elsewhere.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from unitscale import ScaledArray, batch_size, ops, rules
from unitscale.core import num_batch_shards


class Head(NamedTuple):
    """What a head does: it reads `rows` of the encoder's `tokens` outputs, into `classes`."""

    classes: int
    rows: int
    tokens: int
    width: int

    @property
    def constant(self) -> float:
        """The gradient at the encoder's output over the true gradient of the mean loss.

        That is for a loss of `mean_loss`: times `rows`, the backward factors over the forward
        ones of the cross entropy, the readout and the look-up; all else in a head is backed by its
        true derivative.
        """
        loss = rules.softmax_cross_entropy(self.classes)
        readout = rules.readout(self.width, self.classes, self.rows)
        rows = rules.embed(self.tokens, self.rows)
        return (
            self.rows
            * (loss.bwd[0] / loss.fwd)
            * (readout.bwd[0] / readout.fwd)
            * (rows.bwd[0] / rows.fwd)
        )


def rows_of(x: ops.ArrayLike, positions: jax.Array) -> ScaledArray:
    """The outputs (batch, n, width) at positions (batch, n) of x (batch, time, width).

    Scaling:
        A look-up in a table of all outputs: a gradient that reaches few of them is made unit over
        all, as `ops.embed` does. (And so a tied readout's gradient and the look-up's of the tokens
        have one constant, however many tokens are predicted.)
    """
    batch, time, width = x.shape
    start = time * jnp.arange(batch)[:, None]
    with batch_size(positions.size):  # devices that divide the batch divide the table as well
        return ops.embed(start + positions, x.reshape(batch * time, width))


def mean_loss(
    logits: ops.ArrayLike,
    labels: jax.Array,
    where: jax.Array | None = None,
    *,
    share: float = 1.0,
) -> jax.Array:
    """Mean cross entropy of the labels that count, a float32 scalar.

    Scaling:
        The backward factor is `share * rows`, rows being all labels, those of other devices and
        those that do not count included: a constant, whatever the number of those that do.

    Args:
        logits: (..., classes).
        labels: (...), integers.
        where: (...), boolean; None for all.
        share: Of a loss among several, from `shares`.
    """
    total = ops.softmax_cross_entropy(logits, labels, where=where, reduction="sum")
    return mean_of(total, labels, where, share=share)


def mean_of(
    total: jax.Array, labels: jax.Array, where: jax.Array | None = None, *, share: float = 1.0
) -> jax.Array:
    """`mean_loss`, from the sum of the losses."""
    count = labels.size if where is None else jnp.maximum(jnp.sum(where), 1)
    return ops.scale_bwd(total / count, share * labels.size * num_batch_shards(labels))


def shares(heads: Sequence[Head]) -> tuple[float, ...]:
    """What to multiply each loss's gradient by: one constant for all, and a unit sum."""
    return rules.normalized_weights([1 / head.constant for head in heads])
