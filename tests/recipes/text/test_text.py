"""Documents from files and data sets, tokenizers, and windows of tokens."""

import json
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import tokenizers
from datasets.table import InMemoryTable

from recipes import text as text_module, train as train_module
from recipes.config import DataConfig
from recipes.errors import RecipeError
from recipes.text import (
    BERT_TOKENS,
    ByteTokenizer,
    Corpus,
    SubwordTokenizer,
    Text,
    Tokenizer,
    documents,
    load_corpus,
    open_tokenizer,
    require_vocab,
    save_tokenizer,
    tokenize,
    train_tokenizer,
)

from ..conftest import TEXT
from ..runs import timeless
from ..support import bert_config, write_bert

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


@pytest.mark.slow
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


def test_documents_of_a_text_file(tmp_path: Path) -> None:
    for kind, expected in DOCUMENTS.items():
        (tmp_path / "a.txt").write_bytes("".join(expected).encode())
        assert read(tmp_path / "a.txt", documents=kind) == expected


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
    ("a.jsonl", b'{"text": "x"}\n{"text": ', {}, r"a\.jsonl .*line 2"),
    ("a.jsonl", b'\n["x"]', {}, r"row 1: .*'text'; got \['x'\]; set data\.text_key"),
    ("a.jsonl", b'{"text": 1}', {"text_key": "body"}, r"row 1: .*'body'; got None"),
    ("a.jsonl", b'\n{"text": "\\ud83d"}', {}, r"a\.jsonl .*line 2: .*surrogates"),
    ("a.parquet", b"PAR1 no", {}, r"a\.parquet cannot be read"),
    ("a.txt", b"x", {"format": "dataset"}, r"data\.path: .*a\.txt .*data\.format"),
    (
        "a.txt",
        b"0123456\n" * 9 + b"ab\xff",
        {},
        r"a\.txt is not UTF-8.*byte 0xff in position 74.*; convert it",
    ),
    ("a.txt", b"x", {"pattern": "*.csv"}, r"data\.path: .* has no \*\.csv"),
]


def test_wrong_files(tmp_path: Path) -> None:
    for name, raw, settings, message in WRONG:
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


def config_of(folder: Path, **tokenizer: Any) -> DataConfig:
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    return DataConfig.model_validate({"path": str(folder / "text.txt"), "tokenizer": tokenizer})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("text")


@pytest.fixture(scope="module")
def bpe(folder: Path) -> Tokenizer:
    return open_tokenizer(config_of(folder, kind="bpe", vocab=300))


@pytest.mark.parametrize("text", ["", "line 7: the quick", "naïve € 🦊\n\0  x\r\n"])
def test_bytes_and_bpe_go_through_any_text_unchanged(bpe: Tokenizer, text: str) -> None:
    assert bpe.decode(bpe.encode(text)) == text
    assert bpe.encode(text).dtype == np.uint16
    assert bpe.eos not in bpe.encode(text)
    assert ByteTokenizer().encode(text).tobytes() == text.encode()
    assert ByteTokenizer().decode(ByteTokenizer().encode(text)) == text
    assert ByteTokenizer().decode([0xE2, 0x82, 65]) == "\ufffdA"


def test_bpe_makes_text_shorter_and_keeps_to_its_ids(bpe: Tokenizer) -> None:
    assert (bpe.vocab, bpe.eos) == (300, 0)
    ids = bpe.encode(TEXT)
    assert ids.size < len(TEXT) / 1.5
    assert ids.max() < 300
    texts = ["one two", "", TEXT]
    for one, many in zip(texts, bpe.encode_many(texts), strict=True):
        np.testing.assert_array_equal(bpe.encode(one), many)


def test_wordpiece_is_berts(folder: Path) -> None:
    wordpiece = open_tokenizer(config_of(folder, kind="wordpiece", vocab=100, lowercase=True))
    assert isinstance(wordpiece, SubwordTokenizer)
    assert wordpiece.vocab <= 100
    assert [wordpiece.id(token) for token in BERT_TOKENS] == [0, 1, 2, 3, 4]
    assert wordpiece.eos == wordpiece.id("[SEP]")
    np.testing.assert_array_equal(wordpiece.encode("Lazy DOGS"), wordpiece.encode("lazy dogs"))
    assert wordpiece.decode(wordpiece.encode("The lazy dogs")) == "the lazy dogs"
    assert wordpiece.id("[UNK]") in wordpiece.encode("🦊")
    with pytest.raises(RecipeError, match=r"data\.tokenizer: .*<pad>"):
        wordpiece.id("<pad>")


@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
def test_the_same_text_gives_the_same_ids(kind: str, tmp_path: Path) -> None:
    """Train on random words, in which most pieces are equally frequent."""
    letters = np.random.default_rng(0).choice(list("abcdefghijkl 永,é"), 8000)
    (tmp_path / "text.txt").write_text("".join(letters), encoding="utf-8")
    settings = {"kind": kind, "vocab": 600, "lowercase": True}
    config = DataConfig.model_validate({"path": str(tmp_path / "text.txt"), "tokenizer": settings})
    first, *others = (train_tokenizer(config) for _ in range(3))
    assert [other.to_str() for other in others] == [first.to_str()] * 2
    assert len(first.get_vocab()) == 600
    assert not {"##,", "##永", " ", "## "} & set(first.get_vocab())


