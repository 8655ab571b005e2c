"""Rows and questions of files become records; best answers and scores by definition."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import processors

from recipes.errors import RecipeError
from recipes.finetune import scores as scoring
from recipes.finetune.config import ClassificationConfig, DataConfig
from recipes.finetune.data import (
    Answer,
    Dataset,
    Question,
    Records,
    Row,
    SquadFeatures,
    load_classification,
    make_classification_records,
    make_squad_features,
    read_squad,
    with_answers,
)

from ..support import WORDS, make_tokenizer


def write(folder: Path, name: str, text: str | bytes) -> str:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8"))
    return str(path)


def load(train: str, validation: str | None = None, **columns: Any) -> Dataset:
    data = DataConfig(train=train, validation=validation or train)
    return load_classification(data, ClassificationConfig(**columns))


# name of the file, content, columns, and the texts, pairs, labels and last lines read
READ: list[tuple[str, str, dict[str, Any], list[tuple[Any, ...]]]] = [
    (
        "a.tsv",
        "1\tone\ttwo\r\n\r\n0\tthree\t\r\n",
        {"header": False, "text": 1, "pair": 2, "label": 0},
        [("one", "two", "1", 1), ("three", "", "0", 3)],
    ),
    (
        "a.CSV",
        '\ufeffid, sentence,label\n7,one,x\n8,"two\nmore ""so""",y\n',
        {},
        [("one", None, "x", 2), ('two\nmore "so"', None, "y", 4)],
    ),
    (
        "a.tsv",  # tabs and line feeds alone divide
        'sentence\tlabel\n"a\x0bb\u2028c\t a \nd"\tb\n',
        {},
        [('"a\x0bb\u2028c', None, "a", 2), ('d"', None, "b", 3)],
    ),
]


def test_rows(tmp_path: Path) -> None:
    for name, content, columns, rows in READ:
        found = load(write(tmp_path, name, content), **columns)
        assert found.train == found.validation == [Row(*row) for row in rows]


# labels of the rows, and the names in the order of the ids
LEARNED = [
    (["b", "a", "b"], ("a", "b")),
    (["10", "9", "-1"], ("-1", "9", "10")),
    (["10", "9", "none"], ("10", "9", "none")),
    (["01", "1"], ("01", "1")),
]


def test_labels(tmp_path: Path) -> None:
    for labels, names in LEARNED:
        text = "\n".join(["sentence,label", *(f"s,{x}" for x in labels)])
        path = write(tmp_path, "rows.csv", text)
        found = load(path)
        assert found.labels == names
        assert [names[i] for i in found.ids(found.train)] == labels
        data = DataConfig(train=path, validation=path)
        for known in (names[::-1], ("other", *names), ()):
            ordered = load_classification(data, ClassificationConfig(), known).labels
            assert ordered == (known if {*known} == {*names} else names)


# name of the file, content, columns, and what the message has to name
WRONG: list[tuple[str, str | bytes, dict[str, Any], str]] = [
    ("a.tsv", "sentence\tlabel\none\t0\n\ntwo\n", {}, r":4: expected 2 fields"),
    ("a.tsv", "text\tlabel\none\t0\n", {}, r":2: .*'sentence'.*; got {'text': 'one'"),
    ("a.tsv", "one\t0\n", {"header": False, "text": 0, "label": 2}, r":1: .* 2\); got {0: 'on"),
    ("a.csv", 'sentence,label\none,0\n"two,1\nthree,1\n', {}, r":4: .*unexpected end of data"),
    ("a.tsv", "sentence\tlabel\none\t \n", {}, r":2: expected .* label .* ' '"),
    ("a.txt", "", {}, r"ends in \.tsv or \.csv"),
    ("a.tsv", b"caf\xe9", {}, r"is not UTF-8 text"),
]


def test_wrong_files(tmp_path: Path) -> None:
    for name, content, columns, message in WRONG:
        with pytest.raises(RecipeError, match=rf"^data\.train: .*{message}"):
            load(write(tmp_path, name, content), **columns)
    for name, content in (("a.tsv", "sentence\tlabel\none\t0\n"), ("a.csv", "")):
        with pytest.raises(RecipeError, match=r"two labels or more in .*got (set\(|{'0'})"):
            load(write(tmp_path, name, content))
    train = write(tmp_path, "train.tsv", "sentence\tlabel\na\tyes\nb\tno\n")
    dev = write(tmp_path, "dev.tsv", "sentence\tlabel\na\tyes\nso\tperhaps\n")
    with pytest.raises(RecipeError, match=r"^data\.validation: .*:3: .*'no', 'yes'.*'perhaps'"):
        load(train, dev)
    dev = write(tmp_path, "dev.tsv", "sentence\tlabel\na\tyes\n")  # one label will do
    assert load(train, dev).validation == [Row("a", None, "yes", 2)]


