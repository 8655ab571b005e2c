"""Scores are those of the scripts that SQuAD is published with, worked out by hand."""

from collections import Counter

import pytest
from hypothesis import given, settings, strategies as st

from recipes.errors import RecipeError
from recipes.finetune.config import SquadConfig
from recipes.finetune.squad_data import Answer, Question
from recipes.finetune.squad_predict import Prediction
from recipes.finetune.squad_score import (
    exact_match,
    f1,
    f1_v2,
    normalize,
    score_predictions,
    score_v1,
    score_v2,
)


def question(name: str, *answers: str) -> Question:
    return Question(name, "?", " ".join(answers), tuple(Answer(text, 0) for text in answers))


NORMAL = [
    ("The Main Building", "main building"),
    ("A  tale\tof\n an ant", "tale of ant"),
    ("an a the", ""),
    ("", ""),
    ("...", ""),
    ("theatre, Anthem", "theatre anthem"),  # articles are whole words
    ("a-b", "ab"),  # punctuation goes first, so "a" is no word here
    ("the-end", "theend"),
    ("U.S.A.", "usa"),
    ("$1,000.50", "100050"),
    ("It's 'fine'", "its fine"),
    ("1878–1901", "1878–1901"),  # punctuation is that of ASCII
    ("“quoted” …", "“quoted” …"),
    ("the “a” team", "“ ” team"),  # ... and other marks end a word
    ("ÉCOLE des Beaux\u00a0Arts", "école des beaux arts"),
    ("a\u0301", "\u0301"),  # an accent that stands by itself is no part of a word
    ("2 時間 21 分", "2 時間 21 分"),
]


@pytest.mark.parametrize(("text", "expected"), NORMAL)
def test_normalize(text: str, expected: str) -> None:
    assert normalize(text) == expected


# prediction, answer, exact match, F1 of v1.1, F1 of v2.0
PAIRS = [
    ("Denver Broncos", "Denver Broncos", 1, 1, 1),
    ("the denver broncos!", "Denver Broncos", 1, 1, 1),
    ("Broncos Denver", "Denver Broncos", 0, 1, 1),  # F1 has no order
    ("Carolina Panthers", "Denver Broncos", 0, 0, 0),
    ("1976", "1976", 1, 1, 1),
    ("2 時間 21 分", "2 時間", 0, 2 / 3, 2 / 3),
    ('"duty"', "duty", 1, 1, 1),
    ("Y. pestis", "the mechanism by which Y. pestis was usually transmitted", 0, 0.4, 0.4),
    ("dreadnought battleships, and ocean liners", "ocean liners", 0, 4 / 7, 4 / 7),
    ("gold gold gold", "gold", 0, 0.5, 0.5),  # a word counts as often as it is
    ("gold gold", "gold copper gold", 0, 0.8, 0.8),
    ("", "gold", 0, 0, 0),
    ("the", "gold", 0, 0, 0),
    ("the", "an", 1, 0, 1),  # no words on either side: where the versions differ
    ("", "", 1, 0, 1),
    ("gold", "", 0, 0, 0),
]


@pytest.mark.parametrize(("prediction", "answer", "exact", "v1", "v2"), PAIRS)
def test_known_answers(prediction: str, answer: str, exact: float, v1: float, v2: float) -> None:
    assert exact_match(prediction, answer) == exact
    # A division and two products round by 2**-53 each.
    assert f1(prediction, answer) == pytest.approx(v1, rel=2**-50)
    assert f1_v2(prediction, answer) == pytest.approx(v2, rel=2**-50)


WORDS = st.lists(st.sampled_from(["gold", "The", "ore,", "1878", "a"]), max_size=6).map(" ".join)


@given(WORDS, WORDS)
@settings(deadline=None)
def test_f1_is_the_dice_coefficient_of_the_words(one: str, two: str) -> None:
    left, right = (Counter(normalize(text).split()) for text in (one, two))
    size = left.total() + right.total()
    dice = 2 * sum(min(left[word], right[word]) for word in left) / size if size else 0.0
    assert f1(one, two) == pytest.approx(dice, rel=2**-50)
    assert f1(one, two) == pytest.approx(f1(two, one), rel=2**-50)


