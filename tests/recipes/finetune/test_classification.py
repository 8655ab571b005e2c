"""Rows become records as the tokenizer itself makes them; scores are those of their definitions."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from recipes.errors import RecipeError
from recipes.finetune.classification import (
    make_classification_records,
    score_classification,
    write_labels,
)
from recipes.finetune.rows import Dataset, Row
from recipes.finetune.task import finite

from ..wordpiece import make_tokenizer

SINGLE = [Row("the mine opened", None, "b", 2), Row("closed", None, "a", 3), Row("", None, "c", 4)]
PAIRS = [Row("the copper mine", "when did the mine open", "b", 1), Row("the mine", "", "a", 2)]
LABELS = ("a", "b", "c")


@pytest.mark.parametrize("rows", [SINGLE, PAIRS], ids=["single", "pairs"])
@pytest.mark.parametrize("length", [16, 6])
def test_records(rows: list[Row], length: int) -> None:
    tokenizer = make_tokenizer()
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length)
    data = Dataset(rows, rows, LABELS)
    made = make_classification_records(data, rows, make_tokenizer(), sequence_length=length)
    assert len(made) == len(rows)
    for record, row in zip(made, rows, strict=True):
        expected = tokenizer.encode(row.text, row.pair)
        assert record["ids"].tolist() == expected.ids
        assert record["segments"].tolist() == expected.type_ids
        assert record["mask"].tolist() == expected.attention_mask
        assert LABELS[record["label"]] == row.label


def test_what_two_texts_share_has_the_segment_of_the_first() -> None:
    rows = [Row("did the copper mine open", "the mine opened", "a", 2)]
    data = Dataset(rows, rows, LABELS)
    plain, marked = (
        make_classification_records(
            data, rows, make_tokenizer(), sequence_length=16, mark_matches=mark
        )
        for mark in (False, True)
    )
    tokenizer = make_tokenizer()
    encoding = tokenizer.encode(rows[0].text, rows[0].pair)
    first = {i for i, part in zip(encoding.ids, encoding.sequence_ids, strict=True) if part == 0}
    shared = [
        part == 1 and i in first
        for i, part in zip(encoding.ids, encoding.sequence_ids, strict=True)
    ]
    assert sum(shared) == 2  # the, mine
    assert marked[0]["segments"].tolist()[: len(shared)] == [
        0 if both else kind for both, kind in zip(shared, encoding.type_ids, strict=True)
    ]
    assert marked[0]["ids"].tolist() == plain[0]["ids"].tolist()
    single = Dataset(SINGLE, SINGLE, LABELS)
    one = make_classification_records(
        single, SINGLE, make_tokenizer(), sequence_length=16, mark_matches=True
    )
    assert one.arrays["segments"].sum() == 0


@pytest.mark.parametrize(("rows", "least"), [(SINGLE, 3), (PAIRS, 5)])
def test_room_for_the_texts(rows: list[Row], least: int) -> None:
    data = Dataset(rows, rows, LABELS)
    make_classification_records(data, rows, make_tokenizer(), sequence_length=least)
    with pytest.raises(RecipeError, match=rf"data\.sequence_length: .* at least {least}, .* got"):
        make_classification_records(data, rows, make_tokenizer(), sequence_length=least - 1)


# labels, predictions, classes, accuracy, F1 of label 1, macro F1, Matthews correlation
TABLES = {
    # TP 1, FP 1, FN 1, TN 1
    "chance": ([1, 1, 0, 0], [1, 0, 1, 0], 2, 0.5, 0.5, 0.5, 0.0),
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
    # A correlation of 0 is the difference of products that round.
    assert found == pytest.approx(expected, rel=2**-50, abs=2**-52)


@given(st.integers(2, 5), st.data())
@settings(deadline=None, max_examples=30)
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


def test_the_file(tmp_path: Path) -> None:
    rows = [Row("s", None, "no", line) for line in (2, 3, 5)]
    logits = np.array([[0.0, 1000.0], [np.log(3), 0.0], [2.0, 2.0]])
    write_labels(tmp_path, rows, logits, ("no", "yés"))
    (path,) = tmp_path.iterdir()
    assert path.name == "predictions.json"
    first, second, third = json.loads(path.read_text(encoding="utf-8"))
    assert first == {"line": 2, "label": "yés", "probability": 1.0}
    assert second == {"line": 3, "label": "no", "probability": pytest.approx(3 / 4, rel=2**-50)}
    assert third == {"line": 5, "label": "no", "probability": 0.5}


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_scores_that_are_not_finite(value: float) -> None:
    with pytest.raises(RecipeError, match=r"are not finite; lower optimizer\.lear") as caught:
        finite(np.array([[0.0, value]], np.float32))
    assert caught.value.exit_code == 1
