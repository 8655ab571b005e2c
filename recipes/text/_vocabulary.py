"""The tokenizer of a config: bytes, one from a file, or one trained on the config's own text."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tokenizers import (
    Tokenizer as Inner,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from ..config import TOKENIZER_FILE, DataConfig, TokenizerConfig
from ..errors import RecipeError
from ._cache import cache_key, cached
from ._documents import documents
from ._tokenizer import END_OF_TEXT, ByteTokenizer, SubwordTokenizer, Tokenizer, cut_at_lines

BERT_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
"""Special tokens of a trained WordPiece tokenizer, ids 0 to 4."""

_ALPHABET = 1000  # characters; others are unknown
_PART = 2**16  # characters that the trainer, which collects 256 parts, is given at once


def open_tokenizer(config: DataConfig, say: Callable[[str], None] = print) -> Tokenizer:
    """The tokenizer that a config asks for; a trained one comes from the cache if it is there."""
    settings = config.tokenizer
    if settings.kind == "byte":
        return ByteTokenizer()
    if settings.kind == "file":
        return SubwordTokenizer.read(str(settings.path))
    key = cache_key(config, {"train": settings.model_dump()})

    def build(folder: Path) -> None:
        say(f"training a {settings.kind} tokenizer of {settings.ids} ids on the text")
        train_tokenizer(config).save(folder / TOKENIZER_FILE)

    def read(folder: Path) -> SubwordTokenizer:
        return SubwordTokenizer.read(folder / TOKENIZER_FILE)

    return cached(config, f"tokenizer-{key}", build, read, say)


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Leaves the tokenizer of a run in its folder, as `TOKENIZER_FILE`; bytes need no file."""
    if isinstance(tokenizer, SubwordTokenizer):
        tokenizer.save(folder / TOKENIZER_FILE)


def train_tokenizer(config: DataConfig) -> SubwordTokenizer:
    """Trains a byte-level BPE or a WordPiece tokenizer on the documents of a config.

    The same documents give the same ids, in every process and on every machine.
    """
    settings = config.tokenizer

    def parts() -> Iterator[str]:
        return (part for text, _ in documents(config) for part in cut_at_lines(text, _PART))

    train = _bpe if settings.kind == "bpe" else _wordpiece
    tokenizer = SubwordTokenizer(train(settings, parts))
    if tokenizer.vocab > settings.ids:
        raise RecipeError(
            f"data.tokenizer.vocab: expected at least the {tokenizer.vocab} ids that special "
            f"tokens and single characters take; got {settings.ids}; raise it"
        )
    return tokenizer


def _bpe(settings: TokenizerConfig, parts: Callable[[], Iterator[str]]) -> Inner:
    """As GPT-2's: any text goes through unchanged, because bytes are its characters."""
    inner = Inner(models.BPE())
    if settings.lowercase:
        inner.normalizer = normalizers.Lowercase()
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=settings.ids,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(parts(), trainer)
    return inner


def _wordpiece(settings: TokenizerConfig, parts: Callable[[], Iterator[str]]) -> Inner:
    """As BERT's.

    The trainer numbers the characters inside words as it meets them in a table of random order, and
    of pieces that occur equally often joins those of lower numbers first. It is given these
    characters in order, as special tokens, which they are no longer when it is done.
    """
    inner = _pieces(settings, {})
    alphabet, inside = _characters(inner, parts())
    trainer = trainers.WordPieceTrainer(
        vocab_size=settings.ids,
        special_tokens=[*BERT_TOKENS, *(f"##{character}" for character in inside)],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    inner.train_from_iterator(parts(), trainer)
    trained = _pieces(settings, inner.get_vocab())
    trained.add_special_tokens(BERT_TOKENS)
    return trained


def _pieces(settings: TokenizerConfig, vocab: dict[str, int]) -> Inner:
    """The tokenizer that has these pieces."""
    inner = Inner(models.WordPiece(vocab, unk_token="[UNK]"))
    inner.normalizer = normalizers.BertNormalizer(lowercase=settings.lowercase)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    return inner


def _characters(inner: Inner, parts: Iterable[str]) -> tuple[list[str], list[str]]:
    """The most frequent characters of a text, and those of them that stand inside words."""
    counts: Counter[str] = Counter()
    pairs: set[tuple[str, str]] = set()
    for part in parts:
        normal = inner.normalizer.normalize_str(part)
        counts.update(normal)
        pairs.update(itertools.pairwise(normal))

    def is_word(text: str) -> bool:
        return [word for word, _ in inner.pre_tokenizer.pre_tokenize_str(text)] == [text]

    known = filter(is_word, sorted(counts, key=lambda character: (-counts[character], character)))
    alphabet = list(known)[:_ALPHABET]
    inside = {second for first, second in pairs if is_word(first + second)}
    return alphabet, sorted(inside.intersection(alphabet))
