"""The config of recipe charlm."""

from typing import ClassVar, Literal, Self

from pydantic import model_validator

from ..config import Count, DataConfig, FixedResidual, Library, OptimizerConfig, RunConfig, Section


class CharlmModelConfig(Section):
    """The shape of the model."""

    library: Library = "unitscale"
    """Library of the model: unitscale.nn, or plain flax.nnx as a baseline."""
    kind: Literal["conv", "rnn", "attention"] = "rnn"
    """Kind of layers across characters."""
    cell: Literal["gru", "lstm", "rhn"] = "gru"
    """Recurrent cell (rnn)."""
    norm: Literal["pre", "post", "none"] = "pre"
    """LayerNorm at the start of each branch, after each residual sum, or none."""
    residual: FixedResidual = FixedResidual()
    """Weights of residual branches."""
    layers: Count = 2
    """Number of layers, each of a branch of the given kind and an MLP branch."""
    width: Count = 64
    """Size of the residual stream."""
    heads: Count = 4
    """Number of attention heads (attention)."""
    kernel: Count = 5
    """Kernel size in characters (conv)."""
    mlp_ratio: Count = 2
    """Hidden size of the MLP as a multiple of the width."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.cell == "rhn" and self.library == "plain" and self.kind == "rnn":
            raise ValueError("cell rhn needs library unitscale; use gru or lstm")
        if self.width % self.heads:
            raise ValueError(f"heads must divide width; got {self.heads} and {self.width}")
        return self


class CharlmConfig(RunConfig):
    """Config of a character model's run."""

    moved: ClassVar[dict[str, str]] = {
        "model.residual": "model.residual.scheme",
        "model.tau": "model.residual.tau",
        "model.attention_ratio": "model.residual.attention_ratio",
    }
    converts = False
    loss_unit = "character"

    recipe: Literal["charlm"]
    """Name of the recipe."""
    data: DataConfig = DataConfig()
    """The text and its batches."""
    model: CharlmModelConfig = CharlmModelConfig()
    """The shape of the model."""
    optimizer: OptimizerConfig = OptimizerConfig(
        name="adam", learning_rate=1.0, schedule="linear", final_fraction=0.0, b2=0.999
    )
    """The optimizer and its schedule."""

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        if self.data.tokenizer.kind != "byte":
            raise ValueError("data.tokenizer of a character model must be of kind byte; remove it")
        if self.model.library == "plain" and self.precision.weights is not None:
            raise ValueError("precision.weights needs model.library unitscale; set it null")
        return self
