"""What decoders of the Llama family have beyond a GPT: rotary positions, windows, norms, caps."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from .schema import Count, Flag, Positive, Section, Whole


class RopeConfig(Section):
    """Rotary position embedding."""

    base: Positive = Field(default=10000.0, description="what the wavelengths are powers of")
    scaling: Literal["none", "linear", "llama3", "yarn"] = Field(
        default="none",
        description="all frequencies over `factor` (linear), or those of long wavelengths (llama3, "
        "yarn)",
    )
    factor: Positive = Field(default=1.0, description="what frequencies are divided by")
    low_factor: Positive = Field(
        default=1.0, description="llama3: wavelengths past context over this are scaled wholly"
    )
    high_factor: Positive = Field(
        default=4.0, description="llama3: wavelengths below context over this are kept"
    )
    context: Count = Field(
        default=8192,
        description="llama3, yarn: the longest sequence before it was scaled",
    )
    fast: Positive = Field(
        default=32.0, description="yarn: frequencies that turn more often in context are kept"
    )
    slow: Positive = Field(
        default=1.0, description="yarn: those that turn less often are scaled wholly"
    )
    truncate: Flag = Field(
        default=True, description="yarn: the band between the two is of whole pairs of features"
    )
    attention_factor: Positive = Field(
        default=1.0, description="yarn: what rotated queries and keys are multiplied by"
    )

    @model_validator(mode="after")
    def _bands_have_a_width(self) -> Self:
        if self.scaling == "llama3" and self.high_factor <= self.low_factor:
            raise ValueError(
                "rope scaling llama3 needs a high_factor above its low_factor; got "
                f"{self.high_factor} and {self.low_factor}; correct them"
            )
        if self.scaling == "yarn" and (self.fast < self.slow or self.base <= 1):
            raise ValueError(
                "rope scaling yarn needs a beta_fast of at least its beta_slow, and a base above "
                f"1; got {self.fast}, {self.slow} and {self.base}; correct them"
            )
        return self


class DecoderConfig(Section):
    """A decoder of the Llama family, as read from its folder; the defaults are those of the GPT."""

    head_dim: Count | None = Field(
        default=None, description="features of a head; null for width over heads"
    )
    activation: Literal["silu", "gelu", "gelu_tanh"] = Field(
        default="silu", description="of the gate of a gated MLP"
    )
    biases: Annotated[tuple[Literal["qkv", "out", "mlp"], ...], Field(max_length=3)] = Field(
        default=(), description="which linear layers add one"
    )
    query_key_norms: Flag = Field(default=False, description="RMSNorm of each query and key")
    post_norms: Flag = Field(default=False, description="a norm after each branch as well")
    norm_offset: Flag = Field(default=False, description="RMSNorm multiplies by 1 + weight")
    embedding_scale: Flag = Field(
        default=False, description="multiply embeddings by the root of the width"
    )
    attention_scale: Positive | None = Field(
        default=None, description="what scores are multiplied by; null for 1 / sqrt(head_dim)"
    )
    attention_cap: Positive | None = Field(
        default=None, description="scores s become cap tanh(s / cap); null for none"
    )
    logit_cap: Positive | None = Field(default=None, description="the same of the logits")
    window: Count | None = Field(
        default=None, description="tokens that a local layer attends to, its own included"
    )
    local_layers: tuple[Whole, ...] = Field(
        default=(), description="layers that attend to the window only, counted from 0"
    )
    rope: RopeConfig = Field(default_factory=RopeConfig, description="rotary positions")
    local_rope: RopeConfig | None = Field(
        default=None, description="those of local layers; null for the same"
    )

    @model_validator(mode="after")
    def _local_layers_have_a_window(self) -> Self:
        if self.local_layers and self.window is None:
            raise ValueError(
                f"local layers need a window; got layers {list(self.local_layers)} and no window; "
                "set the window, or remove the layers"
            )
        return self
