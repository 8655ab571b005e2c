"""Everything the character-model recipe can be told, each key declared once."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, Strict, model_validator

from unitscale import rules

from ..config import Count, DataConfig, Name, Positive, Section, Whole
from ..optimizerconfig import MultipliersConfig

Parametrization = Literal["regular", "unit"]
Precision = Literal["float32", "float16", "fp8"]


class ModelConfig(Section):
    """The shape of the model, and the formats it computes in."""

    parametrization: Parametrization = Field(
        default="unit", description="plain flax.nnx, or unitscale.nn"
    )
    precision: Precision = Field(
        default="float32",
        description="what activations and gradients are in; fp8: bfloat16 with 8-bit products",
    )
    kind: Literal["conv", "rnn", "attention"] = Field(
        default="rnn", description="what mixes characters in each layer"
    )
    cell: Literal["gru", "lstm", "rhn"] = Field(default="gru", description="the cell of an rnn")
    norm: Literal["pre", "post", "none"] = Field(
        default="pre", description="where branches are normalized"
    )
    residual: Literal["fixed", "running_mean"] = Field(
        default="fixed", description="how the weight tau of each residual branch is chosen"
    )
    tau: Positive = Field(default=0.5, description="the weight of every branch (residual fixed)")
    attention_ratio: Positive = Field(
        default=1.0, description="what tau is multiplied by in branches of attention"
    )
    layers: Count = Field(default=2, description="layers, each a mixing branch and an MLP branch")
    width: Count = Field(default=64, description="size of the residual stream")
    heads: Count = Field(default=4, description="heads of attention; divides the width")
    kernel: Count = Field(default=5, description="characters that a convolution sees")
    mlp_ratio: Count = Field(default=2, description="hidden size of the MLP over the width")

    @property
    def taus(self) -> list[float]:
        """The tau of every residual branch: one that mixes characters and an MLP in each layer."""
        mixing = self.attention_ratio if self.kind == "attention" else 1.0
        taus = rules.residual_taus(self.residual, 2 * self.layers, tau=self.tau)
        return [tau if index % 2 else tau * mixing for index, tau in enumerate(taus)]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.precision == "fp8" and self.parametrization == "regular":
            raise ValueError(
                "precision fp8 needs parametrization unit: a regular model has no scales; "
                "set parametrization: unit, or precision float32 or float16"
            )
        if self.cell == "rhn" and self.parametrization == "regular" and self.kind == "rnn":
            raise ValueError(
                "cell rhn needs parametrization unit: flax.nnx has no such cell; use gru or lstm"
            )
        if self.width % self.heads:
            raise ValueError(f"heads must divide width; got {self.heads} and {self.width}")
        return self


class OptimizerConfig(Section):
    """The optimizer; its learning rate falls linearly to zero."""

    name: Literal["sgd", "adam"] = Field(default="adam", description="the update rule")
    learning_rate: Positive | None = Field(
        default=None, description="the learning rate at the start; null for that of sweep.start"
    )
    momentum: Annotated[float, Strict(), Field(ge=0, lt=1)] = Field(
        default=0.9, description="momentum of sgd; first decay of adam"
    )
    multipliers: MultipliersConfig = Field(
        default_factory=MultipliersConfig,
        description="of learning rates by role, beside u-muP's factors, in a unit model",
    )


class TrainConfig(Section):
    """How long to train and what to leave behind."""

    steps: Count = Field(default=200, description="training steps")
    log_every: Count = Field(default=20, description="steps between metric lines")
    eval_batches: Count = Field(default=4, description="batches of validation text")
    runs_dir: str = Field(
        default="runs", description="the folder in which the run's own folder is made"
    )


class StartConfig(Section):
    """The learning rate in the middle of the first search, for each kind of run."""

    regular_sgd: Positive = Field(default=0.25, description="of a regular model under SGD")
    regular_adam: Positive = Field(default=0.03, description="of a regular model under Adam")
    unit_sgd: Positive = Field(default=0.004, description="of a unit-scaled model under SGD")
    unit_adam: Positive = Field(default=1.0, description="of a unit-scaled model under Adam")


class SweepConfig(Section):
    """The grid, and how learning rates are searched at each of its points."""

    grid: dict[str, list[Any]] = Field(
        default_factory=dict, description="lists of values of dotted keys, such as model.kind"
    )
    seeds: list[Whole] = Field(default=[0], min_length=1, description="seeds to average over")
    factor: Annotated[float, Strict(), Field(gt=1)] = Field(
        default=4.0, description="ratio of neighbouring learning rates"
    )
    rates: Annotated[int, Strict(), Field(ge=3)] = Field(
        default=5, description="learning rates trained at once"
    )
    rounds: Count = Field(
        default=3, description="how often the rates are extended until the best is inside"
    )
    start: StartConfig = Field(default_factory=StartConfig, description="where searches start")


class CharlmConfig(Section):
    """A whole run, and the sweep of runs around it."""

    recipe: Literal["charlm"] = Field(
        default="charlm", description="which recipe this config is of"
    )
    name: Name = Field(
        description="names the run's folder: letters, digits, dot, dash and underscore"
    )
    seed: Whole = Field(default=0, description="seeds the parameters and the order of the text")
    data: DataConfig = Field(default_factory=DataConfig, description="the text and its batches")
    model: ModelConfig = Field(default_factory=ModelConfig, description="the model")
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="the optimizer")
    train: TrainConfig = Field(default_factory=TrainConfig, description="length and outputs")
    sweep: SweepConfig = Field(default_factory=SweepConfig, description="the study around the run")

    @property
    def start_rate(self) -> float:
        """The learning rate of `sweep.start` for this kind of run."""
        return getattr(self.sweep.start, f"{self.model.parametrization}_{self.optimizer.name}")