def test_a_run_keeps_its_tokenizer(folder: Path, tmp_path: Path, bpe: Tokenizer) -> None:
    save_tokenizer(bpe, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]
    as_file = config_of(folder, kind="file", path=str(tmp_path / "tokenizer.json"))
    assert as_file.tokenizer.ids == 300
    assert open_tokenizer(as_file).identity == bpe.identity
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(RecipeError, match=r"tokenizer\.path: .*tokenizer\.json cannot be read"):
        open_tokenizer(as_file)
    save_tokenizer(ByteTokenizer(), tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_a_file_says_of_padding_and_special_tokens(bpe: SubwordTokenizer) -> None:
    inner = tokenizers.Tokenizer.from_str(bpe.inner.to_str())
    inner.enable_truncation(3)
    inner.enable_padding(length=3)
    np.testing.assert_array_equal(SubwordTokenizer(inner).encode(TEXT), bpe.encode(TEXT))
    assert SubwordTokenizer(inner).start == ()
    end = inner.token_to_id("<|endoftext|>")
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A <|endoftext|>", special_tokens=[("<|endoftext|>", end)]
    )
    assert SubwordTokenizer(inner).start == (end,)
    # Gemma also has </s>, but as an HTML tag.
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"</s>": 0, "<eos>": 1, "a": 2}))
    assert SubwordTokenizer(inner).eos == 1


def test_tokenizers_that_do_not_fit(bpe: Tokenizer, tmp_path: Path) -> None:
    require_vocab(bpe, 300)
    with pytest.raises(RecipeError, match=r"data\.tokenizer: .*299 ids that the run has"):
        require_vocab(bpe, 299, "the run")
    for raw in (b"{}", b"not JSON", b"\xff"):
        (tmp_path / "tokenizer.json").write_bytes(raw)
        with pytest.raises(RecipeError, match=r"data\.tokenizer\.path: .*\.json"):
            SubwordTokenizer.read(tmp_path / "tokenizer.json")


SIZES = {"a": 400, "b": 900, "c": 250}
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


def test_documents_end_with_eos(config: DataConfig) -> None:
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
    batches, same, other = (take(small.training(seed), 6) for seed in (2**40 + 1, 2**40 + 1, 2))
    np.testing.assert_array_equal(batches, same)
    assert (batches != other).any()
    assert (np.diff(batches, axis=-1) == 1).all()
    epochs = batches[..., 0].reshape(3, 8)
    assert (np.sort(epochs) == range(8)).all()
    assert (epochs[0] != epochs[1:]).any()


def mixture_config(folder: Path, **settings: Any) -> DataConfig:
    """Make texts that consist of one letter each."""
    for name, size in SIZES.items():
        (folder / f"{name}.txt").write_text(name * size, encoding="utf-8")
    paths = (str(folder / f"{name}.txt") for name in SIZES)
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
        assert [int((batch[:, 0] == ord(name)).sum()) for name in SIZES] == [5, 2, 1]
    windows = np.concatenate(list(data.validation()))
    counts = {name: int((windows[:, 0] == ord(name)).sum()) for name in SIZES}
    # The last tenth: 40, 90 and 25 tokens, of which 39, 89 and 24 have a target; batches of 8.
    assert counts == {"a": 2, "b": 5, "c": 1}
    assert data.summary == "1,395 training tokens of 3 texts"
    assert corpus().summary == "100 training tokens"


def test_a_tokenizer_reads_all_texts_of_a_mixture(tmp_path: Path) -> None:
    config = mixture_config(tmp_path, tokenizer={"kind": "bpe", "vocab": 300}, max_bytes=100)
    assert list(documents(config)) == [name * 100 for name in SIZES]
    tokenizer = open_tokenizer(config)
    assert all(tokenizer.encode(name * 64).size < 40 for name in SIZES)


def test_a_digest_tells_texts_splits_and_weights_apart() -> None:
    """The digest is also the same as in earlier versions, so that their runs resume."""
    tokens = np.arange(50, dtype=np.uint8)
    one, two = Text(tokens[:40], tokens[40:]), Text(tokens[:41], tokens[41:], 2.0)
    three = Text(tokens[:40], tokens[39:49])
    texts = [one], [two], [three], [one, two], [one, two._replace(weight=1.0)]
    digests = [Corpus(part, 4, 2).digest for part in texts]
    assert len(set(digests)) == 5
    assert (digests[0], digests[3]) == ("d4acf856a11767b5", "ee9dc86507d3629f")


def test_the_size_of_tokens_is_that_of_their_text() -> None:
    words = MagicMock(decode=lambda ids: "".join("é" * (int(i) + 1) for i in ids))
    tokens = np.array([0, 1, 2, 3, 0, 0])  # of two bytes for each of their letters
    one, other = Text(tokens, tokens), Text(tokens, tokens[:2], 9.0)
    assert Corpus([one], 1, 1, words).token_size == pytest.approx(2 * 12 / 6)
    assert Corpus([one, other], 1, 1, words).token_size == pytest.approx((6 * 4 + 2 * 3) / 8)
    assert Corpus([one], 1, 1, ByteTokenizer()).token_size is None


def test_too_little_text(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    for size, part in ((0, "0 .* training"), (300, "30 .* validation")):
        path.write_text("x" * size, encoding="utf-8")
        config = DataConfig(path=str(path), sequence_length=64)
        with pytest.raises(RecipeError, match=rf"data\.sequence_length: .*{part} are too few"):
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
