"""The tokenizer of a config: bytes, one from a file, or one trained on the config's own text."""

from collections.abc import Callable
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
    """Trains a byte-level BPE or a WordPiece tokenizer on the documents of a config."""
    settings = config.tokenizer
    inner, trainer = _bpe(settings) if settings.kind == "bpe" else _wordpiece(settings)
    parts = (part for text, _ in documents(config) for part in cut_at_lines(text, _PART))
    inner.train_from_iterator(parts, trainer)
    tokenizer = SubwordTokenizer(inner)
    if tokenizer.vocab > settings.ids:
        raise RecipeError(
            f"data.tokenizer.vocab: expected at least the {tokenizer.vocab} ids that special "
            f"tokens and single characters take; got {settings.ids}; raise it"
        )
    return tokenizer


def _bpe(settings: TokenizerConfig) -> tuple[Inner, trainers.Trainer]:
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
    return inner, trainer


def _wordpiece(settings: TokenizerConfig) -> tuple[Inner, trainers.Trainer]:
    """As BERT's."""
    inner = Inner(models.WordPiece(unk_token="[UNK]"))
    inner.normalizer = normalizers.BertNormalizer(lowercase=settings.lowercase)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=settings.ids,
        special_tokens=BERT_TOKENS,
        limit_alphabet=1000,
        show_progress=False,
    )
    return inner, trainer
