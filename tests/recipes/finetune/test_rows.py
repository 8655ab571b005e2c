"""Rows come out of each format as they were put in, and what is wrong with one is said."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from recipes.errors import RecipeError
from recipes.finetune.config import ClassificationConfig, DataConfig
from recipes.finetune.rows import Row, load_classification

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


def test_pairs_by_position_without_a_header(tmp_path: Path) -> None:
    path = write(tmp_path, "pairs.tsv", "1\tone\ttwo\r\n\r\n0\tthree\t\r\n")
    found = load(path, header=False, text=1, pair=2, label=0)
    assert found.train == [Row("one", "two", "1", 1), Row("three", "", "0", 3)]


def test_positions_and_names_of_one_header(tmp_path: Path) -> None:
    path = write(tmp_path, "pairs.csv", "\ufeffid, sentence,label\n7,one,x\n8,two,y\n")
    assert load(path, text="sentence", label=2).train == [
        Row("one", None, "x", 2),
        Row("two", None, "y", 3),
    ]


def test_fields_of_csv_that_span_lines(tmp_path: Path) -> None:
    path = write(tmp_path, "rows.csv", 'sentence,label\n"one\nmore",a\n"two",b\n')
    assert load(path).train == [Row("one\nmore", None, "a", 2), Row("two", None, "b", 4)]


def test_tsv_is_divided_by_tabs_and_line_feeds_alone(tmp_path: Path) -> None:
    path = write(tmp_path, "rows.tsv", 'sentence\tlabel\n"a\x0bb\u2028c\ta\nd"\tb\n')
    assert [row.text for row in load(path).train] == ['"a\x0bb\u2028c', 'd"']


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


def test_labels_are_in_the_order_of_a_model_that_has_them(tmp_path: Path) -> None:
    path = write(tmp_path, "rows.tsv", as_tsv(TRAIN))
    data = DataConfig(train=path, validation=path)
    learned = load(path).labels
    for known in (learned[::-1], learned, ("other", *learned), ()):
        found = load_classification(data, ClassificationConfig(), known).labels
        assert found == (known if set(known) == set(learned) else learned)


def test_listed_labels_keep_their_order(tmp_path: Path) -> None:
    path = write(tmp_path, "rows.tsv", as_tsv(TRAIN))
    found = load(path, labels=["yes", "perhaps", "no"])
    assert found.labels == ("yes", "perhaps", "no")
    assert found.ids(found.train).tolist() == [0, 2, 2]


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@given(st.lists(st.tuples(TEXT, st.sampled_from(["0", "1"])), min_size=1, max_size=5))
@settings(deadline=None, max_examples=50)
def test_any_text_survives_csv(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]]
) -> None:
    path = tmp_path_factory.mktemp("csv") / "rows.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("sentence", "label"), *rows])
    found = load(str(path), labels=["0", "1"])
    assert [(row.text, row.label) for row in found.train] == rows


# name of the file, content, columns, and what the message has to say
WRONG: dict[str, tuple[str, str | bytes, dict[str, Any], str]] = {
    "too few fields": (
        "a.tsv",
        "sentence\tlabel\none\t0\n\ntwo\n",
        {},
        r"a\.tsv:4: expected 2 fields, as the first line has; got 1; correct the row",
    ),
    "too many fields": ("a.csv", "sentence,label\none, two,0\n", {}, r"a\.csv:2: .*; got 3"),
    "a missing column": (
        "a.tsv",
        "text\tlabel\none\t0\n",
        {},
        r"a\.tsv:2: expected the column 'sentence'; got only 'text', 'label', 0, 1; correct .* "
        "'classification={header: false, text: 0, label: 1}'",
    ),
    "a position past the end": (
        "a.tsv",
        "one\t0\n",
        {"header": False, "text": 0, "label": 2},
        r"a\.tsv:1: expected the column 2; got only 0, 1; correct",
    ),
    "names without a header": (
        "a.tsv",
        "one\t0\n",
        {"header": False},
        r"expected the column 'sentence'; got only 0, 1; correct .* give positions",
    ),
    "a quotation mark": (
        "a.csv",
        'sentence,label\none,0\n"two"x,1\n',
        {},
        r"a\.csv:3: not a row of CSV: .*; correct the row",
    ),
    "a quotation that does not end": (
        "a.csv",
        'sentence,label\none,0\n"two,1\nthree,1\n',
        {},
        r"a\.csv:3: not a row of CSV: unexpected end of data",
    ),
    "not JSON": ("a.jsonl", '{"sentence": "s", "label": 0}\n{"s\n', {}, r"a\.jsonl:2: malformed J"),
    "no object": ("a.jsonl", "[1, 2]\n", {}, r"a\.jsonl:1: expected an object; got \[1, 2\]"),
    "a missing key": (
        "a.jsonl",
        '\n{"sentence": "s"}\n',
        {},
        r"a\.jsonl:2: expected the column 'label'; got only 'sentence'; correct the columns",
    ),
    "a position in JSON": (
        "a.jsonl",
        '{"sentence": "s", "label": 0}\n',
        {"text": 0},
        r"expected the column 0; got only 'sentence', 'label'",
    ),
    "a number for text": (
        "a.jsonl",
        '{"sentence": 7, "label": 0}\n',
        {},
        r"a\.jsonl:1: expected text as 'sentence'; got 7",
    ),
    "a list for a pair": (
        "a.jsonl",
        '{"sentence": "s", "label": 0, "more": []}\n',
        {"pair": "more"},
        r"expected text as 'more'; got \[\]",
    ),
    "a real label": (
        "a.jsonl",
        '{"sentence": "s", "label": 0.5}\n',
        {},
        r"a\.jsonl:1: expected a name or a whole number as 'label'; got 0\.5",
    ),
    "a truth for a label": ("a.jsonl", '{"sentence": "s", "label": true}\n', {}, r"got True"),
    "no label": ("a.tsv", "sentence\tlabel\none\t \n", {}, r"a\.tsv:2: expected a name .* got ' '"),
    "a label that is not listed": (
        "a.tsv",
        "sentence\tlabel\none\t0\ntwo\t2\n",
        {"labels": ["0", "1"]},
        r"a\.tsv:3: expected a label out of 0, 1; got '2'; correct the row, or list class",
    ),
    "one label": ("a.tsv", "sentence\tlabel\none\t0\n", {}, r"at least two labels; got only '0'"),
    "no rows": ("a.tsv", "sentence\tlabel\n", {}, r"a\.tsv: expected rows; got none"),
    "empty": ("a.jsonl", "", {}, r"a\.jsonl: expected rows; got none"),
    "another suffix": ("a.txt", "", {}, r"expected a file that ends in \.tsv, \.csv, \.jsonl; got"),
    "latin": ("a.tsv", b"caf\xe9", {}, r"is not UTF-8 text: .* byte 0xe9 in position 3"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file(tmp_path: Path, case: str) -> None:
    name, content, columns, message = WRONG[case]
    with pytest.raises(RecipeError, match=rf"^data\.train: .*{message}") as caught:
        load(write(tmp_path, name, content), **columns)
    assert caught.value.exit_code == 2


def test_a_label_that_training_does_not_have(tmp_path: Path) -> None:
    train = write(tmp_path, "train.tsv", as_tsv(TRAIN))
    validation = write(tmp_path, "dev.tsv", as_tsv([*VALIDATION, ("so", "perhaps")]))
    with pytest.raises(RecipeError, match=r"^data\.validation: .*dev\.tsv:3: .* out of no, yes; g"):
        load(train, validation)
