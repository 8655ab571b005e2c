"""Everything a recipe can be told, each key declared once, with its meaning beside it.

The sections are frozen pydantic models. A key that is not declared here is an error: a misspelt
key never falls back to a default in silence. `recipes.configfile` reads YAML into these models and
turns what pydantic reports into messages that name the full dotted key.
"""

from typing import Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from .dataconfig import (
    BYTES as BYTES,
    BatchConfig as BatchConfig,
    DataConfig as DataConfig,
    TokenizerConfig as TokenizerConfig,
    check_context,
    check_vocab,
    with_vocab,
)
from .optimizerconfig import OptimizerConfig as OptimizerConfig, StateFormat
from .schema import (
    Count as Count,
    Flag as Flag,
    Fraction as Fraction,
    Name as Name,
    NonNegative as NonNegative,
    Positive as Positive,
    Section as Section,
    Whole as Whole,
)

Policy = Literal["float32", "bfloat16", "float16", "fp8", "fp8_dynamic", "fp8_delayed", "mxfp8"]


class ResidualConfig(Section):
    """How a residual branch is weighed against the stream it joins (unitscale models)."""

    scheme: Literal["fixed", "running_mean", "depth"] = Field(
        default="depth", description="how the weight tau of each residual branch is chosen"
    )
    tau: Positive | None = Field(
        default=None,
        description="the weight of every branch; needed by, and only read under, scheme fixed",
    )
    mult: Positive = Field(
        default=1.0, description="weight of all branches together (scheme depth)"
    )
    attention_ratio: Positive = Field(
        default=1.0, description="weight of attention branches over MLP branches (scheme depth)"
    )

    @model_validator(mode="after")
    def _tau_belongs_to_fixed(self) -> Self:
        if (self.scheme == "fixed") != (self.tau is not None):
            raise ValueError(
                "tau is set when scheme is fixed, and only then; "
                f"got scheme {self.scheme} and tau {self.tau}; "
                f"{'set tau, such as 0.5' if self.tau is None else 'remove tau'}"
            )
        return self


class ModelConfig(Section):
    """The shape of the GPT."""

    library: Literal["unitscale", "plain"] = Field(
        default="unitscale",
        description="unitscale.nn, or the same model in plain flax.nnx as a baseline",
    )
    vocab: Count = Field(
        default=BYTES, description="number of token ids; null for those of data.tokenizer"
    )
    width: Count = Field(default=128, description="size of the residual stream")
    layers: Count = Field(default=4, description="number of Transformer layers")
    heads: Count = Field(default=4, description="number of attention heads")
    kv_heads: Count | None = Field(
        default=None,
        description="heads of keys and values (grouped-query attention); null for `heads`",
    )
    mlp: Literal["plain", "gated"] = Field(
        default="plain", description="gelu MLP, or gated silu MLP"
    )
    mlp_ratio: Positive = Field(default=4.0, description="hidden size of the MLP over the width")
    norm: Literal["rms", "layer"] = Field(default="rms", description="RMSNorm or LayerNorm")
    norm_eps: Positive | None = Field(default=None, description="of plain models; null: 1e-6")
    bias: Flag = Field(default=False, description="whether linear layers add a bias")
    positions: Literal["rope", "learned"] = Field(default="rope", description="position encoding")
    context: Count | None = Field(
        default=None,
        description="longest sequence of learned positions; null for data.sequence_length",
    )
    tied_readout: Flag = Field(default=False, description="use the embedding table as the readout")
    dropout: Fraction = Field(
        default=0.0, description="share of activations dropped in each branch"
    )
    residual: ResidualConfig = Field(default_factory=ResidualConfig, description="residual weights")

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def hidden(self) -> int:
        return round(self.width * self.mlp_ratio)

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.width % self.heads:
            raise ValueError(
                f"heads must divide width; got heads {self.heads} and width {self.width}; "
                f"use heads {_nearest_divisor(self.width, self.heads)}"
            )
        if self.positions == "rope" and self.head_dim % 2:
            raise ValueError(
                "rope needs an even head size (width / heads); "
                f"got width {self.width} and heads {self.heads}, a head size of {self.head_dim}; "
                "change heads, or use positions learned"
            )
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ValueError(
                f"kv_heads must divide heads; got kv_heads {self.kv_heads} and heads {self.heads}; "
                f"use kv_heads {_nearest_divisor(self.heads, self.kv_heads)}"
            )
        if self.hidden < 1:
            raise ValueError(
                "mlp_ratio * width must be at least 1; "
                f"got mlp_ratio {self.mlp_ratio} and width {self.width}; use a larger mlp_ratio"
            )
        return self


