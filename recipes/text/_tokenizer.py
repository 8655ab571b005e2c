"""Text to token ids and back: bytes, a tokenizer of a file, or one trained on the config's text."""

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Self, TypeAlias

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from ..config import (
    BYTES,
    TOKENIZER_FILE,
    DataConfig,
    TokenizerConfig,
    largest_id,
    read_tokenizer,
)
from ..errors import RecipeError, write_whole
from ._sources import cache_key, cached, documents

BERT_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
"""Special tokens of a trained WordPiece tokenizer, ids 0 to 4."""
END_OF_TEXT = "<|endoftext|>"
# What ends a document, by the tokenizers that have it; the first one found counts. Gemma has both
# <eos> and </s>, which is a tag of HTML there.
_ENDS = (END_OF_TEXT, "<|end_of_text|>", "<eos>", "</s>", "<|eos|>", "[SEP]")

_ALPHABET = 1000  # characters of a trained WordPiece tokenizer; others are unknown
_LONG = 2**20  # characters that are encoded at once: each token takes some hundred bytes then
_PART = 2**16  # characters that the trainer, which collects 256 parts, is given at once


class ByteTokenizer:
    """One token per UTF-8 byte: 256 ids, no training, and any text goes through unchanged.

    Example:
      >>> ByteTokenizer().decode(ByteTokenizer().encode("naïve"))
      'naïve'
    """

    vocab = BYTES
    eos: int | None = None
    identity = "byte"

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), np.uint8)

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of `ids`; a byte sequence that is no character becomes U+FFFD."""
        return np.asarray(ids, np.uint8).tobytes().decode("utf-8", errors="replace")


class SubwordTokenizer:
    """A tokenizer of the `tokenizers` library: BPE, WordPiece, or any tokenizer.json."""

    def __init__(self, inner: tokenizers.Tokenizer):
        self.inner = inner
        inner.no_padding()
        inner.no_truncation()
        self.vocab = largest_id(inner) + 1
        self.dtype = token_dtype(self.vocab)
        found = (inner.token_to_id(token) for token in _ENDS)
        self.eos = next((index for index in found if index is not None), None)

    @classmethod
    def read(cls, path: str | Path, key: str = "data.tokenizer.path") -> Self:
        """Reads a tokenizer.json; `key` names it in messages."""
        return cls(read_tokenizer(path, key))

    @property
    def start(self) -> tuple[int, ...]:
        """The special tokens that the tokenizer puts before a text, such as Llama's first one."""
        encoded = self.inner.encode("a")
        pairs = zip(encoded.ids, encoded.special_tokens_mask, strict=True)
        return tuple(index for index, _ in itertools.takewhile(lambda pair: pair[1], pairs))

    @property
    def identity(self) -> str:
        """The same for two tokenizers that give the same ids."""
        text = f"{tokenizers.__version__}|{self.inner.to_str()}"
        return hashlib.sha256(text.encode("utf-8")).hexdigest()

    def id(self, token: str) -> int:
        """The id of a token such as "[CLS]"."""
        index = self.inner.token_to_id(token)
        if index is None:
            raise RecipeError(
                f"data.tokenizer: expected a tokenizer with the token {token}; got one of "
                f"{self.vocab} ids without it; use kind wordpiece, or a tokenizer.json that has it"
            )
        return index

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text` without special tokens (tokens,); a long text in parts cut at lines."""
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, on all processor cores."""
        parts = [list(_cut_at_lines(text, _LONG)) for text in texts]
        flat = [part for one in parts for part in one]
        encoded = iter(self.inner.encode_batch_fast(flat, add_special_tokens=False))
        return [
            np.concatenate([np.asarray(next(encoded).ids, self.dtype) for _ in one])
            for one in parts
        ]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of `ids` without special tokens."""
        return self.inner.decode(np.asarray(ids).tolist(), skip_special_tokens=True)


Tokenizer: TypeAlias = ByteTokenizer | SubwordTokenizer
"""`vocab` is one more than the largest id, `eos` the id that ends a document (None for none)."""


def token_dtype(vocab: int) -> np.dtype:
    """The narrowest type that holds the ids below `vocab`."""
    return np.min_scalar_type(max(vocab - 1, 0))


def _cut_at_lines(text: str, most: int) -> Iterator[str]:
    """A text in parts of at most `most` characters, cut after a line where there is one."""
    start = 0
    while len(text) - start > most:
        end = text.rfind("\n", start, start + most) + 1 or start + most
        yield text[start:end]
        start = end
    yield text[start:]


def require_vocab(tokenizer: Tokenizer, vocab: int, where: str = "the model") -> None:
    """Raises unless every id of a tokenizer is one of the model's."""
    if tokenizer.vocab > vocab:
        raise RecipeError(
            f"data.tokenizer: expected at most the {vocab} ids that {where} has; got a tokenizer "
            f"of {tokenizer.vocab}; use the one that {where} was trained with, or train another "
            "with model.vocab null"
        )


def open_tokenizer(config: DataConfig) -> Tokenizer:
    """The tokenizer that a config asks for; a trained one comes from the cache if it is there."""
    settings = config.tokenizer
    if settings.kind == "byte":
        return ByteTokenizer()
    if settings.kind == "file":
        return SubwordTokenizer.read(str(settings.path))

    def build(path: Path) -> None:
        print(f"training a {settings.kind} tokenizer of {settings.ids} ids on the text")
        path.write_text(train_tokenizer(config).inner.to_str(pretty=True), encoding="utf-8")

    key = cache_key(config, {"train": settings.model_dump()})
    return SubwordTokenizer.read(cached(config, f"tokenizer-{key}.json", build))


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Leaves the tokenizer of a run in its folder, as `TOKENIZER_FILE`; bytes need no file."""
    if isinstance(tokenizer, SubwordTokenizer):
        write_whole(folder / TOKENIZER_FILE, tokenizer.inner.to_str(pretty=True))


def train_tokenizer(config: DataConfig) -> SubwordTokenizer:
    """Trains a byte-level BPE or a WordPiece tokenizer on the documents of a config.

    The same documents give the same ids, in every process and on every machine.
    """
    settings = config.tokenizer

    def parts() -> Iterator[str]:
        return (part for text, _ in documents(config) for part in _cut_at_lines(text, _PART))

    train = _bpe if settings.kind == "bpe" else _wordpiece
    tokenizer = SubwordTokenizer(train(settings, parts))
    if tokenizer.vocab > settings.ids:
        raise RecipeError(
            f"data.tokenizer.vocab: expected at least the {tokenizer.vocab} ids that special "
            f"tokens and single characters take; got {settings.ids}; raise it"
        )
    return tokenizer


def _bpe(settings: TokenizerConfig, parts: Callable[[], Iterator[str]]) -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer as GPT-2's: any text goes through unchanged."""
    inner = tokenizers.Tokenizer(models.BPE())
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


def _wordpiece(
    settings: TokenizerConfig, parts: Callable[[], Iterator[str]]
) -> tokenizers.Tokenizer:
    """As BERT's.

    The trainer numbers the characters inside words as it meets them in a table of random order, and
    of pieces that occur equally often joins those of lower numbers first. It is given these
    characters in order, as special tokens, which they are no longer when it is done.
    """

    def with_pieces(vocab: dict[str, int]) -> tokenizers.Tokenizer:
        inner = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
        inner.normalizer = normalizers.BertNormalizer(lowercase=settings.lowercase)
        inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        inner.decoder = decoders.WordPiece()
        return inner

    inner = with_pieces({})
    alphabet, inside = _characters(inner, parts())
    trainer = trainers.WordPieceTrainer(
        vocab_size=settings.ids,
        special_tokens=[*BERT_TOKENS, *(f"##{character}" for character in inside)],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    inner.train_from_iterator(parts(), trainer)
    trained = with_pieces(inner.get_vocab())
    trained.add_special_tokens(BERT_TOKENS)
    return trained


def _characters(inner: tokenizers.Tokenizer, parts: Iterable[str]) -> tuple[list[str], list[str]]:
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
