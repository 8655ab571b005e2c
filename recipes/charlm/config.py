"""Everything the character-model recipe can be told, each key declared once."""

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from ..config import (
    Count,
    DataConfig,
    OptimizerConfig,
    Positive,
    RunConfig,
    Section,
)

# Of this recipe, where a config names no other; the rate is that of a unit-scaled model.
_OPTIMIZER = {
    "name": "adam",
    "learning_rate": 1.0,
    "schedule": "linear",
    "final_fraction": 0.0,
    "b2": 0.999,
}


class CharlmModelConfig(Section):
    """The shape of the model."""

    library: Literal["unitscale", "plain"] = Field(
        default="unitscale",
        description="unitscale.nn, or the same model in plain flax.nnx as a baseline",
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

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.cell == "rhn" and self.library == "plain" and self.kind == "rnn":
            raise ValueError(
                "cell rhn needs library unitscale: flax.nnx has no such cell; use gru or lstm"
            )
        if self.width % self.heads:
            raise ValueError(f"heads must divide width; got {self.heads} and {self.width}")
        return self


class CharlmConfig(RunConfig):
    """A whole run of a character model."""

    renamed: ClassVar[dict[str, str]] = {
        "model.parametrization": "model.library (plain for regular, unitscale for unit)",
        "model.precision": "precision.policy",
        "optimizer.momentum": "optimizer.b1",
        "sweep.start": "sweep.when, with optimizer.learning_rate for each kind of point",
    }

    recipe: Literal["charlm"] = Field(description="which recipe this config is of")
    data: DataConfig = Field(default_factory=DataConfig, description="the text and its batches")
    model: CharlmModelConfig = Field(default_factory=CharlmModelConfig, description="the model")
    optimizer: OptimizerConfig = Field(
        default_factory=lambda: OptimizerConfig.model_validate(_OPTIMIZER),
        description="the optimizer and its schedule",
    )

    @property
    def loss_unit(self) -> str:
        return "character"

    @field_validator("optimizer", mode="before")
    @classmethod
    def _own_defaults(cls, optimizer: Any) -> Any:
        """Also where a config names some of the section's keys."""
        return _OPTIMIZER | optimizer if isinstance(optimizer, dict) else optimizer

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        plain = self.model.library == "plain"
        if self.data.tokenizer.kind != "byte":
            raise ValueError(
                "data.tokenizer of a character model needs kind byte; got kind "
                f"{self.data.tokenizer.kind}; remove the key"
            )
        precision = self.precision
        if plain and "fp8" in precision.policy:
            raise ValueError(
                f"precision.policy {precision.policy} needs model.library unitscale: a plain model "
                "has no scales; set model.library unitscale, or policy float32 or float16"
            )
        if plain and (self.optimizer.umup or precision.weights is not None):
            raise ValueError(
                "optimizer.umup and precision.weights need model.library unitscale; got "
                "model.library plain; set optimizer.umup false and precision.weights null"
            )
        if precision.scalify or precision.matmuls:
            raise ValueError(
                "precision.scalify and precision.matmuls are not for character models, whose "
                "formats are those of precision.policy; set both null"
            )
        return self