class ScalifyConfig(Section):
    """Formats of a plain model that trains under `unitscale.scalify`."""

    storage: Literal["float32", "bfloat16", "float16"] = Field(
        default="float16", description="format of parameters, optimizer state and activations"
    )
    products: Literal["float8_e4m3fn", "float8_e5m2"] | None = Field(
        default=None, description="format of the operands of linear layers; null for storage"
    )
    gradients: Literal["float8_e4m3fn", "float8_e5m2"] | None = Field(
        default=None, description="format of their output's gradient; null for storage"
    )


class TrainConfig(Section):
    """How long to train and what to leave behind."""

    steps: Count = Field(default=1000, description="optimizer steps")
    eval_every: Count = Field(default=200, description="steps between validation losses")
    eval_batches: Count = Field(default=16, description="validation batches during training")
    checkpoint_every: Count = Field(default=200, description="steps between checkpoints")
    keep: Count = Field(default=2, description="checkpoints to keep, the newest ones")
    log_every: Count = Field(default=20, description="steps between metric lines")
    sample_tokens: Whole = Field(default=200, description="tokens generated at the end; 0 for none")
    runs_dir: str = Field(
        default="runs", description="the folder in which the run's own folder is made"
    )


class MeshConfig(Section):
    """Devices by what they divide; together they are all that JAX sees."""

    data: Count = Field(default=1, description="devices that divide the batch")
    fsdp: Count = Field(
        default=1, description="devices that divide the batch, parameters and optimizer state"
    )
    tensor: Count = Field(default=1, description="devices that divide matrices by their outputs")
    gradients: StateFormat | None = Field(
        default=None, description="format that devices exchange gradients in; null: as XLA does"
    )


class MonitorConfig(Section):
    """What to do about elements of FP8 tensors that are beyond the format's largest value."""

    limit: Fraction = Field(
        default=1e-4, description="share of a tensor's elements that may saturate"
    )
    rebalance: Flag = Field(
        default=False, description="double the scales of tensors above the limit, at log lines"
    )


