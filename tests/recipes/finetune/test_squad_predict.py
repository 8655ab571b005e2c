"""The best spans over all windows, against a search of every span, and the files of a run."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipes.finetune.config import SquadConfig
from recipes.finetune.squad_data import Answer, Question
from recipes.finetune.squad_features import SquadFeatures, make_squad_features
from recipes.finetune.squad_predict import (
    Prediction,
    predict_answers,
    write_predictions,
)
from recipes.finetune.squad_score import score_predictions, version_of

from ..wordpiece import make_tokenizer

CONTEXT = "The copper mine opened in 1878. In 1901, Café 9 did open the mine. The mine closed."
LENGTH = 24


def make(*contexts: str) -> SquadFeatures:
    questions = [
        Question(str(number), "when did it open?", context, ())
        for number, context in enumerate(contexts)
    ]
    return make_squad_features(
        questions, make_tokenizer(), sequence_length=LENGTH, max_question_length=6, stride=5
    )


FEATURES = make(CONTEXT, CONTEXT[:31], CONTEXT[::-1])
SHAPE = len(FEATURES.windows), LENGTH


def predict(start: np.ndarray, end: np.ndarray, **settings: Any) -> dict[str, Prediction]:
    config = SquadConfig(n_best=5, max_answer_length=settings.get("max_answer_length", 4))
    allow_none = settings.get("allow_none", True)
    return predict_answers(FEATURES, np.stack([start, end], -1), config, allow_none=allow_none)


def every_span(number: int, start: np.ndarray, end: np.ndarray, longest: int) -> dict[str, float]:
    """The best score of each text of at most `longest` tokens."""
    scores: dict[str, float] = {}
    for row, window in enumerate(FEATURES.windows):
        if window.question != number:
            continue
        for i in range(len(window.offsets)):
            for j in range(i, min(i + longest, len(window.offsets))):
                text = FEATURES.questions[number].context[
                    window.offsets[i, 0] : window.offsets[j, 1]
                ]
                score = float(start[row, window.first + i]) + float(end[row, window.first + j])
                scores[text] = max(scores.get(text, -np.inf), score)
    return scores


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("longest", [1, 4, 100])
def test_candidates_are_the_best_of_all_spans(seed: int, longest: int) -> None:
    start, end = np.random.default_rng(seed).normal(size=(2, *SHAPE)).astype(np.float32)
    found = predict(start, end, max_answer_length=longest, allow_none=False)
    assert list(found) == [question.id for question in FEATURES.questions]
    for number, prediction in enumerate(found.values()):
        scores = every_span(number, start, end, longest)
        ranked = sorted(scores.items(), key=lambda item: -item[1])
        assert [(c.text, c.score) for c in prediction.best] == ranked[:5]
        assert prediction.text == ranked[0][0]
        nulls = [
            float(start[row, 0]) + float(end[row, 0])
            for row, window in enumerate(FEATURES.windows)
            if window.question == number
        ]
        assert prediction.null_odds == min(nulls) - ranked[0][1]


def test_an_answer_that_ends_before_it_starts_is_none() -> None:
    """The highest scores are at the end and the start of a pair in the wrong order."""
    start, end = np.zeros((2, *SHAPE))
    window = FEATURES.windows[0]
    start[0, window.first + 5] = end[0, window.first] = 10
    start[0, window.first + 1], end[0, window.first + 4] = 8, 9
    assert predict(start, end)["0"].text == "copper mine opened in"


def test_tokens_of_the_question_and_padding_are_no_answer() -> None:
    start, end = np.zeros((2, *SHAPE))
    for row, window in enumerate(FEATURES.windows):
        last = window.first + len(window.offsets)
        for scores in (start, end):
            scores[row, 1 : window.first] = scores[row, last:] = 100
    for prediction in predict(start, end).values():
        assert max(candidate.score for candidate in prediction.best) == 0


def test_text_is_that_of_the_context() -> None:
    """Capitals, accents and spaces that the tokens have lost."""
    start, end = np.zeros((2, *SHAPE))
    cafe = CONTEXT.index("Café")
    for row, window in enumerate(FEATURES.windows):
        begins = window.offsets[:, 0].tolist()
        if window.question == 0 and {cafe, cafe + 5} <= set(begins):
            start[row, window.first + begins.index(cafe)] = 5
            end[row, window.first + begins.index(cafe + 5)] = 5
    assert predict(start, end, max_answer_length=9)["0"].text == "Café 9"


def test_no_answer_is_a_candidate_where_it_may_be() -> None:
    start, end = np.zeros((2, *SHAPE))
    start[:, 0] = 3.0
    mine = [row for row, window in enumerate(FEATURES.windows) if window.question == 0]
    start[mine[1], 0] = 1.0  # the least of the windows counts
    prediction = predict(start, end)["0"]
    assert prediction.null_odds == 1.0
    assert prediction.best[0].text == ""
    assert prediction.best[0].score == 1.0
    assert len(prediction.best) == 6
    answered = predict(start, end, allow_none=False)["0"]
    assert all(candidate.text for candidate in answered.best)
    assert answered.null_odds == 1.0


def test_the_threshold() -> None:
    prediction = Prediction("gold", 1.0, ())
    assert [prediction.above(at) for at in (0.5, 1.0, 2.0)] == ["", "gold", "gold"]


def test_a_context_without_tokens_has_no_answer() -> None:
    features = make(" ")
    found = predict_answers(features, np.zeros((1, LENGTH, 2)), SquadConfig(), allow_none=False)[
        "0"
    ]
    assert found.text == ""
    assert [candidate.text for candidate in found.best] == [""]


def from_labels(questions: list[Question]) -> tuple[SquadFeatures, np.ndarray]:
    """Features, and the scores of a model that has learned all of their labels."""
    made = make_squad_features(
        questions, make_tokenizer(), sequence_length=LENGTH, max_question_length=6, stride=5
    )
    batches = list(made.records.batches(4))
    start, end = (
        np.concatenate([np.eye(LENGTH)[batch[name]] for batch in batches])[: len(made.records)]
        for name in ("start", "end")
    )
    start[start[:, 0] == 0] *= 10  # a window with the answer outweighs those without
    return made, np.stack([start, end], -1)


@pytest.mark.parametrize("version", ["v1.1", "v2.0"])
def test_a_model_that_has_learned_its_labels_is_right(tmp_path: Path, version: str) -> None:
    answers = [Answer(text, CONTEXT.index(text)) for text in ("1901", "closed", "The copper mine")]
    asked = [Question(a.text, "when did it open?", CONTEXT, (a,)) for a in answers]
    if version == "v2.0":
        asked.append(Question("none", "when did it close?", CONTEXT, ()))
    config = SquadConfig(no_answer_threshold=-1.0, n_best=3, max_answer_length=9)
    assert version_of(asked, config) == version
    found = predict_answers(*from_labels(asked), config, allow_none=version == "v2.0")
    report = score_predictions(asked, found, config)
    threshold = config.no_answer_threshold if version == "v2.0" else None
    write_predictions(tmp_path, found, threshold)
    texts = json.loads((tmp_path / "predictions.json").read_text(encoding="utf-8"))
    assert texts == {q.id: q.answers[0].text if q.answers else "" for q in asked}
    if version == "v1.1":
        assert report == {"exact_match": 100.0, "f1": 100.0}
    else:
        assert {report[name] for name in ("exact", "NoAns_f1", "HasAns_f1")} == {100.0}
        assert report["best_f1"] == 100.0


def test_files(tmp_path: Path) -> None:
    start, end = np.zeros((2, *SHAPE))
    start[0, 0] = -1.0
    start[0, FEATURES.windows[0].first] = 1000.0  # exp of it would overflow
    found = predict(start, end)
    write_predictions(tmp_path, found, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["nbest.json", "predictions.json"]
    write_predictions(tmp_path, found, -0.5)
    texts, nbest, odds = (
        json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("predictions", "nbest", "null_odds")
    )
    assert len(list(tmp_path.iterdir())) == 3
    assert odds == {"0": -1001.0, "1": 0.0, "2": 0.0}
    assert texts == {"0": found["0"].text, "1": "", "2": ""}
    assert nbest.keys() == found.keys()
    assert nbest["0"][0].keys() == {"text", "start_logit", "end_logit", "probability"}
    assert [entry["text"] for entry in nbest["1"]] == [c.text for c in found["1"].best]
    for entries in nbest.values():
        shares = [entry["probability"] for entry in entries]
        # The sum of six shares rounds six times.
        assert sum(shares) == pytest.approx(1, abs=6 * 2**-53)
        assert (np.diff(shares) <= 0).all()
