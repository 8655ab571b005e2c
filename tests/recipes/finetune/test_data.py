"""Rows and questions of files become records with the layout of the tokenizer."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import processors

from recipes.errors import RecipeError
from recipes.finetune.config import ClassificationConfig, DataConfig, SquadConfig
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

from ..wordpiece import WORDS, make_tokenizer


def write(folder: Path, name: str, text: str | bytes) -> str:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8"))
    return str(path)


# Rows of classification


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
        path = write(
            tmp_path, "rows.csv", "\n".join(["sentence,label", *(f"s,{x}" for x in labels)])
        )
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
    ("a.csv", "sentence,label\none, two,0\n", {}, r":2: expected 2 fields"),
    ("a.tsv", "text\tlabel\none\t0\n", {}, r":2: .*'sentence'.*; got {'text': 'one'"),
    ("a.tsv", "one\t0\n", {"header": False, "text": 0, "label": 2}, r":1: .* 2\); got {0: 'on"),
    ("a.tsv", "one\t0\n", {"header": False}, r"'sentence'.*; got \{0: .* \(without"),
    ("a.csv", 'sentence,label\none,0\n"two"x,1\n', {}, r":3: "),
    ("a.csv", 'sentence,label\none,0\n"two,1\nthree,1\n', {}, r":4: .*unexpected end of data"),
    ("a.tsv", "sentence\tlabel\none\t \n", {}, r":2: expected .* label .* ' '"),
    ("a.tsv", "sentence\tlabel\none\t0\n", {"text": 0}, r"\(0, None, 'label'\); got {'sent"),
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


# Records


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
    for rows, least in ((SINGLE, 3), (PAIRS, 5 + (layout == "roberta") - (layout == "uneven"))):
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
        with pytest.raises(
            RecipeError, match=rf"data\.sequence_length: .* at least {least}, .* got"
        ):
            records(rows, least - 1, tokenizer)


def test_batches_and_digest() -> None:
    made = records()
    first, last = made.batches(2)
    assert first["label"].tolist() == [1, 0]
    assert last["label"].tolist() == [2, 2]
    assert last["mask"].tolist() == [[1, 1, 0, 0, 0, 0]] * 2
    (whole,) = made.batches(3)
    assert whole["label"].tolist() == [1, 0, 2]
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


# SQuAD


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
    ([ONE, entry("two", answer("mine", 40))], r"'two': .*character 40"),
    ([entry("one", answer("closed.", -7))], r"at character -7"),
    ([entry("one", answer(" ", 3))], r"data\.0.*qas\.0\.answers\.0\.text: .*; got ' '"),
    ([entry("one")], r"'one': expected answers or is_impossible; got 0, False"),
    ([ONE | {"is_impossible": True}], r"'one': expected answers or is_impossible; got 1, True"),
    ([{"id": "one", "question": "When?"}], r"qas\.0\.answers: Field required"),
    ([ONE, ONE], r"'one': expected unique ids"),
    ([entry("one", answer("1878", True))], r"valid integer; got True"),
    ([ONE | {"question": " "}], r"question: String should"),
    ([], r"expected questions; got none"),
    (b'{"data": [\n{"para', r"Invalid JSON: EOF"),
    (b"", r"the file: Invalid JSON"),
    (b"{}", r"data: Field required; got {}"),
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


def features(*questions: Question, length: int = 64, most: int = 8) -> SquadFeatures:
    return make_squad_features(questions, TOKENIZER, length, SquadConfig(max_question_length=most))


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


@pytest.mark.parametrize(("length", "most"), [(24, 8), (20, 4), (16, 3)])
def test_windows_are_those_of_the_library(length: int, most: int) -> None:
    """Windows overlap by half, and long questions are cut."""
    texts = ["when did mine open", "when?"]
    made = features(*(ask("1901", text) for text in texts), length=length, most=most)
    encodings = []
    for number, text in enumerate(texts):
        reference = make_tokenizer()
        question = reference.encode(text, add_special_tokens=False)
        size = min(most, len(question))
        room = length - 3 - size
        reference.enable_truncation(length, stride=room // 2, strategy="only_second")
        first = reference.encode(text[: question.offsets[size - 1][1]], CONTEXT)
        encodings += [(number, one) for one in (first, *first.overflowing)]
    assert len(made.records) == len(encodings) > 3
    for record, window, (number, encoding) in zip(
        made.records, made.windows, encodings, strict=True
    ):
        count = len(encoding)
        assert record["ids"][:count].tolist() == encoding.ids
        assert record["segments"][:count].tolist() == encoding.type_ids
        assert record["mask"].sum() == count
        context = [i for i, part in enumerate(encoding.sequence_ids) if part == 1]
        assert (window.question, window.first) == (number, context[0])
        assert window.offsets.tolist() == [list(encoding.offsets[i]) for i in context]


def test_short_windows() -> None:
    with pytest.raises(RecipeError, match=r"sequence_length: .* 12, .* got 11;"):
        features(ask("1878"), length=11)
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
    texts = labelled_texts(features(question, length=13, most=2))
    assert set(texts) <= {None, text}
    assert text in texts


def test_windows_without_the_answer_are_thinned() -> None:
    made = features(ask("1878"), ask(None), ask("closed"), length=20)

    def found(source):
        return [(r["ids"].tolist(), int(r["start"]), int(r["end"])) for r in source]

    every = found(made.records)
    held, without = ([r for r in every if bool(r[1]) == own] for own in (True, False))
    assert len(held) > 1
    for others, count in ((0.0, 0), (1.0, len(held)), (100.0, len(without))):
        thinned = found(with_answers(made.records, others, seed=0))
        assert [record for record in thinned if record[1]] == held
        rest = [record for record in thinned if not record[1]]
        assert len(rest) == count
        assert all(record in without for record in rest)
        assert thinned == found(with_answers(made.records, others, seed=0))
