"""Which tokens are hidden: a pure function of ids, words and a random generator."""

from typing import NamedTuple

import numpy as np

from .config import MaskingConfig


class Masked(NamedTuple):
    """A sequence with hidden tokens.

    Attributes:
      ids: What the model sees, (time,) int32.
      positions: Where it predicts, (predictions,) int32, rising; filled up with 0.
      targets: The tokens that are there, (predictions,) int32.
      counts: False where a prediction only fills up, (predictions,) bool.
    """

    ids: np.ndarray
    positions: np.ndarray
    targets: np.ndarray
    counts: np.ndarray


def mask_tokens(
    ids: np.ndarray,
    words: np.ndarray,
    rng: np.random.Generator,
    *,
    predictions: int,
    mask: int,
    ordinary: np.ndarray,
    config: MaskingConfig,
) -> Masked:
    """Hides tokens of a sequence, as BERT does.

    Args:
      ids: Tokens, (time,).
      words: The number of each token's word, (time,) rising; -1 for a token that is never hidden.
        A word is hidden whole or not at all; without whole words, each token is its own.
      rng: Decides everything that is drawn.
      predictions: Most tokens that are hidden.
      mask: The id of [MASK].
      ordinary: Ids that a token may be replaced by at random.
      config: Shares of what is seen in the place of a hidden token.

    Returns:
      The sequence. Words that no longer fit into what is left of `predictions` are passed over.
    """
    seen = ids.astype(np.int32)
    chosen = _choose(words, predictions, rng)
    counts = np.arange(predictions) < chosen.size
    positions, targets = np.zeros((2, predictions), np.int32)
    positions[: chosen.size], targets[: chosen.size] = chosen, seen[chosen]
    draw = rng.random(chosen.size)
    strangers = rng.choice(ordinary, chosen.size)
    seen[chosen] = np.select(
        [draw < config.masked, draw < config.masked + config.random],
        [np.full(chosen.size, mask), strangers],
        seen[chosen],
    )
    return Masked(seen, positions, targets, counts)


def _choose(words: np.ndarray, most: int, rng: np.random.Generator) -> np.ndarray:
    """Positions of at most `most` tokens, in words, rising."""
    places = np.flatnonzero(words >= 0)
    _, starts, sizes = np.unique(words[places], return_index=True, return_counts=True)
    chosen: list[np.ndarray] = []
    left = most
    for word in rng.permutation(starts.size):
        if sizes[word] <= left:
            chosen.append(places[starts[word] : starts[word] + sizes[word]])
            left -= sizes[word]
        if not left:
            break
    return np.sort(np.concatenate([np.empty(0, np.intp), *chosen]))