class RunConfig(Section):
    """What every run of `recipes.train` is told, whatever it trains."""

    recipe: str = Field(description="which recipe this config is of")
    name: Name = Field(
        description="names the run's folder: letters, digits, dot, dash and underscore"
    )
    seed: Whole = Field(
        default=0, description="seeds the parameters, the order of the data and dropout"
    )
    policy: Policy = Field(
        default="float32", description="the number formats the model computes in"
    )
    data: BatchConfig = Field(default_factory=BatchConfig, description="the batches")
    optimizer: OptimizerConfig = Field(
        default_factory=OptimizerConfig, description="the optimizer and its schedule"
    )
    scalify: ScalifyConfig | None = Field(
        default=None, description="train the plain model under unitscale.scalify; null for not"
    )
    train: TrainConfig = Field(default_factory=TrainConfig, description="length and outputs")
    mesh: MeshConfig | None = Field(default=None, description="many devices; null for one")
    monitor: MonitorConfig | None = Field(
        default=None, description="count saturated elements of FP8 tensors as metrics; null for not"
    )

    @property
    def longest(self) -> int | None:
        """The longest sequence that the model can be given; None for no limit."""
        return None

    @property
    def loss_unit(self) -> str:
        """What the loss is a mean over: it is in nats per this."""
        return "token"

    @model_validator(mode="after")
    def _warmup_ends(self) -> Self:
        if self.optimizer.warmup_steps >= self.train.steps:
            raise ValueError(
                "optimizer.warmup_steps must be less than train.steps; "
                f"got {self.optimizer.warmup_steps} and {self.train.steps}; shorten the warm-up"
            )
        return self

    @model_validator(mode="after")
    def _monitor_has_scales(self) -> Self:
        if self.monitor and self.policy not in ("fp8", "fp8_delayed"):
            raise ValueError(
                "monitor needs a policy whose scales are not those of the data: fp8 or "
                f"fp8_delayed; got policy {self.policy}; change policy or set monitor null"
            )
        if self.monitor and self.monitor.rebalance and self.policy != "fp8":
            raise ValueError(
                f"monitor.rebalance needs policy fp8; got policy {self.policy}, whose scales "
                "follow the data by themselves; set monitor.rebalance false"
            )
        return self

    @model_validator(mode="after")
    def _mesh_divides_batch(self) -> Self:
        ways = self.mesh.data * self.mesh.fsdp if self.mesh else 1
        if self.data.batch_size % ways:
            raise ValueError(
                f"mesh.data * mesh.fsdp must divide data.batch_size; got {ways} and "
                f"{self.data.batch_size}; change data.batch_size or the mesh"
            )
        return self


class Config(RunConfig):
    """A whole run of a GPT."""

    recipe: Literal["gpt"] = Field(default="gpt", description="which recipe this config is of")
    data: DataConfig = Field(default_factory=DataConfig, description="the text and its batches")
    model: ModelConfig = Field(default_factory=ModelConfig, description="the shape of the model")
    init: str | None = Field(
        default=None, description="a Hugging Face folder of GPT-2 to start from; null for none"
    )

    @property
    def context(self) -> int:
        """The longest sequence that learned positions cover."""
        return self.model.context or self.data.sequence_length

    @property
    def longest(self) -> int | None:
        return self.context if self.model.positions == "learned" else None

    @field_validator("model", mode="before")
    @classmethod
    def _vocab_of_tokenizer(cls, model: Any, info: ValidationInfo) -> Any:
        """Fills in `vocab`, so that a run's config tells its model's shape by itself."""
        return with_vocab(model, info.data.get("data"))

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        check_vocab(self.model.vocab, self.data.tokenizer)
        if self.model.library == "plain" and "fp8" in self.policy:
            raise ValueError(
                f"policy {self.policy} needs model.library unitscale; got model.library plain; "
                "use policy float32, bfloat16 or float16, or model.library unitscale"
            )
        if self.model.library != "plain" and self.model.norm_eps is not None:
            raise ValueError("model.norm_eps needs model.library plain; got unitscale; set it null")
        if self.model.library == "plain" and self.optimizer.umup:
            raise ValueError(
                "optimizer.umup needs model.library unitscale; got model.library plain; "
                "set optimizer.umup false"
            )
        if self.scalify and (self.model.library != "plain" or self.policy != "float32"):
            raise ValueError(
                "scalify needs model.library plain and policy float32: the program is plain "
                f"float32, and its formats are those of scalify; got {self.model.library} and "
                f"{self.policy}; set model.library plain and policy float32"
            )
        if self.scalify and (self.optimizer.weights or self.optimizer.moments):
            raise ValueError(
                "scalify stores parameters and optimizer state itself; got optimizer.weights "
                f"{self.optimizer.weights} and optimizer.moments {self.optimizer.moments}; set "
                "both null, and scalify.storage instead"
            )
        if self.model.library == "plain" and self.optimizer.weights is not None:
            raise ValueError(
                "optimizer.weights needs model.library unitscale; got model.library plain; "
                "set optimizer.weights null (optimizer.moments works with both)"
            )
        check_context(self.model.context, self.data.sequence_length)
        return self


def _nearest_divisor(number: int, wanted: int) -> int:
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return min(divisors, key=lambda d: (abs(d - wanted), -d))
