"""Sentences, or pairs of them, as token ids, and how well their labels are predicted."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import softmax
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from tokenizers import Encoding, Tokenizer

from ..atomic import write_json
from ..errors import RecipeError
from .records import Records, make_records, padding_copy, second_text
from .rows import Dataset, Row

_CHUNK = 1024
"""Rows that are tokenized at once."""
_MEAN: dict[str, Any] = {"average": "macro", "zero_division": 0}


def make_classification_records(
    dataset: Dataset,
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    *,
    sequence_length: int,
    mark_matches: bool = False,
) -> Records:
    """Tokenizes rows; where texts are too long, the longer one of a pair is cut first.

    Args:
      dataset: What the rows are of.
      rows: Texts, or pairs of them.
      tokenizer: Puts a special token first.
      sequence_length: Tokens of a record, special tokens included.
      mark_matches: Whether to call `Records.mark_matches` where there are pairs.
    """
    tokenizer = padding_copy(tokenizer, sequence_length)
    pairs = rows[0].pair is not None
    special = tokenizer.num_special_tokens_to_add(pairs)
    if sequence_length < special + 1 + pairs:
        raise RecipeError(
            f"data.sequence_length: expected at least {special + 1 + pairs}, a token of each text "
            f"and {special} special tokens; got {sequence_length}; raise it"
        )
    tokenizer.enable_truncation(sequence_length, strategy="longest_first")

    second: list[slice] = []

    def encodings() -> Iterator[Encoding]:
        for start in range(0, len(rows), _CHUNK):
            chunk = rows[start : start + _CHUNK]
            for encoding in tokenizer.encode_batch(
                [(row.text, row.pair) if pairs else row.text for row in chunk]
            ):
                second.append(second_text(encoding))
                yield encoding

    records = make_records(encodings(), {"label": dataset.ids(rows)})
    if mark_matches:
        records.mark_matches(second)
    return records


def score_classification(
    predicted: np.ndarray, labels: np.ndarray, classes: int
) -> dict[str, float]:
    """Scores of predicted ids (rows,) against the true ones (rows,), as shares of 1.

    Returns:
      `accuracy`; `f1` of label 1, where there are two; `f1_macro`, the mean over the labels that
      are true or predicted of some row; and `matthews`, 0 where all labels or predictions are one.
    """
    scores = {"accuracy": accuracy_score(labels, predicted)}
    if classes == 2:
        scores["f1"] = f1_score(labels, predicted, labels=[1], **_MEAN)
    scores["f1_macro"] = f1_score(labels, predicted, **_MEAN)
    one = np.unique([labels, predicted]).size == 1  # of which scikit-learn warns
    scores["matthews"] = 0.0 if one else matthews_corrcoef(labels, predicted)
    return {name: float(score) for name, score in scores.items()}


def write_labels(
    folder: Path, rows: Sequence[Row], logits: np.ndarray, labels: Sequence[str]
) -> None:
    """Writes `predictions.json`: line, label and probability, by logits (rows, labels)."""
    best, shares = logits.argmax(axis=-1).tolist(), softmax(logits, axis=-1)
    tree = [
        {"line": row.line, "label": labels[label], "probability": float(share[label])}
        for row, label, share in zip(rows, best, shares, strict=True)
    ]
    write_json(folder / "predictions.json", tree)
