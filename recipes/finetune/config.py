"""The configuration of fine-tuning."""

from pathlib import Path
from typing import Annotated, Literal, Self

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
)
from ..errors import RecipeError
from ..run.folder import earlier_run, is_run

Task = Literal["squad", "classification"]
Format = Literal["squad", "tsv", "csv", "jsonl"]
Version = Literal["v1.1", "v2.0"]

Finite = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Column = (
    Annotated[int, Strict(), Field(ge=0)] | Annotated[str, Strict(), Field(min_length=1)]
)  # a position or a name


class DataConfig(SequenceConfig):
    """The files of a task, and their batches.

    A sequence has its special tokens among its tokens.
    """

    train: str = Field(description="path of the file to train on")
    validation: str = Field(description="path of the file to score on")
    format: Format | None = Field(
        default=None,
        description="what the files are; null for squad (task squad) or by the file's suffix",
    )


class SquadConfig(Section):
    """Windows of long contexts, and answers."""

    version: Version | None = Field(
        default=None,
        description="whose rules score; null for v2.0 if a validation question has no answer",
    )
    max_question_length: Count = Field(
        default=64, description="tokens of a question; a longer one is cut"
    )
    stride: Count | None = Field(
        default=None,
        description="tokens from the start of a window to the start of the next; null for half of "
        "what a window holds of the context",
    )
    negatives: NonNegative | None = Field(
        default=None,
        description="windows without the answer that are trained on, for each with it; null for "
        "all of them",
    )
    mark_matches: Flag = Field(
        default=False,
        description="give tokens of a context that its question has too the segment of the "
        "question: what they have in common, a small model does not find by itself",
    )
    n_best: Count = Field(default=20, description="answers that are listed for each question")
    max_answer_length: Count = Field(default=30, description="tokens of the longest answer")
    no_answer_threshold: Finite = Field(
        default=0.0,
        description="no answer is given where its score is above the best answer's by more (v2.0)",
    )


class ClassificationConfig(Section):
    """Columns of texts and labels."""

    header: Flag = Field(default=True, description="whether a TSV or CSV file names its columns")
    text: Column = Field(
        default="sentence", description="the column of the text: its name, or its position from 0"
    )
    pair: Column | None = Field(
        default=None, description="the column of a second text; null for one text"
    )
    label: Column = Field(default="label", description="the column of the label")
    pooling: Pooling = Field(
        default="cls",
        description="what a text's label is read from (init of recipe bert): the first token, "
        "which pretraining with data.pairs taught to speak for the text, or the mean of all",
    )
    mark_matches: Flag = Field(
        default=False,
        description="give tokens of the second text that the first has too the segment of the "
        "first: what they have in common, a small model does not find by itself",
    )
    labels: Annotated[list[str], Field(min_length=2)] | None = Field(
        default=None,
        description="names of the labels in the order of their ids; null for those of data.train",
    )

    @model_validator(mode="after")
    def _columns_differ(self) -> Self:
        columns = [column for column in (self.text, self.pair, self.label) if column is not None]
        if len(set(columns)) < len(columns):
            raise ValueError(
                f"text, pair and label must be different columns; got text {self.text!r}, "
                f"pair {self.pair!r} and label {self.label!r}; correct one of them"
            )
        if self.mark_matches and self.pair is None:
            raise ValueError(
                "mark_matches is of pairs; got pair null; set pair, or mark_matches false"
            )
        if self.labels and len(set(self.labels)) < len(self.labels):
            raise ValueError(
                f"labels must be different names; got {self.labels}; remove the repeated ones"
            )
        return self


FORMATS: dict[str, dict[str, str]] = {
    "float32": {},
    "bfloat16": {"scalify": "bfloat16"},
    "float16": {"scalify": "float16"},
    "fp8": {"scalify": "float16", "matmuls": "fp8"},
}
"""What a policy means for plain models: formats under scalify."""


def pretraining_of(init: str) -> BertConfig:
    """Read the config of the pretraining run in a folder."""
    return earlier_run(init, BertConfig, other=", or a Hugging Face folder")


class FinetuneConfig(RunConfig):
    """The configuration of a fine-tuning run."""

    recipe: Literal["finetune"] = Field(description="which recipe this config is of")
    init: str = Field(
        description="the folder to start from: a run of recipe bert, or a Hugging Face encoder"
    )
    task: Task = Field(description="extractive question answering, or sentence classification")
    data: DataConfig = Field(description="the files and their batches")
    squad: SquadConfig = Field(
        default_factory=SquadConfig, description="question answering (task squad)"
    )
    classification: ClassificationConfig = Field(
        default_factory=ClassificationConfig,
        description="sentence classification (task classification)",
    )
    dropout: Fraction | None = Field(
        default=None, description="share of activations dropped; null for that of the run"
    )

    @model_validator(mode="after")
    def _format_fits(self) -> Self:
        kind = self.data.format
        if kind is not None and (kind == "squad") != (self.task == "squad"):
            wanted = "squad" if self.task == "squad" else "tsv, csv or jsonl"
            raise ValueError(
                f"data.format of task {self.task} must be {wanted}; got {kind}; "
                "change data.format or task"
            )
        return self

    @property
    def loss_unit(self) -> str:
        return "end of an answer" if self.task == "squad" else "row"

    @property
    def plain(self) -> bool:
        """Whether `init` is a Hugging Face folder (a model in standard parametrization)."""
        return (Path(self.init) / "config.json").is_file()

    @property
    def settled(self) -> Self:
        """The config with defaults that depend on `init`.

        For a Hugging Face folder those are formats under scalify, for a run its
        `optimizer.multipliers`: learning rates that suited a role in pretraining suit it here.
        """
        if self.plain:
            return self._settled_plain()
        if not is_run(self.init):
            return self  # what reads the run says so
        if self.precision.scalify or self.precision.matmuls:
            raise RecipeError(
                "precision.scalify and precision.matmuls are for plain models; the run in init "
                f"{self.init} is of a unitscale model; set both null"
            )
        run = pretraining_of(self.init)
        if run.model.library == "plain":
            raise RecipeError(
                "init: expected the run of a unitscale model; got that of a baseline, "
                f"model.library plain, in {self.init}; give another"
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
                f"optimizer.umup: expected false for {folder}, whose weights are in standard "
                "parametrization; got true; add optimizer.umup=false and a learning rate of that "
                "parametrization, such as optimizer.learning_rate=5e-5"
            )
        if precision.monitor is not None or precision.scaled_state:
            raise RecipeError(
                "precision.monitor, weights and moments: expected null for "
                f"{folder}, whose model runs under scalify; remove them"
            )
        if not precision.scalify:
            precision = precision.model_copy(update=FORMATS[precision.policy])
        return self.model_copy(update={"precision": precision})
