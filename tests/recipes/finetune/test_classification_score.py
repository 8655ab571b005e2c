"""Scores of labels against tables worked out by hand, and against their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from recipes.errors import RecipeError
from recipes.finetune.classification_score import count_labels, score_classification

# labels, predictions, classes, accuracy, F1 of label 1, macro F1, Matthews correlation
TABLES = {
    # TP 1, FP 1, FN 1, TN 1
    "chance": ([1, 1, 0, 0], [1, 0, 1, 0], 2, 0.5, 0.5, 0.5, 0.0),
    "right": ([0, 1, 1], [0, 1, 1], 2, 1, 1, 1, 1),
    "wrong": ([0, 1, 1], [1, 0, 0], 2, 0, 0, 0, -1),
    # TP 2, FP 0, FN 1, TN 1: F1 4/5 and 2/3, Matthews 2 / (2 * 3 * 1 * 2)^1/2
    "mixed": ([1, 1, 1, 0], [1, 1, 0, 0], 2, 3 / 4, 4 / 5, 11 / 15, 1 / math.sqrt(3)),
    "one label, rightly": ([1, 1], [1, 1], 2, 1, 1, 1, 0),
    "the other label, rightly": ([0, 0], [0, 0], 2, 1, 0, 1, 0),
    "one prediction": ([0, 1, 1, 1], [1, 1, 1, 1], 2, 3 / 4, 6 / 7, 3 / 7, 0),
    # F1 1, 2/3, 2/3; c 3, s 4, t (1, 2, 1), p (1, 1, 2): (12 - 5) / (10 * 10)^1/2
    "three": ([0, 1, 1, 2], [0, 1, 2, 2], 3, 3 / 4, None, 7 / 9, 7 / 10),
    # ... of which label 2 is neither true nor predicted, and does not count
    "a label that is not there": ([0, 1, 1], [0, 1, 0], 3, 2 / 3, None, 2 / 3, 0.5),
}


@pytest.mark.parametrize("case", TABLES)
def test_tables(case: str) -> None:
    labels, predicted, classes, accuracy, f1, macro, matthews = TABLES[case]
    expected = {"accuracy": accuracy, "f1_macro": macro, "matthews": matthews}
    if f1 is not None:
        expected["f1"] = f1
    found = score_classification(np.array(predicted), np.array(labels), classes)
    assert found == pytest.approx(expected, rel=2**-50, abs=0)


def test_counts() -> None:
    table = count_labels(np.array([0, 2, 2, 1]), np.array([0, 1, 1, 2]), 3)
    assert table.tolist() == [[1, 0, 0], [0, 0, 2], [0, 1, 0]]


@given(st.integers(2, 5), st.data())
@settings(deadline=None)
def test_definitions(classes: int, data: st.DataObject) -> None:
    """Precision, recall, and the correlation of rows of ones and zeros, one column a label."""
    ids = st.integers(0, classes - 1)
    rows = np.array(data.draw(st.lists(st.tuples(ids, ids), min_size=1, max_size=40)))
    labels, predicted = rows.T
    found = score_classification(predicted, labels, classes)
    assert found["accuracy"] == np.mean(labels == predicted)
    scores = []
    for label in np.union1d(labels, predicted):
        hits = np.sum((labels == label) & (predicted == label))
        precision = hits / max(np.sum(predicted == label), 1)
        recall = hits / max(np.sum(labels == label), 1)
        scores.append(2 * precision * recall / (precision + recall) if hits else 0.0)
        if classes == 2 and label == 1:
            assert found["f1"] == pytest.approx(scores[-1], rel=2**-50)
    assert found["f1_macro"] == pytest.approx(np.mean(scores), rel=2**-48)
    x, y = (np.eye(classes)[values] for values in (labels, predicted))
    x, y = x - x.mean(axis=0), y - y.mean(axis=0)
    spread = math.sqrt(np.sum(x * x) * np.sum(y * y))
    constant = len(set(labels)) == 1 or len(set(predicted)) == 1
    expected = 0.0 if constant else np.sum(x * y) / spread
    # Sums of at most 40 * 5 products of numbers below 1, each rounded.
    assert found["matthews"] == pytest.approx(expected, abs=200 * 2**-50)


def test_counts_past_64_bits() -> None:
    """With 2**17 rows the product under the root is about 2**66."""
    labels = np.arange(2**17) % 2
    predicted = np.where(np.arange(2**17) < 2**15, 1 - labels, labels)
    assert score_classification(predicted, labels, 2)["matthews"] == 0.5


def test_nothing_to_score() -> None:
    empty = np.array([], np.int32)
    with pytest.raises(RecipeError, match=r"data\.validation: expected rows to score; got none"):
        score_classification(empty, empty, 2)
