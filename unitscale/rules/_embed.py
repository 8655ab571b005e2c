"""Factors of the embedding lookup.

A lookup copies unit rows, so only its gradient, a scatter-add into the table, needs a factor.
"""

from __future__ import annotations

import math

from ._checks import positive_sizes
from ._factors import Factors


def embed(vocab: int, tokens: int) -> Factors:
    """Return the factors of looking up `tokens` rows of a table of `vocab` rows.

    Scaling:
        Forward 1. A row's gradient sums the cotangents of its occurrences, on average `tokens /
        vocab` of them, so the table's has `(vocab / tokens)^1/2`. The RMS over the whole table is
        then 1 for independent unit cotangents whatever the distribution of the tokens: it only
        moves between rows.

    Args:
        vocab: Rows of the table.
        tokens: Number of looked-up ids: batch times sequence length.

    Returns:
        Factors with `bwd = (table,)`.

    Raises:
        TypeError: If a size is not a static integer.
        ValueError: If a size is not positive.

    Example:
        >>> embed(64, 16)
        Factors(fwd=1.0, bwd=(2.0,))

    References:
        Unit Scaling: Blake, Orr, Luschi, ICML 2023, arXiv 2303.11257, the rule for cut edges.
    """
    positive_sizes("embed", {"vocab": vocab, "tokens": tokens})
    return Factors(1.0, (math.sqrt(vocab / tokens),))
