"""A run of a Transformer on text."""

from typing import Any, Self

from pydantic import BaseModel, Field, ValidationInfo, field_validator, model_validator

from .data import DataConfig
from .run import RunConfig
from .shapes import TransformerConfig


class LanguageConfig(RunConfig):
    """What every run of a Transformer on text is told."""

    data: DataConfig = Field(default_factory=DataConfig, description="the text and its batches")
    model: TransformerConfig = Field(
        default_factory=TransformerConfig, description="the shape of the model"
    )

    @property
    def context(self) -> int:
        """Number of positions that are learned, where they are."""
        return self.model.context or self.data.sequence_length

    @property
    def longest(self) -> int | None:
        return self.context if self.model.positions == "learned" else None

    @property
    def sequence(self) -> int:
        return self.data.sequence_length

    @field_validator("model", mode="before")
    @classmethod
    def _vocab_of_tokenizer(cls, model: Any, info: ValidationInfo) -> Any:
        """Fills in `vocab`, so that a run's config tells its model's shape by itself."""
        data = info.data.get("data")  # None where it is wrong itself
        given = model.model_dump(exclude_unset=True) if isinstance(model, BaseModel) else model
        if not isinstance(given, dict) or given.get("vocab") is not None:
            return model
        if data is None:  # of which there is a complaint already
            return {key: value for key, value in given.items() if key != "vocab"}
        return {**given, "vocab": data.tokenizer.ids}

    @model_validator(mode="after")
    def _model_fits_text(self) -> Self:
        tokenizer, context, length = (
            self.data.tokenizer,
            self.model.context,
            self.data.sequence_length,
        )
        # A file, which may have moved, is not asked: the run has a copy.
        if tokenizer.kind != "file" and self.model.vocab < tokenizer.ids:
            raise ValueError(
                f"model.vocab must be at least the {tokenizer.ids} ids of the {tokenizer.kind} "
                f"tokenizer; got {self.model.vocab}; set model.vocab null"
            )
        if context is not None and context < length:
            raise ValueError(
                f"model.context must be at least data.sequence_length; got {context} and {length}; "
                "lower data.sequence_length, or set model.context null unless init fixes it"
            )
        return self
