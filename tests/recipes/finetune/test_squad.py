"""SQuAD: questions from files, windows and labels, the best answers, and the published scores."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from recipes.errors import RecipeError
from recipes.finetune.config import SquadConfig
from recipes.finetune.squad import (
    Answer,
    Prediction,
    Question,
    SquadFeatures,
    exact_match,
    f1,
    make_squad_features,
    normalize,
    predict_answers,
    read_squad,
    score_predictions,
    version_of,
    with_answers,
    write_predictions,
)

from ..wordpiece import WORDS, make_tokenizer

STORY = "The mine opened in 1878. Ore came by the Søby line 🚂 until the mine closed."


def answer(text: str, start: int | None = None) -> dict[str, Any]:
    return {"text": text, "answer_start": STORY.find(text) if start is None else start}


def entry(name: str, *answers: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return {"id": name, "question": "When?", "answers": list(answers), **keys}


def write(folder: Path, *questions: Any, context: Any = STORY) -> Path:
    tree = {"version": "1.1", "data": [{"paragraphs": [{"context": context, "qas": questions}]}]}
    path = folder / "questions.json"
    path.write_text(json.dumps(tree), encoding="utf-8")
    return path


def test_both_versions_are_read(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        entry("one", answer("1878"), answer("in 1878")),
        entry("two", is_impossible=True, plausible_answers=[answer("1878")]),
        # Positions count characters, so those past the train are still right.
        entry("three", answer("closed"), is_impossible=False),
    )
    one, two, three = read_squad(path)
    assert one == Question("one", "When?", STORY, (Answer("1878", 19), Answer("in 1878", 16)))
    assert two.answers == ()
    assert STORY[three.answers[0].start :] == "closed."


ONE = entry("one", answer("1878"))
# questions of the file, and what the message has to say
WRONG: list[tuple[list[Any], str]] = [
    (
        [entry("one", answer("1879", 19))],
        r"data\[0\]\.paragraphs\[0\]: qas\[0\]\.answers\[0\]: expected '1879' at character 19 "
        r"of the context; got '1878'; the context does not have it",
    ),
    ([ONE, entry("two", answer("mine", 40))], r"qas\[1\]\.answers\[0\]: .*; it stands at 4; corr"),
    ([entry("one", answer("1878", 5000))], r"got ''; it stands at 19"),
    ([entry("one", answer("closed.", -7))], r"at character -7 .*; it stands at 68"),
    ([entry("one", answer(" ", 3))], r"answers\[0\]\.text: String should .*; got ' '"),
    ([entry("one")], r"qas\[0\]: expected an answer, because is_impossible is false; got 0"),
    ([ONE | {"is_impossible": True}], r"expected no answers, because is_impossible is true; got 1"),
    ([{"id": "one", "question": "When?"}], r"qas\[0\]\.answers: Field required"),
    ([ONE, ONE], r"expected different ids; got 'one' twice"),
    ([entry("one", answer("1878", True))], r"valid integer; got True"),
    ([ONE | {"question": " "}], r"question: String should"),
    ([], r"expected questions; got none"),
]


@pytest.mark.parametrize(("questions", "message"), WRONG)
def test_a_wrong_question(questions: list[Any], message: str, tmp_path: Path) -> None:
    path = write(tmp_path, *questions)
    with pytest.raises(RecipeError, match=rf"^data\.validation: .*questions\.json: .*{message}"):
        read_squad(path, "data.validation")


# content of the file, and what the message has to say
BROKEN: list[tuple[bytes, str]] = [
    (b'{"data": [\n{"para', r"Invalid JSON: EOF .* at line 2 column 6; correct"),
    (b"", r"the file: Invalid JSON: EOF while parsing a value at line 1 column 0"),
    (b"[" * 100_000, r"Invalid JSON: recursion limit exceeded"),
    (b"{}", r"data: Field required; got {}"),
    (b'{"data": "\xe9"}', r"is not UTF-8 text: .* byte 0xe9 in position 10"),
]


@pytest.mark.parametrize(("content", "message"), BROKEN)
def test_a_broken_file(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(RecipeError, match=rf"^data\.train: .*broken\.json:? .*{message}"):
        read_squad(path)
    with pytest.raises(RecipeError, match=r"data\.train: .*gone cannot be read: No such file"):
        read_squad(tmp_path / "gone")


CONTEXT = "The copper mine opened in 1878. In 1901, Café 9 did open the mine.\tThe mine closed."
TOKENIZER = make_tokenizer()


def ask(answer: str | None, text: str = "when did the mine open?", context: str = CONTEXT):
    answers = () if answer is None else (Answer(answer, context.index(answer)),)
    return Question(f"{answer}", text, context, answers)


def features(*questions: Question, **settings: Any) -> SquadFeatures:
    lengths = {"sequence_length": 64, "max_question_length": 8, "stride": 16}
    return make_squad_features(questions, TOKENIZER, **lengths | settings)


def labelled_texts(made: SquadFeatures) -> list[str | None]:
    """The text between the labels of each record; None where they are at [CLS]."""
    texts: list[str | None] = []
    for record, window in zip(made.records, made.windows, strict=True):
        start, end = int(record["start"]), int(record["end"])
        if start == 0:
            assert end == 0
            texts.append(None)
            continue
        first, last = window.offsets[start - window.first], window.offsets[end - window.first]
        texts.append(made.questions[window.question].context[first[0] : last[1]])
    return texts


# an answer as the file has it, and the text that its tokens cover
ANSWERS = {
    "1878": "1878",
    "The copper": "The copper",
    "closed.": "closed.",
    "Café": "Café",
    " in 1878. ": "in 1878.",
    "open the mine.\t": "open the mine.",
    "878": "878",
    "opper": "copper",
    "18": "18",
}


def test_labels_cover_the_first_answer() -> None:
    two = Question("one", "when?", CONTEXT, (Answer("1901", 35), Answer("1878", 26)))
    made = features(*map(ask, ANSWERS), ask(None), two)  # without an answer, at [CLS]
    assert labelled_texts(made) == [*ANSWERS.values(), None, "1901"]


# sequence_length, max_question_length, stride
WINDOWS = [(24, 8, 5), (24, 8, 13), (24, 8, 1), (20, 4, 7), (16, 3, 10)]


@pytest.mark.parametrize(("length", "question_length", "stride"), WINDOWS)
def test_windows_are_those_of_the_library(length: int, question_length: int, stride: int) -> None:
    text = "when did mine open" if question_length < 8 else "when did the mine open?"
    made = features(
        ask("1901", text),
        sequence_length=length,
        max_question_length=question_length,
        stride=stride,
    )
    reference = make_tokenizer()
    question = reference.encode(text, add_special_tokens=False)
    cut = text[: question.offsets[min(question_length, len(question)) - 1][1]]
    room = length - 3 - min(question_length, len(question))
    reference.enable_truncation(length, stride=room - stride, strategy="only_second")
    first = reference.encode(cut, CONTEXT)
    encodings = [first, *first.overflowing]
    assert len(made.records) == len(encodings) > 1
    for record, window, encoding in zip(made.records, made.windows, encodings, strict=True):
        count = len(encoding)
        assert record["ids"][:count].tolist() == encoding.ids
        assert record["segments"][:count].tolist() == encoding.type_ids
        assert record["mask"].sum() == count
        context = [i for i, part in enumerate(encoding.sequence_ids) if part == 1]
        assert window.first == context[0]
        assert window.offsets.tolist() == [list(encoding.offsets[i]) for i in context]


def test_a_stride_past_the_window_leaves_no_gap() -> None:
    made = features(ask(None), sequence_length=20, stride=1000)
    covered = np.concatenate([window.offsets for window in made.windows])
    whole = TOKENIZER.encode(CONTEXT, add_special_tokens=False).offsets
    assert covered.tolist() == [list(offsets) for offsets in whole]


def test_without_a_stride_windows_share_half() -> None:
    made = features(ask(None), sequence_length=20, stride=None)
    # [CLS], six tokens of the question and two [SEP] leave 11 of the context.
    assert [len(window.offsets) for window in made.windows[:-1]] == [11] * (len(made.windows) - 1)
    for window, following in itertools.pairwise(made.windows):
        assert window.offsets[6:].tolist() == following.offsets[:5].tolist()


def test_a_part_of_an_answer_is_no_answer() -> None:
    made = features(ask("opened in 1878"), sequence_length=18, stride=3)
    texts = labelled_texts(made)
    assert set(texts) == {None, "opened in 1878"}
    start = CONTEXT.index("opened")
    for window, text in zip(made.windows, texts, strict=True):
        whole = window.offsets[0, 0] <= start and window.offsets[-1, 1] >= start + 14
        assert whole == (text is not None)


def test_windows_say_whose_they_are() -> None:
    empty = ask(None, context=" \t ")
    made = features(ask("1878"), ask(None), empty, ask("mine", context="The mine"))
    owners = [window.question for window in made.windows]
    assert owners == sorted(owners)
    assert set(owners) == {0, 1, 2, 3}
    number = owners.index(2)
    assert made.windows[number].offsets.shape == (0, 2)
    assert made.records[number]["mask"].sum() == 9


@given(st.data())
@settings(deadline=None, max_examples=20)
def test_every_answer_is_in_some_window(data: st.DataObject) -> None:
    words = data.draw(st.lists(st.sampled_from(WORDS), min_size=3, max_size=30))
    first = data.draw(st.integers(0, len(words) - 1))
    count = data.draw(st.integers(1, 3))
    stride = data.draw(st.integers(1, 5))
    answer = Answer(" ".join(words[first : first + count]), len(" ".join([*words[:first], ""])))
    question = Question("one", "when?", " ".join(words), (answer,))
    # Windows of 8 tokens that share at least 3 hold every answer of 3.
    made = features(question, sequence_length=13, max_question_length=2, stride=stride)
    texts = labelled_texts(made)
    assert set(texts) <= {None, answer.text}
    assert answer.text in texts


def test_no_room_for_the_context() -> None:
    with pytest.raises(RecipeError, match=r"sequence_length: .* 8 tokens .* 3 special .* got 11;"):
        features(ask("1878"), sequence_length=11)


@pytest.mark.parametrize(("others", "count"), [(0.0, 0), (1.0, 2), (100.0, None)])
def test_windows_without_the_answer_are_thinned(others: float, count: int | None) -> None:
    made = features(
        ask("1878"), ask(None), ask("closed"), sequence_length=24, max_question_length=8, stride=4
    )

    def found(source):
        return [(r["ids"].tolist(), int(r["start"]), int(r["end"])) for r in source]

    every = found(made.records)
    held = [record for record in every if record[1]]
    without = [record for record in every if not record[1]]
    assert len(held) > 1
    thinned = found(with_answers(made.records, others, seed=0))
    expected = len(without) if count is None else round(others * len(held))
    assert [record for record in thinned if record[1]] == held
    assert len(thinned) == len(held) + expected
    assert all(record in without for record in thinned if not record[1])
    assert thinned == found(with_answers(made.records, others, seed=0))


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


@pytest.mark.parametrize(("seed", "longest"), [(0, 1), (1, 4), (2, 100)])
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
    write_predictions(tmp_path, found, 0.0)  # odds that are not above it give an answer
    again = json.loads((tmp_path / "predictions.json").read_text(encoding="utf-8"))
    assert again == {name: prediction.text for name, prediction in found.items()}
    assert nbest.keys() == found.keys()
    assert nbest["0"][0].keys() == {"text", "start_logit", "end_logit", "probability"}
    assert [entry["text"] for entry in nbest["1"]] == [c.text for c in found["1"].best]
    for entries in nbest.values():
        shares = [entry["probability"] for entry in entries]
        # The sum of six shares rounds six times.
        assert sum(shares) == pytest.approx(1, abs=6 * 2**-53)
        assert (np.diff(shares) <= 0).all()


def question(name: str, *answers: str) -> Question:
    return Question(name, "?", " ".join(answers), tuple(Answer(text, 0) for text in answers))


NORMAL = [
    ("The Main Building", "main building"),
    ("an a the", ""),
    ("", ""),
    ("theatre, Anthem", "theatre anthem"),  # articles are whole words
    ("a-b", "ab"),  # punctuation goes first, so "a" is no word here
    ("the-end", "theend"),
    ("U.S.A.", "usa"),
    ("1878–1901", "1878–1901"),  # punctuation is that of ASCII
    ("“quoted” …", "“quoted” …"),
    ("the “a” team", "“ ” team"),  # ... and other marks end a word
    ("a\u0301", "\u0301"),  # an accent that stands by itself is no part of a word
]


def test_normalize() -> None:
    assert [normalize(text) for text, _ in NORMAL] == [expected for _, expected in NORMAL]


# prediction, answer, exact match, F1 of v1.1, F1 of v2.0
PAIRS = [
    ("Denver Broncos", "Denver Broncos", 1, 1, 1),
    ("Broncos Denver", "Denver Broncos", 0, 1, 1),  # F1 has no order
    ('"duty"', "duty", 1, 1, 1),
    ("Y. pestis", "the mechanism by which Y. pestis was usually transmitted", 0, 0.4, 0.4),
    ("gold gold gold", "gold", 0, 0.5, 0.5),  # a word counts as often as it is
    ("", "gold", 0, 0, 0),
    ("the", "an", 1, 0, 1),  # no words on either side: where the versions differ
    ("", "", 1, 0, 1),
    ("gold", "", 0, 0, 0),
]


@pytest.mark.parametrize(("prediction", "answer", "exact", "v1", "v2"), PAIRS)
def test_known_answers(prediction: str, answer: str, exact: float, v1: float, v2: float) -> None:
    assert exact_match(prediction, answer) == exact
    # A division and two products round by 2**-53 each.
    assert f1(prediction, answer) == pytest.approx(v1, rel=2**-50)
    assert f1(prediction, answer, empty=1.0) == pytest.approx(v2, rel=2**-50)


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
    assert scored(questions, predictions) == {
        "exact_match": 50.0,
        "f1": pytest.approx(100 * (1 + 2 / 3) / 4, rel=2**-50),
    }


def scored(
    questions: list[Question],
    texts: dict[str, str],
    odds: dict[str, float] | None = None,
    threshold: float = 1.0,
) -> dict[str, float]:
    """Scores by v2.0 if there are odds, else by v1.1."""
    given = {q.id: Prediction(texts[q.id], (odds or {}).get(q.id, 0.0), ()) for q in questions}
    version = "v1.1" if odds is None else "v2.0"
    config = SquadConfig(version=version, no_answer_threshold=threshold)
    return score_predictions(questions, given, config)


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
    assert scored(MIXED, TEXTS, odds, threshold) == pytest.approx(report, rel=2**-50)


def test_v2_leaves_out_a_group_that_has_no_questions() -> None:
    report = scored(MIXED[:2], TEXTS, ODDS, 1.0)
    assert "HasAns_exact" in report
    assert "NoAns_exact" not in report
    assert "HasAns_exact" not in scored(MIXED[2:4], TEXTS, ODDS, 1.0)


def test_v2_reads_an_answer_without_words_as_no_answer() -> None:
    only_article = [question("one", "the"), question("two", "the", "gold")]
    report = scored(only_article, {"one": "", "two": "the"}, {"one": 0.0, "two": 0.0}, 1.0)
    # "the" of the second question is passed over, since another of its answers has words.
    assert (report["exact"], report["HasAns_total"]) == (50.0, 2)


def test_best_threshold_of_the_script() -> None:
    nothing_right = {"one": "x", "two": "y"}
    both = [question("one", "gold"), question("two")]
    report = scored(both, nothing_right, {"one": -2.0, "two": -1.0}, 1.0)
    assert (report["best_exact"], report["best_exact_thresh"]) == (50.0, 0.0)
    # Equal odds: the question that stands first is answered, the other is not.
    for questions, best in ((both, (100.0, 3.0)), (both[::-1], (50.0, 0.0))):
        report = scored(questions, {"one": "gold", "two": "y"}, {"one": 3.0, "two": 3.0}, 1.0)
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
