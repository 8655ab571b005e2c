"""Documents from files, folders, globs, JSONL, Parquet and datasets, and errors."""

import json
import sys
import sysconfig
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest
from datasets.table import InMemoryTable

from recipes import text as text_module
from recipes.config import DataConfig
from recipes.errors import RecipeError
from recipes.text import documents

TEXTS = ["one\n", "zwei — ü", "", "three 🦊"]


def read(path: Path, **settings: Any) -> list[str]:
    return list(documents(DataConfig(path=str(path), **settings)))


def write(folder: Path) -> dict[str, Path]:
    """Write the texts as rows of each format."""
    datasets.disable_progress_bars()
    # A fingerprint of our own: datasets would pickle pyarrow for it, which dill can not always.
    table = pa.table({"text": TEXTS, "n": [1, 2, 3, 4]})
    rows = datasets.Dataset(InMemoryTable(table), fingerprint="texts")
    names = "rows.jsonl", "rows.parquet", "set", "splits"
    paths = {name: folder / "rows" / name for name in names}
    (folder / "rows").mkdir()
    lines = [json.dumps({"id": i, "text": text}) for i, text in enumerate(TEXTS)]
    paths["rows.jsonl"].write_text("\n\n".join(lines), encoding="utf-8")
    pyarrow.parquet.write_table(table, paths["rows.parquet"])
    rows.save_to_disk(str(paths["set"]))
    datasets.DatasetDict({"train": rows}).save_to_disk(str(paths["splits"]))
    return paths


def test_rows(tmp_path: Path) -> None:
    for path in write(tmp_path).values():
        assert read(path) == [text for text in TEXTS if text], path
        ended = documents(DataConfig(path=str(path)), "\n")
        assert list(ended) == [text + "\n" for text in TEXTS if text]


def test_the_default_is_the_standard_library() -> None:
    found = list(documents(DataConfig()))
    source = Path(sysconfig.get_paths()["stdlib"], "textwrap.py").read_text(encoding="utf-8")
    assert source in found
    assert sum(map(len, found)) > 2_000_000
    assert Path(pytest.__file__).read_text(encoding="utf-8") not in found


def test_folders_and_globs_are_read_in_order_without_hidden_files(tmp_path: Path) -> None:
    for name, text in {"b.txt": "3", "a/z.txt": "2", "a/b.txt": "1", ".git/x": "no"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "c.jsonl").write_text('{"text": "4"}', encoding="utf-8")
    assert read(tmp_path) == ["1", "2", "3", "4"]
    assert read(tmp_path, pattern="*.txt") == ["3"]
    assert read(tmp_path / "*.txt") == ["3"]
    assert read(tmp_path / "**" / "z.*") == ["2"]
    assert read(tmp_path / "*.jsonl", format="text") == ['{"text": "4"}']


DOCUMENTS = {
    "file": ["\na\r\nb\n\n \nc\n\n  d"],
    "blank_line": ["\na\r\nb\n\n \n", "c\n\n", "  d"],
    "line": ["\n", "a\r\n", "b\n", "\n", " \n", "c\n", "\n", "  d"],
}


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_documents_of_a_text_file(tmp_path: Path, kind: str) -> None:
    (tmp_path / "a.txt").write_bytes("".join(DOCUMENTS[kind]).encode())
    assert read(tmp_path / "a.txt", documents=kind) == DOCUMENTS[kind]


@pytest.mark.parametrize("text", ["ab\ncd\n\nefgh\n" * 9, "ü€🦊" * 20, "é\n🦊🦊🦊🦊🦊\n"])
def test_long_files_are_cut_without_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(text_module, "PIECE", most := 5)
    (tmp_path / "long.txt").write_text(text, encoding="utf-8")
    pieces = read(tmp_path / "long.txt")
    assert "".join(pieces) == text
    assert max(len(piece) for piece in pieces) <= 2 * most  # as many again for the end of a line
    assert all(piece.endswith("\n") or len(piece) == 2 * most for piece in pieces[:-1])


def test_max_bytes_cuts_at_a_character(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("ab€", encoding="utf-8")
    (tmp_path / "b").write_text("cd", encoding="utf-8")
    for most, expected in {4: ["ab"], 5: ["ab€"], 6: ["ab€", "c"], 99: ["ab€", "cd"]}.items():
        assert read(tmp_path, max_bytes=most) == expected
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "good"}\nnot JSON\n', encoding="utf-8")
    assert read(path, max_bytes=4) == ["good"]  # the rest is not read


# name and bytes of the file, settings, and what the message has to say
WRONG: list[tuple[str, bytes, dict[str, Any], str]] = [
    ("a.jsonl", b'{"text": "x"}\n{"text": ', {}, r"a\.jsonl line 2"),
    ("a.jsonl", b'\n["x"]', {}, r"row 1: .*'text'; got \['x'\]; set data\.text_key"),
    ("a.jsonl", b'{"text": 1}', {"text_key": "body"}, r"row 1: .*'body'; got None"),
    ("a.parquet", b"PAR1 no", {}, r"a\.parquet cannot be read"),
    ("a.txt", b"x", {"format": "dataset"}, r"data\.path: .*a\.txt .*data\.format"),
    ("a.txt", b"0123456\n" * 9 + b"ab\xff", {}, r"a\.txt .*utf-8.*byte 0xff in position 74"),
    ("a.txt", b"x", {"pattern": "*.csv"}, r"data\.path: .* has no \*\.csv"),
]


@pytest.mark.parametrize(("name", "raw", "settings", "message"), WRONG, ids=lambda v: str(v)[:20])
def test_wrong_files(
    tmp_path: Path, name: str, raw: bytes, settings: dict[str, Any], message: str
) -> None:
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(RecipeError, match=message):
        read(tmp_path if "pattern" in settings else tmp_path / name, **settings)


def test_wrong_tables_and_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = write(tmp_path)
    table, splits = paths["rows.parquet"], paths["splits"]
    cases: list[tuple[Path, dict[str, Any], str]] = [
        (table, {"text_key": "body"}, r"body.*data\.text_key"),
        (table, {"text_key": "n"}, r"row 1: expected .*'n'; got 1"),
        (splits, {"split": "dev"}, r"dev.*data\.split"),
        (splits, {"text_key": "body"}, r"body.*data\.text_key"),
        (tmp_path / "none.txt", {}, r"data\.path: .*none\.txt"),
    ]
    for path, settings, message in cases:
        with pytest.raises(RecipeError, match=message):
            read(path, **settings)
    for missing, path in {"pyarrow.parquet": table, "datasets": splits}.items():
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, missing, None)
            with pytest.raises(RecipeError, match=r"pip install 'unitscale\[hf\]'"):
                read(path)
