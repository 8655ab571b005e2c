"""What every run is told, whatever it trains, each key declared once with its meaning beside it.

The sections are frozen pydantic models. A key that is not declared is an error: a misspelt key
never falls back to a default in silence. `recipes.registry` reads YAML into these models and turns
what pydantic reports into messages that name the full dotted key.
"""

from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from .data import BatchConfig
from .optimizer import OptimizerConfig, StateFormat
from .schema import Count, Flag, Fraction, Name, Section, Whole
from .sweep import SweepConfig

Policy = Literal["float32", "bfloat16", "float16", "fp8", "fp8_dynamic", "fp8_delayed", "mxfp8"]


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
    decouple: Flag = Field(
        default=False, description="compute functions in float16 where scales show that it is safe"
    )


class TrainConfig(Section):
    """How long to train and what to leave behind."""

    steps: Count = Field(default=1000, description="optimizer steps")
    eval_every: Count = Field(default=200, description="steps between validation losses")
    eval_batches: Count = Field(default=16, description="validation batches during training")
    checkpoint_every: Count = Field(default=200, description="steps between checkpoints")
    keep: Count = Field(default=2, description="checkpoints to keep, the newest ones")
    log_every: Count = Field(default=20, description="steps between metric lines")
    logger: Literal["tensorboard", "wandb", "mlflow", "none"] = Field(
        default="tensorboard", description="where metrics go besides metrics.jsonl"
    )
    sample_tokens: Whole = Field(default=200, description="tokens generated at the end; 0 for none")
    sample_prompt: str = Field(default="\n", min_length=1, description="text that they go on from")
    runs_dir: str = Field(
        default="runs", description="the folder in which the run's own folder is made"
    )


class MeshConfig(Section):
    """Devices by what they divide; together they are all that JAX sees."""

    data: Count = Field(default=1, description="devices that divide the batch")
    fsdp: Count = Field(
        default=1, description="devices that divide the batch, parameters and optimizer state"
    )
    context: Count = Field(default=1, description="devices that divide the tokens of a sequence")
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

    renamed: ClassVar[dict[str, str]] = {}
    """Keys of earlier versions, and what to set in their place."""

    recipe: str = Field(description="which recipe this config is of")
    name: Name = Field(
        description="names the run's folder: letters, digits, dot, dash and underscore"
    )
    seed: Whole = Field(
        default=0,
        le=2**32 - 1,
        description="seeds the parameters, the order of the data and dropout",
    )
    policy: Policy = Field(
        default="float32", description="the number formats the model computes in"
    )
    policies: dict[str, Policy] = Field(
        default_factory=dict,
        description="policies of single layers, by patterns of their paths: see nn.set_policies",
    )
    fp8_readout: Flag | Literal["gradients"] = Field(
        default=False,
        description="which products of the readout are in the policy's 8 bits too: false for none, "
        "gradients for those two of its loss, true for the logits as well",
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
    sweep: SweepConfig = Field(
        default_factory=SweepConfig, description="runs around this one, for `recipes sweep`"
    )

    @classmethod
    def filled(cls, tree: dict[str, Any]) -> dict[str, Any]:
        """The keys of a file, with what it leaves to the model that `init` names, not validated."""
        return tree

    @property
    def settled(self) -> Self:
        """The valid config, with what follows from the files that it names."""
        return self

    @property
    def resumed(self) -> Self:
        """The config without what only the first start reads: a checkpoint has the rest."""
        return self

    def kept_in(self, folder: Path) -> Self:
        """The config of the run in a folder: it may have been moved, copied or set aside since."""
        folder = folder.absolute()
        train = self.train.model_copy(update={"runs_dir": str(folder.parent)})
        return self.model_copy(update={"name": folder.name, "train": train})

    @property
    def longest(self) -> int | None:
        """The longest sequence that the model can be given; None for no limit."""
        return None

    @property
    def sequence(self) -> int | None:
        """The tokens of a batch's sequences, which devices can divide; None where it has none."""
        return None

    @property
    def loss_unit(self) -> str:
        """What the loss is a mean over: it is in nats per this."""
        return "example"

    @model_validator(mode="after")
    def _sections_fit(self) -> Self:
        if self.optimizer.warmup_steps >= self.train.steps:
            raise ValueError(
                "optimizer.warmup_steps must be less than train.steps; "
                f"got {self.optimizer.warmup_steps} and {self.train.steps}; shorten the warm-up"
            )
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
        if self.fp8_readout and "fp8" not in self.policy:
            raise ValueError(
                f"fp8_readout needs a policy with FP8 products, such as fp8; got {self.policy}; "
                "change policy or set fp8_readout false"
            )
        if self.fp8_readout == "gradients" and self.policy == "fp8_delayed":
            raise ValueError(
                "fp8_readout gradients needs a policy that keeps no scales, such as fp8; got "
                f"{self.policy}; change policy or set fp8_readout true"
            )
        ways = self.mesh.data * self.mesh.fsdp if self.mesh else 1
        if self.data.batch_size % ways:
            raise ValueError(
                f"mesh.data * mesh.fsdp must divide data.batch_size; got {ways} and "
                f"{self.data.batch_size}; change data.batch_size or the mesh"
            )
        ways = self.mesh.context if self.mesh else 1
        if ways > 1 and (self.sequence is None or self.sequence % ways):
            raise ValueError(
                "mesh.context must divide the tokens of a sequence, data.sequence_length of "
                f"recipes gpt and bert; got {ways} and {self.sequence}; set mesh.context 1, or "
                "another length"
            )
        return self