SINGLE = [Row("the mine opened", None, "b", 2), Row("closed", None, "a", 3), Row("", None, "c", 4)]
PAIRS = [Row("the copper mine", "when did the mine open", "b", 1), Row("the mine", "", "a", 2)]
LABELS = ("a", "b", "c")


def records(rows=SINGLE, length: int = 6, tokenizer: Any = None, mark: bool = False) -> Records:
    data = Dataset(rows, rows, LABELS)
    return make_classification_records(data, rows, tokenizer or make_tokenizer(), length, mark)


def template(single: str, pair: str) -> processors.TemplateProcessing:
    special = [("[CLS]", 2), ("[SEP]", 3)]
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)


LAYOUTS = {
    "bert": make_tokenizer().post_processor,
    "roberta": processors.RobertaProcessing(("[SEP]", 3), ("[CLS]", 2)),
    "uneven": template("[CLS] $A [SEP]", "[CLS] $A:1 [SEP]:0 $B:2 [SEP]:3"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_records(layout: str) -> None:
    for rows, least in ((SINGLE, 3), (PAIRS, 5 + (layout == "roberta"))):
        for length in (16, 6):
            tokenizer = make_tokenizer()
            tokenizer.post_processor = LAYOUTS[layout]  # type: ignore[assignment]
            made = records(rows, length, tokenizer)
            assert tokenizer.padding is tokenizer.truncation is None  # as before
            assert made.arrays["segments"].dtype == np.int8
            assert {array.dtype for array in made[0].values()} == {np.dtype(np.int32)}
            tokenizer.enable_truncation(length)
            tokenizer.enable_padding(length=length)
            for record, row in zip(made, rows, strict=True):
                expected = tokenizer.encode(row.text, row.pair)
                assert record["ids"].tolist() == expected.ids
                assert record["segments"].tolist() == expected.type_ids
                assert record["mask"].tolist() == expected.attention_mask
                assert LABELS[record["label"]] == row.label
        tokenizer.no_truncation()
        records(rows, least, tokenizer)
        with pytest.raises(RecipeError, match=rf"sequence_length: .* at least {least}, .* got"):
            records(rows, least - 1, tokenizer)


def test_batches_and_digest() -> None:
    made = records()
    first, last = made.batches(2)
    assert (first["label"].tolist(), last["label"].tolist()) == ([1, 0], [2, 2])
    assert last["mask"].tolist() == [[1, 1, 0, 0, 0, 0]] * 2
    others = [
        records([SINGLE[1], *SINGLE[1:]]),
        records([Row("the mine opened", None, "c", 2), *SINGLE[1:]]),
        records(length=7),
        Records({name.replace("label", "start"): x for name, x in made.arrays.items()}),
    ]
    assert records().digest == made.digest
    assert len({one.digest for one in (made, *others)}) == 5


def test_what_two_texts_share_has_the_segment_of_the_first() -> None:
    pair = Row("did the copper mine open", "the mine opened", "a", 1)
    plain, marked = (records([pair], 14, mark=mark).arrays for mark in (False, True))
    # [CLS] did the copper mine open [SEP] the mine opened [SEP]
    assert plain["segments"][0].tolist() == [0] * 7 + [1] * 4 + [0] * 3
    assert marked["segments"][0].tolist() == [0] * 9 + [1] * 2 + [0] * 3
    np.testing.assert_array_equal(plain["ids"], marked["ids"])
    assert not records(SINGLE, mark=True).arrays["segments"].any()  # one text has nothing to share


STORY = "The mine opened in 1878. Ore came by the Søby line 🚂 until the mine closed."


def answer(text: str, start: int | None = None) -> dict[str, Any]:
    return {"text": text, "answer_start": STORY.find(text) if start is None else start}


def entry(name: str, *answers: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return {"id": name, "question": "When?", "answers": list(answers), **keys}


def squad(folder: Path, *questions: Any) -> str:
    tree = {"version": "1.1", "data": [{"paragraphs": [{"context": STORY, "qas": questions}]}]}
    return write(folder, "questions.json", json.dumps(tree))


def test_both_versions_are_read(tmp_path: Path) -> None:
    path = squad(
        tmp_path,
        entry("one", answer("1878"), answer("in 1878")),
        entry("two", is_impossible=True, plausible_answers=[answer("1878")]),
        # Positions count characters, so those past the train are still right.
        entry("three", answer("closed"), is_impossible=False),
    )
    one, two, three = read_squad(path)
    assert (one.id, one.question, one.context) == ("one", "When?", STORY)
    assert [x.answer_start for x in one.answers] == [19, 16]
    assert two.answers == []
    assert STORY[three.answers[0].answer_start :] == "closed."


ONE = entry("one", answer("1878"))
# questions of the file, or its content, and what the message has to name
WRONG_QUESTIONS: list[tuple[list[Any] | bytes, str]] = [
    ([ONE, entry("two", answer("1879", 19))], r"'two': expected '1879' at character 19 "),
    ([entry("one", answer(" ", 3))], r"data\.0.*qas\.0\.answers\.0\.text: .*; got ' '"),
    ([entry("one")], r"'one': expected is_impossible True, as it has 0 answers"),
    ([ONE, ONE], r"'one': expected unique ids"),
    ([entry("one", answer("1878", True))], r"valid integer; got True"),
    ([], r"expected questions with answers; got none"),
    ([entry("one", is_impossible=True)], r"expected questions with answers; got none"),
    (b'{"data": [\n{"para', r"Invalid JSON: EOF"),
    (b"", r"the file: Invalid JSON"),
    (b'{"data": "\xe9"}', r"is not UTF-8 text"),
]


def test_wrong_questions(tmp_path: Path) -> None:
    for questions, message in WRONG_QUESTIONS:
        broken = isinstance(questions, bytes)
        path = write(tmp_path, "q.json", questions) if broken else squad(tmp_path, *questions)
        with pytest.raises(RecipeError, match=rf"^data\.validation: .*\.json:? .*{message}"):
            read_squad(path, "data.validation")


CONTEXT = "The copper mine opened in 1878. In 1901, Café 9 did open the mine.\tThe mine closed."
TOKENIZER = make_tokenizer()


def ask(answer: str | None, text: str = "when did the mine open?", context: str = CONTEXT):
    answers = [] if answer is None else [Answer(text=answer, answer_start=context.index(answer))]
    return Question(id=f"{answer}", question=text, context=context, answers=answers)


def features(*questions: Question, length: int = 64) -> SquadFeatures:
    return make_squad_features(questions, TOKENIZER, length)


def labelled_texts(made: SquadFeatures) -> list[str | None]:
    """Return the text between the labels of each record; None if they are at [CLS]."""
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
    first, second = ask("1901").answers[0], ask("1878").answers[0]
    two = Question(id="two", question="when?", context=CONTEXT, answers=[first, second])
    dropped = ask("\x01", context="The mine \x01 opened")  # of which the tokenizer has nothing
    made = features(*map(ask, ANSWERS), ask(None), two, dropped)  # without an answer, at [CLS]
    assert labelled_texts(made) == [*ANSWERS.values(), None, "1901", None]


@pytest.mark.parametrize("length", [24, 10])
def test_windows_are_those_of_the_library(length: int) -> None:
    """Windows overlap by half, and long questions are cut."""
    texts = ["when did mine open", "when?"]
    made = features(*(ask("1901", text) for text in texts), length=length)
    encodings = []
    for number, text in enumerate(texts):
        reference = make_tokenizer()
        question = reference.encode(text, add_special_tokens=False)
        size = min(length // 3, len(question))
        stride = (length - 3 - size) // 2
        reference.enable_truncation(length, stride=stride, strategy="only_second")
        first = reference.encode(text[: question.offsets[size - 1][1]], CONTEXT)
        encodings += [(number, one) for one in (first, *first.overflowing)]
    assert len(made.records) > 3
    for record, window, (number, own) in zip(made.records, made.windows, encodings, strict=True):
        assert record["ids"][: len(own)].tolist() == own.ids
        assert record["segments"][: len(own)].tolist() == own.type_ids
        assert record["mask"].sum() == len(own)
        context = [i for i, part in enumerate(own.sequence_ids) if part == 1]
        assert (window.question, window.first) == (number, context[0])
        assert window.offsets.tolist() == [list(own.offsets[i]) for i in context]


def test_short_windows() -> None:
    with pytest.raises(RecipeError, match=r"sequence_length: .* 5, .* got 4;"):
        features(ask("1878"), length=4)
    made = features(ask("1878"), ask(None, context=" \t "), ask("mine", context="The mine"))
    assert [window.question for window in made.windows] == [0, 1, 2]
    assert made.windows[1].offsets.shape == (0, 2)
    assert made.records[1]["mask"].sum() == 9


@given(st.data())
@settings(deadline=None, max_examples=20)
def test_every_answer_is_in_some_window(data: st.DataObject) -> None:
    words = data.draw(st.lists(st.sampled_from(WORDS), min_size=3, max_size=30))
    first = data.draw(st.integers(0, len(words) - 1))
    text = " ".join(words[first : first + data.draw(st.integers(1, 3))])
    answer = Answer(text=text, answer_start=len(" ".join([*words[:first], ""])))
    question = Question(id="one", question="when?", context=" ".join(words), answers=[answer])
    # Windows of 8 tokens that share 4 hold every answer of 3; a part of one is no answer.
    texts = labelled_texts(features(question, length=13))
    assert set(texts) <= {None, text}
    assert text in texts


def test_windows_without_the_answer_are_thinned() -> None:
    made = features(ask("1878"), ask(None), ask("closed"), length=20)

    def found(source) -> tuple[list[Any], list[Any]]:
        """Return the records with an answer, and those without."""
        seen = [(int(r["start"]), int(r["end"]), r["ids"].tolist()) for r in source]
        return [r for r in seen if r[0]], [r for r in seen if not r[0]]

    held, without = found(made.records)
    for others, count in ((0.0, 0), (1.0, len(held)), (100.0, len(without))):
        thinned = with_answers(made.records, others, seed=0)
        assert found(thinned) == found(with_answers(made.records, others, seed=0))
        assert found(thinned)[0] == held
        rest = found(thinned)[1]
        assert len(rest) == count
        assert all(record in without for record in rest)


LENGTH = 24


def question(name: str, *answers: str, context: str = "") -> Question:
    found = [Answer(text=text, answer_start=max(context.find(text), 0)) for text in answers]
    context = context or " ".join(answers)
    return Question(id=name, question="when did it open?", context=context, answers=found)


FEATURES = features(
    *(question(str(i), context=text) for i, text in enumerate((CONTEXT, CONTEXT[:31], "8" * 40))),
    length=LENGTH,
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
    empty = features(question("one", context=" "), length=LENGTH)
    assert scoring.predict_answers(empty, logits[:1])["one"] == ("", 0.0)
    found = scoring.predict_answers(FEATURES, logits)
    assert list(found) == ["0", "1", "2"]
    assert len(FEATURES.windows) > 6
    for name, (score, text) in expected.items():
        assert found[name] == (text, min(nulls[name]) - score)


NORMAL = [
    ("The Main Building", "main building"),
    ("an a the", ""),
    ("theatre, Anthem", "theatre anthem"),  # articles are whole words
    ("a-b", "ab"),  # punctuation goes first, so "a" is no word here
    ("1878–1901", "1878–1901"),  # punctuation is that of ASCII
    ("the “a” team", "“ ” team"),  # ... and other marks end a word
]
# prediction, answer, exact match, F1 of v1.1, F1 of v2.0
MATCHES = [
    ("Broncos Denver", "Denver Broncos", 0, 1, 1),  # F1 has no order
    ('"duty"', "duty", 1, 1, 1),
    ("Y. pestis", "the mechanism by which Y. pestis was usually transmitted", 0, 0.4, 0.4),
    ("gold gold gold", "gold", 0, 0.5, 0.5),  # a word counts as often as it is
    ("", "gold", 0, 0, 0),
    ("the", "an", 1, 0, 1),  # no words on either side: where the versions differ
    ("gold", "", 0, 0, 0),
]


def test_exact_match_and_f1() -> None:
    assert [scoring.normalize(text) for text, _ in NORMAL] == [expected for _, expected in NORMAL]
    for prediction, answer, exact, v1, v2 in MATCHES:
        assert scoring.exact_match(prediction, answer) == exact
        # A division and two products round by 2**-53 each.
        assert scoring.f1(prediction, answer) == pytest.approx(v1, rel=2**-50)
        assert scoring.f1(prediction, answer, empty=1.0) == pytest.approx(v2, rel=2**-50)


def test_v1_takes_the_best_answer_and_counts_every_question(tmp_path: Path) -> None:
    questions = [
        question("one", "Levi's Stadium", "Santa Clara, California"),
        question("two", "gold and black", "black"),
        question("three", "gold"),
        question("four", "the"),
    ]
    texts = ("Santa Clara California", "black and blue", "", "the")
    found = {q.id: (text, 1.0) for q, text in zip(questions, texts, strict=True)}
    # exact: 1, 0, 0, 1; F1: 1, 2/3 (of "gold and black"), 0, 0 (no words)
    assert scoring.score_answers(questions, found) == {
        "exact_match": 50.0,
        "f1": pytest.approx(100 * (1 + 2 / 3) / 4, rel=2**-50),
    }
    scoring.write_answers(tmp_path, questions, found)
    written = json.loads((tmp_path / "predictions.json").read_text("utf-8"))
    assert written == {name: text for name, (text, _) in found.items()}
    assert not (tmp_path / "null_odds.json").exists()


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
    assert scoring.score_answers(MIXED, found) == pytest.approx(expected, rel=2**-50)
    scoring.write_answers(tmp_path, MIXED, found)
    texts = json.loads((tmp_path / "predictions.json").read_text("utf-8"))
    assert list(texts.values()) == [*TEXTS[:3], "", TEXTS[4]]
    above = json.loads((tmp_path / "null_odds.json").read_text("utf-8"))
    assert above == {name: odd for name, (_, odd) in found.items()}
    silent = scoring.score_answers(MIXED, odds(*[1.0] * 5))
    assert (silent["exact"], silent["HasAns_f1"], silent["NoAns_f1"]) == (40.0, 0.0, 100.0)
    assert "HasAns_exact" not in scoring.score_answers(MIXED[2:4], found)
    # "the" of the second question is passed over, since another of its answers has words.
    words = [question("one", "the"), question("two", "the", "gold"), question("none")]
    report = scoring.score_answers(
        words, {"one": ("", 0.0), "two": ("the", 0.0), "none": ("x", 1.0)}
    )
    assert (report["HasAns_exact"], report["HasAns_total"]) == (50.0, 2)


# labels, predictions, classes, accuracy, F1 of label 1, macro F1, Matthews correlation
TABLES: list[tuple[Any, ...]] = [
    # TP 2, FP 0, FN 1, TN 1: F1 4/5 and 2/3, Matthews 2 / (2 * 3 * 1 * 2)^1/2
    ([1, 1, 1, 0], [1, 1, 0, 0], 2, 3 / 4, 4 / 5, 11 / 15, 1 / math.sqrt(3)),
    ([1, 1], [1, 1], 2, 1, 1, 1, 0),
    # F1 1, 2/3, 2/3; c 3, s 4, t (1, 2, 1), p (1, 1, 2): (12 - 5) / (10 * 10)^1/2
    ([0, 1, 1, 2], [0, 1, 2, 2], 3, 3 / 4, None, 7 / 9, 7 / 10),
    # ... of which label 2 is neither true nor predicted, and does not count
    ([0, 1, 1], [0, 1, 0], 3, 2 / 3, None, 2 / 3, 0.5),
]


def test_scores_of_labels() -> None:
    for labels, predicted, classes, accuracy, first, macro, matthews in TABLES:
        expected = {"accuracy": accuracy, "f1_macro": macro, "matthews": matthews}
        expected |= {} if first is None else {"f1": first}
        found = scoring.score_labels(np.array(predicted), np.array(labels), classes)
        # A correlation of 0 is the difference of products that round.
        assert found == pytest.approx(expected, rel=2**-50, abs=2**-52), (labels, predicted)


def test_the_file_of_labels(tmp_path: Path) -> None:
    rows = [Row("s", None, "no", line) for line in (2, 3, 5)]
    logits = np.array([[0.0, 1000.0], [np.log(3), 0.0], [2.0, 2.0]])
    scoring.write_labels(tmp_path, rows, logits, ("no", "yés"))
    first, second, third = json.loads((tmp_path / "predictions.json").read_text("utf-8"))
    assert first == {"line": 2, "label": "yés", "probability": 1.0}
    assert second == {"line": 3, "label": "no", "probability": pytest.approx(3 / 4, rel=2**-50)}
    assert third == {"line": 5, "label": "no", "probability": 0.5}
