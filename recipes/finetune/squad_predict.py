"""Answers from the scores of their first and last tokens, over all windows of a question."""

from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.special import softmax

from ..atomic import write_json
from .config import SquadConfig
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
    features: SquadFeatures, logits: np.ndarray, config: SquadConfig, *, allow_none: bool
) -> dict[str, Prediction]:
    """Searches all spans of at most `max_answer_length` tokens for the highest sums of scores.

    Args:
      features: The questions and their windows.
      logits: Finite scores of each token as the answer's first and as its last, (windows,
        sequence_length, 2).
      config: Its `n_best` candidates are kept of each question; one text counts once, with its best
        score.
      allow_none: Lists no answer as a candidate too, as v2.0 has it.

    Returns:
      A prediction for each question, by its id, in the order of the questions.
    """
    predictions = {}
    rows = zip(features.windows, np.asarray(logits, np.float64), strict=True)
    for number, group in groupby(rows, key=lambda row: row[0].question):
        question, nulls, found = features.questions[number], [], []
        for window, scores in group:
            nulls.append(Candidate("", *scores[0].tolist()))
            found += _spans(window, scores, question.context, config)
        null = min(nulls, key=lambda candidate: candidate.score)
        distinct: dict[str, Candidate] = {}
        for candidate in sorted(found, key=lambda candidate: (-candidate.score, candidate.text)):
            distinct.setdefault(candidate.text, candidate)
        best = list(distinct.values())[: config.n_best]
        prediction = Prediction("", 0.0, (null,))
        if best:
            listed = [*best, null] if allow_none else best
            listed = sorted(listed, key=lambda candidate: -candidate.score)
            prediction = Prediction(best[0].text, null.score - best[0].score, tuple(listed))
        predictions[question.id] = prediction
    return predictions


def _spans(
    window: Window, scores: np.ndarray, context: str, config: SquadConfig
) -> Iterator[Candidate]:
    """The best texts of one window."""
    count = len(window.offsets)
    if not count:
        return
    length = min(config.max_answer_length, count)
    start, end = scores[window.first : window.first + count].T
    # Row i has the spans that begin at token i, column k those of k + 1 tokens.
    tail = np.concatenate([end, np.full(length - 1, -np.inf)])
    sums = start[:, None] + np.lib.stride_tricks.sliding_window_view(tail, length)
    seen = {""}
    for flat in np.argsort(-sums, axis=None, kind="stable"):
        i, k = divmod(int(flat), length)
        if i + k >= count or len(seen) > config.n_best:
            return
        text = context[window.offsets[i, 0] : window.offsets[i + k, 1]].strip()
        if text not in seen:
            seen.add(text)
            yield Candidate(text, float(start[i]), float(end[i + k]))


def write_predictions(
    folder: Path, predictions: Mapping[str, Prediction], threshold: float | None
) -> None:
    """Writes `predictions.json`, `nbest.json` and, with a threshold, `null_odds.json`.

    The files are those that the published scripts read: `evaluate-v1.1.py` and `evaluate-v2.0.py`
    take `predictions.json`, and the latter `null_odds.json` as its `--na-prob-file`.
    """
    texts, nbest = {}, {}
    for name, prediction in predictions.items():
        texts[name] = prediction.text if threshold is None else prediction.above(threshold)
        shares = softmax([candidate.score for candidate in prediction.best]).tolist()
        nbest[name] = [
            {**candidate._asdict(), "probability": share}
            for candidate, share in zip(prediction.best, shares, strict=True)
        ]
    write_json(folder / "predictions.json", texts)
    write_json(folder / "nbest.json", nbest)
    if threshold is not None:
        odds = {name: prediction.null_odds for name, prediction in predictions.items()}
        write_json(folder / "null_odds.json", odds)