def test_v1_takes_the_best_answer_and_counts_every_question() -> None:
    questions = [
        question("one", "Santa Clara", "Levi's Stadium", "Santa Clara, California"),
        question("two", "gold and black", "black"),
        question("three", "gold"),
        question("four", "the"),
    ]
    predictions = {
        "one": "Santa Clara California",
        "two": "black and blue",
        "three": "",
        "four": "the",
    }
    # exact: 1, 0, 0, 1; F1: 1, 2/3 (of "gold and black"), 0, 0 (no words)
    assert score_v1(questions, predictions) == {
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
TEXTS = {
    "name": "the Denver Broncos",
    "place": "Santa Clara, California",
    "gold": "gold",
    "ore": "",
    "number": "fifty",
}
ODDS = {"name": -3.0, "place": -1.0, "gold": 2.0, "ore": 5.0, "number": 0.5}
BEST = {"best_exact": 60.0, "best_exact_thresh": -3.0, "best_f1": 76.0, "best_f1_thresh": -1.0}
# odds, threshold, and the script's report: "name" is right, "place" has F1 0.8, "number" is wrong
REPORTS = {
    "threshold 1": (
        ODDS,
        1.0,
        {"exact": 60.0, "f1": 76.0, "total": 5}
        | {"HasAns_exact": 100 / 3, "HasAns_f1": 60.0, "HasAns_total": 3}
        | {"NoAns_exact": 100.0, "NoAns_f1": 100.0, "NoAns_total": 2}
        | BEST,
    ),
    "no odds are above their own": (
        ODDS,
        2.0,
        {"exact": 40.0, "f1": 56.0, "total": 5}
        | {"HasAns_exact": 100 / 3, "HasAns_f1": 60.0, "HasAns_total": 3}
        | {"NoAns_exact": 50.0, "NoAns_f1": 50.0, "NoAns_total": 2}
        | BEST,
    ),
    "nothing is answered": (
        ODDS,
        -4.0,
        {"exact": 40.0, "f1": 40.0, "total": 5}
        | {"HasAns_exact": 0.0, "HasAns_f1": 0.0, "HasAns_total": 3}
        | {"NoAns_exact": 100.0, "NoAns_f1": 100.0, "NoAns_total": 2}
        | BEST,
    ),
}


@pytest.mark.parametrize("case", REPORTS)
def test_reports_of_v2(case: str) -> None:
    odds, threshold, report = REPORTS[case]
    assert score_v2(MIXED, TEXTS, odds, threshold) == pytest.approx(report, rel=2**-50)


def test_v2_leaves_out_a_group_that_has_no_questions() -> None:
    report = score_v2(MIXED[:2], TEXTS, ODDS, 1.0)
    assert "HasAns_exact" in report
    assert "NoAns_exact" not in report
    assert "HasAns_exact" not in score_v2(MIXED[2:4], TEXTS, ODDS, 1.0)


def test_v2_reads_an_answer_without_words_as_no_answer() -> None:
    only_article = [question("one", "the"), question("two", "the", "gold")]
    report = score_v2(only_article, {"one": "", "two": "the"}, {"one": 0.0, "two": 0.0}, 1.0)
    # "the" of the second question is passed over, since another of its answers has words.
    assert (report["exact"], report["HasAns_total"]) == (50.0, 2)


def test_best_threshold_of_the_script() -> None:
    nothing_right = {"one": "x", "two": "y"}
    both = [question("one", "gold"), question("two")]
    report = score_v2(both, nothing_right, {"one": -2.0, "two": -1.0}, 1.0)
    assert (report["best_exact"], report["best_exact_thresh"]) == (50.0, 0.0)
    # Equal odds: the question that stands first is answered, the other is not.
    for questions, best in ((both, (100.0, 3.0)), (both[::-1], (50.0, 0.0))):
        report = score_v2(questions, {"one": "gold", "two": "y"}, {"one": 3.0, "two": 3.0}, 1.0)
        assert (report["best_f1"], report["best_f1_thresh"]) == best


def test_the_version_decides_the_report() -> None:
    predictions = {name: Prediction(text, ODDS[name], ()) for name, text in TEXTS.items()}
    found = score_predictions(MIXED, predictions, SquadConfig(no_answer_threshold=1.0))
    assert found == pytest.approx(REPORTS["threshold 1"][2], rel=2**-50)
    answered = [q for q in MIXED if q.answers]
    assert score_predictions(answered, predictions, SquadConfig()).keys() == {"exact_match", "f1"}
    as_v2 = score_predictions(answered, predictions, SquadConfig(version="v2.0"))
    assert as_v2["HasAns_total"] == as_v2["total"] == 3
    with pytest.raises(RecipeError, match=r"squad\.version: .* under v1\.1; got none for 'gold'"):
        score_predictions(MIXED, predictions, SquadConfig(version="v1.1"))
