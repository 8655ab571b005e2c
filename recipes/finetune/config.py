"""The config of recipe finetune."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, Strict, model_validator

from ..bert.config import BertConfig, Pooling
from ..config import (
    PRESETS,
    Flag,
    Fraction,
    NonNegative,
    PrecisionConfig,
    RunConfig,
    Section,
    SequenceConfig,
    Whole,
)
from ..errors import RecipeError
from ..run.folder import downloaded, earlier_run, is_run

Column = Whole | Annotated[str, Strict(), Field(min_length=1)]  # a position or a name


class DataConfig(SequenceConfig):
    """The files of a task, and their batches; the sequence length includes special tokens."""

    train: str
    """File with training data."""
    validation: str
    """File with validation data."""
    mark_matches: Flag = False
    """Assign the first text's segment id to tokens of the second that occur in the first."""


class SquadConfig(Section):
    """Extractive question answering."""

    negatives: NonNegative | None = None
    """Number of windows without the answer per window with it, in training; null for all."""


class ClassificationConfig(Section):
    """Columns of texts and labels: names, or positions from 0 if files have no header."""

    header: Flag = True
    """True if the first line of the TSV or CSV files names the columns."""
    text: Column = "sentence"
    """Column of the text."""
    pair: Column | None = None
    """Column of a second text; null for one text."""
    label: Column = "label"
    """Column of the label."""
    pooling: Pooling = "cls"
    """Classify the first token's output (cls) or the mean of all; Hugging Face folders decide."""

    @model_validator(mode="after")
    def _columns_differ(self) -> Self:
        if self.text in (self.pair, self.label) or self.pair == self.label:
            raise ValueError(
                f"text, pair and label must be different columns; got text {self.text!r}, "
                f"pair {self.pair!r} and label {self.label!r}"
            )
        return self


def pretraining_of(init: str) -> BertConfig:
    """Read the config of the pretraining run in a folder."""
    return earlier_run(init, BertConfig, other=", or a Hugging Face folder")


class FinetuneConfig(RunConfig):
    """Config of a fine-tuning run."""

    constants: ClassVar[dict[str, Any]] = {
        "data.format": None,
        "squad.version": None,
        "squad.stride": None,
        "squad.n_best": 20,
        "squad.max_answer_length": 30,
        "squad.no_answer_threshold": 0.0,
        "classification.labels": None,
    }

    recipe: Literal["finetune"]
    """Name of the recipe."""
    init: str
    """Run of recipe bert, or Hugging Face folder or name (org/model), to start from."""
    task: Literal["squad", "classification"]
    """Extractive question answering, or sentence classification."""
    data: DataConfig = Field()
    """The files and their batches."""
    squad: SquadConfig = SquadConfig()
    """Keys of task squad."""
    classification: ClassificationConfig = ClassificationConfig()
    """Keys of task classification."""
    dropout: Fraction | None = None
    """Dropout rate; null for that of init."""

    @classmethod
    def upgraded(cls, tree: Any) -> Any:
        tree = super().upgraded(tree)
        for task in ("squad", "classification"):
            if (tree.get(task) or {}).pop("mark_matches", False):
                tree["data"]["mark_matches"] = True
        return tree

    @model_validator(mode="after")
    def _has_pairs(self) -> Self:
        if self.data.mark_matches and self.task != "squad" and self.classification.pair is None:
            raise ValueError("data.mark_matches needs classification.pair, a second text; got null")
        return self

    @classmethod
    def filled(cls, tree: dict[str, Any]) -> dict[str, Any]:
        init = tree.get("init")
        return tree | {"init": downloaded(init)} if isinstance(init, str) else tree

    @property
    def loss_unit(self) -> str:
        return "end of an answer" if self.task == "squad" else "row"

    def continued_by(self, folder: Path) -> str | None:
        return f"init={folder / 'pretrained'}" if self.plain else None

    @property
    def plain(self) -> bool:
        """True if `init` is a Hugging Face folder, that is, a plain model."""
        return (Path(self.init) / "config.json").is_file()

    @property
    def settled(self) -> Self:
        """The config with scalify for a Hugging Face folder, or with a run's multipliers."""
        optimizer, precision = self.optimizer, self.precision
        if self.plain:
            formats = "float32", "bfloat16", "float16", "fp8"  # under scalify, except float32
            others = ["weights", "moments", "monitor", "initial", "readout"]
            others += [] if precision.policy == "float32" else ["gradients", "exchange"]
            default = PrecisionConfig()
            keys = [key for key in others if getattr(precision, key) != getattr(default, key)]
            if precision.policy not in formats or keys:
                raise RecipeError(
                    f"precision: expected policy {', '.join(formats)}, and no {', '.join(others)}, "
                    f"for the Hugging Face folder {self.init}; got "
                    f"{', '.join([f'policy {precision.policy}', *keys])}; change precision, or "
                    "init with a run of recipe bert"
                )
            if optimizer.umup:
                raise RecipeError(
                    f"optimizer.umup: expected false for the Hugging Face folder {self.init}; got "
                    "true; add optimizer.umup=false optimizer.learning_rate=5e-5"
                )
            own = {} if precision.scalify else PRESETS.get(f"scalify_{precision.policy}", {})
            return self.model_copy(update={"precision": precision.model_copy(update=own)})
        if not is_run(self.init):
            return self  # reading the run raises an error
        if precision.scalify or precision.matmuls:
            raise RecipeError(
                "precision.scalify and precision.matmuls: expected null for the unitscale model in "
                f"init {self.init}; got {precision.scalify} and {precision.matmuls}"
            )
        run = pretraining_of(self.init)
        if run.model.library == "plain":
            raise RecipeError(
                f"init: expected a unitscale model; got library plain in {self.init}; give another"
            )
        if not optimizer.umup or "multipliers" in optimizer.model_fields_set:
            return self
        optimizer = optimizer.model_copy(update={"multipliers": run.optimizer.multipliers})
        return self.model_copy(update={"optimizer": optimizer})
