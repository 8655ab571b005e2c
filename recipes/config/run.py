"""The config of a run: what every recipe can be told, each key declared once.

Sections are frozen pydantic models. A key that is not declared is an error, so that a misspelt key
never falls back to a default in silence. `recipes.registry` reads YAML into these models.
"""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, Strict, field_validator, model_validator

# Strict: YAML has integers, reals and booleans, so `layers: true` and `layers: "4"` are slips.
Count = Annotated[int, Strict(), Field(gt=0)]
Whole = Annotated[int, Strict(), Field(ge=0)]
Positive = Annotated[float, Strict(), Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Strict(), Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Strict(), Field(ge=0, lt=1)]
Flag = Annotated[bool, Strict()]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]

Policy = Literal["float32", "bfloat16", "float16", "fp8", "fp8_dynamic", "fp8_delayed", "mxfp8"]
WideFormat = Literal["float32", "bfloat16", "float16"]
NarrowFormat = Literal["float8_e4m3fn", "float8_e5m2"]
Format = WideFormat | NarrowFormat


class Section(BaseModel):
    """A part of a config: frozen, and without room for keys that are not declared."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


PRESETS: dict[str, dict[str, Any]] = {
    "fp8_5_bytes": {
        "policy": "fp8",
        "weights": "float16",
        "moments": ["float8_e4m3fn", "float16"],
        "rounding": "stochastic",
        "min_size": 16384,
    },
    "scalify_bfloat16": {"scalify": "bfloat16"},
    "scalify_float16": {"scalify": "float16"},
    "scalify_fp8": {"scalify": "float16", "matmuls": "fp8"},
}
"""Keys by the name of a preset; the name of a policy stands for that policy alone."""


def expand_preset(precision: Any) -> Any:
    """Return the keys of the `precision` section that a preset's name stands for."""
    if not isinstance(precision, str):
        return precision
    return PRESETS.get(precision, {"policy": precision})


class PrecisionConfig(Section):
    """Number formats of all that a run computes and keeps."""

    policy: Policy = Field(default="float32", description="number formats that layers compute in")
    layers: dict[str, Policy] = Field(
        default_factory=dict,
        description="policies of single layers, by patterns of their paths (nn.set_policies)",
    )
    readout: Flag | Literal["gradients"] = Field(
        default=False,
        description="which matmuls of the readout are in the policy's 8 bits too: false for none, "
        "gradients for those two of its loss, true for the logits as well",
    )
    matmuls: Literal["fp8", "fp8_dynamic", "fp8_delayed", "qwix"] | None = Field(
        default=None,
        description="FP8 matmuls in the layers of a plain model: fp8 under scalify, or a preset of "
        "unitscale.nn.convert, or through qwix; null for none",
    )
    scalify: WideFormat | None = Field(
        default=None,
        description="train a plain model under unitscale.scalify, with parameters, optimizer state "
        "and activations in this format; null for not",
    )
    weights: WideFormat | None = Field(
        default=None, description="format that weights are kept in, with a scale; null for float32"
    )
    moments: Annotated[list[Format], Field(min_length=2, max_length=2)] | None = Field(
        default=None,
        description="formats of the first and second moment, with scales; null for float32",
    )
    rounding: Literal["nearest", "stochastic"] = Field(
        default="nearest", description="how weights and moments are rounded into their formats"
    )
    min_size: Whole = Field(
        default=0,
        description="parameters and moments of fewer entries (those of stacked layers together) "
        "stay in float32: they are few bytes, and each ten small kernels on a GPU",
    )
    frozen: NarrowFormat | None = Field(
        default=None,
        description="format of the linear layers that LoRA leaves frozen, with a power-of-two "
        "scale for each output; null for the policy's",
    )
    exchange: Format | None = Field(
        default=None, description="format that devices exchange gradients in; null: as XLA does"
    )
    loss_scale: Positive | Literal["dynamic"] | None = Field(
        default=None,
        description="factor of the loss while it is differentiated, for comparison: a number, or "
        "dynamic for one that halves where a gradient is not finite; null for none",
    )
    monitor: Fraction | None = Field(
        default=None,
        description="count saturated elements of FP8 tensors as metrics, and allow this share of a "
        "tensor, such as 1e-4; null for not",
    )
    rebalance: Flag = Field(
        default=False,
        description="at log lines, double the scales of tensors that saturate above the monitor's "
        "share",
    )

    @property
    def scaled_state(self) -> bool:
        """True if weights or moments are kept in formats of their own."""
        return self.weights is not None or self.moments is not None

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, precision: Any) -> Any:
        return expand_preset(precision)

    @model_validator(mode="after")
    def _keys_agree(self) -> Self:
        if self.rounding != "nearest" and not self.scaled_state:
            raise ValueError(
                "rounding stochastic needs weights or moments; got null for both; set them, or "
                "rounding nearest"
            )
        if self.monitor is not None and self.policy not in ("fp8", "fp8_delayed"):
            raise ValueError(
                "monitor needs a policy whose scales are not those of the data: fp8 or "
                f"fp8_delayed; got policy {self.policy}; change policy or set monitor null"
            )
        if self.rebalance and (self.monitor is None or self.policy != "fp8"):
            raise ValueError(
                "rebalance needs monitor, and policy fp8, whose scales do not follow the data by "
                f"themselves; got monitor {self.monitor} and policy {self.policy}; set rebalance "
                "false"
            )
        if self.readout and "fp8" not in self.policy:
            raise ValueError(
                f"readout needs a policy with FP8 matmuls, such as fp8; got policy {self.policy}; "
                "change policy or set readout false"
            )
        if self.readout == "gradients" and self.policy == "fp8_delayed":
            raise ValueError(
                "readout gradients needs a policy that keeps no scales, such as fp8; got policy "
                "fp8_delayed; change policy or set readout true"
            )
        if self.scalify and self.scaled_state:
            raise ValueError(
                "scalify stores parameters and optimizer state itself; got weights "
                f"{self.weights} and moments {self.moments}; set both null"
            )
        if self.matmuls is not None and (self.matmuls == "fp8") != (self.scalify is not None):
            raise ValueError(
                "matmuls fp8 needs scalify, and fp8_dynamic, fp8_delayed and qwix need scalify "
                f"null; got matmuls {self.matmuls} and scalify {self.scalify}; change one of them"
            )
        return self


