"""Rows of each format become records as the tokenizer makes them; scores are as defined."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from recipes.errors import RecipeError
from recipes.finetune.classification import (
    Dataset,
    Row,
    load_classification,
    make_classification_records,
    score_classification,
    write_labels,
)
from recipes.finetune.config import ClassificationConfig, DataConfig

from ..wordpiece import make_tokenizer

TRAIN = [("a fine day", "yes"), ('it is "so so"', "no"), ("rain , again", "no")]
VALIDATION = [("a fine morning", "yes")]


def write(folder: Path, name: str, text: str | bytes) -> str:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8"))
    return str(path)


def load(train: str, validation: str | None = None, kind: Any = None, **columns: Any):
    data = DataConfig(train=train, validation=validation or train, format=kind)
    return load_classification(data, ClassificationConfig(**columns))


def as_tsv(rows: list[tuple[str, str]]) -> str:
    return "sentence\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in rows)


def as_csv(rows: list[tuple[str, str]]) -> str:
    quoted = "".join('"{}",{}\r\n'.format(text.replace('"', '""'), label) for text, label in rows)
    return "sentence,label\r\n" + quoted


def as_jsonl(rows: list[tuple[str, str]]) -> str:
    return "".join(
        json.dumps({"label": label, "sentence": text, "other": 1}) + "\n" for text, label in rows
    )


FORMATS = {"tsv": (as_tsv, 2), "csv": (as_csv, 2), "jsonl": (as_jsonl, 1)}


@pytest.mark.parametrize("kind", FORMATS)
def test_formats(tmp_path: Path, kind: str) -> None:
    encode, line = FORMATS[kind]
    train = write(tmp_path, f"train.{kind}", encode(TRAIN))
    validation = write(tmp_path, f"dev.{kind.upper()}", encode(VALIDATION))
    found = load(train, validation)
    assert found.labels == ("no", "yes")
    assert found.train == [
        Row(text, None, label, number) for number, (text, label) in enumerate(TRAIN, line)
    ]
    assert found.validation == [Row("a fine morning", None, "yes", line)]
    renamed = write(tmp_path, "train.txt", encode(TRAIN))
    assert load(renamed, kind=kind).train == found.train


# name of the file, content, columns, and the texts, pairs, labels and lines read
READ: dict[str, tuple[str, str, dict[str, Any], list[tuple[Any, ...]]]] = {
    "pairs by position": (
        "a.tsv",
        "1\tone\ttwo\r\n\r\n0\tthree\t\r\n",
        {"header": False, "text": 1, "pair": 2, "label": 0},
        [("one", "two", "1", 1), ("three", "", "0", 3)],
    ),
    "positions and names": (
        "a.csv",
        "\ufeffid, sentence,label\n7,one,x\n8,two,y\n",
        {"label": 2},
        [("one", None, "x", 2), ("two", None, "y", 3)],
    ),
    "fields that span lines": (
        "a.csv",
        'sentence,label\n"one\nmore",a\n"two",b\n',
        {},
        [("one\nmore", None, "a", 2), ("two", None, "b", 4)],
    ),
    "tabs and line feeds alone": (
        "a.tsv",
        'sentence\tlabel\n"a\x0bb\u2028c\ta\nd"\tb\n',
        {},
        [('"a\x0bb\u2028c', None, "a", 2), ('d"', None, "b", 3)],
    ),
}


@pytest.mark.parametrize("case", READ)
def test_rows(tmp_path: Path, case: str) -> None:
    name, content, columns, rows = READ[case]
    assert load(write(tmp_path, name, content), **columns).train == [Row(*row) for row in rows]


# labels of the rows, and the names in the order of the ids
LEARNED = [
    (["b", "a", "b"], ("a", "b")),
    (["10", "9", "-1"], ("-1", "9", "10")),
    (["10", "9", "none"], ("10", "9", "none")),
    (["01", "1"], ("01", "1")),
    ([" a ", "b"], ("a", "b")),
    ([3, 1, 2], ("1", "2", "3")),
]


@pytest.mark.parametrize(("labels", "names"), LEARNED)
def test_labels_of_the_training_file(
    tmp_path: Path, labels: list[Any], names: tuple[str, ...]
) -> None:
    lines = "".join(json.dumps({"sentence": "s", "label": label}) + "\n" for label in labels)
    assert load(write(tmp_path, "rows.jsonl", lines)).labels == names


def test_labels_that_are_known_or_listed(tmp_path: Path) -> None:
    path = write(tmp_path, "rows.tsv", as_tsv(TRAIN))
    data = DataConfig(train=path, validation=path)
    learned = load(path).labels
    for known in (learned[::-1], learned, ("other", *learned), ()):
        found = load_classification(data, ClassificationConfig(), known).labels
        assert found == (known if set(known) == set(learned) else learned)
    found = load(path, labels=["yes", "perhaps", "no"])
    assert found.labels == ("yes", "perhaps", "no")
    assert found.ids(found.train).tolist() == [0, 2, 2]


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@given(st.lists(st.tuples(TEXT, st.sampled_from(["0", "1"])), min_size=1, max_size=5))
@settings(deadline=None, max_examples=10)
def test_any_text_survives_csv(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]]
) -> None:
    path = tmp_path_factory.mktemp("csv") / "rows.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("sentence", "label"), *rows])
    found = load(str(path), labels=["0", "1"])
    assert [(row.text, row.label) for row in found.train] == rows


TABLE, OBJECT = "sentence\tlabel\none\t0\n", '{"sentence": "s", "label": 0}\n'
BARE: dict[str, Any] = {"header": False, "text": 0, "label": 2}
# name of the file, content, columns, and what the message has to say
WRONG: list[tuple[str, str | bytes, dict[str, Any], str]] = [
    ("a.tsv", "sentence\tlabel\none\t0\n\ntwo\n", {}, r":4: expected 2 fields, .*; got 1"),
    ("a.csv", "sentence,label\none, two,0\n", {}, r":2: .*; got 3"),
    (
        "a.tsv",
        "text\tlabel\none\t0\n",
        {},
        r":2: .*'sentence'; got only 'text', 'label', 0, 1",
    ),
    (
        "a.tsv",
        "one\t0\n",
        {"header": False, "text": 0, "label": 2},
        r":1: .*column 2; got only 0, 1",
    ),
    (
        "a.tsv",
        "one\t0\n",
        {"header": False},
        r"'sentence'; got only 0, 1; .* give positions",
    ),
    ("a.csv", 'sentence,label\none,0\n"two"x,1\n', {}, r":3: not a row of CSV: .*; correct"),
    ("a.csv", 'sentence,label\none,0\n"two,1\nthree,1\n', {}, r":3: .* unexpected end of data"),
    ("a.jsonl", OBJECT + '{"s\n', {}, r":2: malformed J"),
    ("a.jsonl", "[1, 2]\n", {}, r":1: expected an object; got \[1, 2\]"),
    (
        "a.jsonl",
        '\n{"sentence": "s"}\n',
        {},
        r":2: .* column 'label'; got only 'sentence'",
    ),
    (
        "a.jsonl",
        '{"sentence": "s", "label": 0}\n',
        {"text": 0},
        r"column 0; got only 'sentence', 'l",
    ),
    ("a.jsonl", '{"sentence": 7, "label": 0}\n', {}, r":1: expected text as 'sentence'; got 7"),
    (
        "a.jsonl",
        '{"sentence": "s", "label": 0, "b": []}\n',
        {"pair": "b"},
        r"text as 'b'; got \[\]",
    ),
    ("a.jsonl", '{"sentence": "s", "label": 0.5}\n', {}, r"whole number as 'label'; got 0\.5"),
    ("a.jsonl", '{"sentence": "s", "label": true}\n', {}, r"got True"),
    ("a.tsv", "sentence\tlabel\none\t \n", {}, r":2: expected a name .* got ' '"),
    (
        "a.tsv",
        TABLE + "two\t2\n",
        {"labels": ["0", "1"]},
        r":3: .* label out of 0, 1; got '2'",
    ),
    ("a.tsv", TABLE, {}, r"at least two labels; got only '0'"),
    ("a.tsv", "sentence\tlabel\n", {}, r"expected rows; got none"),
    ("a.jsonl", "", {}, r"expected rows; got none"),
    ("a.txt", "", {}, r"expected a file that ends in \.tsv, \.csv or \.jsonl; got"),
    ("a.tsv", b"caf\xe9", {}, r"is not UTF-8 text: .* byte 0xe9 in position 3"),
]


@pytest.mark.parametrize(("name", "content", "columns", "message"), WRONG)
def test_a_wrong_file(
    name: str, content: str | bytes, columns: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=rf"^data\.train: .*{message}") as caught:
        load(write(tmp_path, name, content), **columns)
    assert caught.value.exit_code == 2


def test_a_label_that_training_does_not_have(tmp_path: Path) -> None:
    train = write(tmp_path, "train.tsv", as_tsv(TRAIN))
    validation = write(tmp_path, "dev.tsv", as_tsv([*VALIDATION, ("so", "perhaps")]))
    with pytest.raises(RecipeError, match=r"^data\.validation: .*dev\.tsv:3: .* out of no, yes; g"):
        load(train, validation)


SINGLE = [Row("the mine opened", None, "b", 2), Row("closed", None, "a", 3), Row("", None, "c", 4)]
PAIRS = [Row("the copper mine", "when did the mine open", "b", 1), Row("the mine", "", "a", 2)]
LABELS = ("a", "b", "c")


@pytest.mark.parametrize("rows", [SINGLE, PAIRS], ids=["single", "pairs"])
@pytest.mark.parametrize("length", [16, 6])
def test_records(rows: list[Row], length: int) -> None:
    tokenizer = make_tokenizer()
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length)
    data = Dataset(rows, rows, LABELS)
    made = make_classification_records(data, rows, make_tokenizer(), sequence_length=length)
    assert len(made) == len(rows)
    for record, row in zip(made, rows, strict=True):
        expected = tokenizer.encode(row.text, row.pair)
        assert record["ids"].tolist() == expected.ids
        assert record["segments"].tolist() == expected.type_ids
        assert record["mask"].tolist() == expected.attention_mask
        assert LABELS[record["label"]] == row.label


@pytest.mark.parametrize(("rows", "least"), [(SINGLE, 3), (PAIRS, 5)])
def test_room_for_the_texts(rows: list[Row], least: int) -> None:
    data = Dataset(rows, rows, LABELS)
    make_classification_records(data, rows, make_tokenizer(), sequence_length=least)
    with pytest.raises(RecipeError, match=rf"data\.sequence_length: .* at least {least}, .* got"):
        make_classification_records(data, rows, make_tokenizer(), sequence_length=least - 1)


# labels, predictions, classes, accuracy, F1 of label 1, macro F1, Matthews correlation
TABLES = {
    # TP 1, FP 1, FN 1, TN 1
    "chance": ([1, 1, 0, 0], [1, 0, 1, 0], 2, 0.5, 0.5, 0.5, 0.0),
    "wrong": ([0, 1, 1], [1, 0, 0], 2, 0, 0, 0, -1),
    # TP 2, FP 0, FN 1, TN 1: F1 4/5 and 2/3, Matthews 2 / (2 * 3 * 1 * 2)^1/2
    "mixed": ([1, 1, 1, 0], [1, 1, 0, 0], 2, 3 / 4, 4 / 5, 11 / 15, 1 / math.sqrt(3)),
    "one label, rightly": ([1, 1], [1, 1], 2, 1, 1, 1, 0),
    "the other label, rightly": ([0, 0], [0, 0], 2, 1, 0, 1, 0),
    "one prediction": ([0, 1, 1, 1], [1, 1, 1, 1], 2, 3 / 4, 6 / 7, 3 / 7, 0),
    # F1 1, 2/3, 2/3; c 3, s 4, t (1, 2, 1), p (1, 1, 2): (12 - 5) / (10 * 10)^1/2
    "three": ([0, 1, 1, 2], [0, 1, 2, 2], 3, 3 / 4, None, 7 / 9, 7 / 10),
    # ... of which label 2 is neither true nor predicted, and does not count
    "a label that is not there": ([0, 1, 1], [0, 1, 0], 3, 2 / 3, None, 2 / 3, 0.5),
}


def test_scores() -> None:
    for case, (labels, predicted, classes, accuracy, f1, macro, matthews) in TABLES.items():
        expected = {"accuracy": accuracy, "f1_macro": macro, "matthews": matthews}
        expected |= {} if f1 is None else {"f1": f1}
        found = score_classification(np.array(predicted), np.array(labels), classes)
        # A correlation of 0 is the difference of products that round.
        assert found == pytest.approx(expected, rel=2**-50, abs=2**-52), case


def test_the_file(tmp_path: Path) -> None:
    rows = [Row("s", None, "no", line) for line in (2, 3, 5)]
    logits = np.array([[0.0, 1000.0], [np.log(3), 0.0], [2.0, 2.0]])
    write_labels(tmp_path, rows, logits, ("no", "yés"))
    (path,) = tmp_path.iterdir()
    assert path.name == "predictions.json"
    first, second, third = json.loads(path.read_text(encoding="utf-8"))
    assert first == {"line": 2, "label": "yés", "probability": 1.0}
    assert second == {"line": 3, "label": "no", "probability": pytest.approx(3 / 4, rel=2**-50)}
    assert third == {"line": 5, "label": "no", "probability": 0.5}
