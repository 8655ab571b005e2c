"""Text to token ids and back."""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol, Self

import numpy as np
import tokenizers

from ..config import BYTES, largest_id, read_tokenizer
from ..errors import RecipeError, write_whole

END_OF_TEXT = "<|endoftext|>"
# What ends a document, by the tokenizers that have it; the first one found counts. Gemma has both
# <eos> and </s>, which is a tag of HTML there.
_ENDS = (END_OF_TEXT, "<|end_of_text|>", "<eos>", "</s>", "<|eos|>", "[SEP]")

_LONG = 2**20  # characters that are encoded at once: each token takes some hundred bytes then


class Tokenizer(Protocol):
    """What the pipeline and generation need of a tokenizer.

    `vocab` is one more than the largest id, `eos` the id that ends a document (None for none), and
    `identity` tells two tokenizers apart.
    """

    vocab: int
    eos: int | None

    @property
    def identity(self) -> str: ...

    def encode(self, text: str) -> np.ndarray: ...

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]: ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str: ...


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
        """The bytes of `text`, as a uint8 array (bytes,)."""
        return np.frombuffer(text.encode("utf-8"), np.uint8)

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The bytes of each text."""
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

    @property
    def start(self) -> tuple[int, ...]:
        """The special tokens that the tokenizer puts before a text, such as Llama's first one."""
        encoded = self.inner.encode("a")
        marks = encoded.special_tokens_mask
        count = next((place for place, mark in enumerate(marks) if not mark), 0)
        return tuple(encoded.ids[:count])

    @classmethod
    def read(cls, path: str | Path, key: str = "data.tokenizer.path") -> Self:
        """Reads a tokenizer.json; `key` names it in messages."""
        return cls(read_tokenizer(path, key))

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
        parts = [list(cut_at_lines(text, _LONG)) for text in texts]
        flat = [part for one in parts for part in one]
        encoded = iter(self.inner.encode_batch_fast(flat, add_special_tokens=False))
        ids = ([np.asarray(next(encoded).ids, self.dtype) for _ in one] for one in parts)
        return [one[0] if len(one) == 1 else np.concatenate(one) for one in ids]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of `ids` without special tokens."""
        return self.inner.decode(np.asarray(ids).tolist(), skip_special_tokens=True)

    def save(self, path: Path) -> None:
        """Writes the tokenizer.json that `read` reads."""
        write_whole(path, self.inner.to_str(pretty=True))


def token_dtype(vocab: int) -> np.dtype:
    """The narrowest type that holds the ids below `vocab`."""
    return np.min_scalar_type(max(vocab - 1, 0))


def cut_at_lines(text: str, most: int) -> Iterator[str]:
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