Role = Literal["weight", "readout", "embedding", "bias", "norm"]
# u-muP's factor of a gain or a bias is 1: at the rate that is best for weights, each update is
# larger than the gain itself. Gains then reach a hundred, activations leave unit size with them,
# and after some thousand steps 8 bits do not hold them (u-muP's authors train no gains).
_MULTIPLIERS = {"weight": 1.0, "readout": 1.0, "embedding": 1.0, "bias": 0.03, "norm": 0.03}


class OptimizerConfig(Section):
    """The optimizer and its learning-rate schedule."""

    name: Literal["adam", "adamw", "sgd", "lion", "muon"] = Field(
        default="adamw",
        description="the update rule; muon is Adam for all but hidden kernels, and 1/32 as large",
    )
    learning_rate: Positive = Field(default=2e-3, description="the peak learning rate")
    warmup_steps: Whole = Field(default=0, description="steps of linear warm-up from 0")
    schedule: Literal["cosine", "linear", "constant"] = Field(
        default="cosine", description="how the learning rate falls after the warm-up"
    )
    final_fraction: Annotated[float, Strict(), Field(ge=0, le=1)] = Field(
        default=0.1, description="the last learning rate over the peak (cosine and linear)"
    )
    b1: Fraction = Field(default=0.9, description="decay of the first moment; momentum of sgd")
    b2: Fraction = Field(default=0.95, description="decay of the second moment")
    eps: NonNegative | None = Field(
        default=None,
        description="added to the root of the second moment by Adam; null: 2^-12 with umup, whose "
        "gradients are of size 1, else 1e-8",
    )
    weight_decay: NonNegative = Field(
        default=0.0,
        description="decoupled weight decay (not of adam, sgd); with umup, the share each step "
        "removes",
    )
    clip_norm: Positive | None = Field(
        default=None, description="largest global norm of the gradient"
    )
    skip_nonfinite: Whole = Field(
        default=0, description="steps in a row left out where loss or gradient is not finite"
    )
    umup: Flag = Field(
        default=True, description="u-muP learning rates by each parameter's role, fan-in and depth"
    )
    multipliers: dict[Role, NonNegative] = Field(
        default_factory=dict,
        description="with umup, further factors of learning rates by role: weight, readout, "
        "embedding (1 unless given), bias and norm (0.03)",
    )

    @property
    def adam_eps(self) -> float:
        """The epsilon of Adam.

        Gradients of unit-scaled models begin at size 1, far above those of a mean loss. Beside them
        1e-8 is nothing: parameters whose gradients only shrink, such as the readout's columns of
        tokens that never occur, would take whole steps until 16 bits lose these.
        """
        if self.eps is not None:
            return self.eps
        return 2.0**-12 if self.umup else 1e-8

    @field_validator("multipliers", mode="before")
    @classmethod
    def _every_role(cls, given: Any) -> Any:
        return _MULTIPLIERS | given if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _keys_agree(self) -> Self:
        own = [f for role, f in self.multipliers.items() if f not in (1, _MULTIPLIERS[role])]
        if not self.umup and own:
            raise ValueError(
                "multipliers need umup true, which knows the roles of parameters; got umup false; "
                "remove them, or set umup true"
            )
        if self.name == "muon" and not self.umup:
            raise ValueError(
                "name muon needs umup true, which knows hidden kernels from other matrices; got "
                "umup false; set umup true, or another name"
            )
        if self.weight_decay and self.name in ("adam", "sgd"):
            raise ValueError(
                f"weight_decay needs name adamw, lion or muon; got name {self.name} and "
                f"weight_decay {self.weight_decay}; set name adamw or weight_decay 0"
            )
        return self


