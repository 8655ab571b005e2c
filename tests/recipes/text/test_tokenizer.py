"""Tokenizers: trained on the text, read from a file, and stored with the run."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from recipes import text as text_module
from recipes.config import DataConfig
from recipes.errors import RecipeError
from recipes.text import (
    BERT_TOKENS,
    ByteTokenizer,
    SubwordTokenizer,
    Tokenizer,
    open_tokenizer,
    require_vocab,
    save_tokenizer,
    train_tokenizer,
)

from ..conftest import TEXT


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


def test_bytes_that_are_no_character_are_shown() -> None:
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


def test_long_texts_are_encoded_in_parts(bpe: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = bpe.encode(TEXT)
    monkeypatch.setattr(text_module, "_LONG", 100)
    assert bpe.decode(bpe.encode(TEXT)) == TEXT
    assert whole.size <= bpe.encode(TEXT).size < whole.size * 1.1
    assert bpe.decode(bpe.encode("x" * 1000)) == "x" * 1000


def test_training_again_gives_the_same_tokenizer(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(folder, kind="bpe", vocab=280)
    first, again = open_tokenizer(config), open_tokenizer(config)
    said = "training a bpe tokenizer of 280 ids on the text\n"
    assert capsys.readouterr().out == said
    anew = open_tokenizer(config.model_copy(update={"cache_dir": str(tmp_path)}))
    assert capsys.readouterr().out == said
    assert first.identity == again.identity == anew.identity


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


def test_padding_and_truncation_of_a_file_are_switched_off(bpe: SubwordTokenizer) -> None:
    inner = tokenizers.Tokenizer.from_str(bpe.inner.to_str())
    inner.enable_truncation(3)
    inner.enable_padding(length=3)
    np.testing.assert_array_equal(SubwordTokenizer(inner).encode(TEXT), bpe.encode(TEXT))


def test_tokenizers_that_do_not_fit(bpe: Tokenizer, tmp_path: Path) -> None:
    require_vocab(bpe, 300)
    with pytest.raises(RecipeError, match=r"data\.tokenizer: .*299 ids that the run has"):
        require_vocab(bpe, 299, "the run")
    for raw in (b"{}", b"not JSON", b"\xff"):
        (tmp_path / "tokenizer.json").write_bytes(raw)
        with pytest.raises(RecipeError, match=r"data\.tokenizer\.path: .*\.json"):
            SubwordTokenizer.read(tmp_path / "tokenizer.json")


def test_the_end_of_a_document_of_gemma() -> None:
    """Gemma also has </s>, but as an HTML tag."""
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"</s>": 0, "<eos>": 1, "a": 2}))
    assert SubwordTokenizer(inner).eos == 1


def test_special_tokens_before_a_text(bpe: SubwordTokenizer) -> None:
    inner = tokenizers.Tokenizer.from_str(bpe.inner.to_str())
    assert SubwordTokenizer(inner).start == ()
    end = inner.token_to_id("<|endoftext|>")
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A <|endoftext|>", special_tokens=[("<|endoftext|>", end)]
    )
    assert SubwordTokenizer(inner).start == (end,)
