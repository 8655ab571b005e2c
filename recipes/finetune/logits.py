"""Scores that a model gives, as numbers that can be compared."""

from __future__ import annotations

import numpy as np

from ..errors import RecipeError


def finite(logits: np.ndarray) -> np.ndarray:
    """Scores in float64, in which sums of float32 numbers keep their order.

    Raises:
      RecipeError: One of them is not a finite number.
    """
    scores = np.asarray(logits, np.float64)
    if not np.isfinite(scores).all():
        raise RecipeError(
            "the scores of the validation data are not finite; lower optimizer.learning_rate, or "
            "choose a policy of wider range",
            exit_code=1,
        )
    return scores


def softmax(scores: np.ndarray) -> np.ndarray:
    """Probabilities over the last axis, whatever the size of the scores."""
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return shares / shares.sum(axis=-1, keepdims=True)
