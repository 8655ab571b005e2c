"""Answers from the scores of their first and last tokens, over all windows of a question."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..atomic import write_whole
from .logits import finite, softmax
from .squad_features import SquadFeatures, Window


class Candidate(NamedTuple):
    """A text of the context, or "" for no answer, and the scores of its first and last tokens."""

    text: str
    start_logit: float
    end_logit: float

    @property
    def score(self) -> float:
        return self.start_logit + self.end_logit


class Prediction(NamedTuple):
    """What a model says to one question.

    Attributes:
      text: The best answer that is not empty; "" only where no window has a token of the context.
      null_odds: Score of no answer, at [CLS] of the window where it is least, minus that of `text`.
      best: Candidates from the best on, with no answer among them if it was asked for.
    """

    text: str
    null_odds: float
    best: tuple[Candidate, ...]

    def above(self, threshold: float) -> str:
        """The answer, or "" where the odds of no answer are above the threshold."""
        return "" if self.null_odds > threshold else self.text


def predict_answers(
    features: SquadFeatures,
    start_logits: np.ndarray,
    end_logits: np.ndarray,
    *,
    n_best: int,
    max_answer_length: int,
    allow_none: bool,
) -> dict[str, Prediction]:
    """Searches all spans of at most `max_answer_length` tokens for the highest sums of scores.

    Args:
      features: The questions and their windows.
      start_logits: Score of each token as the answer's first, (windows, sequence_length).
      end_logits: Score of each token as the answer's last, (windows, sequence_length).
      n_best: Candidates to keep of each question; one text counts once, with its best score.
      max_answer_length: Tokens of the longest answer.
      allow_none: Lists no answer as a candidate too, as v2.0 has it.

    Returns:
      A prediction for each question, by its id, in the order of the questions.

    Raises:
      RecipeError: A score is not a finite number.
    """
    shape = len(features.windows), features.records.records.length
    assert start_logits.shape == end_logits.shape == shape, "a score for each token of each window"
    starts, ends = finite(start_logits), finite(end_logits)
    predictions = {}
    rows = zip(features.windows, starts, ends, strict=True)
    for number, group in groupby(rows, key=lambda row: row[0].question):
        question, nulls, found = features.questions[number], [], []
        for window, start, end in group:
            nulls.append(Candidate("", float(start[0]), float(end[0])))
            found += _spans(window, start, end, question.context, n_best, max_answer_length)
        null = min(nulls, key=lambda candidate: candidate.score)
        predictions[question.id] = _prediction(found, null, n_best, allow_none)
    return predictions


def _spans(
    window: Window,
    start: np.ndarray,
    end: np.ndarray,
    context: str,
    n_best: int,
    max_answer_length: int,
) -> list[Candidate]:
    """At least the `n_best` best texts of one window, if it has so many."""
    count = len(window.offsets)
    if not count:
        return []
    length = min(max_answer_length, count)
    first, last = window.first, window.first + count
    # Row i has the spans that begin at token i, column k those of k + 1 tokens.
    tail = np.concatenate([end[first:last], np.full(length - 1, -np.inf)])
    scores = start[first:last, None] + np.lib.stride_tricks.sliding_window_view(tail, length)
    kept = n_best
    while True:
        kept = min(kept, scores.size)
        distinct: dict[str, Candidate] = {}
        for flat in np.argpartition(scores, -kept, axis=None)[-kept:]:
            i, k = divmod(int(flat), length)
            if i + k >= count:
                continue
            text = context[window.offsets[i, 0] : window.offsets[i + k, 1]].strip()
            found = Candidate(text, float(start[first + i]), float(end[first + i + k]))
            if text and (text not in distinct or found.score > distinct[text].score):
                distinct[text] = found
        if len(distinct) >= n_best or kept == scores.size:
            return list(distinct.values())
        kept *= 4  # one text may stand in many places


def _prediction(
    found: list[Candidate], null: Candidate, n_best: int, allow_none: bool
) -> Prediction:
    distinct: dict[str, Candidate] = {}
    for candidate in sorted(found, key=lambda candidate: (-candidate.score, candidate.text)):
        distinct.setdefault(candidate.text, candidate)
    best = list(distinct.values())[:n_best]
    if not best:
        return Prediction("", 0.0, (null,))
    listed = sorted([*best, null] if allow_none else best, key=lambda candidate: -candidate.score)
    return Prediction(best[0].text, null.score - best[0].score, tuple(listed))


def probabilities(candidates: Sequence[Candidate]) -> np.ndarray:
    """Softmax of the candidates' scores, (candidates,) float64."""
    return softmax(np.array([candidate.score for candidate in candidates]))


def write_predictions(
    folder: Path, predictions: Mapping[str, Prediction], threshold: float | None
) -> None:
    """Writes `predictions.json`, `nbest.json` and, with a threshold, `null_odds.json`.

    The files are those that the published scripts read: `evaluate-v1.1.py` and `evaluate-v2.0.py`
    take `predictions.json`, and the latter `null_odds.json` as its `--na-prob-file`.

    Args:
      folder: Where to; an earlier file stays whole until the new one is.
      predictions: By id.
      threshold: Of the odds of no answer (v2.0); None to answer every question (v1.1).

    Raises:
      OSError: A file cannot be written.
    """
    texts = {
        name: prediction.text if threshold is None else prediction.above(threshold)
        for name, prediction in predictions.items()
    }
    nbest = {
        name: [
            {**candidate._asdict(), "probability": float(share)}
            for candidate, share in zip(
                prediction.best, probabilities(prediction.best), strict=True
            )
        ]
        for name, prediction in predictions.items()
    }
    files: dict[str, Mapping[str, object]] = {"predictions.json": texts, "nbest.json": nbest}
    if threshold is not None:
        files["null_odds.json"] = {name: p.null_odds for name, p in predictions.items()}
    for name, tree in files.items():
        write_whole(folder / name, json.dumps(tree, ensure_ascii=False, indent=1) + "\n")
