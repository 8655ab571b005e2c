"""Make predictions from logits, write them, and score them (as SQuAD's evaluation scripts do).

References:
  Rajpurkar et al., SQuAD: 100,000+ Questions for Machine Comprehension of Text, section 6.1;
  Rajpurkar et al., Know What You Don't Know: Unanswerable Questions for SQuAD, section 5.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import softmax

from ..errors import write_json
from .data import Question, Row, SquadFeatures, Window

LONGEST = 30  # tokens of the longest answer
Predictions = Mapping[str, tuple[str, float]]
"""By question id, the best answer, and the score of no answer minus that of the best answer."""


def all_answered(questions: Sequence[Question]) -> bool:
    """Return True if every question has an answer (SQuAD v1.1), False otherwise (v2.0)."""
    return all(question.answers for question in questions)


def predict_answers(features: SquadFeatures, logits: np.ndarray) -> Predictions:
    """Find the best answer to each question; logits (windows, length, 2) are of start and end."""
    predictions = {}
    rows = zip(features.windows, np.asarray(logits, np.float64), strict=True)
    for number, group in groupby(rows, key=lambda row: row[0].question):
        question, windows = features.questions[number], list(group)
        # The score of "no answer" is that of [CLS], in the window where it is lowest.
        null = min(float(scores[0].sum()) for _, scores in windows)
        spans = (_best_span(window, scores, question.context) for window, scores in windows)
        score, text = min((span for span in spans if span), default=(-null, ""))
        predictions[question.id] = text, null + score
    return predictions


def _best_span(window: Window, scores: np.ndarray, context: str) -> tuple[float, str] | None:
    """Return the negative score and the text of the best span; None if all spans are blank."""
    count = len(window.offsets)
    start, end = scores[window.first : window.first + count].T
    first = np.repeat(np.arange(count), LONGEST)
    last = first + np.tile(np.arange(LONGEST), count)
    first, last = first[last < count], last[last < count]
    sums = start[first] + end[last]
    for i in np.argsort(-sums, kind="stable"):
        text = context[window.offsets[first[i], 0] : window.offsets[last[i], 1]].strip()
        if text:
            return -float(sums[i]), text
    return None


def write_answers(folder: Path, questions: Sequence[Question], predictions: Predictions) -> None:
    """Write `predictions.json` and, for v2.0, `null_odds.json`, as the published scripts read."""
    answered, odds = all_answered(questions), {name: odd for name, (_, odd) in predictions.items()}
    texts = {n: text if answered or odds[n] <= 0 else "" for n, (text, _) in predictions.items()}
    write_json(folder / "predictions.json", texts)
    if not answered:
        write_json(folder / "null_odds.json", odds)


def normalize(text: str) -> str:
    """Convert to lower case, then remove ASCII punctuation, articles and repeated spaces."""
    bare = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(?:a|an|the)\b", " ", bare).split())


def exact_match(prediction: str, answer: str) -> float:
    """Return 1 if both texts are equal after normalization, else 0."""
    return float(normalize(prediction) == normalize(answer))


def f1(prediction: str, answer: str, *, empty: float = 0.0) -> float:
    """Return the F1 of the normalized words, counted with repetitions; `empty` if none has any."""
    predicted, wanted = (Counter(normalize(text).split()) for text in (prediction, answer))
    words = predicted.total() + wanted.total()
    return 2 * (predicted & wanted).total() / words if words else empty


def score_answers(questions: Sequence[Question], predictions: Predictions) -> dict[str, float]:
    """Score predictions in percent, by the rules of v1.1 if every question has an answer."""
    found = [(question, *predictions[question.id]) for question in questions]
    if all_answered(questions):
        best = {
            name: [max(metric(text, a.text) for a in q.answers) for q, text, _ in found]
            for name, metric in (("exact_match", exact_match), ("f1", f1))
        }
        return {name: 100.0 * sum(values) / len(questions) for name, values in best.items()}
    has = np.array([bool(question.answers) for question in questions])
    silent = np.array([odds > 0 for _, _, odds in found])
    groups = {"": has | True, "HasAns_": has, "NoAns_": ~has}
    result: dict[str, float] = {}
    for name, metric in (("exact", exact_match), ("f1", partial(f1, empty=1.0))):
        raw = np.array([_nearest(metric, question, text) for question, text, _ in found])
        scores = np.where(silent, ~has, raw)
        for prefix, chosen in groups.items():
            if chosen.any():
                result[prefix + name] = float(100.0 * scores[chosen].sum() / chosen.sum())
                result[f"{prefix}total"] = int(chosen.sum())
    return result


def _nearest(metric: Callable[[str, str], float], question: Question, prediction: str) -> float:
    """Return the best score over the answers that have words, or against "" if none has."""
    texts = [answer.text for answer in question.answers if normalize(answer.text)]
    return max(metric(prediction, text) for text in texts or [""])


def score_labels(predicted: np.ndarray, labels: np.ndarray, classes: int) -> dict[str, float]:
    """Score predicted label ids (rows,); `f1` is the F1 of label 1, if there are two labels."""
    from sklearn.metrics import (  # noqa: PLC0415 -- slow to import
        accuracy_score,
        f1_score,
        matthews_corrcoef,
    )

    mean: dict[str, Any] = {"average": "macro", "zero_division": 0}
    scores = {"accuracy": accuracy_score(labels, predicted)}
    if classes == 2:
        scores["f1"] = f1_score(labels, predicted, labels=[1], **mean)
    scores["f1_macro"] = f1_score(labels, predicted, **mean)
    one = np.unique([labels, predicted]).size == 1  # scikit-learn would warn
    scores["matthews"] = 0.0 if one else matthews_corrcoef(labels, predicted)
    return {name: float(score) for name, score in scores.items()}


def write_labels(
    folder: Path, rows: Sequence[Row], logits: np.ndarray, labels: Sequence[str]
) -> None:
    """Write line, label and probability of each row to `predictions.json`."""
    best, shares = logits.argmax(axis=-1).tolist(), softmax(logits, axis=-1)
    tree = [
        {"line": row.line, "label": labels[label], "probability": float(share[label])}
        for row, label, share in zip(rows, best, shares, strict=True)
    ]
    write_json(folder / "predictions.json", tree)
