"""The configuration of fine-tuning."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, Strict, model_validator

from ..bert.config import BertConfig, Pooling
from ..config import (
    Count,
    Flag,
    Fraction,
    NonNegative,
    RunConfig,
    Section,
    SequenceConfig,
    Whole,
)
from ..errors import RecipeError
from ..run.folder import earlier_run, is_run

Task = Literal["squad", "classification"]
Column = Whole | Annotated[str, Strict(), Field(min_length=1)]  # a position or a name


class DataConfig(SequenceConfig):
    """The files of a task, and their batches; special tokens are among those of a sequence."""

    train: str = Field(description="path of the file to train on")
    validation: str = Field(description="path of the file to score on")


class SquadConfig(Section):
    """Windows of long contexts, and answers."""

    max_question_length: Count = Field(
        default=64, description="tokens of a question; a longer one is cut"
    )
    negatives: NonNegative | None = Field(
        default=None,
        description="windows to train on without the answer, for each with it; null for all",
    )
    mark_matches: Flag = Field(
        default=False,
        description="give what a context shares with its question the segment of the question",
    )


class ClassificationConfig(Section):
    """Columns of texts and labels: names, or positions from 0 where a file has no header."""

    header: Flag = Field(default=True, description="whether a TSV or CSV file names its columns")
    text: Column = Field(default="sentence", description="the column of the text")
    pair: Column | None = Field(
        default=None, description="the column of a second text; null for one text"
    )
    label: Column = Field(default="label", description="the column of the label")
    pooling: Pooling = Field(
        default="cls",
        description="what a text's label is read from (init of recipe bert): the first token, "
        "which suits runs with data.pairs, or the mean of all",
    )
    mark_matches: Flag = Field(
        default=False,
        description="give what the second text shares with the first the segment of the first",
    )

    @model_validator(mode="after")
    def _columns_differ(self) -> Self:
        if self.text in (self.pair, self.label) or self.pair == self.label:
            raise ValueError(
                f"text, pair and label must be different columns; got text {self.text!r}, "
                f"pair {self.pair!r} and label {self.label!r}; correct one of them"
            )
        if self.mark_matches and self.pair is None:
            raise ValueError(
                "mark_matches is of pairs; got pair null; set pair, or mark_matches false"
            )
        return self


FORMATS: dict[str, dict[str, str]] = {
    "float32": {},
    "bfloat16": {"scalify": "bfloat16"},
    "float16": {"scalify": "float16"},
    "fp8": {"scalify": "float16", "matmuls": "fp8"},
}
"""Formats under scalify by policy, for plain models."""


def pretraining_of(init: str) -> BertConfig:
    """Read the config of the pretraining run in a folder."""
    return earlier_run(init, BertConfig, other=", or a Hugging Face folder")


class FinetuneConfig(RunConfig):
    """The configuration of a fine-tuning run."""

    constants: ClassVar[dict[str, Any]] = {
        "data.format": None,
        "squad.version": None,
        "squad.stride": None,
        "squad.n_best": 20,
        "squad.max_answer_length": 30,
        "squad.no_answer_threshold": 0.0,
        "classification.labels": None,
    }

    recipe: Literal["finetune"] = Field(description="which recipe this config is of")
    init: str = Field(
        description="the folder to start from: a run of recipe bert, or a Hugging Face encoder"
    )
    task: Task = Field(description="extractive question answering, or sentence classification")
    data: DataConfig = Field(description="the files and their batches")
    squad: SquadConfig = Field(default_factory=SquadConfig, description="for task squad")
    classification: ClassificationConfig = Field(
        default_factory=ClassificationConfig, description="for task classification"
    )
    dropout: Fraction | None = Field(
        default=None, description="share of activations dropped; null for that of the run"
    )

    @property
    def loss_unit(self) -> str:
        return "end of an answer" if self.task == "squad" else "row"

    @property
    def plain(self) -> bool:
        """True if `init` is a Hugging Face folder (a model in standard parametrization)."""
        return (Path(self.init) / "config.json").is_file()

    @property
    def settled(self) -> Self:
        """The config with `scalify` for a Hugging Face folder, and a run's own multipliers."""
        if self.plain:
            return self._settled_plain()
        if not is_run(self.init):
            return self  # what reads the run says so
        if self.precision.scalify or self.precision.matmuls:
            raise RecipeError(
                f"scalify is for plain models; got a unitscale one in init {self.init}; set it null"
            )
        run = pretraining_of(self.init)
        if run.model.library == "plain":
            raise RecipeError(
                f"init: expected a unitscale model; got library plain in {self.init}; give another"
            )
        optimizer = self.optimizer
        if "multipliers" in optimizer.model_fields_set or not optimizer.umup:
            return self
        optimizer = optimizer.model_copy(update={"multipliers": run.optimizer.multipliers})
        return self.model_copy(update={"optimizer": optimizer})

    def _settled_plain(self) -> Self:
        folder, precision = f"the Hugging Face folder {self.init}", self.precision
        if precision.policy not in FORMATS:
            raise RecipeError(
                f"precision.policy: expected {', '.join(FORMATS)} for {folder}; got "
                f"{precision.policy}; use one "
                "of them, or init with a run of recipe bert"
            )
        if self.optimizer.umup:
            raise RecipeError(
                f"optimizer.umup: expected false for {folder}, in standard parametrization; got "
                "true; add optimizer.umup=false optimizer.learning_rate=5e-5"
            )
        if precision.monitor is not None or precision.scaled_state:
            raise RecipeError(
                "precision.monitor, weights and moments: expected null for "
                f"{folder}, whose model runs under scalify; remove them"
            )
        if not precision.scalify:
            precision = precision.model_copy(update=FORMATS[precision.policy])
        return self.model_copy(update={"precision": precision})
