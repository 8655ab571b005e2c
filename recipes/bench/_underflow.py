"""Which gradients a format loses: entries that are zero in float16 and not in float32."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..run.batch import loss_inputs


class Underflow(NamedTuple):
    """Counts of gradient entries, over all parameters and batches.

    `entries` in all, `lost` that are zero in float16 but not in float32, `subnormal` that are not
    zero but below float16's least normal number, `not_finite` in float16. `lost_absent` of the lost
    belong to the readout of tokens that the training text never has: their probability, and with it
    their gradient, goes to zero as the model learns that they do not occur.
    """

    entries: int
    lost: int
    subnormal: int
    not_finite: int
    lost_absent: int

    @property
    def lost_share(self) -> float:
        return self.lost / self.entries

    @property
    def lost_occurring_share(self) -> float:
        return (self.lost - self.lost_absent) / self.entries

    @property
    def subnormal_share(self) -> float:
        return self.subnormal / self.entries


def underflow(
    wide: nnx.GraphDef,
    narrow: nnx.GraphDef,
    params: Any,
    rest: Any,
    batches: Iterable[np.ndarray],
    absent: np.ndarray,
) -> Underflow:
    """Compares the gradients of one set of parameters, computed in float32 and in float16.

    Args:
      wide: The model that computes in float32.
      narrow: The same model, computing in float16.
      params: The float32 parameters of both.
      rest: Other state of both.
      batches: (batch, time + 1) int32 each; dropout is left out.
      absent: (vocab,) bool, the tokens that the training text never has.
    """
    pairs = (
        (gradient(params, rest, batch, wide), gradient(params, rest, batch, narrow))
        for batch in batches
    )
    return counted(pairs, absent)


def counted(pairs: Iterable[tuple[Any, Any]], absent: np.ndarray) -> Underflow:
    """Counts over pairs of gradients, of the same parameters: without rounding, and with it.

    Args:
      pairs: Trees of arrays.
      absent: As for `underflow`.
    """
    counts = [_counts(exact, half, absent) for exact, half in pairs]
    return Underflow(*(sum(column) for column in zip(*counts, strict=True)))


def _counts(wide: Any, narrow: Any, absent: np.ndarray) -> tuple[int, ...]:
    paths, reference = zip(*jax.tree_util.tree_leaves_with_path(wide), strict=True)
    rounded = jax.tree.leaves(narrow)
    tiny = float(jnp.finfo(jnp.float16).tiny)
    lost = subnormal = not_finite = lost_absent = 0
    for path, exact, half in zip(paths, reference, rounded, strict=True):
        exact, half = np.asarray(exact), np.asarray(half)
        gone = (half == 0) & (exact != 0)
        lost += int(np.count_nonzero(gone))
        if "readout" in jax.tree_util.keystr(path):
            lost_absent += int(np.count_nonzero(gone[..., absent]))
        subnormal += int(np.count_nonzero((half != 0) & (np.abs(half) < tiny)))
        not_finite += int(np.count_nonzero(~np.isfinite(half)))
    return sum(leaf.size for leaf in reference), lost, subnormal, not_finite, lost_absent


@jax.jit(static_argnums=3)
def gradient(params, rest, batch, graphdef):
    """The gradient of a model's loss, dropout off."""

    def loss(params):
        model = nnx.merge(graphdef, params, rest)
        return model.loss(*loss_inputs(batch), deterministic=True)

    return jax.grad(loss)(params)