class TrainConfig(Section):
    """Length of training, and its outputs."""

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


class BatchConfig(Section):
    """Batches of any data."""

    batch_size: Count = Field(default=16, description="examples per step, over all processes")
    micro_batches: Count = Field(
        default=1,
        description="parts of the batch, computed one after another to save memory; gradients "
        "are accumulated, and the step is that of the whole batch",
    )

    @property
    def step_size(self) -> int:
        """Size of a batch, in `step_unit`."""
        return self.batch_size

    @property
    def step_unit(self) -> str:
        """Unit of `step_size`, and of speed."""
        return "examples"


class MeshConfig(Section):
    """Devices by what they divide; together they are all that JAX sees."""

    data: Count = Field(default=1, description="devices that divide the batch")
    fsdp: Count = Field(
        default=1, description="devices that divide the batch, parameters and optimizer state"
    )
    context: Count = Field(default=1, description="devices that divide the tokens of a sequence")
    tensor: Count = Field(default=1, description="devices that divide matrices by their outputs")


class SweepConfig(Section):
    """A grid of runs, and how learning rates are searched at each of its points."""

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
    when: dict[str, dict[str, Any] | None] = Field(
        default_factory=dict,
        description="further values of dotted keys, for the points of which words such as "
        "`model.library=plain optimizer.name=sgd` all hold; null leaves such points out; "
        "optimizer.learning_rate is where the search of a point starts",
    )


