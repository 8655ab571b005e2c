"""The `data` section of a config: sources, tokenizer and batches."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, Strict, model_validator

from .schema import Count, Flag, Section
from .tokenizer import count_ids

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


class BatchConfig(Section):
    """How data is cut into batches, whatever it is."""

    batch_size: Count = Field(default=16, description="examples per step, over all processes")

    @property
    def step_size(self) -> int:
        """What a step goes through, counted in `step_unit`."""
        return self.batch_size

    @property
    def step_unit(self) -> str:
        """What speed is counted in."""
        return "examples"


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
        default=None, description="read at most this many bytes of the text"
    )
    validation_fraction: Annotated[float, Strict(), Field(gt=0, lt=1)] = Field(
        default=0.1, description="the share of the text, at its end, that is kept for validation"
    )


def with_vocab(model: Any, data: DataConfig | None) -> Any:
    """A `model` section, before it is validated, whose absent or null `vocab` is the tokenizer's.

    Args:
      model: What the config has for the section.
      data: The valid `data` section, or None where that is wrong too.
    """
    given = model.model_dump(exclude_unset=True) if isinstance(model, BaseModel) else model
    if data is None or not isinstance(given, dict) or given.get("vocab") is not None:
        return model
    return {**given, "vocab": data.tokenizer.ids}


def check_vocab(vocab: int, tokenizer: TokenizerConfig) -> None:
    """A model must have all ids of its tokenizer.

    Raises:
      ValueError: It has fewer. A file, which may have moved, is not asked: the run has a copy.
    """
    if tokenizer.kind != "file" and vocab < tokenizer.ids:
        raise ValueError(
            f"model.vocab must be at least the {tokenizer.ids} ids of the {tokenizer.kind} "
            f"tokenizer; got {vocab}; set model.vocab null"
        )


def check_context(context: int | None, length: int) -> None:
    """Positions must reach to the end of a sequence; None has as many as it has tokens.

    Raises:
      ValueError: They do not.
    """
    if context is not None and context < length:
        raise ValueError(
            f"model.context must be at least data.sequence_length; got {context} and {length}; "
            "set model.context null to use data.sequence_length"
        )
