"""The token cache: made once, complete or not there, and made again when anything changed."""

import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipes.config import DataConfig
from recipes.errors import RecipeError
from recipes.text import (
    ByteTokenizer,
    _tokens,
    cache_folder,
    documents,
    open_tokenizer,
    tokenize,
)

from ..conftest import TEXT


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text(TEXT, encoding="utf-8")
    (tmp_path / "text" / "b.txt").write_text("naïve €", encoding="utf-8")
    rows = "".join(json.dumps({"text": f"row {i}"}) + "\n" for i in range(3))
    (tmp_path / "text" / "c.jsonl").write_text(rows, encoding="utf-8")
    return DataConfig(path=str(tmp_path / "text"), cache_dir=str(tmp_path / "cache"))


def folders(config: DataConfig) -> list[Path]:
    return sorted(path for path in cache_folder(config).iterdir() if path.is_dir())


def changed(config: DataConfig, **settings: Any) -> DataConfig:
    return DataConfig.model_validate({**config.model_dump(), **settings})


class Counting(ByteTokenizer):
    """Counts how often texts were encoded."""

    def __init__(self) -> None:
        self.calls = 0

    def encode_many(self, texts: Any) -> list[np.ndarray]:
        self.calls += 1
        return super().encode_many(texts)


def test_bytes_are_the_files_and_rows_are_lines(config: DataConfig) -> None:
    tokens = tokenize(config, ByteTokenizer())
    expected = TEXT + "naïve €" + "row 0\nrow 1\nrow 2\n"
    assert tokens.tobytes() == expected.encode()
    assert tokens.dtype == np.uint8
    assert isinstance(tokens, np.memmap)


@pytest.mark.parametrize("batch", [1, 10**7])
def test_documents_end_with_eos(
    config: DataConfig, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    monkeypatch.setattr(_tokens, "_BATCH", batch)
    config = changed(config, tokenizer={"kind": "bpe", "vocab": 300})
    tokenizer = open_tokenizer(config, lambda line: None)
    tokens = tokenize(config, tokenizer)
    assert tokens.dtype == np.uint16
    texts = [text for text, _ in documents(config)]
    ends = np.flatnonzero(tokens == tokenizer.eos)
    assert ends[-1] == tokens.size - 1
    parts = np.split(tokens, ends[:-1] + 1)
    assert [tokenizer.decode(part[:-1]) for part in parts] == texts


def test_a_text_is_tokenized_once(config: DataConfig) -> None:
    tokenizer = Counting()
    first = tokenize(config, tokenizer)
    second = tokenize(config, tokenizer)
    assert tokenizer.calls == 1
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize(
    "settings",
    [{"max_bytes": 30}, {"pattern": "*.txt"}, {"documents": "line"}, {"format": "text"}],
    ids=str,
)
def test_settings_are_part_of_the_key(config: DataConfig, settings: dict[str, Any]) -> None:
    before = tokenize(config, ByteTokenizer())
    after = tokenize(changed(config, **settings), ByteTokenizer())
    assert len(folders(config)) == 2
    assert before.size != after.size or settings == {"documents": "line"}


def test_how_the_text_is_batched_is_not(config: DataConfig) -> None:
    tokenize(config, ByteTokenizer())
    tokenize(changed(config, batch_size=3, sequence_length=7), ByteTokenizer())
    assert len(folders(config)) == 1


def test_an_edited_text_is_read_again(config: DataConfig) -> None:
    file = Path(str(config.path)) / "b.txt"
    tokenize(config, ByteTokenizer())
    facts = file.stat()
    file.write_text("NAÏVE €", encoding="utf-8")  # as many bytes, at the same time
    os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert "NAÏVE €".encode() in tokenize(config, ByteTokenizer()).tobytes()


def test_a_text_that_was_touched_or_moved_is_not(config: DataConfig) -> None:
    tokenizer, folder = Counting(), Path(str(config.path))
    tokenize(config, tokenizer)
    os.utime(folder / "b.txt")
    moved = folder.rename(folder.with_name("moved"))
    tokenize(changed(config, path=str(moved)), tokenizer)
    assert tokenizer.calls == 1


def cut(folder: Path) -> None:
    path = folder / "ids"
    path.write_bytes(path.read_bytes()[:-10])


def flip(folder: Path) -> None:
    path = folder / "ids"
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 1
    path.write_bytes(raw)


def empty(folder: Path) -> None:
    (folder / "ids").write_bytes(b"")


def unknown(folder: Path) -> None:
    (folder / "facts.json").write_text("[]", encoding="utf-8")


def remove(folder: Path) -> None:
    (folder / "facts.json").unlink()


@pytest.mark.parametrize("damage", [cut, flip, empty, unknown, remove])
def test_a_damaged_cache_is_built_again(config: DataConfig, damage: Any) -> None:
    said: list[str] = []
    expected = np.array(tokenize(config, ByteTokenizer(), said.append))
    assert not said
    (folder,) = folders(config)
    damage(folder)
    again = tokenize(config, ByteTokenizer(), said.append)
    np.testing.assert_array_equal(again, expected)
    assert len(said) == 1
    assert f"the cache {folder} is damaged (" in said[0]
    assert said[0].endswith("building it again")
    assert folders(config) == [folder]


def test_what_a_killed_process_left_is_removed(config: DataConfig) -> None:
    tokenize(config, ByteTokenizer())
    (folder,) = folders(config)
    shutil.move(folder, folder.with_name(f"{folder.name}.tmp"))
    cut(folder.with_name(f"{folder.name}.tmp"))
    assert tokenize(config, ByteTokenizer()).size > len(TEXT)
    assert folders(config) == [folder]


def test_a_failure_leaves_nothing(config: DataConfig) -> None:
    class Failing(ByteTokenizer):
        def encode_many(self, texts: Any) -> Iterator[np.ndarray]:
            raise OSError(28, "No space left on device")

    with pytest.raises(RecipeError, match=r"data\.cache_dir: cannot write .*No space left.*; free"):
        tokenize(config, Failing())
    assert not folders(config)


def test_those_who_come_at_once_share_one_build(config: DataConfig) -> None:
    tokenizer = Counting()
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: tokenize(config, tokenizer), range(4)))
    assert tokenizer.calls == 1
    for tokens in made:
        np.testing.assert_array_equal(tokens, made[0])


def test_a_cache_that_cannot_be_written(config: DataConfig, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RecipeError, match=r"data\.cache_dir: cannot write .*/file/.*set data\.cac"):
        tokenize(changed(config, cache_dir=str(tmp_path / "file" / "x")), ByteTokenizer())


def test_the_users_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder(DataConfig()) == tmp_path / "unitscale"
