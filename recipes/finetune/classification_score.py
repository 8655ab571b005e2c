"""Accuracy, F1 and Matthews correlation of predicted labels.

All come from the table of counts, C[i, j] rows of label i that were predicted as j, in whole
numbers, so that no count is rounded.
"""

from __future__ import annotations

import math

import numpy as np

from ..errors import RecipeError


def count_labels(predicted: np.ndarray, labels: np.ndarray, classes: int) -> np.ndarray:
    """Rows by their label and by what was predicted, (classes, classes) int64."""
    table = np.zeros((classes, classes), np.int64)
    np.add.at(table, (labels, predicted), 1)
    return table


def f1_of(table: np.ndarray) -> np.ndarray:
    """F1 of each class against all others, 2 TP / (2 TP + FP + FN), (classes,) float64.

    It is 0 for a class that no row has and none is predicted as.
    """
    sizes = table.sum(axis=0) + table.sum(axis=1)
    return 2 * np.diagonal(table) / np.maximum(sizes, 1)


def matthews(table: np.ndarray) -> float:
    """Matthews correlation of any number of classes; 0 where all labels or predictions are one.

    With s rows, c of them right, t of each label and p predicted as each: (c s - t.p) over
    ((s^2 - p.p) (s^2 - t.t))^1/2.

    References:
      Gorodkin, Comparing two K-category assignments by a K-category correlation coefficient, 2004,
      equation 8.
    """
    # Python's integers: the fourth power of a number of rows is past 64 bits.
    true, predicted = table.sum(axis=1).tolist(), table.sum(axis=0).tolist()
    total, right = sum(true), int(np.trace(table))
    covariance = right * total - sum(t * p for t, p in zip(true, predicted, strict=True))
    spread = (total**2 - sum(p * p for p in predicted)) * (total**2 - sum(t * t for t in true))
    return covariance / math.sqrt(spread) if spread else 0.0


def score_classification(
    predicted: np.ndarray, labels: np.ndarray, classes: int
) -> dict[str, float]:
    """Scores of predicted labels.

    Args:
      predicted: Predicted ids, (rows,) integers.
      labels: True ids, (rows,) integers.
      classes: Number of labels.

    Returns:
      `accuracy`; `f1` of label 1, where there are two; `f1_macro`, the mean over the labels that
      are true or predicted of some row; and `matthews`, all as shares of 1.

    Raises:
      RecipeError: There are no rows.
    """
    if not len(labels):
        raise RecipeError("data.validation: expected rows to score; got none; give more data")
    table = count_labels(predicted, labels, classes)
    each = f1_of(table)
    seen = (table.sum(axis=0) + table.sum(axis=1)) > 0
    scores = {"accuracy": float(np.trace(table) / table.sum())}
    if classes == 2:
        scores["f1"] = float(each[1])
    return scores | {"f1_macro": float(each[seen].mean()), "matthews": matthews(table)}
