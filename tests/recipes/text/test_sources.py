"""Documents come from files, folders, globs, JSONL, Parquet and datasets, or the fault is named."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest
from datasets.table import InMemoryTable

from recipes.config import DataConfig
from recipes.errors import RecipeError
from recipes.text import _documents, documents

TEXTS = ["one\n", "zwei — ü", "", "three 🦊"]


def read(path: Path, **settings: Any) -> list[str]:
    return [text for text, _ in documents(DataConfig(path=str(path), **settings))]


def write_jsonl(folder: Path) -> Path:
    path = folder / "rows.jsonl"
    lines = [json.dumps({"id": i, "text": text}) for i, text in enumerate(TEXTS)]
    path.write_text("\n\n".join(lines), encoding="utf-8")
    return path


def write_parquet(folder: Path) -> Path:
    path = folder / "rows.parquet"
    pyarrow.parquet.write_table(pa.table({"text": TEXTS, "n": [1, 2, 3, 4]}), path)
    return path


def make_dataset() -> datasets.Dataset:
    # A fingerprint of our own: datasets would pickle pyarrow for it, which dill can not always.
    return datasets.Dataset(InMemoryTable(pa.table({"text": TEXTS})), fingerprint="texts")


def write_dataset(folder: Path) -> Path:
    make_dataset().save_to_disk(str(folder / "set"))
    return folder / "set"


def write_splits(folder: Path) -> Path:
    datasets.DatasetDict({"train": make_dataset()}).save_to_disk(str(folder / "splits"))
    return folder / "splits"


@pytest.fixture(autouse=True)
def without_bars() -> None:
    datasets.disable_progress_bars()


@pytest.mark.parametrize("write", [write_jsonl, write_parquet, write_dataset, write_splits])
def test_rows(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    assert read(write(tmp_path)) == [text for text in TEXTS if text]


def test_few_rows_at_a_time_are_all_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_documents, "_ROWS", 3)
    for write in (write_parquet, write_dataset):
        assert read(write(tmp_path)) == [text for text in TEXTS if text]


def test_globs_and_mixed_folders(tmp_path: Path) -> None:
    write_jsonl(tmp_path)
    (tmp_path / "a.txt").write_text("first", encoding="utf-8")
    assert read(tmp_path) == ["first", TEXTS[0], TEXTS[1], TEXTS[3]]
    assert read(tmp_path / "*.txt") == ["first"]
    assert read(tmp_path / "**" / "a.*") == ["first"]
    assert "".join(read(tmp_path / "*.jsonl", format="text")).startswith('{"id": 0')
    with pytest.raises(RecipeError, match=r"no file matches the glob pattern '.*\*\.csv'; change"):
        read(tmp_path / "*.csv")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("file", ["\na\nb\n\n \nc\n\nd"]),
        ("blank_line", ["\na\nb\n\n \n", "c\n\n", "d"]),
        ("line", ["\n", "a\n", "b\n", "\n", " \n", "c\n", "\n", "d"]),
    ],
)
def test_documents_of_a_text_file(tmp_path: Path, kind: str, expected: list[str]) -> None:
    (tmp_path / "a.txt").write_text(expected[0] if kind == "file" else "".join(expected), "utf-8")
    assert read(tmp_path / "a.txt", documents=kind) == expected


@pytest.mark.parametrize("text", ["ab\ncd\n\nefgh\n" * 9, "ü€🦊" * 20, "x" * 16, "é\n🦊🦊🦊🦊🦊\n"])
@pytest.mark.parametrize("most", [5, 8, 16])
def test_long_files_are_cut_without_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, most: int
) -> None:
    monkeypatch.setattr(_documents, "PIECE", most)
    (tmp_path / "long.txt").write_text(text, encoding="utf-8")
    pieces = read(tmp_path / "long.txt")
    assert "".join(pieces) == text
    assert len(pieces) > 1 or len(text.encode()) <= 2 * most
    # As many bytes again for the end of a line, and the rest of a character.
    assert max(len(piece.encode()) for piece in pieces) <= 2 * most + 3


def test_offsets_count_from_the_start_of_a_long_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_documents, "PIECE", 8)
    (tmp_path / "long.txt").write_bytes(b"0123456\n" * 3 + b"ab\xff")
    with pytest.raises(RecipeError, match=r"byte 0xff at offset 26"):
        read(tmp_path / "long.txt")


def test_only_what_is_asked_for_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "good"}\nnot JSON\n', encoding="utf-8")
    assert next(documents(DataConfig(path=str(path)))).text == "good"
    assert read(path, max_bytes=4) == ["good"]


# name and bytes of the file, settings, and what the message has to say
WRONG: list[tuple[str, bytes, dict[str, Any], str]] = [
    ("a.jsonl", b'{"text": "x"}\n{"text": ', {}, r"a\.jsonl line 2: malformed JSON, .*correct"),
    ("a.jsonl", b'\n["x"]', {}, r"line 2: expected an object with the field 'text'; got \['x'\]"),
    ("a.jsonl", b'{"body": "x"}', {}, r"line 1: .* the field 'text'; got fields body; set"),
    ("a.jsonl", b'{"text": null}', {}, r"line 1: expected text in the field 'text'; got None; "),
    ("a.jsonl", b'{"text": 3}', {}, r"line 1: expected text in the field 'text'; got 3; correct"),
    ("a.jsonl", b'{"text": "\\ud800"}', {}, r"line 1: .*lone surrogate at character 0, which is"),
    (
        "a.jsonl",
        b'{"text": "caf\xe9"}',
        {},
        r"line 1: .* in UTF-8: .* byte 0xe9 in position 13",
    ),
    ("a.jsonl", b"[" * 10**6, {}, r"line 1: malformed JSON"),
    ("a.jsonl", b"\n", {}, r"holds no text \(0 bytes\)"),
    ("a.parquet", b"PAR1 no", {}, r"a\.parquet cannot be read: .*; check the file and"),
    ("a.txt", b"x", {"format": "dataset"}, r"expected the folder of a Hugging Face dataset .*got"),
]


@pytest.mark.parametrize(("name", "raw", "settings", "message"), WRONG, ids=lambda v: str(v)[:20])
def test_wrong_rows(
    tmp_path: Path, name: str, raw: bytes, settings: dict[str, Any], message: str
) -> None:
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(RecipeError, match=message):
        read(tmp_path / name, **settings)


def test_wrong_tables(tmp_path: Path) -> None:
    path = write_parquet(tmp_path)
    with pytest.raises(RecipeError, match=r"row 1: .* the field 'body'; got fields text, n; "):
        read(path, text_key="body")
    with pytest.raises(RecipeError, match=r"row 1: expected text in the field 'n'; got 1; correct"):
        read(path, text_key="n")
    splits = write_splits(tmp_path)
    with pytest.raises(RecipeError, match=r"one of the splits train of .*; got 'dev'; change"):
        read(splits, split="dev")
    with pytest.raises(RecipeError, match=r"splits row 1: .* the field 'body'; got fields t"):
        read(splits, text_key="body")
    next(splits.rglob("*.arrow")).write_bytes(b"broken")
    with pytest.raises(RecipeError, match=r"splits cannot be read: .*; check the file"):
        read(splits)


@pytest.mark.parametrize(
    ("write", "missing"),
    [(write_parquet, "pyarrow.parquet"), (write_dataset, "datasets")],
)
def test_packages_that_are_not_installed_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], Path], missing: str
) -> None:
    path = write(tmp_path)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(RecipeError, match=r"needs the package .* pip install 'unitscale\[hf\]'"):
        read(path)
