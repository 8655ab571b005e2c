"""Best answers by comparing all spans; scores by published examples and by definition."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipes.finetune import scores as scoring
from recipes.finetune.config import SquadConfig
from recipes.finetune.data import Answer, Question, Row, SquadFeatures, make_squad_features
from recipes.finetune.scores import (
    exact_match,
    f1,
    normalize,
    predict_answers,
    score_answers,
    score_labels,
    write_answers,
    write_labels,
)

from ..wordpiece import make_tokenizer

CONTEXT = "The copper mine opened in 1878. In 1901, Café 9 did open the mine.\tThe mine closed."
LENGTH = 24


def question(name: str, *answers: str, context: str = "") -> Question:
    found = [Answer(text=text, answer_start=max(context.find(text), 0)) for text in answers]
    context = context or " ".join(answers)
    return Question(id=name, question="when did it open?", context=context, answers=found)


def make(*questions: Question) -> SquadFeatures:
    squad = SquadConfig(max_question_length=6)
    return make_squad_features(questions, make_tokenizer(), LENGTH, squad)


FEATURES = make(
    *(question(str(i), context=text) for i, text in enumerate((CONTEXT, CONTEXT[:31], "8" * 40)))
)


@pytest.mark.parametrize("longest", [1, 4, 100])
def test_answers_are_the_best_of_all_spans(longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "LONGEST", longest)
    shape = (len(FEATURES.windows), LENGTH, 2)
    logits = np.random.default_rng(longest).normal(size=shape).astype(np.float32)
    expected, nulls = {}, {}
    for (start, end), window in zip(logits.swapaxes(1, 2), FEATURES.windows, strict=True):
        asked = FEATURES.questions[window.question]
        nulls.setdefault(asked.id, []).append(float(start[0]) + float(end[0]))
        for i in range(len(window.offsets)):
            for j in range(i, min(i + longest, len(window.offsets))):
                text = asked.context[window.offsets[i, 0] : window.offsets[j, 1]]
                score = float(start[window.first + i]) + float(end[window.first + j])
                expected[asked.id] = max(expected.get(asked.id, (-np.inf, "")), (score, text))
    empty = make(question("one", context=" "))
    assert predict_answers(empty, logits[:1])["one"] == ("", 0.0)
    found = predict_answers(FEATURES, logits)
    assert list(found) == ["0", "1", "2"]
    assert len(FEATURES.windows) > 6
    for name, (score, text) in expected.items():
        assert found[name] == (text, min(nulls[name]) - score)


@pytest.mark.parametrize("version", ["v1.1", "v2.0"])
def test_a_model_that_has_learned_its_labels_is_right(version: str, tmp_path: Path) -> None:
    asked = [
        question(text, text, context=CONTEXT) for text in ("1901", "closed", "The copper mine")
    ]
    if version == "v2.0":
        asked.append(question("none", context=CONTEXT))
    made = make(*asked)
    (batch,) = made.records.batches(len(made.records))
    start, end = (np.eye(LENGTH)[batch[name]] for name in ("start", "end"))
    # A window with the answer outweighs those without, where [CLS] does.
    start[start[:, 0] == 0] *= 10
    start[[window.question == 3 for window in made.windows], 0] = 20.0
    found = predict_answers(made, np.stack([start, end], -1))
    write_answers(tmp_path, asked, found)
    texts = json.loads((tmp_path / "predictions.json").read_text("utf-8"))
    assert texts == {q.id: q.id if q.answers else "" for q in asked}
    report = score_answers(asked, found)
    if version == "v1.1":
        assert report == {"exact_match": 100.0, "f1": 100.0}
        assert not (tmp_path / "null_odds.json").exists()
    else:
        assert {report[name] for name in ("exact", "NoAns_f1", "HasAns_f1")} == {100.0}
        odds = json.loads((tmp_path / "null_odds.json").read_text("utf-8"))
        assert odds == {name: above for name, (_, above) in found.items()}


NORMAL = [
    ("The Main Building", "main building"),
    ("an a the", ""),
    ("theatre, Anthem", "theatre anthem"),  # articles are whole words
    ("a-b", "ab"),  # punctuation goes first, so "a" is no word here
    ("1878–1901", "1878–1901"),  # punctuation is that of ASCII
    ("the “a” team", "“ ” team"),  # ... and other marks end a word
]
# prediction, answer, exact match, F1 of v1.1, F1 of v2.0
PAIRS = [
    ("Broncos Denver", "Denver Broncos", 0, 1, 1),  # F1 has no order
    ('"duty"', "duty", 1, 1, 1),
    ("Y. pestis", "the mechanism by which Y. pestis was usually transmitted", 0, 0.4, 0.4),
    ("gold gold gold", "gold", 0, 0.5, 0.5),  # a word counts as often as it is
    ("", "gold", 0, 0, 0),
    ("the", "an", 1, 0, 1),  # no words on either side: where the versions differ
    ("gold", "", 0, 0, 0),
]


def test_exact_match_and_f1() -> None:
    assert [normalize(text) for text, _ in NORMAL] == [expected for _, expected in NORMAL]
    for prediction, answer, exact, v1, v2 in PAIRS:
        assert exact_match(prediction, answer) == exact
        # A division and two products round by 2**-53 each.
        assert f1(prediction, answer) == pytest.approx(v1, rel=2**-50)
        assert f1(prediction, answer, empty=1.0) == pytest.approx(v2, rel=2**-50)


def test_v1_takes_the_best_answer_and_counts_every_question() -> None:
    questions = [
        question("one", "Levi's Stadium", "Santa Clara, California"),
        question("two", "gold and black", "black"),
        question("three", "gold"),
        question("four", "the"),
    ]
    texts = ("Santa Clara California", "black and blue", "", "the")
    found = {q.id: (text, 1.0) for q, text in zip(questions, texts, strict=True)}
    # exact: 1, 0, 0, 1; F1: 1, 2/3 (of "gold and black"), 0, 0 (no words)
    assert score_answers(questions, found) == {
        "exact_match": 50.0,
        "f1": pytest.approx(100 * (1 + 2 / 3) / 4, rel=2**-50),
    }


MIXED = [
    question("name", "Denver Broncos"),
    question("place", "Levi's Stadium at Santa Clara", "Santa Clara"),
    question("gold"),
    question("ore"),
    question("number", "50"),
]
TEXTS = ("the Denver Broncos", "Santa Clara, California", "gold", "ore", "fifty")


def odds(*values: float) -> dict[str, tuple[str, float]]:
    return {q.id: (text, odd) for q, text, odd in zip(MIXED, TEXTS, values, strict=True)}


def test_reports_of_v2(tmp_path: Path) -> None:
    """Scores of the published script with threshold 0: null odds up to 0 count as an answer."""
    found = odds(-3.0, -1.0, 0.0, 5.0, -0.5)  # "name" is right, "place" has F1 0.8, "number" none
    expected = {"exact": 40.0, "f1": 56.0, "total": 5}
    expected |= {"HasAns_exact": 100 / 3, "HasAns_f1": 60.0, "HasAns_total": 3}
    expected |= {"NoAns_exact": 50.0, "NoAns_f1": 50.0, "NoAns_total": 2}
    assert score_answers(MIXED, found) == pytest.approx(expected, rel=2**-50)
    write_answers(tmp_path, MIXED, found)
    texts = json.loads((tmp_path / "predictions.json").read_text("utf-8"))
    assert list(texts.values()) == [*TEXTS[:3], "", TEXTS[4]]
    silent = score_answers(MIXED, odds(*[1.0] * 5))
    assert (silent["exact"], silent["HasAns_f1"], silent["NoAns_f1"]) == (40.0, 0.0, 100.0)
    assert "HasAns_exact" not in score_answers(MIXED[2:4], found)
    # "the" of the second question is passed over, since another of its answers has words.
    words = [question("one", "the"), question("two", "the", "gold"), question("none")]
    report = score_answers(words, {"one": ("", 0.0), "two": ("the", 0.0), "none": ("x", 1.0)})
    assert (report["HasAns_exact"], report["HasAns_total"]) == (50.0, 2)


# labels, predictions, classes, accuracy, F1 of label 1, macro F1, Matthews correlation
TABLES: list[tuple[Any, ...]] = [
    # TP 1, FP 1, FN 1, TN 1
    ([1, 1, 0, 0], [1, 0, 1, 0], 2, 0.5, 0.5, 0.5, 0.0),
    ([0, 1, 1], [1, 0, 0], 2, 0, 0, 0, -1),
    # TP 2, FP 0, FN 1, TN 1: F1 4/5 and 2/3, Matthews 2 / (2 * 3 * 1 * 2)^1/2
    ([1, 1, 1, 0], [1, 1, 0, 0], 2, 3 / 4, 4 / 5, 11 / 15, 1 / math.sqrt(3)),
    ([1, 1], [1, 1], 2, 1, 1, 1, 0),
    ([0, 0], [0, 0], 2, 1, 0, 1, 0),
    ([0, 1, 1, 1], [1, 1, 1, 1], 2, 3 / 4, 6 / 7, 3 / 7, 0),
    # F1 1, 2/3, 2/3; c 3, s 4, t (1, 2, 1), p (1, 1, 2): (12 - 5) / (10 * 10)^1/2
    ([0, 1, 1, 2], [0, 1, 2, 2], 3, 3 / 4, None, 7 / 9, 7 / 10),
    # ... of which label 2 is neither true nor predicted, and does not count
    ([0, 1, 1], [0, 1, 0], 3, 2 / 3, None, 2 / 3, 0.5),
]


def test_scores_of_labels() -> None:
    for labels, predicted, classes, accuracy, first, macro, matthews in TABLES:
        expected = {"accuracy": accuracy, "f1_macro": macro, "matthews": matthews}
        expected |= {} if first is None else {"f1": first}
        found = score_labels(np.array(predicted), np.array(labels), classes)
        # A correlation of 0 is the difference of products that round.
        assert found == pytest.approx(expected, rel=2**-50, abs=2**-52), (labels, predicted)


def test_the_file_of_labels(tmp_path: Path) -> None:
    rows = [Row("s", None, "no", line) for line in (2, 3, 5)]
    logits = np.array([[0.0, 1000.0], [np.log(3), 0.0], [2.0, 2.0]])
    write_labels(tmp_path, rows, logits, ("no", "yés"))
    first, second, third = json.loads((tmp_path / "predictions.json").read_text("utf-8"))
    assert first == {"line": 2, "label": "yés", "probability": 1.0}
    assert second == {"line": 3, "label": "no", "probability": pytest.approx(3 / 4, rel=2**-50)}
    assert third == {"line": 5, "label": "no", "probability": 0.5}
