"""The `data` section of a config of texts: sources, tokenizer and batches."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, Strict, model_validator
from tokenizers import Tokenizer

from ..errors import RecipeError, read_text
from .run import BatchConfig, Count, Flag, Positive, Section

TOKENIZER_FILE = "tokenizer.json"
"""Where a run keeps its tokenizer."""
BYTES = 256
"""Ids of the byte tokenizer."""
TRAINED_IDS = 8192
"""Ids of a tokenizer that is trained, where the config does not say."""


class TokenizerConfig(Section):
    """What turns text into ids."""

    kind: Literal["byte", "bpe", "wordpiece", "file"] = Field(
        default="byte", description="bytes, one trained on the text, or a tokenizer.json"
    )
    vocab: Count | None = Field(
        default=None, description="most ids of one that is trained; null for 8192"
    )
    path: str | None = Field(default=None, description="the tokenizer.json of kind file")
    lowercase: Flag = Field(default=False, description="train on, and read, lower-case text")

    @property
    def ids(self) -> int:
        """The ids that a model must have: known before any text is read."""
        if self.kind == "file":
            return count_ids(str(self.path))
        return BYTES if self.kind == "byte" else self.vocab or TRAINED_IDS

    @model_validator(mode="after")
    def _keys_belong_to_kinds(self) -> Self:
        trained = self.kind in ("bpe", "wordpiece")
        if (self.kind == "file") != (self.path is not None):
            raise ValueError(
                f"path is set when kind is file, and only then; got kind {self.kind} and path "
                f"{self.path}; {'set path' if self.path is None else 'set kind file'}"
            )
        if not trained and (self.vocab is not None or self.lowercase):
            raise ValueError(
                f"vocab and lowercase are of kind bpe and wordpiece; got kind {self.kind}, vocab "
                f"{self.vocab} and lowercase {self.lowercase}; remove them, or change kind"
            )
        return self


class SequenceConfig(BatchConfig):
    """Batches of sequences."""

    sequence_length: Count = Field(default=128, description="tokens that the model sees at once")

    @property
    def step_size(self) -> int:
        return self.batch_size * self.sequence_length

    @property
    def step_unit(self) -> str:
        return "tokens"


class DataConfig(SequenceConfig):
    """Where the text comes from and how it is cut into batches."""

    path: str | None = Field(
        default=None,
        description="a file, a folder, a glob pattern, or a Hugging Face dataset that "
        "save_to_disk wrote; null for the Python standard library",
    )
    mixture: dict[str, Positive] | None = Field(
        default=None,
        description="several paths, each with its weight, in place of path: of all batches "
        "together a text has the share that its weight is of all weights",
    )
    pattern: str = Field(
        default="**/*", description="which files of a folder to read, as a glob pattern"
    )
    format: Literal["auto", "text", "jsonl", "parquet", "dataset"] = Field(
        default="auto", description="of the files; auto goes by their names, text for others"
    )
    text_key: str = Field(
        default="text", description="the field that holds the text (jsonl, parquet, dataset)"
    )
    split: str = Field(default="train", description="the split of a dataset that has several")
    documents: Literal["file", "blank_line", "line"] = Field(
        default="file", description="what ends a document of a text file"
    )
    tokenizer: TokenizerConfig = Field(
        default_factory=TokenizerConfig, description="what turns text into ids"
    )
    cache_dir: str | None = Field(
        default=None, description="where tokens are kept; null for the user's cache folder"
    )
    max_bytes: Count | None = Field(
        default=None, description="read at most this many bytes of each text"
    )
    validation_fraction: Annotated[float, Strict(), Field(gt=0, lt=1)] = Field(
        default=0.1, description="the share of the text, at its end, that is kept for validation"
    )

    @property
    def texts(self) -> list[Self]:
        """The config of each text: those of a mixture, or this one."""
        if self.mixture is None:
            return [self]
        return [self.model_copy(update={"path": path, "mixture": None}) for path in self.mixture]

    @model_validator(mode="after")
    def _one_or_several_texts(self) -> Self:
        if self.mixture is not None and (self.path is not None or not self.mixture):
            raise ValueError(
                "mixture names the paths of texts in place of path; got "
                f"{len(self.mixture)} of them and path {self.path}; set path null and give some, "
                "or mixture null"
            )
        return self


def read_tokenizer(path: str | Path, key: str = "data.tokenizer.path") -> Tokenizer:
    """Reads a tokenizer.json."""
    path = Path(path)
    text = read_text(path, key, "give the tokenizer.json of a tokenizer")
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing more precise
        raise RecipeError(
            f"{key}: expected {path} to be a tokenizer.json of the tokenizers library; got: "
            f"{error!s:.200}; give another file"
        ) from error


def count_ids(path: str | Path) -> int:
    """One more than the largest id of a tokenizer.json, added tokens included."""
    return largest_id(read_tokenizer(path)) + 1


def largest_id(tokenizer: Tokenizer) -> int:
    """The largest id that a tokenizer can give; -1 where it has none."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
