"""Texts are tokenized once; each window comes once per epoch, in an order set by the seed."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipes import text as text_module, train as train_module
from recipes.config import DataConfig
from recipes.errors import RecipeError
from recipes.text import (
    ByteTokenizer,
    Corpus,
    Text,
    documents,
    load_corpus,
    open_tokenizer,
    tokenize,
)

from ..conftest import TEXT
from ..masked import bert_config, write_bert
from ..runs import timeless

TEXTS = {"a": 400, "b": 900, "c": 250}
WEIGHTS = (5.0, 2.0, 1.0)


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text(TEXT, encoding="utf-8")
    (tmp_path / "text" / "b.txt").write_text("naïve €", encoding="utf-8")
    rows = "".join(json.dumps({"text": f"row {i}"}) + "\n" for i in range(3))
    (tmp_path / "text" / "c.jsonl").write_text(rows, encoding="utf-8")
    return DataConfig(path=str(tmp_path / "text"), cache_dir=str(tmp_path / "cache"))


def changed(config: DataConfig, **settings: Any) -> DataConfig:
    return DataConfig.model_validate({**config.model_dump(), **settings})


class Counting(ByteTokenizer):
    """Count how often texts are encoded."""

    def __init__(self) -> None:
        self.calls = 0

    def encode_many(self, texts: Any) -> list[np.ndarray]:
        self.calls += 1
        return super().encode_many(texts)


def test_bytes_are_the_files_and_rows_are_lines(config: DataConfig) -> None:
    tokens = tokenize(config, ByteTokenizer())
    assert tokens.tobytes() == (TEXT + "naïve €" + "row 0\nrow 1\nrow 2\n").encode()
    assert tokens.dtype == np.uint8
    assert isinstance(tokens, np.memmap)


@pytest.mark.parametrize("batch", [1, 10**7])
def test_documents_end_with_eos(
    config: DataConfig, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    monkeypatch.setattr(text_module, "_BATCH", batch)
    config = changed(config, tokenizer={"kind": "bpe", "vocab": 300})
    tokenizer = open_tokenizer(config)
    tokens = tokenize(config, tokenizer)
    assert tokens.dtype == np.uint16
    ends = np.flatnonzero(tokens == tokenizer.eos)
    assert ends[-1] == tokens.size - 1
    parts = np.split(tokens, ends[:-1] + 1)
    assert [tokenizer.decode(part[:-1]) for part in parts] == list(documents(config))


def test_the_cache_is_keyed_by_the_bytes_that_are_read(config: DataConfig) -> None:
    tokenizer, folder = Counting(), Path(str(config.path))
    before = tokenize(config, tokenizer)
    np.testing.assert_array_equal(tokenize(config, tokenizer), before)
    tokenize(changed(config, batch_size=3, sequence_length=7), tokenizer)
    facts = (folder / "b.txt").stat()
    os.utime(folder / "b.txt")
    moved = changed(config, path=str(folder.rename(folder.with_name("moved"))))
    tokenize(moved, tokenizer)
    assert tokenizer.calls == 1
    for count, settings in enumerate(
        ({"max_bytes": 30}, {"pattern": "*.txt"}, {"documents": "line"}, {"format": "text"}), 2
    ):
        after = tokenize(changed(moved, **settings), tokenizer)
        assert tokenizer.calls == count
        assert after.size != before.size or "documents" in settings
    file = Path(str(moved.path)) / "b.txt"
    file.write_text("NAÏVE €", encoding="utf-8")  # as many bytes, at the same time
    os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert "NAÏVE €".encode() in tokenize(moved, tokenizer).tobytes()


def test_a_cache_is_complete_or_not_there(config: DataConfig, tmp_path: Path) -> None:
    class Failing(ByteTokenizer):
        def encode_many(self, texts: Any) -> Iterator[np.ndarray]:
            raise OSError(28, "No space left on device")

    cache = tmp_path / "cache"
    with pytest.raises(RecipeError, match=r"data\.cache_dir: cannot write .*No space left"):
        tokenize(config, Failing())
    assert {path.suffix for path in cache.iterdir()} == {".lock", ".tmp"}  # is written over
    tokenizer = Counting()
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: tokenize(config, tokenizer), range(4)))
    assert tokenizer.calls == 1
    for tokens in made:
        np.testing.assert_array_equal(tokens, made[0])
    assert sorted(path.suffix for path in cache.iterdir()) == ["", ".lock"]
    (tmp_path / "file").touch()
    with pytest.raises(RecipeError, match=r"data\.cache_dir: cannot write .*/file/"):
        tokenize(changed(config, cache_dir=str(tmp_path / "file" / "x")), ByteTokenizer())


def corpus(size: int = 120, *, length: int = 5, batch: int = 4) -> Corpus:
    tokens = np.arange(size, dtype=np.uint8)
    return Corpus([Text(tokens[:-20], tokens[-20:])], length, batch)


def take(batches: Any, count: int) -> np.ndarray:
    return np.stack([next(batches) for _ in range(count)])


def test_an_epoch_has_each_window_once_and_the_next_another_order() -> None:
    small = corpus(size=20 + 13, batch=4)  # 13 training tokens: 8 windows of 6
    batches = take(small.training(3), 6)
    assert batches.dtype == np.int32
    assert (np.diff(batches, axis=-1) == 1).all()
    epochs = batches[..., 0].reshape(3, 8)
    for epoch in epochs:
        assert sorted(epoch) == list(range(8))
    assert any((epochs[0] != epoch).any() for epoch in epochs[1:])


def test_the_seed_decides_the_order() -> None:
    one, same, other = (take(corpus().training(seed), 3) for seed in (2**40 + 1, 2**40 + 1, 2))
    np.testing.assert_array_equal(one, same)
    assert (one != other).any()


def mixture_config(folder: Path, **settings: Any) -> DataConfig:
    """Make texts that consist of one letter each."""
    for name, size in TEXTS.items():
        (folder / f"{name}.txt").write_text(name * size, encoding="utf-8")
    paths = (str(folder / f"{name}.txt") for name in TEXTS)
    keys = {"sequence_length": 16, "batch_size": 8, "cache_dir": str(folder / "cache")} | settings
    return DataConfig(mixture=dict(zip(paths, WEIGHTS, strict=True)), **keys)


def mixture(folder: Path) -> Corpus:
    return load_corpus(mixture_config(folder))


@pytest.mark.parametrize("make", [lambda _: corpus(), mixture], ids=["one", "mixture"])
def test_a_position_is_resumed_and_a_batch_shared(
    tmp_path: Path, make: Callable[[Path], Corpus]
) -> None:
    data = make(tmp_path)
    batches = data.training(0)
    whole = take(batches, 2)
    position = batches.get_state()
    expected = take(batches, 28)  # past the end of the epoch
    again = data.training(0)
    again.set_state(position)
    np.testing.assert_array_equal(take(again, 28), expected)
    shares = [take(data.training(0, process=i, processes=2), 2) for i in range(2)]
    together = np.concatenate(shares, axis=1)
    assert shares[0].shape[1] == data.batch_size // 2
    np.testing.assert_array_equal(np.sort(together[..., 0]), np.sort(whole[..., 0]))


def test_validation_is_the_end_of_the_text_without_overlap() -> None:
    made = corpus(batch=2)
    batches = list(made.validation())
    starts = np.concatenate(batches)[:, 0]
    assert set(starts) <= {100, 105, 110}
    assert len(set(starts)) == 2
    np.testing.assert_array_equal(np.concatenate(batches), np.concatenate(list(made.validation())))
    assert len(list(made.validation(1))) == 1
    assert next(corpus(batch=50).validation()).shape == (3, 6)


def test_each_batch_of_a_mixture_has_the_shares_that_were_asked_for(tmp_path: Path) -> None:
    data = mixture(tmp_path)
    for batch in take(data.training(0), 50):  # many epochs of every text
        assert (batch == batch[:, :1]).all()  # a window is of one text
        assert [int((batch[:, 0] == ord(name)).sum()) for name in TEXTS] == [5, 2, 1]
    windows = np.concatenate(list(data.validation()))
    counts = {name: int((windows[:, 0] == ord(name)).sum()) for name in TEXTS}
    # The last tenth: 40, 90 and 25 tokens, of which 39, 89 and 24 have a target; batches of 8.
    assert counts == {"a": 2, "b": 5, "c": 1}
    assert data.summary == "1,395 training tokens of 3 texts"
    assert corpus().summary == "100 training tokens"


def test_a_tokenizer_reads_all_texts_of_a_mixture(tmp_path: Path) -> None:
    config = mixture_config(tmp_path, tokenizer={"kind": "bpe", "vocab": 300}, max_bytes=100)
    assert list(documents(config)) == [name * 100 for name in TEXTS]
    tokenizer = open_tokenizer(config)
    assert all(tokenizer.encode(name * 64).size < 40 for name in TEXTS)
    # The first 100 bytes of each text are not those of all in one folder.
    trained = len(list((tmp_path / "cache").glob("*.json")))
    keys = {"pattern": "*.txt", "mixture": None, "path": str(tmp_path)}
    open_tokenizer(changed(config, **keys))
    assert len(list((tmp_path / "cache").glob("*.json"))) == trained + 1


def test_a_digest_tells_texts_splits_and_weights_apart() -> None:
    """The digest is also the same as in earlier versions, so that their runs resume."""
    tokens = np.arange(50, dtype=np.uint8)
    one, two = Text(tokens[:40], tokens[40:]), Text(tokens[:41], tokens[41:], 2.0)
    three = Text(tokens[:40], tokens[39:49])
    texts = [one], [two], [three], [one, two], [one, two._replace(weight=1.0)]
    digests = [Corpus(part, 4, 2).digest for part in texts]
    assert len(set(digests)) == 5
    assert (digests[0], digests[3]) == ("d4acf856a11767b5", "ee9dc86507d3629f")


class Words:
    """A tokenizer in which token i is a word of i + 1 letters of two bytes."""

    def decode(self, ids: Any) -> str:
        return "".join("é" * (i + 1) for i in np.asarray(ids))


def test_the_size_of_tokens_is_that_of_their_text() -> None:
    tokens, words = np.array([0, 1, 2, 3, 0, 0]), Words()
    one, other = Text(tokens, tokens), Text(tokens, tokens[:2], 9.0)

    def size(*texts: Text, tokenizer: Any = words) -> float | None:
        return Corpus(texts, 1, 1, tokenizer).token_size

    assert size(one) == pytest.approx(2 * 12 / 6)
    assert size(one, other) == pytest.approx((6 * 4 + 2 * 3) / 8)
    assert size(one, tokenizer=ByteTokenizer()) is None


@pytest.mark.parametrize(("size", "part"), [(0, "0 train"), (300, "30 validation")])
def test_too_little_text(tmp_path: Path, size: int, part: str) -> None:
    path = tmp_path / "short.txt"
    path.write_text("x" * size, encoding="utf-8")
    config = DataConfig(path=str(path), sequence_length=64)
    with pytest.raises(RecipeError, match=rf"data\.sequence_length: .*{part} .*short\.txt"):
        load_corpus(config)


@pytest.mark.slow
def test_a_run_goes_on_with_its_own_tokenizer_and_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = bert_config(write_bert(tmp_path))
    first = train_module.train(config)
    expected = timeless(first.folder)
    shutil.rmtree(first.folder / "checkpoints" / "6")
    shutil.rmtree(tmp_path / "cache")
    os.utime(tmp_path / "text.txt")
    monkeypatch.setattr(text_module, "train_tokenizer", lambda config: pytest.fail("trained again"))
    again = train_module.train(config)
    assert again == first
    assert timeless(first.folder) == expected
    (tmp_path / "text.txt").write_text((tmp_path / "text.txt").read_text("utf-8")[::-1], "utf-8")
    with pytest.raises(RecipeError, match=r"is not what .* was trained on"):
        train_module.train(config)
