"""What a fine-tuning task can be told, each key declared once, with its meaning beside it."""

from typing import Annotated, Literal, Self

from pydantic import Field, Strict, model_validator

from ..config import BatchConfig, Count, Flag, Fraction, RunConfig, Section

Task = Literal["squad", "classification"]
Format = Literal["squad", "tsv", "csv", "jsonl"]
Version = Literal["v1.1", "v2.0"]

Finite = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Column = (
    Annotated[int, Strict(), Field(ge=0)] | Annotated[str, Strict(), Field(min_length=1)]
)  # a position or a name


class DataConfig(BatchConfig):
    """The files of a task, and how their examples are cut into batches.

    A sequence has its special tokens among its tokens.
    """

    train: str = Field(description="path of the file to train on")
    validation: str = Field(description="path of the file to score on")
    format: Format | None = Field(
        default=None,
        description="what the files are; null for squad (task squad) or by the file's suffix",
    )


class SquadConfig(Section):
    """Windows of long contexts, and the answers taken from them."""

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
    n_best: Count = Field(default=20, description="answers that are listed for each question")
    max_answer_length: Count = Field(default=30, description="tokens of the longest answer")
    no_answer_threshold: Finite = Field(
        default=0.0,
        description="no answer is given where its score is above the best answer's by more (v2.0)",
    )


class ClassificationConfig(Section):
    """Where a row has its text and its label."""

    header: Flag = Field(default=True, description="whether a TSV or CSV file names its columns")
    text: Column = Field(
        default="sentence", description="the column of the text: its name, or its position from 0"
    )
    pair: Column | None = Field(
        default=None, description="the column of a second text; null for one text"
    )
    label: Column = Field(default="label", description="the column of the label")
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
        if self.labels and len(set(self.labels)) < len(self.labels):
            raise ValueError(
                f"labels must be different names; got {self.labels}; remove the repeated ones"
            )
        return self


class TaskConfig(Section):
    """What to fine-tune on."""

    task: Task = Field(description="extractive question answering, or sentence classification")
    data: DataConfig = Field(description="the files and their batches")
    squad: SquadConfig = Field(
        default_factory=SquadConfig, description="question answering (task squad)"
    )
    classification: ClassificationConfig = Field(
        default_factory=ClassificationConfig,
        description="sentence classification (task classification)",
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


class FinetuneConfig(TaskConfig, RunConfig):
    """A whole config of a fine-tuning run."""

    recipe: Literal["finetune"] = Field(description="which recipe this config is of")
    init: str = Field(description="the folder of the pretraining run to start from")
    dropout: Fraction | None = Field(
        default=None, description="share of activations dropped; null for that of the run"
    )
    data: DataConfig = Field(description="the files and their batches")

    @model_validator(mode="after")
    def _no_scalify(self) -> Self:
        if self.scalify is not None:
            raise ValueError(
                "scalify is for plain models; this recipe has unitscale models only; set scalify "
                "null"
            )
        return self
