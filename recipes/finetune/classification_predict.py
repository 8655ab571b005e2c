"""Labels from scores, and the file that says them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..atomic import write_whole
from .classification_data import Row
from .logits import finite, softmax


def predict_labels(logits: np.ndarray) -> np.ndarray:
    """Ids of the best labels, (rows,); the first of equal ones.

    Args:
      logits: A score for each label, (rows, labels).

    Raises:
      RecipeError: A score is not a finite number.
    """
    return np.argmax(finite(logits), axis=-1)


def write_labels(
    folder: Path, rows: Sequence[Row], logits: np.ndarray, labels: Sequence[str]
) -> None:
    """Writes `predictions.json`: the line, label and its probability of each row, in their order.

    Args:
      folder: Where to; an earlier file stays whole until the new one is.
      rows: What was scored.
      logits: As in `predict_labels`.
      labels: Names of the labels.

    Raises:
      OSError: The file cannot be written.
      RecipeError: A score is not a finite number.
    """
    predicted, shares = predict_labels(logits), softmax(finite(logits))
    tree = [
        {"line": row.line, "label": labels[label], "probability": float(share[label])}
        for row, label, share in zip(rows, predicted.tolist(), shares, strict=True)
    ]
    text = json.dumps(tree, ensure_ascii=False, indent=1)
    write_whole(folder / "predictions.json", text + "\n")