class RunConfig(Section):
    """Config of a run: the keys that all recipes have."""

    renamed: ClassVar[dict[str, str]] = {}
    """Keys of earlier versions, and what to set in their place, beside `MOVED`."""
    constants: ClassVar[dict[str, Any]] = {}
    """Keys of earlier versions that cannot be set any more, and the value that they have now."""

    recipe: str = Field(description="which recipe this config is of")
    name: Name = Field(
        description="names the run's folder: letters, digits, dot, dash and underscore"
    )
    seed: Whole = Field(
        default=0,
        le=2**32 - 1,
        description="seeds the parameters, the order of the data and dropout",
    )
    precision: PrecisionConfig = Field(
        default_factory=PrecisionConfig,
        description="number formats: a section, or the name of a policy or of a preset "
        f"({', '.join(PRESETS)})",
    )
    data: BatchConfig = Field(default_factory=BatchConfig, description="the batches")
    optimizer: OptimizerConfig = Field(
        default_factory=OptimizerConfig, description="the optimizer and its schedule"
    )
    train: TrainConfig = Field(default_factory=TrainConfig, description="length and outputs")
    mesh: MeshConfig | None = Field(default=None, description="many devices; null for one")
    sweep: SweepConfig = Field(
        default_factory=SweepConfig, description="runs around this one, for `recipes sweep`"
    )

    @classmethod
    def filled(cls, tree: dict[str, Any]) -> dict[str, Any]:
        """The keys of a file, with what it leaves to the model that `init` names, not validated."""
        return tree

    @classmethod
    def upgraded(cls, tree: Any) -> Any:
        """The config that a run of an earlier version has kept, with its keys of today."""
        if not isinstance(tree, dict) or "precision" in tree:
            return tree
        tree = {k: dict(value) if isinstance(value, dict) else value for k, value in tree.items()}

        def holder_of(key: str) -> tuple[dict[str, Any], str]:
            section, _, name = key.rpartition(".")
            holder = tree.get(section) if section else tree
            return holder if isinstance(holder, dict) else {}, name

        precision = {"matmuls": "fp8"} if (tree.get("scalify") or {}).get("products") else {}
        for old, new in MOVED.items():
            holder, name = holder_of(old)
            if (value := holder.pop(name, None)) is not None:
                precision.setdefault(new.removeprefix("precision."), value)
        for key in ("scalify", "monitor", "optimizer.loss_scale_interval"):
            holder, name = holder_of(key)
            holder.pop(name, None)
        for key, value in cls.constants.items():
            holder, name = holder_of(key)
            if name in holder and holder[name] == value:
                del holder[name]
        return tree | {"precision": precision}

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
        """Unit of the loss, which is in nats per this."""
        return "example"

    @model_validator(mode="after")
    def _sections_fit(self) -> Self:
        if self.optimizer.warmup_steps >= self.train.steps:
            raise ValueError(
                "optimizer.warmup_steps must be less than train.steps; "
                f"got {self.optimizer.warmup_steps} and {self.train.steps}; shorten the warm-up"
            )
        if self.precision.loss_scale == "dynamic" and self.optimizer.skip_nonfinite:
            raise ValueError(
                "precision.loss_scale dynamic leaves out steps that are not finite itself; got "
                f"optimizer.skip_nonfinite {self.optimizer.skip_nonfinite}; set it 0"
            )
        frozen = self.precision.frozen
        if frozen and (getattr(self, "lora", None) is None or self.precision.scalify):
            raise ValueError(
                "precision.frozen needs lora, whose frozen weights it is the format of, and "
                f"precision.scalify null; got {frozen}; set it null"
            )
        if self.precision.exchange is not None and self.mesh is None:
            raise ValueError(
                "precision.exchange needs mesh, the devices that exchange gradients; got "
                f"{self.precision.exchange} and mesh null; set mesh.data"
            )
        ways = self.mesh.data * self.mesh.fsdp if self.mesh else 1
        parts = ways * self.data.micro_batches
        if self.data.batch_size % parts:
            raise ValueError(
                "data.micro_batches * mesh.data * mesh.fsdp must divide data.batch_size; got "
                f"{parts} and {self.data.batch_size}; change one of them"
            )
        ways = self.mesh.context if self.mesh else 1
        if ways > 1 and (self.sequence is None or self.sequence % ways):
            raise ValueError(
                "mesh.context must divide the tokens of a sequence, data.sequence_length of "
                f"recipes gpt and bert; got {ways} and {self.sequence}; set mesh.context 1, or "
                "another length"
            )
        return self


FORMAT_KEYS = ("precision", "optimizer.skip_nonfinite")
"""The keys of a config that may change, on request, when a run is resumed."""

MOVED = {
    "policy": "precision.policy",
    "policies": "precision.layers",
    "fp8_readout": "precision.readout",
    "model.products": "precision.matmuls",
    "scalify.storage": "precision.scalify",
    "lora.base": "precision.frozen",
    "mesh.gradients": "precision.exchange",
    "monitor.limit": "precision.monitor",
    "monitor.rebalance": "precision.rebalance",
    **{
        f"optimizer.{name}": f"precision.{name}"
        for name in ("weights", "moments", "rounding", "min_size", "loss_scale")
    },
}
"""Keys of earlier versions, and their names now."""
REMOVED = {
    "scalify": "precision.scalify",
    "scalify.products": "precision.matmuls",
    "scalify.gradients": "precision.matmuls",
    "monitor": "precision.monitor",
    "optimizer.loss_scale_interval": "precision.loss_scale dynamic, which doubles after 2000 steps",
}
"""Keys of earlier versions that are gone, and what to set in their place."""
