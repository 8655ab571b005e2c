"""A run of a Transformer on text."""

from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, Field, ValidationInfo, field_validator, model_validator

from ..errors import RecipeError
from .data import TOKENIZER_FILE, DataConfig
from .model import TransformerConfig
from .run import RunConfig

_FREE = "dropout", "remat", "attention_implementation"
"""What of a model's section says nothing about its weights."""


class LanguageConfig(RunConfig):
    """What every run of a Transformer on text is told."""

    data: DataConfig = Field(default_factory=DataConfig, description="the text and its batches")
    model: TransformerConfig = Field(
        default_factory=TransformerConfig, description="the shape of the model"
    )
    init: str | None = Field(
        default=None, description="the folder of a run of this recipe to start from; null for none"
    )

    def passed_on(self, tree: dict[str, Any]) -> dict[str, Any]:
        """The keys of a file whose `init` is this run, with its model and its tokenizer."""
        shape, own = self.model.model_dump(mode="json"), self.data.tokenizer
        if self.longest is None:
            del shape["context"]  # any length will do
        else:
            shape["context"] = self.longest
        tokenizer = {"kind": "byte"}
        if own.kind != "byte":
            folder = Path(self.train.runs_dir) / self.name
            tokenizer = {"kind": "file", "path": str(folder / TOKENIZER_FILE)}
        # Of a tokenizer that was trained there is the file now.
        data = tree.get("data")
        if isinstance(data, dict) and _agrees(data.get("tokenizer"), own.model_dump(mode="json")):
            tree = tree | {"data": {key: data[key] for key in data if key != "tokenizer"}}
        return filled_from(tree, shape, tokenizer)

    @property
    def resumed(self) -> Self:
        return self.model_copy(update={"init": None})

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


def filled_from(
    tree: dict[str, Any], shape: dict[str, Any], tokenizer: dict[str, str]
) -> dict[str, Any]:
    """The keys of a file with the shape and the tokenizer of the model that its `init` names.

    Raises:
      RecipeError: The file has a model of another shape, or another kind of tokenizer.
    """
    init, data = tree["init"], tree.get("data") or {}
    model = tree.get("model") or {}
    if not isinstance(data, dict) or not isinstance(model, dict):
        return tree  # for the config to complain about
    for key, value in model.items():
        if key not in _FREE and key in shape and not _agrees(value, shape[key]):
            raise RecipeError(
                f"model.{key}: expected {shape[key]!r}, that of init {init}; got {value!r}; "
                "remove it"
            )
    given = data.get("tokenizer") or {}
    if isinstance(given, dict):
        kind = given.get("kind", tokenizer["kind"])
        if kind != tokenizer["kind"]:
            raise RecipeError(
                f"data.tokenizer.kind: expected {tokenizer['kind']}, the tokenizer that init "
                f"{init} was trained with; got {kind!r}; remove it"
            )
        given = tokenizer | given
    free = {key: model[key] for key in model if key in _FREE or key not in shape}
    return tree | {"model": shape | free, "data": data | {"tokenizer": given}}


def _agrees(given: Any, own: Any) -> bool:
    """Whether what a file says is what a run has; null leaves it open, as a missing key does."""
    if isinstance(given, dict) and isinstance(own, dict):
        return all(key in own and _agrees(given[key], own[key]) for key in given)
    return given is None or given == own
